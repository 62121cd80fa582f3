#!/usr/bin/env bash
# Serves one part of a pair for conversations, in which prefill may take back what decode still holds of the turns before:
#
#   ROLE=prefill BIDIR=true P_IP=10.0.0.1 D_IP=10.0.0.2 MODEL=… bash scripts/serve_pd_multiturn.sh      on prefill's host
#   ROLE=decode  BIDIR=true P_IP=10.0.0.1 D_IP=10.0.0.2 MODEL=… bash scripts/serve_pd_multiturn.sh      on decode's host
#   ROLE=proxy   BIDIR=true P_IP=10.0.0.1 D_IP=10.0.0.2 MODEL=… bash scripts/serve_pd_multiturn.sh      anywhere
#
# Prefill's prefix cache is off (P_PREFIX_CACHING=1: on), decode's is on, in both legs: decode's is what is taken back. MODE is pull
# unless set; upstream's can do nothing else. All variables: docs/reproduce.md.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pd_common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/pd_common.sh"

one_of ROLE "${ROLE:-}" prefill decode proxy
one_of BIDIR "${BIDIR:-}" true false
one_of MODE "${MODE:=pull}" push pull
one_of CONNECTOR "$CONNECTOR" kvxfer upstream
[[ $CONNECTOR-$MODE != upstream-push ]] || die "upstream's push connector takes nothing back: MODE=pull"
((LOCAL == 0)) || : "${P_IP:=127.0.0.1}" "${D_IP:=127.0.0.1}"
[[ -n ${P_IP:-} && -n ${D_IP:-} ]] || die "P_IP and D_IP must both be set, on every host (LOCAL=1 needs neither)"
SERVED_MODEL_NAME=${SERVED_NAME:-${SERVED_MODEL_NAME:-}}
resolve_model

if [[ $ROLE = proxy ]]; then
    if [[ $CONNECTOR = kvxfer ]]; then
        command=("$PYTHON" -m kvxfer.cli router --mode "$MODE" --host "${BIND_HOST:-0.0.0.0}" --port "$PROXY_PORT"
            --prefill "http://$P_IP:$PREFILL_PORT" --decode "http://$D_IP:$DECODE_PORT")
    else
        examples=${VLLM_SRC:?set VLLM_SRC to a checkout of vLLM, which has upstream\'s proxies}/examples/disaggregated/disaggregated_serving
        command=("$PYTHON" "$examples/disagg_proxy_multiturn.py" --host "${BIND_HOST:-0.0.0.0}" --port "$PROXY_PORT"
            --prefiller-host "$P_IP" --prefiller-port "$PREFILL_PORT" --decoder-host "$D_IP" --decoder-port "$DECODE_PORT")
    fi
    record proxy proxy $$
    say "${command[*]}"
    exec "${command[@]}"
fi

case $CONNECTOR-$MODE in
kvxfer-push) class=KvxferPushConnector ;;
kvxfer-pull) class=KvxferPullConnector ;;
upstream-pull) class=NixlPullConnector ;;
esac
caching=1 policy=fail extra="\"bidirectional_kv_xfer\": $BIDIR"
if [[ $ROLE = prefill ]]; then
    caching=${P_PREFIX_CACHING:-0}
    # What is not held any more when it is read is computed.
    policy=recompute
fi
serve_engine "$ROLE" "$class" "$P_IP" "$D_IP" "$extra" "${LOAD_FAILURE_POLICY:-$policy}" "$caching"

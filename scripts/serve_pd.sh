#!/usr/bin/env bash
# Serves one part of a prefill/decode pair: an engine, or the proxy in front of both. Stays in the foreground.
#
#   ROLE=prefill MODE=push PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 MODEL=… bash scripts/serve_pd.sh       on prefill's host
#   ROLE=decode  MODE=push PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 MODEL=… bash scripts/serve_pd.sh       on decode's host
#   ROLE=proxy   MODE=push PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 MODEL=… bash scripts/serve_pd.sh       anywhere
#
# CONNECTOR=upstream takes vLLM's own NIXL connectors and, from VLLM_SRC, its example proxies. LOCAL=1 runs the small model on this
# machine, on ports of its own. All variables: docs/reproduce.md. End it with Ctrl-C, or scripts/cleanup.sh.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pd_common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/pd_common.sh"

one_of ROLE "${ROLE:-}" prefill decode proxy
one_of MODE "${MODE:=push}" push pull
one_of CONNECTOR "$CONNECTOR" kvxfer upstream
((LOCAL == 0)) || : "${PREFILL_IP:=127.0.0.1}" "${DECODE_IP:=127.0.0.1}"
[[ -n ${PREFILL_IP:-} && -n ${DECODE_IP:-} ]] || die "PREFILL_IP and DECODE_IP must both be set, on every host (LOCAL=1 needs neither)"
resolve_model

if [[ $ROLE = proxy ]]; then
    if [[ $CONNECTOR = kvxfer ]]; then
        command=("$PYTHON" -m kvxfer.cli router --mode "$MODE" --host "${BIND_HOST:-0.0.0.0}" --port "$PROXY_PORT"
            --prefill "http://$PREFILL_IP:$PREFILL_PORT" --decode "http://$DECODE_IP:$DECODE_PORT")
    else
        examples=${VLLM_SRC:?set VLLM_SRC to a checkout of vLLM, which has upstream\'s proxies}/examples/disaggregated/disaggregated_serving
        command=("$PYTHON" "$examples/disagg_proxy_demo.py")
        if [[ $MODE = push ]]; then
            command=("$PYTHON" "$examples/disagg_proxy_pushconnector_demo.py" --prefill-engine-id "$PREFILL_ENGINE_ID"
                --prefill-kv-host "${PREFILL_KV_HOST:-$PREFILL_IP}" --prefill-side-channel-port "$PREFILL_SIDE_CHANNEL_PORT"
                --prefill-tp-size "${PREFILL_TP_SIZE:-$TP_SIZE}" --prefill-pp-size "${PREFILL_PP_SIZE:-1}")
        fi
        command+=(--model "$SERVED_MODEL_NAME" --prefill "$PREFILL_IP:$PREFILL_PORT" --decode "$DECODE_IP:$DECODE_PORT" --port "$PROXY_PORT")
    fi
    record proxy proxy $$
    say "${command[*]}"
    exec "${command[@]}"
fi

case $CONNECTOR-$MODE in
kvxfer-push) class=KvxferPushConnector ;;
kvxfer-pull) class=KvxferPullConnector ;;
upstream-push) class=NixlPushConnector ;;
upstream-pull) class=NixlPullConnector ;;
esac
serve_engine "$ROLE" "$class" "$PREFILL_IP" "$DECODE_IP" '' "${LOAD_FAILURE_POLICY:-fail}" "$PREFIX_CACHING"

#!/usr/bin/env bash
# Holds conversations through a pair and measures the time to the first token as prompts grow:
#
#   LEG=on P_IP=10.0.0.1 D_IP=10.0.0.2 MODEL=… bash scripts/run_multiturn_sweep.sh     the engines run already (serve_pd_multiturn.sh)
#   LOCAL=1 LEG=on bash scripts/run_multiturn_sweep.sh                                 on this machine: starts and ends everything
#
# LEG=off and LEG=on write RESULTS_DIR/multiturn_off_iter<i>.json and multiturn_on_iter<i>.json (and .log); the engines of a leg must
# have been started with BIDIR=false or BIDIR=true. Then: scripts/plot_multiturn.py and `kvxfer report RESULTS_DIR`. vLLM's own
# multi-turn benchmark tells nothing of the engines' counters by turn, so kvxfer's holds the conversations
# (python -m kvxfer.bench.multiturn). All variables: docs/reproduce.md.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pd_common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/pd_common.sh"

one_of LEG "${LEG:-}" off on
one_of MODE "${MODE:=pull}" push pull
one_of CONNECTOR "$CONNECTOR" kvxfer upstream
BIDIR=false
[[ $LEG = off ]] || BIDIR=true
if ((LOCAL)); then
    : "${P_IP:=127.0.0.1}" "${D_IP:=127.0.0.1}" "${CONVERSATIONS:=2}" "${TURNS:=4}" "${FIRST_TOKENS:=1500}" "${TURN_TOKENS:=500}"
    : "${ANSWER_TOKENS:=16}" "${ITERATIONS:=1}"
else
    : "${CONVERSATIONS:=8}" "${TURNS:=8}" "${FIRST_TOKENS:=4000}" "${TURN_TOKENS:=2000}" "${ANSWER_TOKENS:=128}" "${ITERATIONS:=3}"
fi
[[ -n ${P_IP:-} && -n ${D_IP:-} ]] || die "P_IP and D_IP must both be set (LOCAL=1 needs neither)"
export MODE P_IP D_IP BIDIR
SERVED_MODEL_NAME=${SERVED_NAME:-${SERVED_MODEL_NAME:-}}
resolve_model
export MODEL SERVED_MODEL_NAME
mkdir -p -- "$RESULTS_DIR"
here=$(dirname -- "${BASH_SOURCE[0]}")
started='' ours=()

# shellcheck disable=SC2329 # by the trap
finish() {
    local status=$?
    trap - EXIT
    local kind
    for kind in "${ours[@]}"; do bash "$here/cleanup.sh" "$kind"; done # what was there before goes on
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

log=$RESULTS_DIR/logs-multiturn-$LEG
if ((LOCAL)); then
    must_be_free "http://$P_IP:$PREFILL_PORT/health" PREFILL_PORT
    must_be_free "http://$D_IP:$DECODE_PORT/health" DECODE_PORT
    ours=(server)
    start_in_background "$here/serve_pd_multiturn.sh" "$log-prefill.log" prefill
    prefill=$started
    start_in_background "$here/serve_pd_multiturn.sh" "$log-decode.log" decode
    wait_for "http://$P_IP:$PREFILL_PORT/health" prefill "$prefill" "$log-prefill.log"
    wait_for "http://$D_IP:$DECODE_PORT/health" decode "$started" "$log-decode.log"
fi
proxy=http://127.0.0.1:$PROXY_PORT
ready=$proxy/health
[[ $CONNECTOR = kvxfer ]] || ready=$proxy/healthcheck
if ! answers "$ready"; then
    ours=(proxy "${ours[@]}")
    start_in_background "$here/serve_pd_multiturn.sh" "$log-proxy.log" proxy
    wait_for "$ready" proxy "$started" "$log-proxy.log"
fi

options=(--leg "$LEG" --url "$proxy" --prefill-url "http://$P_IP:$PREFILL_PORT" --served-model-name "$SERVED_MODEL_NAME"
    --conversations "$CONVERSATIONS" --turns "$TURNS" --first "$FIRST_TOKENS" --more "$TURN_TOKENS" --answer "$ANSWER_TOKENS"
    --at-once "${AT_ONCE:-1}" --python "$PYTHON")
[[ $CONNECTOR != kvxfer ]] || options+=(--prefill-control "$P_IP:$PREFILL_SIDE_CHANNEL_PORT")
[[ -z ${VOCAB:-} ]] || options+=(--vocab "$VOCAB")
failed=0
for iteration in $(seq 1 "$ITERATIONS"); do
    result=$RESULTS_DIR/multiturn_${LEG}_iter$iteration
    say "leg $LEG, iteration $iteration"
    "$PYTHON" -m kvxfer.bench.multiturn "$result.json" "${options[@]}" --seed $((${SEED:-0} * 1000 + iteration)) >"$result.log" 2>&1 || {
        failed=$((failed + 1))
        say "failed; the end of $result.log:"
    }
    tail -n 12 -- "$result.log" >&2
done
((failed == 0))

#!/usr/bin/env bash
# Measures a pair at every combination of rate, prompt length and answer length, with vLLM's own `vllm bench serve`:
#
#   MODE=push PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 MODEL=… bash scripts/run_sweep.sh     the engines run already (serve_pd.sh)
#   LOCAL=1 MODE=push bash scripts/run_sweep.sh                                            on this machine: starts and ends everything
#
# Each point and iteration: RESULTS_DIR/<mode>_qps<q>_in<in>_out<out>_iter<i>.json, under the head that all of kvxfer's benches have,
# and beside it what was printed, .log. With CONNECTOR=upstream <mode> is upstream-push or upstream-pull. A point that has its file
# is not measured again, so a sweep that was broken off goes on. Each has a seed of its own. Then: scripts/plot_push_vs_pull.py
# and `kvxfer report RESULTS_DIR`. All variables: docs/reproduce.md.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pd_common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/pd_common.sh"

one_of MODE "${MODE:=push}" push pull
one_of CONNECTOR "$CONNECTOR" kvxfer upstream
if ((LOCAL)); then
    : "${PREFILL_IP:=127.0.0.1}" "${DECODE_IP:=127.0.0.1}" "${QPS_LIST:=0.5 1}" "${INPUT_LENS:=1000 4000}" "${OUTPUT_LENS:=16}"
    : "${ITERATIONS:=1}" "${NUM_PROMPTS:=8}"
else
    : "${QPS_LIST:=1 2 4 8}" "${INPUT_LENS:=1000 4000 16000}" "${OUTPUT_LENS:=128}" "${ITERATIONS:=3}" "${NUM_PROMPTS:=64}"
fi
[[ -n ${PREFILL_IP:-} && -n ${DECODE_IP:-} ]] || die "PREFILL_IP and DECODE_IP must both be set (LOCAL=1 needs neither)"
export MODE PREFILL_IP DECODE_IP
resolve_model
export MODEL SERVED_MODEL_NAME
name=$MODE
[[ $CONNECTOR = kvxfer ]] || name=upstream-$MODE
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

if ((LOCAL)); then
    must_be_free "http://$PREFILL_IP:$PREFILL_PORT/health" PREFILL_PORT
    must_be_free "http://$DECODE_IP:$DECODE_PORT/health" DECODE_PORT
    ours=(server)
    logs=$RESULTS_DIR/logs
    start_in_background "$here/serve_pd.sh" "$logs-$name-prefill.log" prefill
    prefill=$started
    start_in_background "$here/serve_pd.sh" "$logs-$name-decode.log" decode
    wait_for "http://$PREFILL_IP:$PREFILL_PORT/health" prefill "$prefill" "$logs-$name-prefill.log"
    wait_for "http://$DECODE_IP:$DECODE_PORT/health" decode "$started" "$logs-$name-decode.log"
fi
proxy=http://127.0.0.1:$PROXY_PORT
ready=$proxy/health
[[ $CONNECTOR = kvxfer ]] || ready=$proxy/status
if ! answers "$ready"; then
    ours=(proxy "${ours[@]}")
    start_in_background "$here/serve_pd.sh" "$RESULTS_DIR/logs-$name-proxy.log" proxy
    wait_for "$ready" proxy "$started" "$RESULTS_DIR/logs-$name-proxy.log"
fi

failed=0 number=0
caching=--no-prefix-caching
((PREFIX_CACHING == 0)) || caching=--prefix-caching
for iteration in $(seq 1 "$ITERATIONS"); do
    for input in $INPUT_LENS; do
        for output in $OUTPUT_LENS; do
            for qps in $QPS_LIST; do
                number=$((number + 1))
                result=$RESULTS_DIR/${name}_qps${qps}_in${input}_out${output}_iter${iteration}
                if [[ -s $result.json ]]; then
                    say "$result.json is there already"
                    continue
                fi
                say "$name: $qps requests a second of $input tokens, answers of $output, iteration $iteration"
                "$PYTHON" -m kvxfer.bench.vllm_serve "$result.json" --mode "$name" --qps "$qps" --input "$input" --output "$output" \
                    --requests "$NUM_PROMPTS" --seed $((${SEED:-0} * 100000 + number)) --url "$proxy" --model "$MODEL" \
                    --served-model-name "$SERVED_MODEL_NAME" --engine "http://$PREFILL_IP:$PREFILL_PORT" \
                    --engine "http://$DECODE_IP:$DECODE_PORT" "$caching" --python "$PYTHON" >"$result.log" 2>&1 || {
                    failed=$((failed + 1))
                    say "failed; the end of $result.log:"
                    tail -n 5 -- "$result.log" >&2
                }
            done
        done
    done
done
say "$number points, $failed failed; results are in $RESULTS_DIR"
((failed == 0))

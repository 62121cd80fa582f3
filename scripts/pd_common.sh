# shellcheck shell=bash
# What the scripts that serve and measure pairs of engines have in common; sourced, never run. docs/reproduce.md has every variable.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

LOCAL=${LOCAL:-0}
CONNECTOR=${CONNECTOR:-kvxfer}
RESULTS_DIR=${RESULTS_DIR:-$root/results}
STATE_DIR=${STATE_DIR:-$RESULTS_DIR/.state}
PREFIX_CACHING=${PREFIX_CACHING:-0}
BACKEND=${BACKEND:-LIBFABRIC}
TP_SIZE=${TP_SIZE:-1}
START_SECONDS=${START_SECONDS:-900}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# one_of NAME VALUE CHOICE…
one_of() {
    local name=$1 value=$2 choice
    shift 2
    for choice in "$@"; do
        [[ $value != "$choice" ]] || return 0
    done
    die "$name=${value:-(not set)} is none of: $*"
}

one_of LOCAL "$LOCAL" 0 1
one_of PREFIX_CACHING "$PREFIX_CACHING" 0 1

if ((LOCAL)); then # ports of their own: nothing that runs here already is in the way
    : "${PREFILL_PORT:=18100}" "${DECODE_PORT:=18200}" "${PROXY_PORT:=18000}"
    : "${PREFILL_SIDE_CHANNEL_PORT:=15600}" "${DECODE_SIDE_CHANNEL_PORT:=15700}"
else
    : "${PREFILL_PORT:=8100}" "${DECODE_PORT:=8200}" "${PROXY_PORT:=8000}"
    : "${PREFILL_SIDE_CHANNEL_PORT:=5600}" "${DECODE_SIDE_CHANNEL_PORT:=5600}"
fi
PREFILL_ENGINE_ID=${PREFILL_ENGINE_ID:-prefill-0}
DECODE_ENGINE_ID=${DECODE_ENGINE_ID:-decode-0}

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=${KVXFER_VENV:-$root/.venv}/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi

# The small model, built on first use, or MODEL.
resolve_model() {
    if ((LOCAL)) && [[ -z ${MODEL:-} ]]; then
        MODEL=$("$PYTHON" -c 'from kvxfer.bench.model import build; print(build())')
    fi
    [[ -n ${MODEL:-} ]] || die "MODEL is not set: a model's directory or name (LOCAL=1 needs none)"
    SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$([[ $LOCAL = 1 ]] && echo kvxfer-bench || echo "$MODEL")}
}

# When a process started, in clock ticks since boot: with its id it names one process and no later one. Nothing where there is none.
started_at() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20 || true; }

# record KIND NAME PID: cleanup.sh ends what is recorded, and nothing else.
record() {
    mkdir -p -- "$STATE_DIR"
    printf '%s %s\n' "$3" "$(started_at "$3")" >"$STATE_DIR/$1-$2.pid"
}

# answers URL: whether it does, with 200.
answers() { "$PYTHON" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=2)' "$1" 2>/dev/null; }

# must_be_free URL VARIABLE: nothing answers there, which would be taken for the engine that is about to be started.
must_be_free() {
    ! answers "$1" || die "something answers at $1 already: end it (cleanup.sh server), or set $2"
}

# wait_for URL NAME PID LOG: until it answers; fails when the process ends first or START_SECONDS are over.
wait_for() {
    local until=$((SECONDS + START_SECONDS))
    until answers "$1"; do
        if ! kill -0 "$3" 2>/dev/null || ((SECONDS > until)); then
            tail -n 30 -- "$4" >&2 || true
            die "$2 did not come up; the end of $4 is above"
        fi
        sleep 1
    done
}

# cpu_environment HALF: what two vLLM engines on few cores need (kvxfer/bench/engines.py says why). HALF of the cores, first or second, is this engine's.
cpu_environment() {
    local cores half
    mapfile -t cores < <("$PYTHON" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
    half=$((${#cores[@]} / 2))
    local bind=auto
    if ((half > 0)); then
        local mine=("${cores[@]:0:half}")
        [[ $1 = first ]] || mine=("${cores[@]:half}")
        bind=$(IFS=,; echo "${mine[*]}")
    fi
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_CPU_NUM_OF_RESERVED_CPU=0 VLLM_CPU_OMP_THREADS_BIND=$bind
    export OMP_WAIT_POLICY=passive TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
    [[ $CONNECTOR != upstream ]] || export FI_PROVIDER=${FI_PROVIDER:-tcp}
}

# serve_engine ROLE CLASS PREFILL_HOST DECODE_HOST EXTRA POLICY CACHING: becomes vLLM (exec). EXTRA: more of the connector's JSON.
serve_engine() {
    local role=$1 class=$2 host=$3 extra=$5 policy=$6 caching=$7
    local port=$PREFILL_PORT side=$PREFILL_SIDE_CHANNEL_PORT id=$PREFILL_ENGINE_ID kv_role=kv_producer half=first
    if [[ $role = decode ]]; then
        host=$4 port=$DECODE_PORT side=$DECODE_SIDE_CHANNEL_PORT id=$DECODE_ENGINE_ID kv_role=kv_consumer half=second
    fi
    local module='' settings
    if [[ $CONNECTOR = upstream ]]; then
        export VLLM_NIXL_SIDE_CHANNEL_HOST=$host VLLM_NIXL_SIDE_CHANNEL_PORT=$side
        settings="\"backends\": [\"$BACKEND\"]"
        ((LOCAL == 0)) || module='"kv_connector_module_path": "kvxfer.bench.upstream", '
    else
        settings="\"backend\": \"$BACKEND\", \"control_host\": \"$host\", \"control_port\": $side"
        module='"kv_connector_module_path": "kvxfer.connector", '
    fi
    [[ -z $extra ]] || settings+=", $extra"
    [[ -z ${EXTRA_CONFIG:-} ]] || settings+=", $EXTRA_CONFIG"
    local transfer="{\"kv_connector\": \"$class\", ${module}\"kv_role\": \"$kv_role\", \"engine_id\": \"$id\", "
    transfer+="\"kv_load_failure_policy\": \"$policy\", \"kv_connector_extra_config\": {$settings}}"
    local command=("$PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name "$SERVED_MODEL_NAME"
        --host "${BIND_HOST:-$host}" --port "$port" --tensor-parallel-size "$TP_SIZE" --kv-transfer-config "$transfer")
    if ((caching)); then command+=(--enable-prefix-caching); else command+=(--no-enable-prefix-caching); fi
    if ((LOCAL)); then
        cpu_environment "$half"
        command+=(--dtype float32 --enforce-eager --block-size 32 --max-num-batched-tokens 2048 --seed 0)
    fi
    # Words of these are split on purpose: they are options.
    # shellcheck disable=SC2206
    [[ -z ${ENGINE_ARGS:-} ]] || command+=($ENGINE_ARGS)
    record server "$role" $$
    say "$role: ${command[*]}"
    exec "${command[@]}"
}

# start_in_background SCRIPT LOG ROLE: with this environment; sets started to the process's id.
start_in_background() {
    ROLE=$3 bash "$1" >"$2" 2>&1 &
    # shellcheck disable=SC2034 # by whoever sources this
    started=$!
}

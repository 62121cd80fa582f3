#!/usr/bin/env bash
# All checks: lint, format, types, then the tests (unit, contract, integration, e2e), in an environment that it makes by itself.
#
#   scripts/test.sh [--fast] [--slow] [--vllm032] [arguments for pytest]
#
#   --fast     without e2e, which starts real vLLM engines
#   --slow     with the tests marked slow too
#   --vllm032  with the contract tests and e2e on vLLM 0.32.0 too, in a second environment
#
# What pytest gets instead of its usual directories: scripts/test.sh tests/unit/protocol -x
#
# Environment: KVXFER_VENV, KVXFER_PYTHON, KVXFER_LOCK as in setup_env.sh; KVXFER_VENV032, the second environment
# (<repository>/.venv-vllm032). Every step runs, whatever the ones before it said; the exit status is 1 if one failed.
set -euo pipefail

here=$PWD
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD

fast=0 slow=0 vllm032=0 paths=0
arguments=()
for argument in "$@"; do
    case $argument in
    --fast) fast=1 ;;
    --slow) slow=1 ;;
    --vllm032) vllm032=1 ;;
    *)
        [[ $argument == -* || ! -e ${argument%%::*} ]] || paths=1
        arguments+=("$argument")
        ;;
    esac
done

venv=${KVXFER_VENV:-$root/.venv}
[[ $venv = /* ]] || venv=$here/$venv
export KVXFER_VENV=$venv
scripts/setup_env.sh
export PATH="$venv/bin:$PATH"

marks='(slow or not slow)'
((slow)) || marks='not slow'
((vllm032)) || marks+=' and not vllm032'
((fast == 0)) || marks+=' and (not e2e or vllm032)'

if ((vllm032)); then
    venv032=${KVXFER_VENV032:-$root/.venv-vllm032}
    [[ $venv032 = /* ]] || venv032=$here/$venv032
    KVXFER_VENV=$venv032 KVXFER_LOCK=$root/requirements/local-vllm032.lock scripts/setup_env.sh
    export KVXFER_VLLM032_PYTHON=$venv032/bin/python
fi

failed=()
summary=()
step() {
    local name=$1 began=$SECONDS result=passed
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    if ! "$@"; then
        failed+=("$name")
        result=FAILED
    fi
    summary+=("$(printf '%-8s %-6s %4d s' "$name" "$result" $((SECONDS - began)))")
}

# pytest ARGUMENT…: with arguments of the caller's that choose, a directory may have nothing to run.
tests() {
    local status=0
    python -m pytest --durations=15 -m "$marks" "$@" || status=$?
    ((status == 5 && ${#arguments[@]} > 0)) || return "$status"
}

step ruff ruff check .
step format ruff format --check .
step mypy mypy
if ((paths)); then
    step tests tests "${arguments[@]}"
else
    # What fails fast and says most comes first. Engines get the machine to themselves.
    step quick tests -n "$(($(nproc) < 4 ? $(nproc) : 4))" --dist loadfile "${arguments[@]}" tests/unit tests/contract
    step engines tests "${arguments[@]}" tests/integration tests/e2e
fi

((vllm032 == 0 || paths == 1)) || step contract032 "$KVXFER_VLLM032_PYTHON" -m pytest tests/contract

printf '\n'
printf '%s\n' "${summary[@]}"
((${#failed[@]} == 0))

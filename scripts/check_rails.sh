#!/usr/bin/env bash
# Shows which EFA rails are local to which device, and holds what NIXL did with them against that: kvxfer rails, in the
# environment that is there.
#
#   scripts/check_rails.sh [--topology FILE.xml] [--instance-type TYPE] [--log FILE...] [--watch SECONDS]
#                          [--provider efa|tcp] [--json]
#
# Exit status: 0 as expected, 1 a violation, 2 could not tell; see docs/rails.md.
#
# Environment: KVXFER_VENV, the virtual environment to use (<repository>/.venv where there is one). Without either it takes a
# python3 of PATH that has kvxfer's dependencies. Nothing is installed.
set -euo pipefail

root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)
export PYTHONPATH=$root:$root/platforms${PYTHONPATH:+:$PYTHONPATH}

# Prints the Python to use: one that kvxfer's command line imports in, as one that is too old does not.
choose_python() {
    local python candidates=("$root/.venv/bin/python" python3 python)
    [[ -z ${KVXFER_VENV:-} ]] || candidates=("$KVXFER_VENV/bin/python")
    for python in "${candidates[@]}"; do
        if "$python" -c 'import msgspec, rich, typer, kvxfer.cli, kvxfer.rails.report' 2>/dev/null; then
            printf '%s\n' "$python"
            return
        fi
    done
    return 1
}

if ! python=$(choose_python); then
    printf 'check_rails: no Python that kvxfer runs on is here: run scripts/setup_env.sh, or name an environment in KVXFER_VENV\n' >&2
    exit 2
fi
exec "$python" -m kvxfer.cli rails "$@"

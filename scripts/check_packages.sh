#!/usr/bin/env bash
# Builds kvxfer's packages twice, compares them byte for byte, and runs what was built, and nothing of the checkout, in clean environments.
#
#   scripts/check_packages.sh [--demo] [--wheel FILE] [PYTHON...]
#
#   PYTHON   interpreters, 3.10 to 3.13, each with pip and venv (python3)
#   --wheel  check this wheel; nothing is built
#   --demo   let the wheel run `kvxfer doctor` and `kvxfer demo` on the vLLM of the environment that setup_env.sh makes
#
# In each environment: the wheel with the dependencies of the router from the package index, no vLLM; every module is imported that needs none; the
# simulation of handoffs under faults (`kvxfer chaos`), the planner and the rails' tables run. A minute an interpreter, three for the demo.
# Exit status 0 only if everything held. Environment: PIP_INDEX_URL and the like; KVXFER_VENV as in setup_env.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
demo=0 wheel='' pythons=()
while (($#)); do
    case $1 in
    --demo) demo=1 ;;
    --wheel)
        wheel=$(realpath -- "$2")
        shift
        ;;
    -*)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
    *) pythons+=("$1") ;;
    esac
    shift
done
((${#pythons[@]})) || pythons=(python3)
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
unset PYTHONPATH  # nothing of a checkout
say() { printf 'check_packages: %s\n' "$*"; }

build() { # of what is committed, in a folder of its own
    mkdir -p "$work/$1/source"
    git -C "$root" archive HEAD | tar x -C "$work/$1/source" --mtime="$2"
    (cd "$work/$1/source" && env -u SOURCE_DATE_EPOCH "$work/build/bin/python" -m build --outdir "$work/$1/dist" . >"$work/$1/log" 2>&1) ||
        { cat "$work/$1/log" >&2 && exit 1; }
}

if [[ -z $wheel ]]; then
    "${pythons[0]}" -m venv "$work/build"
    "$work/build/bin/pip" install --quiet build
    build first '2001-01-01'
    build second 'now'
    (cd "$work/first/dist" && sha256sum -- *) >"$work/sums"
    (cd "$work/second/dist" && sha256sum --check "$work/sums")
    wheel=$(echo "$work"/first/dist/*.whl)
    say "two builds are the same, byte for byte: $(basename -- "$wheel") and its source distribution"
fi

cat >"$work/modules.py" <<'EOF'
import importlib, pathlib, pkgutil, sys
import kvxfer, kvxfer_cuda, kvxfer_host, kvxfer_neuron

needs = {"vllm", "torch", "nixl", "nixl_cu12", "transformers", "tokenizers", "matplotlib"}
done, without = 0, []
for package in (kvxfer, kvxfer_cuda, kvxfer_host, kvxfer_neuron):
    assert "site-packages" in package.__file__, f"{package.__name__} is not the installed one: {package.__file__}"
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__") or module.name == "kvxfer.doctor.providers":
            continue
        try:
            importlib.import_module(module.name)
            done += 1
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in needs:
                raise
            without.append(module.name)
assert done > 100, done
print(f"{sys.version.split()[0]}: {done} modules imported; {len(without)} need what accelerator hosts' images have")
EOF

for python in "${pythons[@]}"; do
    venv=$work/venv-$(basename -- "$python")
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet "${wheel}[router]"
    (
        cd "$work"
        "$venv/bin/pip" check
        "$venv/bin/python" modules.py
        "$venv/bin/kvxfer" chaos --seeds 20 >chaos.log || { cat chaos.log >&2 && exit 1; }
        "$venv/bin/python" -m kvxfer bench plan --json plan.json >plan.log || { cat plan.log >&2 && exit 1; }
        "$venv/bin/python" -c 'import json; assert json.load(open("plan.json"))'
        "$venv/bin/kvxfer" router --help >router.log
    )
    say "$python: the wheel works"
done

if ((demo)); then
    bash "$root/scripts/setup_env.sh"
    venv=${KVXFER_VENV:-$root/.venv}
    cp -a "$venv" "$work/local"
    "$work/local/bin/python" -m pip --python "$work/local/bin/python" uninstall --quiet --yes kvxfer
    "$work/local/bin/python" -m pip --python "$work/local/bin/python" install --quiet --no-deps "$wheel"
    (
        cd "$work"
        "$work/local/bin/python" -c 'import kvxfer; assert "site-packages" in kvxfer.__file__, kvxfer.__file__'
        "$work/local/bin/python" -m kvxfer doctor
        "$work/local/bin/python" -m kvxfer demo
    )
    say "the wheel's doctor and demo pass"
fi

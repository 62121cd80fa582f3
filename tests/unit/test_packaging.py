"""The wheel: everything that runs, nothing else, and the same bytes whenever and wherever it is built."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling, which builds the packages, is not installed")

ROOT = Path(__file__).parents[2]
SOURCES = {"kvxfer": ROOT / "kvxfer"} | {
    name: ROOT / "platforms" / name for name in ("kvxfer_cuda", "kvxfer_host", "kvxfer_neuron")
}


def build(source: Path, into: Path) -> Path:
    environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two copies of what is built, at different places and with different times."""
    made = []
    for name, time in (("first", 1_000_000_000), ("second elsewhere", 1_700_000_000)):
        copy = tmp_path_factory.mktemp("source") / name
        ignore = shutil.ignore_patterns("__pycache__")
        for part in ("kvxfer", "platforms"):
            shutil.copytree(ROOT / part, copy / part, ignore=ignore)
        for part in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
            shutil.copy(ROOT / part, copy / part)
        for path in copy.rglob("*"):
            os.utime(path, (time, time))
        made.append(copy)
    return made[0], made[1]


def test_two_builds_have_the_same_bytes(copies: tuple[Path, Path], tmp_path: Path) -> None:
    wheels = [build(copy, tmp_path / str(at)) for at, copy in enumerate(copies)]
    assert wheels[0].name == wheels[1].name
    assert len({hashlib.sha256(wheel.read_bytes()).digest() for wheel in wheels}) == 1


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(copies: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(build(copies[0], tmp_path)) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        entries = wheel.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    expected = {
        f"{package}/{path.relative_to(directory)}"
        for package, directory in SOURCES.items()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == expected
    assert any(name.endswith("/licenses/LICENSE") for name in about)
    assert "License-Expression: Apache-2.0" in metadata
    for word in ("[vllm.general_plugins]", "[kvxfer.platforms]", "kvxfer = kvxfer.cli:main"):
        assert word in entries


def test_the_changelog_is_headed_by_the_version_that_is_built() -> None:
    version = next(
        line.split('"')[1] for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
    )
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## {version}"), (
        f"CHANGELOG.md begins with {headings[:1]}, pyproject.toml says {version}"
    )

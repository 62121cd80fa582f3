"""torch-neuronx and neuronx-distributed: asked for in one extra, above the public index's placeholders, imported in one folder."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvxfer.doctor.software import _PLACEHOLDERS, NEURON_PACKAGES

ROOT = Path(__file__).parents[3]
NEURON = {"torch_neuronx", "neuronx_distributed", "libtorch_neuronx_lite", "torch_xla", "vllm_neuron", "nki"}
FOLDER = ROOT / "platforms/kvxfer_neuron"
MODULES = sorted([*ROOT.glob("kvxfer/**/*.py"), *ROOT.glob("platforms/**/*.py")])


def imports(tree: ast.AST, *, at_import: bool) -> set[str]:
    """Roots of what a module imports; with ``at_import`` only what it imports when it is imported itself."""
    found = set()
    todo = [tree]
    while todo:
        node = todo.pop()
        if at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
        todo += ast.iter_child_nodes(node)
    return found


def test_neurons_packages_are_imported_by_the_neuron_platform_alone() -> None:
    importers = {path for path in MODULES if imports(ast.parse(path.read_text()), at_import=False) & NEURON}
    assert importers
    assert [path for path in importers if FOLDER not in path.parents] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_the_platform_imports_without_them(path) -> None:
    """The plugin makes every platform in every process, on hosts of every kind."""
    assert not imports(ast.parse(path.read_text()), at_import=True) & NEURON


@pytest.fixture(scope="module")
def extra() -> dict[str, Requirement]:
    text = (ROOT / "pyproject.toml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("neuron = [")]
    return {one.name: one for one in map(Requirement, ast.literal_eval(line.partition("=")[2].strip()))}


def test_the_extra_asks_for_what_the_public_index_does_not_have(extra) -> None:
    """So that pip fails where AWS's index is not given, and installs no placeholder."""
    assert {"torch-neuronx", "neuronx-distributed"} <= set(extra)
    for name, version in _PLACEHOLDERS:
        if name in extra:
            assert not extra[name].specifier.contains(version, prereleases=True)


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch-neuronx", "2.9.0.2.11.19912+e48cd891"), ("neuronx-distributed", "0.17.26814+4b0a5e4e")],
)
def test_the_extra_takes_aws_own_versions(extra, name, version) -> None:
    assert extra[name].specifier.contains(version)


def test_the_doctor_knows_a_placeholder_of_each_package() -> None:
    assert {name for name, _ in _PLACEHOLDERS} == set(NEURON_PACKAGES)


def test_where_none_of_them_is_installed_the_platform_is_there_and_says_that_neuron_is_not() -> None:
    from kvxfer_neuron import NeuronPlatform

    for name in NEURON_PACKAGES:
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
    assert NeuronPlatform(Path("/there/is/none"), {}).presence().here is False

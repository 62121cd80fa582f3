"""docs/settings.md names every setting and every environment variable that the code reads, with its default."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from kvxfer.config import UPSTREAM_IGNORED, Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text()
TABLE = PAGE.split("## Environment")[0]
ROWS = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", TABLE, re.MULTILINE))


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_every_setting_and_its_default(name: str) -> None:
    default = getattr(Settings(), name)
    shown = ROWS.get(name)
    assert shown is not None, f"{name} is not in the table"
    assert shown == (f"{default:g}" if isinstance(default, float) else json.dumps(default))


def test_nothing_in_the_table_is_invented() -> None:
    assert set(ROWS) == set(Settings.__struct_fields__)


def test_upstreams_ignored_keys() -> None:
    assert all(f"`{key}`" in PAGE for key in UPSTREAM_IGNORED)


def variables_read(tree: ast.AST) -> set[str]:
    """String constants that look like environment variables, in modules that use os.environ or get one passed."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^(?:KVXFER|VLLM_NIXL|NIXL|FI|XDG)_[A-Z0-9_]+$", node.value))
    return names


def test_every_environment_variable() -> None:
    read = set()
    for folder in ("kvxfer", "platforms"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= variables_read(ast.parse(path.read_text()))
    for path in (ROOT / "scripts").glob("*.sh"):
        read |= set(re.findall(r"\$\{?(KVXFER_[A-Z0-9_]+)", path.read_text()))
    assert "KVXFER_HOST_FENCE_DELAY" in read
    missing = sorted(name for name in read if f"`{name}`" not in PAGE)
    assert missing == []

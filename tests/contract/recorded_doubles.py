"""A ``vllm`` package made from a recording: its base class with the recorded hooks and parameters, and nothing behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded")
VERSIONS = sorted(path.stem for path in RECORDED.glob("*.json"))


def read(version: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{version}.json").read_text())


def build(recorded: dict[str, Any], into: Path) -> Path:
    """Write the package; returns the directory to put first on ``sys.path``."""
    connector = into / "vllm/distributed/kv_transfer/kv_connector/v1"
    connector.mkdir(parents=True)
    (into / "vllm/v1").mkdir()
    for package in (connector, *connector.relative_to(into).parents, Path("vllm/v1")):
        if package != Path():
            (into / package / "__init__.py").touch()
    (into / "__init__.py").unlink(missing_ok=True)
    (connector / "base.py").write_text(base(recorded))
    if recorded["layouts"]:
        members = "".join(f"    {name} = {name!r}\n" for name in recorded["layouts"])
        (into / "vllm/v1/kv_cache_layout.py").write_text(f"import enum\n\nclass KVCacheLayout(enum.Enum):\n{members}")
    return into


def base(recorded: dict[str, Any]) -> str:
    lines = ["import enum", "class KVConnectorRole(enum.Enum):", "    SCHEDULER = 0", "    WORKER = 1"]
    for name in recorded["base"]:
        if name not in ("KVConnectorRole", "KVConnectorBase_V1"):
            lines += [f"class {name}:", "    pass"]
    lines.append("class KVConnectorBase_V1:")
    for name, hook in recorded["hooks"].items():
        if hook["kind"] != "method":
            lines.append(f"    @{hook['kind']}")
        lines += [f"    def {name}({hook['parameters']}):", "        raise NotImplementedError"]
    return "\n".join(lines) + "\n"

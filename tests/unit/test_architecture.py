"""The house's rules that a reader of one module cannot see: who imports whom, what the core may know, how long a module is."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted([*ROOT.glob("kvxfer/**/*.py"), *ROOT.glob("platforms/**/*.py")])

ERRORS = "kvxfer.errors"
ADDRESSES = "kvxfer.addresses"
CONSOLE = "kvxfer.console"
# What each part may import of kvxfer, beside itself. A prefix stands for all that is below it.
MAY_IMPORT = {
    "kvxfer/protocol/": {ERRORS},
    "kvxfer/layout/": {ERRORS},
    "kvxfer/rails/": {ERRORS},
    "kvxfer/platform.py": {ERRORS, "kvxfer.layout"},
    "kvxfer/transport/": {ERRORS, ADDRESSES, CONSOLE, "kvxfer.protocol", "kvxfer.layout", "kvxfer.platform"},
    "kvxfer/config.py": {ERRORS, ADDRESSES, "kvxfer.protocol"},
    "kvxfer/connector/": {
        ERRORS,
        ADDRESSES,
        "kvxfer.config",
        "kvxfer.platform",
        "kvxfer.protocol",
        "kvxfer.layout",
        "kvxfer.rails",
        "kvxfer.transport",
    },
    "kvxfer/router/": {ERRORS, ADDRESSES},
    # Its page shows engines' handoff records, which it asks for as an operator does.
    "kvxfer/router/waterfall.py": {ERRORS, "kvxfer.router", "kvxfer.transport"},
    "kvxfer/router/path.py": {"kvxfer.router", "kvxfer.transport.records"},
    # The simulation plays engines: it drives what a connector drives.
    "kvxfer/chaos/": {
        ERRORS,
        "kvxfer.protocol",
        "kvxfer.layout",
        "kvxfer.transport",
        "kvxfer.connector.announce",
        "kvxfer.connector.pins",
        "kvxfer.config",
        "kvxfer.connector.retained",
        "kvxfer.connector.taking_back",
    },
    # The bench measures the transport, and looks at engines from outside as an operator does.
    "kvxfer/bench/": {
        ERRORS,
        ADDRESSES,
        CONSOLE,
        "kvxfer.protocol",
        "kvxfer.layout",
        "kvxfer.transport",
        "kvxfer.rails",
    },
    # Measures the router, and its policies.
    "kvxfer/bench/route/": {ERRORS, "kvxfer.bench", "kvxfer.router"},
    # A demonstration of wrong KV overrides what a connector registers.
    "kvxfer/bench/misplace.py": {"kvxfer.bench", "kvxfer.connector"},
    # Connectors that a measurement counts, or times, from within.
    "kvxfer/bench/counted.py": {ERRORS, "kvxfer.bench", "kvxfer.connector", "kvxfer.transport"},
    "kvxfer/bench/stream_timed.py": {"kvxfer.bench", "kvxfer.connector", "kvxfer.transport"},
    # The doctor tries out what the others need.
    "kvxfer/doctor/": {ERRORS, "kvxfer.transport", "kvxfer.rails"},
    "kvxfer/errors.py": set(),
    "kvxfer/addresses.py": set(),
    "kvxfer/console.py": set(),
    "kvxfer/__init__.py": set(),
    "platforms/": {ERRORS, "kvxfer.platform", "kvxfer.layout", "kvxfer.rails"},
}
ANYTHING = {"kvxfer/cli.py", "kvxfer/__main__.py"}  # know every command

ON_THE_HOST = {"kvxfer/bench/lone.py"}
"""Measurements that are of host memory by definition; the host platform is in every wheel."""

CORE = ("kvxfer/protocol/", "kvxfer/layout/")
NOT_IN_THE_CORE = {
    "torch",
    "vllm",
    "nixl",
    "zmq",
    "threading",
    "multiprocessing",
    "asyncio",
    "socket",
    "select",
    "time",
}
NOT_IN_THE_CORE |= {"os", "random", "secrets", "subprocess", "logging", "queue", "io", "pathlib"}

MAX_LINES = 500


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def rule_for(module: str, rules):
    """The longest prefix decides."""
    return max((key for key in rules if module.startswith(key)), key=len, default=None)


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Every import, also those under TYPE_CHECKING and inside functions, as absolute dotted names."""
    found = []
    package = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level], *([node.module] if node.module else [])])
            # "from kvxfer.transport import commands" names a module as well.
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def allowed(imported: str, may: set[str]) -> bool:
    return any(imported == prefix or imported.startswith(prefix + ".") for prefix in may)


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 40


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_point_one_way(path) -> None:
    module = name(path)
    if module in ANYTHING:
        return
    rule = rule_for(module, MAY_IMPORT)
    assert rule is not None, f"{module} has no place in the house: say in MAY_IMPORT what it may import"
    own = {rule.rstrip("/").removesuffix(".py").replace("/", ".")} if rule != "platforms/" else set()
    own |= {"kvxfer.__version__"}
    wrong = [
        f"{module}:{line} imports {imported}"
        for line, imported in imports_of(path)
        if imported.split(".")[0] == "kvxfer" and not allowed(imported, MAY_IMPORT[rule] | own)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", [p for p in MODULES if name(p).startswith("platforms/")], ids=name)
def test_a_platform_does_not_know_another(path) -> None:
    mine = path.relative_to(ROOT / "platforms").parts[0]
    others = {p.name for p in (ROOT / "platforms").iterdir() if p.is_dir()} - {mine}
    assert [imported for _, imported in imports_of(path) if imported.split(".")[0] in others] == []


@pytest.mark.parametrize("path", [p for p in MODULES if name(p).startswith("kvxfer/")], ids=name)
def test_nothing_imports_a_platform(path) -> None:
    """They are found by entry point: a wheel without one of them must work."""
    folders = {p.name for p in (ROOT / "platforms").iterdir() if p.is_dir()}
    wrong = [imported for _, imported in imports_of(path) if imported.split(".")[0] in folders]
    assert wrong == (["kvxfer_host.HostPlatform"] if name(path) in ON_THE_HOST else [])


@pytest.mark.parametrize("path", [p for p in MODULES if name(p).startswith(CORE)], ids=name)
def test_the_core_has_no_thread_no_clock_and_no_network(path) -> None:
    wrong = [
        f"line {line}: {imported}" for line, imported in imports_of(path) if imported.split(".")[0] in NOT_IN_THE_CORE
    ]
    assert wrong == []


def test_only_the_connector_and_what_starts_engines_imports_vllm() -> None:
    importers = {name(path) for path in MODULES for _, imported in imports_of(path) if imported.split(".")[0] == "vllm"}
    places = ("kvxfer/connector/", "kvxfer/bench/", "platforms/")
    assert [module for module in sorted(importers) if not module.startswith(places)] == []


def code_tokens(path: Path) -> list[tuple[int, str]]:
    """(line, text) of names and strings that are code: no comments, and no string that stands alone as documentation."""
    text = path.read_text()
    prose = {
        (line, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in [node.lineno]
    }
    return [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.NAME, tokenize.STRING) and token.start not in prose
    ]


VERSION = re.compile(r"(?<![\d.])0\.[23]\d(\.\d+)?(?!\d)")


@pytest.mark.parametrize("path", [p for p in MODULES if name(p) != "kvxfer/connector/compat.py"], ids=name)
def test_no_code_depends_on_a_version_of_vllm_but_that_of_compat(path) -> None:
    """Docstrings and comments name versions as the sources of facts; code asks compat for features."""
    tokens = code_tokens(path)
    wrong = [
        f"line {line}: {text[:60]}"
        for line, text in tokens
        if (text[0] in "rRbBfFuU\"'" and text[-1] in "\"'" and VERSION.search(text))
        or text in ("__version_tuple__", "vllm_version")
    ]
    imported = [
        f"line {line}: {what}" for line, what in imports_of(path) if what.startswith(("vllm.version", "vllm.__version"))
    ]
    attributes = [
        f"line {node.lineno}: vllm.__version__"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("__version__", "version")
        and isinstance(node.value, ast.Name)
        and node.value.id == "vllm"
    ]
    assert wrong + imported + attributes == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_module_is_longer_than_a_reader_holds(path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES


def test_the_rules_are_still_needed() -> None:
    for rule in MAY_IMPORT:
        assert any(name(path).startswith(rule) for path in MODULES), f"no module is in {rule}"


THREAD = [
    "_after_fork",
    "_args",
    "_bootstrap",
    "_bootstrap_inner",
    "_context",
    "_daemonic",
    "_delete",
    "_handle",
    "_ident",
    "_initialized",
    "_invoke_excepthook",
    "_is_stopped",
    "_kwargs",
    "_name",
    "_native_id",
    "_os_thread_handle",
    "_reset_internal_locks",
    "_set_ident",
    "_set_native_id",
    "_set_tstate_lock",
    "_started",
    "_stderr",
    "_stop",
    "_target",
    "_tstate_lock",
    "_wait_for_tstate_lock",
    "daemon",
    "ident",
    "name",
    "native_id",
    "start",
    "join",
]
"""What threading.Thread, of one of the Pythons 3.10 to 3.14, has in an instance or its class; but ``run``, which is ours."""


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_thread_of_ours_hides_what_is_threads_own(path) -> None:
    """A ``_handle`` of a mover was Python 3.13's as well, and a mover there did nothing at all."""
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Thread") for base in node.bases):
            ours = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            ours |= {
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and ast.unparse(one.value) == "self"
            }
            wrong += sorted(ours.intersection(THREAD))
    assert wrong == []

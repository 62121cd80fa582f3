"""docs/metrics.md has every metric that the code makes, with its type and labels, and none besides; and every stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the router's metrics need it")

from prometheus_client import CollectorRegistry

from kvxfer.router.seen import Seen
from kvxfer.transport.stages import STAGES, WHOLE
from tests.support.prom import config, described, metric_types

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def rows(table: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Name → type and labels of the table whose first column has this title."""
    (_, _, after) = PAGE.partition(f"| {table} | type |")
    (text, _, _) = after.partition("\n\n")
    found = re.findall(r"^\| `(kvxfer_\w+)` \| (\w+) \| ([^|]*)\|", text, re.MULTILINE)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in found}


def test_the_routers_metrics_are_those_of_the_page() -> None:
    assert described(Seen(()).registry) == rows("router")


def test_the_engines_metrics_are_those_of_the_page() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from kvxfer.connector.connectors import KvxferPushConnector

    registry = CollectorRegistry()
    KvxferPushConnector.build_prom_metrics(config(), metric_types(registry), [], {0: []})
    assert described(registry) == rows("engine")


def test_every_stage_is_explained_with_its_side() -> None:
    shown = dict(re.findall(r"^\| `([\w ]+)` \| (sink|source|the side that posts|both) \|", PAGE, re.MULTILINE))
    sides = {
        name: [side for side, names in STAGES.items() if name in names] for names in STAGES.values() for name in names
    }
    assert shown == {name: "the side that posts" if len(found) > 1 else found[0] for name, found in sides.items()} | {
        WHOLE: "both"
    }


def test_no_other_name_of_a_metric_is_on_the_page() -> None:
    known = set(rows("engine")) | set(rows("router"))
    named = {name.removesuffix("_total") for name in re.findall(r"kvxfer_[a-z_]+", PAGE)}
    assert named <= known

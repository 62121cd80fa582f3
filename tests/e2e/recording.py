"""Records how real engines' caches lie in memory, for the property tests that run on them (``tests/unit/layout/recorded``).

A run (``tests/e2e/matrix/results.py``) takes a file for each geometry: what each worker publishes to its peers of its cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvxfer.transport.query import fetch_records
from tests.e2e.matrix import results

if TYPE_CHECKING:
    from pathlib import Path

    from kvxfer.bench.engines import Engine


def record(run: Path, engine: Engine, version: str, model: str, *, ranks: int = 1, stages: int = 1) -> None:
    """Write the cache maps of all ranks of an engine, in the order of ranks: stage by stage."""
    report = fetch_records(engine.control_host, engine.control_port, last=0)
    caches = [one.cache for one in sorted(report.ranks, key=lambda one: one.rank)]
    assert len(caches) == ranks * stages
    name = f"{version}_{model}_{ranks}{f'x{stages}' if stages > 1 else ''}_{caches[0].block_size}"
    found = {"vllm": version, "model": model, "ranks": ranks, "stages": stages, "caches": msgspec.to_builtins(caches)}
    results.write(run, "geometries", name, found)

"""``kvxfer bench idle``: what a connector costs an engine that has nothing to do.

One engine after another on the same machine, equal but for the connector: all their processes' user and system time over
some windows, as percent of one core. Each is given time to settle first, since vLLM's own processes spin for a while after
start-up and after each request. What counts is the difference to the engine without a connector.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.bench.client import Client
from kvxfer.bench.engines import CONNECTORS, UPSTREAM, UPSTREAM_PREFIX, EngineSpec, make_engine, named_connector
from kvxfer.bench.model import build, prompt_tokens
from kvxfer.bench.process import cpu_seconds, running
from kvxfer.bench.results import report
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvxfer.bench.engines import Engine

NONE: Final = "none"
CHOICES: Final = (NONE, *CONNECTORS, *(UPSTREAM_PREFIX + mode for mode in UPSTREAM))


@dataclass(frozen=True, slots=True)
class Idle:
    """One engine's idle use in percent of a core: each window's, and their median."""

    connector: str
    windows: tuple[float, ...]
    by_process: dict[str, float]
    """By the process's title: the median of the windows."""

    @property
    def percent(self) -> float:
        """The median of the windows."""
        return statistics.median(self.windows)


def spec_for(connector: str, model: Path, python: str) -> EngineSpec:
    """A decode engine with the connector of that name, one of ``CHOICES``."""
    name = f"idle-{connector}"
    if connector == NONE:
        return EngineSpec(name=name, model=model, python=python)
    if connector not in CHOICES:
        raise ConfigError(f"connector {connector!r} is none of {', '.join(CHOICES)}")
    upstream = connector.startswith(UPSTREAM_PREFIX)
    return EngineSpec(
        name=name,
        model=model,
        role="decode",
        connector=named_connector(connector)[1],
        connector_module="kvxfer.bench.upstream" if upstream else "kvxfer.connector",
        python=python,
    )


def measure(engine: Engine, *, settle: float, window: float, windows: int) -> Idle:
    """Watch a ready engine that nobody uses; times in seconds."""
    asyncio.run(_one_request(engine))  # what is started by a first request shall be running
    time.sleep(settle)
    pids = engine.server.pids()
    titles = engine.server.titles()
    uses: list[dict[int, float]] = []
    for _ in range(windows):
        before = {pid: cpu_seconds([pid]) for pid in pids}
        started = time.monotonic()
        time.sleep(window)
        elapsed = time.monotonic() - started
        uses.append({pid: 100.0 * max(0.0, cpu_seconds([pid]) - before[pid]) / elapsed for pid in pids})
    return Idle(
        connector=engine.spec.name.removeprefix("idle-"),
        windows=tuple(sum(use.values()) for use in uses),
        by_process={titles[pid]: statistics.median(use[pid] for use in uses) for pid in pids if pid in titles},
    )


def run(
    connectors: Sequence[str],
    logs: Path,
    python: str,
    *,
    seconds: float = 20.0,
    windows: int = 5,
    settle: float = 15.0,
    say: Callable[[Idle], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure each connector over ``seconds`` in ``windows`` windows; what ``--json`` writes."""
    model = build()
    specs = [spec_for(connector, model, python) for connector in connectors]
    found = []
    for spec in specs:
        engine = make_engine(spec, logs)
        with running(engine.server):
            found.append(measure(engine, settle=settle, window=seconds / windows, windows=windows))
        say(found[-1])
    base = next((one.percent for one in found if one.connector == NONE), None)
    return report(
        "idle",
        {"seconds": seconds, "windows": windows, "settle": settle},
        python,
        idle={
            one.connector: {
                "percent_of_core": one.percent,
                "over_none": None if base is None else one.percent - base,
                "windows": list(one.windows),
                "by_process": one.by_process,
            }
            for one in found
        },
    )


async def _one_request(engine: Engine) -> None:
    async with Client(engine.url) as client:
        await client.complete(prompt_tokens(64, 0), 4)

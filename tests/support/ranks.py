"""Whole ranks without vLLM over the in-memory twin, with times short enough for tests."""

from __future__ import annotations

import time
from typing import Any

from kvxfer.bench.lone import LoneRank
from kvxfer.protocol.peers import Timing
from kvxfer.transport.twin import TwinAgent, TwinFabric

FAST = Timing(interval=0.05, timeout=1.0, lease=0.6, margin=0.05)


class Rank(LoneRank):
    """A lone rank over a twin fabric, or with an agent of the test's own."""

    def __init__(self, engine: str, fabric: TwinFabric | None = None, **options: Any) -> None:
        make_agent = options.pop("make_agent", None) or (lambda name: TwinAgent(name, fabric))
        super().__init__(engine, make_agent, **{"timing": FAST, "leg_timeout": 5.0, "drain_bound": 0.3, **options})

    kill = LoneRank.close


def wait_until(condition, timeout: float = 10.0, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(0.002)

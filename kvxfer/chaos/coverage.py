"""What a run has seen: which transitions were taken, and which faults struck in which states.

Transitions are counted from outside, the machines know nothing of it. Faults are counted by whoever inflicts them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvxfer.chaos.possible import IMPOSSIBLE, POSSIBLE
from kvxfer.protocol import peers, sink, source
from kvxfer.protocol.sink_ending import Ending
from kvxfer.protocol.source_delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Coverage = dict[str, Counter[str]]
"""Table → "state/event" → how often; or fault → "side/state" → how often."""

ENOUGH = 100
"""How often each transition must have been taken, and each fault struck in each state, in a run of 2,000 seeds."""


@contextlib.contextmanager
def counting(coverage: Coverage) -> Iterator[None]:
    """Count every transition of every machine until the end of the block."""
    saved: list[tuple[type, Any]] = []
    machines: tuple[tuple[str, type], ...] = (("source", Delivery), ("sink", Ending), ("peers", peers.Peer))
    for name, cls in machines:
        original = vars(cls)["_step"]
        saved.append((cls, original))
        counted = _of_session if name == "peers" else _of_handoff
        setattr(cls, "_step", counted(original, coverage.setdefault(name, Counter())))  # noqa: B010 - not for mypy
    try:
        yield
    finally:
        for cls, original in saved:
            setattr(cls, "_step", original)  # noqa: B010


def seldom_taken(coverage: Mapping[str, Counter[str]], enough: int = ENOUGH) -> list[str]:
    """Name the transitions that were taken fewer times than that."""
    tables: dict[str, Any] = {
        "source": source.TRANSITIONS,
        "sink": sink.TRANSITIONS,
        "peers": peers.TRANSITIONS,
    }
    return [
        f"{name}: {state.value}/{event.value}"
        for name, table in tables.items()
        for state, row in table.items()
        for event in row
        if coverage.get(name, Counter())[f"{state.value}/{event.value}"] < enough
    ]


def seldom_struck(struck: Mapping[str, Counter[str]], enough: int = ENOUGH) -> list[str]:
    """Name the possible pairs of fault and state that were seen fewer times than that."""
    return [
        f"{fault}: {state}"
        for fault, states in POSSIBLE.items()
        for state in states
        if struck.get(fault, Counter())[state] < enough
    ]


def not_foreseen(struck: Mapping[str, Counter[str]]) -> list[str]:
    """Name the pairs that were seen and are thought impossible, with the reason that must be wrong."""
    return [
        f"{fault}: {state}: {why}"
        for fault, states in IMPOSSIBLE.items()
        for state, why in states.items()
        if struck.get(fault, Counter())[state]
    ]


def _of_handoff(original: Callable[..., None], counts: Counter[str]) -> Callable[..., None]:
    def step(self: Any, one: Any, event: Any) -> None:
        counts[f"{one.state.value}/{event.value}"] += 1
        original(self, one, event)

    return step


def _of_session(original: Callable[..., None], counts: Counter[str]) -> Callable[..., None]:
    def step(self: Any, event: Any) -> None:
        counts[f"{self.state.value}/{event.value}"] += 1
        original(self, event)

    return step

"""What a run has seen: which transitions were taken, and which faults struck in which states.

Transitions are counted from outside, the machines know nothing of it. Faults are counted by whoever inflicts them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvxfer.chaos.concern import is_reuse
from kvxfer.chaos.possible import IMPOSSIBLE, MAY_BE_MISSED, POSSIBLE, REUSE
from kvxfer.protocol import peers, sink, source
from kvxfer.protocol.sink_ending import Ending
from kvxfer.protocol.source_delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Coverage = dict[str, Counter[str]]
"""Table → "state/event" → how often; or fault → "side/state" → how often."""

OF_REUSE = {"source": "holder", "sink": "reader"}
"""What the machines' tables are called where a conversation is read back (see ``concern``)."""

_NO_REQUEST = "what is held belongs to no request that could be preempted or end"
_NOT_WRITTEN_TO = (
    "nobody writes to a reader: its own read completes it, and a source that is lost is no danger to its blocks"
)
NEVER_HELD: Mapping[str, str] = MappingProxyType(
    {
        "computing/preempt": _NO_REQUEST,
        "computing/abort": _NO_REQUEST,
        "computing/serve": "what is held is final from the beginning",
        "final/preempt": _NO_REQUEST,
        "final/abort": _NO_REQUEST,
        "served/preempt": _NO_REQUEST,
    }
)
NEVER_READ: Mapping[str, str] = MappingProxyType(
    {
        "registered/complete": _NOT_WRITTEN_TO,
        "registered/lose": _NOT_WRITTEN_TO,
        "registered/revoked": _NOT_WRITTEN_TO,
        "cancelling/renew": _NOT_WRITTEN_TO,
        "cancelling/revoked": _NOT_WRITTEN_TO,
        "fencing/renew": _NOT_WRITTEN_TO,
        "fencing/revoked": _NOT_WRITTEN_TO,
        "registered/cancel": "a reader that has posted nothing ends at once",
        "fencing/fail": "the fence of a read that failed is time",
        "fencing/lose": "would need a reader of two sources, both of whose reads fail: hardly ever",
    }
)
"""Transitions that no read for a conversation takes, and why."""

ENOUGH = 100
"""How often each transition must have been taken, and each fault struck in each state, in a run of 2,000 seeds."""

ENOUGH_OF_REUSE = 5
"""The same of reads for conversations, which one world in four has."""


@contextlib.contextmanager
def counting(coverage: Coverage) -> Iterator[None]:
    """Count every transition of every machine until the end of the block."""
    saved: list[tuple[type, Any]] = []
    machines: tuple[tuple[str, type], ...] = (("source", Delivery), ("sink", Ending), ("peers", peers.Peer))
    for name, cls in machines:
        original = vars(cls)["_step"]
        saved.append((cls, original))
        counts = coverage.setdefault(name, Counter())
        if name == "peers":
            counted = _of_session(original, counts)
        else:
            counted = _of_handoff(original, counts, coverage.setdefault(OF_REUSE[name], Counter()))
        setattr(cls, "_step", counted)  # noqa: B010 - not for mypy
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
        "holder": source.TRANSITIONS,
        "reader": sink.TRANSITIONS,
    }
    never = {"holder": NEVER_HELD, "reader": NEVER_READ}
    return [
        f"{name}: {state.value}/{event.value}"
        for name, table in tables.items()
        for state, row in table.items()
        for event in row
        if f"{state.value}/{event.value}" not in never.get(name, ())
        and coverage.get(name, Counter())[f"{state.value}/{event.value}"]
        < (min(enough, ENOUGH_OF_REUSE) if name in never else enough)
    ]


def seldom_struck(struck: Mapping[str, Counter[str]], enough: int = ENOUGH) -> list[str]:
    """Name the possible pairs of fault and state that were seen fewer times than that."""
    return [
        f"{fault}: {state}"
        for fault, states in POSSIBLE.items()
        for state in states
        if state not in MAY_BE_MISSED.get(fault, ())
        and struck.get(fault, Counter())[state] < (min(enough, ENOUGH_OF_REUSE) if state in REUSE else enough)
    ]


def not_foreseen(struck: Mapping[str, Counter[str]]) -> list[str]:
    """Name the pairs that were seen and are thought impossible, with the reason that must be wrong."""
    return [
        f"{fault}: {state}: {why}"
        for fault, states in IMPOSSIBLE.items()
        for state, why in states.items()
        if struck.get(fault, Counter())[state]
    ]


def _of_handoff(original: Callable[..., None], legs: Counter[str], reuse: Counter[str]) -> Callable[..., None]:
    def step(self: Any, one: Any, event: Any) -> None:
        counts = reuse if is_reuse(one.id) else legs
        counts[f"{one.state.value}/{event.value}"] += 1
        original(self, one, event)

    return step


def _of_session(original: Callable[..., None], counts: Counter[str]) -> Callable[..., None]:
    def step(self: Any, event: Any) -> None:
        counts[f"{self.state.value}/{event.value}"] += 1
        original(self, event)

    return step

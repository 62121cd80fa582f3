"""Which transitions of the protocol's tables are taken, counted from outside: the machines themselves know nothing of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvxfer.protocol import peers, sink, source
from kvxfer.protocol.source_delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Coverage = dict[str, Counter[str]]
"""Table → "state/event" → how often."""


@contextlib.contextmanager
def counting(coverage: Coverage) -> Iterator[None]:
    """Count every transition of every machine until the end of the block."""
    saved: list[tuple[type, Any]] = []
    machines: tuple[tuple[str, type], ...] = (("source", Delivery), ("sink", sink.Sink), ("peers", peers.Peer))
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


def missing(coverage: Coverage) -> list[str]:
    """Name the transitions that were never taken."""
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
        if not coverage.get(name, Counter())[f"{state.value}/{event.value}"]
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

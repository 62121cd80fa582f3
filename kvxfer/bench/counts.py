"""What the movers of a prefill and a decode engine counted for one handoff, put together.

One side of a handoff posts and counts bytes and descriptors (push: the source, pull: the sink), the other side has
zeros there. With several ranks each has its own record. Here both sides of all ranks become one ``Moved``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvxfer.errors import KvxferError
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvxfer.bench.engines import Engine
    from kvxfer.layout.maps import CacheMap
    from kvxfer.transport.records import HandoffRecord

_OPEN: Final = "open"
_PROBE: Final = "probe-"
"""The router asks each prefill engine who it is with a request of this name; it moves nothing."""


class NoRecordError(KvxferError):
    """The engines have no ended record of a handoff that should have taken place."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One handoff as both engines recorded it. ``tokens`` and ``blocks`` are what decode registered."""

    handoff: str
    tokens: int
    blocks: int
    bytes: int
    descriptors: int
    attempts: int
    backends: tuple[str, ...]
    outcomes: tuple[str, ...]


class Counters:
    """Finds the records of the handoffs that took place since it last looked."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._engines = (prefill, decode)
        self._seen: set[str] = set()
        self.caches: tuple[CacheMap, ...] = ()
        """Decode's caches, one a rank; set by the first look."""
        self._records()

    def next_moved(self, timeout: float = 15.0) -> Moved:
        """Wait until both engines have ended the one new handoff, and return it. Raises NoRecordError."""
        deadline = time.monotonic() + timeout
        while True:
            new = [record for record in self._records() if record.handoff not in self._seen]
            moved = combine(new)
            sides = {record.side for record in new}
            if len(moved) == 1 and len(sides) > 1 and _OPEN not in moved[0].outcomes:
                self._seen.add(moved[0].handoff)
                return moved[0]
            if time.monotonic() > deadline:
                names = " and ".join(engine.spec.name for engine in self._engines)
                raise NoRecordError(
                    f"{names}: within {timeout:g} s there was not one new handoff that both sides had ended, but "
                    f"{[(r.handoff, r.side, r.outcome, r.reason) for r in new] or 'none'}"
                )
            time.sleep(0.05)

    def pass_over(self) -> None:
        """Take what has happened so far as seen."""
        self._seen |= {record.handoff for record in self._records()}

    def _records(self) -> list[HandoffRecord]:
        reports = [fetch_records(engine.control_host, engine.control_port) for engine in self._engines]
        self.caches = tuple(rank.cache for rank in reports[1].ranks)
        return [r for report in reports for r in report.records if not r.handoff.startswith(_PROBE)]


def combine(records: Iterable[HandoffRecord]) -> list[Moved]:
    """One ``Moved`` for each handoff among the records of all sides and ranks."""
    groups: dict[str, list[HandoffRecord]] = {}
    for record in records:
        groups.setdefault(record.handoff, []).append(record)
    return [_moved(handoff, group) for handoff, group in groups.items()]


def _moved(handoff: str, records: Sequence[HandoffRecord]) -> Moved:
    sinks = [record for record in records if record.side == "sink"]
    return Moved(
        handoff=handoff,
        tokens=max((record.tokens for record in sinks), default=0),
        blocks=max((record.blocks for record in sinks), default=0),
        bytes=sum(record.bytes for record in records),
        descriptors=sum(record.descriptors for record in records),
        attempts=max(record.attempts for record in records),
        # Only who moved bytes can say what carried them.
        backends=tuple(sorted({record.backend for record in records if record.bytes})),
        outcomes=tuple(sorted({record.outcome for record in records})),
    )

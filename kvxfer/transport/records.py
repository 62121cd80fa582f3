"""Handoff records: what happened to every handoff on this rank, and when. Always on, in a ring buffer.

Times are seconds of the machine's monotonic clock, which all processes of one host share, so a record can hold the moments
of the scheduler process beside those of the worker. Moments of two hosts cannot be compared.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.protocol.ids import HandoffId

logger = logging.getLogger("kvxfer.records")


class Times(msgspec.Struct, omit_defaults=True):
    """When what happened, in monotonic seconds; None while it has not.

    ``expected``: this side first heard of the handoff. ``allocated``: decode had its blocks. ``registered``: the registration
    left (sink), came (source). ``chunks_final``: each moment at which more prompt positions were final behind their fence.
    ``sealed``: all is final. ``first_post``: the first transfer was posted. ``last_byte``: the last transfer was terminal.
    ``notified``: the last notification came. ``released``: the engine has its blocks back.
    """

    expected: float | None = None
    allocated: float | None = None
    registered: float | None = None
    chunks_final: list[float] = []
    sealed: float | None = None
    first_post: float | None = None
    last_byte: float | None = None
    notified: float | None = None
    released: float | None = None


MOST_MOMENTS = 256
"""Moments kept of one handoff, so that records of very long prompts stay small. What comes later moves the last one."""


class HandoffRecord(msgspec.Struct):
    """One handoff on one side of one rank.

    ``bytes`` and ``descriptors`` are what this side posted; a side that posts nothing (push's sink, pull's source) has zeros
    there. ``completed`` holds, for each of this side's transfers that ended well, when that was seen and the bytes in all by
    then; a write of a generation that was given up is among them. ``tokens`` and ``blocks`` are what the sink registered.
    ``trace`` is the request's ``traceparent``, where telemetry wants it and a client or a router sent one.
    """

    handoff: str
    request_id: str
    side: str
    rank: int
    mode: str
    peer: str = ""
    tokens: int = 0
    blocks: int = 0
    bytes: int = 0
    descriptors: int = 0
    backend: str = ""
    attempts: int = 1
    outcome: str = "open"
    reason: str = ""
    times: Times = msgspec.field(default_factory=Times)
    completed: list[tuple[float, int]] = []
    trace: str = ""

    def posted(self, size: int, descriptors: int, now: float) -> None:
        """Add a transfer that was posted: its bytes, its descriptors, the moment."""
        self.bytes += size
        self.descriptors += descriptors
        self.times.first_post = self.times.first_post or now

    def ended(self, size: int, now: float) -> None:
        """Note that a transfer is terminal: the bytes of it that are there, the moment."""
        self.times.last_byte = now
        if size:
            moment = now, size + (self.completed[-1][1] if self.completed else 0)
            self.completed[len(self.completed[: MOST_MOMENTS - 1]) :] = [moment]

    def completed_by(self, moment: float) -> int:
        """Return the bytes that were there at a moment of the same clock."""
        return max((size for at, size in self.completed if at <= moment), default=0)


class RecordBook:
    """The last ``capacity`` ended handoffs and all that are open. Written by the mover, read by anybody.

    ``hear`` are told of each record that ends, in the mover's thread: it does not change any more. They must not wait.
    """

    def __init__(self, capacity: int, hear: Sequence[Callable[[HandoffRecord], None]] = ()) -> None:
        self._hear = hear
        self._ended: deque[HandoffRecord] = deque(maxlen=capacity)
        self._open: dict[tuple[str, HandoffId], HandoffRecord] = {}
        self._lock = threading.Lock()

    def open(self, side: str, handoff: HandoffId, rank: int, mode: str) -> HandoffRecord:
        """Return the open record of a handoff, making it if there is none."""
        record = self._open.get((side, handoff))
        if record is None:
            record = HandoffRecord(str(handoff), "", side, rank, mode)
            with self._lock:
                self._open[side, handoff] = record
        return record

    def get(self, side: str, handoff: HandoffId) -> HandoffRecord | None:
        """Return the open record of a handoff, if there is one."""
        return self._open.get((side, handoff))

    def end(self, side: str, handoff: HandoffId, outcome: str, reason: str, now: float) -> None:
        """Close a record: the engine has its blocks back."""
        with self._lock:
            record = self._open.pop((side, handoff), None)
            if record is not None:
                record.outcome, record.reason, record.times.released = outcome, reason, now
                self._ended.append(record)
        if record is not None:
            for hear in self._hear:
                try:
                    hear(record)
                except Exception:  # the engine must have its blocks back, whatever telemetry makes of it
                    logger.exception("defect in the telemetry of handoff %s", handoff)

    def last(self, count: int) -> list[HandoffRecord]:
        """Return the last ``count`` records, the open ones last. They go on changing; encode them at once."""
        with self._lock:
            records = [*self._ended, *self._open.values()]
        return records[-count:] if count > 0 else []

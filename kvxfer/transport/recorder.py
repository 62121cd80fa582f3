"""Keeps the mover's record book: what of each handoff happened when, and how much of it was moved by what.

Kept apart from what is done: nothing in the mover depends on a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.protocol.actions import PostWrite, SourceFinished

if TYPE_CHECKING:
    from kvxfer.layout.maps import CacheMap
    from kvxfer.protocol.actions import Note, PostRead, SinkFinished
    from kvxfer.protocol.ids import HandoffId
    from kvxfer.transport import commands as cmd
    from kvxfer.transport.records import RecordBook
    from kvxfer.transport.transfers import InFlight


class Recorder:
    """Of one rank's mover, in its thread. ``mode`` is push or pull."""

    def __init__(self, book: RecordBook, rank: int, mode: str, cache: CacheMap) -> None:
        self._book = book
        self._rank = rank
        self._mode = mode
        self._cache = cache

    def started(self, start: cmd.SourceStart, backend: str) -> None:
        """Note that the engine has a request whose KV another engine wants."""
        record = self._book.open("source", start.handoff, self._rank, self._mode)
        record.request_id, record.backend = record.request_id or start.request_id, backend
        record.trace = start.trace
        record.times.expected = record.times.expected or start.heard

    def opened(self, opened: cmd.SinkOpen, backend: str) -> None:
        """Note that the engine has allocated blocks for what another engine prefills."""
        record = self._book.open("sink", opened.handoff, self._rank, self._mode)
        record.request_id, record.backend, record.mode = opened.request_id, backend, opened.mode or self._mode
        record.trace = opened.trace
        record.tokens = opened.end - opened.start
        record.blocks = self._cache.blocks_for(opened.start, opened.end)
        record.times.expected, record.times.allocated = opened.heard, opened.allocated

    def note(self, note: Note, now: float) -> None:
        """Note what a machine says."""
        if note.side == "source" and note.what in ("expected", "registered", "held"):
            opened = self._book.open("source", note.handoff, self._rank, self._mode)
            opened.mode = "pull" if note.what == "held" else opened.mode
        record = self._book.get(note.side, note.handoff)
        if record is None:
            return
        times = record.times
        match note.what:
            case "expected" | "registered" | "sealed":
                if getattr(times, note.what) is None:
                    setattr(times, note.what, now)
            case "chunk":
                times.chunks_final.append(now)
            case "served" | "cancelled" | "fencing" | "revoking" | "duplicate":
                record.reason = note.detail
                if note.detail != "done":
                    record.outcome = note.what
            case "expired" | "closed":  # ended, and the engine was owed nothing
                self._book.end("source", note.handoff, "done" if note.detail == "done" else note.what, note.detail, now)

    def posted(self, action: PostWrite | PostRead, posted: InFlight, now: float) -> None:
        """Note that a transfer is under way."""
        record = self._book.get(posted.side, action.handoff)
        if record is None:
            return
        record.posted(posted.bytes, posted.descriptors, now)
        peer = str(action.to if isinstance(action, PostWrite) else action.frm)
        record.peer = record.peer or peer
        if isinstance(action, PostWrite) and record.peer == peer:  # the same positions go to its other ranks
            record.tokens += action.end - action.start
            record.blocks += self._cache.blocks_for(action.start, action.end)

    def terminal(self, one: InFlight, now: float, *, failed: bool) -> None:
        """Note that nothing of a transfer is under way any more."""
        record = self._book.get(one.side, one.handoff)
        if record is not None:
            record.ended(0 if failed else one.bytes, now)

    def notified(self, handoff: HandoffId, now: float) -> None:
        """Note that a source's word of a write has arrived."""
        record = self._book.get("sink", handoff)
        if record is not None:
            record.times.notified = now

    def ended(self, action: SourceFinished | SinkFinished, now: float) -> None:
        """Note that a handoff ends and its engine is told."""
        side = "source" if isinstance(action, SourceFinished) else "sink"
        record, failure = self._book.get(side, action.handoff), getattr(action, "reason", None)
        outcome = "failed" if failure else (record.outcome if record else "open")
        reason = failure or (record.reason if record else "")
        self._book.end(side, action.handoff, "done" if outcome == "open" else outcome, reason, now)

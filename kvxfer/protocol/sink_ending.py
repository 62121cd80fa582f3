"""How a handoff ends at its sink: what of it must be valid, or terminal, before the engine has its blocks back.

Why, is in ``sink_states``.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from kvxfer.errors import LocalProtocolError
from kvxfer.protocol.actions import Action, Note, Revoke, Send, SinkFinished
from kvxfer.protocol.intervals import IntervalSet
from kvxfer.protocol.messages import Cancel, Register, Release
from kvxfer.protocol.sink_states import TRANSITIONS, Event, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.protocol.sink_data import Part, SinkHandoff


NOTHING: Final = IntervalSet()
SOONEST: Final = 0.25
ENDING: Final = (State.CANCELLING, State.FENCING)


class Ending:
    """The half of ``Sink`` that ends handoffs; what happens to them is the other. Neither is used without the other.

    Parameters
    ----------
    drain_bound
        Seconds in which a write that was posted before a lease ended has landed or never will.
    lease_margin
        Seconds taken off a pull's lease: a read must have completed that long before its end.
    renew_after
        Seconds after which a registration or a cancel that has not been answered is said again, and a read's lease renewed;
        sooner where the lease that was granted is shorter than four times that.
    transfer_limit
        Seconds after which a read that has not become terminal is stopped, by revoking this rank's keys.
    revoke
        Revoke this rank's keys before blocks return that a lost source, not known to have ended, might still write into.
        Without it, the time alone is trusted: lease and drain bound.
    """

    def __init__(
        self,
        *,
        drain_bound: float = 2.0,
        lease_margin: float = 0.5,
        renew_after: float = 5.0,
        transfer_limit: float = 120.0,
        revoke: bool = True,
    ) -> None:
        self.drain_bound = drain_bound
        self.lease_margin = lease_margin
        self.renew_after = renew_after
        self.transfer_limit = transfer_limit
        self.revoke = revoke
        self._handoffs: dict[HandoffId, SinkHandoff] = {}
        self._by_request: dict[str, HandoffId] = {}
        self._transfers: dict[int, tuple[SinkHandoff, RankId]] = {}
        self._exposed: set[HandoffId] = set()  # push: a source may write
        self._arriving: set[HandoffId] = set()  # push: a source said that it writes
        self._numbers = itertools.count(1)
        self._attempts = itertools.count(1)
        self.ignored = 0  # messages about handoffs, attempts or ranks that are not ours any more

    def _step(self, one: SinkHandoff, event: Event) -> None:
        try:
            one.state = TRANSITIONS[one.state][event]
        except KeyError:
            raise LocalProtocolError(f"sink handoff {one.id}: {event.value} while {one.state.value}") from None

    def _part(self, handoff: HandoffId, attempt: int, agent: str) -> tuple[SinkHandoff | None, Part | None]:
        """Find what a source's word is about; anything of an ended handoff or attempt, or from a stranger, is ignored."""
        one = self._handoffs.get(handoff)
        if one is not None and one.attempt == attempt:
            for rank, part in one.parts.items():
                if rank.agent == agent:
                    return one, part
        self.ignored += 1
        return None, None

    def _with(self, peer: RankId) -> list[tuple[SinkHandoff, Part]]:
        return [(one, one.parts[peer]) for one in self._handoffs.values() if peer in one.parts]

    def _register(self, one: SinkHandoff, now: float, *, again: bool = False) -> Iterator[Action]:
        one.asked = now
        for rank, part in one.parts.items():
            if not part.quiet:
                yield from self._ask(one, rank, part, now, again=again)

    @staticmethod
    def _ask(one: SinkHandoff, rank: RankId, part: Part, now: float, *, again: bool) -> Iterator[Action]:
        span = (one.mode, one.start, one.end, part.blocks)
        yield Send(rank, Register(one.id, one.attempt, *span, now, again, one.prompt))

    def _check(self, one: SinkHandoff) -> Iterator[Action]:
        """Receive the handoff if every rank's sealed generation covers the span."""
        if one.state is not State.REGISTERED:
            return
        for part in one.parts.values():
            if part.sealed is None or not part.valid.get(part.sealed, NOTHING).covers(one.start, one.end):
                return
        self._step(one, Event.COMPLETE)
        yield from self._close(one, None)

    def _fence(self, one: SinkHandoff, now: float) -> Iterator[Action]:
        """Let the blocks go if nothing can write into them any more; if only time says so, revoke."""
        if one.mode == "pull":
            if one.fence_at <= now and not one.reading():
                self._step(one, Event.FENCE)
                yield from self._release(one, one.reason or "failed", everybody=True)
                yield from self._close(one, one.reason or "failed")
            return
        waiting = [part for part in one.parts.values() if not part.quiet]
        if any(not part.lost or part.until > now for part in waiting):
            if now - one.asked >= self.renew_after and not all(part.lost for part in waiting):
                self._step(one, Event.RENEW)
                one.asked = now
                yield from self._send_cancel(one)
        elif all(part.dead for part in waiting) or not self.revoke:
            self._step(one, Event.FENCE)
            yield from self._close(one, one.reason or "the source is lost")
        elif not one.revoking:
            one.revoking = True
            yield Note("sink", one.id, "revoking", one.reason or "")
            yield Revoke(f"handoff {one.id}: {one.reason}, and may still write")

    @staticmethod
    def _renewable(one: SinkHandoff) -> bool:
        return one.state in (State.REGISTERED, State.READING) or (one.state is State.CANCELLING and one.mode == "push")

    def _patience(self, one: SinkHandoff) -> float:
        """Return after how many seconds it is said again; a source that grants next to nothing is not asked without end."""
        return min(self.renew_after, max(one.shortest_lease() / 4, SOONEST))

    @staticmethod
    def _sealed(one: SinkHandoff) -> bool:
        return (
            one.state is State.REGISTERED
            and one.mode == "push"
            and all(part.sealed is not None for part in one.parts.values())
        )

    def _lost_notification(self, one: SinkHandoff) -> Iterator[Action]:
        """Every rank has sealed, so nothing is in flight, and yet positions are missing: they will not come."""
        missing = {
            str(rank): part.valid.get(part.sealed or 0, NOTHING).missing(one.start, one.end)
            for rank, part in one.parts.items()
        }
        yield from self._fail(one, f"sealed, but the notifications of these positions never came: {missing}")

    def _cancel(self, one: SinkHandoff, reason: str) -> Iterator[Action]:
        one.reason = one.reason or reason
        if one.state is State.OPENING:
            self._step(one, Event.CANCEL)
            yield from self._close(one, one.reason)
            return
        if one.state is not State.FENCING and one.mode == "pull" and not one.reading():
            yield from self._end_pull(one)
            return
        already = one.state is not State.REGISTERED
        self._step(one, Event.CANCEL)
        if one.mode == "push" and not already:
            yield from self._send_cancel(one)
        yield from self._check_quiet(one)

    @staticmethod
    def _send_cancel(one: SinkHandoff) -> Iterator[Action]:
        for rank, part in one.parts.items():
            if not (part.quiet or part.lost):
                yield Send(rank, Cancel(one.id, one.attempt, one.reason or "cancelled"))

    def _check_quiet(self, one: SinkHandoff) -> Iterator[Action]:
        """End a push that will not be received once every source rank has said that nothing is in flight."""
        if one.state in ENDING and one.mode == "push" and all(part.quiet for part in one.parts.values()):
            yield from self._fail(one, one.reason or "cancelled")

    def _read(self, transfer: int) -> tuple[SinkHandoff, Part]:
        """Find whose read is terminal."""
        one, rank = self._transfers.pop(transfer)
        one.parts[rank].reading = None
        return one, one.parts[rank]

    def _end_pull(self, one: SinkHandoff) -> Iterator[Action]:
        """End a pull that fails, unless reads are posted, and tell its source ranks that they may free their blocks."""
        if not one.reading():
            reason = one.reason or "cancelled"
            yield from self._release(one, reason, everybody=True)
            yield from self._fail(one, reason)

    def _look(self, one: SinkHandoff) -> None:
        """Note whether notifications of this handoff are under way: announced by their source, or sealed and not all here."""
        for part in one.parts.values():
            lacks = part.sealed is not None and not part.valid.get(part.sealed, NOTHING).covers(one.start, one.end)
            if lacks or (part.sealed is None and part.posted > part.notified):
                self._arriving.add(one.id)
                return
        self._arriving.discard(one.id)

    @staticmethod
    def _release(one: SinkHandoff, reason: str, *, everybody: bool = False) -> Iterator[Action]:
        """Tell source ranks, each once, that they may free their blocks: those that we have read from, or all."""
        for rank, part in one.parts.items():
            if (everybody or part.quiet) and not part.released:
                part.released = True
                yield Send(rank, Release(one.id, reason))

    def _fail(self, one: SinkHandoff, reason: str) -> Iterator[Action]:
        self._step(one, Event.FAIL)
        yield from self._close(one, reason)

    def _close(self, one: SinkHandoff, reason: str | None) -> Iterator[Action]:
        self._exposed.discard(one.id)
        self._arriving.discard(one.id)
        del self._handoffs[one.id]
        del self._by_request[one.request_id]
        yield SinkFinished(one.id, one.request_id, reason)

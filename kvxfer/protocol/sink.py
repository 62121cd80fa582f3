"""The sink: one rank's view of requests whose KV somebody else computes for it.

What a handoff goes through, and why its blocks go back to the engine when they do, is in ``sink_states``.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.protocol.actions import Action, Note, PostRead, Revoke, Send, SinkFinished
from kvxfer.protocol.ids import shown
from kvxfer.protocol.intervals import IntervalSet
from kvxfer.protocol.messages import Cancel, CancelAck, Failed, Grant, Posted, Register, Release, Seal, Written
from kvxfer.protocol.sink_data import Part, SinkHandoff
from kvxfer.protocol.sink_states import TRANSITIONS, Event, State

__all__ = ["TRANSITIONS", "Event", "Sink", "State"]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvxfer.protocol.ids import HandoffId, RankId


LOOKS = 4
"""Ticks after the drain bound in which a notification that is missing may still be found."""

MAX_GENERATIONS = 1024
"""Generations of one handoff that are told apart: each is a preemption of the prompt while it was computed."""


class Sink:
    """All handoffs of which this rank is a sink. Every method takes what happened and returns what to do.

    Parameters
    ----------
    drain_bound
        Seconds in which a write that was posted before a lease ended has landed or never will.
    lease_margin
        Seconds taken off a pull's lease: a read must have completed that long before its end.
    renew_after
        Seconds after which a registration or a cancel that has not been answered is said again, and a read's lease renewed.
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
        self._transfers: dict[int, SinkHandoff] = {}
        self._exposed: set[HandoffId] = set()  # push: a source may write
        self._arriving: set[HandoffId] = set()  # push: a source said that it writes
        self._numbers = itertools.count(1)
        self._attempts = itertools.count(1)
        self.ignored = 0  # messages about handoffs, attempts or ranks that are not ours any more

    # --- events from the engine -------------------------------------------------------------------------------------

    def open(
        self,
        handoff: HandoffId,
        request_id: str,
        mode: str,
        start: int,
        end: int,
        blocks: bytes,
        now: float,
        prompt: bytes = b"",
    ) -> Iterator[Action]:
        """Take over the blocks that shall receive positions [start, end): packed tables, whole blocks.

        ``prompt`` digests everything that shapes the KV of positions [0, end); a source of others refuses.
        """
        if request_id in self._by_request:
            raise LocalProtocolError(f"request {request_id} opened a second handoff while its first is open")
        if handoff in self._handoffs:
            # Two requests claim one handoff; the second gets nothing, at once: nobody has its blocks.
            yield SinkFinished(handoff, request_id, f"request {self._handoffs[handoff].request_id} has this handoff id")
            return
        one = SinkHandoff(handoff, request_id, mode, start, end, blocks, next(self._attempts), asked=now, prompt=prompt)
        self._handoffs[handoff] = one
        self._by_request[request_id] = handoff

    def cancel(self, request_id: str, reason: str) -> Iterator[Action]:
        """Note that the engine wants the request no more. Its blocks still come back by ``SinkFinished``."""
        handoff = self._by_request.get(request_id)
        if handoff is not None:
            yield from self._cancel(self._handoffs[handoff], reason)

    # --- events from the control channel ----------------------------------------------------------------------------

    def connected(
        self, handoff: HandoffId, sources: Sequence[RankId], now: float, staged: Mapping[RankId, bytes] | None = None
    ) -> Iterator[Action]:
        """All source ranks are connected, the fence for the blocks has passed: register.

        ``staged`` are packed ids of slots that shall receive the positions in place of the handoff's own blocks, by source
        rank. They belong to the handoff for as long as its blocks do.
        """
        one = self._handoffs.get(handoff)
        if one is None or one.state is not State.OPENING:
            return
        self._step(one, Event.CONNECT)
        if one.mode == "push":
            self._exposed.add(one.id)
        one.parts = {rank: Part((staged or {}).get(rank, one.blocks)) for rank in sources}
        yield Note("sink", one.id, "registered")
        yield from self._register(one, now)

    def unreachable(self, handoff: HandoffId, reason: str) -> Iterator[Action]:
        """The source's ranks cannot be connected, or refuse us. Nothing has been sent to them."""
        one = self._handoffs.get(handoff)
        if one is not None and one.state is State.OPENING:
            yield from self._fail(one, reason)

    def written(self, frm: str, message: Written) -> Iterator[Action]:
        """Handle a write's notification, which came from the NIXL agent named ``frm``."""
        one, part = self._part(message.handoff, message.attempt, frm)
        if one is None or part is None:
            return
        if message.end < message.start or message.start < 0:
            raise RemoteProtocolError(f"{shown(frm)} says it wrote positions [{message.start}, {message.end})")
        if message.generation not in part.valid and len(part.valid) >= MAX_GENERATIONS:
            raise RemoteProtocolError(f"{shown(frm)} writes {one.id} under more than {MAX_GENERATIONS:,} generations")
        # No more than was asked for is kept: a peer may name as many spans as it likes.
        start, end = max(message.start, one.start), min(message.end, one.end)
        part.valid.setdefault(message.generation, IntervalSet()).add(start, max(start, end))
        part.notified += 1
        self._look(one)
        yield from self._check(one)

    def posted(self, frm: RankId, message: Posted) -> None:
        """Handle Posted: so many writes are on their way. A message that is lost costs nothing but a later look."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is not None and part is not None and one.mode == "push":
            part.posted = message.writes
            self._look(one)

    def seal(self, frm: RankId, message: Seal, now: float) -> Iterator[Action]:
        """Handle Seal: of what this rank wrote, that generation counts."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or part is None or one.mode != "push":
            return
        part.sealed = message.generation
        part.quiet = True  # a source seals when every write is terminal
        one.sealed_at, one.looked = now, 0
        self._look(one)
        yield Note("sink", one.id, "sealed")
        yield from self._check(one)
        yield from self._check_quiet(one)

    def failed(self, frm: RankId, message: Failed) -> Iterator[Action]:
        """Handle Failed: that rank will not deliver, and nothing of the attempt is in flight from it."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or part is None or part.sealed is not None:
            return  # after a seal it only answers a registration that was said again
        part.quiet = True
        yield from self._cancel(one, message.reason)

    def cancel_ack(self, frm: RankId, message: CancelAck) -> Iterator[Action]:
        """Handle CancelAck: nothing of the attempt is or will be in flight from that rank."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or part is None or one.state not in _ENDING:
            return  # nobody has asked
        part.quiet = True
        yield from self._check_quiet(one)

    def grant(self, frm: RankId, message: Grant, now: float) -> Iterator[Action]:
        """Handle Grant (pull): read, if the lease still has a future; otherwise ask again."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or part is None or one.mode != "pull" or one.state not in (State.REGISTERED, State.READING):
            return
        if message.tokens < one.end:
            reason = (
                f"prefill's prompt has {message.tokens:,} tokens, decode wants positions up to {one.end:,}: "
                "send both legs the same prompt and the same tokenizer settings"
            )
            yield from self._finish_pull(one, reason)
            return
        # What this process asked at is its own clock, so the end is never later than the source's, which granted later.
        one.valid_until = max(one.valid_until, message.asked + message.lease - self.lease_margin)
        if one.state is State.READING:
            return
        if one.valid_until <= now:
            self._step(one, Event.RENEW)
            yield from self._register(one, now, again=True)
            return
        self._step(one, Event.READ)
        one.reading, one.read_at = next(self._numbers), now
        self._transfers[one.reading] = one
        yield Note("sink", one.id, "granted")
        yield PostRead(
            one.reading, frm, one.id, one.attempt, one.start, one.end,
            message.blocks, part.blocks, (one.start, one.end),
        )  # fmt: skip

    def peer_lost(
        self, peer: RankId, reason: str, granted_until: float, now: float, *, dead: bool = False
    ) -> Iterator[Action]:
        """Note that the session with a source's process is lost. It may have posted until ``granted_until``, by our clock.

        ``dead``: the process is known to have ended, so that nothing of it needs to be revoked when its leases have ended.
        """
        for one, part in self._with(peer):
            if part.quiet:
                continue  # what it had to say, it has said
            if one.mode == "pull":
                yield from self._cancel(one, f"{peer} is gone: {reason}")
                continue
            first = one.state is State.REGISTERED
            one.reason = one.reason or f"{peer} is gone: {reason}"
            self._step(one, Event.LOSE)
            part.lost, part.dead = True, dead
            part.until = max(granted_until, now) + self.drain_bound
            yield Note("sink", one.id, "fencing", reason)
            if first:
                one.asked = now
                yield from self._send_cancel(one)

    def peer_ended(self, peer: RankId) -> None:
        """Note that the process of a source that was lost before is known to have ended."""
        for _, part in self._with(peer):
            part.dead = part.lost

    def peer_back(self, peer: RankId, now: float) -> Iterator[Action]:
        """Note that a source that was lost has a session again: it can say that nothing of an attempt is in flight."""
        for one, part in self._with(peer):
            if part.lost:
                part.lost, part.dead, one.asked = False, False, now
                yield Send(peer, Cancel(one.id, one.attempt, one.reason or "cancelled"))

    def revoked(self) -> Iterator[Action]:
        """Note that this rank's keys are others than before: nothing that was posted under the old ones lands any more."""
        for one in [h for h in self._handoffs.values() if h.id in self._exposed]:
            self._step(one, Event.REVOKED)
            reason = "this rank revoked the keys of its memory, since a lost peer might still have written into it"
            yield from self._close(one, one.reason or reason)

    # --- events from the transport ----------------------------------------------------------------------------------

    def read_done(self, transfer: int, now: float) -> Iterator[Action]:
        """Note that our read is terminal and its data is in our blocks."""
        one = self._transfers.pop(transfer)
        one.reading = None
        if one.state is State.CANCELLING:
            yield from self._finish_pull(one, one.reason)
        elif now <= one.valid_until:
            yield from self._finish_pull(one, None)
        else:
            late = now - one.valid_until
            yield from self._finish_pull(one, f"the read completed {late:.3f} s after its lease had ended")

    def read_failed(self, transfer: int, reason: str, now: float) -> Iterator[Action]:
        """Note that our read failed, or could not be posted; parts of it may be under way until the drain bound is over."""
        one = self._transfers.pop(transfer)
        one.reading = None
        one.reason = one.reason or f"a read failed: {reason}"
        self._step(one, Event.LOSE)
        one.fence_at = now + self.drain_bound
        yield Note("sink", one.id, "fencing", one.reason)

    def tick(self, now: float) -> Iterator[Action]:
        """Pass fences whose time has come, renew the leases of pulls, say again what was not answered, stop what never ends."""
        for one in list(self._handoffs.values()):
            if one.reading is not None and now - one.read_at >= self.transfer_limit:
                one.read_at = math.inf
                yield Revoke(f"handoff {one.id}: a read has not ended for {self.transfer_limit:g} s")
            if one.state is State.FENCING:
                yield from self._fence(one, now)
            elif self._sealed(one) and one.sealed_at + self.drain_bound <= now:
                # A driver that was not running meanwhile has not looked: what came lies there.
                one.looked += 1
                if one.looked >= LOOKS:
                    yield from self._lost_notification(one)
            elif self._renewable(one) and now - one.asked >= self.renew_after:
                self._step(one, Event.RENEW)
                if one.state is State.CANCELLING:
                    one.asked = now
                    yield from self._send_cancel(one)
                else:
                    yield from self._register(one, now, again=True)

    # --- what the driver asks ---------------------------------------------------------------------------------------

    def receiving(self) -> bool:
        """Tell whether data may be arriving right now, so that the fabric needs progress."""
        return bool(self._transfers or self._exposed)

    def arriving(self) -> bool:
        """Tell whether data is known to be arriving, so that each look for its end counts."""
        return bool(self._transfers or self._arriving)

    def state(self, handoff: HandoffId) -> State | None:
        """Return the state of a handoff; None when it is closed or was never opened."""
        one = self._handoffs.get(handoff)
        return None if one is None else one.state

    def wants_back(self, peer: RankId) -> bool:
        """Tell, once for each handoff, that it waits for what a lost source may still write: called, it may answer.

        Once, since one that answers every call, and never what it is asked, would otherwise put the fence off for ever.
        """
        waiting = [one for one, part in self._with(peer) if part.lost and not one.called_back]
        for one in waiting:
            one.called_back = True
        return bool(waiting)

    def span(self, handoff: HandoffId) -> tuple[int, int, bytes]:
        """Return the positions [start, end) of an open handoff, and its own blocks."""
        one = self._handoffs[handoff]
        return one.start, one.end, one.blocks

    def request(self, handoff: HandoffId) -> str | None:
        """Return the request that an open handoff is for."""
        one = self._handoffs.get(handoff)
        return None if one is None else one.request_id

    def __len__(self) -> int:
        """Return the number of handoffs that have not ended."""
        return len(self._handoffs)

    # --- inside -----------------------------------------------------------------------------------------------------

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
                span = (one.mode, one.start, one.end, part.blocks)
                yield Send(rank, Register(one.id, one.attempt, *span, now, again, one.prompt))

    def _check(self, one: SinkHandoff) -> Iterator[Action]:
        """Receive the handoff if every rank's sealed generation covers the span."""
        if one.state is not State.REGISTERED:
            return
        for part in one.parts.values():
            if part.sealed is None or not part.valid.get(part.sealed, _NOTHING).covers(one.start, one.end):
                return
        self._step(one, Event.COMPLETE)
        yield from self._close(one, None)

    def _fence(self, one: SinkHandoff, now: float) -> Iterator[Action]:
        """Let the blocks go if nothing can write into them any more; if only time says so, revoke."""
        if one.mode == "pull":
            if one.fence_at <= now:
                self._step(one, Event.FENCE)
                yield from self._release(one, one.reason or "failed")
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
            str(rank): part.valid.get(part.sealed or 0, _NOTHING).missing(one.start, one.end)
            for rank, part in one.parts.items()
        }
        yield from self._fail(one, f"sealed, but the notifications of these positions never came: {missing}")

    def _cancel(self, one: SinkHandoff, reason: str) -> Iterator[Action]:
        one.reason = one.reason or reason
        if one.state is State.OPENING:
            self._step(one, Event.CANCEL)
            yield from self._close(one, one.reason)
            return
        if one.state is not State.FENCING and one.mode == "pull" and one.reading is None:
            yield from self._finish_pull(one, one.reason)
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
        if one.state in _ENDING and one.mode == "push" and all(part.quiet for part in one.parts.values()):
            yield from self._fail(one, one.reason or "cancelled")

    def _finish_pull(self, one: SinkHandoff, reason: str | None) -> Iterator[Action]:
        """End a pull whose reads are terminal, and tell the source that it may free its blocks."""
        if one.reading is not None:
            one.reason = one.reason or reason
            self._step(one, Event.CANCEL)
            return
        yield from self._release(one, reason or "done")
        if reason is None:
            self._step(one, Event.COMPLETE)
            yield from self._close(one, None)
        else:
            yield from self._fail(one, reason)

    def _look(self, one: SinkHandoff) -> None:
        """Note whether notifications of this handoff are under way: announced by their source, or sealed and not all here."""
        for part in one.parts.values():
            lacks = part.sealed is not None and not part.valid.get(part.sealed, _NOTHING).covers(one.start, one.end)
            if lacks or (part.sealed is None and part.posted > part.notified):
                self._arriving.add(one.id)
                return
        self._arriving.discard(one.id)

    @staticmethod
    def _release(one: SinkHandoff, reason: str) -> Iterator[Action]:
        for rank in one.parts:
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


_NOTHING = IntervalSet()
_ENDING = (State.CANCELLING, State.FENCING)

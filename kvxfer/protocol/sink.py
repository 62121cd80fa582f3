"""The sink: one rank's view of requests whose KV somebody else computes for it.

What a handoff goes through, and why its blocks go back to the engine when they do, is in ``sink_states``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.protocol.actions import Action, Note, PostRead, Revoke, Send, SinkFinished
from kvxfer.protocol.ids import shown
from kvxfer.protocol.intervals import IntervalSet
from kvxfer.protocol.messages import Cancel, Release
from kvxfer.protocol.sink_data import Part, SinkHandoff
from kvxfer.protocol.sink_ending import ENDING, Ending
from kvxfer.protocol.sink_states import TRANSITIONS, Event, State

__all__ = ["TRANSITIONS", "Event", "Sink", "State"]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.protocol.messages import CancelAck, Failed, Grant, Posted, Seal, Written


LOOKS = 4
"""Ticks after the drain bound in which a notification that is missing may still be found."""

IDLE = "no rank of decode takes anything from this one"
"""What source ranks are told that nobody asks."""

MAX_GENERATIONS = 1024
"""Generations of one handoff that are told apart: each is a preemption of the prompt while it was computed."""


class Sink(Ending):
    """All handoffs of which this rank is a sink. Every method takes what happened and returns what to do.

    The parameters are those of ``Ending``.
    """

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
        self,
        handoff: HandoffId,
        sources: Sequence[RankId],
        now: float,
        staged: Mapping[RankId, bytes] | None = None,
        idle: Iterable[RankId] = (),
    ) -> Iterator[Action]:
        """All source ranks are connected, the fence for the blocks has passed: register with those that have our shares.

        ``staged`` are packed ids of slots that shall receive the positions in place of the handoff's own blocks, by source
        rank. They belong to the handoff for as long as its blocks do. ``idle`` are ranks of the source from which no rank of
        this engine takes anything: they shall not wait for any.
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
        for rank in idle:
            yield Send(rank, Release(one.id, IDLE))

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
        if one is None or part is None or part.sealed is not None or part.released:
            return  # after a seal, or our release, it only answers a registration that was said again
        part.quiet = True
        yield from self._cancel(one, message.reason)

    def cancel_ack(self, frm: RankId, message: CancelAck) -> Iterator[Action]:
        """Handle CancelAck: nothing of the attempt is or will be in flight from that rank."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or part is None or one.state not in ENDING:
            return  # nobody has asked
        part.quiet = True
        yield from self._check_quiet(one)

    def grant(self, frm: RankId, message: Grant, now: float) -> Iterator[Action]:
        """Handle Grant (pull): read, if the lease still has a future; otherwise ask again."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or part is None or one.mode != "pull" or one.state not in (State.REGISTERED, State.READING):
            return
        if part.released:
            return
        if message.tokens < one.end:
            reason = (
                f"prefill's prompt has {message.tokens:,} tokens, decode wants positions up to {one.end:,}: "
                "send both legs the same prompt and the same tokenizer settings"
            )
            yield from self._cancel(one, reason)
            return
        # What this process asked at is its own clock, so the end is never later than the source's, which granted later.
        part.valid_until = max(part.valid_until, message.asked + message.lease - self.lease_margin)
        part.lease = message.lease
        if part.reading is not None:
            return
        if part.valid_until <= now:
            self._step(one, Event.RENEW)
            yield from self._ask(one, frm, part, now, again=True)
            return
        self._step(one, Event.READ)
        part.reading, part.read_at = next(self._numbers), now
        self._transfers[part.reading] = one, frm
        yield Note("sink", one.id, "granted")
        yield PostRead(
            part.reading, frm, one.id, one.attempt, one.start, one.end,
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

    def peer_ended(self, peer: RankId, now: float) -> None:
        """Note that the process of a source that was lost before is known to have ended.

        It may have been asleep since, with writes under way, and have ended just now: what it left to the fabric still lands.
        """
        for _, part in self._with(peer):
            if part.lost and not part.dead:
                part.dead, part.until = True, max(part.until, now + self.drain_bound)

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
        one, part = self._read(transfer)
        late = now - part.valid_until
        if one.state is State.CANCELLING:
            yield from self._end_pull(one)
        elif one.state is State.READING and late > 0.0:
            yield from self._cancel(one, f"the read completed {late:.3f} s after its lease had ended")
        elif one.state is State.READING:
            part.quiet = True
            yield from self._release(one, "done")
            if all(part.quiet for part in one.parts.values()):
                self._step(one, Event.COMPLETE)
                yield from self._close(one, None)

    def read_failed(self, transfer: int, reason: str, now: float) -> Iterator[Action]:
        """Note that our read failed, or could not be posted; parts of it may be under way until the drain bound is over."""
        one, _ = self._read(transfer)
        one.reason = one.reason or f"a read failed: {reason}"
        self._step(one, Event.LOSE)
        one.fence_at = now + self.drain_bound
        yield Note("sink", one.id, "fencing", one.reason)

    def tick(self, now: float) -> Iterator[Action]:
        """Pass fences whose time has come, renew the leases of pulls, say again what was not answered, stop what never ends."""
        for one in list(self._handoffs.values()):
            for part in one.parts.values():
                if part.reading is not None and now - part.read_at >= self.transfer_limit:
                    part.read_at = math.inf
                    yield Revoke(f"handoff {one.id}: a read has not ended for {self.transfer_limit:g} s")
            if one.state is State.FENCING:
                yield from self._fence(one, now)
            elif self._sealed(one) and one.sealed_at + self.drain_bound <= now:
                # A driver that was not running meanwhile has not looked: what came lies there.
                one.looked += 1
                if one.looked >= LOOKS:
                    yield from self._lost_notification(one)
            elif self._renewable(one) and now - one.asked >= self._patience(one):
                self._step(one, Event.RENEW)
                if one.state is State.CANCELLING:
                    one.asked = now
                    yield from self._send_cancel(one)
                else:
                    yield from self._register(one, now, again=True)

    # --- what the driver asks ---------------------------------------------------------------------------------------

    def receives(self, frm: str, message: Written) -> RankId | None:
        """Return the source rank if a write's notification is of an open push of ours, and comes from a rank of its source."""
        one = self._handoffs.get(message.handoff)
        if one is None or one.attempt != message.attempt or one.mode != "push" or one.state is not State.REGISTERED:
            return None
        return next((rank for rank in one.parts if rank.agent == frm), None)

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

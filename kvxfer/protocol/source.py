"""The source: one rank's view of requests whose KV it computes for somebody else.

What a handoff goes through, and what is guaranteed on the way, is in ``source_states``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.protocol.actions import Action, Note, Send, SourceFinished, SourceQuiet
from kvxfer.protocol.ids import shown
from kvxfer.protocol.intervals import IntervalSet
from kvxfer.protocol.messages import Cancel, CancelAck, Expect, Failed, Register, Release
from kvxfer.protocol.source_data import Registration, SourceHandoff
from kvxfer.protocol.source_delivery import Delivery
from kvxfer.protocol.source_states import TRANSITIONS, Event, State

__all__ = ["TRANSITIONS", "Event", "Source", "State"]

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.protocol.ids import HandoffId, RankId


MAX_TTL = 3600.0
"""Longest time, in seconds, for which one Expect may keep a handoff."""

NO_ROOM = "too many handoffs wait for their prefill leg"


class Source(Delivery):
    """All handoffs of which this rank is a source. Every method takes what happened and returns what to do.

    The parameters are those of ``Delivery``.
    """

    # --- events from the engine -------------------------------------------------------------------------------------

    def start(
        self, handoff: HandoffId, request_id: str, prompt_tokens: int, now: float, prompt: tuple[bytes, ...] = ()
    ) -> Iterator[Action]:
        """Note that the engine has a request with this handoff id; ``prompt_tokens`` positions will be computed for it.

        ``prompt`` digests everything that shapes the KV of the prompt, then of the prompt without its last token, and so on: a
        sink that wants other positions than one of these is refused. () for unknown.
        """
        if request_id in self._by_request:
            raise LocalProtocolError(f"request {request_id} was started twice")
        one = self._handoffs.get(handoff)
        if one is not None and one.request_id is not None:
            # A second request of the same name: the first stays; the second is plain local prefill.
            yield Note("source", handoff, "duplicate", f"request {request_id} repeats the id of {one.request_id}")
            self._by_request[request_id] = handoff
            return
        if one is None:
            self._ended.pop(handoff, None)
            one = self._handoffs[handoff] = SourceHandoff(handoff, State.COMPUTING, now + self.leg_timeout)
        else:
            self._step(one, Event.START)
        self._parking.leave(handoff)
        one.request_id, one.prompt_tokens, one.prompt = request_id, prompt_tokens, prompt
        self._by_request[request_id] = handoff
        yield Note("source", handoff, "started")
        yield from self._check_span(one)
        yield from self._advance(one, now)

    def progress(self, request_id: str, new_blocks: bytes, final: int, now: float) -> Iterator[Action]:
        """Positions [0, final) are final on the device (its fence has passed); ``new_blocks`` (packed) extend its tables."""
        one = self._of(request_id)
        if one is None:
            return
        one.blocks = self.join(one.blocks, new_blocks)
        if final <= one.final:
            return
        one.final = min(final, one.prompt_tokens)
        yield Note("source", one.id, "chunk", str(one.final))
        if one.final == one.prompt_tokens and one.state in (State.COMPUTING, State.SERVED):
            self._step(one, Event.COMPLETE)
            one.hold_until = now + self.hold_limit
            one.deadline = min(max(one.deadline, now + self.leg_timeout), one.hold_until)
            yield Note("source", one.id, "final")
        yield from self._advance(one, now)

    def preempt(self, request_id: str, now: float, token: int = 0) -> Iterator[Action]:
        """Note that the engine took the request's blocks away and computes it again from the start.

        It gives them to nobody before it hears ``SourceQuiet(token)``; without a token, it did not keep them.
        """
        one = self._of(request_id)
        if one is None:
            if token:
                yield SourceQuiet(token)
            return
        self._step(one, Event.PREEMPT)
        one.generation += 1
        one.final, one.hold_until = 0, math.inf
        one.blocks = b""
        self._pin(one, token)
        for sink in one.sinks.values():
            sink.posted, sink.written = IntervalSet(), IntervalSet()
        yield Note("source", one.id, "preempted")
        yield from self._advance(one, now)

    def finish(
        self, request_id: str, now: float, *, aborted: str | None = None, held: bool = True, token: int = 0
    ) -> Iterator[Action]:
        """Note that the engine is done with the request, and waits for its blocks if they are ``held``.

        ``aborted`` says why its prompt did not become final, when it did not; ``token`` as in ``preempt``.
        """
        handoff = self._by_request.get(request_id)
        if handoff is None:
            raise LocalProtocolError(f"request {request_id} finished and was never started")
        one = self._handoffs.get(handoff)
        if one is None or one.request_id != request_id:
            del self._by_request[request_id]  # a duplicate, see start()
            if held:
                yield SourceFinished(handoff, request_id)
            if token:
                yield SourceQuiet(token)
            return
        one.held = held
        self._pin(one, token)
        one.deadline = max(one.deadline, now + self.leg_timeout)
        if one.state is State.COMPUTING:
            aborted = aborted or f"prefill ended with {one.final} of {one.prompt_tokens} prompt tokens computed"
        if aborted and one.state in (State.COMPUTING, State.FINAL):
            yield from self._serve(one, Event.ABORT, aborted)
        if not held and one.request_id is not None:
            # The blocks are the engine's already: nothing more may be read from them.
            if one.state is not State.SERVED:
                yield from self._serve(one, Event.ABORT, "the engine kept no blocks for the handoff")
            del self._by_request[request_id]
            one.request_id = None
        yield from self._advance(one, now)

    def hold(self, handoff: HandoffId, tokens: int, blocks: bytes, until: float, now: float) -> Iterator[Action]:
        """Note that the engine keeps ``blocks``, final at positions [0, tokens), for the READ of this handoff until ``until``.

        They belong to no request, so nothing is owed to the engine at the end: it lets them go by the same clock. Said again,
        it means that it keeps them for longer.
        """
        one = self._handoffs.get(handoff)
        if one is not None and one.prompt_tokens:
            one.until = one.deadline = one.hold_until = max(one.until, until)
            return
        if not blocks or handoff in self._ended:
            return  # over before it began, or before it was said again
        if one is None:
            one = self._handoffs[handoff] = SourceHandoff(handoff, State.COMPUTING, until)
        else:
            self._step(one, Event.START)
        self._parking.leave(handoff)
        one.prompt_tokens = one.final = tokens
        one.blocks, one.held, one.until = blocks, True, until
        one.deadline = one.hold_until = until
        yield Note("source", handoff, "held")
        self._step(one, Event.COMPLETE)
        yield from self._advance(one, now)

    # --- events from the sink's rank --------------------------------------------------------------------------------

    def expect(self, frm: RankId, message: Expect, now: float) -> Iterator[Action]:
        """Handle Expect: keep the handoff alive for ``ttl`` more seconds, but held blocks no longer than the hold limit.

        Who has registered has its own deadline: a second request of the same name, which queues for the very blocks that
        the first one's registration holds, must not put it off for ever.
        """
        if not 0.0 < message.ttl <= MAX_TTL:
            raise RemoteProtocolError(f"{frm} expects {message.handoff} for {message.ttl} s: at most {MAX_TTL:g} s")
        one = self._known(frm, message.handoff, now)
        if one is not None and not one.sinks:
            one.engine = one.engine or frm.engine
            one.deadline = max(one.deadline, min(now + message.ttl, one.hold_until))
            yield Note("source", message.handoff, "expected")

    def register(self, frm: RankId, message: Register, now: float, takers: int = 1) -> Iterator[Action]:
        """Handle Register: a destination for positions [start, end), or in pull mode a request for the blocks.

        ``takers``: how many ranks of that engine take their share from this one. So many will register.
        """
        if not 0 <= message.start <= message.end or message.mode not in ("push", "pull"):
            raise RemoteProtocolError(
                f"{frm} registers positions [{message.start}, {message.end}) of {message.handoff} in mode {message.mode!r}"
            )
        one = self._handoffs.get(message.handoff) if message.again else self._known(frm, message.handoff, now)
        sink = None if one is None else one.sinks.get(frm)
        current = sink is not None and sink.attempt == message.attempt
        if one is not None and sink is not None and current:
            yield from self._again(one, sink, message, now)
            return
        late = message.again or message.attempt <= self._over.get((message.handoff, frm), 0)
        if one is None or late:
            over = self._ended.get(message.handoff, "this registration never arrived" if late else None)
            reason = NO_ROOM if over is None else f"the handoff is over: {over}"
        else:
            reason = self._why_not(one, frm, message.attempt, takers)
            parked = one.request_id is None and not reason
            if parked and not self._parking.park(one.id, frm.engine, len(message.blocks)):
                reason = NO_ROOM
        if one is None or reason:
            self._end_attempt(message.handoff, frm, message.attempt)
            yield Send(frm, Failed(message.handoff, message.attempt, reason))
            return
        span = (message.mode, message.start, message.end, message.blocks)
        one.takers = takers
        one.sinks[frm] = Registration(frm, message.attempt, *span, message.asked, message.prompt)
        one.deadline = max(one.deadline, now + self.leg_timeout)
        yield Note("source", one.id, "registered")
        yield from self._check_span(one)
        yield from self._advance(one, now)

    def cancel(self, frm: RankId, message: Cancel, now: float, takers: int = 1) -> Iterator[Action]:
        """Handle Cancel: acknowledge it once nothing of the attempt is or will be in flight. ``takers`` as in ``register``."""
        one = self._handoffs.get(message.handoff)
        sink = None if one is None else one.sinks.get(frm)
        if one is None or sink is None:
            # Never registered here, or over: nothing is in flight, and a registration that is still under way is refused.
            self._end_attempt(message.handoff, frm, message.attempt)
            if one is not None:
                yield from self._decline(one, frm, takers, f"decode cancelled: {message.reason}", now)
            yield Send(frm, CancelAck(message.handoff, message.attempt))
            return
        if message.attempt < sink.attempt:
            yield Send(frm, CancelAck(message.handoff, message.attempt))  # an earlier one's, said again and overtaken
            return
        sink.cancelled = True
        yield Note("source", one.id, "cancelled", message.reason)
        if not sink.served:
            yield from self._serve_one(one, sink, f"decode cancelled: {message.reason}", tell=False)
        yield from self._advance(one, now)

    def release(self, frm: RankId, message: Release, now: float, takers: int = 1) -> Iterator[Action]:
        """Handle Release: the sink wants nothing more of this handoff. ``takers`` as in ``register``.

        A worker rank speaks for itself, and where none of its engine takes anything from this one, for all; a scheduler
        process for its engine, as long as no rank of that has registered.
        """
        one = self._known(frm, message.handoff, now)
        if one is None:
            return
        sink = one.sinks.get(frm)
        if sink is not None:
            if not sink.served:
                yield from self._serve_one(one, sink, message.reason, tell=False)
            yield from self._advance(one, now)
        elif frm.rank >= 0:
            yield from self._decline(one, frm, takers, message.reason, now)
        elif not one.sinks and one.state is not State.SERVED and one.owned_by(frm.engine):
            # Else said for a second request of this name, which must not take away what the first awaits.
            yield from self._serve(one, Event.SERVE, message.reason, tell=False)
            yield from self._advance(one, now)

    def peer_lost(self, peer: RankId, reason: str, now: float) -> Iterator[Action]:
        """Note that a sink's process died or was replaced: nothing more is posted to it."""
        self._may_post_until.pop(peer, None)
        for one in self._handoffs.values():
            one.engine = "" if one.engine == peer.engine else one.engine  # another may take over what it announced
        for one, sink in self._with(peer):
            if sink.granted_until > now and one.state is State.FINAL:
                continue  # it may only be out of hearing, and still read under the lease that it was granted
            if not sink.served:
                yield from self._serve_one(one, sink, f"{peer} is gone: {reason}", tell=False)
            yield from self._advance(one, now)

    def leased(self, peer: RankId, until: float, now: float) -> Iterator[Action]:
        """Note that this rank may post against ``peer``'s memory until ``until``."""
        waiting = self._may_post_until.get(peer, 0.0) <= now
        self._may_post_until[peer] = max(until, self._may_post_until.get(peer, 0.0))
        if waiting:
            for one, _ in self._with(peer):
                yield from self._advance(one, now)

    def suspend(self) -> None:
        """Post nothing to anybody until leases are renewed: somebody's connection broke, and whose is not known."""
        self._may_post_until.clear()

    # --- events from the transport ----------------------------------------------------------------------------------

    def written(self, transfer: int, now: float) -> Iterator[Action]:
        """Note that a write is terminal, and that its data has left this rank's memory for good."""
        one, sink, (start, end, _) = self._landed(transfer)
        if sink.posted.covers(start, end):  # else its generation was revoked meanwhile
            sink.written.add(start, end)
        yield from self._advance(one, now)

    def write_failed(self, transfer: int, reason: str, now: float) -> Iterator[Action]:
        """Note that a write failed, or could not be posted; parts of it may be under way until the drain bound has passed."""
        one, sink, _ = self._landed(transfer)
        sink.quiet_at = now + self.drain_bound
        if not sink.served:
            yield from self._serve_one(one, sink, f"a write failed: {reason}")
        yield from self._advance(one, now)

    def unposted(self, transfer: int, now: float) -> Iterator[Action]:
        """Note that nothing of a write was begun, since the peer must renew its lease first: it is posted then."""
        one, sink, (start, end, _) = self._landed(transfer)
        sink.posted.remove(start, end)
        self._may_post_until.pop(sink.rank, None)
        yield self._announce(one, sink, -1)
        yield from self._advance(one, now)

    def dropped(self, transfer: int, now: float) -> Iterator[Action]:
        """Note that nothing of a write was begun, and nothing will be: it was not ``wanted`` any more."""
        one, sink, (start, end, _) = self._landed(transfer)
        sink.posted.remove(start, end)
        if not sink.served:
            yield self._announce(one, sink, -1)
        yield from self._advance(one, now)

    def withheld(self, handoff: HandoffId, peer: RankId, attempt: int, reason: str, now: float) -> Iterator[Action]:
        """Note that a grant cannot be kept, and was not sent: a peer is told so in its place."""
        one = self._handoffs.get(handoff)
        sink = None if one is None else one.sinks.get(peer)
        if one is not None and sink is not None and sink.attempt == attempt and not sink.served:
            yield from self._serve_one(one, sink, reason)
            yield from self._advance(one, now)

    def tick(self, now: float) -> Iterator[Action]:
        """Expire what waited too long for its other leg, and pull leases that nobody renewed; stop writes that never end."""
        for one in list(self._handoffs.values()):
            ended = False
            for sink in one.sinks.values():
                yield from self._stop_stuck(one, sink, now)
                if not sink.served and 0.0 < sink.granted_until <= now and one.state is State.FINAL:
                    ended = True
                    reason = "the pull's lease ended and was not renewed"
                    yield from self._serve_one(one, sink, reason, event=Event.EXPIRE, tell=False)
                if 0.0 < sink.quiet_at <= now:
                    ended, sink.quiet_at = True, 0.0
            if ended:
                yield from self._advance(one, now)
            if one.deadline <= now and self._waits(one):
                yield from self._expire(one, now)

    # --- what the driver asks ---------------------------------------------------------------------------------------

    def wanted(self, transfer: int, generation: int) -> bool:
        """Tell whether a write that was asked for under this generation, and has not been posted, is still to be."""
        one, sink = self._transfers[transfer]
        return not sink.served and one.generation == generation

    def asks(self, handoff: HandoffId, peer: RankId) -> tuple[int, int] | None:
        """Return the positions [start, end) that a peer has registered for, if it has and the handoff is open."""
        one = self._handoffs.get(handoff)
        sink = None if one is None else one.sinks.get(peer)
        return None if sink is None else (sink.start, sink.end)

    def serving(self) -> bool:
        """Tell whether the fabric needs progress: a write is in flight, or a peer may be reading."""
        return bool(self._transfers or self._granted)

    def state(self, handoff: HandoffId) -> State | None:
        """Return the state of a handoff; None when it was never heard of."""
        if (one := self._handoffs.get(handoff)) is not None:
            return one.state
        return State.CLOSED if handoff in self._ended else None

    def __len__(self) -> int:
        """Return the number of handoffs that have not ended."""
        return len(self._handoffs)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _landed(self, transfer: int) -> tuple[SourceHandoff, Registration, tuple[int, int, float]]:
        one, sink = self._transfers.pop(transfer)
        return one, sink, sink.in_flight.pop(transfer)

    def _with(self, peer: RankId) -> list[tuple[SourceHandoff, Registration]]:
        return [(one, one.sinks[peer]) for one in self._handoffs.values() if peer in one.sinks]

    def _of(self, request_id: str) -> SourceHandoff | None:
        handoff = self._by_request.get(request_id)
        one = None if handoff is None else self._handoffs.get(handoff)
        return one if one is not None and one.request_id == request_id else None

    def _known(self, frm: RankId, handoff: HandoffId, now: float) -> SourceHandoff | None:
        """Find a handoff for a sink's message, or park it as expected; None when it is over, or there is no room for it."""
        one = self._handoffs.get(handoff)
        if one is None and handoff not in self._ended and self._parking.park(handoff, frm.engine):
            one = self._handoffs[handoff] = SourceHandoff(handoff, State.EXPECTED, now + self.leg_timeout)
        return one

    def _check_span(self, one: SourceHandoff) -> Iterator[Action]:
        """Fail at once what must not succeed: a sink whose prompt is another, or has more positions."""
        if one.request_id is None:
            return
        for sink in one.sinks.values():
            less = one.prompt_tokens - sink.end
            if sink.served:
                continue
            if less < 0:
                reason = (
                    f"decode wants positions up to {sink.end:,}, prefill's prompt has {one.prompt_tokens:,} tokens: "
                )
                reason += "send both legs the same prompt and the same tokenizer settings"
            elif sink.prompt and one.prompt and sink.prompt not in one.prompt[less : less + 1]:
                reason = f"the two legs' prompts differ (decode wants {sink.end:,} positions, prefill's has "
                reason += f"{one.prompt_tokens:,} tokens): send both the same prompt, LoRA, multimodal inputs, cache salt and "
                reason += "tokenizer settings"
            else:
                continue
            yield from self._serve_one(one, sink, reason)

    def _why_not(self, one: SourceHandoff, frm: RankId, attempt: int, takers: int) -> str:
        """Say why a sink rank cannot register; nothing if it can. Of one engine as many may as take their share here."""
        mine = one.sinks.get(frm)
        other = next((s for s in one.sinks.values() if s.rank.engine != frm.engine or s.rank.rank == frm.rank), None)
        if not one.sinks and not one.owned_by(frm.engine):
            return f"{shown(one.engine)} has announced itself for it"
        if other is not None and (mine is None or attempt < mine.attempt):
            return f"{other.rank} has registered attempt {other.attempt} of it"
        if mine is not None or one.state is State.SERVED or frm in one.declined:
            return one.reason or f"attempt {mine.attempt if mine else 0} has not ended"
        if one.takers not in (None, takers):
            return f"{frm} says that {takers} ranks of its engine take their share here, another one said {one.takers}"
        if takers < 1 or one.attended:
            return f"{takers} ranks of {shown(frm.engine)} take their share here, and all of them have registered"
        return ""

    def _again(self, one: SourceHandoff, sink: Registration, message: Register, now: float) -> Iterator[Action]:
        """Answer a registration that was said again: it renews a pull's lease, and changes nothing else."""
        sink.asked, sink.grant_due = max(sink.asked, message.asked), True
        yield from self._advance(one, now)
        if sink.seal is not None:
            yield Send(sink.rank, sink.seal)
        elif sink.served and not sink.in_flight and sink.quiet_at <= now:
            yield Send(sink.rank, Failed(one.id, sink.attempt, one.reason))

    def _decline(self, one: SourceHandoff, frm: RankId, takers: int, reason: str, now: float) -> Iterator[Action]:
        """Note that a sink rank which has not registered wants nothing; a stranger's word changes nothing."""
        if one.state is State.SERVED or one.attended or not one.owned_by(frm.engine):
            return
        one.takers = takers if one.takers is None else one.takers
        one.declined.add(frm)
        yield from self._serve_if_all(one, reason)
        yield from self._advance(one, now)

    def _waits(self, one: SourceHandoff) -> bool:
        """Tell whether a handoff ends when its deadline passes: it lacks the other leg, or a rank of it."""
        if one.state is State.EXPECTED or (one.state is State.SERVED and not one.prompt_tokens):
            return True
        return one.state is State.FINAL and not one.attended and one.held

    def _expire(self, one: SourceHandoff, now: float) -> Iterator[Action]:
        if one.state is State.FINAL and one.takers is not None:
            came = len(one.sinks) + len(one.declined)
            reason = f"of the {one.takers} ranks of decode that take their share here only {came} came in {self.leg_timeout:g} s"
            one.takers = came
            yield from self._serve_if_all(one, reason, Event.EXPIRE)
            yield from self._advance(one, now)
            return
        if one.state is State.FINAL:
            reason = f"no decode request came for {self.leg_timeout:g} s"
            if one.until <= now:
                reason = "nobody came to read what was held"
            elif one.hold_until <= now:
                reason = f"decode had no blocks for the request within {self.hold_limit:g} s"
            yield from self._serve(one, Event.EXPIRE, reason, tell=False)
            yield from self._advance(one, now)
            return
        for sink in one.sinks.values():
            if not sink.served:
                reason = f"no prefill request with this id came for {self.leg_timeout:g} s"
                yield Send(sink.rank, Failed(one.id, sink.attempt, reason))
        one.reason = one.reason or "its prefill request never came"
        self._close(one, Event.EXPIRE)
        yield Note("source", one.id, "expired", one.reason)

"""The sink: one rank's view of requests whose KV somebody else computes for it.

Theory of operation
-------------------
The engine opens a handoff with the blocks that it allocated; from then on those blocks are not the engine's until the sink
says so, exactly once, with ``SinkFinished``. ``TRANSITIONS`` is the life of a handoff. The blocks go back only when nothing
can write into them any more:

* **Received**: the valid intervals of every expected source rank cover the span. In push what counts is what was written
  under the generation that the rank sealed; in pull a read that completed before the lease ended, by this process's clock,
  counted from the moment at which it asked, less a margin.
* **Acknowledged**: the source says that nothing of the attempt is or will be in flight (``CancelAck``, ``Failed``).
* **Fenced**: the source's process is lost, and the time in which it may still have posted, plus the time that a posted
  write may need to drain, is over. The grants to a peer are the peer's lease (``peers``); silence alone proves nothing.

Before the registration has been sent, nothing can write, so a handoff in ``opening`` ends at once. In pull nobody writes
but this rank itself, so a handoff ends when its own reads are terminal.

What this rank waits to have answered it says again every ``renew_after`` seconds: a connection that broke and was made anew
within the peer's time-out has lost what was under way, and no session has ended by it. Sources answer doubled words alike.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.protocol.actions import Action, Note, PostRead, Send, SinkFinished
from kvxfer.protocol.intervals import IntervalSet
from kvxfer.protocol.messages import Cancel, CancelAck, Failed, Grant, Register, Release, Seal, Written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvxfer.protocol.ids import HandoffId, RankId


class State(Enum):
    """Of one handoff at its sink."""

    OPENING = "opening"  # the source's ranks are not connected; nothing has been sent
    REGISTERED = "registered"  # the source may write (push), or has been asked for its blocks (pull)
    READING = "reading"  # pull: a read of ours is posted
    CANCELLING = "cancelling"  # nobody wants it any more; the source has not acknowledged, or our read is not terminal
    FENCING = "fencing"  # the source is lost; waiting until nothing of it can be in flight
    CLOSED = "closed"  # the engine has its blocks back


class Event(Enum):
    """What moves a handoff from state to state."""

    CONNECT = "connect"  # all source ranks are connected: the registration leaves
    READ = "read"  # pull: granted, the read is posted
    RENEW = "renew"  # not answered, or (pull) the grant is too old or grows old; said again
    COMPLETE = "complete"  # received
    FAIL = "fail"  # failed, and nothing is in flight
    CANCEL = "cancel"  # the engine aborted the request, or a source rank failed while others may still write
    LOSE = "lose"  # a source rank's process is lost, or a read of ours failed: parts of it may be under way
    FENCE = "fence"  # the fence has passed


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.OPENING: {
        Event.CONNECT: State.REGISTERED,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CLOSED,
    },
    State.REGISTERED: {
        Event.READ: State.READING,
        Event.RENEW: State.REGISTERED,
        Event.COMPLETE: State.CLOSED,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CANCELLING,
        Event.LOSE: State.FENCING,
    },
    State.READING: {
        Event.RENEW: State.READING,
        Event.COMPLETE: State.CLOSED,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CANCELLING,
        Event.LOSE: State.FENCING,
    },
    State.CANCELLING: {
        Event.RENEW: State.CANCELLING,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CANCELLING,
        Event.LOSE: State.FENCING,
    },
    State.FENCING: {
        Event.CANCEL: State.FENCING,
        Event.LOSE: State.FENCING,
        Event.FENCE: State.CLOSED,
    },
    State.CLOSED: {},
}


@dataclass(slots=True)
class _Part:
    """What one source rank contributes: its data by generation, its seal, and whether it still may write."""

    valid: dict[int, IntervalSet] = field(default_factory=dict)
    sealed: int | None = None  # the generation that counts
    quiet: bool = False  # acknowledged: nothing of the attempt is or will be in flight


@dataclass(slots=True)
class _Handoff:
    """One handoff at its sink."""

    id: HandoffId
    request_id: str
    mode: str
    start: int
    end: int
    blocks: bytes
    attempt: int
    state: State = State.OPENING
    parts: dict[RankId, _Part] = field(default_factory=dict)
    reading: int | None = None  # our posted read
    asked: float = 0.0
    valid_until: float = 0.0
    fence_at: float = 0.0
    sealed_at: float = 0.0
    prompt: bytes = b""
    reason: str | None = None


class Sink:
    """All handoffs of which this rank is a sink. Every method takes what happened and returns what to do.

    Parameters
    ----------
    block_size
        Tokens in a block of this rank.
    drain_bound
        Seconds in which a write that was posted before a lease ended has landed or never will.
    lease_margin
        Seconds taken off a pull's lease: a read must have completed that long before its end.
    renew_after
        Seconds after which a registration or a cancel that has not been answered is said again, and a read's lease renewed.
    """

    def __init__(
        self, block_size: int, *, drain_bound: float = 2.0, lease_margin: float = 0.5, renew_after: float = 5.0
    ) -> None:
        self.block_size = block_size
        self.drain_bound = drain_bound
        self.lease_margin = lease_margin
        self.renew_after = renew_after
        self._handoffs: dict[HandoffId, _Handoff] = {}
        self._by_request: dict[str, HandoffId] = {}
        self._transfers: dict[int, _Handoff] = {}
        self._exposed: set[HandoffId] = set()  # push: a source may write
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
        """Take over the blocks that shall receive positions [start, end): packed int32 ids, whole blocks.

        ``prompt`` digests everything that shapes the prompt's KV; a source with another one refuses.
        """
        if request_id in self._by_request:
            raise LocalProtocolError(f"request {request_id} opened a second handoff while its first is open")
        if handoff in self._handoffs:
            # Two requests claim one handoff; the second gets nothing, at once: nobody has its blocks.
            yield SinkFinished(handoff, request_id, f"request {self._handoffs[handoff].request_id} has this handoff id")
            return
        one = _Handoff(handoff, request_id, mode, start, end, blocks, next(self._attempts), asked=now, prompt=prompt)
        self._handoffs[handoff] = one
        self._by_request[request_id] = handoff

    def cancel(self, request_id: str, reason: str) -> Iterator[Action]:
        """Note that the engine wants the request no more. Its blocks still come back by ``SinkFinished``."""
        handoff = self._by_request.get(request_id)
        if handoff is not None:
            yield from self._cancel(self._handoffs[handoff], reason)

    # --- events from the control channel ----------------------------------------------------------------------------

    def connected(self, handoff: HandoffId, sources: Sequence[RankId], now: float) -> Iterator[Action]:
        """All source ranks are connected, the fence for the blocks has passed: register."""
        one = self._handoffs.get(handoff)
        if one is None or one.state is not State.OPENING:
            return
        self._step(one, Event.CONNECT)
        if one.mode == "push":
            self._exposed.add(one.id)
        one.parts = {rank: _Part() for rank in sources}
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
            raise RemoteProtocolError(f"{frm} says it wrote positions [{message.start}, {message.end})")
        part.valid.setdefault(message.generation, IntervalSet()).add(message.start, message.end)
        yield from self._check(one)

    def seal(self, frm: RankId, message: Seal, now: float) -> Iterator[Action]:
        """Handle Seal: of what this rank wrote, that generation counts."""
        one, part = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or part is None:
            return
        part.sealed = message.generation
        part.quiet = True  # a source seals when every write is terminal
        one.sealed_at = now
        yield Note("sink", one.id, "sealed")
        if one.state is State.CANCELLING:
            yield from self._check_quiet(one)
        else:
            yield from self._check(one)

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
        if one is None or part is None:
            return
        part.quiet = True
        yield from self._check_quiet(one)

    def grant(self, frm: RankId, message: Grant, now: float) -> Iterator[Action]:
        """Handle Grant (pull): read, if the lease still has a future; otherwise ask again."""
        one, _ = self._part(message.handoff, message.attempt, frm.agent)
        if one is None or one.state not in (State.REGISTERED, State.READING):
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
        one.reading = next(self._numbers)
        self._transfers[one.reading] = one
        yield Note("sink", one.id, "granted")
        yield PostRead(
            one.reading, frm, one.id, one.attempt, one.start, one.end,
            message.blocks, 0, one.blocks, one.start - one.start % self.block_size,
        )  # fmt: skip

    def peer_lost(self, peer: RankId, reason: str, granted_until: float, now: float) -> Iterator[Action]:
        """Note that a source's process is lost. It may have posted until ``granted_until``, by our clock."""
        for one in [h for h in self._handoffs.values() if peer in h.parts]:
            one.reason = one.reason or f"{peer} is gone: {reason}"
            if one.mode == "pull":
                yield from self._cancel(one, one.reason)
                continue
            self._step(one, Event.LOSE)
            may_post_until = now if one.parts[peer].quiet else max(granted_until, now)
            one.fence_at = max(one.fence_at, may_post_until + self.drain_bound)
            yield Note("sink", one.id, "fencing", reason)

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
        """Pass fences whose time has come, renew the leases of pulls, and say again what was not answered."""
        for one in list(self._handoffs.values()):
            if one.state is State.FENCING and one.fence_at <= now:
                self._step(one, Event.FENCE)
                if one.mode == "pull":
                    yield from self._release(one, one.reason or "failed")
                yield from self._close(one, one.reason or "the source is lost")
            elif one.sealed_at and one.state is State.REGISTERED and one.sealed_at + self.drain_bound <= now:
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

    def state(self, handoff: HandoffId) -> State | None:
        """Return the state of a handoff; None when it is closed or was never opened."""
        one = self._handoffs.get(handoff)
        return None if one is None else one.state

    def request(self, handoff: HandoffId) -> str | None:
        """Return the request that an open handoff is for."""
        one = self._handoffs.get(handoff)
        return None if one is None else one.request_id

    def __len__(self) -> int:
        """Return the number of handoffs that have not ended."""
        return len(self._handoffs)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _step(self, one: _Handoff, event: Event) -> None:
        try:
            one.state = TRANSITIONS[one.state][event]
        except KeyError:
            raise LocalProtocolError(f"sink handoff {one.id}: {event.value} while {one.state.value}") from None

    def _part(self, handoff: HandoffId, attempt: int, agent: str) -> tuple[_Handoff | None, _Part | None]:
        """Find what a source's word is about; anything of an ended handoff or attempt, or from a stranger, is ignored."""
        one = self._handoffs.get(handoff)
        if one is not None and one.attempt == attempt:
            for rank, part in one.parts.items():
                if rank.agent == agent:
                    return one, part
        self.ignored += 1
        return None, None

    def _register(self, one: _Handoff, now: float, *, again: bool = False) -> Iterator[Action]:
        one.asked = now
        for rank, part in one.parts.items():
            if not part.quiet:
                span = (one.mode, one.start, one.end, one.blocks)
                yield Send(rank, Register(one.id, one.attempt, *span, now, again, one.prompt))

    def _check(self, one: _Handoff) -> Iterator[Action]:
        """Receive the handoff if every rank's sealed generation covers the span."""
        if one.state is not State.REGISTERED:
            return
        for part in one.parts.values():
            if part.sealed is None or not part.valid.get(part.sealed, _NOTHING).covers(one.start, one.end):
                return
        self._step(one, Event.COMPLETE)
        yield from self._close(one, None)

    @staticmethod
    def _renewable(one: _Handoff) -> bool:
        return one.state in (State.REGISTERED, State.READING) or (one.state is State.CANCELLING and one.mode == "push")

    def _lost_notification(self, one: _Handoff) -> Iterator[Action]:
        """Every rank that sealed has nothing in flight, and yet positions are missing: they will not come."""
        if all(part.quiet for part in one.parts.values()):
            missing = {
                str(rank): part.valid.get(part.sealed or 0, _NOTHING).missing(one.start, one.end)
                for rank, part in one.parts.items()
            }
            yield from self._fail(one, f"sealed, but the notifications of these positions never came: {missing}")

    def _cancel(self, one: _Handoff, reason: str) -> Iterator[Action]:
        one.reason = one.reason or reason
        if one.state is State.OPENING:
            self._step(one, Event.CANCEL)
            yield from self._close(one, one.reason)
            return
        if one.state is State.FENCING:
            self._step(one, Event.CANCEL)
            return
        if one.mode == "pull" and one.reading is None:
            yield from self._finish_pull(one, one.reason)
            return
        already = one.state is not State.REGISTERED
        self._step(one, Event.CANCEL)
        if one.mode == "push" and not already:
            yield from self._send_cancel(one)
        yield from self._check_quiet(one)

    @staticmethod
    def _send_cancel(one: _Handoff) -> Iterator[Action]:
        for rank, part in one.parts.items():
            if not part.quiet:
                yield Send(rank, Cancel(one.id, one.attempt, one.reason or "cancelled"))

    def _check_quiet(self, one: _Handoff) -> Iterator[Action]:
        """End a cancelled push once every source rank has said that nothing is in flight."""
        if one.state is State.CANCELLING and one.mode == "push" and all(p.quiet for p in one.parts.values()):
            yield from self._fail(one, one.reason or "cancelled")

    def _finish_pull(self, one: _Handoff, reason: str | None) -> Iterator[Action]:
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

    @staticmethod
    def _release(one: _Handoff, reason: str) -> Iterator[Action]:
        for rank in one.parts:
            yield Send(rank, Release(one.id, reason))

    def _fail(self, one: _Handoff, reason: str) -> Iterator[Action]:
        self._step(one, Event.FAIL)
        yield from self._close(one, reason)

    def _close(self, one: _Handoff, reason: str | None) -> Iterator[Action]:
        self._exposed.discard(one.id)
        del self._handoffs[one.id]
        del self._by_request[one.request_id]
        yield SinkFinished(one.id, one.request_id, reason)


_NOTHING = IntervalSet()

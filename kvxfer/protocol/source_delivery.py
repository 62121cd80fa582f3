"""What leaves a source: writes, seals, grants, acknowledgements, and at last the blocks. Why, is in ``source_states``."""

from __future__ import annotations

import itertools
import math
import operator
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvxfer.errors import LocalProtocolError
from kvxfer.protocol.actions import Action, Note, PostWrite, Revoke, Send, SourceFinished, SourceQuiet
from kvxfer.protocol.messages import CancelAck, Failed, Grant, Posted, Seal
from kvxfer.protocol.parking import Parking
from kvxfer.protocol.source_data import Pin, Registration, SourceHandoff
from kvxfer.protocol.source_states import TRANSITIONS, Event, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvxfer.protocol.ids import HandoffId, RankId


SHORTEST = 1.0
"""Seconds: a shorter lease is not granted, since the reader takes half a second off it."""
_RANKS = 8
"""Attempts that are remembered for each handoff that is."""


class Delivery:
    """The half of ``Source`` that acts; what happens to it is the other. Neither is used without the other.

    Parameters
    ----------
    block_size
        Tokens in a block of this rank. Only whole blocks are posted until the prompt's end is final.
    join
        Extends packed block tables (b"" at first) by those of the blocks that follow.
    stream
        Post chunks as they become final; otherwise wait until the whole prompt is.
    leg_timeout
        Seconds to wait for the leg of a handoff that has not shown itself (prefill or decode).
    lease
        Seconds for which a Grant (pull) promises that the blocks stay.
    hold_limit
        Seconds for which a finished prompt is kept for a sink that announces itself and does not register. Two engines whose
        caches are full of handoffs that wait for each other would otherwise wait for ever.
    drain_bound
        Seconds after which nothing of a write that failed, or could not be posted, can land any more.
    transfer_limit
        Seconds after which a write that has not become terminal is stopped, by revoking this rank's keys.
    slice_tokens
        Tokens of one write at most, a multiple of ``block_size``; None for as many as there are. What has to be copied before it
        is written is copied while the slice before it is on its way.
    memory
        Ended handoffs remembered, for late messages.
    """

    def __init__(
        self,
        block_size: int,
        *,
        join: Callable[[bytes, bytes], bytes] = operator.add,
        stream: bool = True,
        leg_timeout: float = 30.0,
        lease: float = 30.0,
        hold_limit: float = 120.0,
        drain_bound: float = 2.0,
        transfer_limit: float = 120.0,
        slice_tokens: int | None = None,
        memory: int = 4096,
    ) -> None:
        self.block_size = block_size
        self.slice_tokens = slice_tokens
        self.join = join
        self.stream = stream
        self.leg_timeout = leg_timeout
        self.lease = lease
        self.hold_limit = hold_limit
        self.drain_bound = drain_bound
        self.transfer_limit = transfer_limit
        self._memory = memory
        self._handoffs: dict[HandoffId, SourceHandoff] = {}
        self._ended: OrderedDict[HandoffId, str] = OrderedDict()
        self._over: OrderedDict[tuple[HandoffId, RankId], int] = OrderedDict()  # see _end_attempt
        self._by_request: dict[str, HandoffId] = {}
        self._transfers: dict[int, tuple[SourceHandoff, Registration]] = {}
        self._parking = Parking()
        self._granted: set[tuple[HandoffId, RankId]] = set()  # pull: a peer may be reading
        self._may_post_until: dict[RankId, float] = {}
        self._numbers = itertools.count(1)

    def _step(self, one: SourceHandoff, event: Event) -> None:
        try:
            one.state = TRANSITIONS[one.state][event]
        except KeyError:
            raise LocalProtocolError(f"source handoff {one.id}: {event.value} while {one.state.value}") from None

    def _serve(self, one: SourceHandoff, event: Event, reason: str, *, tell: bool = True) -> Iterator[Action]:
        """Owe no sink rank anything any more. Told is each only when nothing of its attempt is in flight (see _answer)."""
        self._step(one, event)
        one.reason = reason
        for sink in one.sinks.values():
            self._let_go(one, sink, reason if tell else None)
        yield Note("source", one.id, "served", reason)

    def _serve_one(
        self, one: SourceHandoff, sink: Registration, reason: str, *, event: Event = Event.SERVE, tell: bool = True
    ) -> Iterator[Action]:
        """Owe this sink rank nothing any more, and after the last of them nobody."""
        self._let_go(one, sink, reason if tell else None)
        yield from self._serve_if_all(one, reason, event)

    def _serve_if_all(self, one: SourceHandoff, reason: str, event: Event = Event.SERVE) -> Iterator[Action]:
        if reason != "done":
            one.reason = one.reason or reason
        if one.attended and all(sink.served for sink in one.sinks.values()):
            yield from self._serve(one, event, one.reason or reason)

    def _let_go(self, one: SourceHandoff, sink: Registration, failure: str | None) -> None:
        if not sink.served:
            sink.served, sink.failure = True, failure
            self._granted.discard((one.id, sink.rank))

    def _advance(self, one: SourceHandoff, now: float) -> Iterator[Action]:
        """Do whatever the state of the handoff now allows."""
        yield from self._unpin(one, now)
        for sink in one.sinks.values():
            if not sink.served and sink.mode == "pull":
                yield from self._grant(one, sink, now)
            elif not sink.served:
                yield from self._post(one, sink, now)
                yield from self._seal(one, sink)
            yield from self._answer(one, sink, now)
        if one.state is not State.SERVED or any(sink.in_flight or sink.quiet_at > now for sink in one.sinks.values()):
            return
        if one.held or one.request_id is None:
            if one.request_id is not None:
                del self._by_request[one.request_id]
                yield SourceFinished(one.id, one.request_id)
                self._close(one, Event.CLOSE)
            elif one.prompt_tokens:
                self._close(one, Event.CLOSE)
                yield Note("source", one.id, "closed", one.reason)
            # else: the prefill leg of a handoff that nobody wants is still to come; it is kept until its deadline

    @staticmethod
    def _answer(one: SourceHandoff, sink: Registration, now: float) -> Iterator[Action]:
        """Tell a sink rank that was let go, and waits for it, that nothing of its attempt is or will be in flight."""
        if not sink.served or sink.in_flight or sink.quiet_at > now:
            return
        if sink.cancelled:
            yield Send(sink.rank, CancelAck(one.id, sink.attempt))
            sink.cancelled, sink.failure = False, None
        if sink.failure is not None:
            yield Send(sink.rank, Failed(one.id, sink.attempt, sink.failure))
            sink.failure = None

    def _post(self, one: SourceHandoff, sink: Registration, now: float) -> Iterator[Action]:
        complete = one.state is State.FINAL
        if not (self.stream or complete) or self._may_post_until.get(sink.rank, 0.0) <= now:
            return
        end = one.final if complete else one.final - one.final % self.block_size
        for start, stop in self._slices(sink.posted.missing(sink.start, min(end, sink.end))):
            if any(a < stop and start < b for a, b, _ in sink.in_flight.values()):
                continue  # of a revoked generation; posted again when that write is terminal
            transfer = next(self._numbers)
            sink.posted.add(start, stop)
            sink.in_flight[transfer] = (start, stop, now)
            self._transfers[transfer] = one, sink
            # First: it travels while thousands of descriptors are posted.
            yield self._announce(one, sink, 1)
            yield PostWrite(
                transfer, sink.rank, one.id, sink.attempt, one.generation, start, stop,
                one.blocks, sink.blocks, (sink.start, sink.end), self._may_post_until[sink.rank],
            )  # fmt: skip

    def _slices(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Cut positions where a slice of a prompt ends."""
        for start, stop in spans:
            size = self.slice_tokens or stop
            cuts = [start, *range(start - start % size + size, stop, size), stop]
            yield from itertools.pairwise(cuts)

    @staticmethod
    def _announce(one: SourceHandoff, sink: Registration, writes: int) -> Send:
        """Say how many writes have been posted, now that there are so many more, or less."""
        sink.announced += writes
        return Send(sink.rank, Posted(one.id, sink.attempt, sink.announced))

    @staticmethod
    def _pin(one: SourceHandoff, token: int) -> None:
        if token:
            one.pins.append(Pin(token, frozenset(one.in_flight())))

    @staticmethod
    def _unpin(one: SourceHandoff, now: float) -> Iterator[Action]:
        """Let go of what no write reads any more, and none that failed may still read."""
        if not one.pins or any(sink.quiet_at > now for sink in one.sinks.values()):
            return
        flying = one.in_flight()
        kept = [pin for pin in one.pins if not pin.transfers.isdisjoint(flying)]
        for pin in one.pins:
            if pin not in kept:
                yield SourceQuiet(pin.token)
        one.pins = kept

    def _stop_stuck(self, one: SourceHandoff, sink: Registration, now: float) -> Iterator[Action]:
        for transfer, (start, end, since) in sink.in_flight.items():
            if now - since >= self.transfer_limit:
                sink.in_flight[transfer] = (start, end, math.inf)
                yield Revoke(f"handoff {one.id}: a write to {sink.rank} has not ended for {self.transfer_limit:g} s")

    def _seal(self, one: SourceHandoff, sink: Registration) -> Iterator[Action]:
        if one.state is State.FINAL and not sink.in_flight and sink.written.covers(sink.start, sink.end):
            sink.seal = Seal(one.id, sink.attempt, one.generation, one.final)
            yield Send(sink.rank, sink.seal)
            yield Note("source", one.id, "sealed")
            yield from self._serve_one(one, sink, "done", tell=False)

    def _grant(self, one: SourceHandoff, sink: Registration, now: float) -> Iterator[Action]:
        # Not before the engine has finished: until then a preemption could take the blocks from under a reader.
        if one.state is not State.FINAL or not one.held or not sink.grant_due:
            return
        lease = min(self.lease, one.until - now)
        if lease < SHORTEST:
            if sink.granted_until == 0.0:
                reason = "what was held for this reader is about to be let go"
                yield from self._serve_one(one, sink, reason, event=Event.EXPIRE)
            return
        if sink.granted_until == 0.0:
            yield Note("source", one.id, "sealed")
        sink.grant_due, sink.granted_until = False, now + lease
        self._granted.add((one.id, sink.rank))
        yield Send(
            sink.rank,
            Grant(one.id, sink.attempt, one.generation, one.final, one.blocks, sink.asked, lease),
        )

    def _end_attempt(self, handoff: HandoffId, frm: RankId, attempt: int) -> None:
        """Remember that a sink rank is told, or may take it so, that nothing of an attempt is or will be in flight.

        Its registration may still be under way: a word that was said again over a new connection overtakes what the old one
        brought and nobody has read yet. Whatever brings it, an attempt that is over stays over.
        """
        key = handoff, frm
        self._over[key] = max(attempt, self._over.pop(key, 0))
        while len(self._over) > _RANKS * self._memory:
            self._over.popitem(last=False)

    def _close(self, one: SourceHandoff, event: Event) -> None:
        self._step(one, event)
        for rank, sink in one.sinks.items():
            self._end_attempt(one.id, rank, sink.attempt)
        del self._handoffs[one.id]
        self._parking.leave(one.id)
        self._ended[one.id] = one.reason
        while len(self._ended) > self._memory:
            self._ended.popitem(last=False)

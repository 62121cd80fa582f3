"""Moves KV through a mirror in host memory, where the fabric does not reach the device: copies out, holds back, copies in.

Stands between the machines and whoever carries out what they want. To the machines a copy is part of the transfer that it belongs
to, so everything that keeps blocks from being given away while a transfer touches them covers the copy as well:

* a write is posted when what it reads has been copied out; meanwhile it counts as in flight. It is cut into slices, so that
  one is copied while the one before it is on its way. If nobody wants it any more when its copy is done, it is never posted;
* a grant, the word that a peer may read, is sent when what may be read has been copied out. Its lease began before;
* what a write's notification, or a finished part of a read, says is here, is copied in at once, while the rest arrives;
* the end of a handoff is reported when all its copies are done, also when it failed: a copy that is still under way would
  write into a block that its engine has given to somebody else.

A copy in is only ever begun for a handoff that is open, and into its blocks: what a stale source writes late stays in the mirror.
A copy out is never begun from a block that is lent to a handoff: it would write over what arrives there.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvxfer.errors import TransportError
from kvxfer.layout.mirror import Mirrored, MirroredSlots, Reflection
from kvxfer.layout.positions import NULL_BLOCK
from kvxfer.layout.tables import Tables
from kvxfer.protocol.actions import Action, PostRead, PostWrite, Send, SinkFinished, SourceFinished
from kvxfer.protocol.messages import Grant
from kvxfer.protocol.source import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvxfer.layout.card import RankCard
    from kvxfer.layout.maps import CacheMap
    from kvxfer.layout.mirror import Copies
    from kvxfer.layout.refine import Held
    from kvxfer.layout.repack import Call
    from kvxfer.layout.route import Route, StagingArea
    from kvxfer.platform import Fence, Mirror, Platform
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.protocol.messages import Written
    from kvxfer.protocol.sink import Sink
    from kvxfer.protocol.source import Source
    from kvxfer.transport.commands import SinkOpen
    from kvxfer.transport.transfers import Transfers

logger = logging.getLogger("kvxfer.mover")

_SLICE = 32 << 20
"""Bytes: copied in a millisecond or two, and large enough that what a write costs by itself does not count."""
_KEPT = 256
"""Plans of copies, by what they move, that are kept."""


class HostMirror(NamedTuple):
    """A rank's mirror: the cache by the device's addresses, what is where in the mirror, and the platform's part of it."""

    cache: CacheMap
    reflection: Reflection
    memory: Mirror

    def of(self, card: RankCard) -> RankCard:
        """Return the card of the rank whose cache and staging area are this mirror's."""
        staging = card.staging
        if staging is not None:
            staging = msgspec.structs.replace(staging, address=self.reflection.address(staging.address))
        return msgspec.structs.replace(card, cache=self.reflection.of(self.cache), staging=staging)

    def repacking(self, repack: Callable[[Call], Fence]) -> Callable[[Call], Fence]:
        """Return what re-packs in the device's memory what was planned by the mirror's addresses."""
        return lambda call: repack(self.reflection.call(call))


def mirror_of(platform: Platform, cache: CacheMap, staging: StagingArea | None) -> HostMirror | None:
    """Allocate the mirror of a cache and its staging area; None where the platform needs none. Raises PlatformError."""
    spans = [*cache.spans, *([] if staging is None else [(staging.address, staging.size)])]
    memory = platform.mirror(spans, cache.device)
    return None if memory is None else HostMirror(cache, Reflection(spans, memory.addresses), memory)


def slice_of(cache: CacheMap) -> int:
    """Return how many tokens to copy and to post at a time: whole blocks, of ``_SLICE`` bytes and little more."""
    step, token = Tables.of(cache).step, sum(group.block_bytes / group.block_size for group in cache.groups)
    return max(1, round(_SLICE / token / step)) * step


@dataclass(slots=True)
class _Waiting:
    """An action that is held back behind fences. ``failed``: why it cannot be carried out as it is."""

    action: Action
    handoff: HandoffId
    fences: list[Fence]
    failed: str | None = None


@dataclass(slots=True)
class _Arriving:
    """A handoff that is received: the blocks that are lent to it, what comes from whom, and its copies."""

    lent: frozenset[int]
    span: tuple[int, int] = (0, 0)
    ways: dict[RankId, Callable[[int, int], Copies]] = field(default_factory=dict)
    fences: list[Fence] = field(default_factory=list)
    failed: str | None = None


@dataclass(slots=True)
class _Read:
    """A read in parts: from whom, how many are not terminal, and why the first that failed did."""

    handoff: HandoffId
    frm: RankId
    left: int
    failed: str | None = None


class _Both:
    """Passes when all of several fences have."""

    def __init__(self, fences: list[Fence]) -> None:
        self._fences = fences

    def done(self) -> bool:
        self._fences = [fence for fence in self._fences if not fence.done()]
        return not self._fences


class Mirroring:
    """Of one mover, in its thread. Without a ``mirror`` it lets everything through."""

    def __init__(
        self, mirror: HostMirror | None, transfers: Transfers, source: Source, sink: Sink, slice_tokens: int | None
    ) -> None:
        self._mirror = mirror
        self._transfers = transfers
        self._source = source
        self._sink = sink
        self._slice = slice_tokens
        self._tables = Tables.of(transfers.card.cache)
        self._waiting: deque[_Waiting] = deque()
        self._arriving: dict[HandoffId, _Arriving] = {}
        self._reads: dict[int, _Read] = {}
        self._granted: dict[HandoffId, set[tuple[RankId, int]]] = {}
        self._plans: dict[Any, Any] = {}

    # --- what is held back, and let go ------------------------------------------------------------------------------

    def holds(self, action: Action) -> bool:
        """Take an action over if it has to wait for copies: ``act`` lets it go."""
        if self._mirror is None:
            return False
        match action:
            case PostWrite():
                return self._hold_write(action)
            case Send(to, Grant() as grant):
                return self._hold_grant(action, to, grant)
            case SinkFinished():
                return self._hold_end(action)
            case SourceFinished():
                fences = [fence for one in self._waiting if one.handoff == action.handoff for fence in one.fences]
                if fences:
                    self._waiting.append(_Waiting(action, action.handoff, fences))
                return bool(fences)
        return False

    def busy(self) -> bool:
        """Tell whether something waits for a copy."""
        return bool(self._waiting)

    def act(
        self, now: float, run: Callable[[Iterator[Action]], None], execute: Callable[[Action, float], None]
    ) -> None:
        """Carry out what has waited long enough, and tell the machines what will not be."""
        for _ in range(len(self._waiting)):
            one = self._waiting.popleft()
            if not self._passed(one):
                self._waiting.append(one)
                continue
            action, failed = one.action, one.failed
            match action:
                case PostWrite() if failed is not None:
                    run(self._source.write_failed(action.transfer, failed, now))
                case PostWrite() if not self._source.wanted(action.transfer, action.generation):
                    run(self._source.dropped(action.transfer, now))
                case Send(to, Grant() as grant) if failed is not None:
                    run(self._source.withheld(grant.handoff, to, grant.attempt, failed, now))
                case SinkFinished():
                    del self._arriving[action.handoff]
                    execute(replace(action, reason=action.reason or failed), now)
                case _:
                    execute(action, now)
        for handoff in [one for one in self._granted if self._source.state(one) in (None, State.CLOSED)]:
            del self._granted[handoff]

    @staticmethod
    def _passed(one: _Waiting) -> bool:
        """Tell whether all copies have ended. A device that fails one has ended it."""
        while one.fences:
            try:
                if not one.fences[0].done():
                    return False
            except Exception as error:
                logger.exception("handoff %s: the device failed in copying to or from host memory", one.handoff)
                one.failed = one.failed or _why(error)
            one.fences.pop(0)
        return True

    # --- out of the device ------------------------------------------------------------------------------------------

    def _hold_write(self, action: PostWrite) -> bool:
        waiting = _Waiting(action, action.handoff, [])
        self._out(waiting, action.to, action.source_blocks, action.span, action.start, action.end)
        self._waiting.append(waiting)
        return True

    def _hold_grant(self, action: Send, to: RankId, grant: Grant) -> bool:
        granted = self._granted.setdefault(grant.handoff, set())
        wanted = self._source.asks(grant.handoff, to)
        if (to, grant.attempt) in granted or wanted is None:
            # What is held does not change, so it is copied once; a word that renews the lease may overtake the copy.
            first = next((one for one in self._waiting if one.handoff == grant.handoff and _is_grant(one, to)), None)
            if first is not None:
                self._waiting.append(_Waiting(action, grant.handoff, [*first.fences], first.failed))
            return first is not None
        granted.add((to, grant.attempt))
        waiting = _Waiting(action, grant.handoff, [])
        start, end = wanted[0], min(wanted[1], grant.tokens)
        if start < end:
            self._out(waiting, to, grant.blocks, (start, end), start, end)
        self._waiting.append(waiting)
        return True

    def _out(self, waiting: _Waiting, to: RankId, table: bytes, span: tuple[int, int], start: int, end: int) -> None:
        """Begin to copy what a peer is to have of these blocks."""
        try:
            share = self._transfers.route(to, inward=False).share
            ids = self._ids(table, 0, start, end)
            if any(not one.lent.isdisjoint(ids) for one in self._arriving.values()):
                waiting.failed = "its blocks have been given to another request"
                return
            copies = self._of_share(share).copies(table, span, start, end, source=True)
            waiting.fences.append(self._copy(copies, inward=False))
        except TransportError as error:
            waiting.failed = str(error)  # there is no way to this peer, or none any more
        except Exception as error:
            logger.exception("handoff %s: its KV could not be copied to host memory", waiting.handoff)
            waiting.failed = _why(error)

    def _ids(self, table: bytes, first: int, start: int, end: int) -> set[int]:
        """Return the blocks that hold positions [start, end)."""
        found: set[int] = set()
        for group, one in zip(self._tables.groups, self._tables.read(table, first), strict=True):
            low, high = (start - one.first) // group.block_size, -(-(end - one.first) // group.block_size)
            ids = one.ids[max(0, low) : max(0, high)].tolist()
            found.update(ids if group.window is None else filter(NULL_BLOCK.__ne__, ids))
        return found

    # --- into the device --------------------------------------------------------------------------------------------

    def behind(self, fence: Fence, opened: Iterable[SinkOpen]) -> Fence:
        """Return a step's fence for blocks that it lends: no copy out of them, begun for somebody before, is under way then."""
        fences = [fence for one in self._waiting for fence in one.fences] if self._mirror is not None and opened else []
        return _Both([fence, *fences]) if fences else fence

    def lend(self, opened: SinkOpen) -> bool:
        """Note the blocks of a handoff that will be received. False while one of the same name has copies under way."""
        if self._mirror is None:
            return True
        if opened.handoff in self._arriving:
            return False
        ids = self._ids(opened.blocks, opened.start, opened.start, opened.end)
        self._arriving[opened.handoff] = _Arriving(frozenset(ids), (opened.start, opened.end))
        return True

    def registered(
        self, handoff: HandoffId, blocks: bytes, routes: Mapping[RankId, Route], staged: Mapping[RankId, bytes]
    ) -> None:
        """Note from whom a handoff is received by which way, and into what."""
        if self._mirror is None:
            return
        one = self._arriving[handoff]
        for rank, route in routes.items():
            if rank in staged:
                one.ways[rank] = self._into_slots(route, staged[rank], one.span)
            else:
                one.ways[rank] = self._into_blocks(route, blocks, one.span)

    def written(self, frm: str, message: Written) -> None:
        """Copy in what a source's word says is here."""
        if self._mirror is not None and (rank := self._sink.receives(frm, message)) is not None:
            self._in(message.handoff, rank, message.start, message.end)

    def parts(self, action: PostRead) -> list[PostRead]:
        """Cut a read into parts, each of which is copied in while the next one arrives."""
        if self._mirror is None:
            return [action]
        size = self._slice or action.end
        cuts = [action.start, *range(action.start - action.start % size + size, action.end, size), action.end]
        self._reads[action.transfer] = _Read(action.handoff, action.frm, len(cuts) - 1)
        return [replace(action, start=a, end=b) for a, b in itertools.pairwise(cuts)]

    def read(self, number: int, span: tuple[int, int] | None, reason: str | None, now: float) -> Iterator[Action]:
        """Handle the end of a read, or of a part of it: of these positions, or why it failed. The sink hears of the whole."""
        one = self._reads.get(number)
        if one is not None:
            one.left -= 1
            one.failed = one.failed or reason
            if one.failed is None and span is not None:
                self._in(one.handoff, one.frm, *span)
            if one.left:
                return
            del self._reads[number]
            reason = one.failed
        sink = self._sink
        yield from sink.read_done(number, now) if reason is None else sink.read_failed(number, reason, now)

    def _hold_end(self, action: SinkFinished) -> bool:
        one = self._arriving.get(action.handoff)
        if one is None:
            return False
        if not one.fences and one.failed is None:
            del self._arriving[action.handoff]
            return False
        self._waiting.append(_Waiting(action, action.handoff, one.fences, one.failed))
        return True

    def _in(self, handoff: HandoffId, rank: RankId, start: int, end: int) -> None:
        """Begin to copy positions that have arrived from a rank into the device's blocks."""
        one = self._arriving[handoff]
        start, end = max(start, one.span[0]), min(end, one.span[1])
        if start >= end or one.failed is not None:
            return
        try:
            one.fences.append(self._copy(one.ways[rank](start, end), inward=True))
        except Exception as error:
            logger.exception("handoff %s: what was received could not be copied to the device", handoff)
            one.failed = _why(error)

    def _into_blocks(self, route: Route, blocks: bytes, span: tuple[int, int]) -> Callable[[int, int], Copies]:
        plan = self._of_share(route.share)
        return lambda start, end: plan.copies(blocks, span, start, end, source=False)

    def _into_slots(self, route: Route, slots: bytes, span: tuple[int, int]) -> Callable[[int, int], Copies]:
        plan = self._of_slots(route.geometry)
        size = route.block_size
        first = span[0] // size
        return lambda start, end: plan.copies(slots[4 * (start // size - first) : 4 * (-(-end // size) - first)])

    # --- plans ------------------------------------------------------------------------------------------------------

    def _copy(self, copies: Copies, *, inward: bool) -> Fence:
        assert self._mirror is not None
        return self._mirror.memory.copy(copies, inward=inward)

    def _of_share(self, share: tuple[Held, ...] | None) -> Mirrored:
        assert self._mirror is not None
        found: Mirrored | None = self._plans.get(share)
        if found is None:
            found = self._kept(share, Mirrored(self._mirror.cache, self._transfers.card.cache, share))
        return found

    def _of_slots(self, geometry: CacheMap | None) -> MirroredSlots:
        assert self._mirror is not None
        assert geometry is not None
        found: MirroredSlots | None = self._plans.get(geometry)
        if found is None:
            behind = self._mirror.reflection.behind(geometry, self._mirror.cache)
            found = self._kept(geometry, MirroredSlots(behind, geometry))
        return found

    def _kept(self, key: object, plan: Any) -> Any:
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        self._plans[key] = plan
        return plan


def _is_grant(one: _Waiting, to: RankId) -> bool:
    return isinstance(one.action, Send) and one.action.to == to


def _why(error: Exception) -> str:
    return f"its KV could not be copied through host memory: {error}"

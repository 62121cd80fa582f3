"""The slots of a rank's staging area: which handoff has which, who waits for some, and what is re-packed before its end.

A handoff that is received through slots has them for as long as it has its blocks: until both are quiet. Only then are the
slots another's. When everything is in the slots, the platform moves it into the blocks, and the handoff is reported when the
platform's fence has passed; a re-pack that fails is a load that failed.

Slots are laid out after the source's blocks. Sources whose blocks are alike share the area, whichever heads and layers are in
them; others wait until it is empty.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from kvxfer.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvxfer.layout.maps import CacheMap, Plane
    from kvxfer.layout.repack import Call
    from kvxfer.layout.route import Route
    from kvxfer.platform import Fence
    from kvxfer.protocol.actions import SinkFinished
    from kvxfer.protocol.ids import HandoffId, RankId

logger = logging.getLogger("kvxfer.mover")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A handoff's part in staging: its positions, and the packed tables of its own blocks."""

    handoff: HandoffId
    start: int
    end: int
    blocks: bytes

    @property
    def span(self) -> tuple[int, int]:
        """Positions [start, end)."""
        return self.start, self.end


@dataclass(slots=True)
class _Staged:
    wanted: Wanted
    routes: Mapping[RankId, Route]
    slots: dict[RankId, bytes]
    fences: list[Fence] = field(default_factory=list)
    done: SinkFinished | None = None


def _anonymous(geometry: CacheMap | None) -> CacheMap | None:
    """Return where slots lie, whatever heads and layers are in them: ranks of one engine differ in nothing else."""
    if geometry is None:
        return None
    groups = (
        msgspec.structs.replace(group, planes=tuple(_numbered(plane) for plane in group.planes))
        for group in geometry.groups
    )
    return msgspec.structs.replace(geometry, groups=tuple(groups))


def _numbered(plane: Plane) -> Plane:
    heads, layers = tuple(range(len(plane.heads))), tuple(range(len(plane.layers)))
    return msgspec.structs.replace(plane, heads=heads, layers=layers)


class Staging:
    """Of one mover, in its thread. ``repack`` is the platform's, None where it does not re-pack."""

    def __init__(self, repack: Callable[[Call], Fence] | None) -> None:
        self._repack = repack
        self._geometry: CacheMap | None = None
        self._free: list[int] = []
        self._staged: dict[HandoffId, _Staged] = {}
        self._waiting: dict[HandoffId, tuple[RankId, ...]] = {}  # in the order in which they came

    def take(
        self, wanted: Wanted, routes: Mapping[RankId, Route], ranks: tuple[RankId, ...] = ()
    ) -> dict[RankId, bytes] | None:
        """Take slots for a handoff from these source ranks, of all the ``ranks``: packed ids, of ranks that write straight none.

        Returns None when there are not enough at present; the handoff is then named by ``ready``. Raises TransportError when
        there never will be.
        """
        needs = {rank: route.slots_for(*wanted.span) for rank, route in routes.items() if route.geometry is not None}
        if not needs:
            return {}
        need, slots = sum(needs.values()), min(routes[rank].slots for rank in needs)
        if need > slots:
            raise TransportError(
                f"{wanted.handoff} needs {need:,} slots to be re-packed and the staging area has {slots:,}: raise "
                "staging_bytes, or set the same --block-size on both engines"
            )
        first = next(iter(self._waiting), wanted.handoff)
        geometries = {_anonymous(routes[rank].geometry) for rank in needs}
        if first != wanted.handoff or not self._fits(wanted.handoff, geometries, slots, need):
            self._waiting[wanted.handoff] = ranks or tuple(routes)
            return None
        self._waiting.pop(wanted.handoff, None)
        staged = _Staged(wanted, routes, {})
        for rank, count in needs.items():
            taken, self._free = self._free[:count], self._free[count:]
            staged.slots[rank] = array("i", taken).tobytes()
        self._staged[wanted.handoff] = staged
        return staged.slots

    def _fits(self, wanted: HandoffId, geometries: set[CacheMap | None], slots: int, need: int) -> bool:
        if len(geometries) > 1:
            raise TransportError(
                f"{wanted} is to be re-packed from ranks whose blocks are laid out differently, which cannot share a staging "
                "area: set the same --block-size and layout on both engines"
            )
        (geometry,) = geometries
        if geometry != self._geometry:
            if self._staged:
                return False
            self._geometry, self._free = geometry, list(range(slots))
        return len(self._free) >= need

    def ready(self) -> tuple[HandoffId, tuple[RankId, ...]] | None:
        """Name who waits longest for slots, with its source ranks: it takes again, leaves, or ends."""
        return next(iter(self._waiting.items()), None)

    def leave(self, handoff: HandoffId) -> None:
        """Note that a handoff does not wait any more: its source is lost, and must be connected anew before it takes."""
        self._waiting.pop(handoff, None)

    def received(self, done: SinkFinished) -> bool:
        """Note that a handoff has ended. True when it is re-packed first: ``packed`` returns it later."""
        staged = self._staged.get(done.handoff)
        if staged is None or done.reason is not None:
            self._close(done.handoff)
            return False
        assert self._repack is not None
        staged.done = done
        wanted = staged.wanted
        try:
            for rank, slots in staged.slots.items():
                for call in staged.routes[rank].calls(slots, wanted.blocks, wanted.span):
                    staged.fences.append(self._repack(call))
        except Exception as error:
            logger.exception("handoff %s: what was received could not be re-packed", done.handoff)
            staged.done = replace(done, reason=f"what was received could not be re-packed: {error}")
        return True

    def packed(self) -> list[SinkFinished]:
        """Take the handoffs whose tokens are in their blocks."""
        ended = [one.done for one in self._staged.values() if self._has_ended(one) and one.done is not None]
        for done in ended:
            self._close(done.handoff)
        return ended

    def packing(self) -> bool:
        """Tell whether something is being re-packed."""
        return any(one.done is not None for one in self._staged.values())

    @staticmethod
    def _has_ended(one: _Staged) -> bool:
        if one.done is None:
            return False
        try:
            return all(fence.done() for fence in one.fences)
        except Exception as error:
            logger.exception("handoff %s: the device failed in re-packing what was received", one.done.handoff)
            one.done = replace(one.done, reason=f"what was received could not be re-packed: {error}")
            return True

    def _close(self, handoff: HandoffId) -> None:
        self._waiting.pop(handoff, None)
        staged = self._staged.pop(handoff, None)
        if staged is not None:
            for slots in staged.slots.values():
                self._free += array("i", slots)

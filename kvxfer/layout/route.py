"""How positions of a source rank's cache get into a sink rank's: straight into its blocks, or through slots of its staging area.

Both ranks make the same route, each from the two ranks' cards, so that what a sink registers (ids of its blocks, or of its
slots) means the same to the source. Which of the two it is, where both would do, the estimate of their costs decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.plan import Prepared, prepare
from kvxfer.layout.positions import unpacked
from kvxfer.layout.repack import Repacking, better

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.layout.maps import CacheMap
    from kvxfer.layout.plan import Plan
    from kvxfer.layout.refine import Held
    from kvxfer.layout.repack import Call


class StagingArea(msgspec.Struct, frozen=True):
    """Registered memory of a rank in which received blocks wait to be re-packed, and between which interiors it does that."""

    address: int
    size: int
    offers: tuple[tuple[str, str], ...]


class Route:
    """From one source rank to one sink rank. Used by one thread.

    ``share`` is what moves between the two (``kvxfer.layout.ranks``), ``area`` the sink's. Raises LayoutMismatchError, with
    both layouts and what to change, when there is no way.
    """

    def __init__(
        self,
        source: CacheMap,
        sink: CacheMap,
        share: Iterable[Held] | None = None,
        *,
        area: StagingArea | None = None,
        names: tuple[str, str] = ("the source", "the sink"),
    ) -> None:
        what = None if share is None else tuple(share)
        direct, refusal = _direct(source, sink, what, names)
        staged = _staged(source, sink, what, area)
        if isinstance(staged, Repacking) and better(direct, staged):
            direct = None
        elif direct is None:
            raise LayoutMismatchError(f"{refusal}\n{staged}" if staged else str(refusal))
        self._direct = direct
        self._staged = staged if direct is None and isinstance(staged, Repacking) else None
        self._groups = len(source.groups)
        self.block_size = (sink if self._staged is None else source).block_size
        """Tokens in what a registration's ids name: blocks of the sink, or slots."""

    @property
    def geometry(self) -> CacheMap | None:
        """How the slots lie in the staging area; None where blocks move straight."""
        return None if self._staged is None else self._staged.staging

    @property
    def slots(self) -> int:
        """How many slots the staging area has; 0 where blocks move straight."""
        return 0 if self._staged is None else self._staged.slots

    def slots_for(self, start: int, end: int) -> int:
        """Return how many slots positions [start, end) take; 0 where blocks move straight."""
        return 0 if self._staged is None else -(-end // self.block_size) - start // self.block_size

    def plan(self, source: bytes, registered: bytes, span: tuple[int, int], start: int, end: int) -> Plan:
        """Plan positions [start, end) of a registration of the positions ``span``.

        ``source`` are the packed ids of the source's blocks from position 0 on, ``registered`` those that the sink registered.
        Raises ValueError when they do not fit, LayoutMismatchError when a byte would be written twice.
        """
        first, prompt = span
        ours, theirs = (unpacked(source),), unpacked(registered, first - first % self.block_size)
        if self._staged is not None:
            return self._staged.transfer(ours, (theirs,) * self._groups, start, end, prompt=prompt)
        assert self._direct is not None
        # What follows a chunk is written by the next one; behind the last one there is nothing that anybody needs.
        return self._direct.plan(ours, (theirs,), start, end, prompt=prompt, keep=first, exact=end < prompt)

    def calls(self, slots: bytes, blocks: bytes, block_size: int, span: tuple[int, int]) -> tuple[Call, ...]:
        """Return what the sink's platform must do once positions ``span`` have reached the slots.

        ``blocks`` are the packed ids of the sink's own blocks, of ``block_size`` tokens, that hold the span.
        """
        if self._staged is None:
            return ()
        start, end = span
        staged = unpacked(slots, start - start % self.block_size)
        own = unpacked(blocks, start - start % block_size)
        return self._staged.calls((staged,) * self._groups, (own,), start, end)


def _direct(
    source: CacheMap, sink: CacheMap, share: tuple[Held, ...] | None, names: tuple[str, str]
) -> tuple[Prepared | None, str]:
    try:
        return prepare(source, sink, share, names=names), ""
    except LayoutMismatchError as error:
        return None, str(error)


def _staged(
    source: CacheMap, sink: CacheMap, share: tuple[Held, ...] | None, area: StagingArea | None
) -> Repacking | str:
    """Return the way through the staging area, or why there is none."""
    if area is None:
        return ""
    try:
        one = Repacking(source, sink, area.offers, base=area.address, slots=1, share=share)
        slots = area.size // one.size
        if slots < 1:
            return f"staging_bytes={area.size:,} holds no block of {one.size:,} bytes"
        return Repacking(source, sink, area.offers, base=area.address, slots=slots, share=share)
    except LayoutMismatchError as error:
        return f"and it is not re-packed: {error}"

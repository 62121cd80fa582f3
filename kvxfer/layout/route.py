"""How positions of a source rank's cache get into a sink rank's: straight into its blocks, or through slots of its staging area.

Both ranks make the same route, each from the two ranks' cards, so that what a sink registers (ids of its blocks, or of its
slots) means the same to the source. Which of the two it is, where both would do, the estimate of their costs decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.plan import Prepared, prepare
from kvxfer.layout.positions import NULL_BLOCK, unpacked
from kvxfer.layout.repack import Repacking, better
from kvxfer.layout.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.layout.maps import CacheMap
    from kvxfer.layout.plan import Plan
    from kvxfer.layout.positions import Table
    from kvxfer.layout.refine import Held, Pairing
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
        what = self.share = None if share is None else tuple(share)
        """What moves; None for all that both hold."""
        direct, refusal = _direct(source, sink, what, names)
        staged = _staged(source, sink, what, area)
        if isinstance(staged, Repacking) and better(direct, staged):
            direct = None
        elif direct is None:
            raise LayoutMismatchError(f"{refusal}\n{staged}" if staged else str(refusal))
        self._direct = direct
        self._staged = staged if direct is None and isinstance(staged, Repacking) else None
        self._tables = Tables.of(source), Tables.of(sink)
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
        """Plan positions [start, end) of a registration of the positions ``span``: all of a prompt's but its last, or the rest.

        ``source`` are the packed tables of the source, ``registered`` is what the sink registered: packed tables, or slots.
        Raises ValueError when they do not fit, LayoutMismatchError when a byte would be written twice.
        """
        first, last = span
        tables = self._tables[0].read(source)
        if self._staged is not None:
            return self._staged.transfer(tables, self._slots(registered, first), start, end, prompt=last + 1)
        assert self._direct is not None
        # What follows a chunk is written by the next one; behind the last one there is nothing that anybody needs.
        into = self._received(registered, first)
        return self._direct.plan(tables, into, start, end, prompt=last + 1, keep=first, exact=end < last)

    def calls(self, slots: bytes, blocks: bytes, span: tuple[int, int]) -> tuple[Call, ...]:
        """Return what the sink's platform must do once positions ``span`` have reached the slots.

        ``blocks`` are the packed tables of the sink's own blocks that hold the span.
        """
        if self._staged is None:
            return ()
        start, end = span
        own = self._received(blocks, start)
        return self._staged.calls(self._slots(slots, start), own, start, end, prompt=end + 1)

    def _received(self, blocks: bytes, start: int) -> tuple[Table, ...]:
        """Read the sink's tables. What it registers it waits for: no block of a window may be one that it has let go of."""
        tables = self._tables[1].read(blocks, start)
        for group, table in zip(self._tables[1].groups, tables, strict=True):
            if group.window is not None and (table.ids == NULL_BLOCK).any():
                raise ValueError("the sink waits for positions of a window whose blocks it has let go of")
        return tables

    def _slots(self, slots: bytes, start: int) -> tuple[Table, ...]:
        """Read the ids of slots: a slot has room for a block of each of the source's groups."""
        table = unpacked(slots, start - start % self.block_size)
        return (table,) * len(self._tables[0].groups)


def _direct(
    source: CacheMap, sink: CacheMap, share: tuple[Held, ...] | None, names: tuple[str, str]
) -> tuple[Prepared | None, str]:
    try:
        prepared = prepare(source, sink, share, names=names)
        _check_windows(prepared.pairings)
    except LayoutMismatchError as error:
        return None, str(error)
    return prepared, ""


def _check_windows(found: Iterable[Pairing]) -> None:
    """Refuse windows whose first block on the sink could begin in one that the source has let go of."""
    for pairing in found:
        ours, theirs = pairing.block_sizes
        if pairing.window is not None and ours % theirs:
            raise LayoutMismatchError(
                f"of a window of {pairing.window} positions the source keeps blocks of {ours} tokens, and the sink needs whole "
                f"ones of {theirs}: set the same --block-size on both engines, or a larger multiple on prefill"
            )


def _staged(
    source: CacheMap, sink: CacheMap, share: tuple[Held, ...] | None, area: StagingArea | None
) -> Repacking | str:
    """Return the way through the staging area, or why there is none."""
    if area is None:
        return ""
    if len({group.block_size for group in source.groups}) > 1:
        return "and it is not re-packed: the source's groups have blocks of unequal size"
    try:
        one = Repacking(source, sink, area.offers, base=area.address, slots=1, share=share)
        _check_windows(one.pairings)
        slots = area.size // one.size
        if slots < 1:
            return f"staging_bytes={area.size:,} holds no block of {one.size:,} bytes"
        return Repacking(source, sink, area.offers, base=area.address, slots=slots, share=share)
    except LayoutMismatchError as error:
        return f"and it is not re-packed: {error}"

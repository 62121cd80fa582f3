"""Handing KV over between layouts that no useful runs connect: whole blocks into a staging area, then re-packed on the sink.

Where the plain plan is refused (opaque interiors of unequal block size, K transposed in blocks of 32 against blocks of
128, crumbs between token-major and head-major), a platform may *offer* to move tokens between two interiors in its own
memory: a pair of interior tags, ("", "") for any two strided ones. This module plans both halves as data:

1. the source writes (or the sink reads) its whole blocks into *slots* of the sink's staging area. A slot has the source's
   geometry inside, without what does not move, so these are long runs;
2. the platform moves tokens from slots into the sink's blocks: ``Call``s with a pairing (where what lies) and moves (which
   tokens of which slot go where in which block). Only tokens that were asked for are written: nothing that the sink has
   in the same block is touched.

Staging is as large as it is given; what does not fit into it moves in rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.layout.plan import MAX_DESCRIPTOR_BYTES, Cost, Plan, Prepared
from kvxfer.layout.positions import Span, Table, moving, segments
from kvxfer.layout.ranks import holding
from kvxfer.layout.refine import Held, Pairing, pairings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvxfer.layout.maps import Plane

STRIDED: Final = ("", "")
"""The offer of a platform that copies between any two interiors which strides describe."""

MAX_SLOTS: Final = 1 << 30

_ALIGN: Final = 64
_LOOSE: Final = 4
"""How many times its content a slot may be, before the source's geometry is too loose to be kept."""


class Call(NamedTuple):
    """What the platform does when the bytes are there.

    ``moves`` is N×5: slot, first token in the slot, block, first token in the block, tokens. The pairing's bundles have the
    addresses of slot 0 and block 0, its pieces the planes (``source`` is the staging area's).
    """

    pairing: Pairing
    moves: NDArray[np.int64]


class Staged(NamedTuple):
    """A handoff's two halves: the copy into the slots, then the calls."""

    transfer: Plan
    calls: tuple[Call, ...]


class Repacking:
    """What two ranks have in common when the sink re-packs, with ``slots`` blocks of staging from address ``base`` on.

    The slots are the sink's memory: registered like its cache, on its device. Raises LayoutMismatchError when the
    platform does not offer what is needed, or the two hold different things.
    """

    def __init__(
        self,
        source: CacheMap,
        sink: CacheMap,
        offers: Collection[tuple[str, str]],
        *,
        base: int,
        slots: int,
        share: Iterable[Held] | None = None,
    ) -> None:
        common = pairings(source, sink, share, repacks=offers)
        wanted = [held for pairing in common for held in _held(pairing)]
        self.slots = slots
        self.staging, self.size = staging(source, wanted, base, slots, sink)
        self.pairings = pairings(self.staging, sink, wanted, repacks=offers)
        # Slots know no windows: their numbers are ours, and none is the null block.
        self._transfer = Prepared(_unwindowed(source), _unwindowed(self.staging), holding(self.staging))
        self._blocks = [group.num_blocks for group in source.groups]
        self._number = {pairing.source_group: i for i, pairing in enumerate(self._transfer.pairings)}

    def plan(
        self,
        source: Sequence[Table],
        sink: Sequence[Table],
        start: int,
        end: int,
        *,
        prompt: int | None = None,
        keep: int = 0,
        limit: int = MAX_DESCRIPTOR_BYTES,
    ) -> Staged:
        """Plan positions [start, end), as ``Prepared.plan`` does, through the first slots that there are.

        Raises ValueError also when they need too many slots.
        """
        slots = [self._first_slots(number, start, end) for number in range(len(source))]
        return Staged(
            self.transfer(source, slots, start, end, prompt=prompt, sink=sink, limit=limit),
            self.calls(slots, sink, start, end, prompt=prompt, keep=keep),
        )

    def transfer(
        self,
        source: Sequence[Table],
        slots: Sequence[Table],
        start: int,
        end: int,
        *,
        prompt: int | None = None,
        sink: Sequence[Table] | None = None,
        limit: int = MAX_DESCRIPTOR_BYTES,
    ) -> Plan:
        """Plan the copy of the blocks that hold positions [start, end) into slots: a table for each of the source's groups.

        Raises ValueError when the source has let go of a block in a window, unless the sink's tables say that it has as well.
        """
        parts, spans = [], []
        seen: set[int] = set()
        for pairing in self.pairings:
            span = self._span(pairing, start, end, prompt)
            spans.append(span)
            group, size = pairing.source_group, pairing.block_sizes[0]
            if pairing.window is not None and span.start < span.end:
                _check_real(
                    pairing,
                    self._blocks[group],
                    span,
                    source[group],
                    None if sink is None else sink[pairing.sink_group],
                )
            if span.start == span.end or group in seen:
                continue  # another group of the sink takes other layers out of the same slots
            seen.add(group)
            whole = Span(span.start // size * size, -(-span.end // size) * size)
            parts += self._transfer.pieces(self._number[group], whole, source[group], slots[group])
        return self._transfer.finished(parts, spans, limit)

    def calls(
        self,
        slots: Sequence[Table],
        sink: Sequence[Table],
        start: int,
        end: int,
        *,
        prompt: int | None = None,
        keep: int = 0,
    ) -> tuple[Call, ...]:
        """Plan what the platform does once positions [start, end) are in these slots. Nothing below ``keep`` is touched."""
        if not keep <= start:
            raise ValueError(f"positions from {start} on cannot be re-packed where those below {keep} are kept")
        spans = [(pairing, self._span(pairing, start, end, prompt)) for pairing in self.pairings]
        return tuple(
            Call(pairing, _moves(pairing, span, slots[pairing.source_group], sink[pairing.sink_group]))
            for pairing, span in spans
            if span.start < span.end
        )

    def estimate(self, tokens: int, cost: Cost | None = None) -> float:
        """Estimate the seconds in which ``tokens`` tokens reach the slots when no block of the source follows another."""
        return self._transfer.estimate(tokens, cost)

    def rounds(self, start: int, end: int) -> list[Span]:
        """Cut positions into pieces for which the slots suffice, at the source's block boundaries."""
        result = []
        while start < end:
            stop = min([end, *(self._reach(pairing, start) for pairing in self.pairings)])
            result.append(Span(start, stop))
            start = stop
        return result

    def _reach(self, pairing: Pairing, start: int) -> int:
        size = pairing.block_sizes[0]
        return (start // size + self.slots) * size

    @staticmethod
    def _span(pairing: Pairing, start: int, end: int, prompt: int | None) -> Span:
        return moving(pairing, start, end, prompt=end if prompt is None else prompt, exact=True)

    def _first_slots(self, group: int, start: int, end: int) -> Table:
        size = next((p.block_sizes[0] for p in self.pairings if p.source_group == group), 1)
        first, last = start // size, -(-end // size)
        if last - first > self.slots and any(pairing.source_group == group for pairing in self.pairings):
            raise ValueError(
                f"positions [{start}, {end}) need {last - first} slots of staging, and there are {self.slots}"
            )
        return Table(np.arange(last - first, dtype=np.int32), first * size)


def better(direct: Prepared | None, repacking: Repacking, *, cost: Cost | None = None, copy: float = 5e9) -> bool:
    """Tell whether re-packing beats the direct copy, if there is one: ``copy`` is at how many bytes a second it moves tokens.

    Of scattered blocks; blocks in a row only make both cheaper.
    """
    if direct is None:
        return True
    size = sum(size / tokens for _, size, tokens in map(direct.round, range(len(direct.pairings))))
    return repacking.estimate(1, cost) + size / copy < direct.estimate(1, cost)


def staging(source: CacheMap, wanted: Iterable[Held], base: int, slots: int, sink: CacheMap) -> tuple[CacheMap, int]:
    """Lay out slots for what moves of a source's blocks; also return how many bytes they take.

    Inside, what lies together in a block of the source lies together in a slot, at the same strides.
    """
    heads_of: dict[tuple[str, int], set[int]] = {}
    for plane, layers, heads in wanted:
        for layer in layers:
            heads_of.setdefault((plane, layer), set()).update(heads)
    groups, at = [], base
    for group in source.groups:
        planes, at = _area(group, heads_of, at, slots)
        groups.append(Group(group.block_size, slots, planes, group.window))
    return CacheMap(tuple(groups), ((base, at - base),), sink.memory, sink.device), at - base


class _Cell(NamedTuple):
    """What moves of one plane of one layer inside a block. ``start`` and ``end`` are addresses in block 0.

    ``far`` is the distance of heads that do not lie in one block's stretch of memory (head-outermost layouts), else 0.
    """

    block_stride: int
    far: int
    slots: tuple[int, int]
    start: int
    end: int
    plane: int
    layer: int


def _area(group: Group, wanted: dict[tuple[str, int], set[int]], at: int, slots: int) -> tuple[tuple[Plane, ...], int]:
    """Lay out a group's slots from an address on; also return where they end.

    Pieces of a block that touch stay together; each such cluster has a stretch of its own, in which slot follows slot, so
    that blocks in a row become slots in a row.
    """
    placed: dict[tuple[int, tuple[int, int], int, int], list[tuple[int, int]]] = {}
    used = 0
    for together in _clusters(sorted(_cells(group, wanted))):
        low, (first, last) = together[0].start, together[0].slots
        width, heads = max(cell.end for cell in together) - low, last - first + 1 if together[0].far else 1
        for cell in together:
            head_stride = slots * width if cell.far else group.planes[cell.plane].head_stride
            place = (cell.layer, at + cell.start - low)
            placed.setdefault((cell.plane, cell.slots, width, head_stride), []).append(place)
        used += width * heads
        at += -(-slots * width * heads // _ALIGN) * _ALIGN
    planes = []
    for (number, (first, last), width, head_stride), places in placed.items():
        plane = group.planes[number]
        planes.append(
            msgspec.structs.replace(
                plane,
                layers=tuple(layer for layer, _ in places),
                bases=tuple(address for _, address in places),
                heads=plane.heads[first : last + 1],
                block_stride=width,
                head_stride=head_stride,
            )
        )
    content = Group(group.block_size, 1, tuple(planes)).block_bytes
    if used > _LOOSE * content:
        raise LayoutMismatchError(
            f"what moves of a block, {content:,} bytes, is strewn over {used:,}: it cannot be staged"
        )
    return tuple(planes), at


def _cells(group: Group, wanted: dict[tuple[str, int], set[int]]) -> Iterator[_Cell]:
    for number, plane in enumerate(group.planes):
        far = plane.head_stride if plane.head_stride >= plane.block_stride else 0
        for layer, base in zip(plane.layers, plane.bases, strict=True):
            slots = [slot for slot, head in enumerate(plane.heads) if head in wanted.get((plane.name, layer), ())]
            if slots:
                start = base + slots[0] * plane.head_stride
                end = start + (0 if far else (slots[-1] - slots[0]) * plane.head_stride) + plane.head_span
                yield _Cell(plane.block_stride, far, (slots[0], slots[-1]), start, end, number, layer)


def _clusters(cells: Sequence[_Cell]) -> Iterator[list[_Cell]]:
    """Gather cells that touch or interleave, and would do so in every block."""
    together: list[_Cell] = []
    for cell in cells:
        if together and (cell[:3] != together[0][:3] or cell.start > max(one.end for one in together)):
            yield together
            together = []
        together.append(cell)
    if together:
        yield together


def _moves(pairing: Pairing, span: Span, slots: Table, sink: Table) -> NDArray[np.int64]:
    """List which tokens of which slots go where."""
    # Slots count from one here: none of them is the null block.
    counted = pairing._replace(num_blocks=(MAX_SLOTS, pairing.num_blocks[1]))
    parts = [
        np.stack(np.broadcast_arrays(one.source - 1, kind.source, one.sink, kind.sink, kind.tokens), axis=1)
        for one in segments(counted, span, Table(slots.ids + 1, slots.first), sink)
        for kind in (one.kind,)
    ]
    return np.concatenate(parts)


def _check_real(pairing: Pairing, blocks: int, span: Span, source: Table, sink: Table | None) -> None:
    """Raise ValueError when the source has let go of blocks in a window that are still wanted."""
    size = pairing.block_sizes[0]
    whole = Span(span.start // size * size, -(-span.end // size) * size)
    if sink is None:  # every block is wanted: say that none of the sink's is the null block
        sink, span = Table(np.ones((whole.end - whole.start) // size, dtype=np.int32), whole.start), whole
        pairing = pairing._replace(block_sizes=(size, size))
    for _ in segments(pairing._replace(num_blocks=(blocks, MAX_SLOTS)), span, source, sink):
        pass


def _held(pairing: Pairing) -> Iterator[Held]:
    """Name what a pairing moves."""
    for bundle in pairing.bundles:
        for piece in bundle.pieces:
            plane = piece.source
            starts = {base: layer for layer, base in zip(plane.layers, plane.bases, strict=True)}
            layers = tuple(starts[base + piece.source_offset] for base in bundle.source.tolist())
            yield Held(plane.name, layers, tuple(dict.fromkeys(plane.heads[slot] for slot in piece.source_slots)))


def _unwindowed(cache: CacheMap) -> CacheMap:
    groups = tuple(msgspec.structs.replace(group, window=None) for group in cache.groups)
    return msgspec.structs.replace(cache, groups=groups)

"""What two maps have in common: which planes answer to which, and the runs of bytes by which one piece of a block moves.

Planes answer to each other by layer and name, whatever groups, tensors and pipeline stages they are in. Planes of one layer
and the layers of one geometry are taken together (a *bundle*), so that what is worked out, element by element, is one layer's
part of one block, and layers only repeat it.

This is done once for a pair of ranks, at their handshake. Positions do not enter: a *segment* is a stretch of tokens
inside one block of the source and one block of the sink, and its runs are relative to those two blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.maps import extent, offsets
from kvxfer.layout.runs import Runs, gathered, joined

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvxfer.layout.maps import CacheMap, Group, Offsets, Plane

MAX_PIECES: Final = 1 << 20
"""Pieces that one segment may fall into before they are joined: some thirty times above any cache we know."""


class Held(NamedTuple):
    """Heads of a plane in some layers: what a rank holds, or what of it shall move."""

    plane: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]


class Piece(NamedTuple):
    """Two planes that hold the same, the slots of the heads that move, and where the planes begin inside their bundle."""

    source: Plane
    sink: Plane
    source_slots: tuple[int, ...]
    sink_slots: tuple[int, ...]
    source_offset: int
    sink_offset: int


class Bundle(NamedTuple):
    """Pieces of one layer, and the pairs of addresses at which the layers alike have them. Strides are those of blocks."""

    pieces: tuple[Piece, ...]
    source_stride: int
    sink_stride: int
    source: Offsets
    sink: Offsets


class Pairing(NamedTuple):
    """A source's and a sink's group that have layers in common: two block tables to walk at once.

    ``whole``: interiors are opaque, only whole blocks move.
    """

    source_group: int
    sink_group: int
    block_sizes: tuple[int, int]
    num_blocks: tuple[int, int]
    window: int | None
    whole: bool
    bundles: tuple[Bundle, ...]


class Kind(NamedTuple):
    """A segment without its blocks: ``tokens`` tokens from these offsets on."""

    source: int
    sink: int
    tokens: int


class Lanes(NamedTuple):
    """The runs of one kind of segment, for planes of equal block strides, relative to both sides' block 0.

    ``chained`` runs are as long as both block strides: those of consecutive blocks touch. ``loose`` ones do not.
    """

    source_stride: int
    sink_stride: int
    chained: Runs
    loose: Runs


class Budget:
    """Bounds the time and memory that a peer's map can cost: each piece that is gone through is paid for before."""

    def __init__(self, pieces: int = MAX_PIECES) -> None:
        self.whole = self.left = pieces

    def pay(self, pieces: int) -> None:
        """Take some off. Raises LayoutMismatchError when there is not enough left."""
        self.left -= pieces
        if self.left < 0:
            raise LayoutMismatchError(f"blocks fall into more than {self.whole:,} pieces")


def pairings(
    source: CacheMap,
    sink: CacheMap,
    share: Iterable[Held] | None = None,
    *,
    repacks: Collection[tuple[str, str]] | None = None,
) -> tuple[Pairing, ...]:
    """Find what answers to what. ``share`` says what moves; None: everything that both hold.

    With ``repacks`` a platform moves the tokens itself, between these pairs of interiors and no others
    (``kvxfer.layout.repack``): they may differ, and are not walked by whole blocks.

    Raises LayoutMismatchError when ``share`` names what one of them lacks, when planes of one name hold different things,
    or when the platform does not re-pack their interiors.
    """
    ours, theirs = _Index(source), _Index(sink)
    found: dict[tuple[int, int], dict[tuple[int, int, int], list[Piece]]] = {}
    for plane, layers, heads in ours.common(theirs) if share is None else share:
        for layer in layers:
            i, p, source_base = ours.find(plane, layer, "source")
            j, q, sink_base = theirs.find(plane, layer, "sink")
            _check_content(p, q, source.groups[i], sink.groups[j])
            if repacks is None or p.interior == q.interior == "":
                _check_interior(p, q, source.groups[i], sink.groups[j])
            if repacks is not None and (p.interior, q.interior) not in repacks:
                ours_is, theirs_is = (f"opaque interior {r.interior!r}" if r.interior else "strides" for r in (p, q))
                raise LayoutMismatchError(f"plane {plane!r}: the platform does not re-pack {ours_is} to {theirs_is}")
            piece = Piece(p, q, *_slots(p, q, heads), source_base, sink_base)
            layers_of = found.setdefault((i, j), {})
            layers_of.setdefault((layer, p.block_stride, q.block_stride), []).append(piece)
    return tuple(
        _pairing(i, j, source.groups[i], sink.groups[j], list(layers.values()), whole=repacks is None)
        for (i, j), layers in found.items()
    )


def lanes(pairing: Pairing, kind: Kind, budget: Budget) -> tuple[Lanes, ...]:
    """Work out the runs of one kind of segment. Raises LayoutMismatchError when they are too many to be of any use."""
    by_strides: dict[tuple[int, int], list[Runs]] = {}
    for bundle in pairing.bundles:
        inner = joined(gathered([_piece_runs(piece, kind, budget) for piece in bundle.pieces]))
        budget.pay(len(inner.length) * len(bundle.source))
        strides = (bundle.source_stride, bundle.sink_stride)
        by_strides.setdefault(strides, []).append(inner.shifted(bundle.source, bundle.sink))
    result = []
    for (source_stride, sink_stride), parts in by_strides.items():
        runs = joined(gathered(parts))
        chains = (runs.length == source_stride) & (runs.length == sink_stride)
        chained = Runs(*(array[chains] for array in runs))
        result.append(Lanes(source_stride, sink_stride, chained, Runs(*(array[~chains] for array in runs))))
    return tuple(result)


class _Index:
    """Finds the plane of a name and a layer in a map."""

    def __init__(self, cache: CacheMap) -> None:
        self.places: dict[tuple[str, int], tuple[int, Plane, int]] = {}
        for number, group in enumerate(cache.groups):
            for plane in group.planes:
                for layer, base in zip(plane.layers, plane.bases, strict=True):
                    self.places[plane.name, layer] = (number, plane, base)

    def find(self, plane: str, layer: int, whose: str) -> tuple[int, Plane, int]:
        place = self.places.get((plane, layer))
        if place is None:
            raise LayoutMismatchError(f"the {whose} has no plane {plane!r} of layer {layer}")
        return place

    def common(self, other: _Index) -> list[Held]:
        result = []
        for (name, layer), (_, plane, _) in self.places.items():
            if (name, layer) in other.places:
                theirs = other.places[name, layer][1].heads
                heads = tuple(sorted(set(plane.heads) & set(theirs)))
                if heads:
                    result.append(Held(name, (layer,), heads))
        return result


def _slots(source: Plane, sink: Plane, heads: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pair slots: every slot of the sink that holds one of the heads, with the source's first slot of that head."""
    missing = [head for head in heads if head not in source.heads or head not in sink.heads]
    if missing:
        raise LayoutMismatchError(f"plane {source.name!r}: one side does not hold head {missing[0]}")
    wanted = set(heads)
    sink_slots = tuple(slot for slot, head in enumerate(sink.heads) if head in wanted)
    return tuple(source.heads.index(sink.heads[slot]) for slot in sink_slots), sink_slots


def _check_content(source: Plane, sink: Plane, source_group: Group, sink_group: Group) -> None:
    """Refuse planes of one name that do not hold the same kind of content."""
    _same(
        source.name,
        ("element type", source.dtype, sink.dtype),
        ("heads of the model", source.total_heads, sink.total_heads),
        ("attention window", source_group.window, sink_group.window),
    )


def _check_interior(source: Plane, sink: Plane, source_group: Group, sink_group: Group) -> None:
    """Refuse planes whose bytes cannot be copied onto each other as they are."""
    _same(
        source.name,
        ("block interior", source.interior or "strided", sink.interior or "strided"),
        ("bytes per element", source.item, sink.item),
        ("tokens of an opaque block", *_whole_tokens(source, source_group, sink_group)),
        ("channels of a head", extent(source.channels), extent(sink.channels)),
    )


def _whole_tokens(plane: Plane, source_group: Group, sink_group: Group) -> tuple[int, int]:
    return (source_group.block_size, sink_group.block_size) if plane.interior else (0, 0)


def _same(plane: str, *checks: tuple[str, object, object]) -> None:
    for what, ours, theirs in checks:
        if ours != theirs:
            raise LayoutMismatchError(f"plane {plane!r}: {what} differs: the source has {ours}, the sink {theirs}")


def _pairing(i: int, j: int, source: Group, sink: Group, layers: list[list[Piece]], *, whole: bool) -> Pairing:
    bundles: dict[tuple[Piece, ...], list[tuple[int, int]]] = {}
    for pieces in layers:
        low, there = pieces[0].source_offset, pieces[0].sink_offset
        relative = tuple(
            piece._replace(source_offset=piece.source_offset - low, sink_offset=piece.sink_offset - there)
            for piece in pieces
        )
        bundles.setdefault(relative, []).append((low, there))
    return Pairing(
        source_group=i,
        sink_group=j,
        block_sizes=(source.block_size, sink.block_size),
        num_blocks=(source.num_blocks, sink.num_blocks),
        window=source.window,
        whole=whole and any(piece.source.interior for pieces in layers for piece in pieces),
        bundles=tuple(
            Bundle(
                pieces,
                pieces[0].source.block_stride,
                pieces[0].sink.block_stride,
                np.array([low for low, _ in bases], dtype=np.int64),
                np.array([there for _, there in bases], dtype=np.int64),
            )
            for pieces, bases in bundles.items()
        ),
    )


def _piece_runs(piece: Piece, kind: Kind, budget: Budget) -> Runs:
    """Go through the elements of a piece, axis by axis, joining as soon as an axis is complete."""
    source, sink, item = piece.source, piece.sink, piece.source.item
    tokens = (_tokens(source, kind.source, kind.tokens), _tokens(sink, kind.sink, kind.tokens))
    if _solid(source) and _solid(sink):
        zero = np.zeros(1, dtype=np.int64)
        channels, item = (zero, zero), source.content
    else:
        channels = (offsets(source.channels), offsets(sink.channels))
    heads = (
        np.array(piece.source_slots, dtype=np.int64) * source.head_stride,
        np.array(piece.sink_slots, dtype=np.int64) * sink.head_stride,
    )
    axes: list[tuple[Offsets, Offsets]] = [channels, tokens, heads]
    # The axis that is contiguous on both sides goes first: what follows then repeats long runs, not elements.
    innermost = min(axes, key=lambda axis: _pieces(axis, item))
    runs = Runs(*(np.array([value], dtype=np.int64) for value in (piece.source_offset, piece.sink_offset, item)))
    for axis in (innermost, *(axis for axis in axes if axis is not innermost)):
        budget.pay(len(runs.length) * len(axis[0]))
        runs = joined(runs.shifted(*axis))
    return runs


def _solid(plane: Plane) -> bool:
    """Tell whether the content of one head of one token is one run of bytes, in the order of its channels."""
    return len(plane.channels) == 1 and plane.channels[0][1] == plane.item


def _tokens(plane: Plane, first: int, tokens: int) -> Offsets:
    return offsets(plane.tokens) if plane.interior else offsets(plane.tokens)[first : first + tokens]


def _pieces(axis: tuple[Offsets, Offsets], item: int) -> float:
    """Return into what part of its elements an axis falls if it is the innermost one; 1 if none of them touch."""
    source, sink = axis
    breaks = (np.diff(source) != item) | (np.diff(sink) != item)
    return (1 + int(breaks.sum())) / len(source)

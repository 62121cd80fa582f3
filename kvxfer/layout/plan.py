"""Descriptors that copy a request's positions from one rank's cache into another's.

The work is split in two. ``prepare`` compares two ranks' maps once, at their handshake, and refuses what cannot be moved
or would move in crumbs. ``Prepared.plan`` then makes one handoff's descriptors from block tables, in a few numpy
operations on arrays of the blocks' length.

There are never more descriptors than runs that are contiguous in both memories, and never one longer than ``limit``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.maps import spell
from kvxfer.layout.positions import Segments, Span, Table, kinds, moving, segments
from kvxfer.layout.refine import Budget, Held, Kind, Lanes, Pairing, lanes, pairings
from kvxfer.layout.runs import Runs, capped, gathered, joined, rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvxfer.layout.maps import CacheMap, Offsets
    from kvxfer.layout.runs import Descriptors

MAX_DESCRIPTOR_BYTES: Final = 1 << 30
"""Longest descriptor that is emitted; longer runs are cut. NIXL's LIBFABRIC over tcp was shown to carry 64 MiB in one."""

USEFUL_RUN: Final = 4096
"""Bytes below which runs are crumbs, unless blocks are so small that their own cells are shorter."""

MAX_WORK: Final = 1 << 22
"""Pieces that all kinds of segments of two maps may fall into: about a second's work, for a peer's map that is made to cost."""

MAX_KINDS: Final = 1024
"""Kinds of segments between two block sizes, which are more the fewer common factors the two have."""

_PIECE_WORK: Final = 1024
"""What it takes to go through a piece of two planes, however short it is, in elements of a long one (0.3 ms, measured)."""

_REMEMBERED: Final = 256
"""Kinds of partial segments that are kept worked out; there are as many as first and last tokens."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a copy takes: seconds for each descriptor, and bytes per second of the link.

    The defaults: 36,000 descriptors took 205 ms more than one did for the same 2.36 GB (NIXL WRITE, two H200s joined by NVLink);
    one 400 Gbit/s EFA device. Measure your own where a decision hangs on them.
    """

    descriptor: float = 5.7e-6
    rate: float = 50e9

    def seconds(self, descriptors: float, size: float) -> float:
        """Estimate the time of a copy."""
        return descriptors * self.descriptor + size / self.rate


@dataclass(frozen=True, slots=True)
class Plan:
    """What to give NIXL: row i of ``source`` goes to row i of ``sink``. ``moved`` are the positions, one span a pairing."""

    source: Descriptors
    sink: Descriptors
    bytes: int
    moved: tuple[Span, ...]

    @property
    def count(self) -> int:
        """The number of descriptors on either side."""
        return len(self.source)

    def seconds(self, cost: Cost | None = None) -> float:
        """Estimate how long the copy takes."""
        return (cost or Cost()).seconds(self.count, self.bytes)


class Prepared:
    """What two ranks have in common, ready to plan handoffs from ``source`` to ``sink``. Used by one thread."""

    def __init__(self, source: CacheMap, sink: CacheMap, share: Iterable[Held] | None = None) -> None:
        self.devices = (source.device, sink.device)
        self.pairings: tuple[Pairing, ...] = pairings(source, sink, share)
        self._lanes: list[dict[Kind, tuple[Lanes, ...]]] = [{} for _ in self.pairings]

    def plan(
        self,
        source: Sequence[Table],
        sink: Sequence[Table],
        start: int,
        end: int,
        *,
        prompt: int | None = None,
        keep: int = 0,
        exact: bool = False,
        limit: int = MAX_DESCRIPTOR_BYTES,
    ) -> Plan:
        """Plan positions [start, end) of a prompt of ``prompt`` tokens (by default it ends at ``end``).

        ``source`` and ``sink`` hold a table for each of their groups. The sink's own positions below ``keep`` are not
        touched; ``exact`` leaves the rest of the last block alone (``kvxfer.layout.positions``).

        Raises ValueError for tables that do not fit, LayoutMismatchError when a byte would be written twice.
        """
        parts: list[Runs] = []
        moved = []
        for number, pairing in enumerate(self.pairings):
            span = moving(pairing, start, end, prompt=end if prompt is None else prompt, keep=keep, exact=exact)
            moved.append(span)
            parts += self.pieces(number, span, source[pairing.source_group], sink[pairing.sink_group])
        return self.finished(parts, moved, limit)

    def pieces(self, number: int, span: Span, source: Table, sink: Table) -> list[Runs]:
        """Return the runs of one pairing, joined as far as blocks follow each other, in any order."""
        return [
            _laid(one, found)
            for found in segments(self.pairings[number], span, source, sink)
            for one in self.lanes(number, found.kind)
        ]

    def finished(self, parts: Sequence[Runs], moved: Sequence[Span], limit: int = MAX_DESCRIPTOR_BYTES) -> Plan:
        """Join what touches, cut what is too long, and make descriptors. Raises LayoutMismatchError (see ``joined``)."""
        runs = joined(gathered(parts))
        size = int(runs.length.sum())
        runs = capped(runs, limit)
        ours, theirs = self.devices
        return Plan(rows(runs.source, runs.length, ours), rows(runs.sink, runs.length, theirs), size, tuple(moved))

    def estimate(self, tokens: int, cost: Cost | None = None) -> float:
        """Estimate the seconds that ``tokens`` tokens take when no block follows another, without making the plan."""
        per_token = [0.0, 0.0]
        for number in range(len(self.pairings)):
            count, size, length = self.round(number)
            per_token = [per_token[0] + count / length, per_token[1] + size / length]
        return (cost or Cost()).seconds(per_token[0] * tokens, per_token[1] * tokens)

    def round(self, pairing: int, budget: Budget | None = None) -> tuple[int, int, int]:
        """Return the descriptors and bytes of one round of both block sizes, each block by itself, and its tokens."""
        count = size = tokens = 0
        for kind, times in kinds(*self.pairings[pairing].block_sizes):
            tokens += times * kind.tokens
            for one in self.lanes(pairing, kind, budget):
                for runs in (one.chained, one.loose):
                    count += times * len(runs.length)
                    size += times * int(runs.length.sum())
        return count, size, tokens

    def lanes(self, pairing: int, kind: Kind, budget: Budget | None = None) -> tuple[Lanes, ...]:
        """Return the runs of one kind of segment of a pairing, worked out at most once in a while."""
        known = self._lanes[pairing]
        found = known.get(kind)
        if found is None:
            if len(known) > MAX_KINDS + _REMEMBERED:
                known.clear()
            found = known[kind] = lanes(self.pairings[pairing], kind, budget or Budget())
        return found


def prepare(
    source: CacheMap,
    sink: CacheMap,
    share: Iterable[Held] | None = None,
    *,
    names: tuple[str, str] = ("the source", "the sink"),
    useful: int = USEFUL_RUN,
) -> Prepared:
    """Compare two ranks' caches. ``share`` is what moves between them (``kvxfer.layout.ranks``), None for all they share.

    Raises LayoutMismatchError, with both layouts in a line each and what to change, when planes do not fit each other, or
    when whole blocks would move in runs that are on average shorter than ``useful`` bytes and than one head of one block.
    """
    try:
        prepared = Prepared(source, sink, share)
        if not prepared.pairings:
            raise LayoutMismatchError("the two have no plane, layer and head in common")  # noqa: TRY301 - one text for all
        budget = Budget(MAX_WORK)
        for number, pairing in enumerate(prepared.pairings):
            _check_kinds(pairing)
            _check_runs(prepared, number, useful, budget)
    except LayoutMismatchError as error:
        raise LayoutMismatchError(
            f"{error}\n{names[0]} lays {spell(source)};\n{names[1]} lays {spell(sink)};\n{_cure(source, sink, names)}"
        ) from None
    return prepared


def _laid(one: Lanes, found: Segments) -> Runs:
    """Put the runs of a segment at every pair of blocks; those of consecutive blocks that touch become one at once."""
    ours, theirs = found.source, found.sink
    if (theirs[1:] < theirs[:-1]).any():
        order = np.argsort(theirs, kind="stable")
        ours, theirs = ours[order], theirs[order]
    parts = []
    if len(one.chained.length):
        breaks = (np.diff(ours) != 1) | (np.diff(theirs) != 1)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        repeats = np.diff(np.append(starts, len(ours)))
        parts.append(_repeated(one, one.chained, ours[starts], theirs[starts], repeats))
    if len(one.loose.length):
        parts.append(_repeated(one, one.loose, ours, theirs, np.ones_like(ours)))
    return gathered(parts)


def _repeated(one: Lanes, runs: Runs, ours: Offsets, theirs: Offsets, repeats: Offsets) -> Runs:
    """Lanes outside, blocks inside: for layers that lie apart the result is in the order of the sink's addresses."""
    return Runs(
        np.add.outer(runs.source, ours * one.source_stride).ravel(),
        np.add.outer(runs.sink, theirs * one.sink_stride).ravel(),
        np.multiply.outer(runs.length, repeats).ravel(),
    )


def _check_kinds(pairing: Pairing) -> None:
    ours, theirs = pairing.block_sizes
    common = int(np.gcd(ours, theirs))
    if ours // common + theirs // common > MAX_KINDS:
        raise LayoutMismatchError(
            f"blocks of {ours:,} and of {theirs:,} tokens end together only every {ours // common * theirs:,}"
        )


def _check_runs(prepared: Prepared, number: int, useful: int, budget: Budget) -> None:
    """Refuse runs that are shorter than both ``useful`` and what one head of one block would be."""
    pairing = prepared.pairings[number]
    cells = sum(len(piece.sink_slots) * len(bundle.source) for bundle in pairing.bundles for piece in bundle.pieces)
    pieces = sum(len(bundle.pieces) for bundle in pairing.bundles)
    every = list(kinds(*pairing.block_sizes))
    budget.pay(pieces * len(every) * _PIECE_WORK)
    stretches = sum(times for _, times in every)
    count, size, _ = prepared.round(number, budget)
    if size < count * min(useful, size / (cells * stretches)):
        raise LayoutMismatchError(f"blocks would move in runs of {size // count} bytes on average")


def _cure(source: CacheMap, sink: CacheMap, names: tuple[str, str]) -> str:
    joined = [name for name, cache in zip(names, (source, sink), strict=True) if _joins(cache)]
    if len(joined) == 1:
        return (
            f"{joined[0]} joins K and V in each token, as newer vLLM does, which no VLLM_KV_CACHE_LAYOUT changes: set "
            f"staging_bytes on {names[1]} to let it re-pack, if its platform does (CUDA's and the host's do, Neuron's does not), "
            f"or run {joined[0]} on a vLLM that keeps them apart (docs/neuron.md), "
            "with VLLM_KV_CACHE_LAYOUT=HND. Both need the same model, --dtype and "
            "--kv-cache-dtype"
        )
    sizes = [[group.block_size for group in cache.groups] for cache in (source, sink)]
    block = "" if sizes[0] == sizes[1] else " and the same --block-size"
    windows = [{group.window for group in cache.groups} for cache in (source, sink)]
    if windows[0] != windows[1]:
        return "serve the same model on both, with --disable-hybrid-kv-cache-manager on both or on neither"
    return f"set VLLM_KV_CACHE_LAYOUT=HND{block} on both, with the same model, --dtype and --kv-cache-dtype"


def _joins(cache: CacheMap) -> bool:
    """Tell whether a head's K and V of one token lie side by side, so that neither has tokens in a row."""
    starts = {
        (plane.name, layer): (base, plane)
        for group in cache.groups
        for plane in group.planes
        if not plane.interior
        for layer, base in zip(plane.layers, plane.bases, strict=True)
    }
    pairs = [
        (at, starts["v", layer][0]) for (name, layer), at in starts.items() if name == "k" and ("v", layer) in starts
    ]
    return any(value - base == plane.content for (base, plane), value in pairs)

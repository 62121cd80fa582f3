"""Which rank of the source sends what to which rank of the sink.

Layers are spread over pipeline stages, heads over tensor-parallel ranks; where an engine has more ranks than heads, or the
model keeps one latent for all heads (MLA), ranks hold replicas, and one of them must be chosen for each taker.

The choice is a function of who holds what, and of nothing else: of n sources that hold a head and m sinks that want it,
sink k of m takes it from source k·n/m, both in the order of ranks. So no source serves more than ⌈m/n⌉ sinks with a head,
neighbours go to neighbours, and each side computes it alone. Who holds what follows from two rank cards: tensor-parallel
ranks of one stage differ in their heads only, by vLLM's rule. Ranks that nothing falls to take no part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.maps import numbers
from kvxfer.layout.refine import Held

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvxfer.layout.maps import CacheMap

    Holders = tuple[tuple[int, tuple[int, ...]], ...]
    """(rank, its heads) of the ranks that hold a plane of a layer, in the order of ranks."""


class Shard(NamedTuple):
    """One rank among the tensor-parallel ranks of its pipeline stage."""

    rank: int
    size: int


def holding(cache: CacheMap) -> tuple[Held, ...]:
    """Say what a rank holds."""
    return tuple(
        Held(plane.name, plane.layers, tuple(dict.fromkeys(plane.heads)))
        for group in cache.groups
        for plane in group.planes
    )


def heads_of(total: int, shard: Shard) -> tuple[int, ...]:
    """Return the heads that a tensor-parallel rank holds by vLLM's rule, which vllm-neuron follows.

    Equal parts; with more ranks than heads, each head on consecutive ranks. Raises ValueError where vLLM itself refuses.
    """
    return tuple(_rule(total, shard))


def stage(cache: CacheMap, shard: Shard) -> dict[int, tuple[Held, ...]]:
    """Derive what all tensor-parallel ranks of a stage hold from one of them.

    Raises LayoutMismatchError when this one does not hold what the rule gives it.
    """
    result: dict[int, list[Held]] = {rank: [] for rank in range(shard.size)}
    for group in cache.groups:
        for plane in group.planes:
            try:
                rule = {rank: _rule(plane.total_heads, Shard(rank, shard.size)) for rank in result}
            except ValueError as error:
                raise LayoutMismatchError(f"plane {plane.name!r}: {error}") from None
            held, wanted = set(plane.heads), rule.get(shard.rank, range(0))
            # Lengths first: how many heads the model has is only the card's word, and may be any number.
            if len(held) != len(wanted) or not all(head in wanted for head in held):
                should = f"{wanted.start} to {wanted.stop - 1}" if wanted else "none"
                raise LayoutMismatchError(
                    f"plane {plane.name!r}: tensor-parallel rank {shard.rank} of {shard.size} holds heads "
                    f"{numbers(sorted(held))}, and of {plane.total_heads} in the model it should hold {should}"
                )
            for rank, parts in result.items():
                parts.append(Held(plane.name, plane.layers, tuple(rule[rank])))
    return {rank: tuple(parts) for rank, parts in result.items()}


def share(
    source: CacheMap, source_shard: Shard, sink: CacheMap, sink_shard: Shard, *, turn: int = 0
) -> tuple[Held, ...]:
    """Say what this rank of the source sends to this rank of the sink; nothing if it takes no part.

    Both ranks come to the same answer from their two cards. ``turn`` rotates among replicas, so that several sink engines do not
    all load the same ones: any number that both sides know, a checksum of the sink engine's id for one.
    """
    moves = _between(source, source_shard, sink, sink_shard, turn)
    return moves.get((source_shard.rank, sink_shard.rank), ())


def takers(
    source: CacheMap, source_shard: Shard, sink: CacheMap, sink_shard: Shard, *, turn: int = 0
) -> frozenset[int]:
    """Return which tensor-parallel ranks of the sink's stage take something from this rank of the source.

    Every one of them says the same: their cards differ in their heads only.
    """
    moves = _between(source, source_shard, sink, sink_shard, turn)
    return frozenset(taker for giver, taker in moves if giver == source_shard.rank)


def serving(
    sources: Mapping[int, Sequence[Held]], sinks: Mapping[int, Sequence[Held]], *, turn: int = 0
) -> dict[tuple[int, int], tuple[Held, ...]]:
    """Say what each (source, sink) moves so that every sink gets all it holds, exactly once. Pairs that move nothing are absent.

    Raises LayoutMismatchError when a sink holds what no source does.
    """
    held_by, wanted_by = _holders(sources), _holders(sinks)
    chosen: dict[tuple[Holders, Holders], dict[tuple[int, int], tuple[int, ...]]] = {}
    moves: dict[tuple[int, int], dict[tuple[str, tuple[int, ...]], list[int]]] = {}
    for (plane, layer), takers in wanted_by.items():
        key = (held_by.get((plane, layer), ()), takers)
        if key not in chosen:
            try:
                chosen[key] = _choose(*key, turn)
            except LookupError as missing:
                raise LayoutMismatchError(
                    f"no rank of the source holds head {missing} of plane {plane!r} of layer {layer}"
                ) from None
        for pair, heads in chosen[key].items():
            moves.setdefault(pair, {}).setdefault((plane, heads), []).append(layer)
    return {
        pair: tuple(Held(plane, tuple(layers), heads) for (plane, heads), layers in parts.items())
        for pair, parts in moves.items()
    }


def uncovered(cache: CacheMap, shares: Iterable[Sequence[Held]]) -> list[str]:
    """List what a sink rank holds and none of the shares brings, for people; empty when all of it comes."""
    coming: dict[tuple[str, int], set[int]] = {}
    for part in shares:
        for plane, layers, heads in part:
            for layer in layers:
                coming.setdefault((plane, layer), set()).update(heads)
    return [
        f"plane {plane!r} of layer {layer}, heads {numbers(lacking)}"
        for plane, layers, heads in holding(cache)
        for layer in layers
        if (lacking := sorted(set(heads) - coming.get((plane, layer), set())))
    ]


def _between(
    source: CacheMap, source_shard: Shard, sink: CacheMap, sink_shard: Shard, turn: int
) -> dict[tuple[int, int], tuple[Held, ...]]:
    ours = _for_common_layers(stage(source, source_shard), holding(sink))
    theirs = _for_common_layers(stage(sink, sink_shard), holding(source))
    return serving(ours, theirs, turn=turn)


def _rule(total: int, shard: Shard) -> range:
    rank, size = shard
    if not 0 <= rank < size or (total % size and size % total):
        raise ValueError(f"{total} heads cannot be spread over {size} ranks, of which this is {rank}")
    if size > total:
        head = rank // (size // total)
        return range(head, head + 1)
    each = total // size
    return range(rank * each, (rank + 1) * each)


def _choose(givers: Holders, takers: Holders, turn: int) -> dict[tuple[int, int], tuple[int, ...]]:
    result: dict[tuple[int, int], list[int]] = {}
    held_by, wanted_by = _by_head(givers), _by_head(takers)
    for head in sorted(wanted_by):
        have, want = held_by.get(head), wanted_by[head]
        if have is None:
            raise LookupError(head)
        for number, rank in enumerate(want):
            giver = have[(number * len(have) // len(want) + turn) % len(have)]
            result.setdefault((giver, rank), []).append(head)
    return {pair: tuple(heads) for pair, heads in result.items()}


def _by_head(holders: Holders) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for rank, heads in holders:
        for head in heads:
            result.setdefault(head, []).append(rank)
    return result


def _holders(ranks: Mapping[int, Sequence[Held]]) -> dict[tuple[str, int], Holders]:
    result: dict[tuple[str, int], list[tuple[int, tuple[int, ...]]]] = {}
    for rank in sorted(ranks):
        for plane, layers, heads in ranks[rank]:
            for layer in layers:
                result.setdefault((plane, layer), []).append((rank, heads))
    return {place: tuple(holders) for place, holders in result.items()}


def _for_common_layers(ranks: dict[int, tuple[Held, ...]], other: Sequence[Held]) -> dict[int, tuple[Held, ...]]:
    """Leave out what the other stage has nothing of: another stage of the same engine answers for it."""
    layers = {(held.plane, layer) for held in other for layer in held.layers}
    return {
        rank: tuple(
            Held(plane, common, heads)
            for plane, of, heads in held
            if (common := tuple(layer for layer in of if (plane, layer) in layers))
        )
        for rank, held in ranks.items()
    }

"""Who sends what: complete, without doubles, balanced, and the same on both sides."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.ranks import Shard, heads_of, holding, serving, share, stage, uncovered
from kvxfer.layout.refine import Held


def cache(layers, heads, total: int, *, name: str = "k") -> CacheMap:
    plane = Plane(name, "x", 1, tuple(layers), (0,) * len(layers), tuple(heads), total, 1, 1, ((1, 1),), ((1, 1),))
    return CacheMap((Group(1, 1, (plane,)),), (), "DRAM")


@pytest.mark.parametrize(
    ("total", "size", "heads"),
    [
        (8, 1, [tuple(range(8))]),
        (8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (2, 8, [(0,)] * 4 + [(1,)] * 4),
        (1, 3, [(0,)] * 3),
    ],
)
def test_heads_by_vllms_rule(total, size, heads) -> None:
    assert [heads_of(total, Shard(rank, size)) for rank in range(size)] == heads


@pytest.mark.parametrize(("total", "shard"), [(6, Shard(0, 4)), (4, Shard(0, 6)), (4, Shard(4, 4)), (4, Shard(-1, 4))])
def test_what_vllm_would_not_spread_is_refused(total, shard) -> None:
    with pytest.raises(ValueError, match=f"{total} heads cannot be spread over {shard.size} ranks"):
        heads_of(total, shard)


def test_a_rank_that_does_not_hold_what_the_rule_gives_it_is_refused() -> None:
    with pytest.raises(
        LayoutMismatchError, match=r"rank 1 of 2 holds heads 0, and of 2 in the model it should hold 1 to 1$"
    ):
        stage(cache([0], [0], 2), Shard(1, 2))
    with pytest.raises(LayoutMismatchError, match="3 heads cannot be spread over 2 ranks"):
        stage(cache([0], [0], 3), Shard(1, 2))
    with pytest.raises(LayoutMismatchError, match="should hold none"):
        stage(cache([0], [0], 2), Shard(2, 2))


@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(3, 4)])
def test_the_number_of_heads_that_a_card_names_costs_nothing(shard) -> None:
    """It is only the peer's word: to list so many would take the whole machine's memory."""
    total = 1 << 60
    with pytest.raises(
        LayoutMismatchError, match=f"and of {total} in the model it should hold .* to {total - 1}$"
    ) as it:
        stage(cache([0], range(total - 5, total), total), shard)
    assert f"holds heads {total - 5}-{total - 1}," in str(it.value)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 6), st.data())
def test_every_sink_gets_everything_once_and_replicas_share_the_work(total, a, b, layers, data) -> None:
    sizes = [size for size in (1, 2, 4, 8, 16) if size % total == 0 or total % size == 0]
    tp, their_tp = sizes[a % len(sizes)], sizes[b % len(sizes)]
    turn = data.draw(st.integers(0, 99))
    cut, their_cut = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, layers - 1))

    def engine(size: int, cut: int) -> list[tuple[CacheMap, Shard]]:
        stages = [s for s in (range(cut), range(cut, layers)) if s]
        return [
            (cache(s, heads_of(total, Shard(rank, size)), total), Shard(rank, size))
            for s in stages
            for rank in range(size)
        ]

    sources, sinks = engine(tp, cut), engine(their_tp, their_cut)
    load = Counter()
    for sink, shard in sinks:
        shares = [share(source, of, sink, shard, turn=turn) for source, of in sources]
        assert uncovered(sink, shares) == []
        got = Counter()
        for (source, _), part in zip(sources, shares, strict=True):
            for name, layers_of, heads in part:
                for layer, head in itertools.product(layers_of, heads):
                    got[name, layer, head] += 1
                    load[id(source), layer, head] += 1
                    (held,) = holding(source)
                    assert layer in held.layers
                    assert head in held.heads
        (held,) = holding(sink)
        assert got == {("k", layer, head): 1 for layer in held.layers for head in held.heads}
    for layer, head in {(layer, head) for _, layer, head in load}:
        loads = [
            load[id(source), layer, head]
            for source, _ in sources
            if layer in holding(source)[0].layers and head in holding(source)[0].heads
        ]
        assert max(loads) - min(loads) <= 1


def test_of_a_latent_on_every_rank_neighbours_send_to_neighbours_and_the_turn_moves_on() -> None:
    def pairs(n: int, m: int, turn: int = 0) -> set[tuple[int, int]]:
        sources = {rank: [Held("latent", (0,), (0,))] for rank in range(n)}
        sinks = {rank: [Held("latent", (0,), (0,))] for rank in range(m)}
        return set(serving(sources, sinks, turn=turn))

    assert pairs(2, 4) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert pairs(4, 2) == {(0, 0), (2, 1)}, "ranks 1 and 3 take no part"
    assert pairs(4, 2, turn=1) == {(1, 0), (3, 1)}
    assert pairs(4, 4) == {(rank, rank) for rank in range(4)}


def test_what_no_source_holds_is_named() -> None:
    with pytest.raises(LayoutMismatchError, match="no rank of the source holds head 3 of plane 'k' of layer 5"):
        serving({0: [Held("k", (5,), (0, 1))]}, {0: [Held("k", (5,), (0, 3))]})
    with pytest.raises(LayoutMismatchError, match="head 0 of plane 'index' of layer 1"):
        serving({0: [Held("k", (1,), (0,))]}, {0: [Held("index", (1,), (0,))]})
    sink = cache([0, 1, 2], [0, 1], 2)
    assert uncovered(sink, [[Held("k", (0, 1), (0,))], [Held("k", (0,), (1,))]]) == [
        "plane 'k' of layer 1, heads 1",
        "plane 'k' of layer 2, heads 0-1",
    ]


def test_a_stage_with_no_layer_in_common_takes_no_part() -> None:
    assert share(cache([0, 1], [0], 1), Shard(0, 1), cache([2, 3], [0], 1), Shard(0, 1)) == ()

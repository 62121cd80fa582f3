"""Descriptor counts of the layouts that are in use, what is refused, and what it would cost."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout import plan as planning
from kvxfer.layout import refine
from kvxfer.layout.check import check
from kvxfer.layout.describe import Content, Heads, Tensor, sections, strided
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.plan import Cost, Prepared, prepare
from kvxfer.layout.positions import Table
from kvxfer.layout.ranks import Shard, heads_of, share
from kvxfer.layout.refine import Held
from kvxfer.layout.runs import EMPTY

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 4, 8, 128, 16, 64
SOURCE, SINK = 1 << 40, 1 << 44
ALONE = Shard(0, 1)


def vllm(
    order: str,
    base: int = SOURCE,
    *,
    block: int = BLOCK,
    tp: Shard = ALONE,
    item: int = 2,
    total: int = HEADS,
    dim: int = DIM,
) -> CacheMap:
    """What vLLM allocates for a layout's name: K and V joined in C."""
    heads = heads_of(total, tp)
    blocks = BLOCKS * BLOCK // block
    size = {"L": LAYERS, "B": blocks, "H": len(heads), "N": block, "C": 2 * dim}
    strides, at = {}, item
    for axis in reversed(order):
        strides[axis], at = at, at * size[axis]
    tensors = [
        Tensor(layer, base + layer * strides["L"], tuple(size[a] for a in "BHNC"), tuple(strides[a] for a in "BHNC"))
        for layer in range(LAYERS)
    ]
    kv = [Content("k", dim), Content("v", dim)]
    planes = strided(tensors, "BHNC", kv, dtype="bfloat16", item=item, heads=Heads(heads, total))
    cache = CacheMap((Group(block, blocks, planes),), ((base, at),), "DRAM")
    check(cache)
    return cache


def neuron(base: int = SOURCE, *, block: int = BLOCK) -> CacheMap:
    """vllm-neuron's tensor a layer: (2, blocks, heads, tokens, channels)."""
    shape = (2, BLOCKS, HEADS, block, DIM)
    strides = tuple(int(np.prod(shape[i + 1 :])) * 2 for i in range(5))
    layers = [Tensor(layer, base + layer * (strides[0] * 2 + 512), shape, strides) for layer in range(LAYERS)]
    planes = strided(
        layers,
        "PBHNC",
        [Content("k", DIM), Content("v", DIM)],
        dtype="bfloat16",
        item=2,
        heads=Heads(tuple(range(HEADS)), HEADS),
    )
    return CacheMap((Group(block, BLOCKS, planes),), ((base, LAYERS * (strides[0] * 2 + 512)),), "VRAM")


def ids(*values: int) -> Table:
    return Table(np.array(values, dtype=np.int32))


RISING, SCATTERED = ids(*range(10, 30)), ids(*range(50, 10, -2))


@pytest.mark.parametrize(
    ("source", "sink", "contiguous", "scattered"),
    [
        ("BLHNC", "BLHNC", 1, 20),
        ("BLNHC", "BLNHC", 1, 20),
        ("LBHNC", "LBHNC", LAYERS, 20 * LAYERS),
        ("LBNHC", "LBNHC", LAYERS, 20 * LAYERS),
        ("LHBNC", "LHBNC", LAYERS * HEADS, 20 * LAYERS * HEADS),
        ("BHLNC", "BHLNC", 1, 20),
        ("BLHNC", "LBHNC", 20 * LAYERS, 20 * LAYERS),
        ("LBHNC", "LHBNC", 20 * LAYERS * HEADS, 20 * LAYERS * HEADS),
    ],
)
def test_counts_of_vllms_layouts(source, sink, contiguous, scattered) -> None:
    prepared = prepare(vllm(source, SOURCE), vllm(sink, SINK))
    size = 20 * BLOCK * LAYERS * HEADS * 2 * DIM * 2
    for table, count in ((RISING, contiguous), (SCATTERED, scattered)):
        plan = prepared.plan([table], [RISING], 0, 20 * BLOCK)
        assert (plan.count, plan.bytes) == (count, size)
    # The last block is filled, which costs no descriptor.
    assert prepared.plan([RISING], [RISING], 0, 20 * BLOCK - 3).count == contiguous


def test_a_falling_table_on_both_sides_is_one_run_too() -> None:
    falling = ids(*range(29, 9, -1))
    assert prepare(vllm("BLHNC"), vllm("BLHNC", SINK)).plan([falling], [falling], 0, 20 * BLOCK).count == 1


def test_neuron_to_cuda_moves_k_and_v_of_a_head_apart() -> None:
    with pytest.raises(LayoutMismatchError, match="runs of 256 bytes"):
        prepare(neuron(), vllm("LBHNC", SINK))
    equal = prepare(neuron(), neuron(SINK))
    assert equal.plan([RISING], [RISING], 0, 20 * BLOCK).count == 2 * LAYERS
    assert equal.plan([SCATTERED], [RISING], 0, 20 * BLOCK).count == 2 * LAYERS * 20


@pytest.mark.parametrize(("tp", "their_tp", "count"), [(1, 2, 1), (2, 1, 2), (4, 8, 1), (1, 8, 1), (8, 1, 8)])
def test_unequal_tensor_parallelism_splits_heads_into_a_run_each_block_and_layer(tp, their_tp, count) -> None:
    sink, shard = vllm("LBHNC", SINK, tp=Shard(0, their_tp)), Shard(0, their_tp)
    parts = [(vllm("LBHNC", tp=Shard(rank, tp)), Shard(rank, tp)) for rank in range(tp)]
    plans = [
        prepare(source, sink, part).plan([RISING], [RISING], 0, 20 * BLOCK)
        for source, of in parts
        if (part := share(source, of, sink, shard))
    ]
    assert len(plans) == count
    assert {plan.count for plan in plans} == {20 * LAYERS}
    assert sum(plan.bytes for plan in plans) == 20 * BLOCK * LAYERS * (HEADS // their_tp) * 2 * DIM * 2


@pytest.mark.parametrize(("block", "theirs"), [(16, 32), (32, 16), (16, 64), (32, 128)])
def test_unequal_blocks_move_by_the_smaller_ones(block, theirs) -> None:
    source, sink = vllm("LBNHC", block=block), vllm("LBNHC", SINK, block=theirs)
    contiguous = prepare(source, sink).plan([ids(*range(4, 16))], [ids(*range(1, 8))], 0, 2 * max(block, theirs))
    assert contiguous.count == LAYERS, "token-major: tokens follow each other across blocks"
    # Head-major, a head's tokens are cut where either block ends.
    heads = prepare(vllm("LBHNC", block=block), vllm("LBHNC", SINK, block=theirs))
    plan = heads.plan([ids(*range(1, 24, 2))], [ids(*range(1, 12, 2))], 0, 2 * max(block, theirs))
    assert plan.count == 2 * max(block, theirs) // min(block, theirs) * LAYERS * HEADS


def test_a_run_is_cut_at_the_limit_the_backend_carries() -> None:
    prepared = prepare(vllm("BLHNC"), vllm("BLHNC", SINK))
    plan = prepared.plan([RISING], [RISING], 0, 20 * BLOCK, limit=1 << 20)
    assert plan.count == -(-plan.bytes // (1 << 20))


def latents(base: int, layers=range(LAYERS), indexed=range(LAYERS), *, block: int = 64) -> CacheMap:
    """DeepSeek's sparse attention in fp8: a latent of 656 bytes with its scales in it, an indexer's keys and scales."""
    page, index = block * 656, block * 132
    total = len(layers) * page + len(indexed) * index
    main = [Tensor(n, base + i * page, (BLOCKS, 1, block, 656), (total, page, 656, 1)) for i, n in enumerate(layers)]
    beside = [
        Tensor(n, base + len(layers) * page + i * index, (BLOCKS, block, 132), (total, 132, 1))
        for i, n in enumerate(indexed)
    ]
    planes = strided(main, "BHNC", [Content("latent", 656)], dtype="fp8_ds_mla", item=1, heads=Heads((0,), 1))
    planes += sections(beside, block, [Content("index", 128), Content("index_scale", 4)], dtype="fp8_index", item=1)
    cache = CacheMap((Group(block, BLOCKS, planes),), ((base, total * BLOCKS),), "VRAM")
    check(cache)
    return cache


def test_sparse_mla_moves_its_indexer_beside_its_latents() -> None:
    source, sink = latents(SOURCE), latents(SINK)
    assert prepare(source, sink).plan([RISING], [RISING], 0, 20 * 64).count == 1
    plan = prepare(source, sink).plan([SCATTERED], [RISING], 0, 20 * 64)
    assert (plan.count, plan.bytes) == (20, 20 * 64 * LAYERS * (656 + 132))
    some = prepare(latents(SOURCE, indexed=(0, 2)), latents(SINK, indexed=(0, 2)))
    assert some.plan([SCATTERED], [RISING], 0, 20 * 64).bytes == 20 * 64 * (LAYERS * 656 + 2 * 132)
    half = prepare(latents(SOURCE, block=32), sink).plan(
        [ids(*range(8, 48, 2), *range(9, 48, 2))], [RISING], 0, 20 * 64
    )
    assert half.count == 2 * 20 * 3 * LAYERS, "of unequal blocks: latents, keys and scales of each"


def test_a_pipeline_stage_gives_each_other_stage_its_layers() -> None:
    whole = latents(SINK)
    for layers in ((0, 1), (2, 3)):
        source = latents(SOURCE, layers, layers)
        part = share(source, Shard(0, 4), whole, Shard(0, 1))
        assert {layer for held in part for layer in held.layers} == set(layers)
        plan = prepare(source, whole, part).plan([SCATTERED], [RISING], 0, 20 * 64)
        assert plan.bytes == 20 * 64 * 2 * (656 + 132)
        assert plan.count == 2 * 20, "latents together, indexers together"


def test_a_head_that_fills_two_slots_of_the_sink_goes_to_both() -> None:
    source = vllm("LBHNC", total=2)
    (group,) = vllm("LBHNC", SINK, total=4).groups
    planes = tuple(msgspec.structs.replace(plane, heads=(0, 0, 1, 1), total_heads=2) for plane in group.planes)
    sink = CacheMap((Group(group.block_size, group.num_blocks, planes),), ((SINK, 1 << 30),), "DRAM")
    plan = prepare(source, sink).plan([ids(1)], [ids(2)], 0, BLOCK)
    cell = BLOCK * 2 * DIM * 2
    got = [
        (int(a) - SOURCE, int(b) - SINK, int(n)) for (a, n, _), (b, _, _) in zip(plan.source, plan.sink, strict=True)
    ]
    first = [(2 * cell, 8 * cell, cell), (2 * cell, 9 * cell, 2 * cell), (3 * cell, 11 * cell, cell)]
    assert (got[:3], len(got)) == (first, 3 * LAYERS)
    back = prepare(sink, source).plan([ids(2)], [ids(1)], 0, BLOCK)
    assert [int(a) - SINK for a, _, _ in back.source[:2]] == [8 * cell, 10 * cell], "of replicas, the first slot"


def test_a_hybrids_window_group_moves_the_prompts_last_window_only() -> None:
    full, window = vllm("LBHNC"), vllm("LBHNC", SOURCE + (1 << 34))

    def hybrid(base: int) -> CacheMap:
        groups = []
        for number, of in ((0, full), (1, window)):
            (group,) = of.groups
            planes = tuple(
                msgspec.structs.replace(
                    plane,
                    layers=tuple(layer * 2 + number for layer in plane.layers),
                    bases=tuple(address - SOURCE + base for address in plane.bases),
                )
                for plane in group.planes
            )
            groups.append(msgspec.structs.replace(group, planes=planes, window=40 if number else None))
        return CacheMap(tuple(groups), ((base, 1 << 35),), "DRAM")

    prepared = prepare(hybrid(SOURCE), hybrid(SINK))
    null_then = ids(*[0] * 17, 7, 8, 9)
    plan = prepared.plan([RISING, null_then], [RISING, null_then], 0, 320)
    assert [tuple(span) for span in plan.moved] == [(0, 320), (272, 320)]
    first = prepared.plan([RISING, null_then], [RISING, null_then], 0, 160, prompt=320)
    assert [tuple(span) for span in first.moved] == [(0, 160), (160, 160)], "of an early chunk, the full group alone"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("joined_is", ["the source", "the sink"])
def test_where_one_joins_k_and_v_in_a_token_the_cure_is_one_that_helps(order, joined_is) -> None:
    """vLLM 0.26's joined cache and vllm-neuron's two halves: VLLM_KV_CACHE_LAYOUT changes nothing about either."""
    both = [
        neuron(SOURCE if joined_is == "the sink" else SINK),
        vllm(order, SOURCE if joined_is == "the source" else SINK),
    ]
    source, sink = both if joined_is == "the sink" else both[::-1]
    with pytest.raises(LayoutMismatchError) as caught:
        prepare(source, sink)
    _, ours, theirs, cure = str(caught.value).splitlines()
    assert ours.startswith("the source lays k+v of")
    assert theirs.startswith("the sink lays k+v of")
    assert cure.startswith(f"{joined_is} joins K and V in each token")
    assert "set staging_bytes on the sink" in cure
    assert f"run {joined_is} on a vLLM that keeps them apart (docs/neuron.md), with VLLM_KV_CACHE_LAYOUT=HND" in cure


@pytest.mark.parametrize("name", ["k", "kv"])
def test_what_has_no_v_or_an_opaque_inside_joins_nothing(name) -> None:
    """The cure is the plain one."""
    (group,) = neuron().groups
    plane = msgspec.structs.replace(group.planes[0], name=name, interior="" if name == "k" else "tiles", item=1)
    if plane.interior:
        plane = msgspec.structs.replace(plane, tokens=((1, 1),), channels=((BLOCK * DIM * 2, 1),))
    cache = CacheMap((Group(BLOCK, BLOCKS, (plane,)),), neuron().spans, "VRAM")
    with pytest.raises(LayoutMismatchError) as caught:
        prepare(cache, neuron(SINK))
    assert str(caught.value).splitlines()[-1].startswith("set VLLM_KV_CACHE_LAYOUT=HND")


def test_what_would_move_in_crumbs_is_refused_with_both_layouts_and_a_cure() -> None:
    names = ("prefill-1 rank 0", "decode-1 rank 0")
    with pytest.raises(LayoutMismatchError) as caught:
        prepare(vllm("LBHNC"), vllm("LBNHC", SINK, block=32), names=names)
    assert str(caught.value).splitlines() == [
        "blocks would move in runs of 512 bytes on average",
        "prefill-1 rank 0 lays k+v of layers 0-3, heads 0-7 as [layer][block][head][token 16][k+v][channel 128] bfloat16;",
        "decode-1 rank 0 lays k+v of layers 0-3, heads 0-7 as [layer][block][token 32][head][k+v][channel 128] bfloat16;",
        "set VLLM_KV_CACHE_LAYOUT=HND and the same --block-size on both, with the same model, --dtype and --kv-cache-dtype",
    ]
    crumbs = prepare(vllm("LBHNC"), vllm("LBNHC", SINK, block=32), useful=512)
    assert crumbs.plan([SCATTERED], [ids(*range(1, 21, 2))], 0, 320).count == 320 * HEADS * LAYERS, (
        "unless that is what is wanted"
    )


def test_small_blocks_are_no_crumbs() -> None:
    tiny = [vllm("LBHNC", base, total=2, dim=4) for base in (SOURCE, SINK)]
    assert prepare(*tiny).plan([SCATTERED], [RISING], 0, 320).count == 20 * LAYERS
    with pytest.raises(LayoutMismatchError, match="runs of 16 bytes"):
        prepare(tiny[0], vllm("LBNHC", SINK, total=2, dim=4))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "fp8"}, "element type differs: the source has bfloat16, the sink fp8"),
        ({"item": 1}, "bytes per element differs: the source has 2, the sink 1"),
        ({"channels": ((64, 2),)}, "channels of a head differs: the source has 128, the sink 64"),
        ({"total_heads": 16}, "heads of the model differs: the source has 8, the sink 16"),
        ({"interior": "amx"}, "block interior differs: the source has strided, the sink amx"),
        ({"name": "x"}, "the two have no plane, layer and head in common"),
        ({"layers": (4, 5, 6, 7)}, "the two have no plane, layer and head in common"),
    ],
)
def test_planes_that_hold_different_things_are_refused(change, text) -> None:
    source, sink = vllm("LBHNC"), vllm("LBHNC", SINK)
    (group,) = sink.groups
    group = msgspec.structs.replace(group, planes=tuple(msgspec.structs.replace(p, **change) for p in group.planes))
    with pytest.raises(LayoutMismatchError, match=text):
        prepare(source, msgspec.structs.replace(sink, groups=(group,)))


def test_windows_must_be_equal_and_heads_in_common() -> None:
    source, sink = vllm("LBHNC"), vllm("LBHNC", SINK)
    windowed = msgspec.structs.replace(sink, groups=(msgspec.structs.replace(sink.groups[0], window=9),))
    with pytest.raises(
        LayoutMismatchError, match="attention window differs: the source has None, the sink 9"
    ) as caught:
        prepare(source, windowed)
    assert str(caught.value).endswith("with --disable-hybrid-kv-cache-manager on both or on neither")
    with pytest.raises(LayoutMismatchError, match="no plane, layer and head in common"):
        prepare(vllm("LBHNC", tp=Shard(0, 2)), vllm("LBHNC", SINK, tp=Shard(1, 2)))


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (Held("index", (0,), (0,)), "the source has no plane 'index' of layer 0"),
        (Held("k", (9,), (0,)), "the source has no plane 'k' of layer 9"),
        (Held("k", (0,), (0, 5)), "plane 'k': one side does not hold head 5"),
    ],
)
def test_a_share_of_what_is_not_there_is_refused(held, text) -> None:
    with pytest.raises(LayoutMismatchError, match=text):
        prepare(vllm("LBHNC"), vllm("LBHNC", SINK, tp=Shard(0, 2)), [held])


def test_block_sizes_without_common_boundaries_are_refused_before_they_are_worked_out() -> None:
    source, sink = vllm("LBNHC"), vllm("LBNHC", SINK)

    def sized(cache: CacheMap, size: int) -> CacheMap:
        (group,) = cache.groups
        planes = tuple(
            msgspec.structs.replace(p, tokens=((size, p.tokens[0][1]),), block_stride=size * p.tokens[0][1])
            for p in group.planes
        )
        return msgspec.structs.replace(cache, groups=(Group(size, 2, planes),))

    with pytest.raises(
        LayoutMismatchError, match=r"blocks of 65,536 and of 65,535 tokens end together only every 4,294,901,760"
    ):
        prepare(sized(source, 65536), sized(sink, 65535))


def test_too_many_pieces_are_refused_before_memory_is_taken() -> None:
    def permuted(base: int, block: int, token: int, channel: int) -> CacheMap:
        (group,) = vllm("LBHNC", base).groups
        (plane, _) = group.planes
        plane = msgspec.structs.replace(
            plane, tokens=((block, token),), channels=((1 << 16, channel),), block_stride=1 << 40
        )
        return CacheMap((Group(block, 4, (plane,)),), (), "DRAM")

    with pytest.raises(LayoutMismatchError, match="blocks fall into more than 4,194,304 pieces"):
        prepare(permuted(SOURCE, 512, 2 << 16, 2), permuted(SINK, 512, 2, 1024))


def test_many_small_pieces_are_refused_before_each_is_gone_through(monkeypatch) -> None:
    """Each costs as much as a long one: a card of 80 layers that are all unlike kept a control thread for a minute."""
    gone = []
    monkeypatch.setattr(refine, "_piece_runs", lambda piece, *_: gone.append(piece) or EMPTY)

    def unlike(base: int, size: int, step: int) -> CacheMap:
        page = 4 * size * DIM * 2
        planes = [
            Plane(
                name, "bfloat16", 2, (layer,), (base + (layer << 24) + at * page,), tuple(range(4)), 4,
                2 * page + step * (layer + 1), page // 4, ((size, DIM * 2),), ((DIM, 2),),
            )
            for layer in range(80)
            for at, name in enumerate(("k", "v"))
        ]  # fmt: skip
        return CacheMap((Group(size, 4, tuple(planes)),), (), "DRAM")

    with pytest.raises(LayoutMismatchError, match="blocks fall into more than 4,194,304 pieces"):
        prepare(unlike(SOURCE, 16, 0), unlike(SINK, 127, 64))
    assert len(gone) < 5000


def test_one_block_named_twice_on_the_sink_is_refused() -> None:
    prepared = prepare(vllm("BLHNC"), vllm("BLHNC", SINK))
    with pytest.raises(LayoutMismatchError, match=r"two runs write the byte at 0x1000.* a block is named twice"):
        prepared.plan([ids(1, 2)], [ids(3, 3)], 0, 2 * BLOCK)
    assert prepared.plan([ids(1, 1)], [ids(3, 4)], 0, 2 * BLOCK).count == 2, "reading one twice is nobody's harm"


# --- cost -------------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_plan_is_that_of_its_descriptors_and_of_its_bytes() -> None:
    plan = prepare(vllm("LBHNC"), vllm("LBHNC", SINK)).plan([SCATTERED], [RISING], 0, 320)
    assert plan.seconds(Cost(descriptor=1.0, rate=float(plan.bytes))) == plan.count + 1
    # Two H200s joined by NVLink: 36,000 descriptors of 64 KiB in 211 to 222 ms, 1,000 of 2.36 MB in 9 to 12 ms.
    nvlink = Cost(rate=2.36e9 / 7.3e-3)
    assert nvlink.seconds(36_000, 2_360_000_000) == pytest.approx(0.2125, rel=0.02)
    assert nvlink.seconds(1_000, 2_360_000_000) == pytest.approx(0.013, rel=0.1)
    assert plan.seconds() == Cost().seconds(plan.count, plan.bytes)


def test_what_is_worked_out_is_remembered_and_not_without_end(monkeypatch) -> None:
    monkeypatch.setattr(planning, "MAX_KINDS", 4)
    monkeypatch.setattr(planning, "_REMEMBERED", 3)
    prepared = Prepared(vllm("LBHNC"), vllm("LBHNC", SINK))
    for end in range(1, BLOCK + 1):
        plan = prepared.plan([RISING], [RISING], 0, end, exact=True)
        assert plan.bytes == end * LAYERS * HEADS * 2 * DIM * 2
    known = prepared.lanes(0, next(iter(prepared._lanes[0])))
    assert known is prepared.lanes(0, next(iter(prepared._lanes[0])))
    assert len(prepared._lanes[0]) <= 8

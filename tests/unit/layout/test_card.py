"""Two ranks that do not mean the same by a block must not exchange KV, and are told why and what to change."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.errors import LayoutMismatchError, RemoteProtocolError
from kvxfer.layout.card import RankCard, connected, refusals, takers_of
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.layout.repack import STRIDED
from kvxfer.layout.route import StagingArea
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Hello, pack, unpack

A, B = 1 << 40, 1 << 42


def tile(
    base: int,
    *,
    interior: str = "host:CPU_ATTN:amx",
    dtype: str = "bfloat16",
    layers: int = 2,
    heads: int = 8,
    blocks: int = 100,
    block_size: int = 16,
    channels: int = 256,
    stride: int | None = None,
) -> CacheMap:
    """Blocks whose inside is opaque, a layer behind the other: nothing but equal ones can be exchanged."""
    cell = block_size * channels * 2
    step = stride or heads * cell
    bases = tuple(base + layer * blocks * step for layer in range(layers))
    plane = Plane(
        "kv", dtype, 1, tuple(range(layers)), bases, tuple(range(heads)), heads, step, cell, (), ((cell, 1),), interior
    )
    return CacheMap((Group(block_size, blocks, (plane,)),), ((base, layers * blocks * step),), "DRAM")


CARD = RankCard("prefill-1", "llama", 0, 1, 0, 1, "LIBFABRIC", tile(A), b"\x00\xffagent")


def changed(**changes) -> RankCard:
    own = {"model", "tp_size", "pp_size", "backend", "agent", "tp_rank", "pp_rank", "role"}
    card = {key: changes.pop(key) for key in own & changes.keys()}
    memory = changes.pop("memory", "DRAM")
    cache = msgspec.structs.replace(tile(B, **changes), memory=memory)
    return msgspec.structs.replace(CARD, engine="decode-1", cache=cache, **card)


def test_equal_ranks_may_exchange() -> None:
    assert refusals(CARD, changed()) == []


@pytest.mark.parametrize("change", [{"blocks": 7}, {"agent": b"another"}, {"stride": 1 << 18}])
def test_size_addresses_and_strides_may_differ(change) -> None:
    assert refusals(CARD, changed(**change)) == []


DIFFERENCES = {
    "model": ("mistral", "llama", "mistral", "model_id"),
    "memory": ("VRAM", "DRAM", "VRAM", "kind of accelerator"),
    "backend": ("UCX", "LIBFABRIC", "UCX", '"backend"'),
}
HARMLESS = {"engine", "agent", "tp_rank", "tp_size", "pp_rank", "pp_size", "cache", "staging", "role"}
"""Parallelism, ``cache``, ``staging`` and ``role`` have tests of their own below."""


def test_every_field_of_a_card_is_compared_or_known_to_be_harmless() -> None:
    assert set(RankCard.__struct_fields__) | {"memory"} == set(DIFFERENCES) | HARMLESS


@pytest.mark.parametrize("field", DIFFERENCES)
def test_a_difference_is_refused_with_both_engines_both_values_and_a_cure(field) -> None:
    value, ours, theirs, cure = DIFFERENCES[field]
    (text,) = refusals(CARD, changed(**{field: value}))
    assert f"prefill-1 has {ours}" in text
    assert f"decode-1 has {theirs}" in text
    assert cure in text.split("; ", 1)[1]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dtype", "fp8_e4m3", "fp8_e4m3"),
        ("interior", "host:CPU_ATTN:neon", "host:CPU_ATTN:neon"),
        ("block_size", 32, "32"),
        ("channels", 128, "the source has 8192, the sink 4096"),
    ],
)
def test_blocks_that_nothing_can_translate_are_refused_with_both_layouts(field, value, says) -> None:
    (text,) = refusals(CARD, changed(**{field: value}))
    assert "prefill-1 rank 0" in text
    assert "decode-1 rank 0" in text
    assert says in text


def test_layers_that_nobody_would_fill_are_refused() -> None:
    """Another stage of the source might hold them, but there is none."""
    few, many = changed(), msgspec.structs.replace(CARD, cache=tile(A, layers=4))
    with pytest.raises(
        LayoutMismatchError, match=r"prefill-1 rank 0 holds 'kv' of layers 2-3, which decode-1 rank 0 does not"
    ):
        connected(few, many)
    assert connected(many, few) is not None
    assert connected(msgspec.structs.replace(few, pp_size=2), many) is not None, "another stage may have the others"


PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"


@pytest.mark.parametrize(
    ("few", "many", "may"),
    [
        (BOTH, BOTH, True),
        (CONSUMER, PRODUCER, True),
        (PRODUCER, CONSUMER, False),
        (BOTH, PRODUCER, True),
        (PRODUCER, BOTH, False),
        (BOTH, CONSUMER, False),
        (PRODUCER, PRODUCER, False),
        (CONSUMER, CONSUMER, False),
    ],
)
def test_only_directions_that_the_roles_allow_count(few, many, may) -> None:
    """What can move only from the rank with many layers to the one with few."""
    one = msgspec.structs.replace(changed(), role=few)
    other = msgspec.structs.replace(CARD, cache=tile(A, layers=4), role=many)
    for mine, theirs in ((one, other), (other, one)):
        texts = refusals(mine, theirs)
        assert (texts == []) == may
        if few == many != BOTH:
            assert f"both have kv_role {few}" in texts[0]


def test_all_differences_are_told_at_once() -> None:
    assert len(refusals(CARD, changed(memory="VRAM", backend="UCX", model="y"))) == 3


def test_stages_may_send_and_not_receive() -> None:
    whole = msgspec.structs.replace(CARD, role=CONSUMER)
    stages = changed(pp_size=2, role=PRODUCER)
    assert refusals(whole, stages) == [] == refusals(stages, whole)
    staged = changed(pp_size=2, role=CONSUMER)
    (text,) = refusals(msgspec.structs.replace(CARD, role=PRODUCER), staged)
    assert "decode-1 would receive KV in 2 pipeline stages" in text
    assert "set --pipeline-parallel-size 1 on the decode engine" in text


def test_a_rank_that_does_not_hold_its_share_of_the_heads_is_refused() -> None:
    (text,) = refusals(mapped(A, "prefill-1"), msgspec.structs.replace(mapped(B, "decode-1"), tp_size=2))
    assert text.startswith("from prefill-1 with 1 tensor-parallel ranks to decode-1 with 2: plane 'kv'")
    assert "of 4 in the model it should hold 0 to 1" in text


def test_a_card_whose_siblings_would_hold_too_much_is_refused() -> None:
    """What all its siblings hold is derived from it, and must be bounded."""
    planes = changed(tp_size=1024, layers=256)
    with pytest.raises(RemoteProtocolError, match="2048 heads in all layers of each of 1024 ranks"):
        RankCard.from_builtins(planes.to_builtins())


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [((1, 2), [2]), ((2, 1), [1, 1]), ((2, 4), [2, 2]), ((4, 2), [1] * 4), ((8, 4), None), ((4, 8), [2] * 4)],
)
def test_each_source_rank_knows_how_many_ranks_take_from_it(ranks, counts) -> None:
    """Four heads: from five ranks on, ranks hold replicas."""
    sources = [mapped(A, "prefill-1", tp=(rank, ranks[0])) for rank in range(ranks[0])]
    sinks = [mapped(B, "decode-1", tp=(rank, ranks[1])) for rank in range(ranks[1])]
    for source in sources:
        taking = sum(connected(source, sink) is not None for sink in sinks)
        assert {takers_of(source, sink) for sink in sinks} == {taking}, "whichever rank says it"
    found = [takers_of(source, sinks[0]) for source in sources]
    assert found == counts if counts else sorted(found) == [0] * 4 + [1] * 4


# --- on the wire ------------------------------------------------------------------------------------------------------

STAGED = msgspec.structs.replace(CARD, staging=StagingArea(B, 1 << 20, (STRIDED,)))


def test_a_card_survives_a_message() -> None:
    for card in (CARD, STAGED):
        _, hello = unpack(pack(RankId("a", "b", 0), "", Hello(card.to_builtins(), 1.0)))
        assert RankCard.from_builtins(hello.card) == card


FIELDS = [
    *RankCard.__struct_fields__,
    *(f"cache.{field}" for field in CacheMap.__struct_fields__),
    *(f"staging.{field}" for field in StagingArea.__struct_fields__),
]
OPTIONAL = {field for field in FIELDS if field.split(".")[-1] in ("staging", "device", "role")}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("fault", ["missing", "of another type"])
def test_a_card_without_a_field_or_with_nonsense_in_it_is_refused(field, fault) -> None:
    card = STAGED.to_builtins()
    *inside, key = field.split(".")
    place = card[inside[0]] if inside else card
    if fault == "of another type":
        place[key] = {"a": 1.5}
    else:
        del place[key]
        if field in OPTIONAL:
            RankCard.from_builtins(card)
            return
    with pytest.raises(RemoteProtocolError, match="not a rank card"):
        RankCard.from_builtins(card)


@pytest.mark.parametrize(
    ("area", "why"),
    [
        (StagingArea(-1, 8, ()), "a staging area at -1 of 8 bytes"),
        (StagingArea(8, 0, ()), "a staging area at 8 of 0 bytes"),
        (StagingArea((1 << 63) - 8, 9, ()), "a staging area at"),
        (StagingArea(8, 8, (("a" * 257, "b"),)), "a name of 257 characters"),
        (StagingArea(8, 8, (("a", "b" * 257),)), "a name of 257 characters"),
        (StagingArea(8, 8, (("a\n", "b"),)), "a name that cannot be printed"),
        (StagingArea(8, 8, (STRIDED,) * 1025), "1025 offers"),
    ],
)
def test_a_staging_area_that_cannot_be_is_refused_before_anything_is_computed_from_it(area, why) -> None:
    card = msgspec.structs.replace(CARD, staging=area)
    with pytest.raises(RemoteProtocolError, match=f"not a rank card: .*{why}"):
        RankCard.from_builtins(card.to_builtins())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tp_size": 0}, "tensor-parallel rank 0 of 0"),
        ({"tp_size": -1}, "tensor-parallel rank 0 of -1"),
        ({"tp_rank": 1}, "tensor-parallel rank 1 of 1"),
        ({"tp_rank": -1}, "tensor-parallel rank -1 of 1"),
        ({"tp_size": 1 << 40}, f"tensor-parallel rank 0 of {1 << 40}"),
        ({"pp_size": 0}, "pipeline-parallel rank 0 of 0"),
        ({"pp_rank": 7}, "pipeline-parallel rank 7 of 1"),
        ({"engine": "e\nWARNING"}, "the name 'e"),
        ({"model": "m\x1b[2J"}, "the name 'm"),
        ({"backend": "b\r"}, "the name 'b"),
        ({"model": "m" * 5000}, "the name 'mmm"),
    ],
)
def test_a_rank_or_a_name_that_cannot_be_is_refused(change, why) -> None:
    """A stage of no ranks would get around the check of its layers; names stand in what people read."""
    card = msgspec.structs.replace(CARD, **change)
    with pytest.raises(RemoteProtocolError, match=f"not a rank card: .*{why}"):
        RankCard.from_builtins(card.to_builtins())


# --- ways from one to the other ---------------------------------------------------------------------------------------


def mapped(base: int, engine: str, *, tp: tuple[int, int] = (0, 1), order: str = "head", total: int = 4) -> RankCard:
    heads = heads_of(total, Shard(*tp))
    token, head = (256, 16 * 256) if order == "head" else (256 * len(heads), 256)
    page = 16 * 256 * len(heads)
    bases = (base, base + 64 * page)
    plane = Plane("kv", "bfloat16", 2, (0, 1), bases, heads, total, page, head, ((16, token),), ((128, 2),))
    cache = CacheMap((Group(16, 64, (plane,)),), ((base, 2 * 64 * page),), "DRAM")
    return msgspec.structs.replace(CARD, engine=engine, tp_rank=tp[0], tp_size=tp[1], cache=cache)


def test_a_card_with_a_map_survives_a_message_and_a_map_that_cannot_be_does_not() -> None:
    card = mapped(1 << 40, "prefill-1")
    _, hello = unpack(pack(RankId("a", "b", 0), "", Hello(card.to_builtins(), 1.0)))
    assert RankCard.from_builtins(hello.card) == card
    wrong = msgspec.structs.replace(card.cache, spans=((1 << 40, 5),))
    with pytest.raises(RemoteProtocolError, match="not within the memory that the card names"):
        RankCard.from_builtins(msgspec.structs.replace(card, cache=wrong).to_builtins())


def test_maps_that_connect_are_no_reason_to_refuse_and_others_are() -> None:
    mine, theirs = mapped(1 << 40, "prefill-1"), mapped(1 << 42, "decode-1")
    assert refusals(mine, theirs) == []
    (text,) = refusals(mine, mapped(1 << 42, "decode-1", order="token"))
    assert text.splitlines() == [
        "blocks would move in runs of 256 bytes on average",
        "prefill-1 rank 0 lays kv of layers 0-1, heads 0-3 as [layer][block][head][token 16][channel 128] bfloat16;",
        "decode-1 rank 0 lays kv of layers 0-1, heads 0-3 as [layer][block][token 16][head][channel 128] bfloat16;",
        "set VLLM_KV_CACHE_LAYOUT=HND on both, with the same model, --dtype and --kv-cache-dtype",
    ]


def test_of_ranks_with_replicas_one_is_connected_and_another_takes_no_part() -> None:
    sources = [mapped(1 << 40, "prefill-1", tp=(rank, 8)) for rank in range(8)]
    sink = mapped(1 << 42, "decode-1", tp=(1, 4))
    parts = [connected(source, sink) for source in sources]
    assert [part is not None for part in parts].count(True) == 1
    serving = next(number for number, part in enumerate(parts) if part is not None)
    assert serving in (2, 3)
    others = [mapped(1 << 42, f"decode-{n}", tp=(1, 4)) for n in range(20)]
    assert {n for other in others for n in (2, 3) if connected(sources[n], other)} == {2, 3}, (
        "engines load both replicas"
    )


def test_what_has_no_common_run_goes_by_way_of_the_sinks_staging_area() -> None:
    mine, theirs = mapped(A, "prefill-1"), mapped(B, "decode-1", order="token")
    assert refusals(mine, theirs) != []
    area = StagingArea(1 << 44, 1 << 20, (STRIDED,))
    staging = msgspec.structs.replace(theirs, staging=area)
    assert refusals(mine, staging) == [] == refusals(staging, mine), "one of the two directions will do"
    route = connected(mine, staging)
    assert route is not None
    assert route.geometry is not None

"""Two ranks that do not mean the same by a block must not exchange KV, and are told why and what to change."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.errors import RemoteProtocolError
from kvxfer.layout.blocks import CacheLayout, Region
from kvxfer.layout.card import RankCard, connected, refusals
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Hello, pack, unpack

LAYOUT = CacheLayout(
    block_size=16,
    num_blocks=100,
    dtype="bfloat16",
    layers=2,
    kv_heads=8,
    head_dim=128,
    interior="host:CPU_ATTN:vec",
    memory="DRAM",
    regions=(Region("l0", 1 << 40, 4096, 4096, 0), Region("l1", 2 << 40, 4096, 4096, 0)),
    spans=((1 << 40, 409_600, 0), (2 << 40, 409_600, 0)),
)
CARD = RankCard("prefill-1", "llama", 0, 1, 0, 1, "LIBFABRIC", LAYOUT, b"\x00\xffagent")


def changed(**changes) -> RankCard:
    layout = {key: changes.pop(key) for key in list(changes) if key in CacheLayout.__struct_fields__}
    card = msgspec.structs.replace(CARD, engine="decode-1", **changes)
    return msgspec.structs.replace(card, layout=msgspec.structs.replace(LAYOUT, **layout))


def regions(*sizes: int) -> tuple[Region, ...]:
    return tuple(Region(f"l{i}", i << 40, size, size, 0) for i, size in enumerate(sizes))


def test_equal_ranks_may_exchange() -> None:
    assert refusals(CARD, changed()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 7},
        {"agent": b"another"},
        {"spans": ((5, 5, 5),)},
        {"regions": tuple(Region("other name", 77, 8192, 4096, 3) for _ in range(2))},
    ],
)
def test_size_addresses_strides_and_devices_may_differ(change) -> None:
    assert refusals(CARD, changed(**change)) == []


DIFFERENCES = {
    "model": ("mistral", "llama", "mistral", "model_id"),
    "dtype": ("fp8_e4m3", "bfloat16", "fp8_e4m3", "--kv-cache-dtype"),
    "block_size": (32, "16", "32", "--block-size"),
    "layers": (3, "2", "3", "pipeline stages"),
    "kv_heads": (4, "8", "4", "--tensor-parallel-size"),
    "head_dim": (64, "128", "64", "same model"),
    "tp_size": (2, "1", "2", "--tensor-parallel-size"),
    "pp_size": (2, "1", "2", "--pipeline-parallel-size"),
    "interior": ("host:CPU_ATTN:amx", "host:CPU_ATTN:vec", "host:CPU_ATTN:amx", "attention backend"),
    "memory": ("VRAM", "DRAM", "VRAM", "kind of accelerator"),
    "regions": (regions(4096), "2 × 4,096 bytes", "1 × 4,096 bytes", "VLLM_KV_CACHE_LAYOUT"),
    "backend": ("UCX", "LIBFABRIC", "UCX", '"backend"'),
}
HARMLESS = {"engine", "agent", "tp_rank", "pp_rank", "num_blocks", "spans", "layout", "cache"}
"""``cache`` has tests of its own below."""


def test_every_field_of_a_card_is_compared_or_known_to_be_harmless() -> None:
    fields = set(RankCard.__struct_fields__) | set(CacheLayout.__struct_fields__)
    assert fields == set(DIFFERENCES) | HARMLESS


@pytest.mark.parametrize("field", DIFFERENCES)
def test_a_difference_is_refused_with_both_engines_both_values_and_a_cure(field) -> None:
    value, ours, theirs, cure = DIFFERENCES[field]
    (text,) = refusals(CARD, changed(**{field: value}))
    assert f"prefill-1 has {ours}" in text
    assert f"decode-1 has {theirs}" in text
    assert cure in text.split("; ", 1)[1]


@pytest.mark.parametrize(("ours", "theirs"), [((64, 128), (128, 64)), ((64, 64, 128), (64, 128, 128))])
def test_regions_are_compared_one_by_one_as_they_are_copied(ours, theirs) -> None:
    mine = msgspec.structs.replace(CARD, layout=msgspec.structs.replace(LAYOUT, regions=regions(*ours)))
    (text,) = refusals(mine, changed(regions=regions(*theirs)))
    assert text.startswith("regions differ: ")
    a, b = text.split("; ")[0].removeprefix("regions differ: ").split(", decode-1 has ")
    assert a.removeprefix("prefill-1 has ") != b, "the two values read alike"


def test_all_differences_are_told_at_once() -> None:
    assert len(refusals(CARD, changed(dtype="x", block_size=1, model="y"))) == 3


@pytest.mark.parametrize("size", [{"tp_size": 2}, {"pp_size": 4}])
def test_more_than_one_rank_is_refused_by_this_release(size) -> None:
    mine = msgspec.structs.replace(CARD, **size)
    (text,) = refusals(mine, changed(**size))
    assert "single ranks: set --tensor-parallel-size 1 and --pipeline-parallel-size 1 on both" in text


# --- on the wire ------------------------------------------------------------------------------------------------------


def test_a_card_survives_a_message() -> None:
    _, hello = unpack(pack(RankId("a", "b", 0), "", Hello(CARD.to_builtins(), 1.0)))
    assert RankCard.from_builtins(hello.card) == CARD


@pytest.mark.parametrize(
    "field", [*RankCard.__struct_fields__, *(f"layout.{f}" for f in CacheLayout.__struct_fields__)]
)
@pytest.mark.parametrize("fault", ["missing", "of another type"])
def test_a_card_without_a_field_or_with_nonsense_in_it_is_refused(field, fault) -> None:
    card = CARD.to_builtins()
    if (field, fault) == ("cache", "missing"):
        return  # a rank need not have a map
    place = card["layout"] if field.startswith("layout.") else card
    key = field.removeprefix("layout.")
    if fault == "missing":
        del place[key]
    else:
        place[key] = {"a": 1.5}
    with pytest.raises(RemoteProtocolError, match="not a rank card"):
        RankCard.from_builtins(card)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"num_blocks": 0},
        {"num_blocks": -5},
        {"regions": (Region("l", -1, 8, 8, 0),)},
        {"regions": (Region("l", 0, 8, 0, 0),)},
        {"regions": (Region("l", 0, 7, 8, 0),)},
        {"regions": (Region("l", 0, 8, 8, -1),)},
        {"regions": (Region("l", 2**64 - 8, 8, 8, 0),)},
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_anything_is_computed_from_it(change) -> None:
    card = msgspec.structs.replace(CARD, layout=msgspec.structs.replace(LAYOUT, **change))
    with pytest.raises(RemoteProtocolError, match=r"not a rank card: .*(block|region)"):
        RankCard.from_builtins(card.to_builtins())


# --- the map ----------------------------------------------------------------------------------------------------------


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
    assert refusals(CARD, theirs) == [] == refusals(mine, changed())
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

"""Maps that a hostile peer may send: refused, or harmless."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import LayoutMismatchError, RemoteProtocolError
from kvxfer.layout.check import MAX_ADDRESS, check
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table

replace = msgspec.structs.replace

BASE = 1 << 40
PLANE = Plane(
    name="k",
    dtype="bfloat16",
    item=2,
    layers=(0, 1),
    bases=(BASE, BASE + 8 * 512),
    heads=(0, 1),
    total_heads=4,
    block_stride=512,
    head_stride=256,
    tokens=((4, 64),),
    channels=((32, 2),),
)
TILES = replace(PLANE, item=1, tokens=(), channels=((256, 1),), interior="tiles")
SPANS = ((BASE, 8 * 512), (BASE + 8 * 512, 8 * 512))


def cache(plane: Plane = PLANE, spans=SPANS, device: int = 0, **group) -> CacheMap:
    group = {"block_size": 4, "num_blocks": 8, "planes": (plane,)} | group
    return CacheMap((Group(**group),), spans, "DRAM", device)


@pytest.mark.parametrize("good", [cache(), cache(TILES), cache(window=5)])
def test_a_map_that_can_be_passes(good) -> None:
    check(good)


def changed(**changes) -> CacheMap:
    return cache(replace(PLANE, **changes))


HUGE = 1 << 70

BAD = {
    "0 groups": CacheMap((), (), "DRAM"),
    "65 groups": CacheMap((Group(4, 8, ()),) * 65, (), "DRAM"),
    "more than 1024 planes": CacheMap((Group(4, 8, (PLANE,) * 1025),), (), "DRAM"),
    "heads in all layers": changed(layers=tuple(range(1 << 16)), bases=(BASE,) * (1 << 16), heads=(0,) * 5),
    "65537 spans": cache(spans=((BASE, 1),) * 65537),
    "device -1": cache(device=-1),
    f"device {1 << 31}": cache(device=1 << 31),
    "memory at -1": cache(spans=((-1, 5),)),
    "of 0 bytes": cache(spans=((5, 0),)),
    f"memory at {MAX_ADDRESS}": cache(spans=((MAX_ADDRESS, 1),)),
    "blocks of 0 tokens": cache(block_size=0),
    "blocks of 65537 tokens": cache(block_size=65537),
    "0 blocks": cache(num_blocks=0),
    f"{1 << 31} blocks": cache(num_blocks=1 << 31),
    "a window of 0": cache(window=0),
    "a name of 300 characters": changed(name="k" * 300),
    "a name of 301 characters": changed(interior="k" * 301),
    "a name of 302 characters": replace(cache(), memory="D" * 302),
    "a name that cannot be printed, 'k\\nWARNING'": changed(name="k\nWARNING"),
    "a name that cannot be printed, 'b\\x1b[2J'": changed(dtype="b\x1b[2J"),
    "a name that cannot be printed, '\\r'": changed(interior="\r"),
    "a name that cannot be printed, 'DRAM\\n'": replace(cache(), memory="DRAM\n"),
    "elements of 0 bytes": changed(item=0),
    "no layers": changed(layers=(), bases=()),
    "1 bases for 2 layers": changed(bases=(BASE,)),
    "a layer's index": changed(layers=(0, -1)),
    "no heads": changed(heads=()),
    "a head's index": changed(heads=(0, 4)),
    "0 heads in the model": changed(total_heads=0),
    "an axis of 5 digits": changed(channels=((1, 2),) * 4 + ((32, 2),)),
    "an axis with the digits": changed(tokens=((-4, 64),)),
    "65537 channels": changed(channels=((65537, 2),)),
    "5 tokens in a block of 4": changed(tokens=((5, 64),)),
    "268,435,456 bytes of a head": changed(item=1 << 24),
    "not one run of bytes": cache(replace(TILES, channels=((128, 2),))),
    "a stride is out of range": changed(head_stride=-256),
    "a stride is out of range (huge)": changed(tokens=((4, HUGE),)),
    "elements that share bytes": changed(block_stride=511),
    "elements that share bytes (tokens)": changed(tokens=((4, 63),)),
    "elements that share bytes (one address)": changed(heads=(0, 0), head_stride=0),
    "4096 bytes from 1099511627775": changed(bases=(BASE - 1, BASE)),
    "4096 bytes from 1099511631873": changed(bases=(BASE, BASE + 4097)),
    "4096 bytes from 0": changed(bases=(BASE, 0)),
    "not within the memory": cache(spans=()),
    "not within the memory (a gap)": cache(spans=((BASE, 100), (BASE + 101, 8 * 1024 - 101))),
    "is there twice": CacheMap((Group(4, 8, (PLANE, PLANE)),), SPANS, "DRAM"),
    "layer 0 is there twice": changed(layers=(0, 0)),
}


@pytest.mark.parametrize("text", BAD)
def test_a_map_that_cannot_be_is_refused_with_what_is_wrong(text) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^not a cache map: ") as caught:
        check(BAD[text])
    assert text.split(" (")[0] in str(caught.value)


def test_memory_registered_in_pieces_is_one_stretch() -> None:
    check(cache(spans=((BASE, 3000), (BASE + 1000, 3000), (BASE + 4000, 8 * 1024 - 4000))))


NUMBERS = st.one_of(st.integers(-2, 70), st.sampled_from([256, 512, BASE, BASE + 1, 1 << 31, 1 << 63, HUGE, -HUGE]))
DIGITS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple)
FIELDS = {
    "item": NUMBERS,
    "layers": st.lists(NUMBERS, max_size=3).map(tuple),
    "bases": st.lists(st.one_of(NUMBERS, st.just(BASE)), max_size=3).map(tuple),
    "heads": st.lists(NUMBERS, max_size=3).map(tuple),
    "total_heads": NUMBERS,
    "block_stride": NUMBERS,
    "head_stride": NUMBERS,
    "tokens": DIGITS,
    "channels": DIGITS,
    "interior": st.sampled_from(["", "tiles"]),
}


@settings(max_examples=400)
@given(st.data())
def test_whatever_passes_gives_addresses_within_the_memory_that_the_card_names(data) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))
    plane = replace(data.draw(st.sampled_from([PLANE, TILES])), **{name: data.draw(FIELDS[name]) for name in names})
    one = cache(plane, num_blocks=data.draw(st.one_of(st.integers(1, 8), NUMBERS)))
    try:
        check(one)
    except RemoteProtocolError:
        return
    ids = Table(np.array([data.draw(st.integers(0, one.groups[0].num_blocks - 1))], dtype=np.int32))
    try:
        plan = prepare(one, one, useful=0).plan([ids], [ids], 0, 4)
    except LayoutMismatchError:
        return  # layers on top of each other: nobody's harm but the peer's own
    ends = [(int(address), int(address) + int(length)) for address, length, _ in plan.sink.tolist()]
    assert all(BASE <= low < high <= BASE + 8 * 1024 for low, high in ends)

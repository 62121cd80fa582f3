"""Random caches of every kind that the layout package must connect, in memory whose every byte knows what it is.

Memory is an array with one wide number for each byte: the byte's tag, made of layer, plane, position, head, channel and
byte of the element. What a copy did is then read off directly. A cache's map is built from an order of axes, as an
allocator would; which address an element has is worked out here once more, one element at a time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from kvxfer.layout.check import check
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.positions import NULL_BLOCK, Table
from kvxfer.layout.ranks import Shard, heads_of

NOTHING, GARBAGE = -1, -2
MAX_POSITION = 24


@dataclass(frozen=True)
class Content:
    """A plane as the model has it."""

    name: str
    layers: tuple[int, ...]
    heads: int
    channels: int
    item: int
    dtype: str = "x"


@dataclass(frozen=True)
class Model:
    """What two engines serve: planes by groups that share a block table, and each group's window."""

    groups: tuple[tuple[Content, ...], ...]
    windows: tuple[int | None, ...]
    layers: int

    @property
    def contents(self) -> list[Content]:
        return [content for group in self.groups for content in group]


@dataclass(eq=False)
class Rank:
    """A rank's map and memory, and the block tables of the one request there is."""

    cache: CacheMap
    shard: Shard
    memory: np.ndarray = field(repr=False)
    base: int
    tables: list[Table] = field(default_factory=list)

    def address(self, plane: Plane, layer: int, block: int, slot: int, token: int, channel: int) -> int:
        at = plane.bases[plane.layers.index(layer)] + block * plane.block_stride + slot * plane.head_stride
        for value, digits in ((token, plane.tokens), (channel, plane.channels)):
            left = value
            for extent, stride in reversed(digits):
                left, digit = divmod(left, extent)
                at += digit * stride
            assert left == 0
        return at - self.base

    def elements(self, start: int, end: int):
        """Go through all that this rank holds of positions [start, end): (plane's name, layer, position, head, channel, address)."""
        for group, table in zip(self.cache.groups, self.tables, strict=True):
            for plane in group.planes:
                for layer, slot, position in itertools.product(
                    plane.layers, range(len(plane.heads)), range(start, end)
                ):
                    index = position // group.block_size - table.first // group.block_size
                    if not 0 <= index < len(table.ids):
                        continue
                    block, token = int(table.ids[index]), position % group.block_size
                    if group.window is not None and block == NULL_BLOCK:
                        continue
                    if plane.interior:
                        channels = range(token, plane.content, group.block_size)  # whose bytes these are is not known
                        token = 0
                    else:
                        channels = range(plane.content // plane.item)
                    for channel in channels:
                        at = self.address(plane, layer, block, slot, token, channel)
                        yield plane, layer, position, plane.heads[slot], channel, at

    def looks_back(self, plane: Plane, position: int, prompt: int) -> bool:
        """Tell whether a prompt's end looks back to some position of the block that this one is in."""
        group = next(group for group in self.cache.groups if plane in group.planes)
        size = group.block_size
        return group.window is None or position >= (prompt - group.window) // size * size

    def fill(self, end: int) -> None:
        self.memory[:] = GARBAGE
        for plane, layer, position, head, channel, at in self.elements(0, end):
            for byte in range(plane.item):
                self.memory[at + byte] = tag(plane.name, layer, position, head, channel, byte)


def tag(name: str, layer: int, position: int, head: int, channel: int, byte: int) -> int:
    number = sum(ord(letter) for letter in name)
    value = 0
    for part, size in ((number, 4096), (layer, 64), (position, 256), (head, 64), (channel, 1024), (byte, 16)):
        assert part < size
        value = value * size + part
    return value


# --- models -----------------------------------------------------------------------------------------------------------


@st.composite
def models(draw, windows: bool = True) -> Model:
    layers = draw(st.integers(1, 4))
    every = tuple(range(layers))
    kind = draw(
        st.sampled_from(["attention", "mla", "sparse", "hybrid"] if windows else ["attention", "mla", "sparse"])
    )
    if kind in ("mla", "sparse"):
        latent = Content("latent", every, 1, draw(st.integers(1, 5)), draw(st.sampled_from([1, 2])))
        planes = [latent]
        if kind == "sparse":  # an indexer in some layers only: other channels, other element, its scales apart
            some = tuple(draw(st.lists(st.sampled_from(every), min_size=1, unique=True).map(sorted)))
            planes += [Content("index", some, 1, 3, 1, "fp8"), Content("index_scale", some, 1, 1, 4, "float")]
        return Model((tuple(planes),), (None,), layers)
    heads, item = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    size, size_v = draw(st.sampled_from([(2, 2), (4, 4), (1, 1), (3, 2)]))
    if kind == "attention" or layers == 1:
        return Model((_kv(every, heads, size, size_v, item),), (None,), layers)
    full = every[:: draw(st.integers(2, 3))]
    windowed = tuple(layer for layer in every if layer not in full)
    groups = (_kv(full, heads, size, size_v, item), _kv(windowed, heads, size, size_v, item))
    return Model(groups, (None, draw(st.integers(1, 9))), layers)


@st.composite
def regrouped(draw, model: Model) -> Model:
    """The same model with its layers in other groups, as another engine's block sizes or memory may lead to."""
    if not draw(st.booleans()):
        return model
    groups, windows = [], []
    for contents, window in zip(model.groups, model.windows, strict=True):
        cut = draw(st.integers(0, model.layers))
        for low, high in ((0, cut), (cut, model.layers)):
            part = [replace(c, layers=tuple(layer for layer in c.layers if low <= layer < high)) for c in contents]
            groups.append(tuple(content for content in part if content.layers))
            windows.append(window)
    return Model(tuple(groups), tuple(windows), model.layers)


def _kv(layers, heads: int, size: int, size_v: int, item: int) -> tuple[Content, ...]:
    return Content("k", layers, heads, size, item), Content("v", layers, heads, size_v, item)


# --- ranks ------------------------------------------------------------------------------------------------------------

NAMED_ORDERS = ["LBHNPC", "LBNHPC", "LHBNPC", "BLHNPC", "BLNHPC", "BHLNPC", "LPBHNC", "LPBNHC", "PLBHCN", "LBHPCN"]
"""vLLM's six with K and V joined in a token, vllm-neuron's, token-major with K and V apart, two with K transposed."""


@dataclass(frozen=True)
class Style:
    """How an engine lays its caches out: axes outermost first, block size, padding, whether axes are in two digits."""

    order: str
    block_size: int
    num_blocks: int
    padding: int
    split_tokens: bool
    split_channels: bool
    interior: str = ""


@st.composite
def styles(draw, block_sizes=None) -> Style:
    order = draw(st.one_of(st.sampled_from(NAMED_ORDERS), st.permutations("LBPHNC").map("".join)))
    size = draw(st.integers(1, 6) if block_sizes is None else block_sizes)
    need = -(-MAX_POSITION // size) + 2
    return Style(
        order,
        size,
        draw(st.integers(need, need + 6)),
        draw(st.sampled_from([0, 0, 0, 3])),
        draw(st.booleans()) and size % 2 == 0,
        draw(st.integers(0, 5)) == 0,
    )


class Allocator:
    """Hands out stretches of one rank's memory."""

    def __init__(self, base: int) -> None:
        self.base = self.at = base

    def take(self, size: int) -> int:
        start, self.at = self.at, self.at + size
        return start


def rank(model: Model, style: Style, shard: Shard, layers: tuple[int, ...], base: int, device: int = 0) -> Rank:
    """Lay out the part of a model that one rank holds."""
    memory, groups = Allocator(base), []
    for contents, window in zip(model.groups, model.windows, strict=True):
        planes: list[Plane] = []
        mine = [c for c in contents if set(c.layers) & set(layers)]
        alike = {(c.layers, c.channels, c.item) for c in mine}
        for together in [mine] if len(alike) == 1 else [[c] for c in mine]:
            planes += _planes(together, style, shard, layers, memory)
        groups.append(Group(style.block_size, style.num_blocks, tuple(planes), window))
    size = memory.at - base
    cache = CacheMap(tuple(groups), ((base, size),), "DRAM", device)
    check(cache)
    return Rank(cache, shard, np.full(size, NOTHING, dtype=np.int64), base)


def _planes(contents: list[Content], style: Style, shard: Shard, layers, memory: Allocator) -> list[Plane]:
    first = contents[0]
    held = tuple(layer for layer in first.layers if layer in layers)
    heads = heads_of(first.heads, shard)
    tokens = [2, style.block_size // 2] if style.split_tokens else [style.block_size]
    channels = [2, first.channels // 2] if style.split_channels and first.channels % 2 == 0 else [first.channels]
    extents = {
        "L": [len(held)],
        "B": [style.num_blocks],
        "P": [len(contents)],
        "H": [len(heads)],
        "N": tokens,
        "C": channels,
    }
    if style.interior:  # a cell is one run: whatever is in it
        order = "".join(letter for letter in style.order if letter not in "NPC") + "NPC"
        extents["N"], extents["C"], extents["P"] = [], [style.block_size * first.channels * first.item], [1]
        contents = [first]
    else:
        order = style.order
    digits = [(letter, size) for letter in order for size in extents[letter]]
    if len(tokens) > 1 or len(channels) > 1:  # the minor digits of axes go outermost among what follows: a packed order
        minor = [("N", tokens[-1])] * (len(tokens) > 1) + [("C", channels[-1])] * (len(channels) > 1)
        for digit in minor:
            if digit in digits and not style.interior:
                last = len(digits) - 1 - digits[::-1].index(digit)
                digits.append(digits.pop(last))
    strides: dict[str, list[tuple[int, int]]] = {letter: [] for letter in extents}
    at = 1 if style.interior else first.item
    for letter, size in reversed(digits):
        strides[letter].insert(0, (size, at))
        at = at * size + (style.padding if letter in "BH" else 0)
    base = memory.take(at + style.padding)
    stride = {letter: strides[letter][0][1] for letter in "LBPH"}
    return [
        Plane(
            name=content.name,
            dtype=content.dtype,
            item=1 if style.interior else content.item,
            layers=held,
            bases=tuple(base + n * stride["P"] + i * stride["L"] for i in range(len(held))),
            heads=heads,
            total_heads=content.heads,
            block_stride=stride["B"],
            head_stride=stride["H"],
            tokens=tuple(strides["N"]),
            channels=tuple(strides["C"]),
            interior=style.interior,
        )
        for n, content in enumerate(contents)
    ]


@st.composite
def engines(draw, model: Model, style: Style, base: int) -> list[Rank]:
    """All ranks of an engine: tensor parallel as the heads allow, one or two pipeline stages."""
    heads = model.contents[0].heads
    size = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n % heads == 0 or heads % n == 0]))
    cut = draw(st.integers(0, model.layers - 1))
    stages = [tuple(range(cut)), tuple(range(cut, model.layers))]
    return [
        rank(model, style, Shard(r, size), layers, base + (n * 8 + r << 30), device=n * 8 + r)
        for n, layers in enumerate(stage for stage in stages if stage)
        for r in range(size)
    ]


@st.composite
def tables(draw, one: Rank, first: int, end: int, *, null_before: int | None = None, more: int = 0) -> list[Table]:
    """Block tables that hold [first, end), rounded outwards, and often a little more; ids in runs, as an allocator gives them.

    Of a window they hold at least what a prompt of ``null_before`` tokens looks back to, and ``more`` positions before.
    """
    result = []
    for group in one.cache.groups:
        size = group.block_size
        low = max(0, first // size - draw(st.integers(0, 1)))
        high = -(-max(end, first + 1) // size)
        ids = list(range(1, group.num_blocks))
        order = draw(st.sampled_from(["rising", "turned", "any"]))
        if order == "turned":
            turn = draw(st.integers(0, len(ids) - 1))
            ids = ids[turn:] + ids[:turn]
        elif order == "any":
            ids = draw(st.permutations(ids))
        ids = ids[: high - low]
        if group.window is not None and null_before is not None:
            gone = max(0, (null_before - group.window - more) // size - low)
            ids = [NULL_BLOCK] * min(gone, len(ids)) + ids[gone:]
        result.append(Table(np.array(ids, dtype=np.int32), low * size))
    return result


# --- what a plan did --------------------------------------------------------------------------------------------------


def carry_out(plan, source: Rank, sink: Rank) -> None:
    """Do what NIXL would: copy each row of one side to the same row of the other."""
    for rows, side in ((plan.source, source), (plan.sink, sink)):
        assert rows.dtype == np.uint64
        assert rows.shape == (plan.count, 3)
        assert (rows[:, 2] == side.cache.device).all()
    assert (plan.source[:, 1] == plan.sink[:, 1]).all()
    assert int(plan.sink[:, 1].sum()) == plan.bytes
    ends = 0
    for (address, length, _), (target, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True):
        ours, theirs = address - source.base, target - sink.base
        assert length > 0
        assert 0 <= ours <= len(source.memory) - length
        assert ends <= theirs <= len(sink.memory) - length, "descriptors overlap on the sink, or are not in order"
        ends = theirs + length
        sink.memory[theirs : theirs + length] = source.memory[ours : ours + length]


def fewest(pairs: set[tuple[int, int]]) -> int:
    """Count the bytes whose predecessor on both sides is not copied as well: each begins a run."""
    return sum((ours - 1, theirs - 1) not in pairs for ours, theirs in pairs)


def byte_pairs(plan) -> set[tuple[int, int]]:
    return {
        (ours + i, theirs + i)
        for (ours, length, _), (theirs, _, _) in zip(plan.source.tolist(), plan.sink.tolist(), strict=True)
        for i in range(length)
    }

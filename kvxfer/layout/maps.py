"""A rank's KV cache as an affine map: where in memory the bytes of each (layer, plane, block, head, token, channel) lie.

A *plane* is one kind of thing that a layer keeps of a token: K, V, an MLA latent, an indexer's keys, their scales. Planes have
bases and strides of their own, so that K and V joined in a token, beside each other in a block, or in two halves of a tensor
are the same thing with other numbers, and two caches that hold the same planes can be compared at all.

An axis inside a block is a list of *digits*, (extent, stride in bytes), major first: one digit for an ordinary tensor, two
where a kernel splits the axis (vllm-neuron's packed fp8 keeps K as [block, head, token / 2, channel, 2]; vLLM 0.32 splits a
block into kernel blocks). Most tensors need no more than strides; those that do are described exactly.

Where the strides do not tell what is inside (AMX tiles), a plane is *opaque*: a cell, the bytes of one head in one block,
is a run of bytes with a tag, and only whole cells of equal tag, length and block size are copied onto each other.

All numbers are bytes, tokens, or counts; layers and heads are the model's, not the rank's.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]

Digit = tuple[int, int]
"""(extent, stride in bytes) of one factor of an axis."""


class Plane(msgspec.Struct, frozen=True):
    """One kind of content of some layers of a rank, all of one geometry.

    Element (layer ``layers[l]``, block b, head ``heads[h]``, token t, channel c) is ``item`` bytes at ``bases[l] + b *
    block_stride + h * head_stride`` plus what the digits of t and c add. A head may fill several slots (replicas inside a
    rank); ``total_heads`` is how many the model has, on all ranks together.

    An opaque plane (``interior`` is its tag) has no token digits; its channels are the bytes of a cell.
    """

    name: str
    dtype: str
    item: int
    layers: tuple[int, ...]
    bases: tuple[int, ...]
    heads: tuple[int, ...]
    total_heads: int
    block_stride: int
    head_stride: int
    tokens: tuple[Digit, ...]
    channels: tuple[Digit, ...]
    interior: str = ""

    @property
    def content(self) -> int:
        """Bytes of one head of one token; of one head of one block where the plane is opaque."""
        return extent(self.channels) * self.item

    @property
    def head_span(self) -> int:
        """Bytes from the first to the last byte of a cell: one head's part of one block."""
        return reach(self.tokens) + reach(self.channels) + self.item

    @property
    def block_span(self) -> int:
        """Bytes from the first to the last byte of this plane in one block of one layer."""
        return (len(self.heads) - 1) * self.head_stride + self.head_span


class Group(msgspec.Struct, frozen=True):
    """The planes that share a block table. ``window`` is how many positions attention looks back, None for all of them."""

    block_size: int
    num_blocks: int
    planes: tuple[Plane, ...]
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of content of one block over all planes, layers and heads."""
        cells = ((len(plane.layers) * len(plane.heads), plane) for plane in self.planes)
        return sum(count * plane.content * (1 if plane.interior else self.block_size) for count, plane in cells)


class CacheMap(msgspec.Struct, frozen=True):
    """A rank's whole cache: one group for each block table that a request has, in vLLM's order.

    ``memory`` is NIXL's name for the kind of memory, ``device`` its device id, ``spans`` the (address, length) of what is
    registered: no address of a plane lies outside them.
    """

    groups: tuple[Group, ...]
    spans: tuple[tuple[int, int], ...]
    memory: str
    device: int = 0

    @property
    def block_size(self) -> int:
        """Tokens in a block of the first group."""
        return self.groups[0].block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group."""
        return self.groups[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of content of one block of every group."""
        return sum(group.block_bytes for group in self.groups)

    def blocks_for(self, start: int, end: int) -> int:
        """Return how many blocks of the first group the positions [start, end) touch."""
        return -(-end // self.block_size) - start // self.block_size if end > start else 0

    def bytes_for(self, start: int, end: int) -> int:
        """Return the bytes of the blocks that positions [start, end) touch."""
        return self.blocks_for(start, end) * self.block_bytes


def extent(digits: Iterable[Digit]) -> int:
    """Return how many values an axis has."""
    product = 1
    for size, _ in digits:
        product *= size
    return product


def reach(digits: Iterable[Digit]) -> int:
    """Return the offset of an axis's last value."""
    return sum((size - 1) * stride for size, stride in digits)


def offsets(digits: Iterable[Digit]) -> Offsets:
    """Return the offset of each value of an axis, in bytes; [0] for an axis without digits."""
    result = np.zeros(1, dtype=np.int64)
    for size, stride in digits:
        result = np.add.outer(result, np.arange(size, dtype=np.int64) * stride).ravel()
    return result


# --- for people -------------------------------------------------------------------------------------------------------


def spell(cache: CacheMap) -> str:
    """Put a layout into one readable line: the order of the axes in memory, outermost first, with what they range over."""
    return "; ".join(_spell_group(group) for group in cache.groups) or "no planes"


def numbers(values: Sequence[int]) -> str:
    """Shorten numbers to ranges: 0-3, 8."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _spell_group(group: Group) -> str:
    alike = itertools.groupby(group.planes, key=lambda plane: (_axes(plane), plane.layers, plane.heads, plane.interior))
    parts = []
    for (axes, layers, heads, interior), same in alike:
        planes = list(same)
        names = "+".join(plane.name for plane in planes)
        steps = {
            abs(b - a) for one, two in itertools.pairwise(planes) for a, b in zip(one.bases, two.bases, strict=True)
        }
        between = [(names, steps.pop() if len(steps) == 1 else _FAR)] if steps else []
        order = "".join(f"[{name}]" for name, _ in sorted([*axes, *between], key=lambda axis: -axis[1]))
        inside = f"opaque cells {interior!r} of {group.block_size} tokens" if interior else planes[0].dtype
        parts.append(f"{names} of layers {numbers(layers)}, heads {numbers(heads)} as {order} {inside}")
    window = "" if group.window is None else f", window {group.window}"
    return " and ".join(parts) + window


def _axes(plane: Plane) -> tuple[tuple[str, int], ...]:
    axes = [("block", plane.block_stride)]
    steps = {abs(b - a) for a, b in itertools.pairwise(plane.bases)}
    if steps:
        axes.append(("layer", steps.pop() if len(steps) == 1 else _FAR))
    if len(plane.heads) > 1:
        axes.append(("head", plane.head_stride))
    if not plane.interior:
        axes += [(f"token {size}", stride) for size, stride in plane.tokens if size > 1]
        axes += [(f"channel {size}", stride) for size, stride in plane.channels if size > 1]
    return tuple(axes)


_FAR: Final = 1 << 63
"""A step between things that lie anywhere: outermost."""

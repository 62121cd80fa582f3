"""Moves tokens from staged blocks into the cache, on the device, between any two interiors that strides describe.

One gather and one scatter a plane and layer, by the offsets of the elements: it costs some times the bytes in the GPU's memory
bandwidth, a small part of what their way over the network takes, and needs no kernel of ours. Elements are taken as wide as
both layouts allow, up to eight bytes.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvxfer.errors import PlatformError
from kvxfer.layout.maps import offsets
from kvxfer.layout.repack import STRIDED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvxfer.layout.maps import Plane
    from kvxfer.layout.refine import Piece
    from kvxfer.layout.repack import Call

    Numbers = NDArray[np.int64]

OFFERS: Final = (STRIDED,)
"""What this platform re-packs."""

_WIDEST: Final = 8
_AT_ONCE: Final = 1 << 22
"""Elements that are moved by one gather: their offsets take 64 MiB."""


class DeviceMemory:
    """Memory that torch allocated, found by address. It is kept for as long as this is referred to."""

    def __init__(self, storages: Iterable[Any]) -> None:
        by_address = {storage.data_ptr(): storage for storage in storages}
        self._starts = sorted(by_address)
        self._storages = [by_address[start] for start in self._starts]

    def add(self, storage: Any) -> None:
        """Take one more storage in."""
        at = bisect.bisect(self._starts, storage.data_ptr())
        self._starts.insert(at, storage.data_ptr())
        self._storages.insert(at, storage)

    def view(self, address: int, unit: int) -> Any:
        """View what begins at an address, to its storage's end, as a row of integers of ``unit`` bytes."""
        import torch

        storage = self._holding(address)
        offset = address - storage.data_ptr()
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
        count = (storage.nbytes() - offset) // unit
        return torch.empty(0, dtype=kind, device=storage.device).set_(storage, offset // unit, (count,), (1,))

    def start(self, address: int) -> int:
        """Return the address at which the storage of an address begins."""
        return int(self._holding(address).data_ptr())

    def _holding(self, address: int) -> Any:
        at = bisect.bisect(self._starts, address) - 1
        if at < 0 or address >= self._starts[at] + self._storages[at].nbytes():
            raise PlatformError(f"address {address:#x} is in no memory that was described or staged")
        return self._storages[at]


def repack(call: Call, memory: DeviceMemory) -> None:
    """Launch what ``kvxfer.layout.repack`` planned, on the current stream.

    Raises PlatformError for interiors that were never offered.
    """
    rows = _tokens(call.moves)
    for bundle in call.pairing.bundles:
        for piece in bundle.pieces:
            layers = [
                (source + piece.source_offset, sink + piece.sink_offset)
                for source, sink in zip(bundle.source.tolist(), bundle.sink.tolist(), strict=True)
            ]
            if rows.size and layers:
                _move(piece, rows, layers, memory)


def _tokens(moves: Numbers) -> Numbers:
    """List each token: its slot and place in it, its block and place in that."""
    count = moves[:, 4]
    step = np.arange(count.sum(), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    rows = np.repeat(moves[:, :4], count, axis=0)
    rows[:, 1] += step
    rows[:, 3] += step
    return rows


def _move(piece: Piece, rows: Numbers, layers: list[tuple[int, int]], memory: DeviceMemory) -> None:
    import torch

    planes = (piece.source, piece.sink)
    for plane in planes:
        if plane.interior:
            raise PlatformError(f"plane {plane.name!r} is opaque ({plane.interior}): not re-packed here")
    joined = all(plane.channels == ((plane.content // plane.item, plane.item),) for plane in planes)
    unit = _unit(planes, [address - memory.start(address) for pair in layers for address in pair], joined=joined)
    device = memory.view(layers[0][1], unit).device
    inside = [_inside(plane, unit, joined=joined) for plane in planes]
    slots = [np.array(which, dtype=np.int64) for which in (piece.source_slots, piece.sink_slots)]
    each = len(slots[0]) * len(inside[0])
    for first in range(0, len(rows), max(1, _AT_ONCE // each)):
        some = rows[first : first + max(1, _AT_ONCE // each)]
        index = []
        for plane, blocks, tokens, heads, content in zip(
            planes, (some[:, 0], some[:, 2]), (some[:, 1], some[:, 3]), slots, inside, strict=True
        ):
            parts = (blocks * plane.block_stride + offsets(plane.tokens)[tokens], heads * plane.head_stride, content)
            at, head, channel = (torch.from_numpy(part // unit).to(device) for part in parts)
            index.append((at[:, None, None] + head[:, None] + channel).reshape(-1))
        for source, sink in layers:
            memory.view(sink, unit)[index[1]] = memory.view(source, unit)[index[0]]


def _unit(planes: tuple[Plane, Plane], starts: list[int], *, joined: bool) -> int:
    """Return the widest element of which everything is a multiple."""
    strides = [stride for plane in planes for stride in (plane.block_stride, plane.head_stride)]
    strides += [stride for plane in planes for _, stride in plane.tokens]
    if not joined:
        strides += [stride for plane in planes for size, stride in plane.channels if size > 1]
    common = math.gcd(planes[0].content if joined else planes[0].item, *strides, *starts)
    return min(_WIDEST, common & -common)


def _inside(plane: Plane, unit: int, *, joined: bool) -> Numbers:
    """Return the offsets of one token's elements, in bytes."""
    if joined:
        return np.arange(0, plane.content, unit, dtype=np.int64)
    return np.add.outer(offsets(plane.channels), np.arange(0, plane.item, unit, dtype=np.int64)).ravel()

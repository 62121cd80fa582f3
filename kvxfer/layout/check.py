"""Whether a cache map can be: what arrives from a peer is checked here before anything is computed from it.

After the check, every address of the map lies in the spans that it names, every product of its extents and strides fits
into 63 bits, no plane's elements share bytes, and what is computed from it is bounded. So descriptors that are made for a
hostile map can only harm memory that the peer itself named, and whether that memory is the peer's NIXL's keys decide.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final

from kvxfer.errors import RemoteProtocolError
from kvxfer.layout.maps import extent

if TYPE_CHECKING:
    from kvxfer.layout.maps import CacheMap, Digit, Group, Plane
    from kvxfer.layout.route import StagingArea

MAX_ADDRESS: Final = (1 << 63) - 1
"""User space ends far below it on every machine, and signed arithmetic is exact up to it."""
MAX_BLOCK_SIZE: Final = 1 << 16
MAX_BLOCKS: Final = (1 << 31) - 1
"""Block ids are int32."""
MAX_CONTENT: Final = 1 << 28
"""Bytes of one head in one block."""
MAX_CHANNELS: Final = 1 << 16
MAX_CELLS: Final = 1 << 18
"""Heads of all layers of all planes of a rank: 128 layers of K and V with 1024 heads each."""
MAX_GROUPS, MAX_PLANES, MAX_DIGITS, MAX_SPANS, MAX_NAME = 64, 1024, 4, 65536, 256


def check(cache: CacheMap) -> None:
    """Raise RemoteProtocolError that names the first thing in the map which cannot be."""
    _want(1 <= len(cache.groups) <= MAX_GROUPS, f"{len(cache.groups)} groups")
    _want(sum(len(group.planes) for group in cache.groups) <= MAX_PLANES, f"more than {MAX_PLANES} planes")
    cells = sum(len(plane.layers) * len(plane.heads) for group in cache.groups for plane in group.planes)
    _want(cells <= MAX_CELLS, f"{cells} heads in all layers")
    _want(len(cache.spans) <= MAX_SPANS, f"{len(cache.spans)} spans of memory")
    _want(0 <= cache.device < 1 << 31, f"device {cache.device}")
    _want_name(cache.memory, "memory of ")
    for address, length in cache.spans:
        _want(address >= 0 and length > 0 and address + length <= MAX_ADDRESS, f"memory at {address} of {length} bytes")
    seen: set[tuple[str, int]] = set()
    spans = _joined(cache.spans)
    for group in cache.groups:
        _check_group(group)
        for plane in group.planes:
            _check_plane(plane, group, spans)
            for layer in plane.layers:
                _want((plane.name, layer) not in seen, f"plane {plane.name!r} of layer {layer} is there twice")
                seen.add((plane.name, layer))


def check_staging(area: StagingArea) -> None:
    """Raise RemoteProtocolError when a staging area cannot be."""
    whole = area.address >= 0 and area.size > 0 and area.address + area.size <= MAX_ADDRESS
    _want(whole, f"a staging area at {area.address} of {area.size} bytes")
    _want(len(area.offers) <= MAX_PLANES, f"{len(area.offers)} offers to re-pack")
    for tag in (tag for pair in area.offers for tag in pair):
        _want_name(tag, "an offer to re-pack: ")


def _check_group(group: Group) -> None:
    _want(1 <= group.block_size <= MAX_BLOCK_SIZE, f"blocks of {group.block_size} tokens")
    _want(1 <= group.num_blocks <= MAX_BLOCKS, f"{group.num_blocks} blocks")
    _want(group.window is None or group.window > 0, f"a window of {group.window} positions")


def _check_plane(plane: Plane, group: Group, spans: list[tuple[int, int]]) -> None:
    who = f"plane {plane.name[:MAX_NAME]!r}: "
    for text in (plane.name, plane.dtype, plane.interior):
        _want_name(text, who)
    _want(1 <= plane.item <= MAX_CONTENT, f"{who}elements of {plane.item} bytes")
    _want(len(plane.layers) > 0, f"{who}no layers")
    _want(len(plane.bases) == len(plane.layers), f"{who}{len(plane.bases)} bases for {len(plane.layers)} layers")
    _want(all(0 <= layer < 1 << 31 for layer in plane.layers), f"{who}a layer's index is out of range")
    _want(len(plane.heads) > 0, f"{who}no heads")
    _want(1 <= plane.total_heads < 1 << 31, f"{who}{plane.total_heads} heads in the model")
    _want(all(0 <= head < plane.total_heads for head in plane.heads), f"{who}a head's index is out of range")
    for axis in (plane.tokens, plane.channels):
        _want(len(axis) <= MAX_DIGITS, f"{who}an axis of {len(axis)} digits")
        _want(all(size > 0 for size, _ in axis), f"{who}an axis with the digits {axis}")
    _want(bool(plane.interior) or extent(plane.channels) <= MAX_CHANNELS, f"{who}{extent(plane.channels)} channels")
    tokens = 1 if plane.interior else group.block_size
    _want(extent(plane.tokens) == tokens, f"{who}{extent(plane.tokens)} tokens in a block of {group.block_size}")
    _want(tokens * plane.content <= MAX_CONTENT, f"{who}more than {MAX_CONTENT:,} bytes of a head in a block")
    _want(not plane.interior or _one_run(plane), f"{who}an opaque cell that is not one run of bytes")
    digits = [(group.num_blocks, plane.block_stride), (len(plane.heads), plane.head_stride)]
    digits += [*plane.tokens, *plane.channels]
    _want(all(0 <= stride <= MAX_ADDRESS for _, stride in digits), f"{who}a stride is out of range")
    _want(_apart(digits, plane.item), f"{who}elements that share bytes")
    length = (group.num_blocks - 1) * plane.block_stride + plane.block_span
    for base in plane.bases:
        _want(
            _inside(base, base + length, spans),
            f"{who}{length} bytes from {base} on are not within the memory that the card names",
        )


def _inside(start: int, end: int, spans: list[tuple[int, int]]) -> bool:
    at = bisect.bisect_right(spans, (start, MAX_ADDRESS)) - 1
    return at >= 0 and end <= spans[at][1]


def _one_run(plane: Plane) -> bool:
    return plane.item == 1 and plane.channels == ((plane.content, 1),)


def _apart(digits: list[Digit], item: int) -> bool:
    """Tell whether no two elements overlap: each digit steps over all that the finer ones reach."""
    end = item
    for size, stride in sorted(digits, key=lambda digit: digit[1]):
        if size == 1:
            continue
        if stride < end:
            return False
        end += (size - 1) * stride
    return True


def _joined(spans: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Join spans that touch: a cache may be registered in pieces."""
    joined: list[tuple[int, int]] = []
    for address, length in sorted(spans):
        if joined and address <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], address + length))
        else:
            joined.append((address, address + length))
    return joined


def _want_name(text: str, who: str) -> None:
    """Names stand in the texts of refusals, which people read in a log."""
    _want(len(text) <= MAX_NAME, f"{who}a name of {len(text)} characters")
    _want(text.isprintable(), f"{who}a name that cannot be printed, {text!r}")


def _want(condition: bool, what: str) -> None:
    if not condition:
        raise RemoteProtocolError(f"not a cache map: {what}")

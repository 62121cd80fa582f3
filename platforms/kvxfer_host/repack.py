"""Moves tokens from staged blocks into the cache, in host memory, between any two interiors that strides describe.

vLLM's CPU attention keeps K of a (block, head) transposed, [channel][token], and V behind it, [token][channel] (instruction set
"vec"; vLLM 0.29 and 0.32, run). Those are strides like any others once the block size is known, so blocks of 32 tokens and
blocks of 128 differ only in them. ``vec`` says so to the layout.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import numpy as np

from kvxfer.errors import PlatformError
from kvxfer.layout.maps import Plane
from kvxfer.layout.repack import STRIDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvxfer.layout.describe import Heads, Tensor
    from kvxfer.layout.repack import Call

OFFERS: Final = (STRIDED,)
"""What this platform re-packs."""


def vec(
    tensors: Sequence[Tensor], block_size: int, head_size: int, *, dtype: str, item: int, heads: Heads
) -> tuple[Plane, Plane]:
    """Describe vLLM's CPU cache, tensors of shape [block, head, token, K + V], by what is inside its blocks.

    Only for instruction set "vec"; the others pack tokens into tiles.
    """
    first = tensors[0]
    block_stride, head_stride = first.strides[0], first.strides[1]

    def plane(name: str, at: int, token: int, channel: int) -> Plane:
        return Plane(
            name=name,
            dtype=dtype,
            item=item,
            layers=tuple(tensor.layer for tensor in tensors),
            bases=tuple(tensor.base + at for tensor in tensors),
            heads=heads.held,
            total_heads=heads.total,
            block_stride=block_stride,
            head_stride=head_stride,
            tokens=((block_size, token),),
            channels=((head_size, channel),),
        )

    half = block_size * head_size * item
    return plane("k", 0, item, block_size * item), plane("v", half, head_size * item, item)


def repack(call: Call) -> None:
    """Carry out what ``kvxfer.layout.repack`` planned. Raises PlatformError for interiors that were never offered."""
    kinds, which = np.unique(call.moves[:, [1, 3, 4]], axis=0, return_inverse=True)
    slots, blocks = call.pairing.num_blocks
    for bundle in call.pairing.bundles:
        for piece in bundle.pieces:
            for source, sink in zip(bundle.source.tolist(), bundle.sink.tolist(), strict=True):
                staged = _view(piece.source, source + piece.source_offset, slots)
                cache = _view(piece.sink, sink + piece.sink_offset, blocks)
                for number, (from_token, to_token, tokens) in enumerate(kinds.tolist()):
                    moves = call.moves[which.reshape(-1) == number]
                    for ours, theirs in zip(piece.source_slots, piece.sink_slots, strict=True):
                        taken = staged[moves[:, 0], ours, from_token : from_token + tokens]
                        cache[moves[:, 2], theirs, to_token : to_token + tokens] = taken


def _view(plane: Plane, base: int, blocks: int) -> NDArray[np.void]:
    """View a plane of one layer as an array [block, head, token, channel]."""
    if plane.interior or len(plane.tokens) != 1 or len(plane.channels) != 1:
        raise PlatformError(
            f"plane {plane.name!r} is not laid out by one stride a token and one a channel: not re-packed here"
        )
    (tokens, token_stride), (channels, channel_stride) = plane.tokens[0], plane.channels[0]
    size = (blocks - 1) * plane.block_stride + plane.block_span
    view: NDArray[np.void] = np.ndarray(
        (blocks, len(plane.heads), tokens, channels),
        dtype=f"V{plane.item}",
        buffer=memoryview((ctypes.c_uint8 * size).from_address(base)),
        strides=(plane.block_stride, plane.head_stride, token_stride, channel_stride),
    )
    return view

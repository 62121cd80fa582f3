"""Where a rank's blocks lie, and which pieces of memory to copy so that blocks of one rank become blocks of another.

A cache is a list of *regions*: spans of device memory in which block ``b`` starts at ``base + b * block_stride`` and occupies
``block_bytes``. A layer-major cache has a region a layer (two where K and V are apart), a block-major one a single region.
Region ``i`` of one rank corresponds to region ``i`` of the other.

What lies inside a block is *opaque* here and only named: vLLM's CPU attention, for one, keeps K transposed inside a block
although the tensor's strides say otherwise (vLLM 0.29 and 0.32, csrc/cpu, run). So whole blocks move, between ranks whose
blocks have equal size and equal interior.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Descriptors = NDArray[np.uint64]
    """N×3: address, length in bytes, device id. What NIXL takes."""
    BlockIds = NDArray[np.int32]

MAX_DESCRIPTOR_BYTES = 1 << 30
"""Longest descriptor that is emitted; longer runs are cut. NIXL's LIBFABRIC over tcp was shown to carry 64 MiB in one."""


class Region(msgspec.Struct, frozen=True):
    """One registered span of device memory with a regular block stride. Addresses are virtual, sizes in bytes."""

    name: str
    base: int
    block_stride: int
    block_bytes: int
    device: int

    def span(self, num_blocks: int) -> tuple[int, int]:
        """Return the address and the length of the bytes that ``num_blocks`` blocks touch."""
        return self.base, (num_blocks - 1) * self.block_stride + self.block_bytes


class CacheLayout(msgspec.Struct, frozen=True):
    """A rank's whole cache.

    ``kv_heads`` and ``head_dim`` are this rank's; ``dtype`` is the cache's element type; ``interior`` tags what the platform
    knows about the bytes inside a block, and only equal tags may be copied onto each other; ``memory`` is NIXL's name for the
    kind of memory (DRAM, VRAM); ``span`` are the bytes to register, as (address, length, device).
    """

    block_size: int
    num_blocks: int
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    interior: str
    memory: str
    regions: tuple[Region, ...]
    spans: tuple[tuple[int, int, int], ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(region.block_bytes for region in self.regions)

    def blocks_for(self, start: int, end: int) -> int:
        """Return how many blocks the positions [start, end) touch."""
        return -(-end // self.block_size) - start // self.block_size if end > start else 0

    def bytes_for(self, start: int, end: int) -> int:
        """Return the bytes that moving positions [start, end) takes: whole blocks."""
        return self.blocks_for(start, end) * self.block_bytes


def block_span(blocks: bytes, first: int, start: int, end: int, block_size: int) -> BlockIds:
    """Take the ids of the blocks that hold positions [start, end) out of packed ids whose first holds position ``first``.

    Raises ValueError when the ids do not reach that far: a peer's message is not trusted to be consistent.
    """
    ids = np.frombuffer(blocks, dtype=np.int32)
    low, high = (start - first) // block_size, -((first - end) // block_size)
    if low < 0 or high > len(ids):
        raise ValueError(
            f"positions [{start}, {end}) need blocks {low} to {high} of a list that holds {len(ids)} from position {first} on"
        )
    return ids[low:high]


def plan_blocks(
    local: CacheLayout,
    local_ids: BlockIds,
    remote: CacheLayout,
    remote_ids: BlockIds,
    limit: int = MAX_DESCRIPTOR_BYTES,
) -> tuple[Descriptors, Descriptors]:
    """Make the descriptors that copy block ``local_ids[i]`` to or from ``remote_ids[i]``, for every i and every region.

    Neighbours that are contiguous on both sides become one descriptor. Row i of both results belongs together. Raises
    ValueError for ids outside a cache, or of different count.
    """
    if len(local_ids) != len(remote_ids):
        raise ValueError(f"{len(local_ids)} local blocks cannot be paired with {len(remote_ids)} remote ones")
    _check_ids(local, local_ids, "local")
    _check_ids(remote, remote_ids, "remote")
    plans = [
        _plan_region(mine, local_ids, theirs, remote_ids, limit)
        for mine, theirs in zip(local.regions, remote.regions, strict=True)
    ]
    empty = np.empty((0, 3), dtype=np.uint64)
    return (
        np.concatenate([plan[0] for plan in plans]) if plans else empty,
        np.concatenate([plan[1] for plan in plans]) if plans else empty,
    )


def _check_ids(layout: CacheLayout, ids: BlockIds, whose: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= layout.num_blocks):
        outside = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"{whose} block {outside} is outside a cache of {layout.num_blocks} blocks")


def _plan_region(
    local: Region, local_ids: BlockIds, remote: Region, remote_ids: BlockIds, limit: int
) -> tuple[Descriptors, Descriptors]:
    starts, lengths = np.arange(len(local_ids)), np.ones(len(local_ids), dtype=np.int64)
    contiguous = local.block_stride == local.block_bytes and remote.block_stride == remote.block_bytes
    if contiguous and len(local_ids) > 1:
        starts, lengths = _runs(local_ids, remote_ids, max(1, limit // local.block_bytes))
    sizes = lengths * local.block_bytes
    return (
        _rows(local, local_ids[starts], sizes),
        _rows(remote, remote_ids[starts], sizes),
    )


def _runs(local_ids: BlockIds, remote_ids: BlockIds, longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the runs in which both sides' ids rise by one: their first indices and their lengths, at most ``longest``."""
    breaks = (np.diff(local_ids) != 1) | (np.diff(remote_ids) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.concatenate((starts, [len(local_ids)])))
    if int(lengths.max()) > longest:
        pieces = -(-lengths // longest)
        nth = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + nth * longest
        lengths = np.minimum(np.repeat(lengths, pieces) - nth * longest, longest)
    return starts, lengths


def _rows(region: Region, ids: BlockIds, sizes: NDArray[np.int64]) -> Descriptors:
    rows = np.empty((len(ids), 3), dtype=np.uint64)
    rows[:, 0] = ids.astype(np.uint64) * np.uint64(region.block_stride) + np.uint64(region.base)
    rows[:, 1] = sizes
    rows[:, 2] = region.device
    return rows

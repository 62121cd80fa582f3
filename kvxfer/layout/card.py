"""What a rank tells a peer about itself when a session opens, and whether the two may exchange KV.

Two engines that disagree about what a block means would exchange garbage without any error, so everything that shapes a
block's bytes is compared here, once, before any block moves. A refusal names both sides' values and what to change.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any, Final

import msgspec

from kvxfer.errors import LayoutMismatchError, RemoteProtocolError
from kvxfer.layout.blocks import CacheLayout
from kvxfer.layout.check import check
from kvxfer.layout.maps import CacheMap
from kvxfer.layout.plan import Prepared, prepare
from kvxfer.layout.ranks import Shard, share


class RankCard(msgspec.Struct, frozen=True):
    """One worker rank. ``agent`` is the opaque metadata with which a peer's NIXL agent can reach this one's.

    ``cache`` is the layout as a map, from which ranks of unlike geometry find what they have in common; None where the
    platform knows no more of a block than its size.
    """

    engine: str
    model: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    backend: str
    layout: CacheLayout
    agent: bytes
    cache: CacheMap | None = None

    def to_builtins(self) -> dict[str, Any]:
        """Turn the card into what a message can carry."""
        card: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return card

    @classmethod
    def from_builtins(cls, card: dict[str, Any]) -> RankCard:
        """Read a card. Raises RemoteProtocolError when it is not one, or describes a cache that cannot be."""
        try:
            read = msgspec.convert(card, cls)
        except msgspec.ValidationError as error:
            raise RemoteProtocolError(f"not a rank card: {error}") from None
        _check(read.layout)
        if read.cache is not None:
            check(read.cache)
        return read


def refusals(mine: RankCard, theirs: RankCard) -> list[str]:
    """List why these two ranks must not exchange KV; empty when they may. Each entry names both values and the cure."""
    a, b = mine.layout, theirs.layout
    checks: list[tuple[str, object, object, str]] = [
        ("model", mine.model, theirs.model, _SAME_MODEL),
        ("cache dtype", a.dtype, b.dtype, "set the same --dtype and --kv-cache-dtype on both"),
        ("block size", a.block_size, b.block_size, "set the same --block-size on both"),
        ("layers", a.layers, b.layers, "serve the same model with the same pipeline stages on both"),
        ("KV heads per rank", a.kv_heads, b.kv_heads, "set the same --tensor-parallel-size on both"),
        ("head size", a.head_dim, b.head_dim, "serve the same model on both"),
        ("tensor parallel size", mine.tp_size, theirs.tp_size, "set the same --tensor-parallel-size on both"),
        ("pipeline parallel size", mine.pp_size, theirs.pp_size, "set the same --pipeline-parallel-size on both"),
        ("block interior", a.interior, b.interior, _SAME_KERNELS),
        ("memory", a.memory, b.memory, "run both engines on the same kind of accelerator"),
        ("NIXL backend", mine.backend, theirs.backend, 'set the same "backend" in kv_connector_extra_config on both'),
    ]  # fmt: skip
    found = [
        f"{what} differs: {mine.engine} has {ours}, {theirs.engine} has {other}; {cure}"
        for what, ours, other, cure in checks
        if ours != other
    ]
    if not found and _shape(a) != _shape(b):
        found.append(
            f"regions differ: {mine.engine} has {_shape(a)}, {theirs.engine} has {_shape(b)}; "
            "run both engines with the same VLLM_KV_CACHE_LAYOUT"
        )
    parallel = max(mine.tp_size, mine.pp_size, theirs.tp_size, theirs.pp_size)
    if not found and parallel > 1:
        found.append(
            f"{mine.engine} has {mine.tp_size}×{mine.pp_size} ranks (tensor × pipeline), {theirs.engine} has "
            f"{theirs.tp_size}×{theirs.pp_size}; this release moves KV between single ranks: "
            "set --tensor-parallel-size 1 and --pipeline-parallel-size 1 on both"
        )
    if not found and mine.cache is not None and theirs.cache is not None:
        try:
            connected(mine, theirs)
        except LayoutMismatchError as error:
            found.append(str(error))
    return found


def connected(source: RankCard, sink: RankCard) -> Prepared | None:
    """Prepare the handoffs from one rank to another, from both cards' maps; None when nothing goes from this one to that.

    Both ranks come to the same answer. Raises LayoutMismatchError, naming both, when their caches cannot be connected.
    """
    assert source.cache is not None
    assert sink.cache is not None
    shards = Shard(source.tp_rank, source.tp_size), Shard(sink.tp_rank, sink.tp_size)
    # Where several ranks could send the same, sink engines shall not all turn to the same one.
    turn = zlib.crc32(sink.engine.encode())
    what = share(source.cache, shards[0], sink.cache, shards[1], turn=turn)
    names = f"{source.engine} rank {source.tp_rank}", f"{sink.engine} rank {sink.tp_rank}"
    return prepare(source.cache, sink.cache, what, names=names) if what else None


_ADDRESSES: Final = 1 << 64
_SAME_MODEL = (
    "serve the same model on both; if these are the same weights under two paths, "
    'set "model_id" in kv_connector_extra_config to one name on both'
)
_SAME_KERNELS = (
    "run both engines with the same attention backend on the same CPU or accelerator family and, "
    "where it applies, the same VLLM_KV_CACHE_LAYOUT"
)


def _check(layout: CacheLayout) -> None:
    """Refuse what descriptors cannot be computed from. Whether the memory is the peer's, its NIXL agent's keys decide."""
    if layout.block_size < 1 or layout.num_blocks < 1:
        raise RemoteProtocolError(f"not a rank card: {layout.num_blocks} blocks of {layout.block_size} tokens")
    for region in layout.regions:
        fits = region.base >= 0 and sum(region.span(layout.num_blocks)) <= _ADDRESSES
        if not fits or not 0 < region.block_bytes <= region.block_stride or region.device < 0:
            raise RemoteProtocolError(f"not a rank card: no memory can hold {region}")


def _shape(layout: CacheLayout) -> str:
    """Describe the regions in their order, without their addresses: 4 × 32,768 bytes a block."""
    sizes = itertools.groupby(region.block_bytes for region in layout.regions)
    return " + ".join(f"{len(list(same))} × {size:,}" for size, same in sizes) + " bytes a block"

"""What a rank tells a peer about itself when a session opens, and whether the two may exchange KV.

Two engines that disagree about what a block means would exchange garbage without any error, so everything that shapes a
block's bytes is compared here, once, before any block moves. A refusal names both sides' values and what to change.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from kvxfer.errors import LayoutMismatchError, RemoteProtocolError
from kvxfer.layout.check import check, check_staging
from kvxfer.layout.maps import CacheMap
from kvxfer.layout.ranks import Shard, share
from kvxfer.layout.route import Route, StagingArea


class RankCard(msgspec.Struct, frozen=True):
    """One worker rank. ``agent`` is the opaque metadata with which a peer's NIXL agent can reach this one's.

    ``staging`` is where this rank re-packs what it receives; None where its platform does not.
    """

    engine: str
    model: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    backend: str
    cache: CacheMap
    agent: bytes
    staging: StagingArea | None = None

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
        try:
            check(read.cache)
            if read.staging is not None:
                check_staging(read.staging)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"not a rank card: {error}") from None
        return read


def refusals(mine: RankCard, theirs: RankCard) -> list[str]:
    """List why these two ranks must not exchange KV; empty when they may. Each entry names both values and the cure.

    Whoever of the two is the source, the answer is the same: both directions are tried.
    """
    checks: list[tuple[str, object, object, str]] = [
        ("model", mine.model, theirs.model, _SAME_MODEL),
        ("memory", mine.cache.memory, theirs.cache.memory, "run both engines on the same kind of accelerator"),
        ("NIXL backend", mine.backend, theirs.backend, 'set the same "backend" in kv_connector_extra_config on both'),
    ]
    found = [
        f"{what} differs: {mine.engine} has {ours}, {theirs.engine} has {other}; {cure}"
        for what, ours, other, cure in checks
        if ours != other
    ]
    parallel = max(mine.tp_size, mine.pp_size, theirs.tp_size, theirs.pp_size)
    if not found and parallel > 1:
        found.append(
            f"{mine.engine} has {mine.tp_size}×{mine.pp_size} ranks (tensor × pipeline), {theirs.engine} has "
            f"{theirs.tp_size}×{theirs.pp_size}; this release moves KV between single ranks: "
            "set --tensor-parallel-size 1 and --pipeline-parallel-size 1 on both"
        )
    if not found:
        ways = [_why_not(mine, theirs), _why_not(theirs, mine)]
        if all(ways):
            found.append(ways[0])
    return found


def _why_not(source: RankCard, sink: RankCard) -> str:
    try:
        connected(source, sink)
    except LayoutMismatchError as error:
        return str(error)
    return ""


def connected(source: RankCard, sink: RankCard) -> Route | None:
    """Make the route from one rank to another, from both cards' maps; None when nothing goes from this one to that.

    Both ranks come to the same answer. Raises LayoutMismatchError, naming both, when their caches cannot be connected.
    """
    shards = Shard(source.tp_rank, source.tp_size), Shard(sink.tp_rank, sink.tp_size)
    # Where several ranks could send the same, sink engines shall not all turn to the same one.
    turn = zlib.crc32(sink.engine.encode())
    what = share(source.cache, shards[0], sink.cache, shards[1], turn=turn)
    names = f"{source.engine} rank {source.tp_rank}", f"{sink.engine} rank {sink.tp_rank}"
    return Route(source.cache, sink.cache, what, area=sink.staging, names=names) if what else None


_SAME_MODEL = (
    "serve the same model on both; if these are the same weights under two paths, "
    'set "model_id" in kv_connector_extra_config to one name on both'
)

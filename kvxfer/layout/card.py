"""What a rank tells a peer about itself when a session opens, and whether the two may exchange KV.

Two engines that disagree about what a block means would exchange garbage without any error, so everything that shapes a
block's bytes is compared here, once, before any block moves. A refusal names both sides' values and what to change.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from kvxfer.errors import LayoutMismatchError, RemoteProtocolError
from kvxfer.layout.check import MAX_CELLS, MAX_NAME, check, check_staging
from kvxfer.layout.maps import CacheMap, numbers
from kvxfer.layout.ranks import Shard, share, takers
from kvxfer.layout.route import Route, StagingArea

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.layout.refine import Held

_Found = TypeVar("_Found")

MAX_PARALLEL: Final = 1024
"""Ranks of one engine along one axis."""
MAX_TEXT: Final = 4096
"""Characters of a name in a card: a model's may be a path."""


class RankCard(msgspec.Struct, frozen=True):
    """One worker rank. ``agent`` is the opaque metadata with which a peer's NIXL agent can reach this one's.

    ``staging`` is where this rank re-packs what it receives; None where its platform does not. ``role`` is vLLM's kv_role, which
    says in which of the two directions KV can move at all.
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
    role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"

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
        for axis, rank, size in (("tensor", read.tp_rank, read.tp_size), ("pipeline", read.pp_rank, read.pp_size)):
            if not 0 <= rank < size <= MAX_PARALLEL:
                raise RemoteProtocolError(f"not a rank card: {axis}-parallel rank {rank} of {size}")
        for text in (read.engine, read.model, read.backend):
            if len(text) > MAX_TEXT or not text.isprintable():
                raise RemoteProtocolError(f"not a rank card: the name {text[:MAX_NAME]!r}")
        cells = sum(len(plane.layers) * len(plane.heads) for group in read.cache.groups for plane in group.planes)
        if cells * read.tp_size > MAX_CELLS:  # what all its siblings hold is derived from it
            raise RemoteProtocolError(f"not a rank card: {cells} heads in all layers of each of {read.tp_size} ranks")
        try:
            check(read.cache)
            if read.staging is not None:
                check_staging(read.staging)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"not a rank card: {error}") from None
        return read


def refusals(mine: RankCard, theirs: RankCard) -> list[str]:
    """List why these two ranks must not exchange KV; empty when they may. Each entry names both values and the cure.

    Whoever of the two asks, the answer is the same: every direction that their roles allow is tried, and one must do.
    """
    checks: list[tuple[str, object, object, str]] = [
        ("model", mine.model, theirs.model, _SAME_MODEL),
        ("memory", mine.cache.memory, theirs.cache.memory, _SAME_MEMORY),
        ("NIXL backend", mine.backend, theirs.backend, 'set the same "backend" in kv_connector_extra_config on both'),
    ]
    found = [
        f"{what} differs: {mine.engine} has {ours}, {theirs.engine} has {other}; {cure}"
        for what, ours, other, cure in checks
        if ours != other
    ]
    if not found:
        ways = [
            (a, b) for a, b in ((mine, theirs), (theirs, mine)) if a.role != "kv_consumer" and b.role != "kv_producer"
        ]
        why = [_why_not(*way) for way in ways]
        if not ways:
            found.append(
                f"{mine.engine} and {theirs.engine} both have kv_role {mine.role}: one must be the other's kv_producer"
            )
        elif all(why):
            found.append(why[0])
    return found


def _why_not(source: RankCard, sink: RankCard) -> str:
    if sink.pp_size > 1:
        return (
            f"{sink.engine} would receive KV in {sink.pp_size} pipeline stages, and this release moves it to engines of one "
            "stage: set --pipeline-parallel-size 1 on the decode engine; use tensor parallelism there"
        )
    try:
        connected(source, sink)
    except LayoutMismatchError as error:
        return str(error)
    return ""


def connected(source: RankCard, sink: RankCard) -> Route | None:
    """Make the route from one rank to another, from both cards' maps; None when nothing goes from this one to that.

    Both ranks come to the same answer. Raises LayoutMismatchError, naming both, when their caches cannot be connected.
    """
    what = shared(source, sink)
    names = f"{source.engine} rank {source.tp_rank}", f"{sink.engine} rank {sink.tp_rank}"
    if source.pp_size == 1:
        _check_layers(source.cache, sink.cache, names)
    return Route(source.cache, sink.cache, what, area=sink.staging, names=names) if what else None


def shared(source: RankCard, sink: RankCard) -> tuple[Held, ...]:
    """Say what the one rank sends to the other; nothing if it takes no part. Raises LayoutMismatchError."""
    return _between(share, source, sink)


def takers_of(source: RankCard, sink: RankCard) -> int:
    """Count the ranks of the sink's engine that take something from this one of the source's. Raises LayoutMismatchError.

    Both sides count alike, whichever of the sink's ranks it is.
    """
    return len(_between(takers, source, sink))


def _between(what: Callable[..., _Found], source: RankCard, sink: RankCard) -> _Found:
    # Where several ranks could send the same, sink engines shall not all turn to the same one.
    turn = zlib.crc32(sink.engine.encode())
    shards = Shard(source.tp_rank, source.tp_size), Shard(sink.tp_rank, sink.tp_size)
    try:
        return what(source.cache, shards[0], sink.cache, shards[1], turn=turn)
    except LayoutMismatchError as error:
        raise LayoutMismatchError(
            f"from {source.engine} with {source.tp_size} tensor-parallel ranks to {sink.engine} with {sink.tp_size}: {error}"
        ) from None


def _check_layers(source: CacheMap, sink: CacheMap, names: tuple[str, str]) -> None:
    """Raise LayoutMismatchError when a sink has layers that the one stage of its source has not: nobody would fill them."""
    missing: dict[str, list[int]] = {}
    for plane, layer in _layers(sink) - _layers(source):
        missing.setdefault(plane, []).append(layer)
    if missing:
        what = ", ".join(f"{plane!r} of layers {numbers(sorted(layers))}" for plane, layers in sorted(missing.items()))
        raise LayoutMismatchError(
            f"{names[1]} holds {what}, which {names[0]} does not: serve the same model on both, with the same speculative "
            "decoding if any"
        )


def _layers(cache: CacheMap) -> set[tuple[str, int]]:
    return {(plane.name, layer) for group in cache.groups for plane in group.planes for layer in plane.layers}


_SAME_MEMORY = (
    "run both engines on the same kind of accelerator, or, where one is on CUDA and the other in host memory, set "
    '"kv_buffer_device": "cpu" in the first one\'s --kv-transfer-config'
)
_SAME_MODEL = (
    "serve the same model on both; if these are the same weights under two paths, "
    'set "model_id" in kv_connector_extra_config to one name on both'
)

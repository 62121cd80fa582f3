"""What crosses between the two halves of a connector, by vLLM's own means. Both are pickled by vLLM, never by us."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from kvxfer.connector import compat
from kvxfer.protocol.messages import RankAddress  # noqa: TC001 - pickled and rebuilt by vLLM
from kvxfer.transport.commands import Step

if TYPE_CHECKING:
    from collections.abc import Callable


class StepMetadata(compat.base_of("KVConnectorMetadata")):  # type: ignore[misc]  # vLLM is not typed where the checks run
    """Scheduler to workers, each step: what changed; ``NOTHING`` when nothing did, as in nearly all of them."""

    __slots__ = ("step",)

    def __init__(self, step: Step) -> None:
        self.step = step

    def __reduce__(self) -> tuple[Callable[..., StepMetadata], tuple[bytes | Step]]:
        """Pickle it as one string of bytes: by its parts, pickle looks up each of their classes, in both processes."""
        try:
            return _read, (_packed(self.step),)
        except UnicodeEncodeError:  # a name that is no text: pickle takes it
            return StepMetadata, (self.step,)


_packed = msgspec.msgpack.Encoder().encode
_unpacked = msgspec.msgpack.Decoder(Step).decode


def _read(packed: bytes) -> StepMetadata:
    return StepMetadata(_unpacked(packed))


NOTHING: Final = ()
"""In place of a ``StepMetadata`` in every step that changes nothing. vLLM asks of it no more than not to be None (0.24 to
0.32), and pickles it for each worker: this takes one byte, and neither side looks up a name or makes an object."""


@dataclass
class RankHandshake(compat.base_of("KVConnectorHandshakeMetadata")):  # type: ignore[misc]  # likewise
    """Worker to scheduler, once: where this rank's control thread listens."""

    address: RankAddress


@dataclass
class RankNews(compat.base_of("KVConnectorWorkerMetadata")):  # type: ignore[misc]  # likewise
    """Workers to scheduler, a step.

    ``quiet``: token of orphaned blocks → how many ranks read them no more (see ``pins``). ``failed``: requests whose whole
    load failed on a rank, where this vLLM has no word of its own for that (see ``compat``).
    """

    quiet: dict[int, int]
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: RankNews) -> RankNews:
        """Add up what two ranks, or groups of ranks, say."""
        both = dict(self.quiet)
        for token, count in other.quiet.items():
            both[token] = both.get(token, 0) + count
        return RankNews(both, self.failed | other.failed)

"""What crosses between the two halves of a connector, by vLLM's own means. Both are pickled by vLLM, never by us."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.protocol.messages import RankAddress  # noqa: TC001 - pickled and rebuilt by vLLM
from kvxfer.transport.commands import Step


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed where the checks run
    """Scheduler to workers, each step: what changed."""

    step: Step = field(default_factory=Step)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # likewise
    """Worker to scheduler, once: where this rank's control thread listens."""

    address: RankAddress


@dataclass
class QuietPins(KVConnectorWorkerMetadata):  # type: ignore[misc]  # likewise
    """Workers to scheduler, a step: token of orphaned blocks → how many ranks read them no more (see ``pins``)."""

    ranks: dict[int, int]

    def aggregate(self, other: QuietPins) -> QuietPins:
        """Add up what two ranks, or groups of ranks, say."""
        both = dict(self.ranks)
        for token, count in other.ranks.items():
            both[token] = both.get(token, 0) + count
        return QuietPins(both)

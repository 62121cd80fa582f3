"""What crosses between the two halves of a connector, by vLLM's own means. Both are pickled by vLLM, never by us."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

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

"""Keeps a rank's agent: makes it, registers the cache, and, when keys must be revoked, makes another in its place.

Deregistering memory alone does not stop what is under way: over tcp, libfabric looks a key up when a message begins, and goes
on to write what follows (``tests/integration/test_stopped_source.py`` stops a writer in the middle of one). Closing the agent
closes its endpoints, so that nothing that was posted to it lands any more, on any provider. The new agent has new keys and
new endpoints; peers need its metadata before they can post again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

from kvxfer.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.layout.card import RankCard
    from kvxfer.layout.runs import Descriptors
    from kvxfer.transport.agent import Agent, Status

logger = logging.getLogger("kvxfer.mover")


class AgentKeeper:
    """Of one mover, in its thread. ``agent`` is there after ``open``; between a closing and an opening nothing can be posted."""

    def __init__(self, make_agent: Callable[[], Agent], card: RankCard) -> None:
        self.agent: Agent = _NoAgent()
        self.metadata = b""
        self._make_agent = make_agent
        cache, staging = card.cache, card.staging
        self._memory = cache.memory
        self._spans = [(address, length, cache.device) for address, length in cache.spans]
        if staging is not None:
            self._spans.append((staging.address, staging.size, cache.device))

    def open(self) -> None:
        """Make an agent and register the cache, and the staging area. Raises what went wrong; then there is no agent."""
        agent = self._make_agent()
        try:
            agent.register(self._spans, self._memory)
            self.metadata = agent.metadata()
        except BaseException:
            agent.close()
            raise
        self.agent = agent

    def close(self) -> None:
        """Close the agent: when this returns, nothing that was posted to it lands any more. Raises what went wrong."""
        if self.is_open:
            self.agent.close()
            self.agent = _NoAgent()

    @property
    def is_open(self) -> bool:
        """Whether there is an agent."""
        return not isinstance(self.agent, _NoAgent)


class _NoAgent:
    """What stands for the agent while there is none: nothing can be posted, nothing arrives."""

    name = ""
    backend = ""

    def register(self, spans: Sequence[tuple[int, int, int]], memory: str) -> None:
        """Refuse."""
        _refuse(spans, memory)

    def metadata(self) -> bytes:
        """Refuse."""
        _refuse()

    def meet(self, name: str) -> bool:
        """Nobody is met."""
        del name
        return False

    def add_peer(self, metadata: bytes, name: str = "") -> str:
        """Refuse."""
        _refuse(metadata, name)

    def lost(self, name: str) -> None:
        """Nobody is known."""

    def interrupt(self, name: str) -> None:
        """No call is under way."""

    def disturbed(self) -> bool:
        """Nothing breaks."""
        return False

    def remove_peer(self, name: str) -> None:
        """Nobody is known."""

    def post(
        self, operation: str, local: Descriptors, remote: Descriptors, memory: str, peer: str, notification: bytes = b""
    ) -> Any:
        """Refuse."""
        _refuse(operation, local, remote, memory, peer, notification)

    def status(self, transfer: Any) -> Status:
        """Refuse."""
        _refuse(transfer)

    def release(self, transfer: Any) -> None:
        """Nothing is posted."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return none."""
        return []

    def close(self) -> None:
        """There is nothing to close."""


def _refuse(*_: Any) -> NoReturn:
    raise TransportError("this rank has revoked its keys and has no NIXL agent yet; it is tried again")

"""What the mover needs of something that moves bytes: implemented by NIXL (``nixl``) and by the in-memory twin (``twin``).

One thread calls an agent: its mover. Nothing here but ``interrupt`` is thread-safe, by rule.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.layout.runs import Descriptors


class Status(Enum):
    """Of a posted transfer. ``FAILED`` and ``DONE`` are terminal: the agent touches neither side's memory any more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


Transfer: TypeAlias = Any
"""A posted transfer: opaque to everybody but the agent that made it."""


class Agent(Protocol):
    """Moves bytes between registered memory of this process and of its peers, and delivers notifications after them."""

    name: str
    """This agent's name, unique over all agents that ever talk to each other."""
    backend: str
    """What carries the bytes: LIBFABRIC, UCX, or twin."""

    def register(self, spans: Sequence[tuple[int, int, int]], memory: str) -> None:
        """Register (address, length in bytes, device) spans. Raises TransportError with what to change."""

    def metadata(self) -> bytes:
        """Return what a peer needs to reach this agent's registered memory."""

    def meet(self, name: str) -> bool:
        """Note that a peer knows ``metadata()``. True when that has changed, and whoever comes next needs the new one."""

    def add_peer(self, metadata: bytes, name: str = "") -> str:
        """Make a peer's memory reachable, and return its agent's name, which should be ``name``. Raises TransportError.

        May not return while the peer does not answer, so it is called for peers of which it is known that they live.
        """

    def lost(self, name: str) -> None:
        """Note that a peer's process has ended: what is under way to it has failed."""

    def remove_peer(self, name: str) -> None:
        """Forget a peer. Its transfers must be terminal."""

    def post(
        self, operation: str, local: Descriptors, remote: Descriptors, memory: str, peer: str, notification: bytes = b""
    ) -> Transfer:
        """Post a WRITE or READ; row i of ``local`` and of ``remote`` belong together. Raises TransportError.

        Like ``add_peer`` it may not return while the peer does not answer.

        ``notification`` reaches the peer after the data of a WRITE is visible there; empty for none.
        """

    def status(self, transfer: Transfer) -> Status:
        """Progress the fabric and tell how a transfer stands."""

    def release(self, transfer: Transfer) -> None:
        """Forget a terminal transfer."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Progress the fabric and return what has arrived, as (peer's agent name, message)."""

    def interrupt(self, name: str) -> None:
        """Make a call about a peer whose process has ended return, if one is under way. From any thread; returns at once."""

    def disturbed(self) -> bool:
        """Tell, once, that some peer's connection broke; whose is not known."""

    def close(self) -> None:
        """Let go of everything. Called once, by the mover, at its end."""

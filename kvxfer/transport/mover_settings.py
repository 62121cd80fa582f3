"""What a mover is told at its start, and whom it tells of its agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

COUNTERS = (
    "bytes",
    "descriptors",
    "transfers",
    "failed_transfers",
    "refused_messages",
    "revocations",
    "early_connections",
)
"""``early_connections``: NIXL connections that were made before a handoff needed them."""

LINGER = 1.0
"""Seconds for which the fabric makes progress after a write is done, so that its notification leaves this process."""

FLUSH = 0.02
"""The first seconds of these, in which it mostly leaves."""

WATCH = 0.004
"""Seconds between looks at the fabric while a source may write and has not said that it does, or a notification lingers."""

BRISK = 0.02
"""The first seconds of a transfer, or since one was announced, in which the fabric is looked at three times as often: most are
over by then, and a prompt's last one has a client waiting for it."""

TICK = 0.25
"""Seconds between looks at deadlines while any handoff is open."""


class Renewed(Protocol):
    """Hears of the agent's metadata."""

    def __call__(self, metadata: bytes, *, anew: bool) -> None:
        """See Mover."""


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """``mode`` is push or pull; times in seconds. See docs/settings.md."""

    mode: str
    stream: bool = True
    leg_timeout: float = 30.0
    pull_lease: float = 30.0
    hold_limit: float = 120.0
    drain_bound: float = 2.0
    transfer_limit: float = 120.0
    revoke: bool = True
    poll: float = 0.0003
    records: int = 1024
    slice_tokens: int | None = None
    """Tokens of one write, or of one part of a read, where what moves is copied through host memory."""
    eager: bool = False
    """Connect a peer's memory as soon as a session with it is open: for a rank that posts."""

"""What the two background threads of a worker process have in common."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Collection


def run_on(cpus: Collection[int] | None) -> None:
    """Move the calling thread to these CPUs; None, or CPUs that the host does not grant, leave it where it is."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread, not the process


STUCK = 90.0
"""Seconds in one round after which a thread is caught for ever. NIXL itself waits up to 60 s for a peer's handshake."""


@dataclass(slots=True)
class Round:
    """When a thread's round began, for those who depend on it; None while it waits for something to do.

    ``over``: the thread has ended.
    """

    since: float | None = None
    over: bool = False

    def worth_a_look(self) -> bool:
        """Tell, at next to no cost, whether ``check`` could find anything: an engine thread asks at every step."""
        return self.since is not None or self.over

    def lasts(self, now: float) -> float:
        """Return for how many seconds the round that is under way has lasted."""
        since = self.since
        return 0.0 if since is None else now - since

    def check(self, who: str, now: float, *, alive: bool) -> None:
        """Raise TransportError if the thread has ended, or is caught in a call: its process must then be restarted."""
        if not alive:
            raise TransportError(f"{who}: the mover has ended; what it wrote last is in this log. Restart the engine")
        if self.lasts(now) > STUCK:
            raise TransportError(
                f"{who}: a call to NIXL has not returned for {STUCK:g} s; most likely its peer died at that moment. "
                "No handoff can go on in this process: restart the engine"
            )

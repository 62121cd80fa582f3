"""What was refused, and from whom: said once for each peer and kind, then only counted.

Whoever reaches the port can have something refused, as often as it likes and under as many names; the log and this table
must not grow with that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

MAX_LINES = 256
"""Lines in one period."""

PERIOD = 3600.0
"""Seconds after which a refusal is said again."""


class Refusals:
    """Used by one thread. ``count`` is of all that was refused."""

    def __init__(self, logger: logging.Logger) -> None:
        self.count = 0
        self._logger = logger
        self._said: set[tuple[str, str]] = set()
        self._began = 0.0

    def note(self, peer: str, kind: str, reason: object, now: float) -> None:
        """Count a refusal, and say it if that was not said of this peer. ``peer`` and ``reason`` are fit for a log."""
        self.count += 1
        if now - self._began >= PERIOD:
            self._said.clear()
            self._began = now
        if (peer, kind) in self._said or len(self._said) > MAX_LINES:
            return
        self._said.add((peer, kind))
        if len(self._said) > MAX_LINES:
            self._logger.warning("too many peers are refused to name more of them; all are counted")
            return
        self._logger.warning("refused what a peer sent: %s (said once; all are counted)", reason)

    def __len__(self) -> int:
        """Return the number of peers and kinds that are remembered."""
        return len(self._said)

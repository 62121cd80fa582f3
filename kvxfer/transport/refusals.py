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
        self._lines = 0

    def line(self, text: str, now: float) -> None:
        """Say what peers can make happen as often as they like; after so many lines no more of them in this period."""
        self._turn(now)
        self._lines += 1
        if self._lines <= MAX_LINES:
            self._logger.warning("%s", text)

    def note(self, peer: str, kind: str, reason: object, now: float) -> None:
        """Count a refusal, and say it if that was not said of this peer. ``peer`` and ``reason`` are fit for a log."""
        self.count += 1
        self._turn(now)
        if (peer, kind) in self._said or len(self._said) > MAX_LINES:
            return
        self._said.add((peer, kind))
        if len(self._said) > MAX_LINES:
            self._logger.warning("too many peers are refused to name more of them; all are counted")
            return
        self._logger.warning("refused what a peer sent: %s (said once; all are counted)", reason)

    def _turn(self, now: float) -> None:
        if now - self._began >= PERIOD:
            self._said.clear()
            self._began, self._lines = now, 0

    def __len__(self) -> int:
        """Return the number of peers and kinds that are remembered."""
        return len(self._said)

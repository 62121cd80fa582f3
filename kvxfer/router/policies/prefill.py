"""Which prefill engine: the one that has least to compute before this prompt is done.

Cost, in tokens: what is queued there by this router, and what of this prompt the engine does not hold from the conversation's
earlier turn. So a conversation stays with its engine until the queue there is longer than what would have to be computed anew
elsewhere, and equal engines take turns. ``docs/policies/prefill.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.router.policies.asked import Asked, Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engine import Engine


class LeastWork:
    """Fewest tokens before this request is done."""

    def __init__(self) -> None:
        self._turns = Turns()

    def pick(self, engines: Sequence[Engine], asked: Asked) -> Engine:
        """Return the engine of least cost."""
        return self._turns.take(
            min(engines, key=lambda one: (one.load.queued_tokens + asked.missing(one), self._turns.of(one)))
        )


class RoundRobin:
    """Each engine in turn, whatever it has to do: for comparisons, and for engines behind one that chooses by itself."""

    def __init__(self) -> None:
        self._turns = Turns()

    def pick(self, engines: Sequence[Engine], asked: Asked) -> Engine:  # noqa: ARG002
        """Return the engine whose turn it is."""
        return self._turns.take(min(engines, key=self._turns.of))

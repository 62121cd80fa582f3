"""Handoffs that peers have named and the engine has not seen: how much of them one peer's engine may have kept.

A prefill leg may be late, so what names an unknown handoff is kept for a while. Whoever has a session could otherwise fill
this process's memory, or leave no room for the handoffs of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.protocol.ids import HandoffId

MAX_PARKED = 4096
"""Handoffs of one engine: more than a decode engine queues."""

MAX_PARKED_BYTES = 64 << 20
"""Block ids of one engine: sixteen million of them."""


class Parking:
    """What each engine has parked."""

    def __init__(self) -> None:
        self._sizes: dict[str, dict[HandoffId, int]] = {}
        self._whose: dict[HandoffId, str] = {}

    def park(self, handoff: HandoffId, engine: str, size: int = 0) -> bool:
        """Keep ``size`` more bytes for a handoff, for who named it first. False when there is no room for it."""
        whose = self._whose.get(handoff, engine)
        mine = self._sizes.get(whose, {})
        if (handoff not in mine and len(mine) >= MAX_PARKED) or (size and sum(mine.values()) + size > MAX_PARKED_BYTES):
            return False
        self._whose[handoff] = whose
        self._sizes.setdefault(whose, {})[handoff] = mine.get(handoff, 0) + size
        return True

    def leave(self, handoff: HandoffId) -> None:
        """Forget a handoff: its engine knows it, or it is over."""
        engine = self._whose.pop(handoff, None)
        if engine is not None:
            del self._sizes[engine][handoff]
            if not self._sizes[engine]:
                del self._sizes[engine]

    def __len__(self) -> int:
        """Return the number of handoffs."""
        return len(self._whose)

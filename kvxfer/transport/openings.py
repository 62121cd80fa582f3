"""Sinks that have not registered yet: each waits for its blocks' fence, and for its source's ranks to be connected.

Both can come in either order, and then some wait for slots of the staging area. A connection can be lost again at any moment
of that; it is then called anew, so every opening ends: registered, or failed with the reason that the call gave. Who registers
one, or ends it otherwise, says so (``closed``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.transport.commands import EngineAddress


@dataclass(slots=True)
class _Opening:
    address: EngineAddress
    fenced: bool = False


class Openings:
    """``connect`` asks for an engine's ranks; the answer comes as ``connected`` or ``unreachable``. Used by one thread."""

    def __init__(self, connect: Callable[[EngineAddress], None]) -> None:
        self._connect = connect
        self._open: dict[HandoffId, _Opening] = {}
        self._ranks: dict[EngineAddress, tuple[RankId, ...]] = {}
        self._called: set[EngineAddress] = set()

    def open(self, handoff: HandoffId, address: EngineAddress) -> None:
        """Begin to wait."""
        self._open[handoff] = _Opening(address)
        self._call(address)

    def fenced(self, handoff: HandoffId) -> tuple[RankId, ...] | None:
        """Note that the fence has passed. Returns the ranks to register with, if they are connected."""
        one = self._open.get(handoff)
        if one is None:
            return None
        one.fenced = True
        return self._ready(one)

    def connected(self, address: EngineAddress, ranks: tuple[RankId, ...]) -> list[HandoffId]:
        """Note that an engine is connected. Returns the handoffs that may register now."""
        self._called.discard(address)
        self._ranks[address] = ranks
        return [h for h, one in self._open.items() if one.address == address and self._ready(one)]

    def unreachable(self, address: EngineAddress) -> list[HandoffId]:
        """Note that an engine cannot be connected. Returns the handoffs that fail."""
        self._called.discard(address)
        self._ranks.pop(address, None)
        failed = [handoff for handoff, one in self._open.items() if one.address == address]
        for handoff in failed:
            del self._open[handoff]
        return failed

    def again(self, address: EngineAddress) -> None:
        """Note that an engine was connected and is not any more: it is called anew for whoever waits."""
        self._called.discard(address)
        self._ranks.pop(address, None)
        if any(one.address == address for one in self._open.values()):
            self._call(address)

    def call_back(self, rank: RankId) -> None:
        """Call the engine of a rank that was lost, although nobody waits to register with it."""
        for address in [a for a, ranks in self._ranks.items() if rank in ranks]:
            del self._ranks[address]
            self._call(address)

    def lost(self, rank: RankId) -> None:
        """Note that a rank is lost: engines that it belonged to are called anew for whoever still waits."""
        for address in [a for a, ranks in self._ranks.items() if rank in ranks]:
            del self._ranks[address]
            if any(one.address == address for one in self._open.values()):
                self._call(address)

    def closed(self, handoff: HandoffId) -> None:
        """Note that a handoff has been registered, or has ended."""
        self._open.pop(handoff, None)

    def ranks(self, address: EngineAddress) -> tuple[RankId, ...]:
        """Return the ranks of a connected engine."""
        return self._ranks[address]

    def _ready(self, one: _Opening) -> tuple[RankId, ...] | None:
        return self._ranks.get(one.address) if one.fenced else None

    def _call(self, address: EngineAddress) -> None:
        if address not in self._ranks and address not in self._called:
            self._called.add(address)
            self._connect(address)

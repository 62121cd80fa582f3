"""Says things to other engines, by their addresses: who is not connected is called first, and what was said waits meanwhile.

Used in the control thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import Message
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.control import ControlChannel
    from kvxfer.transport.dialer import Outcome


class Courier:
    """Sends by ``control``, to all processes that a call for an address connects."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._ranks: dict[EngineAddress, tuple[RankId, ...]] = {}
        self._waiting: dict[EngineAddress, list[Message]] = {}

    def send(self, address: EngineAddress, message: Message) -> None:
        """Say something, at once or when the engine is connected."""
        ranks = self._ranks.get(address)
        if ranks is not None:
            for rank in ranks:
                self._control.send(rank, message)
            return
        if address not in self._waiting:
            self._control.connect(address)
        self._waiting.setdefault(address, []).append(message)

    def on_outcome(self, outcome: Outcome) -> list[Message]:
        """Send what waited for this engine. Returns what could not be sent, since it cannot be reached."""
        waiting = self._waiting.pop(outcome.address, [])
        if outcome.reason is not None:
            return waiting
        self._ranks[outcome.address] = outcome.ranks
        for message in waiting:
            self.send(outcome.address, message)
        return []

    def on_lost(self, rank: RankId) -> list[EngineAddress]:
        """Forget an engine's ranks when one is lost: the next message calls it again. Returns whose they were."""
        gone = [address for address, ranks in self._ranks.items() if rank in ranks]
        for address in gone:
            del self._ranks[address]
        return gone

"""Whom a mover can reach: its peers' cards and agents, and who is known to live.

A call to NIXL that concerns a peer which does not answer may never return (``nixl_raw``), and when a connection breaks NIXL does
not say whose. So after that, a peer is reached only once it has answered something that was said later. What carries such
an answer says, by this process's own clock, when it was asked for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvxfer.errors import TransportError
from kvxfer.protocol.ids import shown

if TYPE_CHECKING:
    from kvxfer.layout.card import RankCard
    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.agent import Agent


class NotNowError(TransportError):
    """Nothing may be posted to a peer before it has been heard from."""


class Reach:
    """The peers of one mover. Used by its thread alone."""

    def __init__(self) -> None:
        self._cards: dict[RankId, RankCard] = {}
        self._agents: dict[RankId, str] = {}
        self._answered: dict[RankId, float] = {}
        self._doubt_since = -math.inf

    def up(self, peer: RankId, card: RankCard) -> None:
        """Note that a session with a peer was opened."""
        self._cards[peer] = card

    def lost(self, peer: RankId) -> None:
        """Note that it ended."""
        for known in (self._cards, self._agents, self._answered):
            known.pop(peer, None)

    def doubt(self, now: float) -> None:
        """Note that some peer's connection broke: whoever has not answered anything said since may be dead."""
        self._doubt_since = now

    def heard(self, peer: RankId, asked: float) -> bool:
        """Note that a peer has answered what was said at ``asked``, and tell whether that proves that it lives."""
        self._answered[peer] = max(asked, self._answered.get(peer, asked))
        return asked > self._doubt_since

    def of(self, peer: RankId, agent: Agent) -> tuple[str, RankCard]:
        """Return a peer's agent name and card, making its memory reachable first if it is not. Raises TransportError."""
        card = self._cards.get(peer)
        if card is None:
            raise TransportError(f"{peer} has no open session")
        if self._answered.get(peer, 0.0) <= self._doubt_since:
            raise NotNowError(f"a connection broke just now, and {peer} has not answered since")
        name = self._agents.get(peer)
        if name is None:
            name = agent.add_peer(card.agent, peer.agent)
            if name != peer.agent:
                raise TransportError(f"{peer} shows the memory of {shown(name)} for its own")
            self._agents[peer] = name
        return name, card

    def has(self, name: str) -> bool:
        """Tell whether an agent belongs to a peer with an open session."""
        return name in self._agents.values()

    def peers(self) -> list[RankId]:
        """Return the peers with an open session."""
        return list(self._cards)

"""Whom a mover can reach: its peers' cards and agents, and who is known to live.

What the agent has loaded of a peer outlives its sessions: two processes that both live and have only not heard each other for a
while go on with the connection that they have. (NIXL 1.4.1 over tcp: when one side alone forgets the other and loads it again,
its handshake is never answered.) It is forgotten when the process has ended, another has taken its place, its keys are others,
or after ``KEPT``.

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
    from collections.abc import Iterable

    from kvxfer.layout.card import RankCard
    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.agent import Agent


KEPT = 600.0
"""Seconds without a session after which a peer that is not known to have ended is forgotten all the same."""


class NotNowError(TransportError):
    """Nothing may be posted to a peer before it has been heard from."""


class Reach:
    """The peers of one mover. Used by its thread alone."""

    def __init__(self) -> None:
        self._cards: dict[RankId, RankCard] = {}
        self._agents: dict[RankId, tuple[str, bytes]] = {}  # with the metadata that was loaded
        self._left: dict[RankId, float] = {}
        self._answered: dict[RankId, float] = {}
        self._doubt_since = -math.inf

    def up(self, peer: RankId, card: RankCard) -> None:
        """Note that a session with a peer was opened."""
        self._cards[peer] = card
        self._left.pop(peer, None)

    def lost(self, peer: RankId, now: float) -> None:
        """Note that it ended."""
        self._cards.pop(peer, None)
        self._answered.pop(peer, None)
        if peer in self._agents:
            self._left[peer] = now

    def over(self, peer: RankId, now: float) -> list[RankId]:
        """Return whom to forget now that ``peer`` has a session: earlier lives of it, and who left long ago."""
        same = [p for p in self._agents if (p.engine, p.rank) == (peer.engine, peer.rank) and p != peer]
        return same + [p for p, left in self._left.items() if now - left > KEPT and p not in same]

    def forget(self, peer: RankId) -> None:
        """Note that the agent does not have a peer any more."""
        self._agents.pop(peer, None)
        self._left.pop(peer, None)

    def reset(self) -> None:
        """Note that there is another agent, which knows nobody."""
        self._agents.clear()
        self._left.clear()

    def doubt(self, now: float) -> None:
        """Note that some peer's connection broke: whoever has not answered anything said since may be dead."""
        self._doubt_since = now

    def heard(self, peer: RankId, asked: float) -> bool:
        """Note that a peer has answered what was said at ``asked``, and tell whether that proves that it lives."""
        self._answered[peer] = max(asked, self._answered.get(peer, asked))
        return asked > self._doubt_since

    def of(self, peer: RankId, agent: Agent) -> tuple[str, RankCard]:
        """Return a peer's agent name and card, making its memory reachable first if it is not. Raises TransportError."""
        card = self.card(peer)
        if self._answered.get(peer, 0.0) <= self._doubt_since:
            raise NotNowError(f"a connection broke just now, and {peer} has not answered since")
        name, loaded = self._agents.get(peer, ("", b""))
        if name and loaded != card.agent:  # it has revoked its keys
            self.forget(peer)
            agent.lost(name)  # its endpoints are closed: what is under way to them has failed
            agent.remove_peer(name)
            name = ""
        if not name:
            name = agent.add_peer(card.agent, peer.agent)
            if name != peer.agent:
                # Whoever's it is, it has been loaded over: nothing of it is to be relied upon.
                for liar in [one for one, (known, _) in self._agents.items() if known == name]:
                    self.forget(liar)
                agent.remove_peer(name)
                raise TransportError(f"{peer} shows the memory of {shown(name)} for its own")
            self._agents[peer] = name, card.agent
        return name, card

    def card(self, peer: RankId) -> RankCard:
        """Return the card of a peer with an open session. Raises TransportError."""
        card = self._cards.get(peer)
        if card is None:
            raise TransportError(f"{peer} has no open session")
        return card

    def has(self, name: str) -> bool:
        """Tell whether the agent has a peer of this name that is not to be forgotten."""
        return any(name == known for known, _ in self._agents.values())

    def is_loaded(self, peer: RankId) -> bool:
        """Tell whether the agent has a peer with the keys that it has now."""
        card = self._cards.get(peer)
        return card is not None and self._agents.get(peer, ("", b""))[1] == card.agent

    def knows(self, peers: Iterable[RankId]) -> bool:
        """Tell whether all of these peers have an open session."""
        return all(peer in self._cards for peer in peers)

    def peers(self) -> list[RankId]:
        """Return the peers with an open session."""
        return list(self._cards)

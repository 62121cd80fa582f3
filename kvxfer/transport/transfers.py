"""The mover's dealings with the fabric: peers made reachable, transfers planned and posted, watched, and let go.

Kept apart from what they mean for a handoff, which is the mover's. Used by its thread alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvxfer.errors import LayoutMismatchError, TransportError
from kvxfer.layout.card import connected, shared, takers_of
from kvxfer.layout.ranks import uncovered
from kvxfer.protocol.actions import PostWrite
from kvxfer.protocol.messages import Written, pack_written
from kvxfer.transport.agent import Status
from kvxfer.transport.keeper import AgentKeeper
from kvxfer.transport.reach import NotNowError, Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.layout.card import RankCard
    from kvxfer.layout.route import Route
    from kvxfer.layout.runs import Descriptors
    from kvxfer.protocol.actions import PostRead
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.transport.agent import Agent

logger = logging.getLogger("kvxfer.mover")


@dataclass(slots=True, eq=False)
class InFlight:
    """A posted transfer of ours, and whom to tell when it is terminal. ``bytes``, ``descriptors``: its size.

    ``span``: its positions.
    """

    transfer: Any
    number: int
    handoff: HandoffId
    side: str
    peer: str
    bytes: int
    descriptors: int
    span: tuple[int, int] = (0, 0)


class Sources(NamedTuple):
    """The ranks of a source engine as one sink rank sees them: who brings something, and from whom nobody takes anything."""

    routes: dict[RankId, Route]
    idle: tuple[RankId, ...]


class Transfers:
    """Of one rank. ``make_agent`` makes the agent, at ``start`` and after each revocation."""

    def __init__(
        self, rank: RankId, card: RankCard, make_agent: Callable[[], Agent], clock: Callable[[], float]
    ) -> None:
        self.rank = rank
        self.card = card
        self.keeper = AgentKeeper(make_agent, card)
        self.in_flight: list[InFlight] = []
        self.reach = Reach()
        self._clock = clock
        self._routes: dict[tuple[RankId, bool], Route | None] = {}
        self._sources: dict[tuple[RankId, ...], Sources] = {}
        self._takers: dict[RankId, int] = {}

    @property
    def backend(self) -> str:
        """What carries the bytes."""
        return self.keeper.agent.backend

    # --- peers ------------------------------------------------------------------------------------------------------

    def up(self, rank: RankId, card: RankCard) -> bool:
        """Note that a session with a peer was opened. True when whoever comes next needs the agent's new metadata."""
        for old in self.reach.over(rank, self._clock()):
            self.reach.forget(old)
            self._forget(old.agent)
        self.reach.up(rank, card)
        self._forget_card(rank)
        return self.keeper.agent.meet(rank.agent)

    def _forget_card(self, rank: RankId) -> None:
        for inward in (False, True):
            self._routes.pop((rank, inward), None)
        self._sources.clear()
        self._takers.pop(rank, None)

    def approach(self, rank: RankId) -> None:
        """Connect a peer before a handoff needs it. May not return if its agent makes no progress: see ``approaches``."""
        began = self._clock()
        self.reach.of(rank, self.keeper.agent)
        logger.info("%s has connected with %s, in %.0f ms", self.rank, rank, (self._clock() - began) * 1e3)

    def is_connected(self, rank: RankId) -> bool:
        """Tell whether a peer is connected, with the keys that it has now."""
        return self.reach.is_loaded(rank)

    def lives(self, rank: RankId, asked: float) -> bool:
        """Note that a peer has answered what was said at ``asked``, and tell whether that proves that it lives."""
        return self.reach.heard(rank, asked)

    def lost(self, rank: RankId) -> None:
        """Note that a session ended. What is under way goes on: the peer may only be out of hearing."""
        self.reach.lost(rank, self._clock())
        self._forget_card(rank)

    def ended_process(self, rank: RankId) -> None:
        """Note that a peer's process has ended: what is under way to it has failed, and nothing of it is needed any more."""
        self.reach.lost(rank, self._clock())
        self._forget_card(rank)
        self.reach.forget(rank)
        self.keeper.agent.lost(rank.agent)
        self._forget(rank.agent)

    def interrupt(self, name: str) -> None:
        """Make a call about a peer whose process has ended return, if one is under way. From any thread; returns at once."""
        self.keeper.agent.interrupt(name)

    def disturbed(self) -> bool:
        """Tell, once, that some peer's connection broke. Until a peer has answered what was said later, it is not posted to."""
        if not self.keeper.agent.disturbed():
            return False
        self.reach.doubt(self._clock())
        return True

    def _forget(self, name: str) -> None:
        if self.reach.has(name) or any(one.peer == name for one in self.in_flight):
            return
        try:
            self.keeper.agent.remove_peer(name)
        except Exception as error:  # noqa: BLE001 - names are never used twice, so this one can stay
            logger.info("%s", error)

    def route(self, peer: RankId, *, inward: bool) -> Route:
        """Return the way from this rank to a peer with a session, or (``inward``) from it to this one. Raises TransportError."""
        found = self._route(peer, inward=inward)
        if found is None:
            raise TransportError(f"nothing that {peer} holds answers to what {self.rank} holds")
        return found

    def _route(self, peer: RankId, *, inward: bool) -> Route | None:
        if (peer, inward) not in self._routes:
            theirs = self.reach.card(peer)
            try:
                route = connected(theirs, self.card) if inward else connected(self.card, theirs)
            except LayoutMismatchError as error:
                raise TransportError(str(error)) from None
            self._routes[peer, inward] = route
        return self._routes[peer, inward]

    def sources(self, ranks: Sequence[RankId]) -> Sources:
        """Find which of an engine's ranks, all with sessions, bring what to this one. Raises TransportError unless it is all."""
        key = tuple(ranks)
        if key not in self._sources:
            routes = {rank: way for rank in key if (way := self._route(rank, inward=True)) is not None}
            lacking = uncovered(self.card.cache, [shared(self.reach.card(rank), self.card) for rank in routes])
            if lacking:
                raise TransportError(
                    f"no rank of {key[0].engine} brings {self.rank} {lacking[0]}: serve the same model on both"
                )
            others = [rank for rank in key if rank not in routes]
            idle = tuple(rank for rank in others if not takers_of(self.reach.card(rank), self.card))
            self._sources[key] = Sources(routes, idle)
        return self._sources[key]

    def takers(self, peer: RankId) -> int:
        """Count the ranks of a peer's engine that take something from this rank; 1 where its card does not say it."""
        if peer not in self._takers:
            try:
                self._takers[peer] = takers_of(self.card, self.reach.card(peer))
            except (LayoutMismatchError, TransportError):
                return 1  # a scheduler process speaks for all; what cannot be moved is refused when it is to be
        return self._takers[peer]

    # --- transfers --------------------------------------------------------------------------------------------------

    def post(self, action: PostWrite | PostRead) -> InFlight:
        """Plan and post a transfer. Raises whatever kept it from being posted whole."""
        write = isinstance(action, PostWrite)
        peer = action.to if isinstance(action, PostWrite) else action.frm
        name, _ = self.reach.of(peer, self.keeper.agent)
        route = self.route(peer, inward=not write)
        plan = route.plan(action.source_blocks, action.registered, action.span, action.start, action.end)
        local, remote = (plan.source, plan.sink) if write else (plan.sink, plan.source)
        transfer = self._post(action, local, remote, name)
        side = "source" if write else "sink"
        one = InFlight(
            transfer, action.transfer, action.handoff, side, name, plan.bytes, plan.count, (action.start, action.end)
        )
        self.in_flight.append(one)
        return one

    def _post(self, action: PostWrite | PostRead, local: Descriptors, remote: Descriptors, name: str) -> Any:
        agent, memory = self.keeper.agent, self.card.cache.memory
        if not isinstance(action, PostWrite):
            return agent.post("READ", local, remote, memory, name)
        written = Written(action.handoff, action.attempt, action.generation, self.rank.rank, action.start, action.end)
        if self._clock() >= action.until:
            raise NotNowError(f"the lease to write into {action.to} has ended")
        return agent.post("WRITE", local, remote, memory, name, pack_written(written))

    def observe(self) -> list[tuple[InFlight, bool]]:
        """Find the transfers that have become terminal, and whether they failed."""
        terminal = []
        for one in self.in_flight:
            if one.transfer is None:
                continue  # the agent is being closed
            try:
                status = self.keeper.agent.status(one.transfer)
            except Exception:
                logger.exception("the fabric could not be asked about a transfer; it is asked again")
                continue
            if status is not Status.PENDING:
                terminal.append((one, status is Status.FAILED))
        return terminal

    def ended(self, one: InFlight) -> None:
        """Let go of a terminal transfer."""
        self.in_flight.remove(one)
        self._release(one)
        self._forget(one.peer)

    def listen(self) -> list[tuple[str, bytes]]:
        """Take the notifications that have arrived, as (peer's agent name, message)."""
        try:
            return self.keeper.agent.notifications()
        except Exception:
            logger.warning("the fabric could not be asked for notifications, and is asked again", exc_info=True)
            return []

    def close_agent(self) -> list[tuple[str, int]]:
        """Close the agent: nothing that anybody has posted lands any more. Returns (side, number) of what this stopped of ours.

        NIXL's agent lives for as long as a handle of it is referred to: none must be, here or in the caller.
        """
        for one in self.in_flight:
            if one.transfer is not None:
                self._release(one)
                one.transfer = None
        self.keeper.close()
        stopped, self.in_flight = self.in_flight, []
        self.reach.reset()
        return [(one.side, one.number) for one in stopped]

    def _release(self, one: InFlight) -> None:
        try:
            self.keeper.agent.release(one.transfer)
        except Exception as error:  # noqa: BLE001 - nobody waits for it any more
            logger.info("%s", error)

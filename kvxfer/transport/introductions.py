"""Engines that this process stays connected with, whether or not a request needs them yet.

The configuration, or a router's introduction, names them. Each is called until it answers and again when it is lost, so that an
engine that starts later, or anew, is connected before its next request. What the configuration names is called for ever, what
was only introduced is given up after ``GIVEN_UP`` without an answer: its router introduces it again when it is back.

No sockets and no clock: the switchboard calls whom ``due`` names and says what became of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.dialer import Outcome

FIRST, LONGEST = 0.5, 30.0
"""Seconds between two calls: doubled from the first to the longest while nobody answers."""

GIVEN_UP = 600.0
"""Seconds without a connection after which an engine is forgotten that was only introduced."""

MOST = 1024
"""Engines kept: as many as there can be sessions."""


@dataclass(slots=True)
class _Kept:
    """``next_at`` is None while it is called, or connected (then it has ``ranks``)."""

    lasting: bool
    since: float
    next_at: float | None
    wait: float = FIRST
    ranks: tuple[RankId, ...] = ()
    told: bool = False


class Introductions:
    """Used by one thread."""

    def __init__(self) -> None:
        self._kept: dict[EngineAddress, _Kept] = {}

    def keep(self, address: EngineAddress, now: float, *, lasting: bool) -> None:
        """Begin to stay connected; of one that is kept already, only begin to be patient anew."""
        one = self._kept.get(address)
        if one is not None:
            one.since, one.wait, one.lasting = now, FIRST, one.lasting or lasting
            one.next_at = None if one.next_at is None else now
        elif len(self._kept) < MOST:
            self._kept[address] = _Kept(lasting, now, now)

    def forget(self, address: EngineAddress) -> None:
        """Call this one no more."""
        self._kept.pop(address, None)

    def due(self, now: float) -> list[EngineAddress]:
        """Return whom to call now; the caller says later what became of it."""
        for address, one in list(self._kept.items()):
            if not (one.lasting or one.ranks) and now - one.since >= GIVEN_UP:
                del self._kept[address]
        due = [address for address, one in self._kept.items() if one.next_at is not None and one.next_at <= now]
        for address in due:
            self._kept[address].next_at = None
        return due

    def next_at(self) -> float | None:
        """Return when somebody is due; None when nobody is."""
        return min((one.next_at for one in self._kept.values() if one.next_at is not None), default=None)

    def outcome(self, outcome: Outcome, now: float) -> bool:
        """Note how a call ended, and tell whether that is worth a line: not, when the same was said of the call before."""
        one = self._kept.get(outcome.address)
        if one is None:
            return True
        if outcome.reason is None:
            one.ranks, one.since, one.wait, one.next_at, one.told = outcome.ranks, now, FIRST, None, False
            return True
        one.next_at, one.wait = now + one.wait, min(2 * one.wait, LONGEST)
        told, one.told = one.told, True
        return not told

    def lost(self, rank: RankId, now: float) -> None:
        """Note that a session ended: its engine is called anew."""
        for one in self._kept.values():
            if rank in one.ranks:
                one.ranks, one.since, one.next_at = (), now, now + one.wait

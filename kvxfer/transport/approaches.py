"""NIXL connections made before the first handoff needs them, without anybody being caught in a call for it.

To connect a peer is one call of the mover's to NIXL, some 13 ms over tcp on one host, and it returns only when the *peer's*
agent makes progress (NIXL 1.4.1 LIBFABRIC; with a peer whose mover slept it had not returned after 20 s). An idle mover
sleeps. So a rank that wants to connect asks first; the other's mover, awake by that, answers that it makes progress from now
on; and only an answer that is fresh, to the last question, begins the call. The two hear of each other over the control
channel, and it is the mover that answers: one that is dead, stopped or hangs does not, and is not called. What remains is a
peer that ends or stops between its answer and the call, at most ``FRESH`` later; ``nixl_rescue`` is for that.

Who has promised progress to one peer begins no call of this kind to another, so that no two of them, and no circle, can wait
for each other. Nothing is begun while transfers are under way; a handoff that comes first connects its peer itself.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvxfer.errors import RemoteProtocolError, TransportError
from kvxfer.protocol.messages import Approach

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import Message

logger = logging.getLogger("kvxfer.mover")

PROMISE: Final = 10.0
"""Seconds for which a mover makes progress for a peer that has asked and does not say that it is done."""

FRESH: Final = 1.0
"""Seconds after its question after which an answer begins nothing any more: far below ``PROMISE``."""

RETRY: Final = 1.0
"""Seconds between two questions to one peer, and a little more, which differs between ranks."""

MOST: Final = 1024
"""Peers that are promised progress at a time; whoever else asks is not answered, and asks again."""

TRIES: Final = 20
"""Questions to one peer; then it is connected by its first handoff."""


@dataclass(slots=True)
class _Wanted:
    """A peer to be connected: when it is asked next, how often it has been, and when it was last."""

    ask_at: float
    tries: int = 0
    asked: float | None = None


class _Promise(NamedTuple):
    """Until when this rank makes progress for a peer, and the moment of the question, by the peer's clock."""

    until: float
    asked: float


class Connector(Protocol):
    """What makes the connections: the mover's ``Transfers``."""

    def approach(self, peer: RankId) -> None:
        """Connect a peer, or raise TransportError."""

    def is_connected(self, peer: RankId) -> bool:
        """Tell whether a peer is connected, with the keys that it has now."""

    def lives(self, peer: RankId, asked: float) -> bool:
        """Note that a peer has answered what was said at ``asked``, and tell whether that proves that it lives."""


class Approaches:
    """Of one mover, in its thread. ``counters`` has ``early_connections``.

    ``eager``: whether this rank connects whoever has a session; without it, it only answers.
    """

    def __init__(
        self,
        me: RankId,
        connector: Connector,
        send: Callable[[RankId, Message], None],
        counters: dict[str, int],
        *,
        eager: bool,
    ) -> None:
        self._me = me
        self._connector = connector
        self._send = send
        self._counters = counters
        self._eager = eager
        self._retry = RETRY + zlib.crc32(me.agent.encode()) % 1000 / 1000
        self._wanted: dict[RankId, _Wanted] = {}
        self._invited: dict[RankId, float] = {}  # with the moment of the question
        self._promised: dict[RankId, _Promise] = {}

    @property
    def _tables(self) -> tuple[dict[RankId, Any], ...]:
        return self._wanted, self._invited, self._promised

    def up(self, peer: RankId, now: float) -> None:
        """Note that a session with a peer was opened."""
        if self._eager and not self._connector.is_connected(peer):
            self._wanted[peer] = _Wanted(now)

    def lost(self, peer: RankId) -> None:
        """Note that it ended. What was promised is kept: the peer may not have noticed, and call."""
        self._wanted.pop(peer, None)
        self._invited.pop(peer, None)

    def heard(self, frm: RankId, message: Approach, now: float) -> None:
        """Handle what a peer says. Raises RemoteProtocolError when it answers what it was not asked."""
        match message.what:
            case "ask" if frm in self._promised or len(self._promised) < MOST:
                self._promised[frm] = _Promise(now + PROMISE, message.asked)
                self._send(frm, Approach("come", message.asked))
            case "come" if message.asked <= now:
                if self._connector.lives(frm, message.asked):
                    self._invited[frm] = message.asked
            case "done":
                promise = self._promised.get(frm)
                if promise is not None and promise.asked <= message.asked:  # else it is of an earlier question
                    del self._promised[frm]
            case "come":
                raise RemoteProtocolError(f"{frm} answers what {self._me} has not asked yet")

    def act(self, now: float, free: bool) -> None:
        """Do what is due. ``free``: nothing is under way, and the mover has time for a call."""
        self._promised = {peer: one for peer, one in self._promised.items() if one.until > now}
        invited, self._invited = self._invited, {}
        for peer, asked in invited.items():
            if free and self._may_call(peer, asked, now):
                self._call(peer)
                free = False  # one call a round: what has arrived meanwhile comes first
            self._send(peer, Approach("done", asked))
        if free:
            self._ask(now)

    def promised(self) -> bool:
        """Tell whether a peer waits for this rank's progress."""
        return bool(self._promised)

    def __len__(self) -> int:
        """Return the number of peers that are to be connected."""
        return len(self._wanted)

    def _may_call(self, peer: RankId, asked: float, now: float) -> bool:
        """Tell whether to connect a peer that has answered what it was asked at ``asked``."""
        wanted = self._wanted.get(peer)
        fresh = wanted is not None and wanted.asked == asked and now - asked <= FRESH
        return fresh and not self._connector.is_connected(peer) and not self._waited_for(peer)

    def _call(self, peer: RankId) -> None:
        try:
            self._connector.approach(peer)
        except TransportError as error:
            logger.info("%s could not connect with %s, and asks again: %s", self._me, peer, error)
        else:
            del self._wanted[peer]
            self._counters["early_connections"] += 1

    def _waited_for(self, peer: RankId) -> bool:
        """Tell whether somebody waits for us: of two that want each other, the one whose name comes first goes first."""
        return any(other != peer or self._me.agent > peer.agent for other in self._promised)

    def _ask(self, now: float) -> None:
        for peer, one in list(self._wanted.items()):
            if one.ask_at > now:
                continue
            if self._connector.is_connected(peer) or one.tries >= TRIES:
                del self._wanted[peer]
                continue
            one.ask_at, one.tries, one.asked = now + self._retry, one.tries + 1, now
            self._send(peer, Approach("ask", now))
            return  # one at a time, so that promises are short

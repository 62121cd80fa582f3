"""Peers: whether the other process lives, and until when something may be posted against its memory.

Theory of operation
-------------------
One ``Peer`` per session of the control channel. Both sides send heartbeats from their control threads, which nothing slow
shares, and each heartbeat does two things.

* It proves life. A peer that is silent for ``timeout`` seconds is lost: its session ends and its handoffs are failed by the
  machines above. Waiting is not death: a peer that only has nothing to say still beats.
* It carries a lease. A heartbeat echoes the stamp of the last message received, and grants the *echoed* side the right to
  post until ``stamp + lease``. The holder counts from the moment it *asked*, which was before the grantor received it, which
  was before the grantor noted down ``received + lease``. So, whatever the network delays, the holder's end is never later
  than the grantor's; the only assumption on clocks is that both run at nearly the same rate, and ``margin`` covers that.

Silence ends posting at the holder and is not proof of death at the grantor: ``granted_until`` tells the sink how long it has
to wait before the blocks of a lost peer's handoffs are safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvxfer.errors import LocalProtocolError
from kvxfer.protocol.fields import MAX_DURATION
from kvxfer.protocol.messages import Heartbeat


class State(Enum):
    """Of a session. It begins when one side's greeting has been accepted: until then, nothing hangs on the peer's life."""

    UP = "up"  # both beat
    LOST = "lost"  # silent for too long, replaced, or closed


class Event(Enum):
    """What moves a session from state to state."""

    SILENCE = "silence"  # nothing was heard for the time-out
    REPLACED = "replaced"  # another incarnation answers, the peer forgot us, or its process is known to have ended


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.UP: {Event.SILENCE: State.LOST, Event.REPLACED: State.LOST},
    State.LOST: {},
}


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of liveness, in seconds.

    ``interval`` between heartbeats, ``timeout`` of silence after which a peer is lost, ``lease`` that a heartbeat grants,
    ``margin`` that its holder takes off. A lease is renewed each interval, so it must be longer than two of them; and a peer
    must not be thought lost while its own heartbeats are still in time.
    """

    interval: float = 1.0
    timeout: float = 5.0
    lease: float = 4.0
    margin: float = 0.5

    def problems(self) -> list[str]:
        """Say what is wrong with these times; empty when nothing is."""
        found = []
        if not self.interval > 0:  # so that NaN is caught, too
            found.append(f"heartbeat_interval={self.interval:g} must be above 0")
        if not self.lease - self.margin > 2 * self.interval:
            found.append(
                f"post_lease={self.lease:g} less its margin of {self.margin:g} must be above twice "
                f"heartbeat_interval={self.interval:g}, or one lost heartbeat stops posting"
            )
        if not self.timeout > 2 * self.interval:
            found.append(f"peer_timeout={self.timeout:g} must be above twice heartbeat_interval={self.interval:g}")
        for name, seconds in (("post_lease", self.lease), ("peer_timeout", self.timeout)):
            if seconds > MAX_DURATION:
                found.append(f"{name}={seconds:g} must be {MAX_DURATION:,.0f} seconds at most")
        return found

    def clash(self, interval: float, timeout: float) -> str:
        """Say why a peer with these times cannot be lived with; empty when it can. Zeros are unknown."""
        for beats, waits in ((interval, self.timeout), (self.interval, timeout)):
            if beats and waits and waits <= 2 * beats:
                return (
                    f"one beats every {beats:g} s, the other gives up after {waits:g} s of silence; "
                    "set the same heartbeat_interval and peer_timeout on both"
                )
        return ""


class Peer:
    """One session's liveness and leases. Times are this process's monotonic clock, in seconds."""

    __slots__ = ("_heard_stamp", "granted_until", "last_heard", "last_sent", "may_post_until", "state", "timing")

    def __init__(self, timing: Timing, now: float) -> None:
        self.timing = timing
        self.state = State.UP
        self.last_heard = now
        self.last_sent = now
        self.may_post_until = 0.0
        """Until when this process may post against the peer's memory."""
        self.granted_until = 0.0
        """Until when the peer may believe that it may post against ours."""
        self._heard_stamp = 0.0

    def _step(self, event: Event) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"session: {event.value} while {self.state.value}") from None

    def hear(self, sent: float, echo: float, lease: float, now: float) -> None:
        """Note a message with stamps. ``echo`` 0.0 means that the peer has not heard us yet and grants nothing."""
        self.last_heard = now
        self._heard_stamp = max(self._heard_stamp, sent)
        if echo > 0.0:
            self.may_post_until = max(self.may_post_until, echo + lease - self.timing.margin)

    @property
    def heard(self) -> float:
        """The latest stamp of the peer's that has been heard."""
        return self._heard_stamp

    def touch(self, now: float) -> None:
        """Note any other message of the peer: it lives."""
        self.last_heard = now

    def beat(self, now: float) -> Heartbeat:
        """Make the next heartbeat, which grants the peer a lease if it has ever been heard."""
        self.last_sent = now
        if self._heard_stamp > 0.0:
            self.granted_until = now + self.timing.lease
        return Heartbeat(now, self._heard_stamp, self.timing.lease)

    def due(self, now: float) -> bool:
        """Tell whether a heartbeat is due."""
        return self.state is State.UP and now - self.last_sent >= self.timing.interval

    def silent(self, now: float) -> bool:
        """Note whether the peer has been silent for too long; true once, at the moment it is lost."""
        if self.state is State.LOST or now - self.last_heard < self.timing.timeout:
            return False
        self._step(Event.SILENCE)
        return True

    def replaced(self) -> bool:
        """Note that another incarnation answers, or that the peer forgot us; true once, at the moment it is lost."""
        if self.state is State.LOST:
            return False
        self._step(Event.REPLACED)
        return True

"""The life of a handoff at its sink: the table, and what it must guarantee.

Theory of operation
-------------------
The engine opens a handoff with the blocks that it allocated; from then on those blocks are not the engine's until the sink
says so, exactly once, with ``SinkFinished``. ``TRANSITIONS`` is the life of a handoff. The blocks go back only when nothing
can write into them any more. A source rank's *part* is safe in one of three ways, and a handoff ends when all its parts are:

* **Received**: what it contributes has arrived. In push what counts is what was written under the generation that the rank
  sealed, and a rank seals when every write is terminal; in pull a read that completed before the lease ended, by this
  process's clock, counted from the moment at which it asked, less a margin. Each rank has granted for itself, for its read.
* **Acknowledged**: the source says that nothing of the attempt is or will be in flight (``CancelAck``, ``Failed``). A source
  that was lost and comes back in time is asked for this, too.
* **Fenced**: the source's session is lost, and the time in which it may still have posted, plus the time that a posted write
  may need to drain, is over. Silence alone proves nothing: a process that was only asleep goes on with what it had begun. So
  this is enough only when its process is *known* to have ended. Otherwise the keys of this rank's memory are **revoked**, the
  last resort: no write that anybody has posted before can land after that, so every exposed handoff of this rank ends by it.

Before the registration has been sent, nothing can write, so a handoff in ``opening`` ends at once. In pull nobody writes
but this rank itself, so a handoff ends when *all* its own reads are terminal, or, when one failed, after the drain bound.

What this rank waits to have answered it says again every ``renew_after`` seconds: a connection that broke and was made anew
within the peer's time-out has lost what was under way, and no session has ended by it. Sources answer doubled words alike.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Of one handoff at its sink."""

    OPENING = "opening"  # the source's ranks are not connected; nothing has been sent
    REGISTERED = "registered"  # the source may write (push), or has been asked for its blocks (pull)
    READING = "reading"  # pull: a read of ours was posted; other ranks may not have granted theirs
    CANCELLING = "cancelling"  # nobody wants it any more; the source has not acknowledged, or a read is not terminal
    FENCING = "fencing"  # a source rank is lost, or a read failed: waiting until nothing of it can be in flight
    CLOSED = "closed"  # the engine has its blocks back


class Event(Enum):
    """What moves a handoff from state to state."""

    CONNECT = "connect"  # all source ranks are connected: the registration leaves
    READ = "read"  # pull: granted by a rank, its read is posted
    RENEW = "renew"  # not answered, or (pull) the grant is too old or grows old; said again
    COMPLETE = "complete"  # received
    FAIL = "fail"  # failed, and nothing is in flight
    CANCEL = "cancel"  # the engine aborted the request, or a source rank failed while others may still write
    LOSE = "lose"  # a source rank's session is lost, or a read of ours failed: parts of it may be under way
    FENCE = "fence"  # the fence has passed
    REVOKED = "revoked"  # this rank's keys are others than before: nothing proved that a lost source has ended


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.OPENING: {
        Event.CONNECT: State.REGISTERED,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CLOSED,
    },
    State.REGISTERED: {
        Event.READ: State.READING,
        Event.RENEW: State.REGISTERED,
        Event.COMPLETE: State.CLOSED,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CANCELLING,
        Event.LOSE: State.FENCING,
        Event.REVOKED: State.CLOSED,
    },
    State.READING: {
        Event.READ: State.READING,
        Event.RENEW: State.READING,
        Event.COMPLETE: State.CLOSED,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CANCELLING,
        Event.LOSE: State.FENCING,
    },
    State.CANCELLING: {
        Event.RENEW: State.CANCELLING,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.CANCELLING,
        Event.LOSE: State.FENCING,
        Event.REVOKED: State.CLOSED,
    },
    State.FENCING: {
        Event.RENEW: State.FENCING,
        Event.FAIL: State.CLOSED,
        Event.CANCEL: State.FENCING,
        Event.LOSE: State.FENCING,
        Event.FENCE: State.CLOSED,
        Event.REVOKED: State.CLOSED,
    },
    State.CLOSED: {},
}

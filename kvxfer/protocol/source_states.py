"""The life of a handoff at its source: the table, and what it must guarantee.

Theory of operation
-------------------
Two parties speak to a source, in any order: its own engine (the request started, positions became final behind a fence, it
was preempted, it finished) and the sink's rank (expect, register, cancel, release). ``TRANSITIONS`` holds what they may do
to a handoff; the data beside the state decides what is posted.

* A position is posted when it is final, registered, not yet posted under this generation, and this rank holds a lease to
  write into that peer's memory. Arriving late, a registration or a final chunk only changes the order.
* A preempted request loses its blocks: the generation rises, and everything is computed and posted anew. A position is
  posted again only when no earlier write to it is still in flight, since the fabric keeps no order between two writes.
* The engine keeps the blocks of a preempted request out of everybody's hands, under a *token*, until ``SourceQuiet`` says
  that no write of an earlier generation reads them any more. So what a write carries is always the request's own KV.
* What is valid is said last: after every write of the final generation is terminal, ``Seal`` names the generation. What was
  written under an earlier one is never sealed. For that, the driver must feed what the engine said before it feeds a
  completion that it observed earlier (see the mover).
* Of an engine with several ranks each one that takes its share here registers, and is granted, written to, sealed, cancelled
  and failed for itself: nothing that ends one touches another. How many there are follows from the two engines' rank cards;
  who has not come when its time is over is given up. A rank from which none of the engine takes anything is told so.
* The engine gets its blocks back exactly once (``SourceFinished``), when nothing is owed to any sink rank any more *and* no
  posted write reads from them. A write that has not become terminal for ``transfer_limit`` seconds is stopped by revoking this
  rank's keys: the last resort, since every other transfer of this rank fails with it.

A handoff that ended is remembered for a while, so that a late or doubled message is answered and does not start it again.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Of one handoff at its source."""

    EXPECTED = "expected"  # a sink announced itself; the engine has not seen the request
    COMPUTING = "computing"  # the engine knows the request; not every prompt position is final
    FINAL = "final"  # every prompt position is final; not every sink rank is served yet
    SERVED = "served"  # nothing is owed to any sink rank; waiting for the engine to finish and for writes to end
    CLOSED = "closed"  # over; kept for late messages


class Event(Enum):
    """What moves a handoff from state to state."""

    START = "start"  # engine: the request exists
    COMPLETE = "complete"  # engine: the last prompt position is final
    PREEMPT = "preempt"  # engine: the blocks are gone, all is computed again
    ABORT = "abort"  # engine: the request ended without its prompt being final
    SERVE = "serve"  # of each sink rank: everything written and sealed, or it wants nothing (release, cancel, its process died)
    EXPIRE = "expire"  # the other leg, or a rank of it, never came
    CLOSE = "close"  # the engine has finished, no write is in flight


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.EXPECTED: {
        Event.START: State.COMPUTING,
        Event.SERVE: State.SERVED,
        Event.EXPIRE: State.CLOSED,
    },
    State.COMPUTING: {
        Event.COMPLETE: State.FINAL,
        Event.PREEMPT: State.COMPUTING,
        Event.ABORT: State.SERVED,
        Event.SERVE: State.SERVED,
    },
    State.FINAL: {
        Event.PREEMPT: State.COMPUTING,
        Event.ABORT: State.SERVED,
        Event.SERVE: State.SERVED,
        Event.EXPIRE: State.SERVED,
    },
    State.SERVED: {
        Event.START: State.SERVED,
        Event.COMPLETE: State.SERVED,
        Event.PREEMPT: State.SERVED,
        Event.EXPIRE: State.CLOSED,
        Event.CLOSE: State.CLOSED,
    },
    State.CLOSED: {},
}

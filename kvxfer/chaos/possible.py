"""Which faults can strike a handoff in which state, and why the others cannot.

A fault strikes at a moment, and concerns handoffs: all that a process takes part in when it dies, all between two engines when
their network is cut, one when its notification is lost. What counts is the state of each at its source and at its sink at that
moment. The simulation must have struck every pair that is not listed here as impossible, and must never strike one that is.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kvxfer.protocol import sink, source

if TYPE_CHECKING:
    from collections.abc import Mapping

OPEN = tuple(
    f"{side}/{state.value}"
    for side, machine in (("source", source), ("sink", sink))
    for state in machine.State
    if state.value != "closed"
)
"""Of handoffs that have not ended. A source remembers those that have: ``source/closed``."""

CLOSED = ("source/closed",)

REUSE = (
    "reader/asked", "reader/opening", "reader/registered", "reader/reading", "reader/cancelling", "reader/fencing",
    "holder/pinned", "holder/expected", "holder/final",
)  # fmt: skip
"""Of reads for conversations: who asks and reads is prefill, who pins and holds is decode (see ``concern``)."""

PASSING = ("holder/served", "holder/closed")
"""Seen now and then, and not waited for: a reader that is gone before anything is held for it, and one whose read is over."""

_BOTH_LEGS = "decode's registration answers nothing before the prefill leg has come"
_NO_READ = "a read needs a grant, and that a prefill leg which the engine has finished"
_ONE_PREFILL = "this is the handoff's only prefill leg, and so the source has not begun"
_NO_DECODE = "this is the handoff's only decode leg, and so no sink has been opened"
_NOT_WRITTEN = "nothing is written before the prefill leg has come"
_NOT_REGISTERED = "nothing is written, or read, before the registration has been sent"
_UNHEARD = "no decode leg has come that could be expected"
_UNSERVED = (
    "without a decode leg there is nothing to serve; a source ends by its engine's finish or its deadline at once"
)

_NOT_A_LEG = dict.fromkeys(
    REUSE, "a client's leg, its id and its prompt are those of a handoff; nobody sends a read for a conversation"
)
_NOTHING_WRITTEN = dict.fromkeys(REUSE, "a conversation is read, and never written")
_RUNS = dict.fromkeys(REUSE, "who asks or reads for his prompt does not run")
_NOT_READ = {
    "reader/asked": "nothing is read before it was answered",
    "reader/opening": _NOT_REGISTERED,
    "reader/registered": "a read is posted in the moment in which it is granted",
    "holder/expected": "what has not been granted is not read",
    "holder/pinned": "a transfer is counted by the states of its two machines",
}
_NOT_POSTED = {
    **_NOT_READ,
    "reader/cancelling": "who wants nothing any more posts no read",
    "reader/fencing": "who has failed posts no read",
}
_OTHERS = dict.fromkeys(OPEN, "what is evicted is read for conversations, and handed over to nobody")
_THE_READERS_OWN = dict.fromkeys(REUSE, "its read is struck by abort_reader")
_THE_READERS = dict.fromkeys(OPEN, "its handoff is struck by abort_prefill")

_DURING_PREFILL = {
    "sink/reading": "a grant is given when the engine has finished the request: nothing is left to take away"
}
_AT_ITS_ONLY_DECODE_LEG = {
    **_NOT_A_LEG,
    **dict.fromkeys([state for state in OPEN if state.startswith("sink/")], _NO_DECODE),
    "source/expected": _UNHEARD,
    "source/served": _UNSERVED,
}
_AT_ITS_ONLY_PREFILL_LEG = {
    **_NOT_A_LEG,
    "source/computing": _ONE_PREFILL,
    "source/final": _ONE_PREFILL,
    "sink/reading": _NO_READ,
}
_WRITES = {
    **_NOTHING_WRITTEN,
    "source/expected": _NOT_WRITTEN,
    "sink/opening": _NOT_REGISTERED,
    "sink/reading": "a sink reads or is written to, never both",
}

IMPOSSIBLE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # processes, the network, devices: whatever the state of a handoff is
        "death": {},
        "restart": {},
        "restart_renamed": {},
        "usurped": {},
        "pause": {},
        "late_device": {},
        "late_mover": {},
        "cut": {},
        "stall": {},
        "lag": {},
        "break": {},
        "doubled_break": {},
        "slow_word": {},
        "replayed": {},
        # the fabric
        "lost_notification": _WRITES,
        "doubled_notification": _WRITES,
        "late_notification": _WRITES,
        "failed_post": {
            **_NOT_POSTED,
            "source/expected": _NOT_WRITTEN,
            "source/served": "nothing is posted for whom nothing is owed; a read's grant leaves the source final",
            "sink/opening": _NOT_REGISTERED,
        },
        "torn_transfer": {**_NOT_READ, "source/expected": _NOT_WRITTEN, "sink/opening": _NOT_REGISTERED},
        # engines and clients
        "forced_preemption": {
            **_DURING_PREFILL,
            **_RUNS,
            "source/expected": "a request that runs has been started; its mover hears that before it hears anything else",
        },
        "abort_prefill": {**_DURING_PREFILL, **_THE_READERS_OWN},
        "abort_decode": _THE_READERS_OWN,
        "eviction": _OTHERS,
        "abort_reader": _THE_READERS,
        "no_prefill_leg": _AT_ITS_ONLY_PREFILL_LEG,
        "late_prefill_leg": _AT_ITS_ONLY_PREFILL_LEG,
        "no_decode_leg": _AT_ITS_ONLY_DECODE_LEG,
        "late_decode_leg": _AT_ITS_ONLY_DECODE_LEG,
        "double_prefill_leg": _NOT_A_LEG,
        "double_decode_leg": _NOT_A_LEG,
        "repeated_id": _NOT_A_LEG,
        "retry_same_id": _NOT_A_LEG,
        "wrong_engine": _AT_ITS_ONLY_DECODE_LEG,
        "wrong_port": _AT_ITS_ONLY_DECODE_LEG,
        "longer_prompt": _AT_ITS_ONLY_DECODE_LEG,
        "shorter_prompt": _AT_ITS_ONLY_DECODE_LEG,
        "other_prompt": _AT_ITS_ONLY_DECODE_LEG,
    }
)
"""Fault → state → why it cannot be struck in that state."""

MEET_THE_CLOSED = frozenset(
    {
        "no_prefill_leg", "late_prefill_leg", "no_decode_leg", "late_decode_leg", "double_prefill_leg",
        "double_decode_leg", "repeated_id", "retry_same_id", "wrong_engine", "wrong_port", "longer_prompt", "shorter_prompt",
        "other_prompt",
    }
)  # fmt: skip
"""Faults that come to a handoff from outside, and may find that it has ended at its source."""


def possible(fault: str) -> list[str]:
    """Return the states in which a fault can strike."""
    states = OPEN + REUSE + (CLOSED if fault in MEET_THE_CLOSED else ())
    return [state for state in states if state not in IMPOSSIBLE[fault]]


POSSIBLE: Mapping[str, tuple[str, ...]] = MappingProxyType({fault: tuple(possible(fault)) for fault in IMPOSSIBLE})
"""Fault → the states in which it can strike."""

_OVERTAKEN = "is met where a registration overtakes a step that is late, and then for as long as that"
MAY_BE_MISSED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **{fault: {"holder/expected": _OVERTAKEN} for fault, states in POSSIBLE.items() if "holder/expected" in states},
        "torn_transfer": {"reader/fencing": "needs a reader of two sources, of whose reads one has failed"},
        "slow_word": {"holder/expected": _OVERTAKEN, "reader/fencing": "who has failed says one word more"},
    }
)
"""Pairs that can be struck, but so seldom that a run need not have."""

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

_DURING_PREFILL = {
    "sink/reading": "a grant is given when the engine has finished the request: nothing is left to take away"
}
_AT_ITS_ONLY_DECODE_LEG = {
    **dict.fromkeys([state for state in OPEN if state.startswith("sink/")], _NO_DECODE),
    "source/expected": _UNHEARD,
    "source/served": _UNSERVED,
}
_AT_ITS_ONLY_PREFILL_LEG = {
    "source/computing": _ONE_PREFILL,
    "source/final": _ONE_PREFILL,
    "sink/reading": _NO_READ,
}
_WRITES = {
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
            "source/expected": _NOT_WRITTEN,
            "source/served": "nothing is posted for whom nothing is owed; a read's grant leaves the source final",
            "sink/opening": _NOT_REGISTERED,
        },
        "torn_transfer": {"source/expected": _NOT_WRITTEN, "sink/opening": _NOT_REGISTERED},
        # engines and clients
        "forced_preemption": {
            **_DURING_PREFILL,
            "source/expected": "a request that runs has been started; its mover hears that before it hears anything else",
        },
        "abort_prefill": _DURING_PREFILL,
        "abort_decode": {},
        "no_prefill_leg": _AT_ITS_ONLY_PREFILL_LEG,
        "late_prefill_leg": _AT_ITS_ONLY_PREFILL_LEG,
        "no_decode_leg": _AT_ITS_ONLY_DECODE_LEG,
        "late_decode_leg": _AT_ITS_ONLY_DECODE_LEG,
        "double_prefill_leg": {},
        "double_decode_leg": {},
        "repeated_id": {},
        "retry_same_id": {},
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
    states = OPEN + (CLOSED if fault in MEET_THE_CLOSED else ())
    return [state for state in states if state not in IMPOSSIBLE[fault]]


POSSIBLE: Mapping[str, tuple[str, ...]] = MappingProxyType({fault: tuple(possible(fault)) for fault in IMPOSSIBLE})
"""Fault → the states in which it can strike."""

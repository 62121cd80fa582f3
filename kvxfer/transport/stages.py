"""The stages of a handoff as its record tells them: one list for the metrics, the spans, the router's waterfall and the tables.

A stage is there when both its moments are. Stages of one record may overlap: a chunk is transferred while the next is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.transport.records import HandoffRecord, Times

WHOLE: Final = "handoff"
"""From when this side first heard of it until the engine had its blocks back."""

STAGES: Final = {
    "sink": ("decode queue", "registration", "wait for KV", "transfer"),
    "source": ("registration wait", "transfer"),
}
"""Side → the stages of its records. In push a sink transfers nothing, in pull a source nothing."""


class Stage(NamedTuple):
    """One stage; moments in the record's monotonic seconds."""

    name: str
    begin: float
    end: float


def stages(record: HandoffRecord) -> Iterator[Stage]:
    """Yield the stages that a record has both moments of, none of them backwards."""
    for name in STAGES.get(record.side, ()):
        begin, end = _moments(name, record.times)
        if begin is not None and end is not None and end >= begin:
            yield Stage(name, begin, end)


def whole(record: HandoffRecord) -> Stage | None:
    """Return the handoff as one stage; None while it is open, or where its beginning is not known."""
    begin, end = record.times.expected, record.times.released
    return None if begin is None or end is None or end < begin else Stage(WHOLE, begin, end)


def _moments(name: str, times: Times) -> tuple[float | None, float | None]:
    match name:
        case "decode queue":
            return times.expected, times.allocated
        case "registration":
            return times.allocated, times.registered
        case "wait for KV":
            return times.registered, times.last_byte if times.last_byte is not None else times.notified
        case "registration wait":
            return times.expected, times.registered
        case _:
            return times.first_post, times.last_byte

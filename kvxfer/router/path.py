"""What the first token of one request waited for, one thing after the other: stages that add up to its TTFT, and what is left.

The waterfall shows everything that went on, side by side; this is the one chain through it that ends with the first token:
decode's leg, preceded in pull (and where decode was chosen late) by prefill's. Each stage has its length from one clock, the
router's or an engine's. Where the engines share the router's clock (one host), what lies between the router and an engine has
its own stages; else nobody can tell it, and it is in the rest, which is named as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvxfer.router.call import Trace
    from kvxfer.router.openai import Json
    from kvxfer.transport.records import HandoffRecord

REST: Final = "the rest"
"""What no clock tells: between the router and engines of other hosts, the front ends of these, decode's first token."""


def path(trace: Trace, records: Iterable[HandoffRecord]) -> list[Json]:
    """Return the stages in order, in seconds, the rest last; they add up to the TTFT. Nothing where there was no first token."""
    if trace.first is None:
        return []
    found = [(name, end - begin) for name, begin, end in _chain(trace, list(records))]
    rest = trace.first - trace.received - sum(seconds for _, seconds in found)
    return [{"stage": name, "seconds": round(seconds, 6)} for name, seconds in (*found, (REST, rest))]


def _chain(trace: Trace, records: list[HandoffRecord]) -> Iterator[tuple[str, float, float]]:
    sent = [one for one in (trace.prefill_sent, trace.decode_sent) if one is not None]
    if not sent:
        return
    yield "router queue", trace.received, min(sent)
    leg = trace.decode_sent
    if leg is None:
        return
    if trace.prefill_sent is not None and leg > trace.prefill_sent and trace.late:
        ended = trace.prefill_done if trace.prefill_done is not None and trace.prefill_done <= leg else leg
        yield "prefill", trace.prefill_sent, ended
        yield "between the legs", ended, leg
    else:
        yield "router, until decode's leg", min(sent), leg
    sinks = [record for record in records if record.side == "sink" and record.times.released is not None]
    if sinks:
        yield from _decode(trace, max(sinks, key=lambda one: one.times.released or 0.0), records)


def _decode(trace: Trace, sink: HandoffRecord, records: list[HandoffRecord]) -> Iterator[tuple[str, float, float]]:
    """Yield decode's leg: up to the moment at which its engine knew that all KV is there, by the rank that was last."""
    times, leg, first = sink.times, trace.decode_sent, trace.first
    assert leg is not None
    assert first is not None
    heard, ended = times.expected, times.released
    if heard is None or ended is None:
        return
    shared = leg <= heard <= ended <= first  # of two hosts, clocks that agree to within a request would be a marvel
    if shared:
        yield "decode's front end", leg, heard
    at = heard
    for name, until in (
        ("decode queue", times.allocated),
        ("registration", times.registered),
        ("prefill computes", _computed(records) if shared else None),
        ("wait for KV", times.last_byte if times.last_byte is not None else times.notified),
        ("report", ended),
    ):
        if until is not None and until >= at:
            yield name, at, until
            at = until
    if shared:
        yield "decode's first token", ended, first


def _computed(records: list[HandoffRecord]) -> float | None:
    """When the last chunk of the prompt was final, on the last of prefill's ranks."""
    return max(
        (one.times.chunks_final[-1] for one in records if one.side == "source" and one.times.chunks_final), default=None
    )

"""What ``kvxfer bench engine`` makes of its readings: sums, means, and what is held against upstream's. Pure.

Times are microseconds of processor time in the engine's threads, decode's or prefill's: the scheduler's (engine core) and the
worker's, added up. A *request's* time is all that was counted from before it was sent until its engine made no more steps; a
*step's* is that, over the steps that the engine made meanwhile. Pickled metadata is shown, and in no sum.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.bench.calls import METADATA, SCHEDULER, STEP, THREAD, WORKER, Tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvxfer.bench.calls import Reading

SIDES: Final = ("decode", "prefill")
OF_PULL, OF_PUSH_STEP, GROWTH, SLOWDOWN, RECORDED = 0.2, 0.6, 1.3, 1.1, 0.01
"""The bounds: a request's time by upstream pull's, a step's by upstream push's, the longest prompt's by the shortest's, the
median time between tokens (or of a step of prefill) with handoffs by that without, and what recording takes of a request's time
in the engine's threads by all that they do for it."""

RECORDING: Final = "recording"
"""Behind a connector's name (``push:recording``): with ``records_dir`` set."""

_SMALL: Final = 0.01
_STATS: Final = "get_kv_connector_stats"


def side(requests: Sequence[Reading]) -> dict[str, Any]:
    """Sum up one engine's part in some requests: one reading for each, of what it counted for that request alone."""
    requests = [one.settled(requests) for one in requests]
    totals = [one.microseconds(but=(METADATA,)) for one in requests]
    steps = sum(one.calls(SCHEDULER, STEP) for one in requests)
    count = len(requests)
    return {
        "requests": count,
        "us_per_request": spread(totals),
        "us_per_step": round(sum(totals) / steps, 2) if steps else None,
        "steps_per_request": round(steps / count, 1),
        "scheduler_us_per_request": _mean(one.microseconds(SCHEDULER, but=(METADATA,)) for one in requests),
        "worker_us_per_request": _mean(one.microseconds(WORKER) for one in requests),
        "metadata_us_per_request": _mean(
            one.microseconds() - one.microseconds(but=(METADATA,)) for one in requests
        ),
        "threads_us_per_request": _mean(one.threads() for one in requests),
        "calls": list(_calls(requests)),
    }  # fmt: skip


def _calls(requests: Sequence[Reading]) -> Iterator[dict[str, Any]]:
    """Each call's share, the most expensive first."""
    sums: dict[tuple[str, str], Tally] = {}
    for one in requests:
        for key, tally in one.tallies.items():
            if key[1] == THREAD:
                continue
            sums[key] = sums.get(key, Tally()) + tally
    for (part, call), tally in sorted(sums.items(), key=lambda item: -item[1].ns):
        yield {
            "part": part,
            "call": call,
            "calls_per_request": round(tally.calls / len(requests), 1),
            "us_per_call": round(tally.ns / 1e3 / tally.calls, 2),
            "us_per_request": round(tally.ns / 1e3 / len(requests), 1),
        }


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    """Mean, median and 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    found = {"mean": statistics.fmean(values), "median": statistics.median(values), "p90": tenths[8]}
    return {name: round(value, digits) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bound: whose, what, the value (a ratio), and the most that it may be."""

    connector: str
    text: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the value keeps within the bound."""
        return self.value <= self.limit


def verdicts(connectors: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Hold every connector that is not upstream's against the bounds; those against a connector that did not run are left out."""
    found = []
    for name, one in connectors.items():
        if not name.startswith("upstream-"):
            found += [Verdict(name, *bound) for bound in _bounds(one, connectors)]
            plain, _, option = name.partition(":")
            if option == RECORDING and plain in connectors:
                found += [Verdict(name, *bound) for bound in _recording(one, connectors[plain])]
    return found


def _recording(one: Mapping[str, Any], plain: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """What is always recorded, for the metrics, and what the setting adds: of medians, since a mean shows more of the machine."""
    for where in SIDES:
        always = sum(call["us_per_request"] for call in plain[where]["calls"] if call["call"] == _STATS)
        recorded, not_recorded = (of[where]["us_per_request"]["median"] for of in (one, plain))
        added = _ratio(always + max(0.0, recorded - not_recorded), plain[where]["threads_us_per_request"])
        yield f"{where}, recording, by all that the engine's threads do", added, RECORDED


def _bounds(one: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    if (pull := others.get("upstream-pull")) is not None:
        for where in SIDES:
            ours, theirs = (of[where]["us_per_request"]["mean"] for of in (one, pull))
            yield f"{where}, a request, by upstream pull's", _ratio(ours, theirs), OF_PULL
    if (push := others.get("upstream-push")) is not None:
        # On decode alone: prefill makes a handful of steps a request, the fewer the sooner its blocks are free.
        ours, theirs = (of["decode"]["us_per_step"] for of in (one, push))
        yield "decode, a step, by upstream push's", _ratio(ours, theirs), OF_PUSH_STEP
        served = [of["served"]["decode"]["us_per_step"] for of in (one, push) if of["served"]]
        if len(served) > 1:
            yield "decode, a step of long answers, by upstream push's", _ratio(*served), OF_PUSH_STEP
    shortest, longest = min(one["lengths"], key=int, default=0), max(one["lengths"], key=int, default=0)
    if shortest != longest:
        by_length = [one["lengths"][length]["decode"]["us_per_request"]["mean"] for length in (shortest, longest)]
        text = f"decode, a request of {int(longest):,} tokens by one of {int(shortest):,}"
        yield text, _ratio(by_length[1], by_length[0]), GROWTH
    windows = one["windows"]
    for figure, text in (("itl_ms", "decode, between tokens"), ("prefill_ms", "prefill, a step")):
        if not all(figure in windows[name] for name in ("handoffs", "computing")):
            continue
        with_, without = (windows[name][figure]["median"] for name in ("handoffs", "computing"))
        yield f"{text}, with handoffs by without", _ratio(with_, without), SLOWDOWN


def _ratio(value: float, by: float) -> float:
    """Three digits behind the point, and two of a value that would show none there."""
    ratio = value / by if by else float("inf")
    return round(ratio, 3) if ratio >= _SMALL else float(f"{ratio:.1e}")


def _mean(values: Iterator[float]) -> float:
    return round(statistics.fmean(values), 1)


def as_json(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the bounds as JSON takes them."""
    return [{**asdict(one), "holds": one.holds} for one in found]

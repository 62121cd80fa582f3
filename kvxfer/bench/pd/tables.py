"""What a sitting comes to: the results file's body, and its tables. Pure, but for the printing.

Milliseconds. *Exposed*: the median TTFT through the pair less that of one engine alone at the same point, of the same sitting,
with as many tokens a step where an arm of one engine alone has that, too. *Fence to report*: see ``window.Transfer``.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.table import Table

from kvxfer.bench.pd import verify
from kvxfer.bench.pd.arms import ALONE
from kvxfer.bench.results import spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from kvxfer.bench.pd.arms import Arm
    from kvxfer.bench.pd.points import Point
    from kvxfer.bench.pd.sitting import Findings, Settings, Window
    from kvxfer.bench.pd.window import Sample

_COLUMNS: Final = (
    "arm", "n", "TTFT p50", "p90", "p99", "exposed", "TPOT p50", "ITL p50", "ITL p99", "fence → report", "p90", "descriptors"
)  # fmt: skip


def body(arms: Sequence[Arm], settings: Settings, findings: Findings) -> dict[str, Any]:
    """Return the results, all samples included."""
    points = [
        _point(point, arms, found)
        for point in (*settings.unloaded, *settings.loaded)
        if (found := findings.windows.get(point.name))
    ]
    verified = _verified(arms, settings, findings)
    return {
        "arms": {arm.label: _arm(arm, findings) for arm in arms},
        "points": points,
        "verified": verified,
        "skipped": findings.skipped,
        "complaints": [*complaints(points, arms), *(verify.complaints(verified) if verified else [])],
    }


def complaints(points: Iterable[Mapping[str, Any]], arms: Sequence[Arm]) -> list[str]:
    """Say what makes figures worthless: failed requests of ours, hits of a prefix cache that is off or should find nothing."""
    ours = {arm.label for arm in arms if arm.name.ours or arm.name.connector == ALONE}
    found = []
    for point in points:
        for label, one in point["arms"].items():
            if one["failed"] and label in ours:
                found.append(f"{point['name']}: {one['failed']} requests of {label} failed: {one['errors'][0]}")
            if one["prefix_hits"]:
                found.append(
                    f"{point['name']}: a prefix cache of {label} had {one['prefix_hits']} tokens that nobody sent before"
                )
    return found


def _verified(arms: Sequence[Arm], settings: Settings, findings: Findings) -> dict[str, Any] | None:
    reference = next((arm.label for arm in arms if arm.name.connector == ALONE), None)
    if settings.verification is None or reference not in findings.answers:
        return None
    others = {label: one for label, one in findings.answers.items() if label != reference}
    return verify.judge(settings.verification, findings.answers[reference], others)


def _arm(arm: Arm, findings: Findings) -> dict[str, Any]:
    return {
        "connector": arm.name.connector,
        "mode": arm.name.mode,
        "max_num_batched_tokens": arm.engines[0].spec.max_num_batched_tokens if arm.started_here else None,
        "settings": dict(arm.name.settings),
        "layouts": findings.layouts.get(arm.label, []),
        "commands": [list(engine.server.command) for engine in arm.engines],
        "start_seconds": findings.start_seconds.get(arm.label, []),
        "dropped": findings.dropped.get(arm.label, ""),
    }


def _point(point: Point, arms: Sequence[Arm], found: Mapping[str, Sequence[Window]]) -> dict[str, Any]:
    by_arm = {arm.label: _summed(found[arm.label]) for arm in arms if arm.label in found}
    for arm in arms:
        base = baseline(arm, arms)
        if arm.label in by_arm and base in by_arm and arm.name.connector != ALONE:
            by_arm[arm.label]["exposed_ms"] = _exposed(found[arm.label], found[base])
            by_arm[arm.label]["exposed_over"] = base
    return {
        "name": point.name,
        "input": point.input,
        "output": point.output,
        "qps": point.qps,
        "trace": point.trace,
        "requests": point.requests,
        "arms": by_arm,
    }


def baseline(arm: Arm, arms: Sequence[Arm]) -> str:
    """Return the arm of one engine alone that an arm is compared with: with its tokens a step, else the first; or nothing."""
    alone = [one for one in arms if one.name.connector == ALONE]
    alike = [one for one in alone if one.name.budget == arm.name.budget]
    return next((one.label for one in (*alike, *alone)), "")


def _summed(windows: Sequence[Window]) -> dict[str, Any]:
    samples = [sample for window in windows for sample in window.samples]
    good = [sample for sample in samples if not sample.error]
    transfers = [sample.transfer for sample in good if sample.transfer is not None]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": sorted({sample.error for sample in samples if sample.error}),
        "ttft_ms": _ms(sample.ttft for sample in good),
        "tpot_ms": _ms(sample.tpot for sample in good),
        "itl_ms": _ms(gap for sample in good for gap in sample.gaps),
        "prefill_leg_ms": _ms(sample.prefill for sample in good),
        "stages_ms": stages_of(good),
        "ttft_ms_by_window": [_ms(sample.ttft for sample in window.samples) for window in windows],
        "prefix_hits": sum(window.prefix_hits for window in windows),
        "counted": _totals(windows),
        "handoffs": {
            "recorded": len(transfers),
            "outcomes": sorted({one.outcome for one in transfers}),
            "backends": sorted({one.backend for one in transfers}),
            "bytes": sum(one.bytes for one in transfers),
            "descriptors": spread([one.descriptors for one in transfers], 0),
            "fence_to_report_ms": _ms(one.fence_to_report for one in transfers),
            "moving_ms": _ms(one.moving for one in transfers),
            "early": spread([one.early for one in transfers if one.early is not None], 4),
        }
        if transfers
        else None,
        "samples": [msgspec.to_builtins(_rounded(sample)) for sample in samples],
    }


def stages_of(good: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the stages of the request with the median TTFT, and of the one at the 99th percentile."""
    told = sorted((sample for sample in good if sample.ttft is not None), key=lambda sample: sample.ttft or 0.0)
    if not told:
        return {}
    which = {"median": told[(len(told) - 1) // 2], "p99": told[round(0.99 * (len(told) - 1))]}
    return {name: {stage: round(1e3 * s, 3) for stage, s in one.stages.items()} for name, one in which.items()}


def _ms(seconds: Iterable[float | None]) -> dict[str, float | int] | None:
    return spread([one * 1e3 for one in seconds if one is not None])


def _rounded(sample: Sample) -> Sample:
    """Return a sample whose gaps are in microseconds' precision: there are a hundred of them in each."""
    return msgspec.structs.replace(sample, gaps=[round(gap, 6) for gap in sample.gaps])


def _totals(windows: Sequence[Window]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for window in windows:
        for name, value in window.counted.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def _exposed(ours: Sequence[Window], alone: Sequence[Window]) -> dict[str, float] | None:
    """Return the difference of the medians, and how requests of the same prompt differ: the middle half of the differences."""
    mine, theirs = (
        {s.number: s.ttft for window in windows for s in window.samples if s.ttft is not None and not s.error}
        for windows in (ours, alone)
    )
    if not mine or not theirs:
        return None
    found = {"of_medians": round(1e3 * (statistics.median(mine.values()) - statistics.median(theirs.values())), 3)}
    paired = spread([1e3 * (mine[number] - theirs[number]) for number in mine.keys() & theirs.keys()])
    return found | {f"paired_{name}": value for name, value in (paired or {}).items()}


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print a table for each point, then what was compared and what must be known of it."""
    for point in result["points"]:
        load = "one after another" if point["qps"] is None else f"{point['qps']:g} requests a second"
        kind = "" if point["trace"] == "uniform" else f"{point['trace']}, up to "
        table = Table(title=f"{kind}{point['input']:,} tokens, {load}; milliseconds", title_justify="left")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
        for label, one in point["arms"].items():
            table.add_row(*_cells(label, one))
        console.print(table)
    if result["verified"]:
        for label, one in result["verified"]["arms"].items():
            for way, told in one.items():
                console.print(
                    f"{label}, {way.replace('_', ' ')}: {told['identical']} of {told['prompts']} answers identical"
                )
    for line in result["skipped"]:
        console.print(f"left out, there was no time: {line}")
    for label, arm in result["arms"].items():
        if arm["dropped"]:
            console.print(f"{label} left the sitting: {arm['dropped']}", markup=False, highlight=False)


def _cells(label: str, one: Mapping[str, Any]) -> Iterable[str]:
    handoffs = one["handoffs"] or {}
    exposed = one.get("exposed_ms")
    yield label
    yield f"{one['requests'] - one['failed']}" + (f" ({one['failed']} failed)" if one["failed"] else "")
    yield from (_cell(one["ttft_ms"], key) for key in ("median", "p90", "p99"))
    yield "–" if exposed is None else f"{exposed['of_medians']:,.1f}"
    yield _cell(one["tpot_ms"], "median", 2)
    yield from (_cell(one["itl_ms"], key, 2) for key in ("median", "p99"))
    yield from (_cell(handoffs.get("fence_to_report_ms"), key) for key in ("median", "p90"))
    yield _cell(handoffs.get("descriptors"), "median", 0)


def _cell(spread_of: Mapping[str, float] | None, key: str, digits: int = 1) -> str:
    return "–" if spread_of is None else f"{spread_of[key]:,.{digits}f}"

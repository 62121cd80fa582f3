"""``kvxfer report``: one HTML page of results files, with all that it needs in it; readable without a network, and printable.

Shown are the files' own numbers, rounded for reading; each cell carries the number as it stands in the file (``data-value``).
Arms that several files have at one point stand beside each other, told apart by the file's name. What such figures do not
show is on the page as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from kvxfer.bench import charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

METRICS: Final = (
    ("TTFT p50", "ttft_ms", "median", 1),
    ("p90", "ttft_ms", "p90", 1),
    ("p99", "ttft_ms", "p99", 1),
    ("exposed", "exposed_ms", "of_medians", 1),
    ("TPOT p50", "tpot_ms", "median", 2),
    ("p90", "tpot_ms", "p90", 2),
    ("ITL p50", "itl_ms", "median", 2),
    ("p99", "itl_ms", "p99", 2),
    ("fence → report p50", "handoffs.fence_to_report_ms", "median", 1),
    ("p90", "handoffs.fence_to_report_ms", "p90", 1),
)
"""Columns of a point's table: what it is called, where it is in the file, and digits behind the point. Milliseconds."""

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem;border-bottom:1px solid #ccc}h3{font-size:1rem;margin-bottom:.3rem}
table{border-collapse:collapse;margin:.5rem 0 1rem;font-variant-numeric:tabular-nums;font-size:.85rem}
th,td{padding:.2rem .55rem;text-align:right;border-bottom:1px solid #e4e4e4}th{font-weight:600}
th:first-child,td:first-child{text-align:left}.scroll{overflow-x:auto}svg{max-width:100%;height:auto}
.legend{margin:.1rem 0 1rem;font-size:.8rem}.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}.note{color:#555;font-size:.9rem}
.wrong{color:#a40000}@media print{body{margin:0;max-width:none}h2{break-after:avoid}svg,table{break-inside:avoid}}
"""

_NOT_SHOWN: Final = (
    "One prefill and one decode engine. More engines, unequal ones, and a router's choices among them are not in these figures.",
    "Prompts are random tokens that nobody sent before: what prefix caches do for prompts that begin alike is not shown.",
    "Arrivals are a Poisson process of one rate. Bursts, and what happens above the rate that a pair can bear, are not shown.",
    "A waterfall shows one request: the one with the median, or the 99th percentile, of the times to the first token.",
)


@dataclass(frozen=True, slots=True)
class Source:
    """One results file: the name by which it is told from others, and what is in it."""

    name: str
    results: Mapping[str, Any]


def page(sources: Sequence[Source], title: str = "kvxfer: results") -> str:
    """Return the page. Files of ``pd``, ``sweep`` and ``multiturn`` are shown in full, of the others head alone."""
    measured = [source for source in sources if "points" in source.results]
    conversations = [source for source in sources if "turns" in source.results]
    body = [f"<h1>{escape(title)}</h1>", _heads(sources)]
    points = merged(measured)
    if points:
        body += ["<h2>Over the load</h2>", *_over_load(points)]
    for name, arms in points.items():
        body.append(_point(name, arms))
    for source in measured:
        body.append(_verified(source))
    if conversations:
        body.append(_conversations(conversations))
    body.append(_complaints(sources))
    shown = "".join(f"<li>{escape(text)}</li>" for text in _not_shown(sources))
    body.append(f"<h2>What this page does not show</h2><ul>{shown}</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body>{''.join(filter(None, body))}</body></html>\n"
    )


def merged(sources: Sequence[Source]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Put the files' points together: by name, then by arm; each arm with its point's description under ``point``."""
    counts: dict[tuple[str, str], int] = {}
    for source in sources:
        for point in source.results["points"]:
            for label in point["arms"]:
                counts[point["name"], label] = counts.get((point["name"], label), 0) + 1
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for source in sources:
        for point in source.results["points"]:
            about = {key: value for key, value in point.items() if key != "arms"}
            for label, arm in point["arms"].items():
                shown = label if counts[point["name"], label] == 1 else f"{label} ({source.name})"
                found.setdefault(point["name"], {})[shown] = {**arm, "point": about}
    return dict(sorted(found.items(), key=lambda one: _order(next(iter(one[1].values()))["point"])))


def _order(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return point["qps"] is not None, point["trace"], point["input"], point["output"], point["qps"] or 0.0


def value_of(arm: Mapping[str, Any], path: str, key: str) -> float | None:
    """Return a number of an arm by its place, ``handoffs.fence_to_report_ms`` say; None where it is missing."""
    here: Any = arm
    for part in path.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here.get(key) if isinstance(here, dict) else None


def _heads(sources: Iterable[Source]) -> str:
    rows = []
    for source in sources:
        head = source.results
        machine = head["machine"]
        accelerators = ", ".join(machine.get("accelerators", ()))
        cells = (
            source.name, head["kind"], head["made"], ", ".join(f"{name} {version}" for name, version in head["versions"].items()),
            f"{machine['cpu']}, {machine['cores']} cores" + (f"; {accelerators}" if accelerators else ""),
        )  # fmt: skip
        rows.append("".join(f"<td>{escape(str(cell))}</td>" for cell in cells))
    names = "".join(f"<th>{name}</th>" for name in ("file", "bench", "made", "versions", "machine"))
    return f'<div class="scroll"><table><tr>{names}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _point(name: str, arms: Mapping[str, Mapping[str, Any]]) -> str:
    point = next(iter(arms.values()))["point"]
    rate = "one after another" if point["qps"] is None else f"{point['qps']:g} requests a second"
    up_to = "up to " if point["trace"] != "uniform" else ""
    heading = f"{up_to}{point['input']:,} tokens, answers of {up_to}{point['output']:,}, {rate}"
    columns = [metric for metric in METRICS if any(value_of(arm, *metric[1:3]) is not None for arm in arms.values())]
    head = "".join(
        f"<th>{escape(text)}</th>" for text in ("arm", "requests", "failed", *(metric[0] for metric in columns))
    )
    rows = []
    for label, arm in arms.items():
        cells = [_cell(arm["requests"], 0), _cell(arm["failed"], 0)]
        cells += [_cell(value_of(arm, path, key), digits, f"{path}.{key}") for _, path, key, digits in columns]
        rows.append(
            f'<tr data-point="{escape(name)}" data-arm="{escape(label)}"><td>{escape(label)}</td>{"".join(cells)}</tr>'
        )
    table = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f"<h2>{escape(heading)}</h2>{table}{_waterfall(arms)}"


def _cell(value: float | None, digits: int, where: str = "") -> str:
    if value is None:
        return "<td>–</td>"
    return f'<td data-value="{value}" data-where="{escape(where)}">{value:,.{digits}f}</td>'


def _waterfall(arms: Mapping[str, Mapping[str, Any]]) -> str:
    rows = {
        f"{label}, {which}": stages
        for label, arm in arms.items()
        for which, stages in (arm.get("stages_ms") or {}).items()
    }
    return charts.stacked("What the first token waited for", "ms", rows)


def _over_load(points: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterable[str]:
    """Draw the time to the first token, and between tokens, over the rate for each length, and over the length without a load."""
    groups: dict[tuple[str, int, int], list[tuple[float, Mapping[str, Mapping[str, Any]]]]] = {}
    unloaded: list[tuple[float, Mapping[str, Mapping[str, Any]]]] = []
    for arms in points.values():
        point = next(iter(arms.values()))["point"]
        if point["qps"] is None:
            unloaded.append((point["input"], arms))
        else:
            groups.setdefault((point["trace"], point["input"], point["output"]), []).append((point["qps"], arms))
    for text, path in (("Time to the first token", "ttft_ms"), ("Time per token after it", "tpot_ms")):
        if unloaded:
            yield _lines(f"{text}, one request after another, median", "tokens of the prompt", path, unloaded)
        for (_, length, _), several in groups.items():
            yield _lines(f"{text}, {length:,} tokens, median", "requests a second", path, several)


def _lines(title: str, across: str, path: str, several: Sequence[tuple[float, Mapping[str, Mapping[str, Any]]]]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for x, arms in several:
        for label, arm in arms.items():
            if (value := value_of(arm, path, "median")) is not None:
                series.setdefault(label, []).append((x, value))
    return charts.lines(title, across, "ms", series)


def _verified(source: Source) -> str:
    verified = source.results.get("verified")
    if not verified:
        return ""
    rows = [
        f"<tr><td>{escape(label)}</td><td>{escape(way.replace('_', ' '))}</td>{_cell(one['prompts'], 0)}"
        f"{_cell(one['identical'], 0)}</tr>"
        for label, arm in verified["arms"].items()
        for way, one in arm.items()
    ]
    reference = verified["reference"]
    return (
        f"<h2>Tokens compared with one engine alone ({escape(source.name)})</h2><table><tr><th>arm</th><th>prompts</th>"
        f"<th>compared</th><th>identical</th></tr>{''.join(rows)}</table><p class='note'>One early token changed changes "
        f"{reference['changed_by_an_early_token']} of {len(reference['lengths'])} of that engine's answers.</p>"
    )


def _conversations(sources: Sequence[Source]) -> str:
    """Show multi-turn legs: the time to the first token by prompt length, and what prefill did."""
    series: dict[str, list[tuple[float, float]]] = {}
    bars: dict[str, dict[str, float]] = {}
    rows = []
    for source in sources:
        leg = source.results["settings"]["leg"]
        label = leg if sum(one.results["settings"]["leg"] == leg for one in sources) == 1 else f"{leg} ({source.name})"
        for turn in source.results["turns"]:
            if turn["ttft_ms"] is None:
                continue
            series.setdefault(f"reuse {label}", []).append((turn["prompt_tokens"]["median"], turn["ttft_ms"]["median"]))
            bars[f"{label}, turn {turn['turn']}"] = turn["prefill_ms"]
            cells = [
                _cell(turn["prompt_tokens"]["median"], 0),
                _cell(turn["ttft_ms"]["median"], 1),
                _cell(turn["ttft_ms"]["p90"], 1),
            ]
            cells += [_cell(turn["tokens_computed"], 0), _cell(turn["tokens_taken_back"], 0)]
            rows.append(f"<tr><td>{escape(label)}</td>{_cell(turn['turn'], 0)}{''.join(cells)}</tr>")
    head = "".join(
        f"<th>{text}</th>"
        for text in ("reuse", "turn", "tokens of the prompt", "TTFT p50", "p90", "tokens computed", "tokens taken back")
    )
    return (
        "<h2>Conversations: reuse off and on</h2>"
        + charts.lines("Time to the first token, median", "tokens of the prompt", "ms", series)
        + charts.stacked("Prefill's time in a turn", "ms", bars)
        + f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _complaints(sources: Iterable[Source]) -> str:
    told = [(source.name, text) for source in sources for text in source.results.get("complaints", ())]
    told += [
        (source.name, f"left out, for want of time: {text}")
        for source in sources
        for text in source.results.get("skipped", ())
    ]
    if not told:
        return ""
    items = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in told)
    return f'<h2>What went wrong</h2><ul class="wrong">{items}</ul>'


def _not_shown(sources: Iterable[Source]) -> Iterable[str]:
    caching = {source.results["settings"].get("prefix_caching") for source in sources}
    if False in caching:
        yield "Prefix caching was off" + (" in some of the files." if True in caching else ".")
    if any(source.results["settings"].get("model") == "qwen3-8b" for source in sources):
        yield "Weights were dummies in a real model's shape: times mean something, answers do not."
    yield from _NOT_SHOWN

"""What ``kvxfer bench stream`` makes of its handoffs: medians, the bounds, a table. Pure, but for the printing."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from kvxfer.bench.engines import UPSTREAM_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

EARLY: Final = 0.8
"""The least share of a prompt's bytes that has completed before its last chunk's fence, in every handoff."""
OF_UPSTREAM: Final = 0.5
"""What the median tail must stay below, by upstream push's."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One handoff. Times in seconds, sizes in bytes; what only a handoff record tells is None without one.

    ``steps``: in how many the prompt was computed.
    """

    tail: float
    steps: int
    bytes: int | None = None
    early_bytes: int | None = None
    fence_to_report: float | None = None
    descriptors: int | None = None

    @property
    def early(self) -> float | None:
        """The share of the bytes that had completed before the last chunk's fence."""
        return None if self.bytes is None or self.early_bytes is None else self.early_bytes / self.bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bound: whose, what, the value, the limit, and whether that is the least or what the value must stay below."""

    connector: str
    text: str
    value: float
    limit: float
    least: bool

    @property
    def holds(self) -> bool:
        """Whether the value keeps within the bound."""
        return self.value >= self.limit if self.least else self.value < self.limit


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Sum up one connector's handoffs."""
    found: dict[str, Any] = {
        "handoffs": len(samples),
        "steps": sorted({one.steps for one in samples}),
        "tail_ms": _spread([one.tail * 1e3 for one in samples]),
    }
    early = [one.early for one in samples if one.early is not None]
    if early:
        reports = [one.fence_to_report * 1e3 for one in samples if one.fence_to_report is not None]
        found |= {
            "bytes": sorted({one.bytes for one in samples if one.bytes is not None}),
            "descriptors": sorted({one.descriptors for one in samples if one.descriptors is not None}),
            "early": {"least": round(min(early), 4), "median": round(statistics.median(early), 4)},
            "fence_to_report_ms": _spread(reports),
        }
    return found


def line(connector: str, samples: Sequence[Sample]) -> str:
    """Say in a line what came of one connector, while others are still measured."""
    one = summary(samples)
    early = f", {one['early']['least']:.1%} of the bytes early at least" if "early" in one else ""
    return f"{connector}: {one['handoffs']} handoffs, tail {_times(one['tail_ms'])} ms{early}"


def verdicts(found: Mapping[str, Mapping[str, Any]], *, prompts: int) -> list[Verdict]:
    """Hold kvxfer's figures against the bounds; what is held against a connector that did not run is left out."""
    upstream = next((name for name in found if name.startswith(UPSTREAM_PREFIX)), None)
    made = []
    for name, one in found.items():
        text = "answers that are the same for each connector, of all"
        made.append(Verdict(name, text, one["same_answers"] / prompts, 1.0, least=True))
        if name.startswith(UPSTREAM_PREFIX):
            continue
        text = "bytes completed before the last chunk's fence, in the worst handoff"
        made.append(Verdict(name, text, one["early"]["least"], EARLY, least=True))
        if upstream is not None:
            ratio = round(one["tail_ms"]["median"] / found[upstream]["tail_ms"]["median"], 3)
            made.append(Verdict(name, f"median tail, by {upstream}'s", ratio, OF_UPSTREAM, least=False))
    return made


def as_json(made: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the bounds as JSON takes them."""
    return [{**asdict(one), "holds": one.holds} for one in made]


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table, and the bounds."""
    connectors = result["connectors"]
    settings = result["settings"]
    title = f"{settings['prompt']:,} tokens, {settings['budget']} a step, {settings['repeats']} handoffs"
    table = Table(title=title, title_justify="left")
    for column in ("", *connectors):
        table.add_column(column, justify="right" if column else "left")
    for row in rows(connectors):
        table.add_row(*row)
    console.print(table)
    for bound in result["bounds"]:
        said = "[green]holds[/green]" if bound["holds"] else "[red]does not hold[/red]"
        limit = f"at least {bound['limit']:g}" if bound["least"] else f"below {bound['limit']:g}"
        console.print(f"{bound['connector']}: {bound['text']}: {bound['value']:.3f}, {limit}: {said}")


def rows(connectors: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """One row for each figure: its name, and a cell for each connector."""
    of = list(connectors.values())
    yield "steps of prefill", *("/".join(map(str, one["steps"])) for one in of)
    yield "tail: median (p90) ms", *(_times(one["tail_ms"]) for one in of)
    yield "fence to report: median (p90) ms", *(_times(one.get("fence_to_report_ms")) for one in of)
    yield (
        "bytes completed before the last fence: median (least)",
        *(f"{one['early']['median']:.1%} ({one['early']['least']:.1%})" if "early" in one else "–" for one in of),
    )
    yield "bytes of a handoff", *("/".join(f"{size:,}" for size in one.get("bytes", ())) or "–" for one in of)
    yield "pairs that failed", *(str(len(one.get("failed", ()))) for one in of)
    yield "descriptors", *("/".join(f"{count:,}" for count in one.get("descriptors", ())) or "–" for one in of)


def _times(spread: Mapping[str, float] | None) -> str:
    return "–" if spread is None else f"{spread['median']:,.2f} ({spread['p90']:,.2f})"


def _spread(values: Sequence[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return {"median": round(statistics.median(values), 3), "p90": round(tenths[8], 3), "most": round(max(values), 3)}

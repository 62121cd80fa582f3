"""``kvxfer bench engine`` for people: two tables of calls, one of sums, and the bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from kvxfer.bench.cost_report import SIDES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

_WORTH_A_LINE: Final = 1.0  # µs a request, with any connector


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print everything that ``run`` found."""
    connectors = result["connectors"]
    for where in SIDES:
        title = f"{where}: µs a request (calls a request × µs a call)"
        _print(console, title, ("part", "call", *connectors), call_rows(connectors, where))
    _print(console, "sums", ("", *connectors), sum_rows(connectors))
    for bound in result["bounds"]:
        said = "[green]holds[/green]" if bound["holds"] else "[red]does not hold[/red]"
        console.print(
            f"{bound['connector']}: {bound['text']}: {_shown(bound['value'])}, at most {bound['limit']:g}: {said}"
        )


def _shown(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"  # noqa: PLR2004


def _print(console: Console, title: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "part", "call") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def call_rows(connectors: Mapping[str, Mapping[str, Any]], where: str) -> Iterator[tuple[str, ...]]:
    """One row for each call of one side: part, name, and for each connector the microseconds a request and the calls."""
    cells: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for name, one in connectors.items():
        for call in one[where]["calls"]:
            cells.setdefault((call["part"], call["call"]), {})[name] = call
    # Most expensive first, wherever it is so; what costs next to nothing everywhere is not worth a line.
    most = {key: max(call["us_per_request"] for call in row.values()) for key, row in cells.items()}
    for key in sorted(cells, key=lambda key: -most[key]):
        if most[key] >= _WORTH_A_LINE:
            yield (*key, *(_call_cell(cells[key].get(name)) for name in connectors))


def _call_cell(call: Mapping[str, Any] | None) -> str:
    return (
        "–"
        if call is None
        else f"{call['us_per_request']:,.0f} ({call['calls_per_request']:,.0f} × {call['us_per_call']:,.1f})"
    )


def sum_rows(connectors: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """One row for each sum: its name, and a cell for each connector."""
    for where in SIDES:
        for text, name in (
            ("scheduler, µs a request", "scheduler_us_per_request"),
            ("worker, µs a request", "worker_us_per_request"),
        ):
            yield f"{where}: {text}", *(f"{one[where][name]:,.0f}" for one in connectors.values())
        of = [one[where]["us_per_request"] for one in connectors.values()]
        yield (
            f"{where}: both, µs a request: mean (median, p90)",
            *(f"{one['mean']:,.0f} ({one['median']:,.0f}, {one['p90']:,.0f})" for one in of),
        )
        yield (
            f"{where}: all that the threads do, µs a request",
            *(f"{one[where]['threads_us_per_request']:,.0f}" for one in connectors.values()),
        )
        yield (
            f"{where}: steps a request × µs a step",
            *(_steps_cell(one[where]) for one in connectors.values()),
        )
        yield (
            f"{where}: the same, long answers",
            *(_steps_cell(one["served"].get(where)) for one in connectors.values()),
        )
    for length in sorted({int(length) for one in connectors.values() for length in one["lengths"]}):
        for where in SIDES:
            cells = (one["lengths"].get(str(length), {}).get(where) for one in connectors.values())
            yield f"{where}: {length:,} tokens, µs a request (steps)", *(_length_cell(cell) for cell in cells)
    for figure, text in (("itl_ms", "ms between tokens"), ("prefill_ms", "ms a step of prefill")):
        for window in ("quiet", "computing", "handoffs"):
            found = [one["windows"][window].get(figure) for one in connectors.values()]
            if any(found):
                yield f"{text}, {window}: median (p90)", *(
                    "–" if one is None else f"{one['median']:,.2f} ({one['p90']:,.2f})" for one in found
                )  # fmt: skip


def _steps_cell(cell: Mapping[str, Any] | None) -> str:
    return "–" if cell is None else f"{cell['steps_per_request']:,.0f} × {cell['us_per_step']}"


def _length_cell(cell: Mapping[str, Any] | None) -> str:
    return "–" if cell is None else f"{cell['us_per_request']['mean']:,.0f} ({cell['steps_per_request']:,.0f})"

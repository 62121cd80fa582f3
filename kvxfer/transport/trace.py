"""``kvxfer trace``: the handoffs that are in flight on a running engine, and those just finished, as they change.

On a terminal a table that is drawn anew; elsewhere a line for each handoff that appears, goes from one stage to the next, or
ends. It asks as ``kvxfer records`` does, so an engine pays for it with one report an interval, made by its control thread.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.errors import KvxferError
from kvxfer.transport.command import Address, SecretFile, where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from kvxfer.transport.query import EngineReport
    from kvxfer.transport.records import HandoffRecord


@dataclass(frozen=True, slots=True)
class Seen:
    """A handoff at a moment. ``stage``: what it waits for, or how it ended; ``seconds``: how old it is, or became."""

    record: HandoffRecord
    stage: str
    seconds: float | None

    @property
    def open(self) -> bool:
        """Whether it is in flight."""
        return self.record.times.released is None

    @property
    def key(self) -> tuple[str, str, int, float | None]:
        """What tells it from all others on its engine: an id may come again."""
        return self.record.handoff, self.record.side, self.record.rank, self.record.times.expected

    def __str__(self) -> str:
        """One line."""
        record = self.record
        age = "" if self.seconds is None else f" {self.seconds * 1000:,.1f} ms"
        peer = f" {'to' if record.side == 'source' else 'from'} {record.peer}" if record.peer else ""
        moved = f" {record.tokens:,} tokens {_moved(record):,} of {record.bytes:,} bytes"
        return f"{record.handoff} rank {record.rank} {record.side} {record.mode}: {self.stage}{age}{moved}{peer}"

    def plain(self) -> dict[str, Any]:
        """For JSON: the record, and what is made of it here."""
        import msgspec

        builtins: dict[str, Any] = msgspec.to_builtins(self.record)
        return {"stage": self.stage, "seconds": self.seconds, **builtins}


def trace(
    address: Address,
    *,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)] = 0.5,
    last: Annotated[int, typer.Option(help="How many handoffs of each rank to look at.", min=1)] = 20,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    secret_file: SecretFile = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object a change, a line each.")] = False,
) -> None:
    """Show the handoffs in flight on a running engine, and those just finished, as they change."""
    from kvxfer.transport.query import fetch_records
    from kvxfer.transport.secret import load_secret

    if not math.isfinite(interval):
        raise typer.BadParameter(f"{interval} is no time", param_hint="--interval")
    host, port = where(address)

    def look() -> EngineReport:
        return fetch_records(host, port, last=last, secret=load_secret(secret_file))

    try:
        if json or once or not sys.stdout.isatty():
            _lines(look, interval, once=once, json=json)
        else:
            _live(look, interval)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except KvxferError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def seen(report: EngineReport) -> list[Seen]:
    """Return an engine's handoffs, those that ended first, then those in flight, each by age."""
    all_of_them = [_seen(record, rank.now) for rank in report.ranks for record in rank.records]
    return sorted(
        all_of_them, key=lambda one: (one.open, one.record.times.released or one.record.times.expected or 0.0)
    )


def _seen(record: HandoffRecord, now: float) -> Seen:
    begin, end = record.times.expected, record.times.released
    seconds = None if begin is None else (now if end is None else end) - begin
    return Seen(record, _stage(record), seconds if seconds is None or seconds >= 0 else None)


def _stage(record: HandoffRecord) -> str:
    """Say what a handoff waits for; of one that has ended, how it did."""
    times = record.times
    if times.released is not None:
        return record.outcome if record.outcome == "done" or not record.reason else f"{record.outcome}: {record.reason}"
    if record.outcome != "open":  # its engine has not its blocks back yet
        return f"ending, {record.outcome}: {record.reason}" if record.reason else f"ending, {record.outcome}"
    if record.side == "sink":
        if times.registered is None:
            return "registering"
        return "wait for KV" if times.first_post is None and times.notified is None else "transfer"
    if times.first_post is not None:
        return "transfer"
    if times.registered is None:
        return "registration wait"
    return "wait for the read" if times.sealed is not None and record.mode == "pull" else "prefill"


def _moved(record: HandoffRecord) -> int:
    return record.completed[-1][1] if record.completed else 0


def changes(looks: Iterator[EngineReport]) -> Iterator[Seen]:
    """Yield each handoff when it is first seen, and again when its stage has changed."""
    known: dict[tuple[str, str, int, float | None], str] = {}
    for report in looks:
        now = seen(report)
        for one in now:
            if known.get(one.key) != one.stage:
                yield one
        known = {one.key: one.stage for one in now}  # what is not reported any more does not come again


def _lines(look: Callable[[], EngineReport], interval: float, *, once: bool, json: bool) -> None:
    import msgspec

    def looks() -> Iterator[EngineReport]:
        yield look()
        while not once:
            time.sleep(interval)
            yield look()

    for one in changes(looks()):
        print(msgspec.json.encode(one.plain()).decode() if json else one, flush=True)


def _live(look: Callable[[], EngineReport], interval: float) -> None:
    from rich.live import Live

    with Live(table(look()), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(table(look()), refresh=True)


def table(report: EngineReport) -> Table:
    """Return the table that a terminal shows."""
    from rich.table import Table
    from rich.text import Text

    handoffs = seen(report)
    in_flight = sum(one.open for one in handoffs)
    made = Table(
        title=Text(f"{report.engine}: {in_flight} in flight, {len(handoffs) - in_flight} finished before them")
    )
    for name in ("handoff", "rank", "side", "mode", "stage", "ms", "tokens", "bytes moved", "of", "peer"):
        made.add_column(
            name, justify="right" if name in ("rank", "ms", "tokens", "bytes moved", "of") else "left", overflow="fold"
        )
    for one in handoffs:
        record = one.record
        made.add_row(  # names and reasons as they are: a client may call its request [/b]
            Text(record.handoff),
            str(record.rank),
            record.side,
            record.mode,
            Text(one.stage),
            "" if one.seconds is None else f"{one.seconds * 1000:,.1f}",
            f"{record.tokens:,}",
            f"{_moved(record):,}",
            f"{record.bytes:,}",
            Text(record.peer),
            style="bold" if one.open else "red" if record.outcome != "done" else "dim",
        )
    return made

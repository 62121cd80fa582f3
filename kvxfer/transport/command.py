"""``kvxfer records``: an engine's handoff records, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.addresses import AddressError, parse
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from kvxfer.transport.query import EngineReport
    from kvxfer.transport.records import HandoffRecord


Address = Annotated[str, typer.Argument(help="HOST:PORT of an engine's control channel; [HOST]:PORT for IPv6.")]
SecretFile = Annotated[
    str, typer.Option(help="The file with the engines' shared secret; else KVXFER_SECRET_FILE or KVXFER_SECRET.")
]


def where(address: str) -> tuple[str, int]:
    """Read the address of a control channel; end the command, with status 2 and the reason, where it is none."""
    try:
        return parse(address)
    except AddressError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def records(
    address: Address,
    *,
    last: Annotated[int, typer.Option(help="How many records of each rank.", min=1)] = 20,
    secret_file: SecretFile = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object a record, a line each.")] = False,
) -> None:
    """Show the last handoffs of a running engine: what was moved, how long each stage took, how it ended."""
    import msgspec

    from kvxfer.transport.query import fetch_records
    from kvxfer.transport.secret import load_secret

    host, port = where(address)
    try:
        report = fetch_records(host, port, last=last, secret=load_secret(secret_file))
    except KvxferError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if json:
        for record in report.records:
            typer.echo(msgspec.json.encode(record).decode())
        return
    _show(report)


_COLUMNS = (
    "handoff", "rank", "side", "mode", "tokens", "bytes", "descriptors", "expected→ registered", "registered→ first post",
    "first post→ last byte", "expected→ released", "outcome",
)  # fmt: skip


def _show(report: EngineReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvxfer.console import for_tables

    def span(record: HandoffRecord, start: str, end: str) -> str:
        first, second = getattr(record.times, start), getattr(record.times, end)
        return "" if first is None or second is None else f"{(second - first) * 1000:,.1f}"

    table = Table(title=Text(f"{report.engine}: handoffs, oldest first; times in ms"))
    for name in _COLUMNS:
        left = name in ("handoff", "side", "mode", "outcome")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for record in report.records:
        outcome = (
            record.outcome if record.outcome == "done" or not record.reason else f"{record.outcome}: {record.reason}"
        )
        table.add_row(  # names and reasons as they are: a client may call its request [/b]
            Text(record.handoff),
            str(record.rank),
            record.side,
            record.mode,
            f"{record.tokens:,}",
            f"{record.bytes:,}",
            f"{record.descriptors:,}",
            span(record, "expected", "registered"),
            span(record, "registered", "first_post"),
            span(record, "first_post", "last_byte"),
            span(record, "expected", "released"),
            Text(outcome),
        )
    console = for_tables()
    console.print(table)
    counted = {name: count for name, count in report.counters.items() if name.startswith("reuse_") and count}
    if counted:
        console.print(
            "reuse: " + ", ".join(f"{name.removeprefix('reuse_')} {count:,}" for name, count in counted.items()),
            markup=False,
        )


def register(app: typer.Typer) -> None:
    """Add ``records`` and ``trace`` to the command line."""
    from kvxfer.transport.trace import trace

    app.command()(records)
    app.command()(trace)

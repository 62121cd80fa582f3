"""``kvxfer doctor``: everything that kvxfer needs of a host, checked; exit status 1 if anything keeps it from working."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvxfer.doctor.host import Finding, Host


def examine(host: Host) -> list[Finding]:
    """Run every check on a host."""
    from kvxfer.doctor import fabric, hardware, neuron, software

    checks = (*software.CHECKS, *hardware.CHECKS, *neuron.CHECKS, *fabric.CHECKS)
    return [finding for check in checks for finding in check(host)]


def doctor(*, json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False) -> None:
    """Check what is installed and what is missing, and say how to get it."""
    import msgspec

    from kvxfer.doctor.host import this_host

    findings = examine(this_host())
    failed = any(finding.state == "problem" for finding in findings)
    if json:
        out = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
        typer.echo(msgspec.json.format(msgspec.json.encode(out)).decode())
    else:
        for finding in findings:
            typer.echo(f"{finding.state:<8} {finding.check:<14} {finding.text}")
            if finding.cure:
                typer.echo(f"{'':<24}cure: {finding.cure}")
        typer.echo("something keeps kvxfer from working here" if failed else "nothing keeps kvxfer from working here")
    raise typer.Exit(1 if failed else 0)


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to the command line."""
    app.command()(doctor)

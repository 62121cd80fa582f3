"""``kvxfer chaos``: simulate many engines in trouble, deterministically, and say what was wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvxfer.chaos.run import Summary
    from kvxfer.chaos.simulation import Result

SOME = 8
"""Names that are shown where there may be hundreds; ``--json`` has them all."""


def chaos(
    *,
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0 on.", min=1)] = 100,
    seed: Annotated[int | None, typer.Option(help="This seed alone, with the story of its first violation.")] = None,
    handoffs: Annotated[int, typer.Option(help="Handoffs of each seed.", min=1)] = 100,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Simulate engines whose processes die, sleep and restart, over a network and a fabric that fail: no byte may be wrong."""
    import msgspec

    from kvxfer.chaos.run import run, story

    if seed is not None:
        result, told = story(seed, handoffs)
        for line in told:
            typer.echo(line)
        _say(result)
        raise typer.Exit(1 if result.violations else 0)
    summary = run(range(seeds), handoffs, done=lambda result: None if json or not result.violations else _say(result))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(summary.to_json())).decode())
    else:
        _show(summary)
    raise typer.Exit(1 if summary.failing else 0)


def _say(result: Result) -> None:
    typer.echo(
        f"seed {result.seed}: {result.handoffs} handoffs, {result.moved} moved, "
        f"{len(result.violations)} violations, digest {result.digest:08x}"
    )
    for violation in result.violations[:5]:
        typer.echo(f"  {violation.at:.4f} {violation.check}: {violation.about} {violation.what}")


def _show(summary: Summary) -> None:
    from kvxfer.chaos.coverage import ENOUGH

    told = summary.to_json()
    for name in ("seeds", "handoffs", "moved", "events", "seconds"):
        typer.echo(f"{name:<15} {told[name]:,}")
    typer.echo(f"{'faults':<15} " + ", ".join(f"{kind} {count:,}" for kind, count in told["faults"].items()))
    reuse = ", ".join(
        f"{told['reuse'].get(name, 0):,} {name}" for name in ("pinned", "renewed", "expired", "read", "not read")
    )
    typer.echo(f"{'conversations':<15} {reuse}")
    for what, kind in (("transitions", "seldom_taken"), ("faults × states", "seldom_struck")):
        few = told[kind]
        typer.echo(f"{what:<15} {len(few)} fewer than {ENOUGH} times{', ' + ', '.join(few[:SOME]) if few else ''}")
    for check, count in summary.violations.items():
        typer.echo(f"{check:<15} {count:,}")
    if summary.failing:
        typer.echo(f"failing seeds: {', '.join(map(str, sorted(summary.failing)))}; see one with --seed")
    else:
        typer.echo("nothing was wrong")


def register(app: typer.Typer) -> None:
    """Add ``chaos`` to the command line."""
    app.command()(chaos)

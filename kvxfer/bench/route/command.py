"""``kvxfer bench route``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import Annotated, Any

import typer

from kvxfer.errors import KvxferError


def route(
    *,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    streams: Annotated[int, typer.Option(help="Streams at one time.", min=1)] = 500,
    seconds: Annotated[float, typer.Option(help="How long each run lasts.", min=3.0)] = 10.0,
    interval: Annotated[float, typer.Option(help="Seconds between two tokens of a stream.", min=0.001)] = 0.02,
    requests: Annotated[int, typer.Option(help="Short requests, over which memory is looked at.", min=5)] = 50_000,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="One of vLLM's example proxies, to be measured in the same run; repeatable."),
    ] = None,
    traffic: Annotated[bool, typer.Option(help="Measure the router with stand-in engines.")] = True,
    simulation: Annotated[bool, typer.Option(help="Compare when decode is chosen, in simulation.")] = True,
    count: Annotated[int, typer.Option(help="Simulated requests of each load and seed.", min=100)] = 4000,
    seeds: Annotated[int, typer.Option(help="Simulated runs of each load.", min=1)] = 3,
) -> None:
    """Measure what the router costs, and simulate what its choice of decode gains."""
    from kvxfer.bench.results import write
    from kvxfer.bench.route.simulation import TIMINGS, Costs, simulate
    from kvxfer.bench.route.traffic import Load, measure

    result: dict[str, Any] = {}
    try:
        if simulation:
            found = result["simulation"] = simulate(Costs(), count=count, seeds=seeds)
            typer.echo("time to first token, p50/p90 in seconds:")
            for name, row in found["scenarios"].items():
                parts = "  ".join(f"{timing} {row[timing]['p50']:.3f}/{row[timing]['p90']:.3f}" for timing in TIMINGS)
                typer.echo(f"{name:<26} {parts}  adaptive by the better: {row['adaptive_over_better']:.3f}")
        if traffic:
            load = Load(streams=streams, seconds=seconds, interval=interval, requests=requests)
            result["traffic"] = measure(load, against or (), typer.echo)
            for name, one in result["traffic"]["bounds"].items():
                limit = f"at most {one['most']:,}" if "most" in one else f"at least {one['least']:,}"
                typer.echo(
                    f"{name:<60} {one['value']:>14,.2f}  {limit:<18} {'holds' if one['holds'] else 'DOES NOT HOLD'}"
                )
    except KvxferError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if json is not None:
        write(json, result)

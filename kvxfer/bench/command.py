"""``kvxfer demo`` and ``kvxfer bench …``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.bench.page_command import report
from kvxfer.bench.pd.command import pd
from kvxfer.errors import ConfigError, KvxferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.bench.idle import Idle

bench = typer.Typer(help="Measurements on this machine.", no_args_is_help=True)
bench.command()(pd)

_Json = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]
_Logs = Annotated[Path | None, typer.Option(help="Directory of the engines' logs (a new one below /tmp).")]
_Python = Annotated[str, typer.Option(help="The Python whose vLLM is run; kvxfer must be installed there.")]


def demo(
    *,
    json: _Json = None,
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", help="Show what taking back a conversation is worth instead.")
    ] = False,
    logs: _Logs = None,
    python: _Python = sys.executable,
) -> None:
    """Show that push and pull give the tokens of one engine alone, and that a misplaced block does not."""
    from kvxfer.bench.demo import Demo
    from kvxfer.bench.results import write
    from kvxfer.bench.turns import Turns
    from kvxfer.console import for_tables

    console = for_tables()
    run = (Turns if multi_turn else Demo)(console, logs or _new_logs(), python)
    try:
        complaints = run.execute()
    except KvxferError as error:
        complaints = [str(error)]
    if json is not None:
        write(json, run.report(complaints))
    if complaints:
        console.print(f"[bold red]failed[/bold red], {len(complaints)} reason(s); logs are in {run.logs}:")
        for complaint in complaints:
            console.print(f"- {complaint}", markup=False, highlight=False)
        raise typer.Exit(1)
    what = "every byte was counted, and LIBFABRIC moved it"
    if isinstance(run, Turns):
        what = f"later turns begin {run.gain():.1f} times sooner with what decode held taken back"
    console.print(f"[bold green]passed[/bold green]: every answer is the reference's, {what}")


@bench.command()
def idle(
    *,
    json: _Json = None,
    connectors: Annotated[str, typer.Option(help="Comma-separated, in order.")] = (
        "none,push,pull,upstream-push,upstream-pull"
    ),
    seconds: Annotated[float, typer.Option(help="How long each engine is watched.", min=1.0)] = 20.0,
    windows: Annotated[int, typer.Option(help="Windows in that time; the median counts.", min=1)] = 5,
    logs: _Logs = None,
    python: _Python = sys.executable,
) -> None:
    """Measure the processor use of an idle engine with each connector, and without one."""
    from kvxfer.bench.idle import run
    from kvxfer.bench.results import write

    def say(one: Idle) -> None:
        parts = ", ".join(f"{name} {use:.1f}" for name, use in one.by_process.items() if use >= 0.05)  # noqa: PLR2004
        typer.echo(f"{one.connector:>14}: {one.percent:6.1f} % of a core ({parts})")

    with _failing_clearly():
        result = run(connectors.split(","), logs or _new_logs(), python, seconds=seconds, windows=windows, say=say)
        if json is not None:
            write(json, result)


@bench.command()
def engine(
    *,
    json: _Json = None,
    connectors: Annotated[
        str, typer.Option(help="kvxfer's connectors, comma-separated; push:recording writes records, too.")
    ] = "push,pull",
    against: Annotated[str, typer.Option(help="Upstream's, likewise; empty for none.")] = "upstream-push,upstream-pull",
    repeats: Annotated[int, typer.Option(help="Handoffs of one length, all passes together.", min=2)] = 50,
    prompt: Annotated[int, typer.Option(help="That length in tokens.", min=1)] = 4096,
    served: Annotated[int, typer.Option(help="Handoffs with long answers: what a step costs in service.", min=1)] = 10,
    served_answer: Annotated[int, typer.Option(help="Tokens of those answers.", min=1)] = 128,
    lengths: Annotated[str, typer.Option(help="Shorter and longer prompts to compare.")] = "1024,8192",
    length_repeats: Annotated[int, typer.Option(help="Handoffs of each of those.", min=2)] = 20,
    rounds: Annotated[int, typer.Option(help="Windows of each kind.", min=1)] = 4,
    passes: Annotated[int, typer.Option(help="Turns in which each connector has its share of all that.", min=1)] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 4,
    logs: _Logs = None,
    python: _Python = sys.executable,
) -> None:
    """Measure what the connector's calls cost the threads of two live engines, kvxfer's and upstream's side by side."""
    from kvxfer.bench.cost import Settings, run
    from kvxfer.bench.cost_table import show
    from kvxfer.bench.results import write
    from kvxfer.console import for_tables

    names = [name for name in f"{connectors},{against}".split(",") if name]
    with _failing_clearly():
        settings = Settings(
            repeats=repeats, prompt=prompt, served=served, served_answer=served_answer, lengths=_lengths(lengths),
            length_repeats=length_repeats, rounds=rounds, passes=passes, layers=layers,
        )  # fmt: skip

        def keep(result: dict[str, Any]) -> None:
            if json is not None:
                write(json, result)

        result = run(names, logs or _new_logs(), python, settings, say=typer.echo, keep=keep)
    show(for_tables(), result)


@bench.command()
def stream(
    *,
    json: _Json = None,
    against: Annotated[str, typer.Option(help="Upstream's push; empty for none.")] = "upstream-push",
    repeats: Annotated[int, typer.Option(help="Handoffs.", min=2)] = 20,
    prompt: Annotated[int, typer.Option(help="Their length in tokens.", min=2)] = 6000,
    budget: Annotated[int, typer.Option(help="--max-num-batched-tokens of the engines.", min=1)] = 512,
    logs: _Logs = None,
    python: _Python = sys.executable,
) -> None:
    """Measure what push moves before a prompt is computed, and how soon the rest; fails where a bound does not hold."""
    from kvxfer.bench.results import write
    from kvxfer.bench.stream import Settings, run
    from kvxfer.bench.stream_report import show
    from kvxfer.console import for_tables

    names = ["push", *([against] if against else [])]
    with _failing_clearly():
        settings = Settings(repeats=repeats, prompt=prompt, budget=budget)
        result = run(names, logs or _new_logs(), python, settings, say=typer.echo)
        if json is not None:
            write(json, result)
    show(for_tables(), result)
    if not all(bound["holds"] for bound in result["bounds"]):
        raise typer.Exit(1)


@bench.command()
def latency(
    *,
    json: _Json = None,
    repeats: Annotated[int, typer.Option(help="Handoffs of each kind.", min=10)] = 200,
    backend: Annotated[str, typer.Option(help="NIXL backend.")] = "LIBFABRIC",
) -> None:
    """Measure how soon a registration at an idle source is acted on, and how soon a completion is seen."""
    from kvxfer.bench.latency import run
    from kvxfer.bench.results import report as results_of
    from kvxfer.bench.results import write

    with _failing_clearly():
        result = run(repeats, backend)
    for name, text in (
        ("registration_ms", "registration at an idle source → first write posted"),
        ("seen_ms", "transfer terminal (twin) → seen by the mover"),
        ("completion_ms", "source saw its last write terminal → sink's report"),
        ("handoff_ms", "registration → sink's report"),
    ):
        typer.echo(f"{text:<56} median {result[name]['median']:7.3f} ms   p90 {result[name]['p90']:7.3f} ms")
    if json is not None:
        figures = {name: value for name, value in result.items() if name.endswith("_ms")}
        write(json, results_of("latency", {"repeats": repeats, "backend": backend}, sys.executable, **figures))


@bench.command()
def model(
    *,
    json: _Json = None,
    trials: Annotated[int, typer.Option(help="Changed prompts for each length.", min=1)] = 24,
    logs: _Logs = None,
    python: _Python = sys.executable,
) -> None:
    """Measure how many one-token changes of a prompt change the bench model's answer."""
    from kvxfer.bench.results import report as results_of
    from kvxfer.bench.results import write
    from kvxfer.bench.sensitivity import run

    with _failing_clearly():
        rows = asyncio.run(run(logs or _new_logs(), trials=trials, python=python))
    for row in rows:
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    if json is not None:
        write(json, results_of("model", {"trials": trials}, python, sensitivity=rows))


@bench.command()
def plan(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    file: Annotated[Path | None, typer.Argument(help="Write them to this file as JSON, and print the table.")] = None,
) -> None:
    """Count the descriptors of a 16,384-token handoff, and what it costs to make them."""
    from kvxfer.bench.plan import run

    results = run()
    if file is not None:
        from kvxfer.bench.results import write

        write(file, {"plan": results})
    elif json:
        typer.echo(dumps({"plan": results}, indent=2))
        return
    for one in results:
        typer.echo(
            f'{one["case"]:<22} "descriptors": {one["descriptors"]:<6} {one["cpu_ms"]:8.3f} ms of CPU (prepared once: '
            f"{one['prepare_cpu_ms']:.1f} ms)  {one['peak_bytes'] / 1e6:5.2f} MB at the peak"
        )


def register(app: typer.Typer) -> None:
    """Add ``demo``, ``bench`` and ``report`` to the command line."""
    from kvxfer.bench.route.command import route

    app.command()(demo)
    app.command()(report)
    bench.command()(route)
    app.add_typer(bench, name="bench")


def _new_logs() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvxfer-logs-"))


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--lengths={text!r} must be numbers of tokens above 0, comma-separated: 1024,8192")
    return tuple(int(part) for part in parts)


@contextlib.contextmanager
def _failing_clearly() -> Iterator[None]:
    """Turn an error of ours into its text and exit status 1."""
    try:
        yield
    except KvxferError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None

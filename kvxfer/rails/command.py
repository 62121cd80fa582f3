"""``kvxfer rails``: which rails are local to which device, and whether NIXL uses those.

Exit status: 0 as expected, 1 a violation, 2 could not tell.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.errors import ConfigError, KvxferError

if TYPE_CHECKING:
    from kvxfer.rails.counters import Traffic
    from kvxfer.rails.judge import Verdict
    from kvxfer.rails.nixl_log import NixlLog
    from kvxfer.rails.pci import Machine
    from kvxfer.rails.report import Report

_WIDTH = 250  # of what is piped into a file
_DAY = 86400


def rails(
    more: Annotated[list[Path] | None, typer.Argument(metavar="[LOG]...", help="More logs, after --log.")] = None,
    *,
    topology: Annotated[Path | None, typer.Option(help="Another machine's: XML of lstopo --whole-io.")] = None,
    instance_type: Annotated[str, typer.Option(help="EC2's instance type, where the machine does not tell.")] = "",
    log: Annotated[list[Path] | None, typer.Option(help="A server's log, made with NIXL_LOG_LEVEL=DEBUG.")] = None,
    watch: Annotated[
        float | None, typer.Option(help="Read the EFA counters for so many seconds.", min=0.1, max=_DAY)
    ] = None,
    provider: Annotated[str, typer.Option(help="The provider that is wanted: efa or tcp.")] = "efa",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    root: Annotated[Path, typer.Option(hidden=True, help="Read sys, dev and proc below this directory.")] = Path("/"),
) -> None:
    """Show each device's local EFA rails and why; hold what NIXL would do, or did (--log), against them."""
    from kvxfer.rails.judge import judge_log, judge_machine
    from kvxfer.rails.local import attached, place
    from kvxfer.rails.predict import predict
    from kvxfer.rails.report import Report

    try:
        machine = _machine(topology, instance_type, provider, root, live=watch is not None)
        placements = place(machine)
        prediction = predict(machine, machine.rails if provider == "efa" else (), attached(placements))
        logs = _logs(log, more)
        if logs:
            verdict = judge_log(machine, placements, _read(logs), provider)
        else:
            verdict = judge_machine(machine, placements, prediction, provider)
        moved = None if watch is None else _watch(machine, watch, verdict, root)
        report = Report(machine, placements, prediction, verdict, moved)
        _say(report, json=json)
    except KvxferError as error:
        typer.echo(f"could not tell: {error}", err=True)
        raise typer.Exit(2) from None
    except Exception:  # noqa: BLE001 - Python's own exit status for it, 1, would read as a violation
        traceback.print_exc()
        raise typer.Exit(2) from None
    raise typer.Exit(report.verdict.status)


def _say(report: Report, *, json: bool) -> None:
    """Print the report. Who stops reading it half way does not change what it says, nor the exit status."""
    try:
        if json:
            import msgspec

            typer.echo(msgspec.json.format(msgspec.json.encode(report.to_json())).decode())
        else:
            from kvxfer.rails.report import Terminal, show

            terminal = Terminal()
            show(report, terminal if terminal.is_terminal else Terminal(width=_WIDTH))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still has to flush at its end


def _logs(log: list[Path] | None, more: list[Path] | None) -> list[Path]:
    """Join the logs of ``--log`` and those behind it."""
    if more and not log:
        raise ConfigError(f"{more[0]} is not an option; logs come after --log")
    return [*(log or ()), *(more or ())]


def _machine(topology: Path | None, instance_type: str, provider: str, root: Path, *, live: bool) -> Machine:
    from kvxfer.rails.hwloc import read_hwloc
    from kvxfer.rails.instances import INSTANCE_TYPES
    from kvxfer.rails.sysfs import read_sysfs, run_neuron_ls

    if live and topology is not None:
        raise ConfigError("--watch reads this machine's counters: it does not go with --topology")
    if provider not in ("efa", "tcp"):
        raise ConfigError(f"--provider {provider} must be efa or tcp")
    if instance_type and instance_type not in INSTANCE_TYPES:
        raise ConfigError(f"--instance-type {instance_type} is not known; known are {', '.join(INSTANCE_TYPES)}")
    machine = read_hwloc(topology) if topology else read_sysfs(root, run_neuron_ls() if root == Path("/") else "")
    kinds = [kind for kind, nodes in (("cuda", machine.gpus), ("neuron", machine.neurons)) if nodes]
    if instance_type and kinds and INSTANCE_TYPES[instance_type].kind not in kinds:
        raise ConfigError(
            f"--instance-type {instance_type} has {INSTANCE_TYPES[instance_type].kind} devices, and {machine.source} has "
            f"{kinds[0]} devices: name its own type, or leave the option out"
        )
    return dataclasses.replace(
        machine, source=_printable(machine.source), instance_type=instance_type or machine.instance_type
    )


def _printable(path: str) -> str:
    """Write a path so that it can be printed, whatever bytes it has."""
    return os.fsencode(path).decode(errors="replace")


def _read(logs: list[Path]) -> NixlLog:
    from kvxfer.rails.nixl_log import NixlLog

    read = NixlLog()
    names = Counter(path.name for path in logs)  # two hosts' server.log are two files
    for path in logs:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                read.read(_printable(path.name if names[path.name] == 1 else str(path)), file)
        except OSError as error:
            raise ConfigError(f"the log {path} cannot be read: {error}") from error
    return read


def _watch(machine: Machine, seconds: float, verdict: Verdict, root: Path) -> list[Traffic]:
    from kvxfer.rails.counters import read_counters, traffic

    names = [rail.rail for rail in machine.rails]
    before = read_counters(names, root)
    with suppress(KeyboardInterrupt):  # what was read until then is worth showing
        time.sleep(seconds)
    moved = traffic(before, read_counters(names, root))
    if not moved:
        verdict.reasons.append("no rail has byte counters (ports/1/hw_counters of the efa driver)")
    elif not any(one.share for one in moved):
        verdict.reasons.append(f"nothing moved on any rail in {seconds:g} s: watch while traffic runs")
    return moved


def register(app: typer.Typer) -> None:
    """Add ``rails`` to the command line."""
    app.command()(rails)

"""The outcome of ``kvxfer rails``, as JSON and for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvxfer.rails.instances import INSTANCE_TYPES
from kvxfer.rails.policy import pin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.tree import Tree

    from kvxfer.rails.counters import Traffic
    from kvxfer.rails.judge import Verdict
    from kvxfer.rails.local import Placement
    from kvxfer.rails.pci import Machine, Node
    from kvxfer.rails.predict import Prediction


@dataclass(frozen=True, slots=True)
class Report:
    """A machine, the rails of its devices, what NIXL would do, and the verdict."""

    machine: Machine
    placements: Sequence[Placement]
    prediction: Prediction
    verdict: Verdict
    traffic: Sequence[Traffic] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        out: dict[str, Any] = {
            "source": self.machine.source,
            "instance_type": self.machine.instance_type,
            "devices": [self._device(placement) for placement in self.placements],
            "nixl": {
                "provider": self.prediction.provider,
                "runtime": self.prediction.runtime,
                "rails": [rail.rail for rail in self.prediction.rails],
            },
            "violations": [asdict(violation) for violation in self.verdict.violations],
            "reasons": self.verdict.reasons,
            "notes": notes(self),
            "status": self.verdict.status,
        }
        if self.traffic is not None:
            out["traffic"] = [{"name": one.rail, "share": one.share, **one.moved} for one in self.traffic]
        return out

    def _device(self, placement: Placement) -> dict[str, Any]:
        choice = self.prediction.choices[placement.node]
        return {
            "kind": placement.kind,
            "index": placement.index,
            "pci": str(placement.node.where),
            "rails": [{"pci": str(rail.where), "name": rail.rail} for rail in placement.rails],
            "source": placement.source,
            "why": placement.why,
            "switch": placement.switch.label if placement.switch else None,
            "numa": placement.node.numa,
            "usable": placement.node.usable,
            "fi_efa_iface": pin(self.machine, [placement.node.where], "local", {}).value,
            "nixl": {"rails": [rail.rail for rail in choice.rails], "how": choice.how, "why": choice.why},
        }


def notes(report: Report) -> list[str]:
    """Return the verdict's notes, and what differs from the instance type's own numbers."""
    found = list(report.verdict.notes)
    known = INSTANCE_TYPES.get(report.machine.instance_type)
    if known is not None:
        counts = (
            ("accelerators", len(report.machine.accelerators), known.accelerators),
            ("EFA devices", len(report.machine.efas), known.efas),
        )
        found += [f"{known.name} has {want} {what}, here are {have}" for what, have, want in counts if have != want]
    hidden = [node for node in [*report.machine.accelerators, *report.machine.efas] if not node.usable]
    if hidden:
        listed = ", ".join(str(node.where) for node in hidden)
        found.append(
            f"no device files here for {listed}, or none that this process may open; NIXL counts hidden accelerators, and does "
            "not see hidden EFA devices"
        )
    return found


class Terminal(Console):
    """A console that leaves it to its caller what a reader who has left means; rich's own ends the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Let the error of the pipe go on."""
        raise BrokenPipeError


def show(report: Report, console: Console) -> None:
    """Print the tree, what NIXL would do, and the verdict."""
    console.print(_tree(report, "→" if console.encoding.startswith("utf") else "->"))
    prediction, verdict = report.prediction, report.verdict
    count = len(prediction.rails)
    rails = f"{count} rail{'s' if count > 1 else ''}" if count else "its first device"
    console.print(
        f"NIXL by itself: provider {prediction.provider}, {rails}, runtime {prediction.runtime}", highlight=False
    )
    for note in notes(report):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if report.traffic is not None:
        _traffic(report.traffic, console)
    for violation in verdict.violations:
        console.print(f"violation: {violation}", highlight=False, markup=False, soft_wrap=True, style="red")
    for reason in verdict.reasons:
        console.print(f"could not tell: {reason}", highlight=False, markup=False, soft_wrap=True, style="yellow")
    if not verdict.status:
        console.print("as expected", style="green")


def _tree(report: Report, arrow: str) -> Tree:
    """Draw the machine down to the devices, without the bridges that lead to nothing or to one thing only."""
    from rich.text import Text
    from rich.tree import Tree

    title = f"{report.machine.instance_type or 'unknown instance type'}: {report.machine.source}"
    root = Tree(Text(title))
    alone, stray = "no EFA device near", "no accelerator near"
    branches: dict[Node | str, Tree] = {}

    def branch(of: Node | str) -> Tree:
        if of not in branches:
            branches[of] = root.add(Text(of if isinstance(of, str) else _switch_line(of)))
        return branches[of]

    for placement in report.placements:
        rails = ", ".join(f"{rail.rail} ({rail.where})" for rail in placement.rails) or "none"
        choice = report.prediction.choices[placement.node]
        agree = "" if choice.rails == placement.rails else f" [NIXL: {choice.how}]"
        line = f"{placement.name} {arrow} {rails}  ({placement.source}: {placement.why}){agree}"
        branch(placement.switch or alone).add(Text(line))
    owned = {rail for placement in report.placements for rail in placement.switch_rails}
    for efa in report.machine.efas:
        if efa not in owned:
            hidden = "" if efa.usable else ", hidden"
            above = next((node for node in efa.upwards() if node in branches), None)
            branch(above or stray).add(Text(f"{efa.rail} ({efa.where}){hidden}"))
    return root


def _switch_line(node: Node) -> str:
    what = {"bridge": "switch ", "host bridge": "host bridge "}.get(node.kind, "")
    numa = "" if node.numa is None or node.kind == "package" else f", NUMA node {node.numa}"
    return f"{what}{node.label}{numa}" + (f", link {node.link:.0f} Gbit/s" if node.link else "")


def _traffic(traffic: Sequence[Traffic], console: Console) -> None:
    from rich.table import Table

    table = Table(title="bytes by rail")
    table.add_column("rail")
    names = list(dict.fromkeys(name for one in traffic for name in one.moved))
    for name in ["share", *names]:
        table.add_column(name, justify="right")
    for one in traffic:
        table.add_row(
            one.rail, f"{one.share:.1%}", *(f"{one.moved[name]:,}" if name in one.moved else "" for name in names)
        )
    console.print(table)

"""What was done with the rails, held against what should have been: violations, or the reason why it cannot be told.

Two judges. ``judge_machine`` judges what NIXL would do by itself on a machine, from the tree alone. ``judge_log`` judges what it
did, from its debug log; it accepts nothing in the place of a line: a log without the lines that prove a placement is "could
not tell", never "as expected". A violation outweighs what could not be told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.rails.nixl_log import LEVEL
from kvxfer.rails.pci import Address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvxfer.rails.local import Placement
    from kvxfer.rails.nixl_log import NixlLog, Registration, Writer
    from kvxfer.rails.pci import Machine, Node
    from kvxfer.rails.predict import Prediction

AS_EXPECTED, VIOLATION, UNTOLD = 0, 1, 2

_FALLBACK_TEXT = {
    "all rails": "NIXL could not place the memory and registered it on every rail",
    "libnrt": "libnrt did not name an EFA device for the memory (libnrt.so.1 not found, the runtime not initialised before "
    "the agent, or older than SDK 2.29)",
    "no grouping": "NIXL could not group the accelerators with the EFA devices of their switches",
    "host memory": "the provider cannot register device memory, and NIXL registered it as host memory",
    "no rail": "NIXL has no rail for the device",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is not as it should be. ``line`` is the line of the log that shows it, where a log was judged."""

    kind: str
    device: str
    expected: tuple[str, ...]
    actual: tuple[str, ...]
    text: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n    {self.line}" if self.line else self.text


@dataclass(slots=True)
class Verdict:
    """Everything that a judge found. ``reasons`` say why something could not be told, ``notes`` are for information."""

    violations: list[Violation] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Exit status: 0 as expected, 1 a violation, 2 could not tell."""
        return VIOLATION if self.violations else UNTOLD if self.reasons else AS_EXPECTED


def judge_machine(machine: Machine, placements: Sequence[Placement], prediction: Prediction, provider: str) -> Verdict:
    """Judge what NIXL would choose by itself, with ``provider`` the one that is wanted: efa or tcp."""
    verdict = Verdict()
    if provider != "efa":
        verdict.notes.append(f"{provider} is asked for: there are no rails to choose between")
        return verdict
    if prediction.provider != "efa":
        hidden = len(machine.efas) - len(machine.rails)
        why = (
            f"{hidden} EFA devices are on the bus, but their device files are not here"
            if hidden
            else "no EFA device is here"
        )
        text = f"NIXL would fall back to {prediction.provider}: {why}; attach EFA devices, or ask for it with --provider tcp"
        verdict.violations.append(Violation("provider", "", ("efa",), (prediction.provider,), text))
        return verdict
    for placement in placements:
        choice = prediction.choices[placement.node]
        expected, actual = _names(placement.rails), _names(choice.rails)
        if choice.how == "unknown":
            verdict.notes.append(f"{placement.name}: {choice.why}; expected one of {_said(placement.rails)}")
        elif not placement.rails:
            used = _count(choice.rails, prediction.rails)
            text = f"{placement.name}: no EFA device is local to it ({placement.why}); NIXL would use {used}"
            verdict.violations.append(Violation("no local rail", placement.name, expected, actual, text))
        elif choice.rails != placement.rails:
            text = (
                f"{placement.name}: NIXL would use {_count(choice.rails, prediction.rails)} ({choice.why}), "
                f"local is {_said(placement.rails)} ({placement.why})"
            )
            verdict.violations.append(Violation("wrong rail", placement.name, expected, actual, text))
    return verdict


def judge_log(
    machine: Machine,
    placements: Sequence[Placement],
    log: NixlLog,
    provider: str = "efa",
    devices: Collection[Address] | None = None,
) -> Verdict:
    """Judge a log. ``devices`` are the accelerators of the process, where its caller knows them.

    On CUDA a line names the GPU. On Neuron it names the EFA device that libnrt gave, so that a log alone shows whether the memory
    went to one EFA device that belongs to a Neuron device, and only ``devices`` whether it was the right one's.
    """
    verdict = Verdict()
    writers = list(log.writers.values())
    for writer in writers:
        _providers(writer, provider, verdict)
        if provider == "efa":
            _fallbacks(writer, verdict)
    if provider == "efa":
        judge = _Placements(machine, placements, devices, verdict)
        for writer in writers:
            judge.registrations(writer)
        judge.unused(writers)
    _told(writers, log, provider, verdict)
    return verdict


def _providers(writer: Writer, wanted: str, verdict: Verdict) -> None:
    """Find rails of another provider than the wanted one; one violation a writer is enough."""
    lines = [(created.provider, created.line) for created in writer.created.values()] + writer.counts
    for found, line in lines:
        if found != wanted:
            cure = "; ask for it with --provider tcp if it is meant" if wanted == "efa" else ""
            text = f"NIXL opened {found} where {wanted} is wanted{cure}"
            verdict.violations.append(Violation("provider", "", (wanted,), (found,), text, str(line)))
            return


def _fallbacks(writer: Writer, verdict: Verdict) -> None:
    """Tell each kind of fallback once a writer, with its first line and how often it came."""
    for kind in dict.fromkeys(kind for kind, _ in writer.fallbacks):
        lines = [line for found, line in writer.fallbacks if found == kind]
        times = f" ({len(lines)} times)" if len(lines) > 1 else ""
        text = f"{_FALLBACK_TEXT[kind]}{times}"
        verdict.violations.append(Violation("fallback", "", (), (), text, str(lines[0])))


class _Placements:
    """Holds registrations against placements."""

    def __init__(
        self,
        machine: Machine,
        placements: Sequence[Placement],
        devices: Collection[Address] | None,
        verdict: Verdict,
    ) -> None:
        self._machine = machine
        self._placements = [one for one in placements if devices is None or one.node.where in devices]
        self._all = placements
        self._verdict = verdict
        self._told: set[tuple[object, ...]] = set()

    def registrations(self, writer: Writer) -> None:
        for registration in writer.registrations:
            self._registration(writer, registration)

    def _registration(self, writer: Writer, registration: Registration) -> None:
        try:
            node = self._machine.at(Address.parse(registration.device))
        except ValueError:
            if not writer.fallbacks:  # whose own line has told of it
                text = f"{writer.key}: NIXL has no PCI address ({registration.device!r}) for the device of {registration.memory}"
                line = str(next(iter(registration.rails.values()), ""))
                self._add(writer, Violation("device", registration.device, (), tuple(registration.rails), text, line))
            return
        strange = [name for name in registration.rails if self._machine.rail_named(name) is None]
        if node is None or strange:
            what = f"device {registration.device}" if node is None else f"rails {', '.join(strange)}"
            self._reason(
                f"{writer.key} names {what}, which {self._machine.source} does not have: is it this machine's log?"
            )
            return
        if node.is_efa:
            self._on_neuron(writer, registration, node)
            return
        placement = next((one for one in self._placements if one.node is node), None)
        if placement is None:
            at = (
                f"{registration.device} is not an accelerator of this process"
                if node.is_gpu
                else f"{registration.device} is none"
            )
            line = str(next(iter(registration.rails.values()), ""))
            self._add(writer, Violation("device", str(node.where), (), tuple(registration.rails), at, line))
            return
        self._hold(writer, registration, [placement])

    def _on_neuron(self, writer: Writer, registration: Registration, efa: Node) -> None:
        owners = [one for one in self._placements if efa in one.rails]
        self._hold(
            writer,
            registration,
            owners or [one for one in self._placements if one.kind == "neuron"],
            strict=bool(owners),
        )

    def _hold(
        self, writer: Writer, registration: Registration, placements: Sequence[Placement], strict: bool = True
    ) -> None:
        """Compare a registration's rails with those of the accelerators that it may be of."""
        local = {rail.rail for one in placements for rail in one.rails}
        name = " or ".join(one.name for one in placements) if strict else f"memory attached to {registration.device}"
        opened = {created.name for created in writer.created.values()}
        # A rail that the process was not shown is not NIXL's omission.
        expected = (local & opened or local) if opened else local
        actual = set(registration.rails)
        far = sorted(actual - local)
        said = f"{name}: registered on {self._where(sorted(actual))}, expected {self._where(sorted(expected))}"
        wanted, got = tuple(sorted(expected)), tuple(sorted(actual))
        if far:
            line = str(registration.rails[far[0]])
            near = {rail.rail for one in placements for rail in one.switch_rails}
            kind = "wrong rail" if set(far) <= near else "far rail"
            self._add(writer, Violation(kind, name, wanted, got, said, line))
        elif registration.whole and expected - actual and len(placements) == 1 and placements[0].kind == "cuda":
            line = str(next(reversed(registration.rails.values())))
            self._add(writer, Violation("missing rail", name, wanted, got, said, line))
        if not registration.whole:
            self._reason(
                f"{writer.key}: the log ends, or has a gap, within the registration of {registration.memory} on {name}"
            )

    def unused(self, writers: Iterable[Writer]) -> None:
        """Find rails that were opened and carry no memory, in the log of all processes together.

        A process of one GPU that is kept to its switch opens the rails of that GPU's neighbours too: by design, no violation. One
        that registered nothing in this log cannot be judged: it may be a thread beside the one that did, or cut off.
        """
        writers = list(writers)
        whole = all(registration.whole for writer in writers for registration in writer.registrations)
        if not whole or any(writer.untold for writer in writers):
            return  # what is missing may be what uses them; a reason has been given
        used = {name for writer in writers for name in writer.used}
        elsewhere = [one for writer in writers if not writer.created for one in writer.registrations]
        silent = [one for one in writers if one.created and not (one.registrations or elsewhere or one.host_rails)]
        for writer in silent:
            self._reason(f"{writer.key} opened rails, and no registration of it is in the log")
            used |= {created.name for created in writer.created.values()}  # for all that is known
        for writer in writers:
            registrations = writer.registrations or elsewhere
            if not writer.created or not registrations:
                continue
            idle = {created.name: created for created in writer.created.values() if created.name not in used}
            for name in self._neighbours(writer, registrations):
                idle.pop(name, None)
            if idle:
                text = (
                    f"{writer.key} opened {self._where(sorted(idle))} and put no memory on "
                    f"{'them' if len(idle) > 1 else 'it'}; keep the process to its rails with FI_EFA_IFACE"
                )
                first = next(iter(idle.values())).line
                self._add(writer, Violation("unused rail", "", (), tuple(sorted(idle)), text, str(first)))

    def _neighbours(self, writer: Writer, registrations: Sequence[Registration]) -> set[str]:
        """Return the rails that a process of one GPU shows for the sake of NIXL's split: the other ones of its switch."""
        mine = {name for registration in registrations for name in registration.rails}
        opened = {created.name for created in writer.created.values()}
        own = [one for one in self._all if one.kind == "cuda" and mine & set(_names(one.rails))]
        if len({registration.device for registration in registrations}) > 1 or len(own) != 1:
            return set()
        shown = set(_names(own[0].switch_rails))
        return shown - set(_names(own[0].rails)) if opened == shown else set()

    def _where(self, names: Sequence[str]) -> str:
        if len(names) > 2 and len(names) == len(self._machine.rails):  # noqa: PLR2004
            return f"all {len(names)} rails"
        parts = []
        for name in names:
            node = self._machine.rail_named(name)
            parts.append(f"{name} ({node.where})" if node is not None else name)
        return ", ".join(parts) or "none"

    def _add(self, writer: Writer, violation: Violation) -> None:
        """Tell of each device once a writer, however many regions it registers."""
        key = (writer.key, violation.kind, violation.device, violation.actual)
        if key not in self._told:
            self._told.add(key)
            self._verdict.violations.append(violation)

    def _reason(self, text: str) -> None:
        if text not in self._verdict.reasons:
            self._verdict.reasons.append(text)


def _told(writers: Sequence[Writer], log: NixlLog, provider: str, verdict: Verdict) -> None:
    """Say what the log would have needed to have, where it proves nothing."""
    files = f"{log.files} file{'s' if log.files != 1 else ''}"
    created = [writer for writer in writers if writer.created]
    registrations = [registration for writer in writers for registration in writer.registrations]
    if not created and not registrations:
        if any(writer.counts for writer in writers):
            what = "tells that NIXL opened rails, but not which"
        elif log.nixl_lines:
            what = "has lines of NIXL's, but none about rails"
        else:
            what = "has no line of NIXL's"
        verdict.reasons.append(f"the log ({files}) {what}: set {LEVEL} for the server and start it again")
        return
    if log.left_out:
        verdict.reasons.append(
            f"Ray left out {log.left_out} lines that are like others: set RAY_DEDUP_LOGS=0 for the server and start it again"
        )
    if provider != "efa":
        return
    if registrations:
        for writer in writers:
            if writer.untold:
                what = "registered device memory" if writer.device_memory else "opened rails"
                verdict.reasons.append(f"{writer.key} {what}, and does not tell which rails: set {LEVEL} for it too")
    if not registrations:
        if any(writer.device_memory for writer in writers):
            verdict.reasons.append(f"device memory was registered, but not told where: set {LEVEL} for the server")
        elif any(writer.host_rails for writer in writers) and not verdict.violations:
            verdict.reasons.append("only host memory was registered, which has no rails of its own")
    elif not created:
        verdict.notes.append("the log begins after the rails were opened: rails that are not used cannot be seen in it")
    if registrations:
        verdict.notes.append(_summary(registrations))


def _summary(registrations: Sequence[Registration]) -> str:
    devices = {registration.device for registration in registrations}
    return f"{len(registrations)} registrations of device memory, of {len(devices)} devices"


def _names(rails: Iterable[Node]) -> tuple[str, ...]:
    return tuple(rail.rail for rail in rails)


def _said(rails: Iterable[Node]) -> str:
    return ", ".join(f"{rail.rail} ({rail.where})" for rail in rails) or "none"


def _count(rails: Sequence[Node], every: Sequence[Node]) -> str:
    return f"all {len(rails)} rails" if len(rails) > 2 and len(rails) == len(every) else _said(rails)  # noqa: PLR2004

"""A worker's own check: whether its device memory is on the rails that were predicted for those that it is shown.

The only proof that NIXL gives is its log, on stderr of the process (``captured_stderr`` reads along). So the check can also come
out as *untold*: NIXL was not asked to log its placements, and nothing is wrong for all that is known. Only a mismatch is refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal

from kvxfer.errors import ConfigError, RailsError
from kvxfer.rails.local import place
from kvxfer.rails.nixl_log import LEVEL, Line, NixlLog, Registration
from kvxfer.rails.pci import Address
from kvxfer.rails.policy import VARIABLE, expectation

if TYPE_CHECKING:
    import logging
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from kvxfer.rails.local import Placement
    from kvxfer.rails.nixl_log import Writer
    from kvxfer.rails.pci import Machine, Node

POLICIES = ("warn", "enforce")
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the check found, in words that name device, expected and actual rails."""

    result: Literal["match", "mismatch", "untold"]
    text: str

    def settle(self, policy: str, logger: logging.Logger) -> None:
        """Say it: one info line for a match; a mismatch is a warning, or with ``enforce`` a RailsError.

        What could not be told is no fault, but ``enforce`` warns that it enforces nothing.
        """
        if policy not in POLICIES:
            raise ConfigError(f"rails_policy={policy!r} must be warn or enforce")
        if self.result == "match" or (self.result == "untold" and policy == "warn"):
            logger.info("%s", self.text)
        elif self.result == "mismatch" and policy == "enforce":
            raise RailsError(f"{self.text}; rails_policy=warn lets the worker go on")
        else:
            logger.warning("%s", self.text)


class RailsCheck:
    """The expectation of one process: its accelerators, and the EFA devices that it is shown (``Pin.rails``)."""

    def __init__(
        self,
        machine: Machine,
        devices: Sequence[Address],
        rails: Collection[Node],
        asked: Mapping[Address, Address] | None = None,
    ) -> None:
        self._machine = machine
        self._placements = [one for one in place(machine, asked) if one.node.where in devices]
        self._choices = expectation(machine, devices, rails, asked)
        self._shown = {rail.rail for rail in rails}

    def compare(self, lines: Iterable[str]) -> Outcome:
        """Compare with NIXL's log of the registration: all lines from the creation of the agent on, or any part of them."""
        log = NixlLog()
        log.read("log", lines)
        writers = list(log.writers.values())
        strange = {
            provider
            for writer in writers
            for provider in [created.provider for created in writer.created.values()]
            + [name for name, _ in writer.counts]
            if provider != "efa"
        }
        if strange:
            return Outcome("mismatch", f"rails: NIXL opened {', '.join(sorted(strange))}, expected EFA devices")
        found = [outcome for writer in writers for outcome in self._outcomes(writer)]
        wrong = next((one for one in found if one.result == "mismatch"), None)
        if wrong is not None:
            return wrong
        told = list(dict.fromkeys(one.text for one in found))
        if told:
            return Outcome("match", "rails: " + "; ".join(told + self._late(writers)))
        return Outcome("untold", f"rails: NIXL did not log where it put device memory; {LEVEL} shows it")

    def _outcomes(self, writer: Writer) -> Iterator[Outcome]:
        hosted = next((line for kind, line in writer.fallbacks if kind == "host memory"), None)
        if hosted is not None:
            yield Outcome("mismatch", f"rails: NIXL registered device memory as host memory: {hosted.text}")
        for registration in writer.registrations:
            yield self._compare(registration)
        if writer.registrations or not writer.device_memory:
            return
        # Without DEBUG: NIXL's own table of GPUs is an INFO line, and its fallback to every rail a warning.
        everywhere = next((line for kind, line in writer.fallbacks if kind == "all rails"), None)
        if everywhere is not None and any(choice.how != "all devices" for choice in self._choices.values()):
            wanted = "; ".join(
                f"{one.name} is registered on every rail, expected {_said(self._choices[one.node.where].rails)}"
                for one in self._placements
            )
            yield Outcome("mismatch", f"rails: {wanted}: {everywhere.text}")
        for device, rails in writer.table.items() if everywhere is None else ():
            if Address.parse(device) in self._choices:
                yield self._compare(Registration("", device, dict.fromkeys(rails, Line("log", 0, device))))

    def _late(self, writers: Sequence[Writer]) -> list[str]:
        """Say when more rails are open than were shown: something had started libfabric before the pin was set."""
        opened = {created.name for writer in writers for created in writer.created.values()}
        if opened <= self._shown:
            return []
        return [
            f"but {len(opened)} rails are open where {len(self._shown)} were to be: {VARIABLE} came after libfabric's start"
        ]

    def _compare(self, registration: Registration) -> Outcome:
        actual = {node for node in map(self._machine.rail_named, registration.rails) if node is not None}
        owners = self._owners(registration.device)
        for placement in owners:
            choice = self._choices[placement.node.where]
            right = actual <= set(placement.rails) if choice.how == "unknown" else actual == set(choice.rails)
            if right and actual and len(actual) == len(registration.rails):
                return Outcome("match", f"{placement.name} on {_said(actual)}, as expected ({choice.how})")
        names = " or ".join(placement.name for placement in owners) or f"device {registration.device}"
        wanted = " or ".join(
            _said(self._choices[placement.node.where].rails or placement.rails) for placement in owners
        )
        text = f"rails: {names} is registered on {', '.join(registration.rails)}, expected {wanted or 'none'}"
        return Outcome("mismatch", text)

    def _owners(self, device: str) -> list[Placement]:
        """Return whose memory it may be: a GPU is named itself, on Neuron the log has the EFA device, or nothing."""
        try:
            at = Address.parse(device)
        except ValueError:
            return [one for one in self._placements if one.kind == "neuron"]
        return [one for one in self._placements if one.node.where == at or one.kind == "neuron"]


def _said(rails: Iterable[Node]) -> str:
    return ", ".join(sorted(f"{rail.rail} ({rail.where})" for rail in rails)) or "none"


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Read along what the process writes to stderr meanwhile, native libraries too; the list has the lines afterwards.

    A process of its own (tee) reads and passes everything on at once: a library that ends this process over a variable says why
    just before, and one that holds Python's lock while it logs must not wait for us. Where there is no tee, no stderr (a daemon)
    or no room for a temporary file (a container whose file system is read-only), nothing is read: a check is not worth a worker.
    """
    lines: list[str] = []
    with ExitStack() as held:
        listening = None
        with suppress(OSError):
            listening = _listen(held)
        if listening is None:
            yield lines
            return
        reader, taken, real = listening
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(real.fileno(), 2)
            # A process that was started meanwhile keeps this stderr for its own, and the reader with it.
            with suppress(subprocess.TimeoutExpired):
                reader.wait(_PATIENCE)
            lines.extend(taken.read().decode(errors="replace").splitlines())


def _listen(held: ExitStack) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]] | None:
    """Put the reader in the place of stderr. Returns it, what it takes down and the real stderr; None where there is no tee."""
    tee = shutil.which("tee")
    if tee is None or sys.stderr is None:
        return None
    taken = held.enter_context(tempfile.NamedTemporaryFile())  # noqa: SIM115 - closed with the others
    real = held.enter_context(os.fdopen(os.dup(2), "wb"))
    sys.stderr.flush()
    reader = subprocess.Popen(
        [tee, taken.name], stdin=subprocess.PIPE, stdout=real, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert reader.stdin is not None
    with reader.stdin:
        os.dup2(reader.stdin.fileno(), 2)
    return reader, taken, real

"""A worker process keeps itself to its rails, and says once whether NIXL did as was expected.

Order is everything. ``WorkerRails`` sets FI_EFA_IFACE when it is made: when the device is known, and before NIXL's agent exists.
``watched`` is to surround what makes the agent and registers the cache, ``settle`` comes after it.

There are two witnesses of what NIXL did. Its log names the rails of each registration with NIXL_LOG_LEVEL=DEBUG, its table of
GPUs with INFO, and its fallbacks always. And the device files that this process has open name the rails that libfabric has
opened: those of FI_EFA_IFACE where it closes the others again, or all of them (libfabric, prov/efa/src/efa_device.c and
efa_prov_info.c of several ages). So a rail without an open file carries nothing; and where exactly those are open on which the
memory is expected, it is nowhere else. Neither witness says more than that, and neither does this module.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvxfer.errors import KvxferError, RailsError
from kvxfer.rails.check import Outcome, RailsCheck, captured_stderr
from kvxfer.rails.local import place
from kvxfer.rails.nixl_log import LEVEL
from kvxfer.rails.pci import Address, Machine
from kvxfer.rails.policy import VARIABLE, Pin, expectation, pin, unknown_names
from kvxfer.rails.sysfs import read_sysfs

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from kvxfer.rails.local import Placement
    from kvxfer.rails.pci import Node

logger = logging.getLogger("kvxfer.rails")

_LOG_LEVEL = "NIXL_LOG_LEVEL"
_UVERBS = re.compile(r"/dev/infiniband/(uverbs\d+)")


class Accelerator(Protocol):
    """What a platform says of its devices, see ``kvxfer.platform``."""

    def pci_address(self, device: int) -> str | None:
        """Return the PCI address of a device; None for host memory."""

    def local_rails(self, device: int) -> Sequence[str] | None:
        """Name the EFA devices local to it. Asked of Neuron devices only, for which libnrt knows better than any tree."""


class WorkerRails:
    """The rails of one worker process, whose cache is in memory of the platform's ``device``.

    ``settings`` are ``rails`` and ``rails_policy`` of docs/settings.md. Raises ConfigError for a rail that this machine does
    not have; RailsError with ``enforce`` when there is nothing to keep to.
    """

    def __init__(
        self,
        settings: tuple[str | Sequence[str], str],
        backend: str,
        platform: Accelerator,
        device: int,
        environment: MutableMapping[str, str] | None = None,
        root: Path = Path("/"),
    ) -> None:
        self._setting, self._policy = settings
        self._environment = os.environ if environment is None else environment
        self._root = root
        self._device: Address | None = None
        self._asked: dict[Address, Address] | None = None
        self._machine = Machine((), str(root))
        self._lines: list[str] = []
        self.pin = self._elsewhere(backend) or self._decide(platform, device)
        self._set()

    # --- before -----------------------------------------------------------------------------------------------------

    def _elsewhere(self, backend: str) -> Pin | None:
        """Return why rails are no matter here."""
        provider = self._environment.get("FI_PROVIDER", "")
        if backend != "LIBFABRIC":
            return Pin(None, (), f"the backend is {backend}, which chooses its devices by itself")
        if provider and ("efa" in re.split("[;,]", provider.lstrip("^"))) == provider.startswith("^"):
            return Pin(None, (), f"FI_PROVIDER={provider} keeps libfabric from EFA devices")
        return None

    def _decide(self, platform: Accelerator, device: int) -> Pin:
        machine = read_sysfs(self._root)
        if not machine.rails:
            return pin(machine, [], "all", self._environment)
        self._machine = machine
        try:
            self._device = self._find(platform, device)
        except KvxferError as error:
            if self._setting == "local" and not self._environment.get(VARIABLE):
                return self._unpinned(str(error))
            logger.warning("rails: what NIXL does cannot be checked: %s", error)
        devices = [] if self._device is None else [self._device]
        return pin(machine, devices, self._setting, self._environment, self._asked)

    def _find(self, platform: Accelerator, device: int) -> Address | None:
        """Find the device on the bus, and take the platform's answer for a Neuron device."""
        told = platform.pci_address(device)
        if told is None:
            return None
        try:
            address = Address.parse(told)
        except ValueError as error:
            raise RailsError(f"the platform's address of its device {device} cannot be read: {error}") from None
        node = self._machine.at(address)
        if node is None or node not in self._machine.accelerators:
            raise RailsError(
                f"the accelerator {told} is not on the PCI bus as this process sees it ({self._machine.source})"
            )
        if node.is_neuron:
            rails = [self._machine.rail_named(name) for name in platform.local_rails(device) or ()]
            if len(rails) == 1 and rails[0] is not None:
                self._asked = {address: rails[0].where}
        return address

    def _unpinned(self, why: str) -> Pin:
        """Leave every rail open, though this is not what was asked for."""
        text = f"rails: nothing to keep to: {why}; set rails to a list of names or PCI addresses, or rails=all"
        if self._policy == "enforce":
            raise RailsError(f"{text}; rails_policy=warn lets the worker go on")
        logger.warning("%s", text)
        return pin(self._machine, [], "all", self._environment)

    def _set(self) -> None:
        """Set the variables that libfabric and NIXL read when they start, and say so in one line."""
        self.pin.apply(self._environment)
        preset = self._environment.get(VARIABLE)
        if preset == "":
            del self._environment[VARIABLE]  # libfabric aborts the process over an empty one
        if self._comparable and self._policy == "enforce":
            self._environment.setdefault(_LOG_LEVEL, "INFO")  # what is to be enforced must be told
        if self.pin.value is not None:
            logger.info("rails: %s=%s (%s)", VARIABLE, self.pin.value, self.pin.why)
        elif preset and self._machine.rails and not self.pin.rails:
            have = ", ".join(rail.rail for rail in self._machine.rails)
            logger.warning(
                "rails: %s=%s names no EFA device; exact names, with commas between: %s", VARIABLE, preset, have
            )
        else:
            logger.info("rails: nothing is pinned: %s", self.pin.why)
            self._doubt(preset or "")
        if self.pin.value is not None or self.pin.rails:
            self._far()

    def _doubt(self, preset: str) -> None:
        """Tell of names in a preset value that libfabric leaves out without a word: a space behind a comma makes one."""
        lost = unknown_names(self._machine, preset) if self._machine.rails else []
        if lost:
            logger.warning(
                "rails: %s=%s: %s is no EFA device here, and left out; exact names, with nothing but commas between",
                VARIABLE, preset, ", ".join(map(repr, lost)),
            )  # fmt: skip

    def _far(self) -> None:
        """Tell when the rails that somebody chose are all far from the device: NIXL takes them, and nothing else says so."""
        for one in place(self._machine, self._asked):
            if (
                one.node.address == self._device
                and one.rails
                and not {*one.rails, *self._near(one)} & {*self.pin.rails}
            ):
                logger.warning(
                    "rails: %s is kept to %s, none of which is local to it: local is %s (%s)",
                    one.name, _listed({rail.rail for rail in self.pin.rails}), _listed({rail.rail for rail in one.rails}),
                    one.why,
                )  # fmt: skip

    @staticmethod
    def _near(placement: Placement) -> Sequence[Node]:
        """Return what else is as good: on CUDA NIXL deals all of the switch's rails out anew among those that are shown."""
        return placement.switch_rails if placement.kind == "cuda" else ()

    # --- after ------------------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Listen to NIXL's log meanwhile, where there is something to compare with: stderr is the process's, so keep it short."""
        if not self._comparable:
            yield
            return
        with captured_stderr() as lines:
            yield
        self._lines = lines

    def settle(self) -> None:
        """Compare what NIXL did with what was expected, and say so once. Raises RailsError at a mismatch that is ``enforce``d."""
        if self._comparable:
            self._outcome().settle(self._policy, logger)

    @property
    def _comparable(self) -> bool:
        """Whether memory of an accelerator is to be on rails."""
        return self._device is not None

    def _outcome(self) -> Outcome:
        assert self._device is not None
        check = RailsCheck(self._machine, [self._device], self.pin.rails, self._asked)
        told = check.compare(self._lines)
        opened = opened_rails(self._machine, self._root)
        if told.result != "untold" or not opened:
            return told
        shown = {rail.rail for rail in self.pin.rails}
        choice = expectation(self._machine, [self._device], self.pin.rails, self._asked)[self._device]
        wanted = {rail.rail for rail in choice.rails}
        device = f"the device at {self._device}"
        if not wanted <= opened:
            text = f"rails: {device} is expected on {_listed(wanted)}; this process has opened {_listed(opened)}"
            return Outcome("mismatch", text)
        if wanted == opened:
            text = f"rails: {device} on {_listed(wanted)}, as expected: no other EFA device is open in this process"
            return Outcome("match", text)
        text = f"rails: NIXL did not log where it put {device}, expected on {_listed(wanted)}; {LEVEL} shows it"
        if not opened <= shown:
            text += (
                f". {len(opened)} EFA devices are open where {len(shown)} were to be: libfabric was started before "
                f"{VARIABLE} was set, or it is one that opens them all"
            )
        return Outcome("untold", text)


def opened_rails(machine: Machine, root: Path = Path("/")) -> set[str]:
    """Name the EFA devices that this process has open, by its file descriptors; empty where that cannot be seen."""
    files = set()
    try:
        entries = list((root / "proc/self/fd").iterdir())
    except OSError:
        return set()
    for entry in entries:
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # closed meanwhile
        if found := _UVERBS.fullmatch(target):
            files.add(found[1])
    return {
        rail.rail
        for rail in machine.efas
        if any((root / f"sys/bus/pci/devices/{rail.where}/infiniband_verbs" / name).exists() for name in files)
    }


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"

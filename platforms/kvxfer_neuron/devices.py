"""From a core to its Neuron device, that device's PCI address, its EFA device and its NUMA node, on this host.

A Neuron device has up to four numbers: the index by which the runtime counts it here, the N of its file /dev/neuronN, the file's
minor number, which is its index on the host, and its place on the PCI bus. In a container the first two may differ from the
third. AWS's published addresses, and its map to EFA devices, go by the third (``kvxfer.rails``). libnrt turns the first into the
third; without it the files do, where they are numbered from 0 without a gap, so that the first two are one. Else the answer is
refused: a neighbour's EFA device would work too, and nobody would see why it is slow.

Nothing is believed that the PCI tree contradicts. KVXFER_NEURON_DEVICE (a host index or a PCI address), KVXFER_NEURON_EFA (names
or PCI addresses) and KVXFER_NEURON_INSTANCE_TYPE settle what stays open.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kvxfer.errors import ConfigError, PlatformError
from kvxfer.rails.instances import INSTANCE_TYPES, candidates
from kvxfer.rails.local import place
from kvxfer.rails.pci import NEURON_DEVICES, Address
from kvxfer.rails.sysfs import read_sysfs
from kvxfer_neuron import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvxfer.rails.local import Placement
    from kvxfer.rails.pci import Machine, Node
    from kvxfer_neuron.nrt import Nrt

DEVICE: Final = cores.DEVICE
EFA: Final = "KVXFER_NEURON_EFA"
INSTANCE_TYPE: Final = "KVXFER_NEURON_INSTANCE_TYPE"
FAMILY: Final = "VLLM_NEURON_EFA_INSTANCE_FAMILY"
"""vllm-neuron's setting for the same; trn2, trn3pd, trn3pds."""


class Devices:
    """The Neuron devices of a host as this process sees them. What is read is read once.

    ``root`` has sys, dev and proc; ``neuron_ls`` returns what ``neuron-ls -j`` prints, empty where there is none; ``nrt`` returns
    libnrt, or raises PlatformError.
    """

    def __init__(
        self, root: Path, environment: Mapping[str, str], neuron_ls: Callable[[], str], nrt: Callable[[], Nrt]
    ) -> None:
        self._root = root
        self._environment = environment
        self._neuron_ls = neuron_ls
        self._nrt = nrt

    @cached_property
    def files(self) -> dict[int, int]:
        """The N of each /dev/neuronN → the device's index on the host."""
        found = {}
        for path in (self._root / "dev").glob("neuron[0-9]*"):
            number = path.name.removeprefix("neuron")
            if number.isascii() and number.isdigit() and os.access(path, os.R_OK | os.W_OK):
                status = path.stat()
                found[int(number)] = os.minor(status.st_rdev) if stat.S_ISCHR(status.st_mode) else int(number)
        return found

    @cached_property
    def machine(self) -> Machine:
        """The PCI tree, with the host's indices where ``neuron-ls`` told them.

        Where files are renumbered, ``neuron-ls`` may count either way: what it says is then left out.
        """
        renumbered = any(number != index for number, index in self.files.items())
        machine = read_sysfs(self._root, "" if renumbered else self._neuron_ls())
        said = self._environment.get(INSTANCE_TYPE, "").strip() or self._environment.get(FAMILY, "").strip()
        return dataclasses.replace(machine, instance_type=_instance_type(said)) if said else machine

    @cached_property
    def placements(self) -> list[Placement]:
        """Where each Neuron device of the host is, with its rails."""
        return [placement for placement in place(self.machine) if placement.kind == "neuron"]

    def placement(self, ordinal: int) -> Placement:
        """Return the device behind a device ordinal of this process. Raises PlatformError or ConfigError with what to set."""
        if not self.placements:
            raise PlatformError(
                f"there is no Neuron device on the PCI bus ({self.machine.source}): kvxfer's Neuron platform needs trn1, trn1n, "
                "trn2 or trn3, and a container that is shown /sys"
            )
        said = self._environment.get(DEVICE, "").strip()
        if said:
            return self._named(said)
        if len(self.placements) == 1:
            return self.placements[0]
        return self._at(self.host_index(ordinal))

    def host_index(self, ordinal: int) -> int:
        """Return a device's index on the host: from the cores of this process, by way of the runtime's own index."""
        family = NEURON_DEVICES[self.placements[0].node.device]
        mine = cores.visible(self._environment)
        lnc = cores.logical_size(self._environment, family)
        found = cores.devices(mine, lnc, family, self._physical())
        if max(found) >= len(self.files):
            raise ConfigError(
                f"{mine.source} is beyond the {len(self.files)} Neuron devices here: with {lnc} physical cores to a logical one "
                f"it would be on device {max(found)}. Set {cores.LNC[0]} as the runtime has it, and cores that are here"
            )
        if len(set(found)) == 1:
            return self._on_host(found[0], mine.source)
        if not 0 <= ordinal < len(found):
            raise ConfigError(
                f"{mine.source} has {len(found)} cores on Neuron devices {sorted(set(found))}, and none of them is device "
                f"ordinal {ordinal}: give each worker one core, or set {DEVICE}"
            )
        return self._on_host(found[ordinal], mine.source)

    def efas(self) -> tuple[Node, ...]:
        """Return the EFA devices that KVXFER_NEURON_EFA names; empty where it is not set."""
        found = []
        for entry in filter(None, map(str.strip, self._environment.get(EFA, "").split(","))):
            node = self.machine.rail_named(entry)
            if node is None:
                try:
                    node = self.machine.at(Address.parse(entry))
                except ValueError:
                    node = None
            if node is None or not node.is_efa or not node.usable:
                have = ", ".join(f"{rail.rail} ({rail.where})" for rail in self.machine.rails) or "none"
                raise ConfigError(f"{EFA}: {entry!r} is no EFA device that can be opened here; there are {have}")
            found.append(node)
        return tuple(found)

    def cpus_near(self, node: Node) -> frozenset[int] | None:
        """Return the CPUs of a device's NUMA node; None where the host does not tell."""
        if node.numa is None:
            return None
        try:
            text = (self._root / f"sys/devices/system/node/node{node.numa}/cpulist").read_text()
        except OSError:
            return None
        return frozenset(_cpu_list(text)) or None

    # ------------------------------------------------------------------------------------------------------------------

    def _on_host(self, index: int, source: str) -> int:
        """Turn the runtime's index of a device into the host's."""
        if all(number == host for number, host in self.files.items()) and len(self.files) == len(self.placements):
            return index  # every device of the host is here, under its own number
        try:
            return self._nrt().host_device(index)
        except PlatformError as error:
            reason = str(error)
        if sorted(self.files) == list(range(len(self.files))):
            return self.files[index]
        have = ", ".join(f"/dev/neuron{number}" for number in sorted(self.files))
        raise PlatformError(
            f"{source} is on the runtime's Neuron device {index}, and which of the host's that is is not known: the files here "
            f"are not numbered from 0 ({have}), and {reason}. Set {DEVICE} to the host's index or PCI address of the device"
        )

    def _at(self, index: int) -> Placement:
        """Return the device with a host index, where its number on the PCI bus is more than a guess."""
        told = self.machine.neuron_index
        for placement in self.placements:
            if told.get(placement.node.where) == index:
                return placement
        for placement in self.placements:
            if placement.index == index and placement.node.where not in told and self._published(placement):
                return placement
        raise PlatformError(
            f"Neuron device {index} of this host is at a PCI address that nobody tells: AWS publishes none for instance type "
            f"{self.machine.instance_type or 'unknown'!r}, and neuron-ls -j did not say. Put neuron-ls on the PATH "
            f"(aws-neuronx-tools), or set {DEVICE} to the device's PCI address, or {INSTANCE_TYPE} (one of "
            f"{', '.join(name for name, row in INSTANCE_TYPES.items() if row.kind == 'neuron')})"
        )

    def _published(self, placement: Placement) -> bool:
        """Tell whether AWS's published addresses have a device of this number there, whichever of them may hold here."""
        node = placement.node
        rows = candidates(
            self.machine.instance_type, NEURON_DEVICES[node.device], [efa.where for efa in self.machine.efas]
        )
        pairs = [row.pair_at(node.where) for row in rows]
        return bool(pairs) and all(pair is not None and pair.index == placement.index for pair in pairs)

    def _named(self, said: str) -> Placement:
        have = ", ".join(placement.name for placement in self.placements)
        if said.isascii() and said.isdigit():
            return self._at(int(said))
        try:
            address = Address.parse(said)
        except ValueError:
            raise ConfigError(
                f"{DEVICE}={said!r} is neither a host index nor a PCI address; there are {have}"
            ) from None
        for placement in self.placements:
            if placement.node.address == address:
                return placement
        raise ConfigError(f"{DEVICE}={said}: no Neuron device is there; there are {have}")

    def _physical(self) -> int | None:
        """Read the driver's count of a device's physical cores."""
        counts = set()
        for path in (self._root / "sys/class/neuron_device").glob("neuron[0-9]*/core_count"):
            try:
                counts.add(int(path.read_text()))
            except (OSError, ValueError):
                continue
        return counts.pop() if len(counts) == 1 else None


def _instance_type(said: str) -> str:
    """Read an instance type, or a family as vllm-neuron and AWS's device map name it (trn2, trn3pds)."""
    for name, row in INSTANCE_TYPES.items():
        if row.kind == "neuron" and said in (name, name.partition(".")[0]) and (row.efas or said == name):
            return name
    if re.fullmatch(r"trn3pd\d*", said):
        return "trn3pd98.48xlarge"
    known = ", ".join(name for name, row in INSTANCE_TYPES.items() if row.kind == "neuron")
    raise ConfigError(f"instance type {said!r} ({INSTANCE_TYPE}, {FAMILY}) is not known; known are {known}")


def _cpu_list(text: str) -> list[int]:
    cpus: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match:
            cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cpus

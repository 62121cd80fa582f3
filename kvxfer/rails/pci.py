"""PCI addresses, and the tree that a machine's devices hang in.

The tree has the levels that decide about rails: machine, package (one per NUMA node), host bridge, bridges (a PCIe switch is a
bridge with bridges below it), devices. It is hwloc's tree, since that is what NIXL looks at; ``sysfs`` builds the same
shape from the kernel's files. Nodes come in hwloc's order: depth first, children by address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

AMAZON, NVIDIA = 0x1D0F, 0x10DE
NEURON_DEVICES = {0x7264: "inf2", 0x7164: "trn1", 0x7364: "trn2", 0x7564: "trn3", 0x7565: "trn3"}
"""PCI device ids that NIXL takes for Neuron devices, with their family (nixl 1.4.1, libfabric_topology.cpp, isNeuronAccel)."""

_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)

Kind = Literal["machine", "package", "host bridge", "bridge", "device"]


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a PCI function is. Written ``dddd:bb:dd.f``; read with a shorter or no domain too."""

    domain: int
    bus: int
    device: int
    function: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address. Raises ValueError when it is none."""
        match = _ADDRESS.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a PCI address (0000:59:00.0)")
        domain, *rest = match.groups()
        return cls(int(domain or "0", 16), *(int(part, 16) for part in rest))

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One object of the tree, compared by identity. Unknown numbers are 0, None or empty; ``link`` is in Gbit/s."""

    kind: Kind
    parent: Node | None = None
    address: Address | None = None
    vendor: int = 0
    device: int = 0
    pci_class: int = 0
    numa: int | None = None
    link: float = 0.0
    buses: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    usable: bool = True
    """Whether this process has what it needs to open the device: a container may hide device files, but not the tree."""

    @property
    def where(self) -> Address:
        """Return the address of a node that must have one."""
        assert self.address is not None, self.kind
        return self.address

    @property
    def is_gpu(self) -> bool:
        """Whether NIXL takes it for an NVIDIA GPU (vendor, and a display controller's class)."""
        return self.kind == "device" and self.vendor == NVIDIA and 0x300 <= self.pci_class < 0x400  # noqa: PLR2004

    @property
    def is_neuron(self) -> bool:
        """Whether NIXL takes it for a Neuron device."""
        return self.kind == "device" and self.vendor == AMAZON and self.device in NEURON_DEVICES

    @property
    def is_efa(self) -> bool:
        """Whether it is an EFA device: 1d0f:efa0 and the fifteen ids behind it, as NIXL tests."""
        return self.kind == "device" and self.vendor == AMAZON and self.device & 0xFFF0 == 0xEFA0  # noqa: PLR2004

    @property
    def rail(self) -> str:
        """Name of an EFA device, as ibverbs and FI_EFA_IFACE have it.

        Where the tree has no name it is rdma-core's own: rdmap<bus>s<slot>[f<function>], decimal, with the domain if it has one.
        """
        if self.names:
            return self.names[0]
        at = self.where
        domain = f"P{at.domain}p" if at.domain else "p"
        return f"rdma{domain}{at.bus}s{at.device}" + (f"f{at.function}" if at.function else "")

    @property
    def label(self) -> str:
        """Return what an operator knows it by: a bus range (46-5c) for what has buses below it."""
        if self.buses is not None:
            return f"{self.buses[0]:02x}-{self.buses[1]:02x}"
        if self.address is not None:
            return str(self.address)
        return f"NUMA node {self.numa}" if self.kind == "package" and self.numa is not None else self.kind

    def upwards(self) -> Iterator[Node]:
        """Yield the node itself, its parent, and so on to the machine."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Machine:
    """A machine's devices in the order of hwloc. ``source`` says where they were read, for people."""

    nodes: tuple[Node, ...]
    source: str
    instance_type: str = ""
    neuron_index: dict[Address, int] = field(default_factory=dict)
    """Host index of Neuron devices, where the driver's tools told it."""

    @cached_property
    def gpus(self) -> list[Node]:
        """NVIDIA GPUs, in hwloc's order."""
        return [node for node in self.nodes if node.is_gpu]

    @cached_property
    def neurons(self) -> list[Node]:
        """Neuron devices, in hwloc's order."""
        return [node for node in self.nodes if node.is_neuron]

    @cached_property
    def accelerators(self) -> list[Node]:
        """GPUs and Neuron devices, in hwloc's order."""
        return [node for node in self.nodes if node.is_gpu or node.is_neuron]

    @cached_property
    def efas(self) -> list[Node]:
        """EFA devices, in hwloc's order, those that cannot be opened here too."""
        return [node for node in self.nodes if node.is_efa]

    @cached_property
    def rails(self) -> list[Node]:
        """EFA devices that this process could open: what libfabric would list without FI_EFA_IFACE."""
        return [node for node in self.efas if node.usable]

    def at(self, address: Address) -> Node | None:
        """Return the device at an address."""
        return next((node for node in self.nodes if node.kind == "device" and node.address == address), None)

    def rail_named(self, name: str) -> Node | None:
        """Return the EFA device of a name, libfabric's domain names (rdmap85s0-rdm) too."""
        plain = rail_name(name)
        return next((node for node in self.efas if plain == node.rail or plain in node.names), None)


def rail_name(domain: str) -> str:
    """Take the endpoint type off libfabric's name of an EFA domain, which leaves the device's name."""
    return re.sub(r"-(rdm|dgrm)$", "", domain)

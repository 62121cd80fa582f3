"""Machines of every instance type in the facts, as fake sysfs trees and as hwloc XML files, made from a few numbers each.

A PCIe switch is three bridges deep, as EC2 has it: root port, upstream port, and one downstream port for each device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

if TYPE_CHECKING:
    from pathlib import Path

GPU, NEURON, EFA, ENA, NVSWITCH = "gpu", "neuron", "efa", "ena", "nvswitch"


@dataclass
class Device:
    at: str  # 0000:59:00.0
    vendor: int
    device: int
    pci_class: int
    name: str = ""  # ibverbs
    hidden: bool = False


@dataclass
class Bridge:
    at: str
    buses: tuple[int, int]
    children: list


@dataclass
class Host:
    """A host bridge, and the NUMA node that it is on (-1: not told)."""

    buses: tuple[int, int]
    numa: int
    children: list = field(default_factory=list)


@dataclass
class Topology:
    hosts: list[Host]
    product: str = ""
    numa_nodes: int = 2

    def devices(self):
        def below(entries):
            for entry in entries:
                if isinstance(entry, Device):
                    yield entry
                else:
                    yield from below(entry.children)

        for host in self.hosts:
            yield from below(host.children)

    def without(self, *addresses: str) -> Topology:
        """The same machine with devices taken out; the ports stay."""

        def cut(entry):
            if isinstance(entry, Device):
                return entry
            return replace(entry, children=[cut(c) for c in entry.children if getattr(c, "at", "") not in addresses])

        return replace(self, hosts=[cut(host) for host in self.hosts])


# --- parts ------------------------------------------------------------------------------------------------------------


def device(kind: str, at: str, device_id: int = 0, hidden: bool = False) -> Device:
    if at.count(":") == 1:
        at = f"0000:{at}"
    domain, bus, rest = at.split(":")
    slot, function = rest.split(".")
    if kind == EFA:
        ending = f"f{int(function)}" if int(function) else ""
        prefix = f"P{int(domain, 16)}p" if int(domain, 16) else "p"
        return Device(
            at, 0x1D0F, device_id or 0xEFA2, 0x0200, f"rdma{prefix}{int(bus, 16)}s{int(slot, 16)}{ending}", hidden
        )
    vendor, default, pci_class = {
        GPU: (0x10DE, 0x2335, 0x0302),
        NEURON: (0x1D0F, 0x7364, 0x0880),
        ENA: (0x1D0F, 0xEC20, 0x0200),
        NVSWITCH: (0x10DE, 0x22A3, 0x0680),
    }[kind]
    return Device(at, vendor, device_id or default, pci_class, hidden=hidden)


def switch(first: int, numa: int, devices: dict[int, tuple], domain: int = 0) -> Host:
    """A host bridge over a PCIe switch whose downstream ports are on bus ``first``; ``devices``: bus → (kind, device id)."""
    last = max(devices)
    ports = []
    for number, (bus, (kind, device_id)) in enumerate(sorted(devices.items())):
        at = f"{domain:04x}:{first:02x}:{number // 8:02x}.{number % 8}"
        ports.append(Bridge(at, (bus, bus), [device(kind, f"{domain:04x}:{bus:02x}:00.0", device_id)]))
    upstream = Bridge(f"{domain:04x}:{first - 1:02x}:00.0", (first, last), ports)
    root = Bridge(f"{domain:04x}:{first - 2:02x}:00.0", (first - 1, last), [upstream])
    return Host((first - 2, last), numa, [root])


def root_bus(bus: int, numa: int, devices: list[Device]) -> Host:
    return Host((bus, bus), numa, list(devices))


def management() -> Host:
    """Bus 0 of every instance: no EFA device, no accelerator."""
    return Host((0, 0), 0, [device(ENA, "00:05.0")])


# --- instance types ---------------------------------------------------------------------------------------------------


def trn2(product: str = "", move: int = 0) -> Topology:
    """``move`` numbers all buses that much higher, as another firmware would."""
    hosts = []
    for numa, switches in (
        (0, ((0x46, 0x59), (0x5C, 0x6F), (0x72, 0x85), (0x88, 0x9B))),
        (1, ((0xA3, 0xB6), (0xB9, 0xCC), (0xCF, 0xE2), (0xE5, 0xF8))),
    ):
        for first, last in switches:
            end = last + move
            parts = {end - 3: (EFA, 0xEFA2), end - 2: (EFA, 0xEFA2), end - 1: (NEURON, 0x7364), end: (NEURON, 0x7364)}
            hosts.append(switch(first + move, numa, parts))
    return Topology([management(), *hosts], product)


def trn1(product: str = "") -> Topology:
    hosts = [
        root_bus(
            bus,
            numa,
            [device(EFA, f"{bus:02x}:{slot:02x}.0", 0xEFA1) for slot in (0x19, 0x1A)]
            + [device(NEURON, f"{bus:02x}:{slot:02x}.0", 0x7164) for slot in (0x1B, 0x1C, 0x1D, 0x1E)],
        )
        for numa, bus in ((0, 0x10), (0, 0x20), (1, 0x90), (1, 0xA0))
    ]
    return Topology([management(), *hosts], product)


def trn1n(product: str = "") -> Topology:
    hosts = [
        root_bus(
            bus,
            numa,
            [device(EFA, f"{bus:02x}:{slot:02x}.0", 0xEFA1) for slot in (0x17, 0x18, 0x19, 0x1A)]
            + [device(NEURON, f"{bus:02x}:{slot:02x}.0", 0x7164) for slot in (0x1B, 0x1C, 0x1D, 0x1E)],
        )
        for numa, bus in ((0, 0x10), (0, 0x20), (1, 0x90), (1, 0xA0))
    ]
    return Topology([management(), *hosts], product)


def trn2_3xlarge(efas: int = 0, product: str = "trn2.3xlarge") -> Topology:
    """One Neuron device; an EFA device that is asked for comes beside it, on bus 0."""
    devices = [device(NEURON, "00:1e.0")] + [device(EFA, f"00:{0x1A + number:02x}.0") for number in range(efas)]
    return Topology([root_bus(0, -1, devices)], product, numa_nodes=1)


def trn3(product: str = "") -> Topology:
    """Eight switches of two EFA devices, whose buses AWS's map has, and two Neuron devices on the buses behind (made up)."""
    hosts = []
    for numa, efas in (
        (0, ((0x4B, 0x4C), (0x61, 0x62), (0x77, 0x78), (0x8D, 0x8E))),
        (1, ((0xA8, 0xA9), (0xBE, 0xBF), (0xD4, 0xD5), (0xEA, 0xEB))),
    ):
        for first, second in efas:
            parts = {
                first: (EFA, 0xEFA3),
                second: (EFA, 0xEFA3),
                second + 1: (NEURON, 0x7564),
                second + 2: (NEURON, 0x7565),
            }
            hosts.append(switch(first - 0x10, numa, parts))
    return Topology([management(), *hosts], product)


def p4d(product: str = "") -> Topology:
    hosts = [
        root_bus(
            bus,
            numa,
            [device(EFA, f"{bus:02x}:1b.0", 0xEFA0)]
            + [device(GPU, f"{bus:02x}:{slot:02x}.0", 0x20B0) for slot in (0x1C, 0x1D)],
        )
        for numa, bus in ((0, 0x10), (0, 0x20), (1, 0x90), (1, 0xA0))
    ]
    return Topology([management(), *hosts], product)


def p5(product: str = "", gpu: int = 0x2330) -> Topology:
    hosts = []
    for numa, gpus in ((0, (0x53, 0x64, 0x75, 0x86)), (1, (0x97, 0xA8, 0xB9, 0xCA))):
        for bus in gpus:
            parts = {bus - back: (EFA, 0xEFA1) for back in (4, 3, 2, 1)}
            hosts.append(switch(bus - 0xD, numa, {**parts, bus: (GPU, gpu)}))
    return Topology([management(), *hosts], product)


def p5en(product: str = "", move: int = 0) -> Topology:
    hosts = []
    for numa, switches in ((0, ((0x46, 0x5C), (0x5F, 0x75))), (1, ((0x78, 0x8E), (0x91, 0xA7)))):
        for first, last in switches:
            end = last + move
            parts = {end - back: (EFA, 0xEFA2) for back in (7, 6, 5, 4)}
            hosts.append(
                switch(
                    first + move, numa, {**parts, end - 3: (GPU, 0x2335), end - 2: (GPU, 0x2335), end: (ENA, 0xEC20)}
                )
            )
    return Topology([management(), *hosts], product)


def p6_b200(product: str = "") -> Topology:
    hosts = []
    for numa, switches in ((0, ((0x4F, 0x51), (0x60, 0x62))), (1, ((0x71, 0x75), (0x84, 0x86)))):
        for efa, gpu in switches:
            parts = {efa: (EFA, 0xEFA3), efa + 1: (EFA, 0xEFA3), gpu: (GPU, 0x2901), gpu + 1: (GPU, 0x2901)}
            hosts.append(switch(efa - 0x0A, numa, parts))
    return Topology([management(), *hosts], product)


def virtual_machine(gpus: int = 2, efas: int = 1, product: str = "g5.48xlarge") -> Topology:
    """All on one bus, no switch, no NUMA node told."""
    devices = [device(EFA, f"00:{0x10 + number:02x}.0", 0xEFA1) for number in range(efas)]
    devices += [device(GPU, f"00:{0x1B + number:02x}.0", 0x2237) for number in range(gpus)]
    return Topology([root_bus(0, -1, devices)], product, numa_nodes=1)


# --- as files ---------------------------------------------------------------------------------------------------------


def write_sysfs(topology: Topology, root: Path) -> Path:
    """Write sys, dev and proc of a machine below ``root``, with the links that the kernel makes."""
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    verbs = 0
    counts = {GPU: 0, NEURON: 0}
    for folder in ("dev/infiniband", "proc/driver/nvidia/gpus"):
        (root / folder).mkdir(parents=True)

    def put(path: Path, **values: object) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (path / name).write_text(f"{value}\n")

    def write(entry, above: Path, numa: int) -> None:
        nonlocal verbs
        path = above / entry.at
        if isinstance(entry, Bridge):
            first, last = entry.buses
            put(
                path,
                vendor="0x1d0f",
                device="0x0200",
                numa_node=numa,
                secondary_bus_number=first,
                subordinate_bus_number=last,
            )
            put(path, **{"class": "0x060400", "current_link_speed": "32.0 GT/s PCIe", "current_link_width": 16})
            for child in entry.children:
                write(child, path, numa)
        else:
            put(path, vendor=f"{entry.vendor:#06x}", device=f"{entry.device:#06x}", numa_node=numa)
            put(
                path,
                **{
                    "class": f"{entry.pci_class << 8:#08x}",
                    "current_link_speed": "16.0 GT/s PCIe",
                    "current_link_width": 16,
                },
            )
            if entry.name:
                put(path / "infiniband" / entry.name)
                put(path / f"infiniband_verbs/uverbs{verbs}")
                if not entry.hidden:
                    (root / f"dev/infiniband/uverbs{verbs}").touch()
                verbs += 1
            elif entry.vendor == 0x10DE and entry.pci_class == 0x0302:
                put(
                    root / "proc/driver/nvidia/gpus" / entry.at,
                    information=f"Model: fake\nDevice Minor: \t {counts[GPU]}",
                )
                if not entry.hidden:
                    (root / f"dev/nvidia{counts[GPU]}").touch()
                counts[GPU] += 1
            elif entry.vendor == 0x1D0F and entry.pci_class == 0x0880:
                if not entry.hidden:
                    (root / f"dev/neuron{counts[NEURON]}").touch()
                counts[NEURON] += 1
        (bus / entry.at).symlink_to(path)

    for host in topology.hosts:
        base = root / f"sys/devices/pci0000:{host.buses[0]:02x}"
        base.mkdir(parents=True, exist_ok=True)
        for child in host.children:
            write(child, base, host.numa)
    if topology.product:
        put(root / "sys/devices/virtual/dmi/id", product_name=topology.product)
    return root


def write_hwloc(topology: Topology, path: Path) -> Path:
    """Write what lstopo --of xml --whole-io would: packages with their host bridges; one package where NUMA is not told.

    hwloc's own small parser reads it too, which wants one tag a line and every set of an object.
    """
    numbers = iter(range(1, 1 << 16))

    def sets(mask: int) -> str:
        cpus = f'cpuset="{mask:#010x}" complete_cpuset="{mask:#010x}"'
        return f'{cpus} nodeset="{mask:#010x}" complete_nodeset="{mask:#010x}" gp_index="{next(numbers)}"'

    everything = (1 << topology.numa_nodes) - 1
    out = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<!DOCTYPE topology SYSTEM "hwloc2.dtd">',
        '<topology version="2.0">',
    ]
    allowed = f'allowed_cpuset="{everything:#010x}" allowed_nodeset="{everything:#010x}"'
    out.append(f'<object type="Machine" os_index="0" {allowed} {sets(everything)}>')
    if topology.product:
        out.append(f'<info name="DMIProductName" value={quoteattr(topology.product)}/>')

    def write(entry) -> None:
        if isinstance(entry, Bridge):
            first, last = entry.buses
            out.append(
                f'<object type="Bridge" gp_index="{next(numbers)}" bridge_type="1-1" depth="1" '
                f'bridge_pci="0000:[{first:02x}-{last:02x}]" pci_busid="{entry.at}" '
                'pci_type="0604 [1d0f:0200] [1d0f:0200] 00" pci_link_speed="63.015385">'
            )
            for child in entry.children:
                write(child)
        else:
            out.append(
                f'<object type="PCIDev" gp_index="{next(numbers)}" pci_busid="{entry.at}" '
                f'pci_type="{entry.pci_class:04x} [{entry.vendor:04x}:{entry.device:04x}] [0000:0000] 00" '
                'pci_link_speed="31.507692">'
            )
            if entry.name:
                out.append(f'<object type="OSDev" gp_index="{next(numbers)}" name="{entry.name}" osdev_type="3">')
                out.append("</object>")
        out.append("</object>")

    for numa in range(topology.numa_nodes):
        out.append(f'<object type="Package" os_index="{numa}" {sets(1 << numa)}>')
        out.append(f'<object type="NUMANode" os_index="{numa}" {sets(1 << numa)} local_memory="1073741824">')
        out.append('<page_type size="4096" count="262144"/>')
        out.append("</object>")
        for host in topology.hosts:
            if max(host.numa, 0) == numa:
                out.append(
                    f'<object type="Bridge" gp_index="{next(numbers)}" bridge_type="0-1" depth="0" '
                    f'bridge_pci="0000:[{host.buses[0]:02x}-{host.buses[1]:02x}]">'
                )
                for child in host.children:
                    write(child)
                out.append("</object>")
        out.append("</object>")
    out += ["</object>", "</topology>"]
    path.write_text("\n".join(out) + "\n")
    return path

"""The PCI tree of any machine, from an XML file of hwloc 2 (``lstopo --of xml --whole-io``; io filter "all")."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import TYPE_CHECKING

from kvxfer.errors import ConfigError
from kvxfer.rails.pci import Address, Machine, Node

if TYPE_CHECKING:
    from pathlib import Path

_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_BUSES = re.compile(r"[0-9a-f]+:\[([0-9a-f]+)-([0-9a-f]+)\]", re.IGNORECASE)
_OPENFABRICS = "3"  # osdev_type of hwloc 2's XML; hwloc 3 writes bit masks and a subtype
_PACKAGES = frozenset({"Package", "Socket", "Die", "Group", "NUMANode"})


def read_hwloc(path: Path) -> Machine:
    """Read a topology. Raises ConfigError when the file is not hwloc's, has no I/O in it, or cannot be one machine's.

    What only describes a device (its NUMA node, its link) and is not as hwloc writes it counts as unknown.
    """
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - the operator's own file; expat bounds entities itself
    except (OSError, ET.ParseError, LookupError, ValueError) as error:  # the last two: encodings
        raise ConfigError(f"{path} cannot be read as an XML topology: {error}") from error
    top = root.find("object")
    if root.tag != "topology" or top is None:
        raise ConfigError(f"{path} is not a topology of hwloc: make one with lstopo --of xml --whole-io FILE.xml")
    reader = _Reader()
    try:
        reader.add(top, None, None)
    except RecursionError:
        raise ConfigError(
            f"{path} is nested deeper than the devices of any machine: is it an export of lstopo?"
        ) from None
    twice = [
        where for where, times in Counter(n.where for n in reader.nodes if n.kind == "device").items() if times > 1
    ]
    if twice:
        raise ConfigError(f"{path} has more than one device at {twice[0]}: it is not the topology of one machine")
    if not any(node.kind == "device" for node in reader.nodes):
        raise ConfigError(f"{path} has no PCI devices in it: export it with lstopo --of xml --whole-io FILE.xml")
    return Machine(tuple(reader.nodes), str(path), reader.instance_type)


class _Reader:
    """Walks the objects in the file's order, which is hwloc's own."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.instance_type = ""

    def add(self, entry: ET.Element, parent: Node | None, numa: int | None) -> None:
        kind = entry.get("type", "")
        numa = _single_bit(entry.get("nodeset", "")) if entry.get("nodeset") else numa
        node = self._node(entry, kind, parent, numa)
        if node is not None:
            self.nodes.append(node)
        for info in entry.findall("info") if kind == "Machine" else ():
            if info.get("name") == "DMIProductName":
                self.instance_type = info.get("value", "")
        for child in entry.findall("object"):
            if child.get("type") != "OSDev":
                self.add(child, node or parent, numa)

    def _node(self, entry: ET.Element, kind: str, parent: Node | None, numa: int | None) -> Node | None:
        if parent is None:
            return Node("machine")
        if kind not in ("Bridge", "PCIDev"):
            # hwloc hangs a host bridge under the object whose CPUs are near it: a package, a die, a group, at times a cache.
            bridges = entry.find("object[@type='Bridge']") is not None
            above = kind in _PACKAGES and entry.find(".//object[@type='Bridge']") is not None
            return Node("package", parent, numa=numa) if bridges or above else None
        buses = _BUSES.search(entry.get("bridge_pci", ""))
        span = (int(buses[1], 16), int(buses[2], 16)) if buses else None
        busid = entry.get("pci_busid")
        if busid is None:
            return Node("host bridge", parent, numa=numa, buses=span)
        match = _TYPE.match(entry.get("pci_type", ""))
        pci_class, vendor, device = (int(part, 16) for part in match.groups()) if match else (0, 0, 0)
        try:
            address = Address.parse(busid)
        except ValueError as error:
            raise ConfigError(f"the topology has a device without a sound address: {error}") from error
        return Node(
            kind="bridge" if kind == "Bridge" else "device",
            parent=parent,
            address=address,
            vendor=vendor,
            device=device,
            pci_class=pci_class,
            numa=numa,
            link=_link(entry.get("pci_link_speed", "")),
            buses=span,
            names=tuple(
                child.get("name", "")
                for child in entry.findall("object")
                if child.get("osdev_type") == _OPENFABRICS or child.get("subtype") == "OpenFabrics"
            ),
        )


def _link(text: str) -> float:
    """Return Gbit/s of hwloc's GB/s."""
    try:
        speed = float(text or 0) * 8
    except ValueError:
        return 0.0
    return speed if math.isfinite(speed) else 0.0


def _single_bit(mask: str) -> int | None:
    """Return the only bit of hwloc's set notation (0x1, or comma-separated words of 32 bits), None where there are several.

    An endless set begins with ``0xf...f``: no single bit either.
    """
    try:
        words = [int(word or "0", 16) for word in mask.split(",")]
    except ValueError:
        return None
    value = 0
    for word in words:
        value = value << 32 | word
    return value.bit_length() - 1 if value and value & (value - 1) == 0 else None

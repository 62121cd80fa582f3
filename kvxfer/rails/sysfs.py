"""The PCI tree of this machine, from sysfs.

A device's real path in sysfs names all bridges above it, so one pass over ``bus/pci/devices`` is enough. Packages are made from
``numa_node``, where hwloc has them from the CPUs near a device; on a machine with one NUMA node, or one that says -1
(virtual machines), everything hangs below the machine itself, as in hwloc's tree.

A container sees the host's whole PCI tree, and so does NIXL's grouping; what it lacks are device files. An EFA device without its
/dev/infiniband/uverbsN, or a device file that is missing for a Neuron device, makes a node that is not ``usable``; so does one
that this process may not open.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.rails.pci import Address, Kind, Machine, Node

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEURON_LS = ("neuron-ls", "/opt/aws/neuron/bin/neuron-ls")
_NEURON_LS_SECONDS = 20
_GT_TO_GBPS = {2.5: 0.8, 5.0: 0.8}  # 8b/10b up to PCIe 2; 128b/130b from 8 GT/s on


def run_neuron_ls() -> str:
    """Return what ``neuron-ls -j`` prints; empty where there is none, or it fails."""
    tool = next((found for found in map(shutil.which, _NEURON_LS) if found), None)
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "-j"], capture_output=True, timeout=_NEURON_LS_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def read_sysfs(root: Path = Path("/"), neuron_ls: str = "") -> Machine:
    """Read the machine under ``root``, which has ``sys``, ``dev`` and ``proc``. ``neuron_ls`` is what ``neuron-ls -j`` printed.

    What cannot be read is left out: a machine without a PCI bus is a machine without devices.
    """
    devices = root / "sys/bus/pci/devices"
    try:
        links = sorted(devices.iterdir())
    except OSError:
        links = []
    paths: dict[Address, Path] = {}
    for link in links:
        try:
            paths[Address.parse(link.name)] = link.resolve()
        except (ValueError, OSError, RuntimeError):  # the last one: links in a circle, up to Python 3.12
            continue
    indices = _neuron_indices(neuron_ls)
    tree = _Builder(root, paths, indices)
    return Machine(
        nodes=tree.build(),
        source=str(devices),
        instance_type=_text(root / "sys/devices/virtual/dmi/id/product_name"),
        neuron_index=indices,
    )


class _Builder:
    def __init__(self, root: Path, paths: Mapping[Address, Path], indices: Mapping[Address, int]) -> None:
        self._root = root
        self._paths = paths
        self._indices = indices
        numas = {number for path in paths.values() if (number := _number(path / "numa_node", 10)) is not None}
        self._packages = len({number for number in numas if number >= 0}) > 1
        self._gpu_minors = _gpu_minors(root)
        self._neuron_files = _neuron_files(root / "dev")

    def build(self) -> tuple[Node, ...]:
        machine = Node("machine")
        nodes: list[Node] = [machine]
        below: dict[Address, list[Address]] = {}
        roots: dict[str, list[Address]] = {}
        for address, path in sorted(self._paths.items()):
            above = self._parent(path)
            if above is None:
                roots.setdefault(path.parent.name, []).append(address)
            else:
                below.setdefault(above, []).append(address)

        def add(address: Address, parent: Node) -> None:
            node = self._node(address, parent)
            nodes.append(node)
            for child in below.get(address, ()):
                add(child, node)

        packages: dict[int, Node] = {}
        hosts = sorted(roots.items(), key=lambda item: (self._numa(item[1]) or 0, item[1][0]))
        for addresses in (addresses for _, addresses in hosts):
            numa = self._numa(addresses)
            parent = machine
            if self._packages and numa is not None:
                if numa not in packages:
                    packages[numa] = Node("package", machine, numa=numa)
                    nodes.append(packages[numa])
                parent = packages[numa]
            host = Node("host bridge", parent, numa=numa, buses=self._span(addresses))
            nodes.append(host)
            for address in addresses:
                add(address, host)
        return tuple(nodes)

    def _parent(self, path: Path) -> Address | None:
        """Return the nearest device above that is there too; a container may be shown a part of the tree."""
        for above in path.parents:
            try:
                address = Address.parse(above.name)
            except ValueError:
                return None
            if address in self._paths:
                return address
        return None

    def _numa(self, addresses: list[Address]) -> int | None:
        for address in addresses:
            number = _number(self._paths[address] / "numa_node", 10)
            if number is not None and number >= 0:
                return number
        return None

    def _span(self, addresses: list[Address]) -> tuple[int, int]:
        ends = [_number(self._paths[address] / "subordinate_bus_number", 10) for address in addresses]
        first = addresses[0].bus
        return first, max([first, *(end for end in ends if end is not None)])

    def _node(self, address: Address, parent: Node) -> Node:
        path = self._paths[address]
        whole_class = _number(path / "class", 16) or 0
        kind: Kind = "bridge" if whole_class >> 16 == 0x06 and _there(path / "secondary_bus_number") else "device"  # noqa: PLR2004
        buses = None
        if kind == "bridge":
            first, last = (_number(path / name, 10) or 0 for name in ("secondary_bus_number", "subordinate_bus_number"))
            buses = (first, max(first, last))
        numa = _number(path / "numa_node", 10)
        node = Node(
            kind=kind,
            parent=parent,
            address=address,
            vendor=_number(path / "vendor", 16) or 0,
            device=_number(path / "device", 16) or 0,
            pci_class=whole_class >> 8,
            numa=numa if numa is not None and numa >= 0 else None,
            link=_link(path),
            buses=buses,
            names=tuple(sorted(entry.name for entry in _entries(path / "infiniband"))),
            usable=True,
        )
        return node if self._usable(node, path) else dataclasses.replace(node, usable=False)

    def _usable(self, node: Node, path: Path) -> bool:
        dev = self._root / "dev"
        if node.is_efa:
            verbs = _entries(path / "infiniband_verbs")
            return bool(verbs) and all(_openable(dev / "infiniband" / entry.name) for entry in verbs)
        if node.is_neuron:
            index = self._indices.get(node.where)
            return bool(self._neuron_files) if index is None else index in self._neuron_files
        if node.is_gpu:
            minor = self._gpu_minors.get(node.where)
            files = dev.glob("nvidia[0-9]*") if minor is None else [dev / f"nvidia{minor}"]
            return any(_openable(file) for file in files)
        return True


def _neuron_indices(neuron_ls: str) -> dict[Address, int]:
    """Read ``neuron-ls -j``: a list of objects whose ``bdf`` has no domain (SDK, tools/neuron-sys-tools/neuron-ls.rst)."""
    try:
        told = {
            Address.parse(str(entry["bdf"])): int(entry["neuron_device"]) for entry in json.loads(neuron_ls or "[]")
        }
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}
    return told if len(set(told.values())) == len(told) and min(told.values(), default=0) >= 0 else {}


def _neuron_files(dev: Path) -> set[int]:
    """Return the host indices of the Neuron devices that have a file: its minor number, since a container may rename it."""
    found = set()
    for path in dev.glob("neuron[0-9]*"):
        number = path.name.removeprefix("neuron")
        if number.isascii() and number.isdigit() and _openable(path):
            status = path.stat()
            found.add(os.minor(status.st_rdev) if stat.S_ISCHR(status.st_mode) else int(number))
    return found


def _gpu_minors(root: Path) -> dict[Address, int]:
    minors = {}
    for folder in _entries(root / "proc/driver/nvidia/gpus"):
        match = re.search(r"Device Minor:\s*(\d+)", _text(folder / "information"))
        try:
            minors[Address.parse(folder.name)] = int(match[1]) if match else -1
        except ValueError:
            continue
    return {address: minor for address, minor in minors.items() if minor >= 0}


def _link(path: Path) -> float:
    """Return Gbit/s of the link above the device, coding taken off; 0 where the kernel does not say."""
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", _text(path / "current_link_speed"))
    width = _number(path / "current_link_width", 10)
    if speed is None or width is None or not 0 < width < 255:  # noqa: PLR2004 - the kernel's "unknown"
        return 0.0
    rate = float(speed[1])
    return rate * width * _GT_TO_GBPS.get(rate, 128 / 130)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a directory above it that may not be searched
        return False


def _openable(file: Path) -> bool:
    """Whether there is such a file, and this process may read and write it."""
    return os.access(file, os.R_OK | os.W_OK)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, base: int) -> int | None:
    try:
        return int(_text(path), base)
    except ValueError:
        return None

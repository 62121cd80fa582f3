"""The rails that each accelerator shall use, and why.

Three sources, the best first:

``nrt``          libnrt itself named the EFA device attached to an address of the accelerator
``aws-map``      AWS's map for the instance type, where the tree agrees with it: both devices are there, below one switch
``pcie-switch``  the PCIe tree: an accelerator's share of the EFA devices of its switch. For GPUs the share is NIXL's own; for
                 Neuron devices it is AWS's pairing, mirrored within the switch (the first Neuron device has the last EFA device),
                 where a switch has as many of the one as of the other, and otherwise all of the switch

The map is never believed against the tree: where buses are numbered otherwise than AWS's table has them, or an EFA
device is not attached, the tree decides, and the reason is said.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvxfer.rails.instances import INSTANCE_TYPES, candidates
from kvxfer.rails.pci import NEURON_DEVICES
from kvxfer.rails.predict import group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvxfer.rails.instances import AcceleratorKind, InstanceType, NeuronPair
    from kvxfer.rails.pci import Address, Machine, Node
    from kvxfer.rails.predict import Group

Source = Literal["nrt", "aws-map", "pcie-switch"]


@dataclass(frozen=True, slots=True)
class Placement:
    """One accelerator, and the EFA devices that are local to it; none where no EFA device is near.

    ``switch`` is the nearest ancestor that it shares with EFA devices, ``switch_rails`` all EFA devices below that.
    ``attached`` is what libnrt is taken to answer for memory of a Neuron device: one address, none, or None for unknown.
    """

    kind: AcceleratorKind
    index: int
    node: Node
    rails: tuple[Node, ...]
    source: Source
    why: str
    switch: Node | None
    switch_rails: tuple[Node, ...]
    attached: tuple[Address, ...] | None = None

    @property
    def name(self) -> str:
        """Say which device it is, for people."""
        return f"{self.kind} {self.index} ({self.node.where})"


def place(machine: Machine, asked: Mapping[Address, Address] | None = None) -> list[Placement]:
    """Place every accelerator of a machine, in the order of their indices.

    ``asked`` has libnrt's own answers: the address of a Neuron device → that of the EFA device attached to its memory. A GPU's
    index is its place in PCI order, as CUDA numbers equal GPUs; a Neuron device's is the driver's, where it is known.
    """
    groups = {**group(machine.gpus, machine.rails), **group(machine.neurons, machine.rails)}
    gpus = [_gpu(machine, index, gpu, groups.get(gpu)) for index, gpu in enumerate(_in_pci_order(machine.gpus))]
    numbers = _numbers(machine)
    neurons = [_neuron(machine, numbers[node], node, groups.get(node), asked or {}) for node in machine.neurons]
    return gpus + sorted(neurons, key=lambda placement: placement.index)


def attached(placements: Iterable[Placement]) -> dict[Node, tuple[Address, ...]]:
    """Return what libnrt is taken to answer, without the devices for which nothing is known."""
    return {placement.node: placement.attached for placement in placements if placement.attached is not None}


def _in_pci_order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.where)


def _near(machine: Machine, found: Group | None) -> tuple[Node | None, tuple[Node, ...]]:
    """Return the ancestor shared with EFA devices, and all of these; nothing where that spans NUMA nodes."""
    if found is None or (found.ancestor.kind == "machine" and any(node.kind == "package" for node in machine.nodes)):
        return None, ()
    return found.ancestor, tuple(rail for rail in machine.rails if found.ancestor in rail.upwards())


def _gpu(machine: Machine, index: int, gpu: Node, found: Group | None) -> Placement:
    switch, below = _near(machine, found)
    if found is None or switch is None:
        where = "on its NUMA node" if machine.rails else "on this machine"
        return Placement("cuda", index, gpu, (), "pcie-switch", f"there is no EFA device {where}", None, ())
    share, sharing = found.share(gpu), len(found.accelerators)
    if not share:
        why = f"the EFA devices below {switch.label} are all nearer to other GPUs"
    else:
        why = f"{len(found.rails)} EFA and {sharing} GPU below {switch.label}"
        why += ", shared" if len(found.rails) < sharing else ""
    return Placement("cuda", index, gpu, share, "pcie-switch", why, switch, below)


def _neuron(
    machine: Machine, index: int, node: Node, found: Group | None, asked: Mapping[Address, Address]
) -> Placement:
    switch, below = _near(machine, found)

    def placed(rails: tuple[Node, ...], source: Source, why: str, answer: tuple[Address, ...] | None) -> Placement:
        return Placement("neuron", index, node, rails, source, why, switch, below, answer)

    said = asked.get(node.where)
    if said is not None:
        efa = machine.at(said)
        if efa is not None and efa in machine.rails:
            return placed((efa,), "nrt", "libnrt names it for memory of this device", (said,))
        return placed((), "nrt", f"libnrt names {said}, which is no EFA device that can be opened here", (said,))
    known = _known(machine, node)
    named = INSTANCE_TYPES.get(machine.instance_type)
    if named is not None and not named.efas:
        return placed((), "aws-map", f"{named.name} has no EFA device attached to a Neuron device", ())
    answer: tuple[Address, ...] | None = None
    doubt = "AWS's map does not tell of this device"
    if known is not None:
        pair, row = known
        efa = machine.at(pair.efa)
        if efa is not None and efa in below:
            return placed((efa,), "aws-map", f"AWS's map of {row.name}", (pair.efa,))
        doubt = f"AWS's map of {row.name} has {pair.efa} for it, which is not below its switch: other bus numbers"
        if len(machine.rails) < row.efas and (efa is None or not efa.usable):
            doubt = f"AWS's map of {row.name} has {pair.efa} for it, which is not attached, or hidden"
            answer = (pair.efa,)
    if found is None or switch is None or not found.rails:
        return placed((), "pcie-switch", f"{doubt}; no EFA device is near it", answer or ())
    near = _in_pci_order(found.accelerators)
    if len(near) == len(found.rails) and answer is None:
        efa = found.rails[len(near) - 1 - near.index(node)]
        why = (
            f"{doubt}; mirrored within {switch.label}, as AWS pairs them"
            if len(near) > 1
            else f"{doubt}; the one near it"
        )
        return placed((efa,), "pcie-switch", why, (efa.where,))
    return placed(found.rails, "pcie-switch", f"{doubt}; all EFA devices of {switch.label}", answer)


def _known(machine: Machine, node: Node) -> tuple[NeuronPair, InstanceType] | None:
    """Return what AWS's maps say of a device, by its address or, where the driver numbers it, by its index.

    Nothing where the maps that may hold here do not agree.
    """
    found: list[tuple[NeuronPair, InstanceType]] = []
    for row in _rows(machine, node):
        pair = row.pair_at(node.where)
        if pair is None and node.where in machine.neuron_index:
            pair = row.pair_of(machine.neuron_index[node.where])
        if pair is not None:
            found.append((pair, row))
    return found[0] if len({pair.efa for pair, _ in found}) == 1 else None


def _rows(machine: Machine, node: Node) -> list[InstanceType]:
    return candidates(machine.instance_type, NEURON_DEVICES[node.device], [efa.where for efa in machine.efas])


def _numbers(machine: Machine) -> dict[Node, int]:
    """Number the Neuron devices: the driver's own numbers, else those of the published addresses, else PCI order.

    In a container the driver's tools may tell of some alone; the others then have what numbers are left.
    """
    told = {node: machine.neuron_index[node.where] for node in machine.neurons if node.where in machine.neuron_index}
    if len(told) == len(machine.neurons):
        return told
    for row in _rows(machine, machine.neurons[0]) if machine.neurons else ():
        pairs = {node: row.pair_at(node.where) for node in machine.neurons}
        known = {node: pair.index for node, pair in pairs.items() if pair is not None}
        if len(known) == len(machine.neurons) and known == {**known, **told}:
            return known
    others = [node for node in _in_pci_order(machine.neurons) if node not in told]
    left = (index for index in itertools.count() if index not in told.values())
    return {**told, **dict(zip(others, left, strict=False))}

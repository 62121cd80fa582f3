"""What NIXL's LIBFABRIC backend does by itself with a machine, and with the rails that a process is shown.

Follows nixl 1.4.1 (src/utils/libfabric/libfabric_topology.cpp: discoverProviderWithDevices, groupNicsWithAccel,
getEfaDevicesForPci; src/plugins/libfabric/libfabric_backend.cpp: registerMem), step by step:

- Providers: cxi, else efa (every device is a rail), else the first device of tcp, else that of sockets.
- With NVIDIA GPUs, each GPU walks up to the first ancestor that has an EFA device below it, and each EFA device up to
  the first ancestor that a GPU chose. There the EFA devices, by bus and slot, are dealt out evenly in the GPUs' order, the first
  GPUs taking the remainder; with fewer EFA devices than GPUs each GPU gets them all. GPUs without any get *every* rail.
- With Neuron devices and no GPU there is no grouping: libnrt is asked for the one EFA device attached to the address.
  If it does not answer, or that device is not among the rails, the memory is registered on *every* rail.

Both fallbacks succeed and say so only in the log. NIXL looks at the whole PCI tree: GPUs that a container hides count as
well, EFA devices that libfabric does not list do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvxfer.rails.pci import Address, Machine, Node

Runtime = Literal["CUDA", "NEURON", "SYSTEM"]
How = Literal["grouping", "libnrt", "all devices", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The rails that NIXL registers an accelerator's memory on, and by which of its rules."""

    rails: tuple[Node, ...]
    how: How
    why: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What NIXL opens, and what it does with each accelerator's memory."""

    provider: str
    runtime: Runtime
    rails: tuple[Node, ...]
    choices: Mapping[Node, Choice]


@dataclass(frozen=True, slots=True)
class Group:
    """NIXL's group at one ancestor: accelerators in its order, EFA devices in the order in which they are dealt out."""

    ancestor: Node
    accelerators: tuple[Node, ...]
    rails: tuple[Node, ...]

    def share(self, accelerator: Node) -> tuple[Node, ...]:
        """Return the EFA devices that are dealt to one of the accelerators."""
        count, place = len(self.accelerators), self.accelerators.index(accelerator)
        if len(self.rails) < count:
            return self.rails
        each, more = divmod(len(self.rails), count)
        start = place * each + min(place, more)
        return self.rails[start : start + each + (place < more)]


def group(accelerators: Sequence[Node], rails: Collection[Node]) -> dict[Node, Group]:
    """Group as NIXL does. Returns the group of each accelerator that walks up to one; a group may have no EFA device."""
    with_rails = {above for rail in rails for above in rail.upwards()}
    chosen: dict[Node, list[Node]] = {}
    for accelerator in accelerators:
        ancestor = next((above for above in accelerator.upwards() if above in with_rails), None)
        if ancestor is not None:
            chosen.setdefault(ancestor, []).append(accelerator)
    dealt: dict[Node, list[Node]] = {}
    for rail in rails:
        ancestor = next((above for above in rail.upwards() if above in chosen), None)
        if ancestor is not None:
            dealt.setdefault(ancestor, []).append(rail)
    return {
        accelerator: Group(
            ancestor,
            tuple(members),
            # By bus and slot alone, as NIXL sorts: the domain does not count.
            tuple(sorted(dealt.get(ancestor, ()), key=lambda rail: (rail.where.bus, rail.where.device))),
        )
        for ancestor, members in chosen.items()
        for accelerator in members
    }


def predict(machine: Machine, visible: Collection[Node], attached: Mapping[Node, tuple[Address, ...]]) -> Prediction:
    """Predict for a process that is shown the EFA devices ``visible``.

    ``attached`` is what libnrt answers for memory of each Neuron device: one address or none; a device that is not in it is one
    for which the answer is not known.
    """
    shown = tuple(rail for rail in machine.rails if rail in visible)
    if not shown:
        why = "there is no EFA device to open, so NIXL takes tcp, which registers no device memory"
        nothing = Choice((), "none", why)
        return Prediction("tcp", "SYSTEM", (), dict.fromkeys(machine.accelerators, nothing))
    if machine.gpus:
        groups = group(machine.gpus, shown)
        choices = {gpu: _of_gpu(gpu, groups.get(gpu), shown) for gpu in machine.gpus}
        mixed = Choice(
            (), "none", "NIXL asks CUDA about every address on a machine with NVIDIA GPUs, and refuses this one"
        )
        return Prediction("efa", "CUDA", shown, {**choices, **dict.fromkeys(machine.neurons, mixed)})
    if machine.neurons:
        choices = {device: _of_neuron(attached.get(device), shown) for device in machine.neurons}
        return Prediction("efa", "NEURON", shown, choices)
    return Prediction("efa", "SYSTEM", shown, {})


def _of_gpu(gpu: Node, found: Group | None, shown: tuple[Node, ...]) -> Choice:
    share = found.share(gpu) if found is not None else ()
    if not share:
        return Choice(shown, "all devices", "no EFA device is left for it in NIXL's grouping, so it takes every rail")
    assert found is not None
    why = f"its share of {len(found.rails)} EFA and {len(found.accelerators)} GPU below {found.ancestor.label}"
    return Choice(share, "grouping", why)


def _of_neuron(answer: tuple[Address, ...] | None, shown: tuple[Node, ...]) -> Choice:
    if answer is None:
        return Choice((), "unknown", "only libnrt knows which EFA device it names for its memory")
    if not answer:
        return Choice(shown, "all devices", "libnrt names no EFA device for its memory, so it takes every rail")
    named = tuple(rail for rail in shown if rail.address == answer[0])
    if not named:
        why = f"libnrt names {answer[0]} for its memory, which is no rail of this process, so it takes every rail"
        return Choice(shown, "all devices", why)
    return Choice(named, "libnrt", "the EFA device that libnrt names for its memory")

"""To which EFA devices a worker process is kept: the value of FI_EFA_IFACE, as a pure function.

NIXL opens every EFA device that libfabric lists, and no parameter of its own says otherwise. FI_EFA_IFACE is the only pin: it
holds for the whole process, and is read when libfabric starts, so before NIXL's agent exists or never. What is set already
stays: the operator, or vllm-neuron, which pins each worker to one EFA device, knows more.

``local`` is not the same on both kinds of accelerator. On Neuron it is the one EFA device of each device. On CUDA it is
every EFA device of the GPU's switch: NIXL deals the *visible* EFA devices out among *all* GPUs below a switch, whether this
process uses them or not, so that a GPU which is shown its own two alone is left with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.errors import ConfigError
from kvxfer.rails.local import attached, place
from kvxfer.rails.pci import Address
from kvxfer.rails.predict import predict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, MutableMapping, Sequence

    from kvxfer.rails.local import Placement
    from kvxfer.rails.pci import Machine, Node
    from kvxfer.rails.predict import Choice

VARIABLE = "FI_EFA_IFACE"


@dataclass(frozen=True, slots=True)
class Pin:
    """``value`` is what FI_EFA_IFACE must be set to, None to leave it as it is; ``rails`` are what libfabric then lists."""

    value: str | None
    rails: tuple[Node, ...]
    why: str

    def apply(self, environment: MutableMapping[str, str]) -> None:
        """Set the variable. Call it before NIXL's agent, or anything else that starts libfabric, exists."""
        if self.value is not None:
            environment[VARIABLE] = self.value


def pin(
    machine: Machine,
    devices: Sequence[Address],
    setting: str | Sequence[str],
    environment: Mapping[str, str],
    asked: Mapping[Address, Address] | None = None,
) -> Pin:
    """Decide for a process that uses the accelerators ``devices``.

    ``setting`` is ``local``, ``all``, or a list of names (rdmap85s0) or PCI addresses (0000:55:00.0) of EFA devices; ``asked``
    as for ``place``. Raises ConfigError for a device or a rail that this machine does not have, naming those that it has.
    """
    preset = environment.get(VARIABLE, "")
    if preset:
        return Pin(None, _preset(machine, preset), f"{VARIABLE}={preset} was set already, and is respected")
    everything = tuple(machine.rails)
    if not everything:
        return Pin(None, (), "no EFA device can be opened here")
    if not isinstance(setting, str):
        chosen = _ordered(machine, [_find(machine, entry) for entry in setting])
        if not chosen:
            raise ConfigError('rails=[] names no EFA device: set "local", "all", or a list of names or PCI addresses')
        return Pin(_names(chosen), chosen, "the rails that the setting names")
    if setting == "all":
        return Pin(None, everything, 'every rail, as rails="all" asks')
    if setting != "local":
        raise ConfigError(
            f'rails={setting!r} must be "local", "all", or a list of names or PCI addresses of EFA devices'
        )
    placements = [_placement(machine, device, asked) for device in devices]
    if not placements:
        return Pin(None, everything, "no accelerator is used, so that no rail is nearer than another")
    without = [placement for placement in placements if not placement.rails]
    if without:
        told = "; ".join(f"{placement.name}: {placement.why}" for placement in without)
        return Pin(None, everything, f"every rail, since there is none to keep to: {told}")
    local = [rail for placement in placements for rail in _own(placement)]
    chosen = _ordered(machine, local)
    return Pin(_names(chosen), chosen, "; ".join(f"{placement.name}: {placement.why}" for placement in placements))


def expectation(
    machine: Machine,
    devices: Collection[Address],
    rails: Collection[Node],
    asked: Mapping[Address, Address] | None = None,
) -> dict[Address, Choice]:
    """Predict what NIXL will do with memory of each device in a process that is shown ``rails``."""
    placements = place(machine, asked)
    prediction = predict(machine, rails, attached(placements))
    return {
        placement.node.where: prediction.choices[placement.node]
        for placement in placements
        if placement.node.where in devices
    }


def _own(placement: Placement) -> tuple[Node, ...]:
    return placement.switch_rails if placement.kind == "cuda" else placement.rails


def _placement(machine: Machine, device: Address, asked: Mapping[Address, Address] | None) -> Placement:
    placements = place(machine, asked)
    for placement in placements:
        if placement.node.address == device:
            return placement
    have = ", ".join(placement.name for placement in placements) or "none"
    raise ConfigError(f"no accelerator is at {device} on this machine ({machine.source}); it has {have}")


def _find(machine: Machine, entry: str) -> Node:
    node = machine.rail_named(entry)
    if node is None:
        try:
            node = next((rail for rail in machine.efas if rail.address == Address.parse(entry)), None)
        except ValueError:
            node = None
    have = ", ".join(f"{rail.rail} ({rail.where})" for rail in machine.rails)
    if node is None:
        raise ConfigError(f"rails: {entry!r} is no EFA device of this machine; it has {have}")
    if not node.usable:
        raise ConfigError(f"rails: {entry!r} has no device file in this container; those that have one: {have}")
    return node


def _preset(machine: Machine, preset: str) -> tuple[Node, ...]:
    """Read FI_EFA_IFACE as libfabric does (prov/efa/src/efa_env.h): exact names of devices, nothing but commas between them.

    What begins with ``all`` is all. A space behind a comma, or an endpoint type behind a name, makes a name that no device has.
    """
    if preset.startswith("all"):
        return tuple(machine.rails)
    names = preset.split(",")
    return tuple(rail for rail in machine.rails if rail.rail in names)


def unknown_names(machine: Machine, preset: str) -> list[str]:
    """Return those entries of a value of FI_EFA_IFACE, as they stand there, that are no device of the machine."""
    known = {rail.rail for rail in machine.rails}
    return [] if preset.startswith("all") else [name for name in preset.split(",") if name and name not in known]


def _ordered(machine: Machine, rails: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(rail for rail in machine.rails if rail in rails)


def _names(rails: Sequence[Node]) -> str:
    return ",".join(rail.rail for rail in rails)

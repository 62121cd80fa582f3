"""What is known of EC2's accelerated instance types: counts, rates, and AWS's own map of Neuron devices to EFA devices.

Sources, read in 2026:

- AWS's map: aws-neuron/connected-device-maps-over-efa-for-neuron at 2eb56e48 ("standard PCI root-based matching does not
  produce optimal allocations for Trainium instances"); the one of trn2 stands in libfabric's fabtests (e23a5248a) and in
  vllm-neuron's hardware_config.py too.
- PCI addresses of Neuron devices: AWS Neuron SDK, neuron-ls.rst and runtime-performance-tips.rst. A device's index is not its
  place in PCI order.
- counts, rates and switches: NIXL's topology files, src test/unit/utils/libfabric/topo (those of trn in its PR 1994).

That libnrt's nrt_get_attached_efa_bdf agrees with AWS's map is assumed: no output of it from hardware was found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvxfer.rails.pci import Address

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

AcceleratorKind = Literal["cuda", "neuron"]


@dataclass(frozen=True, slots=True)
class NeuronPair:
    """A Neuron device by its host index: its PCI address where it is published, and the EFA device that AWS gives it."""

    index: int
    device: Address | None
    efa: Address


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One row of the table. ``efa_gbps`` is of one EFA device, 0 where only totals are published."""

    name: str
    kind: AcceleratorKind
    accelerators: int
    efas: int
    efa_gbps: int
    source: str
    pairs: tuple[NeuronPair, ...] = field(default=())

    def pair_at(self, device: Address) -> NeuronPair | None:
        """Return the pair of the Neuron device at an address."""
        return next((pair for pair in self.pairs if pair.device == device), None)

    def pair_of(self, index: int) -> NeuronPair | None:
        """Return the pair of the Neuron device with a host index."""
        return next((pair for pair in self.pairs if pair.index == index), None)


def _address(text: str) -> Address:
    """Read ``10:1a`` (bus and slot) or ``c9`` (a bus of which the device is slot 0)."""
    return Address.parse(f"0000:{text}.0" if ":" in text else f"0000:{text}:00.0")


def _pairs(efas: str, devices: str = "") -> tuple[NeuronPair, ...]:
    """Pair two lists that are in the order of the devices' indices."""
    at = [_address(text) for text in devices.split()]
    return tuple(
        NeuronPair(index, at[index] if at else None, _address(text)) for index, text in enumerate(efas.split())
    )


_TRN1_DEVICES = (
    "10:1c 10:1d a0:1c a0:1d 20:1b 20:1c 90:1b 90:1c 20:1d 20:1e 90:1d 90:1e 10:1e 10:1b a0:1e a0:1b"  # indices 0 to 15
)
_TRN1 = _pairs(
    "10:1a 10:1a a0:1a a0:1a 20:19 20:19 90:19 90:19 20:1a 20:1a 90:1a 90:1a 10:19 10:19 a0:19 a0:19", _TRN1_DEVICES
)
_TRN1N = _pairs(
    "10:17 10:1a a0:17 a0:1a 20:19 20:18 90:19 90:18 20:17 20:1a 90:17 90:1a 10:19 10:18 a0:19 a0:18", _TRN1_DEVICES
)
_TRN2 = _pairs("c9 b4 b3 ca 6c 57 56 6d 98 83 82 99 f5 e0 df f6", "cc b5 b6 cb 6f 58 59 6e 9b 84 85 9a f8 e1 e2 f7")
_TRN3 = _pairs("be a9 a8 bf 61 4c 4b 62 8d 78 77 8e ea d5 d4 eb")
_TRN3PDS = _pairs("a9 a8 bf be d5 d4 eb ea 4c 4b 62 61 78 77 8e 8d")

_DRA = "AWS's device map (connected-device-maps-over-efa-for-neuron)"
_XML = "NIXL's topology file"

INSTANCE_TYPES: Mapping[str, InstanceType] = {
    row.name: row
    for row in (
        InstanceType("trn1.32xlarge", "neuron", 16, 8, 100, f"{_DRA}; {_XML} (PR 1994)", _TRN1),
        InstanceType("trn1n.32xlarge", "neuron", 16, 16, 100, f"{_DRA}; device addresses as trn1's", _TRN1N),
        InstanceType("trn2.48xlarge", "neuron", 16, 16, 200, f"{_DRA}; {_XML} (PR 1994)", _TRN2),
        InstanceType("trn2u.48xlarge", "neuron", 16, 16, 200, f"{_DRA}, which has it equal to trn2", _TRN2),
        InstanceType("trn2e.48xlarge", "neuron", 16, 16, 200, f"{_DRA}, which has it equal to trn2", _TRN2),
        InstanceType(
            "trn2.3xlarge", "neuron", 1, 0, 0, "NIXL's PR 1994: no EFA device is attached to the Neuron device"
        ),
        InstanceType("trn3.48xlarge", "neuron", 16, 16, 0, f"{_DRA}; device addresses not published", _TRN3),
        InstanceType("trn3p.48xlarge", "neuron", 16, 16, 0, f"{_DRA}; device addresses not published", _TRN3),
        InstanceType("trn3s.48xlarge", "neuron", 16, 16, 0, f"{_DRA}; device addresses not published", _TRN3),
        InstanceType("trn3pd98.48xlarge", "neuron", 16, 16, 0, f"{_DRA}; device addresses not published", _TRN3),
        InstanceType("trn3pds.48xlarge", "neuron", 16, 16, 0, f"{_DRA}; device addresses not published", _TRN3PDS),
        InstanceType("p4d.24xlarge", "cuda", 8, 4, 100, _XML),
        InstanceType("p5.48xlarge", "cuda", 8, 32, 100, _XML),
        InstanceType("p5e.48xlarge", "cuda", 8, 32, 100, "as p5.48xlarge, with H200; no topology file was seen"),
        InstanceType("p5en.48xlarge", "cuda", 8, 16, 200, _XML),
        InstanceType("p6-b200.48xlarge", "cuda", 8, 8, 400, _XML),
    )
}
"""Instance types by name. The map of p-types is empty: their rails follow from the PCIe switches."""

_BY_FAMILY = {
    "trn1": ("trn1.32xlarge", "trn1n.32xlarge"),
    "trn2": ("trn2.48xlarge",),
    "trn3": ("trn3.48xlarge", "trn3pds.48xlarge"),
}


def candidates(instance_type: str, family: str, efas: Collection[Address]) -> list[InstanceType]:
    """Return whose map may hold on a machine: the named type's, or those of the family that have these EFA devices, or more.

    A map taken for the family alone still has to agree with the tree, device by device (``local`` sees to that).
    """
    known = INSTANCE_TYPES.get(instance_type)
    if known is not None:
        return [known]
    rows = [INSTANCE_TYPES[name] for name in _BY_FAMILY.get(family, ())]
    here = set(efas)
    exact = [row for row in rows if here == {pair.efa for pair in row.pairs}]
    return exact or [row for row in rows if here <= {pair.efa for pair in row.pairs}]

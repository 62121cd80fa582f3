"""The device → rails table of every instance type in the facts, exactly, and NIXL's own choice equal to it."""

from __future__ import annotations

import dataclasses

import pytest
import topologies as make

from kvxfer.rails.judge import judge_machine
from kvxfer.rails.local import attached, place
from kvxfer.rails.pci import Address
from kvxfer.rails.predict import predict

# GPU bus → EFA buses, in the order of the CUDA index (facts: a simulation of NIXL's split over its topology files).
P5EN = {
    0x59: (0x55, 0x56), 0x5A: (0x57, 0x58), 0x72: (0x6E, 0x6F), 0x73: (0x70, 0x71),
    0x8B: (0x87, 0x88), 0x8C: (0x89, 0x8A), 0xA4: (0xA0, 0xA1), 0xA5: (0xA2, 0xA3),
}  # fmt: skip
P5 = {bus: (bus - 4, bus - 3, bus - 2, bus - 1) for bus in (0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA)}
P6 = {
    0x51: (0x4F,),
    0x52: (0x50,),
    0x62: (0x60,),
    0x63: (0x61,),
    0x75: (0x71,),
    0x76: (0x72,),
    0x86: (0x84,),
    0x87: (0x85,),
}

# Host index → (Neuron device's bus, EFA device's bus) (AWS's map; SDK's table of device addresses).
TRN2 = [
    (0xCC, 0xC9), (0xB5, 0xB4), (0xB6, 0xB3), (0xCB, 0xCA), (0x6F, 0x6C), (0x58, 0x57), (0x59, 0x56), (0x6E, 0x6D),
    (0x9B, 0x98), (0x84, 0x83), (0x85, 0x82), (0x9A, 0x99), (0xF8, 0xF5), (0xE1, 0xE0), (0xE2, 0xDF), (0xF7, 0xF6),
]  # fmt: skip
TRN1_DEVICES = [
    "10:1c",
    "10:1d",
    "a0:1c",
    "a0:1d",
    "20:1b",
    "20:1c",
    "90:1b",
    "90:1c",
    "20:1d",
    "20:1e",
    "90:1d",
    "90:1e",
    "10:1e",
    "10:1b",
    "a0:1e",
    "a0:1b",
]
TRN1 = [
    "10:1a",
    "10:1a",
    "a0:1a",
    "a0:1a",
    "20:19",
    "20:19",
    "90:19",
    "90:19",
    "20:1a",
    "20:1a",
    "90:1a",
    "90:1a",
    "10:19",
    "10:19",
    "a0:19",
    "a0:19",
]
TRN1N = [
    "10:17",
    "10:1a",
    "a0:17",
    "a0:1a",
    "20:19",
    "20:18",
    "90:19",
    "90:18",
    "20:17",
    "20:1a",
    "90:17",
    "90:1a",
    "10:19",
    "10:18",
    "a0:19",
    "a0:18",
]
# AWS's map of trn3 has the EFA buses; the devices' own addresses are not published, and the driver has to number them.
TRN3 = ["be", "a9", "a8", "bf", "61", "4c", "4b", "62", "8d", "78", "77", "8e", "ea", "d5", "d4", "eb"]


def table(machine) -> list[tuple[str, int, str, list[str], str]]:
    return [
        (one.kind, one.index, str(one.node.where), [str(rail.where) for rail in one.rails], one.source)
        for one in place(machine)
    ]


def as_expected(machine) -> bool:
    placements = place(machine)
    verdict = judge_machine(machine, placements, predict(machine, machine.rails, attached(placements)), "efa")
    return verdict.status == 0 and not verdict.violations and not verdict.notes


def bus(number: int) -> str:
    return f"0000:{number:02x}:00.0"


@pytest.mark.parametrize(
    ("topology", "rails"),
    [(make.p5en(), P5EN), (make.p5(), P5), (make.p5(gpu=0x2335), P5), (make.p6_b200(), P6)],
    ids=["p5en", "p5", "p5e", "p6-b200"],
)
def test_gpus_behind_switches(read, topology, rails) -> None:
    machine = read(topology)
    want = [
        ("cuda", index, bus(gpu), [bus(efa) for efa in efas], "pcie-switch")
        for index, (gpu, efas) in enumerate(rails.items())
    ]
    assert table(machine) == want
    assert as_expected(machine)


def test_p4d_shares_an_efa_device_between_two_gpus(read) -> None:
    machine = read(make.p4d())
    want = [
        ("cuda", 2 * place + which, f"0000:{root}:{slot}.0", [f"0000:{root}:1b.0"], "pcie-switch")
        for place, root in enumerate(("10", "20", "90", "a0"))
        for which, slot in enumerate(("1c", "1d"))
    ]
    assert table(machine) == want
    assert as_expected(machine)


@pytest.mark.parametrize("product", ["", "trn2.48xlarge", "trn2u.48xlarge", "trn2e.48xlarge"])
def test_trn2_is_awss_map_with_or_without_the_type(read, product) -> None:
    machine = read(make.trn2(product))
    want = [("neuron", index, bus(device), [bus(efa)], "aws-map") for index, (device, efa) in enumerate(TRN2)]
    assert table(machine) == want
    assert as_expected(machine)


def test_trn2_is_the_opposite_of_an_in_order_split(read) -> None:
    """What a plain reading of the tree would give is wrong on every one of the 16: the reason for the map."""
    machine = read(make.trn2())
    for placement in place(machine):
        in_order = list(placement.switch_rails)
        devices = sorted(one.node.where for one in place(machine) if one.switch is placement.switch)
        assert placement.rails != (in_order[devices.index(placement.node.where)],)
        assert placement.rails[0] in in_order


@pytest.mark.parametrize(
    ("topology", "rails"),
    [
        (make.trn1(), TRN1),
        (make.trn1("trn1.32xlarge"), TRN1),
        (make.trn1n(), TRN1N),
        (make.trn1n("trn1n.32xlarge"), TRN1N),
    ],
    ids=["trn1", "trn1 named", "trn1n", "trn1n named"],
)
def test_trn1(read, topology, rails) -> None:
    machine = read(topology)
    want = [
        ("neuron", index, f"0000:{device}.0", [f"0000:{efa}.0"], "aws-map")
        for index, (device, efa) in enumerate(zip(TRN1_DEVICES, rails, strict=True))
    ]
    assert table(machine) == want
    assert as_expected(machine)


def test_trn3_by_the_drivers_numbers(read) -> None:
    """As if neuron-ls had numbered the devices so that each lies on its EFA device's switch."""
    machine = read(make.trn3("trn3.48xlarge"))
    free = {str(node.where): node for node in machine.neurons}
    numbers = {}
    for index, text in enumerate(TRN3):
        efa = machine.at(Address.parse(f"0000:{text}:00.0"))
        switch = efa.parent.parent
        device = max((at for at, node in free.items() if switch in node.upwards()))
        numbers[free.pop(device).where] = index
    machine = dataclasses.replace(machine, neuron_index=numbers)
    assert [(index, rails, source) for _, index, _, rails, source in table(machine)] == [
        (index, [f"0000:{text}:00.0"], "aws-map") for index, text in enumerate(TRN3)
    ]
    assert as_expected(machine)


def test_drivers_numbers_of_some_devices_alone(read) -> None:
    """As neuron-ls prints them in a container. Each of those is where it says, and no number is there twice."""
    machine = read(make.trn3("trn3.48xlarge"))
    told = {Address.parse("0000:4d:00.0"): 5, Address.parse("0000:ec:00.0"): 2}
    placements = place(dataclasses.replace(machine, neuron_index=told))
    assert sorted(placement.index for placement in placements) == list(range(16))
    by_address = {placement.node.where: placement for placement in placements}
    assert {at: by_address[at].index for at in told} == told
    (rail,) = by_address[Address.parse("0000:4d:00.0")].rails
    assert str(rail.where) == "0000:4c:00.0", "device 5's, by AWS's map"


def test_drivers_numbers_win_over_published_ones(read) -> None:
    machine = read(make.trn2("trn2.48xlarge"))
    told = {Address.parse("0000:59:00.0"): 5}
    placements = place(dataclasses.replace(machine, neuron_index=told))
    assert {placement.index for placement in placements if placement.node.where in told} == {5}
    assert sorted(placement.index for placement in placements) == list(range(16))


def test_trn3_without_numbers_is_mirrored_within_the_switch(read) -> None:
    machine = read(make.trn3())
    for placement in place(machine):
        assert placement.source == "pcie-switch"
        assert "mirrored" in placement.why
    assert as_expected(machine)

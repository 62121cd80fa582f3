"""The pin of a worker process: that it keeps every device's own rails, and that nothing which is set already is overruled."""

from __future__ import annotations

import pytest
import topologies as make
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.rails.local import attached, place
from kvxfer.rails.pci import Address, Machine, Node
from kvxfer.rails.policy import VARIABLE, expectation, pin
from kvxfer.rails.predict import predict


def at(text: str) -> Address:
    return Address.parse(text)


EVERY = [
    make.p5en(), make.p5(), make.p4d(), make.p6_b200(), make.trn1(), make.trn1n(), make.trn2(), make.trn3(),
    make.virtual_machine(gpus=4, efas=3), make.virtual_machine(gpus=2, efas=5), make.trn2(move=-3),
    make.p5en().without("0000:58:00.0"),
]  # fmt: skip


@pytest.mark.parametrize("topology", EVERY)
def test_local_keeps_each_device_on_its_own_rails(read, topology) -> None:
    """NIXL, shown the pinned rails alone, gives each device exactly what it has of all rails."""
    machine = read(topology)
    for one in place(machine):
        decided = pin(machine, [one.node.where], "local", {})
        assert decided.value == ",".join(rail.rail for rail in decided.rails)
        assert expectation(machine, [one.node.where], decided.rails)[one.node.where].rails == one.rails


def test_on_cuda_local_is_the_whole_switch(read) -> None:
    machine = read(make.p5en())
    decided = pin(machine, [at("59:00.0")], "local", {})
    assert decided.value == "rdmap85s0,rdmap86s0,rdmap87s0,rdmap88s0"


def test_a_gpu_that_is_shown_its_own_pair_alone_is_left_with_one(read) -> None:
    """The reason why local is the whole switch on CUDA."""
    machine = read(make.p5en())
    decided = pin(machine, [at("59:00.0")], ["rdmap85s0", "rdmap86s0"], {})
    choice = expectation(machine, [at("59:00.0")], decided.rails)[at("59:00.0")]
    assert [rail.rail for rail in choice.rails] == ["rdmap85s0"]


def test_on_neuron_local_is_the_one(read) -> None:
    assert pin(read(make.trn2()), [at("cc:00.0")], "local", {}).value == "rdmap201s0"


def test_several_devices_of_one_process(read) -> None:
    machine = read(make.trn2())
    assert pin(machine, [at("cc:00.0"), at("b5:00.0")], "local", {}).value == "rdmap180s0,rdmap201s0"


def test_all_leaves_the_variable_alone(read) -> None:
    machine = read(make.p5en())
    decided = pin(machine, [at("59:00.0")], "all", {})
    assert decided.value is None
    assert len(decided.rails) == 16


@pytest.mark.parametrize("setting", ["local", "all", ["rdmap110s0"]])
@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("rdmap201s0", 1),
        ("rdmap201s0,rdmap202s0", 2),
        ("all", 16),
        ("nothing", 0),
        # As libfabric reads them: a space or an endpoint type is no part of a device's name.
        ("rdmap201s0, rdmap202s0", 1),
        ("rdmap201s0-rdm", 0),
        (" ", 0),
        ("rdmap20", 0),
        ("rdmap2010s0,rdmap201s0", 1),
    ],
)
def test_what_is_set_already_stays(read, setting, preset, count) -> None:
    environment = {VARIABLE: preset}
    decided = pin(read(make.trn2()), [at("cc:00.0")], setting, environment)
    decided.apply(environment)
    assert environment == {VARIABLE: preset}
    assert len(decided.rails) == count
    assert "respected" in decided.why


def test_it_is_put_into_the_environment(read) -> None:
    environment = {VARIABLE: ""}
    pin(read(make.trn2()), [at("cc:00.0")], "local", environment).apply(environment)
    assert environment == {VARIABLE: "rdmap201s0"}


def test_a_list_of_names_and_addresses(read) -> None:
    machine = read(make.p5en())
    decided = pin(machine, [], ["0000:6e:00.0", "rdmap85s0-rdm", "55:00.0"], {})
    assert decided.value == "rdmap85s0,rdmap110s0"


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (["rdmap1s0"], r"'rdmap1s0' is no EFA device of this machine; it has rdmap85s0 \(0000:55:00.0\)"),
        (["0000:59:00.0"], "is no EFA device"),
        ([], "names no EFA device"),
        ("near", "must be"),
        ("rdmap85s0", "must be"),
    ],
)
def test_settings_that_cannot_be(read, setting, why) -> None:
    with pytest.raises(ConfigError, match=why):
        pin(read(make.p5en()), [at("59:00.0")], setting, {})


def test_a_device_that_is_not_here(read) -> None:
    with pytest.raises(ConfigError, match=r"no accelerator is at 0000:01:00.0.*it has cuda 0"):
        pin(read(make.p5en()), [at("01:00.0")], "local", {})


def test_a_hidden_rail_is_not_named_in_vain(tmp_path) -> None:
    from kvxfer.rails.sysfs import read_sysfs

    topology = make.p5en()
    next(one for one in topology.devices() if one.name == "rdmap85s0").hidden = True
    machine = read_sysfs(make.write_sysfs(topology, tmp_path))
    with pytest.raises(ConfigError, match="no device file"):
        pin(machine, [], ["rdmap85s0"], {})
    assert pin(machine, [at("59:00.0")], "local", {}).value == "rdmap86s0,rdmap87s0,rdmap88s0"


def test_no_rail_to_keep_to_leaves_all(read) -> None:
    machine = read(make.trn2_3xlarge(efas=2))
    decided = pin(machine, [at("00:1e.0")], "local", {})
    assert (decided.value, len(decided.rails)) == (None, 2)
    assert "trn2.3xlarge" in decided.why


def test_no_efa_and_no_accelerator(read) -> None:
    decided = pin(
        read(make.p4d().without("0000:10:1b.0", "0000:20:1b.0", "0000:90:1b.0", "0000:a0:1b.0")), [], "local", {}
    )
    assert (decided.value, decided.rails) == (None, ())


def test_a_process_without_an_accelerator_keeps_every_rail(read) -> None:
    decided = pin(read(make.p5en()), [], "local", {})
    assert (decided.value, len(decided.rails)) == (None, 16)


def test_an_efa_device_that_is_not_attached_is_no_fallback_once_pinned(read) -> None:
    """NIXL would register on every rail; kept to the one that is near, every rail is that one."""
    machine = read(make.trn2("trn2.48xlarge").without("0000:c9:00.0"))
    decided = pin(machine, [at("cc:00.0")], "local", {})
    assert decided.value == "rdmap202s0"
    choice = expectation(machine, [at("cc:00.0")], decided.rails)[at("cc:00.0")]
    assert [rail.rail for rail in choice.rails] == ["rdmap202s0"]


@st.composite
def trees(draw):
    """Any tree of bridges with GPUs and EFA devices at its leaves and in its middle."""
    nodes = [Node("machine")]
    inner = [nodes[0]]
    for number in range(draw(st.integers(1, 8))):
        bridge = Node("bridge", draw(st.sampled_from(inner)), Address(0, number, 31, 0), buses=(number, number))
        inner.append(bridge)
        nodes.append(bridge)
    for number in range(draw(st.integers(1, 12))):
        gpu = draw(st.booleans())
        node = Node(
            "device",
            draw(st.sampled_from(inner)),
            Address(0, draw(st.integers(0, 3)), number, 0),
            vendor=0x10DE if gpu else 0x1D0F,
            device=0x2335 if gpu else 0xEFA2,
            pci_class=0x302 if gpu else 0x200,
        )
        nodes.append(node)
    return Machine(tuple(nodes), "made up")


@settings(max_examples=200, deadline=None)
@given(trees())
def test_on_any_tree_local_loses_nothing_of_nixls_own_split(machine) -> None:
    placements = place(machine)
    unpinned = predict(machine, machine.rails, attached(placements))
    for one in placements:
        decided = pin(machine, [one.node.where], "local", {})
        pinned = expectation(machine, [one.node.where], decided.rails)[one.node.where]
        assert set(pinned.rails) == set(unpinned.choices[one.node].rails)


@settings(max_examples=200, deadline=None)
@given(trees())
def test_on_any_tree_the_split_is_a_split(machine) -> None:
    """Where a switch has enough EFA devices, none is given twice and none is left over."""
    placements = [one for one in place(machine) if one.switch is not None and one.rails]
    by_switch: dict[Node, list] = {}
    for one in placements:
        by_switch.setdefault(one.switch, []).append(one)
    for members in by_switch.values():
        sizes = sorted(len(one.rails) for one in members)
        given_out = [rail for one in members for rail in one.rails]
        if len(set(given_out)) >= len(members):
            assert len(given_out) == len(set(given_out))
            assert sizes[-1] - sizes[0] <= 1
        else:
            assert all(one.rails == members[0].rails for one in members)

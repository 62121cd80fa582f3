"""Machines that no table describes: what is missing, hidden, renumbered or flat must be said, and never guessed at silently."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import topologies as make

from kvxfer.errors import ConfigError
from kvxfer.rails.hwloc import read_hwloc
from kvxfer.rails.judge import judge_machine
from kvxfer.rails.local import attached, place
from kvxfer.rails.pci import Address
from kvxfer.rails.predict import predict
from kvxfer.rails.sysfs import read_sysfs


def buses(rails) -> list[int]:
    return [rail.where.bus for rail in rails]


def verdict_of(machine, provider="efa"):
    placements = place(machine)
    return judge_machine(machine, placements, predict(machine, machine.rails, attached(placements)), provider)


def choices_of(machine):
    placements = place(machine)
    prediction = predict(machine, machine.rails, attached(placements))
    return {one.index: prediction.choices[one.node] for one in placements}


ALL_P5EN = [f"0000:{bus:02x}:00.0" for first in (0x55, 0x6E, 0x87, 0xA0) for bus in range(first, first + 4)]


def test_without_efa_nixl_falls_back_to_tcp(read) -> None:
    machine = read(make.p5en().without(*ALL_P5EN))
    verdict = verdict_of(machine)
    assert verdict.status == 1
    assert [one.kind for one in verdict.violations] == ["provider"]
    assert "tcp" in str(verdict.violations[0])
    assert all(one.rails == () and "no EFA" in one.why for one in place(machine))
    assert predict(machine, machine.rails, {}).provider == "tcp"


def test_tcp_that_is_asked_for_is_no_violation(read) -> None:
    assert verdict_of(read(make.p5en().without(*ALL_P5EN)), "tcp").status == 0


def test_one_efa_device_serves_its_switch_and_every_other_gpu_takes_it_from_afar(read) -> None:
    machine = read(make.p5en().without(*ALL_P5EN[1:]))
    assert [buses(one.rails) for one in place(machine)] == [[0x55], [0x55], [], [], [], [], [], []]
    choices = choices_of(machine)
    assert [choices[index].how for index in range(8)] == ["grouping"] * 2 + ["all devices"] * 6
    verdict = verdict_of(machine)
    assert [one.kind for one in verdict.violations] == ["no local rail"] * 6
    assert "cuda 2 (0000:72:00.0)" in str(verdict.violations[0])
    assert "rdmap85s0" in str(verdict.violations[0])


def test_an_uneven_split_gives_the_first_gpu_the_remainder(read) -> None:
    machine = read(make.p5en().without("0000:58:00.0"))
    assert [buses(one.rails) for one in place(machine)[:2]] == [[0x55, 0x56], [0x57]]
    assert verdict_of(machine).status == 0


def test_an_efa_device_that_aws_pairs_is_not_attached(read) -> None:
    """libnrt names a device that is not there: NIXL would then register on every rail, so it must not pass."""
    machine = read(make.trn2("trn2.48xlarge").without("0000:c9:00.0"))
    first = place(machine)[0]
    assert buses(first.rails) == [0xCA]
    assert first.source == "pcie-switch"
    assert "0000:c9:00.0" in first.why
    assert "not attached" in first.why
    assert choices_of(machine)[0].how == "all devices"
    verdict = verdict_of(machine)
    assert [one.device for one in verdict.violations] == ["neuron 0 (0000:cc:00.0)"]
    assert place(machine)[1].source == "aws-map"


def test_a_neuron_device_without_any_efa_device(read) -> None:
    machine = read(make.trn2_3xlarge())
    assert place(machine)[0].rails == ()
    assert verdict_of(machine).status == 1


@pytest.mark.parametrize("efas", [1, 2])
def test_trn2_3xlarge_is_known_not_to_reach_its_device(read, efas) -> None:
    machine = read(make.trn2_3xlarge(efas))
    only = place(machine)[0]
    assert only.rails == ()
    assert "trn2.3xlarge" in only.why
    verdict = verdict_of(machine)
    assert [one.kind for one in verdict.violations] == ["no local rail"]


@pytest.mark.parametrize("move", [1, 3, 0x0B])
def test_renumbered_buses_do_not_take_part_in_awss_map(read, move) -> None:
    """Another firmware numbers buses otherwise; some then collide with addresses of the map. The tree must win."""
    machine = read(make.trn2("trn2.48xlarge", move=-move))
    for one in place(machine):
        assert one.source == "pcie-switch"
        assert "mirrored" in one.why
        members = sorted(other.node.where for other in place(machine) if other.switch is one.switch)
        place_in_switch = members.index(one.node.where)
        assert one.rails == (one.switch_rails[1 - place_in_switch],)
    assert verdict_of(machine).status == 0


def test_renumbered_gpus_keep_their_switch(read) -> None:
    machine = read(make.p5en(move=-6))
    assert [buses(one.rails) for one in place(machine)[:2]] == [[0x4F, 0x50], [0x51, 0x52]]
    assert verdict_of(machine).status == 0


def test_a_flat_virtual_machine_is_one_group(read) -> None:
    machine = read(make.virtual_machine(gpus=2, efas=4))
    first, second = place(machine)
    assert [rail.where.device for rail in first.rails] == [0x10, 0x11]
    assert [rail.where.device for rail in second.rails] == [0x12, 0x13]
    assert verdict_of(machine).status == 0


def test_fewer_efa_devices_than_gpus_are_shared(read) -> None:
    machine = read(make.virtual_machine(gpus=4, efas=3))
    assert [len(one.rails) for one in place(machine)] == [3, 3, 3, 3]
    assert all("shared" in one.why for one in place(machine))
    assert verdict_of(machine).status == 0


def test_an_efa_device_on_another_numa_node_is_not_local(read) -> None:
    topology = make.Topology(
        [
            make.switch(0x46, 0, {0x50: (make.GPU, 0)}),
            make.switch(0x78, 1, {0x82: (make.EFA, 0)}),
        ]
    )
    machine = read(topology)
    assert place(machine)[0].rails == ()
    assert "NUMA node" in place(machine)[0].why
    assert verdict_of(machine).status == 1


def test_an_efa_device_on_the_same_numa_node_is_the_nearest_there_is(read) -> None:
    topology = make.Topology(
        [
            make.switch(0x46, 0, {0x50: (make.GPU, 0)}),
            make.switch(0x56, 0, {0x60: (make.EFA, 0)}),
            make.switch(0x78, 1, {0x82: (make.GPU, 0), 0x83: (make.EFA, 0)}),
        ]
    )
    machine = read(topology)
    assert [buses(one.rails) for one in place(machine)] == [[0x60], [0x83]]
    assert verdict_of(machine).status == 0


def test_a_gpu_whose_efa_devices_are_all_nearer_to_others(read) -> None:
    """Above a switch with a GPU and an EFA device sits another GPU: NIXL deals nothing to it, and gives it every rail."""
    inner = make.switch(0x48, 0, {0x50: (make.GPU, 0), 0x51: (make.EFA, 0)}).children[0]
    outer = make.Bridge("0000:40:00.0", (0x41, 0x5F), [make.device(make.GPU, "41:00.0"), inner])
    machine = read(make.Topology([make.Host((0x40, 0x5F), 0, [outer])]))
    first, second = place(machine)
    assert (buses(first.rails), buses(second.rails)) == ([], [0x51])
    assert choices_of(machine)[0].how == "all devices"
    assert verdict_of(machine).status == 1


def test_nvswitches_and_ena_are_neither_gpus_nor_rails(read) -> None:
    topology = make.p5en()
    topology.hosts.append(
        make.root_bus(0xF0, 1, [make.device(make.NVSWITCH, "f0:00.0"), make.device(make.ENA, "f0:01.0")])
    )
    machine = read(topology)
    assert (len(machine.gpus), len(machine.efas)) == (8, 16)


def test_a_neuron_device_beside_gpus_is_refused_by_nixl(read) -> None:
    topology = make.p5en()
    topology.hosts += make.trn2().hosts[-1:]
    machine = read(topology)
    neuron = [one for one in place(machine) if one.kind == "neuron"]
    prediction = predict(machine, machine.rails, attached(place(machine)))
    assert prediction.runtime == "CUDA"
    assert all(prediction.choices[one.node].how == "none" for one in neuron)


def test_a_domain_that_is_not_zero(read, tmp_path) -> None:
    topology = make.Topology([make.switch(0x46, 0, {0x50: (make.EFA, 0), 0x51: (make.GPU, 0)}, domain=2)])
    machine = read(topology)
    only = place(machine)[0]
    assert str(only.node.where) == "0002:51:00.0"
    assert [(str(rail.where), rail.rail) for rail in only.rails] == [("0002:50:00.0", "rdmaP2p80s0")]


# --- containers -------------------------------------------------------------------------------------------------------


def hide(topology, *addresses: str):
    for device in topology.devices():
        device.hidden = device.at in addresses
    return topology


def test_an_efa_device_without_its_device_file_is_no_rail(tmp_path) -> None:
    machine = read_sysfs(make.write_sysfs(hide(make.p5en(), "0000:55:00.0", "0000:56:00.0"), tmp_path / "r"))
    assert len(machine.efas) == 16
    assert len(machine.rails) == 14
    assert [buses(one.rails) for one in place(machine)[:3]] == [[0x57], [0x58], [0x6E, 0x6F]]


def test_a_hidden_gpu_takes_its_share_all_the_same(tmp_path) -> None:
    """NIXL's grouping looks at the whole bus, so a container's GPU does not inherit what its hidden neighbour has."""
    machine = read_sysfs(make.write_sysfs(hide(make.p5en(), "0000:59:00.0"), tmp_path / "r"))
    first, second = place(machine)[:2]
    assert (first.node.usable, second.node.usable) == (False, True)
    assert buses(second.rails) == [0x57, 0x58]


def test_hidden_rails_alone_mean_tcp(tmp_path) -> None:
    machine = read_sysfs(make.write_sysfs(hide(make.p5en(), *ALL_P5EN), tmp_path / "r"))
    verdict = verdict_of(machine)
    assert verdict.status == 1
    assert "16 EFA devices are on the bus, but their device files are not here" in str(verdict.violations[0])


def test_neuron_devices_hidden_by_number(tmp_path) -> None:
    root = make.write_sysfs(make.trn2(), tmp_path / "r")
    (root / "dev/neuron3").unlink()
    listing = '[{"neuron_device": 3, "bdf": "cb:00.0"}, {"neuron_device": 0, "bdf": "cc:00.0"}]'
    machine = read_sysfs(root, listing)
    assert machine.neuron_index == {Address.parse("cb:00.0"): 3, Address.parse("cc:00.0"): 0}
    usable = {str(node.where): node.usable for node in machine.neurons}
    assert (usable["0000:cb:00.0"], usable["0000:cc:00.0"]) == (False, True)


def test_a_container_that_renames_its_neuron_device(tmp_path) -> None:
    """/dev/neuron0 in the container, minor number 3: the host's device 3."""
    import os
    import stat

    root = make.write_sysfs(make.trn2(), tmp_path / "r")
    for path in (root / "dev").glob("neuron*"):
        path.unlink()
    try:
        os.mknod(root / "dev/neuron0", stat.S_IFCHR | 0o600, os.makedev(240, 3))
    except OSError:
        pytest.skip("device files cannot be made here")
    listing = '[{"neuron_device": 3, "bdf": "cb:00.0"}, {"neuron_device": 0, "bdf": "cc:00.0"}]'
    usable = {str(node.where): node.usable for node in read_sysfs(root, listing).neurons}
    assert (usable["0000:cb:00.0"], usable["0000:cc:00.0"]) == (True, False)


def test_a_part_of_sysfs(tmp_path) -> None:
    """Bridges that are not shown do not hide that two devices are below one host bridge."""
    root = make.write_sysfs(make.p5en(), tmp_path / "r")
    for link in (root / "sys/bus/pci/devices").iterdir():
        if int((link / "class").read_text(), 16) >> 16 == 0x06:
            link.unlink()
    machine = read_sysfs(root)
    assert [buses(one.rails) for one in place(machine)[:2]] == [[0x55, 0x56], [0x57, 0x58]]


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "not json",
        "[]",
        '{"a": 1}',
        '[{"bdf": "cc:00.0"}]',
        '[{"bdf": 3, "neuron_device": 1}]',
        '[{"bdf": "cc:00.0", "neuron_device": 1e999}]',
        '[{"bdf": "cc:00.0", "neuron_device": -1}]',
        '[{"bdf": "cc:00.0", "neuron_device": 0}, {"bdf": "cb:00.0", "neuron_device": 0}]',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_what_neuron_ls_may_print_instead(tmp_path, listing) -> None:
    assert read_sysfs(make.write_sysfs(make.trn2(), tmp_path / "r"), listing).neuron_index == {}


def _strange_files(root) -> None:
    (root / "dev/neuron0_aux").touch()
    (root / "dev/neuron0").unlink(missing_ok=True)
    (root / "dev/neuron0").symlink_to("gone")


def _strange_gpus(root) -> None:
    for name, text in (("odd", "Device Minor: 3"), ("0000:59:00.0", f"Device Minor: {'9' * 5000}")):
        folder = root / "proc/driver/nvidia/gpus" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "information").write_text(text)


def _strange_links(root) -> None:
    bus = root / "sys/bus/pci/devices"
    (bus / "0000:ff:00.0").symlink_to("0000:ff:00.0")
    (bus / "0000:fe:00.0").symlink_to("nowhere")
    (bus / "0000:fd:00.0").write_text("a file")
    (bus / "README").write_text("a file")


def _strange_values(root) -> None:
    for device in (root / "sys/bus/pci/devices").iterdir():
        (device / "current_link_speed").write_text("1.2.3 GT/s")
        (device / "current_link_width").write_text("-4")


@pytest.mark.parametrize("strange", [_strange_files, _strange_gpus, _strange_links, _strange_values])
@pytest.mark.parametrize("topology", [make.p5en(), make.trn2()], ids=["p5en", "trn2"])
def test_files_that_are_not_what_the_kernel_makes(tmp_path, topology, strange) -> None:
    """They say nothing of the rails, so every device that was not made strange has those that it had."""
    root = make.write_sysfs(topology, tmp_path / "r")
    before = {str(one.node.where): buses(one.rails) for one in place(read_sysfs(root))}
    strange(root)
    machine = read_sysfs(root)
    assert {str(one.node.where): buses(one.rails) for one in place(machine)} == before
    assert all(node.link >= 0 for node in machine.nodes)


def test_device_files_that_may_not_be_opened_are_as_good_as_none(tmp_path, monkeypatch) -> None:
    root = make.write_sysfs(make.p5en(), tmp_path / "r")
    closed = {str(root / "dev/infiniband/uverbs0"), str(root / "dev/nvidia0")}
    monkeypatch.setattr("os.access", lambda path, mode: str(path) not in closed and Path(path).exists())
    machine = read_sysfs(root)
    hidden = [str(node.where) for node in [*machine.efas, *machine.accelerators] if not node.usable]
    assert hidden == ["0000:55:00.0", "0000:59:00.0"]


def test_a_machine_without_a_pci_bus(tmp_path) -> None:
    machine = read_sysfs(tmp_path)
    assert (machine.accelerators, machine.efas) == ([], [])
    assert verdict_of(machine).status == 1


# --- libnrt's own answers ---------------------------------------------------------------------------------------------


def test_what_libnrt_says_beats_the_map(read) -> None:
    machine = read(make.trn2())
    asked = {Address.parse("cc:00.0"): Address.parse("ca:00.0")}
    first = place(machine, asked)[0]
    assert (buses(first.rails), first.source) == ([0xCA], "nrt")


def test_libnrt_names_what_is_not_there(read) -> None:
    machine = read(make.trn2().without("0000:c9:00.0"))
    placements = place(machine, {Address.parse("cc:00.0"): Address.parse("c9:00.0")})
    assert (placements[0].rails, placements[0].source) == ((), "nrt")
    assert predict(machine, machine.rails, attached(placements)).choices[placements[0].node].how == "all devices"


def test_an_unknown_pairing_is_not_judged(read) -> None:
    """Two EFA devices and four Neuron devices on a bus that AWS's map does not have: only libnrt knows."""
    devices = [make.device(make.EFA, "30:19.0"), make.device(make.EFA, "30:1a.0")]
    devices += [make.device(make.NEURON, f"30:{slot:02x}.0", 0x7164) for slot in (0x1B, 0x1C, 0x1D, 0x1E)]
    machine = read(make.Topology([make.root_bus(0x30, 0, devices)]))
    assert all(len(one.rails) == 2 for one in place(machine))
    verdict = verdict_of(machine)
    assert verdict.status == 0
    assert len(verdict.notes) == 4


# --- files that are not what they should be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("<html><body/></html>", "not a topology"),
        ('<topology version="2.0"><object type="Machine"/></topology>', "no PCI devices"),
        (
            '<topology><object type="Machine"><object type="PCIDev" pci_busid="nonsense"/></object></topology>',
            "nonsense",
        ),
    ],
)
def test_xml_that_is_no_topology(tmp_path, text, why) -> None:
    path = tmp_path / "x.xml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_hwloc(path)


_BRIDGE = '<object type="Bridge" pci_busid="0000:00:00.0" pci_type="0604 [8086:0000]">'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<?xml version="1.0" encoding="foo"?><topology/>', "cannot be read.*foo"),
        ('<?xml version="1.0" encoding="utf-32"?><topology/>', "cannot be read"),
        (f'<topology><object type="Machine">{_BRIDGE * 3000}{"</object>" * 3001}</topology>', "nested deeper"),
        (
            '<topology><object type="Machine">'
            + 2 * '<object type="PCIDev" pci_busid="0000:59:00.0" pci_type="0302 [10de:2335]"/>'
            + "</object></topology>",
            "more than one device at 0000:59:00.0",
        ),
    ],
    ids=["unknown encoding", "encoding of wide characters", "deep", "two devices at one address"],
)
def test_xml_that_is_no_machines(tmp_path, text, why) -> None:
    path = tmp_path / "x.xml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_hwloc(path)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("nodeset", "0xf...f"),
        ("nodeset", "0xf...f,0x0"),
        ("nodeset", "some"),
        ("pci_link_speed", "fast"),
        ("pci_link_speed", "nan"),
        ("pci_link_speed", "inf"),
    ],
)
def test_xml_that_describes_in_another_way(tmp_path, attribute, value) -> None:
    path = make.write_hwloc(make.p5en(), tmp_path / "x.xml")
    path.write_text(re.sub(rf' {attribute}="[^"]*"', f' {attribute}="{value}"', path.read_text()))
    machine = read_hwloc(path)
    assert [buses(one.rails) for one in place(machine)[:2]] == [[0x55, 0x56], [0x57, 0x58]]
    assert all(math.isfinite(node.link) for node in machine.nodes)


def test_xml_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hwloc(tmp_path / "x.xml")

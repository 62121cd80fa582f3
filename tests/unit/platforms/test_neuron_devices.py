"""From a process's cores to its Neuron device and that device's EFA device: every family, containers, what is ambiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvxfer.errors import ConfigError, PlatformError
from kvxfer.rails.instances import INSTANCE_TYPES
from kvxfer.rails.pci import Address
from kvxfer.rails.sysfs import run_neuron_ls
from kvxfer_neuron import cores
from kvxfer_neuron.devices import Devices
from tests.unit.platforms.neuron_doubles import make, neuron_ls, trn2_files, trn2_host, write_host

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["trn2_files", "trn2_host"]


class Nrt:
    """libnrt's one answer that is needed here."""

    def __init__(self, *host: int) -> None:
        self.host = host

    def host_device(self, device: int) -> int:
        if device >= len(self.host):
            raise PlatformError("nrt_host_device_id_get: NRT_INVALID (2)")
        return self.host[device]


def devices(root: Path, environment: dict[str, str], *, ls: str = "", nrt: Nrt | None = None) -> Devices:
    def load() -> Nrt:
        if nrt is None:
            raise PlatformError("libnrt cannot be loaded")
        return nrt

    return Devices(root, environment, lambda: ls, load)


def address_of(found: Devices, ordinal: int = 0) -> str:
    return str(found.placement(ordinal).node.where)


# --- cores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "ids"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "5"}, (5,)),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, (0, 1, 2, 3)),
        ({"NEURON_RT_VISIBLE_CORES": " 0, 2 ,4-6"}, (0, 2, 4, 5, 6)),
        ({"NEURON_VISIBLE_DEVICES": "9"}, (9,)),
        ({"NEURON_VISIBLE_DEVICES": "8-11", "LOCAL_RANK": "2"}, (10,)),
        ({"NEURON_VISIBLE_DEVICES": "8-11", "NEURON_RT_VISIBLE_CORES": "8"}, (8,)),
        ({"NEURON_RT_VISIBLE_CORES": "3", "NEURON_RT_NUM_CORES": "1"}, (3,)),
    ],
)
def test_the_cores_of_a_process(environment, ids) -> None:
    assert cores.visible(environment).ids == ids


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "neither NEURON_RT_VISIBLE_CORES nor NEURON_VISIBLE_DEVICES is set.*KVXFER_NEURON_DEVICE"),
        ({"NEURON_RT_NUM_CORES": "2"}, "NEURON_RT_NUM_CORES=2 lets the runtime pick"),
        ({"NEURON_VISIBLE_DEVICES": "8-11"}, "nothing says which this process is.*LOCAL_RANK, below 4"),
        ({"NEURON_VISIBLE_DEVICES": "8-11", "LOCAL_RANK": "4"}, "nothing says which this process is"),
        ({"NEURON_VISIBLE_DEVICES": "8-11", "LOCAL_RANK": "-1"}, "nothing says which this process is"),
        ({"NEURON_RT_VISIBLE_CORES": "3-1"}, "is no list of core ids"),
        ({"NEURON_RT_VISIBLE_CORES": "a"}, "is no list of core ids"),
        ({"NEURON_RT_VISIBLE_CORES": "0,,1"}, "is no list of core ids"),
        ({"NEURON_RT_VISIBLE_CORES": "0-99999"}, "is no list of core ids"),
        ({"NEURON_RT_VISIBLE_CORES": "1,0-2"}, "names a core twice"),
    ],
)
def test_cores_that_are_not_told_are_refused_with_what_to_set(environment, said) -> None:
    with pytest.raises(ConfigError, match=said):
        cores.visible(environment)


@pytest.mark.parametrize(
    ("family", "environment", "size"),
    [
        ("trn1", {}, 1),
        ("trn2", {}, 2),
        ("trn3", {}, 2),
        ("trn2", {"NEURON_LOGICAL_NC_CONFIG": "1"}, 1),
        ("trn2", {"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, 1),
        ("trn2", {"NEURON_RT_VIRTUAL_CORE_SIZE": "2", "NEURON_LOGICAL_NC_CONFIG": "2"}, 2),
        ("trn1", {"NEURON_LOGICAL_NC_CONFIG": "1"}, 1),
    ],
)
def test_physical_cores_to_a_logical_one(family, environment, size) -> None:
    assert cores.logical_size(environment, family) == size


@pytest.mark.parametrize(
    ("family", "environment", "said"),
    [
        ("trn2", {"NEURON_LOGICAL_NC_CONFIG": "4"}, "must be 1 or 2"),
        ("trn2", {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, "contradict each other"),
        ("trn1", {"NEURON_LOGICAL_NC_CONFIG": "2"}, "the cores of trn1 are not joined"),
    ],
)
def test_sizes_that_cannot_be(family, environment, said) -> None:
    with pytest.raises(ConfigError, match=said):
        cores.logical_size(environment, family)


# --- whole hosts ------------------------------------------------------------------------------------------------------

HOSTS = {
    "trn1.32xlarge": (make.trn1, 2),
    "trn1n.32xlarge": (make.trn1n, 2),
    "trn2.48xlarge": (make.trn2, 4),
    "trn2u.48xlarge": (make.trn2, 4),
}


@pytest.mark.parametrize("product", HOSTS)
def test_every_core_of_a_host_has_the_device_and_the_efa_device_of_awss_map(tmp_path, product) -> None:
    topology, each = HOSTS[product]
    environment: dict[str, str] = {}
    found = devices(write_host(tmp_path / "host", topology(product)), environment)
    for pair in INSTANCE_TYPES[product].pairs:
        for core in range(pair.index * each, (pair.index + 1) * each):
            environment["NEURON_RT_VISIBLE_CORES"] = str(core)
            placement = found.placement(0)
            assert (placement.index, placement.node.where) == (pair.index, pair.device)
            assert [node.where for node in placement.rails] == [pair.efa]


@pytest.mark.parametrize("family", ["trn3.48xlarge", "trn3", "trn3pd98", "trn3pd"])
def test_trn3_by_the_addresses_that_neuron_ls_prints(tmp_path, family) -> None:
    """The buses of its Neuron devices are made up; that each lies below its EFA device's switch is what counts."""
    pairs = INSTANCE_TYPES["trn3.48xlarge"].pairs
    below = {0x4C: 0x4D, 0x4B: 0x4E}  # of the switch with EFA devices 4b and 4c
    told = {pair.index: f"{below[pair.efa.bus]:02x}:00.0" for pair in pairs if pair.efa.bus in below}
    environment = {"KVXFER_NEURON_INSTANCE_TYPE": family}
    found = devices(write_host(tmp_path / "host", make.trn3("")), environment, ls=neuron_ls(told))
    for index, bdf in told.items():
        environment["NEURON_RT_VISIBLE_CORES"] = str(index * 4)
        placement = found.placement(0)
        assert placement.node.where == Address.parse(bdf)
        assert [node.where for node in placement.rails] == [pairs[index].efa]


def test_with_lnc_1_a_device_has_eight_cores(trn2_host) -> None:
    one = {"NEURON_LOGICAL_NC_CONFIG": "1"}
    assert address_of(devices(trn2_host, {**one, "NEURON_RT_VISIBLE_CORES": "7"})) == "0000:cc:00.0"
    assert address_of(devices(trn2_host, {**one, "NEURON_RT_VISIBLE_CORES": "8"})) == "0000:b5:00.0"
    assert address_of(devices(trn2_host, {"NEURON_RT_VISIBLE_CORES": "7"})) == "0000:b5:00.0"


def test_the_drivers_own_count_of_cores_is_believed(tmp_path) -> None:
    root = write_host(tmp_path / "host")
    for number in range(16):
        folder = root / f"sys/class/neuron_device/neuron{number}"
        folder.mkdir(parents=True)
        (folder / "core_count").write_text("4\n")
    assert devices(root, {"NEURON_RT_VISIBLE_CORES": "7"}).host_index(0) == 3
    (root / "sys/class/neuron_device/neuron3/core_count").write_text("many\n")
    assert devices(root, {"NEURON_RT_VISIBLE_CORES": "7"}).host_index(0) == 3
    (root / "sys/class/neuron_device/neuron2/core_count").write_text("8\n")
    assert devices(root, {"NEURON_RT_VISIBLE_CORES": "7"}).host_index(0) == 1, (
        "they contradict each other: the family's"
    )


def test_a_core_beyond_the_last_is_named_with_the_lnc_that_was_taken(trn2_host) -> None:
    with pytest.raises(
        ConfigError, match=r"CORES=64 is beyond the 16 Neuron devices .*device 16. Set NEURON_LOGICAL_NC_CONFIG"
    ):
        address_of(devices(trn2_host, {"NEURON_RT_VISIBLE_CORES": "64"}))
    assert devices(trn2_host, {"NEURON_RT_VISIBLE_CORES": "64", "NEURON_LOGICAL_NC_CONFIG": "1"}).host_index(0) == 8


def test_a_process_with_cores_on_two_devices(trn2_host) -> None:
    found = devices(trn2_host, {"NEURON_RT_VISIBLE_CORES": "3-4"})
    assert [address_of(found, ordinal) for ordinal in (0, 1)] == ["0000:cc:00.0", "0000:b5:00.0"]
    with pytest.raises(ConfigError, match=r"2 cores on Neuron devices \[0, 1\], and none of them is device ordinal 2"):
        address_of(found, 2)


def test_all_cores_of_one_device_are_that_device_whatever_the_ordinal(trn2_host) -> None:
    found = devices(trn2_host, {"NEURON_RT_VISIBLE_CORES": "0-3"})
    assert {address_of(found, ordinal) for ordinal in (0, 3, 9)} == {"0000:cc:00.0"}


def test_a_host_with_one_device_needs_no_cores(tmp_path) -> None:
    root = write_host(tmp_path / "host", make.trn2_3xlarge())
    assert address_of(devices(root, {})) == "0000:00:1e.0"


def test_a_host_without_a_device_is_told_what_is_needed(tmp_path) -> None:
    root = write_host(tmp_path / "host", make.p5en())
    with pytest.raises(PlatformError, match=r"no Neuron device on the PCI bus .*a container that is shown /sys"):
        devices(root, {}).placement(0)


def test_other_bus_numbers_are_found_by_neuron_ls_alone(tmp_path) -> None:
    """A host whose firmware numbers its buses otherwise than AWS's tables have them."""
    root = write_host(tmp_path / "host", make.trn2("trn2.48xlarge", move=1))
    environment = {"NEURON_RT_VISIBLE_CORES": "20"}
    with pytest.raises(
        PlatformError, match=r"Neuron device 5 of this host is at a PCI address that nobody tells.*neuron-ls"
    ):
        address_of(devices(root, environment))
    assert address_of(devices(root, environment, ls=neuron_ls({5: "59:00.0"}))) == "0000:59:00.0"


def test_neuron_ls_is_believed_before_the_tables(trn2_host) -> None:
    environment = {"NEURON_RT_VISIBLE_CORES": "20"}
    assert address_of(devices(trn2_host, environment, ls=neuron_ls({5: "59:00.0", 6: "58:00.0"}))) == "0000:59:00.0"


# --- containers -------------------------------------------------------------------------------------------------------


def test_renumbered_files_are_the_hosts_devices_by_their_minor_numbers(tmp_path) -> None:
    root = write_host(tmp_path / "host", devices={0: 5, 1: 3})
    found = devices(root, {"NEURON_RT_VISIBLE_CORES": "0"})
    assert found.files == {0: 5, 1: 3}
    assert found.host_index(0) == 5
    assert address_of(found) == "0000:58:00.0"
    assert devices(root, {"NEURON_RT_VISIBLE_CORES": "4"}).host_index(0) == 3


def test_libnrt_knows_best_which_device_it_counts(tmp_path) -> None:
    """Files 0 and 1, of which the runtime counts the second first."""
    root = write_host(tmp_path / "host", devices={0: 5, 1: 3})
    assert devices(root, {"NEURON_RT_VISIBLE_CORES": "0"}, nrt=Nrt(3, 5)).host_index(0) == 3


def test_files_that_are_no_devices_are_not_counted(tmp_path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("neuron0", "neuron1", "neuron0_aux", "neuron2\u00b2"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "dev/neuron9").symlink_to("gone")
    assert Devices(tmp_path, {}, str, lambda: None).files == {0: 0, 1: 1}


def test_files_under_the_hosts_own_numbers(tmp_path) -> None:
    """Two devices of sixteen, under their own names: is the runtime's device 0 /dev/neuron4? Only libnrt knows."""
    root = write_host(tmp_path / "host", devices={4: 4, 5: 5})
    environment = {"NEURON_RT_VISIBLE_CORES": "0"}
    with pytest.raises(PlatformError) as raised:
        devices(root, environment).host_index(0)
    for said in (
        "runtime's Neuron device 0",
        "/dev/neuron4, /dev/neuron5",
        "libnrt cannot be loaded",
        "KVXFER_NEURON_DEVICE",
    ):
        assert said in str(raised.value)
    assert devices(root, environment, nrt=Nrt(4, 5)).host_index(0) == 4
    assert address_of(devices(root, {"KVXFER_NEURON_DEVICE": "4"})) == "0000:6f:00.0"


def test_the_first_devices_of_a_host_are_ambiguous_to_nobody(tmp_path) -> None:
    root = write_host(tmp_path / "host", devices={0: 0, 1: 1})
    assert devices(root, {"NEURON_RT_VISIBLE_CORES": "4"}).host_index(0) == 1


def test_a_core_beyond_a_containers_devices(tmp_path) -> None:
    root = write_host(tmp_path / "host", devices={0: 5})
    with pytest.raises(ConfigError, match="beyond the 1 Neuron devices here"):
        devices(root, {"NEURON_RT_VISIBLE_CORES": "4"}).host_index(0)


def test_neuron_ls_is_not_asked_where_files_are_renumbered(tmp_path) -> None:
    """It may count either way there."""
    root = write_host(tmp_path / "host", devices={0: 5})
    lying = neuron_ls({5: "cc:00.0", 0: "58:00.0"})
    assert address_of(devices(root, {"NEURON_RT_VISIBLE_CORES": "0"}, ls=lying)) == "0000:58:00.0"


# --- the overrides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["5", "0000:58:00.0", "58:00.0"])
def test_the_device_that_is_named(trn2_host, said) -> None:
    assert (
        address_of(devices(trn2_host, {"KVXFER_NEURON_DEVICE": said, "NEURON_RT_VISIBLE_CORES": "0"})) == "0000:58:00.0"
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [("neuron5", "is neither a host index nor a PCI address"), ("0000:57:00.0", "no Neuron device is there")],
)
def test_a_device_that_is_none_is_refused_with_those_that_are_here(trn2_host, said, why) -> None:
    with pytest.raises(ConfigError, match=rf"{why}; there are neuron 0 \(0000:cc:00.0\)"):
        address_of(devices(trn2_host, {"KVXFER_NEURON_DEVICE": said}))


@pytest.mark.parametrize(
    ("name", "said", "type_"),
    [
        ("KVXFER_NEURON_INSTANCE_TYPE", "trn2.48xlarge", "trn2.48xlarge"),
        ("KVXFER_NEURON_INSTANCE_TYPE", "trn1n", "trn1n.32xlarge"),
        ("KVXFER_NEURON_INSTANCE_TYPE", "trn2.3xlarge", "trn2.3xlarge"),
        ("VLLM_NEURON_EFA_INSTANCE_FAMILY", "trn2", "trn2.48xlarge"),
        ("VLLM_NEURON_EFA_INSTANCE_FAMILY", "trn3pd", "trn3pd98.48xlarge"),
        ("VLLM_NEURON_EFA_INSTANCE_FAMILY", "trn3pds", "trn3pds.48xlarge"),
    ],
)
def test_the_instance_type_that_is_named(trn2_host, name, said, type_) -> None:
    assert devices(trn2_host, {name: said}).machine.instance_type == type_


def test_kvxfers_own_setting_wins_over_vllm_neurons(trn2_host) -> None:
    both = {"KVXFER_NEURON_INSTANCE_TYPE": "trn1", "VLLM_NEURON_EFA_INSTANCE_FAMILY": "trn2"}
    assert devices(trn2_host, both).machine.instance_type == "trn1.32xlarge"


def test_an_instance_type_that_is_not_known(trn2_host) -> None:
    with pytest.raises(ConfigError, match=r"instance type 'trn9' .*known are trn1.32xlarge"):
        _ = devices(trn2_host, {"KVXFER_NEURON_INSTANCE_TYPE": "trn9"}).machine


# --- neuron-ls itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "out"), [("echo '[]'", "[]\n"), ("echo '[]'; exit 1", ""), ("", "")])
def test_neuron_ls_is_run_where_it_is(tmp_path, monkeypatch, body, out) -> None:
    tool = tmp_path / "neuron-ls"
    tool.write_text(f'#!/bin/sh\n[ "$1" = -j ] || exit 3\n{body}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert run_neuron_ls() == out


def test_without_neuron_ls_nothing_is_printed(monkeypatch) -> None:
    monkeypatch.setattr("kvxfer.rails.sysfs._NEURON_LS", ("/there/is/none",))
    assert run_neuron_ls() == ""

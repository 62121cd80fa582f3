"""libnrt's binding, against a library of our own that keeps the rules of the real one's headers; each failure, by name and cure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import PlatformError
from kvxfer.rails.pci import Address
from kvxfer_neuron.devices import Devices
from kvxfer_neuron.nrt import load
from kvxfer_neuron.probe import SIZE, probe
from kvxfer_neuron.status import Status, cure, named
from tests.unit.platforms.neuron_doubles import (
    HERE,
    READY,
    built_libnrt,
    compile_library,
    in_a_process,
    libnrt,
    needs_compiler,
    trn2_files,
    trn2_host,
)

__all__ = ["built_libnrt", "libnrt", "trn2_files", "trn2_host"]
pytestmark = needs_compiler
ROOT = Path(__file__).parents[3]
EFA = "0000:c9:00.0"


@pytest.fixture
def nrt(libnrt):
    return load({"KVXFER_LIBNRT": str(libnrt.path)})


@pytest.fixture
def started(libnrt, nrt, monkeypatch):
    """libnrt with its runtime up, HBM mapped, device 0 attached to an EFA device."""
    monkeypatch.setenv("NEURON_RT_MAP_HBM", "1")
    libnrt.attach(0, EFA)
    nrt.initialise()
    return nrt


# --- codes ------------------------------------------------------------------------------------------------------------

NOT_FAILURES = (Status.SUCCESS, Status.QUEUE_EMPTY, Status.COLL_PENDING)


@pytest.mark.parametrize("status", Status, ids=lambda status: status.name)
def test_every_code_is_named_as_the_header_names_it_and_every_failure_has_a_cure(libnrt, nrt, status) -> None:
    assert named(status) == f"NRT_{status.name} ({int(status)})"
    if status in NOT_FAILURES:
        return
    libnrt.force("nrt_init", status)
    with pytest.raises(PlatformError) as raised:
        nrt.initialise()
    assert str(raised.value) == f"nrt_init: NRT_{status.name} ({int(status)}): {cure(status)}"
    assert len(cure(status)) > 20


def test_a_code_that_is_not_known_is_told_by_its_number(libnrt, nrt) -> None:
    libnrt.force("nrt_init", 4711)
    with pytest.raises(
        PlatformError, match=r"NRT_STATUS 4711, which this kvxfer does not know: look it up in nrt_status.h"
    ):
        nrt.initialise()


# --- loading ----------------------------------------------------------------------------------------------------------


LOADS = "import os; from kvxfer_neuron.nrt import load; print(load(os.environ).path)"


def test_it_is_found_by_the_name_under_which_nixl_looks_for_it(built_libnrt) -> None:
    assert in_a_process(LOADS, LD_LIBRARY_PATH=str(built_libnrt.parent)) == "libnrt.so.1"


def test_a_library_that_was_loaded_from_its_file_is_found_by_name_from_then_on(built_libnrt) -> None:
    """So that NIXL and libfabric find what LD_LIBRARY_PATH does not tell them of."""
    program = f"{LOADS}; import ctypes; print(bool(ctypes.CDLL('libnrt.so.1').nrt_init))"
    assert in_a_process(program, KVXFER_LIBNRT=str(built_libnrt)).split() == [str(built_libnrt), "True"]


def test_awss_directory_is_looked_into_as_well(built_libnrt) -> None:
    program = f"import kvxfer_neuron.nrt as n; n.DIRECTORY = {str(built_libnrt.parent)!r}; print(n.load({{}}).path)"
    assert in_a_process(program) == str(built_libnrt)


def test_where_there_is_none_it_is_said_what_was_tried_and_what_to_install() -> None:
    program = (
        "import kvxfer_neuron.nrt as n\nn.DIRECTORY = '/there/is/none'\n"
        "try: n.load({})\nexcept Exception as error: print(type(error).__name__, error)"
    )
    said = in_a_process(program)
    assert said.startswith("PlatformError libnrt cannot be loaded (libnrt.so.1: cannot open")
    assert "/there/is/none/libnrt.so.1" in said
    assert "aws-neuronx-runtime-lib" in said
    assert "export LD_LIBRARY_PATH=" in said


def test_a_libnrt_before_sdk_2_29_has_no_answer_and_says_from_when(tmp_path) -> None:
    old = compile_library(tmp_path, HERE / "fake_libnrt.c", "-DBEFORE_2_29")
    with pytest.raises(PlatformError) as raised:
        load({"KVXFER_LIBNRT": str(old)}).attached_efa(0x1000)
    said = f"{old} has no nrt_get_attached_efa_bdf, which came with libnrt 2.31.24 of Neuron SDK 2.29: install a newer"
    assert said in str(raised.value)


# --- before the runtime -----------------------------------------------------------------------------------------------


def test_what_can_be_asked_before_the_runtime(libnrt, nrt) -> None:
    libnrt.library.double_cores(128, 4)
    libnrt.host_devices(7, 3)
    assert nrt.version() == "2.34.10.0"
    assert nrt.cores() == (128, 4)
    assert [nrt.host_device(device) for device in (0, 1)] == [7, 3]
    assert not nrt.initialised()
    assert libnrt.count("inits") == 0, "asking started it"


def test_a_device_that_the_runtime_does_not_have(libnrt, nrt) -> None:
    libnrt.host_devices(7, 3)
    with pytest.raises(PlatformError, match=r"nrt_host_device_id_get of Neuron device 2: NRT_INVALID \(2\)"):
        nrt.host_device(2)


@pytest.mark.parametrize("before", [Status.UNINITIALIZED, Status.FAILURE])
def test_whether_it_is_initialised(libnrt, nrt, before) -> None:
    libnrt.before(before)
    assert not nrt.initialised()
    nrt.initialise()
    assert nrt.initialised()
    nrt.close()
    assert not nrt.initialised()


@pytest.mark.parametrize(
    "ask", [lambda nrt: nrt.memory(), lambda nrt: nrt.allocate(1), lambda nrt: nrt.attached_efa(4096)]
)
def test_what_needs_the_runtime_says_so_before_it_and_after_it(nrt, ask) -> None:
    with pytest.raises(PlatformError, match=r"NRT_UNINITIALIZED \(13\): .*let the first tensor be made on the device"):
        ask(nrt)
    nrt.initialise()
    nrt.close()
    with pytest.raises(PlatformError, match=r"NRT_CLOSED \(14\): .*start the process again"):
        ask(nrt)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_allocated_seen_and_given_back(started) -> None:
    tensor = started.allocate(1 << 20)
    assert started.memory().used == 1 << 20
    address = started.tensor_address(tensor)
    assert address % 4096 == 0
    started.free(tensor)
    assert started.memory().used == 0
    assert not tensor


def test_no_room_is_told_with_the_cure(libnrt, started) -> None:
    libnrt.limits(size=1000)
    with pytest.raises(PlatformError, match=r"nrt_tensor_allocate of 1,001 bytes: NRT_RESOURCE \(4\): .*free HBM"):
        started.allocate(1001)


@pytest.mark.parametrize("value", [None, "0", "false"])
def test_hbm_that_is_not_mapped_has_no_address(nrt, monkeypatch, value) -> None:
    monkeypatch.delenv("NEURON_RT_MAP_HBM", raising=False)
    if value is not None:
        monkeypatch.setenv("NEURON_RT_MAP_HBM", value)
    nrt.initialise()
    tensor = nrt.allocate(4096)
    with pytest.raises(PlatformError, match=r"nrt_tensor_get_va: .*Set NEURON_RT_MAP_HBM=1 before its first tensor"):
        nrt.tensor_address(tensor)


def test_mapping_after_the_first_tensor_comes_too_late(nrt, monkeypatch) -> None:
    monkeypatch.delenv("NEURON_RT_MAP_HBM", raising=False)
    nrt.initialise()
    nrt.allocate(4096)
    monkeypatch.setenv("NEURON_RT_MAP_HBM", "1")
    with pytest.raises(PlatformError, match="not mapped"):
        nrt.tensor_address(nrt.allocate(4096))


# --- the EFA device of an address -------------------------------------------------------------------------------------


def test_the_efa_device_of_an_address_anywhere_in_a_tensor(started) -> None:
    address = started.tensor_address(started.allocate(1 << 16))
    assert {started.attached_efa(at) for at in (address, address + 1, address + 65535)} == {Address.parse(EFA)}


@pytest.mark.parametrize("text", ["c9:00.0", "0000:c9:00.0", "00000000:c9:00.0"])
def test_text_that_is_longer_than_nixl_has_room_for_is_read_and_warned_of(libnrt, started, caplog, text) -> None:
    libnrt.attach(0, text)
    address = started.tensor_address(started.allocate(4096))
    assert started.attached_efa(address) == Address.parse(EFA)
    assert ("NIXL takes every rail for this memory" in caplog.text) is (len(text) + 1 > 13)


def test_a_library_that_never_has_room_enough_is_not_asked_for_ever(libnrt, started) -> None:
    address = started.tensor_address(started.allocate(4096))
    libnrt.force("nrt_get_attached_efa_bdf", Status.RESOURCE)
    with pytest.raises(PlatformError, match=r"NRT_RESOURCE \(4\) even for 4096 bytes of text"):
        started.attached_efa(address)
    assert libnrt.count("bdf") == 4


@pytest.mark.parametrize("elsewhere", [True, False])
def test_no_efa_device_for_an_address(libnrt, started, elsewhere) -> None:
    """The memory is none of the device's; or the instance has no EFA device there."""
    address = started.tensor_address(started.allocate(4096))
    if elsewhere:
        address += 1 << 30
    else:
        libnrt.attach(0, "")
    with pytest.raises(PlatformError) as raised:
        started.attached_efa(address)
    for said in (f"memory at {address:#x}", "NRT_FAILURE (1)", "/dev/infiniband/uverbs*", "KVXFER_NEURON_EFA"):
        assert said in str(raised.value)


def test_an_answer_that_is_no_address(libnrt, started) -> None:
    libnrt.attach(0, "not yet")
    address = started.tensor_address(started.allocate(4096))
    with pytest.raises(PlatformError, match=r"answered b'not yet': no PCI address"):
        started.attached_efa(address)


def test_address_nought_is_not_asked_about(libnrt, started) -> None:
    for ask in (started.attached_efa, lambda address: started.dmabuf(address, 4096)):
        with pytest.raises(PlatformError, match="no device memory: HBM is not mapped"):
            ask(0)
    assert libnrt.count("bdf") == 0


# --- dma-buf ----------------------------------------------------------------------------------------------------------


def test_a_dma_buf_is_a_file_descriptor_of_the_callers(started) -> None:
    descriptor = started.dmabuf(started.tensor_address(started.allocate(1 << 16)), 1 << 16)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("shift", "length", "said"),
    [
        (64, 4096, "is not on a page of 4 KiB"),
        (0, 1 << 20, "it is no memory mapped for peers. Linux 5.15"),
        (1 << 30, 4096, "FI_HMEM_NEURON_USE_DMABUF=0"),
    ],
)
def test_what_cannot_be_exported(started, shift, length, said) -> None:
    address = started.tensor_address(started.allocate(1 << 16))
    with pytest.raises(PlatformError) as raised:
        started.dmabuf(address + shift, length)
    assert f"{length:,} bytes at {address + shift:#x}: NRT_INVALID (2)" in str(raised.value)
    assert said in str(raised.value)


def test_one_dma_buf_takes_one_efa_device_and_they_may_run_out(libnrt, started) -> None:
    libnrt.limits(exports=1)
    address = started.tensor_address(started.allocate(1 << 16))
    os.close(started.dmabuf(address, 4096))
    with pytest.raises(
        PlatformError, match=r"NRT_RESOURCE \(4\): each dma-buf takes one EFA device.*fewer, larger regions"
    ):
        started.dmabuf(address, 4096)


@pytest.mark.parametrize("status", [Status.FAILURE, Status.HW_ERROR])
def test_other_failures_of_exporting_are_named(libnrt, started, status) -> None:
    address = started.tensor_address(started.allocate(4096))
    libnrt.force("nrt_get_dmabuf_fd", status)
    with pytest.raises(PlatformError, match=rf"NRT_{status.name} \({int(status)}\)"):
        started.dmabuf(address, 4096)


# --- the probe of a host ----------------------------------------------------------------------------------------------


def answers(libnrt, nrt, root, monkeypatch, **environment: str):
    monkeypatch.setenv("NEURON_RT_MAP_HBM", environment.get("NEURON_RT_MAP_HBM", "1"))
    environment = {**READY, "NEURON_RT_VISIBLE_CORES": "0", **environment}
    libnrt.host_devices(*range(16))
    return list(probe(nrt, Devices(root, environment, lambda: "", lambda: nrt), environment))


def test_a_host_that_answers_as_expected(libnrt, nrt, trn2_host, monkeypatch) -> None:
    libnrt.attach(0, EFA)
    found = answers(libnrt, nrt, trn2_host, monkeypatch)
    assert [one.step for one in found] == [
        "version",
        "cores",
        "index",
        "runtime",
        "memory",
        "address",
        "efa",
        "dma-buf",
    ]
    assert [one for one in found if not one.good] == []
    efa = next(one for one in found if one.step == "efa")
    assert efa.text == f"libnrt attaches {EFA} to neuron 0 (0000:cc:00.0); without it {EFA} (aws-map)"
    assert not nrt.initialised(), "the runtime is given back"


@pytest.mark.parametrize(
    ("change", "step", "said", "last"),
    [
        (lambda double: double.force("nrt_init", 1005), "runtime", "NRT_EXEC_NC_BUSY", True),
        (lambda double: double.library.double_cores(64, 0), "cores", "0 of 64 logical cores", False),
        (lambda double: double.limits(size=SIZE - 1), "memory", "NRT_RESOURCE", True),
        (lambda double: double.attach(0, "0000:ca:00.0"), "efa", "libnrt attaches 0000:ca:00.0", False),
        (lambda double: double.attach(0, ""), "efa", "NRT_FAILURE", False),
        (lambda double: double.limits(exports=0), "memory", "each dma-buf takes one EFA device", True),
        (lambda double: double.force("nrt_get_version", 1), "runtime", "NRT_FAILURE", True),
        (lambda double: double.init(), "order", "initialised before it was", False),
        (lambda double: double.force("nrt_host_device_id_get", 13), "index", "NRT_UNINITIALIZED (13)", False),
    ],
)
def test_a_host_that_does_not(libnrt, nrt, trn2_host, monkeypatch, change, step, said, last) -> None:
    libnrt.attach(0, EFA)
    change(libnrt)
    found = answers(libnrt, nrt, trn2_host, monkeypatch)
    wrong = [one for one in found if not one.good]
    assert (wrong[0].step, said in wrong[0].text) == (step, True)
    assert (found[-1] == wrong[0]) is last


def test_a_host_whose_hbm_is_not_mapped(libnrt, nrt, trn2_host, monkeypatch) -> None:
    found = answers(libnrt, nrt, trn2_host, monkeypatch, NEURON_RT_MAP_HBM="0")
    assert (found[-1].step, found[-1].good) == ("memory", False)
    assert "not mapped" in found[-1].text


def test_a_device_that_is_not_known_is_no_agreement(libnrt, nrt, trn2_host, monkeypatch) -> None:
    libnrt.attach(0, EFA)
    found = answers(libnrt, nrt, trn2_host, monkeypatch, NEURON_RT_VISIBLE_CORES="0-63", KVXFER_NEURON_DEVICE="99")
    (efa,) = [one for one in found if one.step == "efa"]
    assert not efa.good
    assert "which Neuron device this is, is not known" in efa.text


def test_the_probe_as_a_program(built_libnrt) -> None:
    run = [sys.executable, "-m", "kvxfer_neuron"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "platforms")])
    done = subprocess.run(
        run, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, "KVXFER_LIBNRT": str(built_libnrt)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "ok       version" in done.stdout
    assert "problem  " in done.stdout, done.stdout
    done = subprocess.run(
        run,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "KVXFER_LIBNRT": "/none"},
    )
    assert (done.returncode, done.stdout.split()[:2]) == (2, ["problem", "libnrt"])

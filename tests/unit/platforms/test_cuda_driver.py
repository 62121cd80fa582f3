"""What the driver is asked, and what is said when it does not answer. A library of ours in C stands in for it."""

from __future__ import annotations

import pytest

from kvxfer.errors import PlatformError
from kvxfer_cuda.driver import OVERRIDE, pci_address
from tests.unit.platforms.cuda_doubles import COMPILER, compile_driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(autouse=True)
def driver(monkeypatch, libcuda) -> None:
    monkeypatch.setenv(OVERRIDE, str(libcuda))
    monkeypatch.setenv("FAKE_GPUS", "0000:59:00.0,0001:5A:1f.7")


@pytest.mark.parametrize(("device", "address"), [(0, "0000:59:00.0"), (1, "0001:5a:1f.7")])
def test_addresses_are_written_as_sysfs_has_them(device, address) -> None:
    assert pci_address(device) == address


@pytest.mark.parametrize(
    ("answer", "address"),
    [("59:00.0", "0000:59:00.0"), ("00000000:5A:00.0", "0000:5a:00.0"), ("10000:1:2.3", "10000:01:02.3")],
)
def test_domains_of_any_width_are_read(monkeypatch, answer, address) -> None:
    monkeypatch.setenv("FAKE_GPUS", answer)
    assert pci_address(0) == address


@pytest.mark.parametrize("answer", ["GPU-0", "0000:59:00", "0000:59:00.0x"])
def test_what_is_no_address_is_refused(monkeypatch, answer) -> None:
    monkeypatch.setenv("FAKE_GPUS", answer)
    with pytest.raises(PlatformError, match=f"device 0 the PCI address b'{answer}', which is none"):
        pci_address(0)


def test_a_device_that_this_process_does_not_see() -> None:
    with pytest.raises(
        PlatformError, match=r"cuDeviceGet of .*libcuda_double.so failed with CUDA_ERROR_INVALID_DEVICE \(101\)"
    ):
        pci_address(2)


def test_an_error_that_the_driver_does_not_name(monkeypatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_ERROR", "999")
    with pytest.raises(PlatformError, match=r"cuInit of .* failed with error 999"):
        pci_address(0)


@pytest.mark.parametrize(
    ("code", "visible", "cure"),
    [
        ("100", "-1", r"\(CUDA_VISIBLE_DEVICES=-1\): no GPU is visible: .*let CUDA_VISIBLE_DEVICES name"),
        ("100", "", r"\(CUDA_VISIBLE_DEVICES=\): no GPU is visible"),
        ("100", None, r"error 100: no GPU is visible: give the container GPUs"),
        ("802", None, "start nvidia-fabricmanager"),
        ("803", None, "two versions: reboot"),
        ("804", None, "cuda-compat"),
        ("999", "GPU-5f2b,GPU-5f2b", r"\(CUDA_VISIBLE_DEVICES=GPU-5f2b,GPU-5f2b\): nvidia-smi and dmesg"),
    ],
)
def test_each_error_of_the_driver_has_its_cure(monkeypatch, code, visible, cure) -> None:
    monkeypatch.setenv("FAKE_CUDA_ERROR", code)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(PlatformError, match=cure):
        pci_address(0)


@pytest.mark.parametrize("visible", ["0,0", "MIG-1/2/3,MIG-1/2/3", "GPU-unknown", "0,-1,1"])
def test_a_list_of_which_the_driver_shows_less_than_it_has_is_named(monkeypatch, visible) -> None:
    """A doubled or unknown entry ends CUDA's own reading of the list."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("FAKE_GPUS", "0000:59:00.0")
    with pytest.raises(
        PlatformError, match=r"INVALID_DEVICE \(101\) \(CUDA_VISIBLE_DEVICES=.*fewer GPUs.*each GPU once"
    ):
        pci_address(1)


def test_no_driver(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "libcuda.so.1"))
    with pytest.raises(PlatformError, match=r"driver library cannot be loaded.*--gpus.*KVXFER_LIBCUDA"):
        pci_address(0)


def test_a_library_that_is_no_driver(monkeypatch) -> None:
    """A stub of the toolkit's, or kvxfer's own for NIXL's plugin, has no such functions."""
    monkeypatch.setenv(OVERRIDE, "libc.so.6")
    with pytest.raises(PlatformError, match=r"libc.so.6 has no cuInit: it is no driver library.*KVXFER_LIBCUDA"):
        pci_address(0)

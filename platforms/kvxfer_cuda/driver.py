"""What NVIDIA's driver says of a device, by its C interface.

The driver numbers devices as this process sees them: what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER have hidden or reordered
comes out right without being looked at, and so do MIG instances, which have their GPU's address. Nothing else could tell.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from typing import TYPE_CHECKING, Final

from kvxfer.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARY: Final = "libcuda.so.1"
OVERRIDE: Final = "KVXFER_LIBCUDA"
_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)
_ROOM = 32
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

_CURES: Final = {
    100: f"no GPU is visible: give the container GPUs, and let {_VISIBLE} name some of them, or unset it",
    101: f"this process sees fewer GPUs than that: let {_VISIBLE} name each GPU once, by its index or UUID, or unset it",
    802: "start nvidia-fabricmanager, and wait until it is up",
    803: "libcuda and the kernel module are of two versions: reboot, or give the container the host's libcuda",
    804: "take CUDA's forward compatibility libraries (cuda-compat) off LD_LIBRARY_PATH, or update the driver",
}
"""What to do about CUresult's codes (cuda.h): NO_DEVICE, INVALID_DEVICE, SYSTEM_NOT_READY, SYSTEM_DRIVER_MISMATCH,
COMPAT_NOT_SUPPORTED_ON_DEVICE."""
_ELSE: Final = "nvidia-smi and dmesg on the host say more"


def pci_address(device: int) -> str:
    """Return the PCI address (``dddd:bb:dd.f``) of a device of this process. Raises PlatformError with the driver's reason."""
    driver, name = _load()
    handle, text = ctypes.c_int(), ctypes.create_string_buffer(_ROOM)
    _call(driver, name, "cuInit", ctypes.c_uint(0))
    _call(driver, name, "cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _call(driver, name, "cuDeviceGetPCIBusId", text, ctypes.c_int(_ROOM), handle)
    found = _ADDRESS.fullmatch(text.value.decode(errors="replace"))
    if found is None:
        raise PlatformError(f"{name} gives device {device} the PCI address {text.value!r}, which is none: {_ELSE}")
    domain, bus, slot, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"


class Driver:
    """The driver, for as long as it is used: what it refuses raises PlatformError."""

    def __init__(self) -> None:
        self._library, self._name = _load()
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, function: str, *arguments: object) -> None:
        """Call a function."""
        _call(self._library, self._name, function, *arguments)

    def function(self, name: str) -> Callable[..., None]:
        """Return a function that is called many times."""
        return lambda *arguments: self.call(name, *arguments)

    def primary_context(self, device: int) -> ctypes.c_void_p:
        """Return the context that CUDA's runtime, and so torch, has on a device of this process."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        return context

    def free_host(self, address: int) -> None:
        """Give pinned memory back; a driver that is on its way out may refuse."""
        with contextlib.suppress(PlatformError):
            self.call("cuMemFreeHost", ctypes.c_void_p(address))


def _load() -> tuple[ctypes.CDLL, str]:
    name = os.environ.get(OVERRIDE) or LIBRARY
    try:
        return ctypes.CDLL(name), name
    except OSError as error:
        raise PlatformError(
            f"NVIDIA's driver library cannot be loaded, though there is memory of a GPU: {error}; give the container the host's "
            f"(--gpus, NVIDIA's container toolkit), or name its file in {OVERRIDE}"
        ) from error


def _call(driver: ctypes.CDLL, library: str, function: str, *arguments: object) -> None:
    try:
        call = getattr(driver, function)
    except AttributeError as error:
        raise PlatformError(
            f"{library} has no {function}: it is no driver library of NVIDIA's; put the driver's own first in "
            f"LD_LIBRARY_PATH, or name its file in {OVERRIDE}"
        ) from error
    call.restype = ctypes.c_int
    code = call(*arguments)
    if code:
        said = os.environ.get(_VISIBLE)
        seen = "" if said is None else f" ({_VISIBLE}={said})"
        raise PlatformError(
            f"{function} of {library} failed with {_name(driver, code)}{seen}: {_CURES.get(code, _ELSE)}"
        )


def _name(driver: ctypes.CDLL, code: int) -> str:
    """Return the driver's name for an error, and its number."""
    text = ctypes.c_char_p()
    name = getattr(driver, "cuGetErrorName", None)
    if name is not None and name(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value:
        return f"{text.value.decode(errors='replace')} ({code})"
    return f"error {code}"

"""What NVIDIA's driver says of a device, by its C interface.

The driver numbers devices as this process sees them: what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER have hidden or reordered
comes out right without being looked at, and so do MIG instances, which have their GPU's address. Nothing else could tell.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Final

from kvxfer.errors import PlatformError

LIBRARY: Final = "libcuda.so.1"
OVERRIDE: Final = "KVXFER_LIBCUDA"
_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)
_ROOM = 32


def pci_address(device: int) -> str:
    """Return the PCI address (``dddd:bb:dd.f``) of a device of this process. Raises PlatformError with the driver's reason."""
    name = os.environ.get(OVERRIDE) or LIBRARY
    try:
        driver = ctypes.CDLL(name)
    except OSError as error:
        raise PlatformError(
            f"NVIDIA's driver library cannot be loaded, though there is memory of a GPU: {error}"
        ) from error
    handle, text = ctypes.c_int(), ctypes.create_string_buffer(_ROOM)
    _call(driver, name, "cuInit", ctypes.c_uint(0))
    _call(driver, name, "cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _call(driver, name, "cuDeviceGetPCIBusId", text, ctypes.c_int(_ROOM), handle)
    found = _ADDRESS.fullmatch(text.value.decode(errors="replace"))
    if found is None:
        raise PlatformError(f"{name} gives device {device} the PCI address {text.value!r}, which is none")
    domain, bus, slot, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"


def _call(driver: ctypes.CDLL, library: str, function: str, *arguments: object) -> None:
    try:
        call = getattr(driver, function)
    except AttributeError as error:
        raise PlatformError(f"{library} has no {function}: it is no driver library of NVIDIA's") from error
    call.restype = ctypes.c_int
    code = call(*arguments)
    if code:
        raise PlatformError(f"{function} of {library} failed with {_name(driver, code)}")


def _name(driver: ctypes.CDLL, code: int) -> str:
    """Return the driver's name for an error, and its number."""
    text = ctypes.c_char_p()
    name = getattr(driver, "cuGetErrorName", None)
    if name is not None and name(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value:
        return f"{text.value.decode()} ({code})"
    return f"error {code}"

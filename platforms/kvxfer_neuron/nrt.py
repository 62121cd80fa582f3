"""libnrt, bound by its public ABI: which EFA device is attached to an address, which host device an index means, how many cores.

The library is loaded by the name under which NIXL and libfabric look for it, libnrt.so.1. Where the dynamic loader does not find
it by name it is loaded from its directory, which cures theirs as well: a library that is loaded is found by its soname.

Every failure is a PlatformError that names the function, the code, and what to change. Signatures: aws-neuron-sdk,
src/libnrt/include/nrt/nrt.h and nrt_version.h, as of SDK 2.32. None of this has run against a real libnrt (docs/neuron.md).
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import PlatformError
from kvxfer.rails.pci import Address
from kvxfer_neuron.status import Status, cure, named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SONAME: Final = "libnrt.so.1"
DIRECTORY: Final = "/opt/aws/neuron/lib"
VARIABLE: Final = "KVXFER_LIBNRT"
"""The file to load instead."""

NIXL_ROOM: Final = len("0000:00:00.0") + 1
"""Bytes that NIXL offers for an EFA device's address; it does not ask again (nixl 1.4.1, libfabric_backend.cpp, nrtQueryAddr)."""
logger = logging.getLogger("kvxfer.neuron")

_ROOMS: Final = (64, 256, 4096)
_UNALIGNED: Final = 4095

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "nrt_init": (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p),
    "nrt_get_version": (ctypes.c_void_p, ctypes.c_size_t),
    "nrt_get_total_vnc_count": (ctypes.POINTER(ctypes.c_uint32),),
    "nrt_get_visible_vnc_count": (ctypes.POINTER(ctypes.c_uint32),),
    "nrt_host_device_id_get": (ctypes.c_int, ctypes.POINTER(ctypes.c_uint32)),
    "nrt_get_vnc_memory_stats": (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)),
    "nrt_get_attached_efa_bdf": (ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)),
    "nrt_get_dmabuf_fd": (ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)),
    "nrt_tensor_allocate": (
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
    ),
}
"""Those that return NRT_STATUS."""

_SINCE: Final = {"nrt_get_attached_efa_bdf": "libnrt 2.31.24 of Neuron SDK 2.29"}


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint64),
        ("minor", ctypes.c_uint64),
        ("patch", ctypes.c_uint64),
        ("maintenance", ctypes.c_uint64),
        ("detail", ctypes.c_char * 128),
        ("git_hash", ctypes.c_char * 64),
    )


class _MemoryStats(ctypes.Structure):
    _fields_ = (("used", ctypes.c_size_t), ("limit", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a logical core: bytes that are used, and that there are."""

    used: int
    limit: int


class Nrt:
    """One loaded libnrt. Thread-safe as far as libnrt is; nothing here keeps state."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._library = library

    # --- before the runtime is initialised ---------------------------------------------------------------------------

    def version(self) -> str:
        """Return the library's version: 2.34.10.0."""
        version = _Version()
        self._call("nrt_get_version", "", ctypes.byref(version), ctypes.sizeof(version))
        return f"{version.major}.{version.minor}.{version.patch}.{version.maintenance}"

    def cores(self) -> tuple[int, int]:
        """Count the logical cores of the machine, and those that this process is shown."""
        total, visible = ctypes.c_uint32(), ctypes.c_uint32()
        self._call("nrt_get_total_vnc_count", "", ctypes.byref(total))
        self._call("nrt_get_visible_vnc_count", "", ctypes.byref(visible))
        return total.value, visible.value

    def host_device(self, device: int) -> int:
        """Turn a device's index as the runtime counts them here, in a container its own, into the host's."""
        host = ctypes.c_uint32()
        self._call("nrt_host_device_id_get", f"Neuron device {device}", device, ctypes.byref(host))
        return host.value

    def initialised(self) -> bool:
        """Tell whether the runtime runs in this process. Asking does not start it.

        Before nrt_init a call that needs it returns NRT_FAILURE by the SDK's text, NRT_UNINITIALIZED by nrt_status.h.
        """
        function = self._function("nrt_get_vnc_memory_stats")
        stats, size = _MemoryStats(), ctypes.c_size_t()
        status = function(0, ctypes.byref(stats), ctypes.sizeof(stats), ctypes.byref(size))
        return status not in (Status.FAILURE, Status.UNINITIALIZED, Status.CLOSED)

    # --- after -------------------------------------------------------------------------------------------------------

    def memory(self, core: int = 0) -> Memory:
        """Say how much of a logical core's memory is used."""
        stats, size = _MemoryStats(), ctypes.c_size_t()
        self._call(
            "nrt_get_vnc_memory_stats",
            f"core {core}",
            core,
            ctypes.byref(stats),
            ctypes.sizeof(stats),
            ctypes.byref(size),
        )
        return Memory(stats.used, stats.limit)

    def attached_efa(self, address: int) -> Address:
        """Return the PCI address of the EFA device attached to the Neuron device that holds an address.

        That is the device which NIXL registers the memory on; where this fails NIXL takes every rail and only logs it.
        """
        where = f"memory at {address:#x}"
        if not address:
            raise PlatformError(f"nrt_get_attached_efa_bdf: {where} is no device memory: {UNMAPPED}")
        function = self._function("nrt_get_attached_efa_bdf")
        status = int(Status.RESOURCE)
        for room in (NIXL_ROOM, *_ROOMS):
            text, length = ctypes.create_string_buffer(room), ctypes.c_size_t(room)
            status = function(address, text, ctypes.byref(length))
            if status != Status.RESOURCE:
                break
            if room == NIXL_ROOM:
                logger.warning(
                    "libnrt's address of an EFA device takes more than the %d bytes that NIXL has for it: NIXL takes every rail "
                    "for this memory, and only logs it. Set FI_EFA_IFACE to the device's own EFA device (kvxfer rails shows it)",
                    NIXL_ROOM,
                )
        if status == Status.RESOURCE:
            raise PlatformError(
                f"nrt_get_attached_efa_bdf of {where}: {named(status)} even for {_ROOMS[-1]} bytes of text: libnrt "
                f"{self.path} is not one that this kvxfer knows"
            )
        if status in (Status.FAILURE, Status.INVALID, Status.INVALID_HANDLE):
            raise PlatformError(
                f"nrt_get_attached_efa_bdf of {where}: {named(status)}: no EFA device is attached to its Neuron device, or it is "
                "no memory on one. Attach the instance's EFA devices (trn2.3xlarge has none that is attached to the device), "
                "give the container /dev/infiniband/uverbs*, or name the device in KVXFER_NEURON_EFA"
            )
        self._want(status, "nrt_get_attached_efa_bdf", where)
        try:
            return Address.parse(text.value.decode(errors="replace"))
        except ValueError:
            raise PlatformError(
                f"nrt_get_attached_efa_bdf of {where} answered {text.value!r}: no PCI address. Name the EFA device in "
                "KVXFER_NEURON_EFA; NIXL, which asks the same, takes every rail unless FI_EFA_IFACE is set"
            ) from None

    def dmabuf(self, address: int, length: int) -> int:
        """Export memory as a dma-buf, as libfabric does to register it; returns its file descriptor, which the caller closes."""
        where = f"{length:,} bytes at {address:#x}"
        if not address:
            raise PlatformError(f"nrt_get_dmabuf_fd: {where} are no device memory: {UNMAPPED}")
        descriptor = ctypes.c_int(-1)
        status = self._function("nrt_get_dmabuf_fd")(address, length, ctypes.byref(descriptor))
        if status == Status.RESOURCE:
            raise PlatformError(
                f"nrt_get_dmabuf_fd of {where}: {named(status)}: each dma-buf takes one EFA device, and what is exported already "
                "may be all there is; libfabric gives up on the memory. Register fewer, larger regions, or end other exporters"
            )
        if status == Status.INVALID:
            unaligned = f"; {address:#x} is not on a page of 4 KiB, which has to be" if address & _UNALIGNED else ""
            raise PlatformError(
                f"nrt_get_dmabuf_fd of {where}: {named(status)}: it is no memory mapped for peers{unaligned}. Linux 5.15 or "
                "newer is needed; FI_HMEM_NEURON_USE_DMABUF=0 lets libfabric register it without a dma-buf"
            )
        self._want(status, "nrt_get_dmabuf_fd", where)
        return descriptor.value

    # --- a tensor of one's own, for checks of a host (``python -m kvxfer_neuron``) -----------------------------------

    def initialise(self) -> None:
        """Start the runtime without a framework. It takes every visible core for this process."""
        self._call("nrt_init", "", 1, b"", b"")

    def close(self) -> None:
        """End the runtime."""
        self._library.nrt_close()

    def allocate(self, size: int, core: int = 0) -> ctypes.c_void_p:
        """Allocate a tensor of ``size`` bytes in the HBM of a logical core; ``free`` gives it back."""
        tensor = ctypes.c_void_p()
        self._call("nrt_tensor_allocate", f"{size:,} bytes", 0, core, size, b"kvxfer", ctypes.byref(tensor))
        return tensor

    def free(self, tensor: ctypes.c_void_p) -> None:
        """Give a tensor back."""
        self._library.nrt_tensor_free(ctypes.byref(tensor))

    def tensor_address(self, tensor: ctypes.c_void_p) -> int:
        """Return a tensor's address. Raises PlatformError where HBM is not mapped."""
        function = self._library.nrt_tensor_get_va
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        address = function(tensor)
        if not address:
            raise PlatformError(f"nrt_tensor_get_va: the tensor has no address: {UNMAPPED}")
        return int(address)

    # ------------------------------------------------------------------------------------------------------------------

    def _function(self, name: str) -> Callable[..., int]:
        try:
            function: Any = getattr(self._library, name)
        except AttributeError:
            since = _SINCE.get(name, "a newer libnrt")
            raise PlatformError(
                f"{self.path} has no {name}, which came with {since}: install a newer aws-neuronx-runtime-lib"
            ) from None
        function.restype, function.argtypes = ctypes.c_int, _SIGNATURES[name]
        result: Callable[..., int] = function
        return result

    def _call(self, name: str, what: str, *arguments: Any) -> None:
        self._want(self._function(name)(*arguments), name, what)

    def _want(self, status: int, name: str, what: str) -> None:
        if status != Status.SUCCESS:
            of = f" of {what}" if what else ""
            raise PlatformError(f"{name}{of}: {named(status)}: {cure(status)}")


UNMAPPED: Final = (
    "HBM is not mapped into this process. Set NEURON_RT_MAP_HBM=1 before its first tensor on the device is made"
)


def load(environment: Mapping[str, str]) -> Nrt:
    """Load libnrt: $KVXFER_LIBNRT, else by name, else from AWS's directory. Raises PlatformError with what was tried."""
    named_file = environment.get(VARIABLE, "")
    tried = [named_file] if named_file else [SONAME, f"{DIRECTORY}/{SONAME}"]
    reasons = []
    for path in tried:
        try:
            return Nrt(ctypes.CDLL(path), path)
        except OSError as error:
            reasons.append(str(error))
    raise PlatformError(
        f"libnrt cannot be loaded ({'; '.join(reasons)}): install aws-neuronx-runtime-lib and export "
        f"LD_LIBRARY_PATH={DIRECTORY}:$LD_LIBRARY_PATH, by which NIXL and libfabric find it too, or set {VARIABLE}"
    )

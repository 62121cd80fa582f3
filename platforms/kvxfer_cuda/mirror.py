"""A mirror of device memory in pinned host memory, and the copies between the two, on a stream of their own.

The memory is pinned, so that the GPU copies by itself while this thread goes on, and it is the driver's and not torch's, whose
allocator of pinned memory rounds up to a power of two. One call a copy, whose rows are at equal distances
(``cuMemcpy2DAsync``): a run of blocks of all layers is one call in either layout, but where layers were allocated one by one: the
driver refuses a copy that reaches from one allocation into another (CUDA_ERROR_INVALID_VALUE), so its rows are copied one by one.
The stream is joined to no other; when what is to be copied has been computed, fences tell.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import PlatformError
from kvxfer_cuda import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.layout.mirror import Copies
    from kvxfer_cuda.events import EventFence, EventPool

_PORTABLE: Final = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context, NIXL's threads' as well
_ON_HOST, _ON_DEVICE = 1, 2  # CUmemorytype
_ALIGN: Final = 4096


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_kind", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_kind", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class PinnedMirror:
    """Mirrors (address, length) spans of a device. ``cuda`` is torch.cuda, asked for when it is needed."""

    def __init__(
        self, spans: Sequence[tuple[int, int]], device: int, events: EventPool, cuda: Callable[[], Any]
    ) -> None:
        self._events = events
        self._device = device
        self._cuda = cuda
        self._stream: Any = None
        self._driver = driver.Driver()
        self._context = self._driver.primary_context(device)
        sizes = [-(-length // _ALIGN) * _ALIGN for _, length in spans]
        self.size: int = sum(sizes)
        base = self._allocate()
        self._allocations = Allocations(self._driver, [start for start, _ in spans])
        # In the order of the device's addresses, so that layers at equal distances there are at equal distances here.
        places, at = {}, base
        for number in sorted(range(len(sizes)), key=lambda number: spans[number][0]):
            places[number] = at
            at += sizes[number]
        self.addresses: tuple[int, ...] = tuple(places[number] for number in range(len(sizes)))

    def copy(self, copies: Copies, *, inward: bool) -> EventFence:
        """Launch the copies. Raises PlatformError when the driver refuses one."""
        cuda = self._cuda()
        self._events.be_on(self._device)
        if self._stream is None:
            self._stream = cuda.Stream()
        with cuda.stream(self._stream):
            launch(self._driver, self._context, self._allocations, copies, self._stream.cuda_stream, inward=inward)
            return self._events.record()

    def _allocate(self) -> int:
        at = ctypes.c_void_p()
        try:
            self._driver.call("cuCtxSetCurrent", self._context)
            self._driver.call("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(self.size), ctypes.c_uint(_PORTABLE))
        except PlatformError as error:
            raise PlatformError(
                f"{self.size:,} bytes of pinned host memory, as much as the KV cache of device {self._device}, cannot be had for "
                "kv_buffer_device=cpu: lower --gpu-memory-utilization or set --num-gpu-blocks-override, give the container more "
                f"memory, or leave kv_buffer_device out where the fabric reaches the GPU ({error})"
            ) from error
        base = int(at.value or 0)
        weakref.finalize(self, self._driver.free_host, base).atexit = False  # the process's end frees it
        return base


class Allocations:
    """How far the driver's allocations reach that some addresses of a device are in. Its context must be current."""

    def __init__(self, library: driver.Driver, addresses: Sequence[int]) -> None:
        found = set()
        for address in addresses:
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            library.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
            found.add((base.value, base.value + size.value))
        self._starts = [start for start, _ in sorted(found)]
        self._ends = [end for _, end in sorted(found)]

    def hold(self, address: int, size: int) -> bool:
        """Tell whether one of them has all of a range."""
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address + size <= self._ends[at]


def launch(
    library: driver.Driver,
    context: ctypes.c_void_p,
    allocations: Allocations,
    copies: Copies,
    stream: int,
    *,
    inward: bool,
) -> None:
    """Put copies onto a stream."""
    library.call("cuCtxSetCurrent", context)
    on = ctypes.c_void_p(stream)
    one = library.function("cuMemcpyHtoDAsync_v2" if inward else "cuMemcpyDtoHAsync_v2")
    many = library.function("cuMemcpy2DAsync_v2")
    for device, host, width, height, device_pitch, host_pitch in copies.tolist():
        if height == 1 or not allocations.hold(device, (height - 1) * device_pitch + width):
            for row in range(height):
                here, there = device + row * device_pitch, host + row * host_pitch
                to, frm = (here, there) if inward else (there, here)
                one(ctypes.c_uint64(to), ctypes.c_uint64(frm), ctypes.c_size_t(width), on)
            continue
        rows = _Rows(width=width, height=height)
        rows.src_kind, rows.dst_kind = (_ON_HOST, _ON_DEVICE) if inward else (_ON_DEVICE, _ON_HOST)
        rows.src_pitch, rows.dst_pitch = (host_pitch, device_pitch) if inward else (device_pitch, host_pitch)
        if inward:
            rows.src_host, rows.dst_device = host, device
        else:
            rows.src_device, rows.dst_host = device, host
        many(ctypes.byref(rows), on)

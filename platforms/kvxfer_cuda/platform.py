"""What the CUDA platform answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.errors import PlatformError
from kvxfer.platform import Fence, Geometry, Platform, Presence
from kvxfer.rails.local import place
from kvxfer.rails.pci import Address
from kvxfer.rails.sysfs import read_sysfs
from kvxfer_cuda import driver, layouts
from kvxfer_cuda.events import EventPool
from kvxfer_cuda.mirror import PinnedMirror
from kvxfer_cuda.repack import OFFERS, DeviceMemory, repack

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvxfer.layout.maps import CacheMap
    from kvxfer.layout.repack import Call


def _torch_cuda() -> Any:
    import torch

    return torch.cuda


class StagingArea:
    """Device memory of torch's for blocks that wait to be re-packed."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.address: int = tensor.data_ptr()
        self.size: int = tensor.numel()


class CudaPlatform(Platform):
    """NVIDIA GPUs. ``root`` is where ``sys`` and ``dev`` are."""

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._events = EventPool(_torch_cuda)
        self._device: int | None = None
        self._memory = DeviceMemory(())
        self._repacking: Any = None

    def presence(self) -> Presence:
        """Look for the driver's device files: a container that is given no GPU has none."""
        files = sorted(path.name for path in (self._root / "dev").glob("nvidia[0-9]*"))
        if files:
            return Presence(here=True, why=f"/dev has {', '.join(files)}")
        return Presence(
            here=False, why="/dev has no nvidia0, nvidia1, …: no driver, or no GPU was given to this container"
        )

    def environment(self) -> Mapping[str, str]:
        """Keep libfabric's efa provider from shared memory, which crashes on device memory (libfabric #12328)."""
        efa = self._root / "sys/bus/pci/drivers/efa"
        return {"FI_EFA_ENABLE_SHM_TRANSFER": "0"} if efa.is_dir() and any(efa.glob("*:*")) else {}

    def describe(self, caches: Mapping[str, Any], geometry: Geometry) -> CacheMap:
        """Describe by shapes and strides; see ``kvxfer_cuda.layouts``."""
        cache = layouts.describe(caches, geometry)
        self._device = cache.device
        self._memory = DeviceMemory(tensor.untyped_storage() for tensor in caches.values())
        return cache

    offers: ClassVar[tuple[tuple[str, str], ...]] = OFFERS

    def staging(self, size: int, device: int) -> StagingArea:
        """Take device memory from torch. Raises PlatformError when there is not enough beside vLLM's cache."""
        import torch

        try:
            tensor = torch.empty(size, dtype=torch.uint8, device=self._on(device))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise PlatformError(
                f"{size:,} bytes of staging do not fit into device {device} beside the KV cache: lower staging_bytes or "
                f"--gpu-memory-utilization, or set staging_bytes=0 to do without re-packing ({error})"
            ) from error
        self._memory.add(tensor.untyped_storage())
        return StagingArea(tensor)

    def repack(self, call: Call) -> Fence:
        """Move the tokens on a stream of their own: nothing computes with these blocks before the fence has passed."""
        assert self._device is not None, "asked to re-pack before a cache was described"
        cuda = _torch_cuda()
        self._events.be_on(self._device)
        if self._repacking is None:
            self._repacking = cuda.Stream()
        with cuda.stream(self._repacking):
            repack(call, self._memory)
            return self._events.record()

    def mirror(self, spans: Sequence[tuple[int, int]], device: int) -> PinnedMirror:
        """Pin as much host memory as the spans have. Raises PlatformError when there is not enough."""
        return PinnedMirror(spans, device, self._events, _torch_cuda)

    def _on(self, device: int) -> str:
        return f"{self.device_type}:{device}"

    def pci_address(self, device: int) -> str | None:
        """Ask the driver, which knows what this process's device numbers mean."""
        return driver.pci_address(device)

    def local_rails(self, device: int) -> Sequence[str] | None:
        """Name the GPU's share of its switch's EFA devices; None where no EFA device is nearer to it than another."""
        machine = read_sysfs(self._root)
        if not machine.rails:
            return None
        address = Address.parse(driver.pci_address(device))
        found = next((one for one in place(machine) if one.node.address == address), None)
        return [rail.rail for rail in found.rails] if found is not None and found.rails else None

    def background_cpus(self) -> Collection[int] | None:
        """Name the CPUs of the described device's NUMA node, of those that this process may use.

        The engine core's are counted in, since a worker's own thread may be bound to fewer. None before a cache was
        described, or where the driver or the kernel does not tell.
        """
        if self._device is None:
            return None
        try:
            place_in_sysfs = self._root / "sys/bus/pci/devices" / driver.pci_address(self._device)
            near = _cpus((place_in_sysfs / "local_cpulist").read_text())
            allowed = os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
        except (OSError, ValueError, PlatformError):  # what the driver does not tell is said where rails are chosen
            return None
        return near & allowed or None

    def fence(self) -> Fence:
        """Record an event on the current stream; see ``kvxfer_cuda.events`` for what that covers."""
        return self._events.record()


def _cpus(text: str) -> set[int]:
    """Read the kernel's lists of CPUs: 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            found.update(range(int(first), int(last or first) + 1))
    return found

"""What the host platform answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.errors import ConfigError, PlatformError
from kvxfer.layout.blocks import CacheLayout, Region
from kvxfer.platform import Fence, Geometry, Platform, Presence
from kvxfer_host.stream import LateStream

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

FENCE_DELAY = "KVXFER_HOST_FENCE_DELAY"
"""Test mode: seconds by which the host's fences pass late (see stream.py)."""

_EFA_DRIVER = "/sys/bus/pci/drivers/efa"


class _Passed:
    """Host memory is coherent and vLLM's CPU kernels have returned when the hooks run: nothing to wait for."""

    __slots__ = ()

    def done(self) -> bool:
        return True


_PASSED = _Passed()


class HostPlatform(Platform):
    """Plain host memory under vLLM's CPU attention.

    ``fence_delay`` (seconds) turns on the test mode in which fences pass late; by default the environment decides.
    """

    name: ClassVar[str] = "host"
    device_type: ClassVar[str] = "cpu"

    def __init__(self, fence_delay: float | None = None) -> None:
        delay = _delay_from_environment() if fence_delay is None else fence_delay
        self.stream = LateStream(delay) if delay > 0 else None

    def presence(self) -> Presence:
        """Every machine has host memory."""
        return Presence(here=True, why="host memory is always there")

    def environment(self) -> Mapping[str, str]:
        """Without an EFA device, keep libfabric to its tcp provider: probing the others costs seconds and log lines."""
        return {} if Path(_EFA_DRIVER).is_dir() and any(Path(_EFA_DRIVER).glob("*:*")) else {"FI_PROVIDER": "tcp"}

    def describe(self, caches: Mapping[str, Any], geometry: Geometry) -> CacheLayout:
        """Describe [blocks, heads, tokens, content] tensors, one region a layer; block interiors are opaque.

        Inside a block, vLLM's CPU kernels lay K and V out by instruction set, not by the tensor's strides: K is transposed
        (vLLM 0.29 v1/attention/backends/cpu_attn.py ``_get_attn_isa``, csrc/cpu; run on 0.29 and 0.32). Hence the tag.
        """
        regions: list[Region] = []
        spans: dict[int, tuple[int, int, int]] = {}
        dtypes = {str(cache.dtype).removeprefix("torch.") for cache in caches.values()}
        if len(dtypes) != 1:
            raise PlatformError(f"the cache's layers have the element types {sorted(dtypes)}; this platform knows one")
        for name, cache in caches.items():
            item = cache.element_size()
            if cache.dim() < 2 or cache.shape[0] != geometry.num_blocks or not cache[0].is_contiguous():  # noqa: PLR2004
                raise PlatformError(
                    f"layer {name}: a cache of shape {tuple(cache.shape)} and strides {tuple(cache.stride())} is not "
                    f"{geometry.num_blocks} blocks, each one run of memory; unset VLLM_KV_CACHE_LAYOUT"
                )
            block_bytes = cache[0].numel() * item
            regions.append(Region(name, cache.data_ptr(), cache.stride(0) * item, block_bytes, 0))
            storage = cache.untyped_storage()
            spans[storage.data_ptr()] = (storage.data_ptr(), storage.nbytes(), 0)
        return CacheLayout(
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks,
            dtype=dtypes.pop(),
            layers=len(regions),
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            interior=_interior(next(iter(caches.values())).dtype, geometry),
            memory="DRAM",
            regions=tuple(regions),
            spans=tuple(spans.values()),
        )

    def pci_address(self, device: int) -> str | None:
        """Host memory is behind no PCI function."""
        del device
        return None

    def local_rails(self, device: int) -> Sequence[str] | None:
        """No rail is nearer to host memory than another, as far as this platform knows."""
        del device
        return None

    def background_cpus(self) -> Collection[int] | None:
        """Those of the engine core's process: vLLM pins a CPU worker's main thread to the first of its OpenMP cores.

        It leaves cores free for a connector's threads (vLLM 0.29 utils/ompmultiprocessing.py:52), but only who leaves the
        pinned core can use them. Two pairs' workers that share a core starve each other for seconds (seen on Linux 6.18: a
        thread that spins with sched_yield, as vLLM's worker does while it waits, gives up its share far in advance).
        """
        try:
            return os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
        except OSError:
            return None

    def fence(self) -> Fence:
        """Passed at once; in the test mode, late."""
        return _PASSED if self.stream is None else self.stream.fence()


def _delay_from_environment() -> float:
    text = os.environ.get(FENCE_DELAY, "0")
    try:
        delay = float(text)
    except ValueError:
        delay = -1.0
    if not 0.0 <= delay <= 60.0:  # noqa: PLR2004
        raise ConfigError(f"{FENCE_DELAY}={text!r} must be a number of seconds from 0 to 60")
    return delay


def _interior(dtype: object, geometry: Geometry) -> str:
    """Name how the attention kernels lay out a block's inside; whatever is not known becomes part of the name."""
    backends = "+".join(geometry.attention_backends) or "no-attention"
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # nothing public tells it
    except ImportError:
        return f"host:{backends}"
    isa = _get_attn_isa(dtype, geometry.block_size, geometry.head_dim)
    return f"host:{backends}:{isa}"

"""What the host platform answers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvxfer.errors import ConfigError, LayoutMismatchError, PlatformError
from kvxfer.layout.describe import Heads, Tensor, opaque
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.platform import Fence, Geometry, LayerGroup, Platform, Presence
from kvxfer_host.mirror import HostMirror
from kvxfer_host.repack import OFFERS, repack, vec
from kvxfer_host.stream import LateStream

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvxfer.layout.repack import Call

FENCE_DELAY = "KVXFER_HOST_FENCE_DELAY"
"""Test mode: seconds by which the host's fences pass late (see stream.py)."""

COPY_DELAY = "KVXFER_HOST_COPY_DELAY"
"""Test mode: the cache is taken for a device's, which the fabric does not reach, and copies pass this many seconds late."""

_BYTES = frozenset({"uint8", "int8", "float8_e4m3fn", "float8_e5m2"})
_SAME = {"fp8": "fp8_e4m3"}

_EFA_DRIVER = "/sys/bus/pci/drivers/efa"


class _Passed:
    """Host memory is coherent and vLLM's CPU kernels have returned when the hooks run: nothing to wait for."""

    __slots__ = ()

    def done(self) -> bool:
        return True


_PASSED = _Passed()


class HostMemory:
    """Bytes that begin at ``address``, for as long as this is referred to."""

    def __init__(self, size: int) -> None:
        self._bytes = np.empty(size, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.size = size


class HostPlatform(Platform):
    """Plain host memory under vLLM's CPU attention.

    ``fence_delay`` (seconds) turns on the test mode in which fences pass late, ``copy_delay`` the one in which the cache is moved
    through a mirror as a device's is; by default the environment decides.
    """

    name: ClassVar[str] = "host"
    device_type: ClassVar[str] = "cpu"

    def __init__(self, fence_delay: float | None = None, copy_delay: float | None = None) -> None:
        delay = _delay_from_environment(FENCE_DELAY) if fence_delay is None else fence_delay
        self.stream = LateStream(delay) if delay else None
        self.copy_delay = _delay_from_environment(COPY_DELAY) if copy_delay is None else copy_delay

    def presence(self) -> Presence:
        """Every machine has host memory."""
        return Presence(here=True, why="host memory is always there")

    def environment(self) -> Mapping[str, str]:
        """Without an EFA device, keep libfabric to its tcp provider: probing the others costs seconds and log lines."""
        return {} if Path(_EFA_DRIVER).is_dir() and any(Path(_EFA_DRIVER).glob("*:*")) else {"FI_PROVIDER": "tcp"}

    def describe(self, caches: Mapping[str, Any], geometry: Geometry) -> CacheMap:
        """Describe vLLM's CPU caches, [blocks, heads, tokens, K + V], by what its kernels write into them.

        Inside a block they lay K and V out by instruction set, not by the tensor's strides (vLLM 0.29
        v1/attention/backends/cpu_attn.py ``_get_attn_isa``, csrc/cpu; run on 0.29 and 0.32): "vec" transposes K, which
        strides can say; the others pack tokens into tiles, so that whole blocks move between equal kernels.
        """
        groups = tuple(self._describe_group(group, caches, geometry) for group in geometry.groups)
        spans = {}
        for cache in caches.values():
            storage = cache.untyped_storage()
            spans[storage.data_ptr()] = storage.nbytes()
        return CacheMap(groups, tuple(spans.items()), "DRAM")

    def _describe_group(self, group: LayerGroup, caches: Mapping[str, Any], geometry: Geometry) -> Group:
        tensors = [_tensor(name, index, caches[name], geometry) for name, index in group.layers]
        dtypes = {caches[name].dtype for name, _ in group.layers}
        if len(dtypes) != 1:
            raise PlatformError(
                f"the cache's layers have the element types {sorted(map(str, dtypes))}; this platform knows one"
            )
        odd = next((n for n, tensor in enumerate(tensors) if tensor[2:] != tensors[0][2:]), None)
        if odd is not None:  # a draft model's, say, which has a number of heads of its own
            raise PlatformError(
                f"layers {group.layers[0][0]} and {group.layers[odd][0]} share a block table and have caches of shape "
                f"{tensors[0].shape} and {tensors[odd].shape}; this platform knows one: take a draft model with KV "
                "heads as many and as large as the model's, or serve without --speculative-config"
            )
        (dtype,) = dtypes
        text, item = _element(dtype, geometry), caches[group.layers[0][0]].element_size()
        interior = _interior(dtype, group, geometry)
        planes: tuple[Plane, ...]
        shape = tensors[0].shape
        try:
            if shape[1:] == (len(group.heads), group.block_size, 2 * group.head_size):
                heads = Heads(group.heads, group.total_heads)
                if interior.endswith(":vec"):
                    planes = vec(tensors, group.block_size, group.head_size, dtype=text, item=item, heads=heads)
                else:
                    planes = opaque(tensors, "BHNC", name="kv", dtype=text, interior=interior, item=item, heads=heads)
            else:
                flat = [_flattened(tensor, item) for tensor in tensors]
                alone = Heads((0,), 1)  # whatever it is, it is this rank's whole block
                tag = f"{interior}:{len(group.heads)}of{group.total_heads}x{group.head_size}"
                planes = opaque(flat, "BC", name="block", dtype=text, interior=tag, item=item, heads=alone)
        except LayoutMismatchError as error:
            raise PlatformError(f"layers {group.layers[0][0]} to {group.layers[-1][0]}: {error}") from None
        return Group(group.block_size, geometry.num_blocks, planes, group.window)

    offers: ClassVar[tuple[tuple[str, str], ...]] = OFFERS
    stages_unasked: ClassVar[bool] = True

    def staging(self, size: int, device: int) -> HostMemory:
        """Host memory, which takes no room before it is written to."""
        del device
        return HostMemory(size)

    def repack(self, call: Call) -> Fence:
        """Move the tokens at once."""
        repack(call)
        return _PASSED

    def mirror(self, spans: Sequence[tuple[int, int]], device: int) -> HostMirror | None:
        """Host memory is where it is to be: there is nothing to do, but in the test mode."""
        del device
        return None if self.copy_delay is None else HostMirror(spans, LateStream(self.copy_delay))

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


def _delay_from_environment(name: str) -> float | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        delay = float(text)
    except ValueError:
        delay = -1.0
    if not 0.0 <= delay <= 60.0:  # noqa: PLR2004
        raise ConfigError(f"{name}={text!r} must be a number of seconds from 0 to 60")
    return delay


def _tensor(name: str, index: int, cache: Any, geometry: Geometry) -> Tensor:
    item = cache.element_size()
    shape, strides = tuple(cache.shape), tuple(step * item for step in cache.stride())
    if len(shape) < 2 or shape[0] != geometry.num_blocks or not cache[0].is_contiguous():  # noqa: PLR2004
        raise PlatformError(
            f"layer {name}: a cache of shape {shape} and strides {tuple(cache.stride())} is not "
            f"{geometry.num_blocks} blocks, each one run of memory; unset VLLM_KV_CACHE_LAYOUT"
        )
    return Tensor(index, cache.data_ptr(), shape, strides)


def _flattened(tensor: Tensor, item: int) -> Tensor:
    """View blocks whose inside has other axes as runs of elements."""
    size = math.prod(tensor.shape[1:])
    return tensor._replace(shape=(tensor.shape[0], size), strides=(tensor.strides[0], item))


def _element(dtype: object, geometry: Geometry) -> str:
    """Name what an element is: vLLM keeps fp8 of either kind as plain bytes, and one must not be taken for the other."""
    text = str(dtype).removeprefix("torch.")
    name = geometry.cache_dtype
    return text if text not in _BYTES or name == "auto" else _SAME.get(name, name)


def _interior(dtype: object, group: LayerGroup, geometry: Geometry) -> str:
    """Name how the attention kernels lay out a block's inside; whatever is not known becomes part of the name.

    The instruction set is chosen by what the model computes in, which is not what an fp8 cache keeps (vLLM 0.29 and 0.32).
    """
    backends = "+".join(geometry.attention_backends) or "no-attention"
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # nothing public tells it
    except ImportError:
        return f"host:{backends}"
    import torch

    computed = getattr(torch, geometry.model_dtype, dtype) if geometry.model_dtype else dtype
    return f"host:{backends}:{_get_attn_isa(computed, group.block_size, group.head_size)}"

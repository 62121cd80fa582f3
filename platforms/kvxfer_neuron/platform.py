"""What the Neuron platform answers."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvxfer.errors import ConfigError, PlatformError
from kvxfer.platform import Fence, Geometry, Platform, Presence
from kvxfer.rails.sysfs import run_neuron_ls
from kvxfer_neuron import fences, layouts, nrt, order
from kvxfer_neuron.devices import EFA, Devices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvxfer.layout.maps import CacheMap
    from kvxfer.rails.pci import Node

PACKED: Final = "KVXFER_NEURON_FP8_PACKED"
_PAGE: Final = 4096

logger = logging.getLogger("kvxfer.neuron")

_early: list[tuple[int, int]] = []
"""The version of a libfabric that was loaded in this process before the Neuron runtime was initialised."""


class NeuronPlatform(Platform):
    """HBM of Trainium, in a process that has one or more logical NeuronCores.

    The arguments are for tests: where sys, dev and proc are, the environment, and what ``neuron-ls -j`` prints.
    """

    name: ClassVar[str] = "neuron"
    device_type: ClassVar[str] = "neuron"

    def __init__(
        self,
        root: Path = Path("/"),
        environment: Mapping[str, str] | None = None,
        neuron_ls: Callable[[], str] = run_neuron_ls,
    ) -> None:
        self._root = root
        self._environment = os.environ if environment is None else environment
        self._devices = Devices(root, self._environment, neuron_ls, lambda: self._nrt)
        self._fences: fences.Fences | None = None
        self._address = 0

    @cached_property
    def _nrt(self) -> nrt.Nrt:
        return nrt.load(self._environment)

    def presence(self) -> Presence:
        """Look for the driver's device files; a placeholder package imports everywhere, and says nothing."""
        files = self._devices.files
        if files:
            numbers = sorted(files)
            return Presence(
                here=True, why=f"{len(files)} Neuron devices: /dev/neuron{numbers[0]} to /dev/neuron{numbers[-1]}"
            )
        if (self._root / "sys/module/neuron").is_dir():
            why = "the neuron driver is loaded, and there is no /dev/neuron*: give the container its devices"
            return Presence(here=False, why=why)
        return Presence(here=False, why="there is no /dev/neuron*, and the neuron driver is not loaded")

    def environment(self) -> Mapping[str, str]:
        """What ``order`` wants; and remember whether libfabric was here before the runtime, while that can be seen."""
        if not self._started():
            version = order.libfabric_of_process(self._root / "proc")
            if version is not None:
                _early[:] = [version]
        return order.wanted(self._environment)

    def describe(self, caches: Mapping[str, Any], geometry: Geometry) -> CacheMap:
        """Describe vllm-neuron's caches, and NxDI's as ``nxdi`` names them; see ``layouts``.

        Also the moment to check what had to be set before, and to ask libnrt about the memory itself.
        """
        order.verify(self._environment, initialised=self._nrt.initialised(), early=_early[0] if _early else None)
        try:
            described = layouts.describe(caches, geometry, packed=_flag(self._environment, PACKED))
        except PlatformError as error:
            if nrt.UNMAPPED in str(error):
                raise PlatformError(f"{error} ({order.unmapped(self._environment)})") from None
            raise
        unaligned = [address for address, _ in described.spans if address % _PAGE]
        if unaligned:
            logger.warning(
                "%d of the cache's %d regions do not begin on a page of 4 KiB (the first at %#x), and nrt_get_dmabuf_fd tells no "
                "offset: a libfabric without nrt_get_dmabuf_fd_v2 cannot export those. If registering fails, set "
                "FI_HMEM_NEURON_USE_DMABUF=0",
                len(unaligned), len(described.spans), unaligned[0],
            )  # fmt: skip
        self._address = described.spans[0][0]
        tensors = [tensor for cache in caches.values() for tensor in layouts.tensors_of(cache)]
        self._fences = fences.choose(self._environment, tensors)
        return described

    def mirror(self, spans: Sequence[tuple[int, int]], device: int) -> None:
        """Nothing is moved through host memory here: EFA reaches a Neuron device's, and vllm-neuron may say ``cpu`` unasked."""
        del spans, device
        logger.warning(
            "kv_buffer_device=cpu is without effect on Neuron: KV moves between the devices' own memory, over EFA"
        )

    def pci_address(self, device: int) -> str | None:
        """Return the Neuron device's address; see ``devices`` for how it is found, and what to set where it is not."""
        return str(self._devices.placement(device).node.where)

    def local_rails(self, device: int) -> Sequence[str] | None:
        """Name the EFA device of a Neuron device.

        KVXFER_NEURON_EFA decides; else libnrt, once there is memory to ask it about, since NIXL asks it as well; else AWS's map,
        where the PCI tree agrees with it. Raises PlatformError where none of them knows one: NIXL would take every rail, and only
        log it.
        """
        chosen = self._devices.efas()
        if chosen:
            return tuple(node.rail for node in chosen)
        if not self._devices.machine.rails:
            raise PlatformError(
                "no EFA device can be opened here: NIXL falls back to tcp, which moves no device memory. Launch the instance "
                "with its EFA interfaces, and give the container /dev/infiniband/uverbs*"
            )
        placed: tuple[Node, ...] = ()
        try:
            placement = self._devices.placement(device)
            placed, why = placement.rails, placement.why
        except (ConfigError, PlatformError) as error:
            why = str(error)
        asked = self._asked()
        if isinstance(asked, PlatformError):
            if placed:
                logger.warning("libnrt does not say which EFA device is attached: %s. Taken by the map: %s", asked, why)
                return tuple(node.rail for node in placed)
            raise PlatformError(f"device {device} has no EFA device that is known: {why}; {asked}") from asked
        if asked is not None:
            if placed and asked not in placed:
                logger.warning(
                    "libnrt attaches EFA device %s (%s) to this cache, AWS's map has %s: libnrt is followed, as NIXL does",
                    asked.rail, asked.where, ", ".join(f"{node.rail} ({node.where})" for node in placed),
                )  # fmt: skip
            return (asked.rail,)
        if not placed:
            raise PlatformError(f"device {device} has no EFA device that is known: {why}; set {EFA}")
        return tuple(node.rail for node in placed)

    def background_cpus(self) -> Collection[int] | None:
        """Those of the NUMA node of the device's EFA device, where vllm-neuron keeps its own threads as well.

        None where the host does not tell, or this process's device is not known: to run elsewhere is only slower.
        """
        try:
            rails = self.local_rails(0) or ()
        except (ConfigError, PlatformError):
            return None
        for name in rails:
            node = self._devices.machine.rail_named(name)
            cpus = None if node is None else self._devices.cpus_near(node)
            if cpus:
                return cpus
        return None

    def fence(self) -> Fence:
        """Record a fence as ``fences`` has it: an event where torch has events, else a read of the cache in a thread.

        Costs microseconds, never waits, and does not pass early as far as is known; what is not known is told in ``fences``.
        Before any cache was described there is nothing that it could be behind.
        """
        return fences.PASSED if self._fences is None else self._fences.fence()

    # ------------------------------------------------------------------------------------------------------------------

    def _started(self) -> bool:
        """Tell whether the runtime runs here, without loading libnrt into a process that has no use for it."""
        return order.loaded(self._root / "proc", "libnrt.so") is not None and self._nrt.initialised()

    def _asked(self) -> Node | PlatformError | None:
        """Ask libnrt for the EFA device of the cache; None while there is no cache."""
        if not self._address:
            return None
        try:
            found = self._nrt.attached_efa(self._address)
        except PlatformError as error:
            return error
        node = self._devices.machine.at(found)
        if node is None or not node.is_efa or not node.usable:
            have = ", ".join(str(rail.where) for rail in self._devices.machine.rails)
            return PlatformError(
                f"libnrt attaches {found} to this cache, which is no EFA device that can be opened here ({have}): give the "
                f"container its /dev/infiniband/uverbs*, or set {EFA}"
            )
        return node


def _flag(environment: Mapping[str, str], name: str) -> bool | None:
    said = environment.get(name, "").strip()
    if said not in ("", "0", "1"):
        raise ConfigError(f"{name}={said!r} must be 0 or 1")
    return None if not said else said == "1"

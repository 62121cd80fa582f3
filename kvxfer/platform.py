"""The platform interface: everything that depends on which accelerator a rank runs on, behind one small class.

No connector, protocol or transport code asks which accelerator it is on; it asks a ``Platform``. Each folder of
``platforms/`` implements one and registers it in the entry-point group ``kvxfer.platforms``; each must pass the conformance
suite in ``tests/unit/platforms``. A platform is chosen by the device type of the tensors that vLLM hands over, which is the
one thing that cannot be wrong: a CPU build of vLLM on a host full of GPUs has its cache in host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvxfer.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvxfer.layout.maps import CacheMap
    from kvxfer.layout.mirror import Copies
    from kvxfer.layout.repack import Call

ENTRY_POINTS = "kvxfer.platforms"


class Fence(Protocol):
    """Passes when all work that was launched on the device before it was recorded has finished."""

    def done(self) -> bool:
        """Tell whether it has passed, without waiting. True for ever once it is true."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether a platform's accelerator is on this machine, and how that was found out, for people to read."""

    here: bool
    why: str


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers under one block table (a KV cache group of vLLM's), as its configuration describes them.

    ``layers`` are (name, the model's index), in the model's order. ``heads`` are the model's KV heads that this rank holds, by
    their index, of ``total_heads``; a model that keeps one latent for all heads has one. ``head_size`` in elements.
    ``window`` is how many positions a sliding window looks back. ``kind`` is the class of vLLM's cache specification.
    """

    layers: tuple[tuple[str, int], ...]
    block_size: int
    heads: tuple[int, ...]
    total_heads: int
    head_size: int
    kind: str = "FullAttentionSpec"
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """What vLLM's configuration says of this rank's cache, beside the tensors themselves.

    ``cache_dtype`` as vLLM names it (``auto`` follows the model), ``model_dtype`` as torch does. ``attention_backends`` and
    ``model_dtype`` are empty where vLLM does not tell.
    """

    groups: tuple[LayerGroup, ...]
    num_blocks: int
    cache_dtype: str
    attention_backends: tuple[str, ...] = ()
    model_dtype: str = ""


class Staging(Protocol):
    """Memory of a platform's, for as long as it is referred to."""

    address: int
    size: int


class Mirror(Protocol):
    """Host memory that stands for spans of a device's where the fabric does not reach those, for as long as it is referred to.

    Used by one thread, which is no engine's.
    """

    addresses: tuple[int, ...]
    """Where the mirror of each span begins."""
    size: int
    """Bytes of host memory."""

    def copy(self, copies: Copies, *, inward: bool) -> Fence:
        """Copy from the mirror into the device's memory (``inward``), or the other way. Waits for nothing.

        The fence passes when every byte is there. Copies are done in the order in which they were asked for, whichever way, and
        beside what the engine computes: nothing of that is waited for, and nothing of it waits. Raises PlatformError, and a fence
        does, when the device refuses.
        """


class Platform(ABC):
    """One kind of accelerator. Instances are cheap, belong to one worker process, and may be called from any thread."""

    name: ClassVar[str]
    """Short name for logs and records."""
    device_type: ClassVar[str]
    """``tensor.device.type`` of the caches that this platform describes."""

    @abstractmethod
    def presence(self) -> Presence:
        """Say whether this machine has the accelerator, without importing its runtime."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Return what must be in the environment before the runtime starts; what is set already is respected."""

    @abstractmethod
    def describe(self, caches: Mapping[str, Any], geometry: Geometry) -> CacheMap:
        """Say where the blocks lie and what is inside them (``kvxfer.layout.describe`` does most of it).

        ``caches`` maps layer names to the tensors that vLLM allocated. The map names as ``spans`` what is to be registered.
        Raises PlatformError when the tensors are not laid out in a way that this platform knows, naming layer, shape and strides.
        """

    offers: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of block interiors between which this platform moves tokens in its own memory (``kvxfer.layout.repack``)."""

    stages_unasked: ClassVar[bool] = False
    """Whether a staging area costs nothing before it is used. Elsewhere there is one only where ``staging_bytes`` asks for it."""

    def staging(self, size: int, device: int) -> Staging:
        """Allocate memory in which received blocks wait to be re-packed. Only asked of platforms that offer it."""
        raise PlatformError(
            f"platform {self.name!r} does not re-pack, and has no memory of {size:,} bytes for it ({device=})"
        )

    def repack(self, call: Call) -> Fence:
        """Move tokens as ``call`` says; the fence passes when they are in their blocks. Only asked of platforms that offer it."""
        raise PlatformError(f"platform {self.name!r} does not re-pack {call.pairing}")

    def mirror(self, spans: Sequence[tuple[int, int]], device: int) -> Mirror | None:
        """Allocate host memory for these (address, length) of a device's, as vLLM's ``kv_buffer_device: cpu`` asks.

        None where that changes nothing. Raises PlatformError, with what to set, where it cannot be had.
        """
        del spans, device
        raise PlatformError(
            f"platform {self.name!r} does not move KV through host memory: leave kv_buffer_device out of --kv-transfer-config"
        )

    @abstractmethod
    def pci_address(self, device: int) -> str | None:
        """Return the PCI address (``dddd:bb:dd.f``) of a device id as used in descriptors; None for plain host memory."""

    @abstractmethod
    def local_rails(self, device: int) -> Sequence[str] | None:
        """Name the EFA devices local to a device on PCIe; None when every rail is as good as any other."""

    def background_cpus(self) -> Collection[int] | None:
        """Name the CPUs on which the mover and the control thread shall run; None leaves them where they are born.

        A thread is born with the affinity of the engine's thread that starts it. Where the platform's runtime pins that to one
        core, everything would share the core that the engine needs most.
        """
        return None

    @abstractmethod
    def fence(self) -> Fence:
        """Record a fence behind all work that the calling thread has launched so far. Costs microseconds, never waits."""


def platforms() -> dict[str, type[Platform]]:
    """Return the installed platforms by name. A platform whose module does not import raises PlatformError here."""
    found: dict[str, type[Platform]] = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            raise PlatformError(f"platform {entry.name!r} ({entry.value}) does not import: {error}") from error
    return found


def platform_for(device_type: str) -> Platform:
    """Return the platform for tensors of a device type. Raises PlatformError that names what is installed."""
    known = platforms()
    for kind in known.values():
        if kind.device_type == device_type:
            return kind()
    have = ", ".join(f"{name} ({kind.device_type})" for name, kind in sorted(known.items())) or "none"
    raise PlatformError(
        f"the KV cache is in {device_type!r} memory and no installed platform handles that; installed: {have}. "
        "Install the kvxfer release that supports this accelerator on this host"
    )

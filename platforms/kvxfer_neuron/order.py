"""What must be set, and in which order things must start, so that EFA can reach HBM.

=========================== ======= ====================================================================================
NEURON_RT_MAP_HBM           1       before the process makes its first tensor on the device; else the tensor has no address,
                                    or one that no peer reaches
FI_EFA_ENABLE_SHM_TRANSFER  0       before libfabric starts: its path between two engines of one host copies with the CPU, which
                                    Neuron memory does not allow, and the KV that arrives is wrong (vllm-neuron's docs)
FI_HMEM_DISABLE_P2P         not set EFA reaches Neuron memory peer to peer or not at all
the Neuron runtime          first   before libfabric starts: up to libfabric 2.4 FI_HMEM_NEURON is otherwise not offered, and
                                    NIXL silently registers HBM as host memory (libfabric PR 11804)
=========================== ======= ====================================================================================

``wanted`` is what the plugin sets in every process of an engine before the runtime starts, unless it is set. ``verify`` runs when
vLLM hands over its caches: the runtime is up by then, and kvxfer's agent does not exist yet, which is the right order. What is
wrong then comes too late to be put right, so it is refused with its cure; what an operator has set on purpose, and may be right
about, is only warned of.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Final

from kvxfer.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAP_HBM: Final = "NEURON_RT_MAP_HBM"
SHM: Final = "FI_EFA_ENABLE_SHM_TRANSFER"
NO_P2P: Final = "FI_HMEM_DISABLE_P2P"

_WANTED: Final = {MAP_HBM: "1", SHM: "0"}
_FALSE: Final = ("0", "false", "no", "n", "off")
_FIRST_WITHOUT_ORDER: Final = (2, 5)
_LEFT_OUT: Final = "kvxfer's plugin sets it, so VLLM_PLUGINS may leave that out"

logger = logging.getLogger("kvxfer.neuron")


def wanted(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is to be set and is not set yet."""
    return {name: value for name, value in _WANTED.items() if name not in environment}


def verify(environment: Mapping[str, str], *, initialised: bool, early: tuple[int, int] | None) -> None:
    """Check what had to be set and started before now.

    ``initialised`` is whether the Neuron runtime is, ``early`` the version of a libfabric that was here before it. Raises
    PlatformError with the cure.
    """
    if not initialised:
        raise PlatformError(
            "the Neuron runtime is not initialised in this process, and NIXL's agent would come before it. The KV cache must be "
            "on the Neuron device before kvxfer is told of it: vllm-neuron's worker sees to that, in init_device"
        )
    if not _maps(environment.get(MAP_HBM)):
        said = environment.get(MAP_HBM)
        told = "is not set" if said is None else f"is {said!r}, which does not turn it on"
        raise PlatformError(
            f"{MAP_HBM} {told}: no peer reaches this process's HBM. Start vLLM with {MAP_HBM}=1; {_LEFT_OUT}"
        )
    shm = environment.get(SHM, "").strip().lower()
    if not shm:
        raise PlatformError(
            f"{SHM} is not set: two engines on one host would exchange wrong KV. Start vLLM with {SHM}=0; {_LEFT_OUT}"
        )
    if shm not in _FALSE:
        logger.warning(
            "%s=%s was set on purpose: two engines on one host exchange wrong KV with it. Set 0 unless peers are on other hosts",
            SHM, shm,
        )  # fmt: skip
    p2p = environment.get(NO_P2P, "").strip().lower()
    if p2p and p2p not in _FALSE:
        raise PlatformError(f"{NO_P2P}={p2p}: EFA reaches Neuron memory peer to peer or not at all; unset it")
    if early is not None and early < _FIRST_WITHOUT_ORDER:
        logger.warning(
            "libfabric %d.%d was loaded before the Neuron runtime was initialised: if it was started too, it offers no Neuron "
            "memory, and NIXL registers HBM as host memory. NIXL says so with 'falling back to system memory registration'. Make "
            "the first tensor on the device before anything that loads libfabric, or take an EFA installer with libfabric 2.5",
            *early,
        )


def unmapped(environment: Mapping[str, str]) -> str:
    """Say why memory may have no address although what ``verify`` wants is set, for an error about it."""
    return f"{MAP_HBM}={environment.get(MAP_HBM)} now, so it was set after the first tensor was made"


def _maps(value: str | None) -> bool:
    """Read NEURON_RT_MAP_HBM as libtorch-neuronx-lite does: ``true``, or a positive number."""
    said = (value or "").strip().lower()
    return said == "true" or (said.isascii() and said.isdigit() and bool(said.strip("0")))


def loaded(proc: Path, name: str) -> str | None:
    """Return the file of a library that this process has loaded (``libnrt.so``); None where it has not."""
    try:
        lines = (proc / "self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(maxsplit=5)[5] for line in lines if f"/{name}" in line), None)


def libfabric_of_process(proc: Path) -> tuple[int, int] | None:
    """Return the version of the libfabric that this process has loaded; None where it has none, or one that does not tell."""
    path = loaded(proc, "libfabric.so")
    if path is None:
        return None
    try:
        function = ctypes.CDLL(path).fi_version
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint32
    version = int(function())
    return version >> 16, version & 0xFFFF

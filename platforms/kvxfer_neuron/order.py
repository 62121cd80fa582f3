"""What must be set, and in which order things must start, so that EFA can reach HBM.

=========================== =========== ==========================================================================
NEURON_RT_MAP_HBM           1           before the process makes its first tensor on the device; else it has no address
FI_EFA_ENABLE_SHM_TRANSFER  0           before libfabric starts: its shm path between two engines of one host copies with the CPU,
                                        which Neuron memory does not allow, and the KV that arrives is wrong (vllm-neuron's docs)
FI_HMEM_DISABLE_P2P         not set     EFA reaches Neuron memory peer to peer or not at all
the Neuron runtime          first       before libfabric starts: up to libfabric 2.4 FI_HMEM_NEURON is otherwise not offered, and NIXL
                                        silently registers HBM as host memory (libfabric PR 11804)
=========================== =========== ==========================================================================

``wanted`` is what the plugin sets in every process of an engine before the runtime starts, unless it is set. ``verify`` runs when vLLM hands
over its caches: the runtime is up by then, and kvxfer's agent does not exist yet, which is the right order. What is wrong then comes too
late to be put right, so it is refused with its cure; what an operator has set on purpose is only warned of.
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

logger = logging.getLogger("kvxfer.neuron")


def wanted(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is to be set and is not set yet."""
    return {name: value for name, value in _WANTED.items() if name not in environment}


def verify(environment: Mapping[str, str], *, early: tuple[int, int] | None) -> None:
    """Check what had to be set before now. ``early`` is the version of a libfabric that was there before the runtime.

    Raises PlatformError with the cure.
    """
    shm = environment.get(SHM, "").strip().lower()
    if not shm:
        raise PlatformError(
            f"{SHM} is not set: two engines on one host would exchange wrong KV. Start vLLM with {SHM}=0; kvxfer's plugin sets "
            "it, so VLLM_PLUGINS may leave that out"
        )
    if shm not in _FALSE:
        logger.warning(
            "%s=%s was set on purpose: two engines on one host exchange wrong KV with it. Set 0 unless peers are never on this host",
            SHM,
            shm,
        )
    p2p = environment.get(NO_P2P, "").strip().lower()
    if p2p and p2p not in _FALSE:
        raise PlatformError(f"{NO_P2P}={p2p}: EFA reaches Neuron memory peer to peer or not at all; unset it")
    if early is not None and early < _FIRST_WITHOUT_ORDER:
        logger.warning(
            "libfabric %d.%d was loaded before the Neuron runtime was initialised: if it was started too, it offers no Neuron memory, and "
            "NIXL registers HBM as host memory. NIXL says so with 'falling back to system memory registration'. Make the first "
            "tensor on the device before anything that loads libfabric, or take an EFA installer with libfabric 2.5",
            *early,
        )


def mapped_for_peers(environment: Mapping[str, str]) -> str:
    """Say how NEURON_RT_MAP_HBM stands, for an error about memory without an address."""
    said = environment.get(MAP_HBM)
    if said is None:
        return f"{MAP_HBM} is not set"
    good = said.strip().lower() == "true" or (said.strip().isdigit() and int(said) > 0)
    return (
        f"{MAP_HBM}={said} was set after the first tensor was made"
        if good
        else f"{MAP_HBM}={said} does not turn it on"
    )


def libfabric_of_process(proc: Path) -> tuple[int, int] | None:
    """Return the version of the libfabric that this process has loaded; None where it has none, or one that does not tell."""
    try:
        lines = (proc / "self/maps").read_text().splitlines()
    except OSError:
        return None
    path = next((line.split(maxsplit=5)[5] for line in lines if "/libfabric.so" in line), None)
    if path is None:
        return None
    try:
        function = ctypes.CDLL(path).fi_version
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint32
    version = int(function())
    return version >> 16, version & 0xFFFF

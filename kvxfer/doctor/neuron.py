"""Checks of the settings that Neuron's runtime and libfabric read, against what EFA needs to reach HBM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.doctor.host import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.doctor.host import Host

_FALSE = ("0", "false", "no", "n", "off")


def check_settings(host: Host) -> Iterator[Finding]:
    """HBM mapped, peer to peer allowed; what is not set kvxfer's plugin sets, in each process of an engine."""
    if not host.machine.neurons:
        return
    mapped = host.environment.get("NEURON_RT_MAP_HBM", "1").strip().lower()
    if mapped != "true" and not (mapped.isascii() and mapped.isdigit() and mapped.strip("0")):
        text = f"NEURON_RT_MAP_HBM={mapped}: HBM is not mapped, and no peer reaches it"
        yield Finding("neuron settings", "problem", text, "unset NEURON_RT_MAP_HBM, or export NEURON_RT_MAP_HBM=1")
        return
    p2p = host.environment.get("FI_HMEM_DISABLE_P2P", "").strip().lower()
    if p2p and p2p not in _FALSE:
        text = f"FI_HMEM_DISABLE_P2P={p2p}: EFA reaches Neuron memory peer to peer or not at all"
        yield Finding("neuron settings", "problem", text, "unset FI_HMEM_DISABLE_P2P")
        return
    plugins = host.environment.get("VLLM_PLUGINS")
    if plugins is not None and "kvxfer" not in plugins.split(","):
        text = f"VLLM_PLUGINS={plugins} leaves kvxfer's plugin out, which sets NEURON_RT_MAP_HBM and FI_EFA_ENABLE_SHM_TRANSFER"
        cure = "add kvxfer to VLLM_PLUGINS, or export NEURON_RT_MAP_HBM=1 FI_EFA_ENABLE_SHM_TRANSFER=0"
        yield Finding("neuron settings", "warning", text, cure)
        return
    yield Finding("neuron settings", "ok", "HBM is mapped, peer to peer is on")


CHECKS = (check_settings,)

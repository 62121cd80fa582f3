"""Checks of the fabric: the providers that libfabric offers, and the rails that NIXL would open on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.doctor.host import Finding
from kvxfer.errors import NativeLibraryError
from kvxfer.rails.judge import judge_machine
from kvxfer.rails.local import attached, place
from kvxfer.rails.pci import rail_name
from kvxfer.rails.policy import VARIABLE, pin, unknown_names
from kvxfer.rails.predict import predict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvxfer.doctor.host import Host, Provider
    from kvxfer.rails.pci import Node

_ORDER = ("cxi", "efa", "tcp", "sockets")  # nixl 1.4.1, libfabric_common.cpp, getAvailableNetworkDevices


def opened(offers: Sequence[Provider]) -> tuple[str, list[str]]:
    """Return the provider that NIXL takes, and the devices that it makes rails of: all of cxi's and efa's, the others' first."""
    for name in _ORDER:
        devices = list(dict.fromkeys(offer.domain for offer in offers if offer.provider == name))
        if devices:
            return name, devices if name in ("cxi", "efa") else devices[:1]
    return "none", []


def check_provider(host: Host) -> Iterator[Finding]:
    """Ask libfabric itself, with the environment as it is."""
    found = host.libfabric()
    if found is None:
        return
    try:
        offers = host.providers(found[0])
    except NativeLibraryError as error:
        cure = "run fi_info of the same libfabric to see more"
        if host.environment.get(VARIABLE) == "":
            cure = f"unset {VARIABLE}: it is set, and empty, over which libfabric ends a process"
        yield Finding("provider", "problem", str(error), cure)
        return
    provider, devices = opened(offers)
    have = ", ".join(dict.fromkeys(offer.provider for offer in offers)) or "none"
    preset = host.environment.get("FI_PROVIDER", "")
    told = f"NIXL would open {provider}: {', '.join(map(rail_name, devices)) or 'nothing'} (libfabric offers {have})"
    wants_efa = bool(host.machine.efas or host.machine.accelerators)
    if provider == "none":
        cure = f"unset FI_PROVIDER={preset}" if preset else "bring a network interface up, or use UCX"
        yield Finding("provider", "problem", told, cure)
    elif provider == "efa" or not wants_efa:
        yield Finding("provider", "ok", told)
    elif preset and preset != "efa":
        yield Finding("provider", "problem", f"{told}, as FI_PROVIDER={preset} asks", "unset FI_PROVIDER")
    elif host.machine.rails and host.environment.get(VARIABLE) and not _shown(host):
        names = ",".join(rail.rail for rail in host.machine.rails)
        text = f"{told}: {VARIABLE}={host.environment[VARIABLE]} names no EFA device of this host"
        yield Finding(
            "provider", "problem", text, f"unset {VARIABLE}, or set some of {names}, with nothing but commas between"
        )
    elif host.machine.efas:
        cure = "run AWS's EFA installer, and give the process /dev/infiniband"
        yield Finding(
            "provider", "problem", f"{told}: EFA devices are here, and libfabric has no provider for them", cure
        )
    else:
        cure = 'attach EFA devices to the instance, set "backend": "UCX", or move KV through host memory (kv_buffer_device: cpu)'
        yield Finding("provider", "problem", f"{told}: over it device memory cannot be registered", cure)
    if provider == "efa":
        yield from _rails(host, {rail_name(name) for name in devices})


def _shown(host: Host) -> tuple[Node, ...]:
    """Return the EFA devices that the environment leaves to libfabric."""
    return pin(host.machine, [], "all", host.environment).rails


def _rails(host: Host, names: set[str]) -> Iterator[Finding]:
    """Hold libfabric's list against the bus, and NIXL's choice against the local rails."""
    machine = host.machine
    shown = _shown(host)
    missing = [rail.rail for rail in shown if rail.rail not in names]
    preset = host.environment.get(VARIABLE)
    if missing:
        text = f"libfabric does not list {', '.join(missing)}, which are on the bus"
        yield Finding("rails", "warning", text, "see dmesg for the efa driver, and ibv_devices")
    visible = [rail for rail in shown if rail.rail in names]
    placements = place(machine)
    verdict = judge_machine(machine, placements, predict(machine, visible, attached(placements)), "efa")
    lost = unknown_names(machine, preset or "")
    if lost:
        text = f"{VARIABLE}={preset}: {', '.join(map(repr, lost))} is no EFA device of this host, and left out"
        yield Finding(
            "rails", "warning", text, "give exact names (kvxfer rails shows them), with nothing but commas between"
        )
    elif preset:
        text = f"{VARIABLE}={preset}: {len(visible)} of {len(machine.rails)} rails; each process is kept to these"
        yield Finding("rails", "ok", text)
    elif verdict.violations:
        for violation in verdict.violations:
            cure = f"pin each worker with {VARIABLE}; kvxfer rails shows the values"
            yield Finding("rails", "warning", violation.text, cure)
    else:
        yield Finding("rails", "ok", f"{len(visible)} rails; NIXL's own choice is local for every device")


def check_shm(host: Host) -> Iterator[Finding]:
    """Ask for EFA's shared-memory path to be off: it serves no Neuron memory, and crashed with CUDA's (libfabric #12328)."""
    value = host.environment.get("FI_EFA_ENABLE_SHM_TRANSFER", "")
    if host.machine.accelerators and host.machine.efas and value.lower() not in ("0", "false", "no", "off"):
        yield Finding(
            "shm",
            "warning",
            "two engines on this host would copy by way of shared memory, which gives wrong data or crashes with device memory",
            "export FI_EFA_ENABLE_SHM_TRANSFER=0 where prefill and decode share a host",
        )


CHECKS = (check_provider, check_shm)

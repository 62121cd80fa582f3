"""What this host's libnrt really answers, step by step: ``python -m kvxfer_neuron``.

It starts the runtime in this process, on the cores that NEURON_RT_VISIBLE_CORES names, and needs them free: not beside an
engine. Everything that kvxfer believes of libnrt without having seen it on hardware is asked here once, with the order and the
settings that an engine has (docs/neuron.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvxfer.errors import ConfigError, PlatformError
from kvxfer_neuron import cores, order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvxfer_neuron.devices import Devices
    from kvxfer_neuron.nrt import Nrt

SIZE: Final = 64 << 20
"""Bytes of HBM that are allocated for it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One step's outcome, for people."""

    step: str
    good: bool
    text: str


def probe(library: Nrt, devices: Devices, environment: Mapping[str, str]) -> Iterator[Answer]:
    """Ask everything. Ends at the first answer without which the next question has no sense."""
    try:
        yield Answer("version", True, f"{library.path}: {library.version()}")
        total, visible = library.cores()
        yield Answer("cores", visible > 0, f"{visible} of {total} logical cores are visible ({_told(environment)})")
        yield _index(library)
        if library.initialised():
            yield Answer("order", False, "the runtime says that it is initialised before it was: kvxfer cannot tell")
        library.initialise()
        yield Answer("runtime", library.initialised(), "initialised")
    except PlatformError as error:
        yield Answer("runtime", False, str(error))
        return
    try:
        yield from _memory(library, devices)
    finally:
        library.close()


def _index(library: Nrt) -> Answer:
    """Ask before the runtime starts, as a worker does."""
    try:
        return Answer("index", True, f"the runtime's device 0 is the host's {library.host_device(0)}")
    except PlatformError as error:
        return Answer("index", False, f"{error} (before nrt_init). The numbers of /dev/neuron* are taken instead")


def _memory(library: Nrt, devices: Devices) -> Iterator[Answer]:
    try:
        tensor = library.allocate(SIZE)
    except PlatformError as error:
        yield Answer("memory", False, str(error))
        return
    try:
        used = library.memory()
        yield Answer("memory", used.used >= SIZE, f"{used.used:,} of {used.limit:,} bytes used")
        address = library.tensor_address(tensor)
        yield Answer("address", True, f"{SIZE:,} bytes at {address:#x} ({order.MAP_HBM} is on)")
        yield _attached(library, devices, address)
        descriptor = library.dmabuf(address, SIZE)
        os.close(descriptor)
        yield Answer("dma-buf", True, "exported, as libfabric does to register the memory")
    except PlatformError as error:
        yield Answer("memory", False, str(error))
    finally:
        library.free(tensor)


def _attached(library: Nrt, devices: Devices, address: int) -> Answer:
    """Compare libnrt's EFA device with the one that kvxfer would take without it."""
    try:
        efa = library.attached_efa(address)
    except PlatformError as error:
        return Answer("efa", False, str(error))
    try:
        placement = devices.placement(0)
    except (ConfigError, PlatformError) as error:
        return Answer("efa", False, f"libnrt attaches {efa}; which Neuron device this is, is not known: {error}")
    mine = [node.where for node in placement.rails]
    have = ", ".join(map(str, mine)) or "none"
    return Answer(
        "efa", efa in mine, f"libnrt attaches {efa} to {placement.name}; without it {have} ({placement.source})"
    )


def _told(environment: Mapping[str, str]) -> str:
    try:
        return cores.visible(environment).source
    except ConfigError as error:
        return str(error)

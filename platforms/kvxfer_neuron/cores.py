"""Which logical NeuronCores this process has, and on which Neuron devices they lie, by the environment.

A device has so many physical cores (2 on trn1, 8 on trn2 and trn3); with LNC 2 two of them are one logical core. Core ids
count logical cores over all devices that the runtime sees, so the device of a core is ``core · LNC // physical cores``. In a
container the runtime sees the container's devices: the index is then the container's (``devices`` turns it into the host's).

Read in this order, as the runtime and vllm-neuron do: NEURON_RT_VISIBLE_CORES, which vllm-neuron's worker sets to its one core
before the runtime starts; then vllm-neuron's NEURON_VISIBLE_DEVICES, whose values are core ids, one for each local rank. What
they leave open is refused, with what to set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

LNC: Final = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
VISIBLE: Final = "NEURON_RT_VISIBLE_CORES"
COUNT: Final = "NEURON_RT_NUM_CORES"
RANKS: Final = "NEURON_VISIBLE_DEVICES"
DEVICE: Final = "KVXFER_NEURON_DEVICE"

_PHYSICAL: Final = {"inf2": 2, "trn1": 2, "trn2": 8, "trn3": 8}
_DEFAULT_LNC: Final = {"inf2": 1, "trn1": 1, "trn2": 2, "trn3": 2}
_MAX_CORE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Cores:
    """Logical core ids of this process, in the order of its device ordinals, and from which variable they are."""

    ids: tuple[int, ...]
    source: str


def logical_size(environment: Mapping[str, str], family: str) -> int:
    """Return how many physical cores a logical one has (LNC)."""
    said = {name: environment[name].strip() for name in LNC if environment.get(name, "").strip()}
    if not said:
        return _DEFAULT_LNC[family]
    told = " and ".join(f"{name}={value}" for name, value in said.items())
    if len(set(said.values())) > 1:
        raise ConfigError(f"{told} contradict each other: unset {LNC[1]}, the older of the two")
    value = next(iter(said.values()))
    if value not in ("1", "2"):
        raise ConfigError(f"{told} must be 1 or 2")
    if value == "2" and _PHYSICAL[family] == 2:  # noqa: PLR2004
        raise ConfigError(f"{told}: the cores of {family} are not joined; unset it, or set 1")
    return int(value)


def visible(environment: Mapping[str, str]) -> Cores:
    """Return the cores of this process. Raises ConfigError where the environment leaves them open."""
    text = environment.get(VISIBLE, "").strip()
    if text:
        return Cores(_parse(VISIBLE, text), f"{VISIBLE}={text}")
    text = environment.get(RANKS, "").strip()
    rank = environment.get("LOCAL_RANK", "").strip()
    if text:
        ids = _parse(RANKS, text)
        if len(ids) == 1:
            return Cores(ids, f"{RANKS}={text}")
        if rank.isascii() and rank.isdigit() and int(rank) < len(ids):
            return Cores((ids[int(rank)],), f"{RANKS}={text}, LOCAL_RANK={rank}")
        raise ConfigError(
            f"{RANKS}={text} has a core for each local rank, and nothing says which this process is: set {VISIBLE} (or "
            f"LOCAL_RANK, below {len(ids)}) in each worker, or {DEVICE} to its Neuron device"
        )
    count = environment.get(COUNT, "").strip()
    told = f"{COUNT}={count} lets the runtime pick free cores" if count else f"neither {VISIBLE} nor {RANKS} is set"
    raise ConfigError(f"{told}: which device this process uses is not known; set {VISIBLE} to its cores, or {DEVICE}")


def devices(cores: Cores, lnc: int, family: str, physical: int | None = None) -> tuple[int, ...]:
    """Return the device of each core, as the runtime counts devices. ``physical`` cores of a device, where the driver tells."""
    each = physical or _PHYSICAL[family]
    return tuple(core * lnc // each for core in cores.ids)


def _parse(name: str, text: str) -> tuple[int, ...]:
    """Read ``0``, ``0-3`` or ``0,2,4-7``."""
    ids: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part, re.ASCII)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last < _MAX_CORE:
            raise ConfigError(f"{name}={text!r} is no list of core ids (0, 0-3, or 0,2,4-7): {part!r}")
        ids.extend(range(first, last + 1))
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{name}={text!r} names a core twice")
    return tuple(ids)

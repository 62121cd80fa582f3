"""EFA's byte counters, read while traffic runs: which share of it each rail carries.

They are files below ``/sys/class/infiniband/<rail>/ports/1/hw_counters`` of the efa driver. ``tx_bytes`` and ``rx_bytes`` count
what crosses the wire, by whichever operation; the others say by which. Some stay 0 by design: a rail that only receives RDMA
writes has no send_bytes and no rdma_read_bytes, and an older driver has no rdma_write_* at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

COUNTERS = (
    "tx_bytes",
    "rx_bytes",
    "send_bytes",
    "recv_bytes",
    "rdma_read_bytes",
    "rdma_read_resp_bytes",
    "rdma_write_bytes",
    "rdma_write_recv_bytes",
)

Reading = dict[str, dict[str, int]]
"""Rail → counter → bytes since the driver was loaded."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rail carried between two readings; ``share`` is of all rails' tx and rx bytes together, from 0 to 1."""

    rail: str
    moved: Mapping[str, int]
    share: float


def read_counters(rails: Iterable[str], root: Path = Path("/")) -> Reading:
    """Read the counters of each rail that has any, over all its ports."""
    reading: Reading = {}
    for rail in rails:
        values: dict[str, int] = {}
        for name in COUNTERS:
            for file in (root / "sys/class/infiniband" / rail / "ports").glob(f"*/hw_counters/{name}"):
                try:
                    values[name] = values.get(name, 0) + int(file.read_text())
                except (OSError, ValueError):
                    continue
        if values:
            reading[rail] = values
    return reading


def traffic(before: Reading, after: Reading) -> list[Traffic]:
    """Subtract two readings. A counter that went backwards (a driver loaded anew) counts from 0."""
    moved: dict[str, dict[str, int]] = {}
    for rail, values in after.items():
        old = before.get(rail, {})
        moved[rail] = {
            name: value - old.get(name, 0) if value >= old.get(name, 0) else value for name, value in values.items()
        }
    wire = {rail: values.get("tx_bytes", 0) + values.get("rx_bytes", 0) for rail, values in moved.items()}
    total = sum(wire.values())
    return [Traffic(rail, values, wire[rail] / total if total else 0.0) for rail, values in moved.items()]

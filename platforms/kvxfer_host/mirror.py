"""A mirror of host memory in host memory: of no use but to try out, on any machine, what a device's mirror does.

NIXL is told of the mirror alone, so what is not copied, or too early, or too late, shows as wrong bytes; copies are done in a
thread of their own, in order, each some time after it was asked for.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.layout.mirror import Copies
    from kvxfer.platform import Fence
    from kvxfer_host.stream import LateStream


class HostMirror:
    """Mirrors (address, length) spans; ``stream`` carries out the copies."""

    def __init__(self, spans: Sequence[tuple[int, int]], stream: LateStream) -> None:
        self._stream = stream
        self._memory = [np.zeros(length, dtype=np.uint8) for _, length in spans]
        self.addresses: tuple[int, ...] = tuple(memory.ctypes.data for memory in self._memory)
        self.size: int = sum(length for _, length in spans)

    def copy(self, copies: Copies, *, inward: bool) -> Fence:
        """Copy row by row."""
        rows = copies.tolist()
        self._stream.launch(lambda: _copy(rows, inward=inward))
        return self._stream.fence()


def _copy(copies: list[list[int]], *, inward: bool) -> None:
    for device, mirror, length, count, device_step, mirror_step in copies:
        for row in range(count):
            there, here = device + row * device_step, mirror + row * mirror_step
            target, origin = (there, here) if inward else (here, there)
            ctypes.memmove(target, origin, length)

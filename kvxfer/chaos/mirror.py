"""Memory that the simulated fabric does not reach, and its mirror, which it does: copies take time, and sometimes much.

A copy sees what its process sees at the moment at which the device comes to it. One into a block that is not lent to a handoff is
foreign there: it would write over what its engine, or another request, has in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvxfer.chaos.device import Device

if TYPE_CHECKING:
    from kvxfer.chaos.device import Fence
    from kvxfer.chaos.process import Process
    from kvxfer.layout.mirror import Copies

QUICK, SLOW = (0.0002, 0.01), (0.05, 1.0)
"""Seconds that a copy takes the device, mostly and now and then."""
SHARE_SLOW = 0.04
_CELL = 4


class Mirror:
    """Of one process: as large as its memory. Copies are done in order, beside what the engine computes."""

    def __init__(self, process: Process) -> None:
        self.cells = np.zeros_like(process.memory)
        self.base: int = self.cells.ctypes.data
        self.addresses: tuple[int, ...] = (self.base,)
        self.size: int = self.cells.nbytes
        self._process = process
        self._device = Device(process)

    def copy(self, copies: Copies, *, inward: bool) -> Fence:
        """Let the device copy some time from now."""
        draw = self._process.sim.world.random
        low, high = SLOW if draw.random() < SHARE_SLOW else QUICK
        rows = copies.tolist()
        self._device.launch(draw.uniform(low, high), [lambda: self._copy(rows, inward=inward)])
        return self._device.fence()

    def _copy(self, copies: list[list[int]], *, inward: bool) -> None:
        process, home = self._process, self._process.memory.ctypes.data
        for device, _, length, count, step, _ in copies:
            for row in range(count):
                first = (device + row * step - home) // _CELL
                for cell in range(first, first + length // _CELL):
                    if not inward:
                        self.cells[cell] = process.memory[cell]
                        continue
                    block = _CELL * cell // process.block_bytes
                    if process.loans[block] is None:
                        what = f"a copy lands in block {block} of {process.name}, which is the engine's"
                        process.sim.violate("wrong_bytes", "", what)
                        return
                    process.memory[cell] = process.landed_as(cell)

"""When an engine's worker computed: the beginning and the end of each step with a forward, read from outside meanwhile.

A worker's process writes them into a ring that lies in a file mapped into memory, at the cost of two looks at the clock a step.
The clock is the machine's monotonic one, the same for every process, so whoever measures picks out the steps between two
moments of its own.
"""

from __future__ import annotations

import mmap
import os
import time
from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_SUFFIX: Final = ".spans"
_RING: Final = 1 << 16
_ITEM: Final = 8


class Spans:
    """The file of one process: ``directory/<pid>.spans``. For one thread. The latest 65,536 steps are kept."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{os.getpid()}{_SUFFIX}").open("w+b") as file:
            file.truncate(_ITEM * (1 + 2 * _RING))
            self._map = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(self._map).cast("q")
        self._begun = 0
        self._computes = False

    def begin(self) -> None:
        """Note that a step begins."""
        self._begun = time.monotonic_ns()
        self._computes = False

    def compute(self) -> None:
        """Note that this step has a forward."""
        self._computes = True

    def end(self) -> None:
        """Write the step down, if it had one."""
        if self._computes:
            self._computes = False
            count = self._cells[0]
            at = 1 + 2 * (count % _RING)
            self._cells[at], self._cells[at + 1] = self._begun, time.monotonic_ns()
            self._cells[0] = count + 1  # last: a reader takes whole steps only


def read(directory: Path, since_ns: int, until_ns: int) -> list[tuple[int, int]]:
    """Return the steps that began between two moments, as (begin, end) in ``time.monotonic_ns``, in order.

    Of several workers those of one: they compute together.
    """
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        cells = array("q", path.read_bytes())
        kept = min(cells[0], _RING)
        steps = zip(cells[1 : 1 + 2 * kept : 2], cells[2 : 2 + 2 * kept : 2], strict=True)
        return sorted(step for step in steps if since_ns <= step[0] <= until_ns)
    return []

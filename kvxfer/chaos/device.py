"""A process's device: work that is launched now and done later, in order, and fences behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.chaos.process import Process


class Device:
    """Work that is launched now and done later, in order. ``fence()`` passes when all that was launched is done."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._free_at = 0.0
        self.launched = 0
        self.completed = 0

    def launch(self, duration: float, work: list[Callable[[], None]]) -> None:
        """Launch work that takes so long."""
        world = self._process.sim.world
        self.delay(duration)
        self.launched += 1
        world.at(self._free_at, self._complete, work)

    def delay(self, duration: float) -> None:
        """Let what is launched from now on begin so much later."""
        self._free_at = max(self._free_at, self._process.sim.world.now) + duration

    def _complete(self, work: list[Callable[[], None]]) -> None:
        if self._process.alive:
            for act in work:
                act()
            self.completed += 1
            self._process.wake()

    def fence(self) -> Fence:
        """Record a fence."""
        return Fence(self, self.launched)


class Fence:
    """Of a simulated device."""

    __slots__ = ("_behind", "_device")

    def __init__(self, device: Device, behind: int) -> None:
        self._device = device
        self._behind = behind

    def done(self) -> bool:
        """Tell whether all work that was launched before has been done."""
        return self._device.completed >= self._behind

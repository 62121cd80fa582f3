"""A stand-in for a device's work queue, so that a missing fence shows on a machine without an accelerator.

On a real device, work is launched and finishes later, and reading memory before its fence gives yesterday's bytes. Host
memory has no such delay. ``LateStream`` gives it one: work handed to it runs in order, each piece ``delay`` seconds after it
was launched, in a thread of its own; a fence passes when the work launched before it has run.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class LateFence:
    """Passes when the stream has come to it."""

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed = threading.Event()

    def done(self) -> bool:
        """Tell whether the stream has come to it."""
        return self._passed.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it (a test's convenience; no product code waits for a fence)."""
        return self._passed.wait(timeout)

    def passed(self) -> None:
        """Let it pass: the stream's thread calls this."""
        self._passed.set()


class LateStream:
    """Runs launched work in order, ``delay`` seconds late."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._work: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kvxfer-host-stream", daemon=True).start()

    def launch(self, work: Callable[[], None]) -> None:
        """Run ``work`` after everything launched before it, no sooner than ``delay`` seconds from now."""
        self._work.put((time.monotonic() + self.delay, work))

    def fence(self) -> LateFence:
        """Record a fence behind everything launched so far."""
        fence = LateFence()
        self.launch(fence.passed)
        return fence

    def _run(self) -> None:
        while True:
            due, work = self._work.get()
            time.sleep(max(0.0, due - time.monotonic()))
            work()

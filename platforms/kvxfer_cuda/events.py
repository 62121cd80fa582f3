"""CUDA events as fences.

A fence is an event recorded on the stream that is current in the calling thread. It passes when everything that was launched
on that stream before has finished, and with it whatever the stream was made to wait for (``wait_event``, ``wait_stream``).
**Work on a stream that nothing has joined to the current one is not covered.** vLLM calls the hooks with its compute stream
current.

Recording and asking are a few microseconds each, and neither waits. Events that have passed are used again: an event
is made once for each fence that is open at a time, not for each step.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class EventFence:
    """One recorded event. Any thread may ask."""

    __slots__ = ("_device", "_event", "_pool")

    def __init__(self, event: Any, device: int, pool: EventPool) -> None:
        self._event = event
        self._device = device
        self._pool = pool

    def done(self) -> bool:
        """Tell whether it has passed, without waiting."""
        if self._event is None:
            return True
        return self._pool.ask(self)


class EventPool:
    """Makes fences. ``cuda`` is torch.cuda, or something that behaves so; it is first asked for when a fence is recorded."""

    def __init__(self, cuda: Callable[[], Any]) -> None:
        self._cuda = cuda
        self._free: dict[int, deque[Any]] = {}
        # An event may not be used again while somebody asks after the fence that it was, and would see it not passed again.
        self._asking = threading.Lock()
        self._thread = threading.local()

    def record(self) -> EventFence:
        """Record a fence on the current stream of the current device."""
        cuda = self._cuda()
        device = cuda.current_device()
        try:
            event = self._free[device].pop()
        except (KeyError, IndexError):
            event = cuda.Event()
        event.record()
        return EventFence(event, device, self)

    def ask(self, fence: EventFence) -> bool:
        """Tell whether a fence has passed; take its event back when it has."""
        with self._asking:
            event = fence._event  # noqa: SLF001 - a fence is half of its pool
            if event is None:
                return True
            self.be_on(fence._device)  # noqa: SLF001
            if not event.query():
                return False
            fence._event = None  # noqa: SLF001
            self._free.setdefault(fence._device, deque()).append(event)  # noqa: SLF001
            return True

    def be_on(self, device: int) -> None:
        """Make the device the calling thread's own.

        A thread is born on device 0, and asking there would make a context on device 0: hundreds of megabytes of
        somebody else's GPU.
        """
        if getattr(self._thread, "device", None) != device:
            self._cuda().set_device(device)
            self._thread.device = device

"""A way out of a call to NIXL that does not return because its peer is dead.

NIXL's LIBFABRIC plugin repeats a post for as long as libfabric says "try again", and over tcp libfabric says so for as long as it
can try to connect: for ever, once the peer's process is gone (NIXL 1.4.1; the stack was looked at). The thread
spins in there, without Python's lock, and neither library has a time-out or a way to cancel.

What ends it is an attempt that fails at once instead of later. Each attempt makes a socket; so for a moment this process may not
open files. The soft limit of open files is lowered to what is open, until the call has returned, ``MOMENT`` seconds at a time:
whoever else opens a file in that time sees "too many open files". It is done only over tcp, when the peer's process is known to
have ended and a call about it is under way; the alternative is a process that moves nothing any more.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("kvxfer.nixl")

MOMENT = 0.05
"""Seconds for which no file can be opened. An attempt to connect takes some 50 µs."""

STEPS = 5
"""Files that are thought open and may not be: in that many steps the limit goes down within a moment."""

PAUSE = 0.5
"""Seconds between two moments."""

_moments = threading.Lock()
"""One at a time: a rescuer opens a file itself, to see what is open."""
_lock = threading.Lock()
_before: list[tuple[int, int]] = []
"""The limits to go back to, while they are lowered."""


def rescue(peer: str, under_way: Callable[[], bool]) -> threading.Thread:
    """Begin to make the call about ``peer`` return, as long as it is ``under_way``; in a thread of its own."""
    thread = threading.Thread(target=_run, args=(peer, under_way), name="kvxfer-rescue", daemon=True)
    thread.start()
    return thread


def _run(peer: str, under_way: Callable[[], bool]) -> None:
    logger.warning("a call to NIXL about %s, which is lost, does not return: it is made to fail", peer)
    while under_way():
        with _moments, contextlib.suppress(OSError):  # of the listing: then no socket can be made as it is
            _moment(under_way)
        if under_way():
            time.sleep(PAUSE)


def _moment(under_way: Callable[[], bool]) -> None:
    lowest_free = _lowest_free()
    began = time.monotonic()
    try:
        while under_way() and (gone := (time.monotonic() - began) / MOMENT) < 1.0:
            # What was open when looked at may have been the very socket that is made and closed all the time, and the folder
            # that was listed: so lower, step by step. Not much lower: poll(2) refuses more files than the limit.
            _lower(max(lowest_free - int(gone * STEPS), 3), under_way)
            time.sleep(MOMENT / STEPS / 5)
    finally:
        restore()


def restore() -> None:
    """Allow files to be opened again. The rescued thread does so first of all, since the rescuer may notice later."""
    with _lock:
        if _before:
            resource.setrlimit(resource.RLIMIT_NOFILE, _before.pop())


def _lower(limit: int, under_way: Callable[[], bool]) -> None:
    with _lock:
        if under_way():
            if not _before:
                _before.append(resource.getrlimit(resource.RLIMIT_NOFILE))
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, _before[0][1]))


def _lowest_free() -> int:
    taken = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    return next(number for number in range(len(taken) + 1) if number not in taken)

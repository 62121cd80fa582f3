"""What the two background threads of a worker process have in common."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def run_on(cpus: Collection[int] | None) -> None:
    """Move the calling thread to these CPUs; None, or CPUs that the host does not grant, leave it where it is."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread, not the process

"""Names of vLLM's own that nothing public stands in for, found at run time; what is not as expected counts as not there.

vLLM hands neither its engine core nor its scheduler to a connector, so they are looked for in the frames of who calls:
the engine core makes the scheduler, which makes the connector and then hands it the block pool.
"""

from __future__ import annotations

import queue
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_Found = Any


def _caller_with(*names: str) -> _Found:
    frame = sys._getframe(2)  # noqa: SLF001 - see above
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and all(hasattr(caller, name) for name in names):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def waker() -> Callable[[], None] | None:
    """Return what makes an idle engine core turn its loop once, from any thread; None where there is no such thing.

    An idle core sleeps in its input queue and asks no connector anything. ``WAKEUP`` is what its own signal handler puts there
    (0.26 to 0.32, v1/engine/core.py). To be called while the connector is constructed.
    """
    core = _caller_with("input_queue")
    inbox = getattr(core, "input_queue", None)
    try:
        from vllm.v1.engine import EngineCoreRequestType
    except ImportError:
        return None
    word = getattr(EngineCoreRequestType, "WAKEUP", None)
    if not isinstance(inbox, queue.Queue) or word is None:
        return None
    return lambda: inbox.put_nowait((word, None))


def reservations() -> Callable[[], int] | None:
    """Return what says how many blocks the scheduler keeps free for prompts that it has begun; None where that is unknown.

    A load is admitted only beside them (0.26 to 0.32, v1/core/sched/scheduler.py ``_inflight_prefill_reserved_blocks``), and the
    watermark, if any. To be called while the block pool is handed over.
    """
    scheduler = _caller_with("_inflight_prefill_reserved_blocks", "kv_cache_manager")
    if scheduler is None:
        return None
    watermark = getattr(scheduler.kv_cache_manager, "watermark_blocks", 0)
    reserved = scheduler._inflight_prefill_reserved_blocks  # noqa: SLF001 - see above
    return lambda: int(reserved()) + int(watermark)

"""Names of vLLM's own that nothing public stands in for, found at run time; what is not as expected counts as not there.

vLLM hands neither its engine core nor its scheduler to a connector, so they are looked for in the frames of who calls:
the engine core makes the scheduler, which makes the connector and then hands it the block pool.
"""

from __future__ import annotations

import queue
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def caller_with(*names: str) -> Any:
    """Return the nearest object that called whoever asks and has attributes of all these names; None where there is none."""
    return next((caller for caller in _callers() if all(hasattr(caller, name) for name in names)), None)


def _callers() -> Iterator[Any]:
    """Iterate over the objects whose methods are being run, the innermost first."""
    frame = sys._getframe(1)  # noqa: SLF001 - see above
    while frame is not None:
        if (caller := frame.f_locals.get("self")) is not None:
            yield caller
        frame = frame.f_back  # type: ignore[assignment]


def inbox() -> queue.Queue[Any] | None:
    """Return the queue through which everything reaches the engine core that is making us (0.24 to 0.32, ``input_queue``).

    It is made before the scheduler; an engine core that runs in its client's process has none.
    """
    found = getattr(caller_with("input_queue"), "input_queue", None)
    return found if isinstance(found, queue.Queue) else None


def own_inbox(vllm_config: Any) -> queue.Queue[Any] | None:
    """Return ``inbox()`` where a connector may let its engine core wait at it; None where other parts want steps of it.

    Those are several connectors in one, a connector for encoder outputs, ranks of a data-parallel engine that step together.
    """
    if vllm_config.parallel_config.data_parallel_size > 1 or getattr(vllm_config, "ec_transfer_config", None):
        return None
    return None if caller_with("_connectors") is not None else inbox()


def engine_transfer(vllm_config: Any) -> Any:
    """Return the transfer configuration that vLLM's scheduler goes by.

    Of several connectors in one each is shown its own, and the scheduler reads role and failure policy of the whole
    (``MultiConnector``, 0.24 to 0.32). To be called while the connector is constructed, or by it.
    """
    several = caller_with("_connectors", "_vllm_config")
    return (vllm_config if several is None else several._vllm_config).kv_transfer_config  # noqa: SLF001 - see above


def waker() -> Callable[[], None] | None:
    """Return what makes an idle engine core turn its loop once, from any thread; None where there is no such thing.

    An idle core sleeps in its input queue and asks no connector anything. ``WAKEUP`` is what its own signal handler puts there
    (0.26 to 0.32, v1/engine/core.py). To be called while the connector is constructed.
    """
    found = inbox()
    try:
        from vllm.v1.engine import EngineCoreRequestType
    except ImportError:
        return None
    word = getattr(EngineCoreRequestType, "WAKEUP", None)
    if found is None or word is None:
        return None
    return lambda: found.put_nowait((word, None))


def reservations() -> Callable[[], int] | None:
    """Return what says how many blocks the scheduler keeps free for prompts that it has begun; None where that is unknown.

    A load is admitted only beside them (0.26 to 0.32, v1/core/sched/scheduler.py ``_inflight_prefill_reserved_blocks``), and the
    watermark, if any. To be called while the block pool is handed over.
    """
    scheduler = caller_with("_inflight_prefill_reserved_blocks", "kv_cache_manager")
    if scheduler is None:
        return None
    watermark = getattr(scheduler.kv_cache_manager, "watermark_blocks", 0)
    reserved = scheduler._inflight_prefill_reserved_blocks  # noqa: SLF001 - see above
    return lambda: int(reserved()) + int(watermark)


def reporter() -> Callable[[Any], None] | None:
    """Return what takes workers' news of finished transfers into the scheduler; None where there is no such thing.

    The scheduler calls it with what its workers told (0.24 to 0.32, v1/core/sched/scheduler.py
    ``_update_from_kv_xfer_finished``). To be called while the block pool is handed over.
    """
    scheduler = caller_with("_update_from_kv_xfer_finished", "finished_recving_kv_req_ids")
    return None if scheduler is None else scheduler._update_from_kv_xfer_finished  # noqa: SLF001 - see above

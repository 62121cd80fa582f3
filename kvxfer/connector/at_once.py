"""What ends the sleep of an engine that waits for KV is told to its scheduler in the very step that slept.

Under asynchronous scheduling vLLM takes a step's results in only after the next one, which has nothing to compute and is
followed by its sleep of 1 ms. It takes both halves in one process, as where an engine has one worker and no executor of
processes; elsewhere the news takes its usual way.

Nothing else is told so, and nobody hears of it twice: a load that failed, and what a source has done, wait for ``get_finished``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kvxfer.connector import compat, private

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from kvxfer.connector.worker import WorkerHalf

_here: WeakValueDictionary[str, WorkerHalf] = WeakValueDictionary()
"""The worker halves of this process, by their engine."""


def is_here(worker: WorkerHalf) -> None:
    """Let the scheduler half of the same engine find it, if it lives in this process."""
    _here[worker.me.engine] = worker


class AtOnce:
    """The scheduler half's side."""

    def __init__(self, vllm_config: Any, engine: str) -> None:
        parallel = vllm_config.parallel_config
        self._engine = engine if parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1 else None
        self._report: Callable[[Any], None] | None = None

    def bind(self) -> None:
        """Find vLLM's scheduler, while it hands its block pool over."""
        self._report = None if self._engine is None else private.reporter()

    def deliver(self, waiting: Container[str]) -> None:
        """Report the loads that have succeeded, of the requests that wait for one. In the engine core's own thread."""
        if self._report is None or self._engine is None or (worker := _here.get(self._engine)) is None:
            return
        if received := worker.take_whole_loads(waiting):
            self._report(compat.received(received))

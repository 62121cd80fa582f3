"""When work on a Neuron device has finished, as far as that can be known.

What is known, and from where:

* The runtime queues work and returns (libnrt's explicit asynchronous API: NRT_QUEUE_FULL,
  NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS). It tells the number of the last *completed* request (nrta_get_sequence), never that
  of the last one scheduled, and no tensor of torch's leads to the request that writes it. So libnrt alone gives no fence.
* TorchNeuron has events. ``torch.neuron.Event.record`` passes at once on an idle stream, and otherwise queues a signal behind
  the stream's work; the signal is set when all before it has completed, and ``query`` reads one atomic (torch-neuronx,
  csrc/core: NeuronEvent.cpp, StreamImpl.cpp, OperationExecutionEngine.cpp; read, not run). Events there do not measure time;
  kvxfer does not ask them to.
* libtorch-neuronx-lite, which vllm-neuron uses, has none: ``torch.neuron`` is ``current_device`` and ``is_available``, and the
  way to wait is to read an output back (foxl-ai/kiln, docs/neuron-notes.md, measured with SDK 2.32). A read waits for the graphs
  that write the tensor.

So there are two kinds of fences. ``Events`` where there are events. ``ReadBack`` where there are none: a thread of its own reads
one element of every tensor of the cache to the host, and lets those fences pass that were recorded before it began. It passes
late, never early, *provided that* a read waits for every graph that was launched before it and writes the tensor in place. That
this holds of a KV cache, which vllm-neuron's graphs write as an aliased output, is inferred and has not been run:
docs/neuron.md has the experiment.

Recording costs microseconds in either, and waits for nothing.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvxfer.errors import ConfigError, PlatformError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvxfer.platform import Fence

VARIABLE: Final = "KVXFER_NEURON_FENCE"

logger = logging.getLogger("kvxfer.neuron")


class Fences(Protocol):
    """A way of recording fences."""

    def fence(self) -> Fence:
        """Record one behind all that the calling thread has launched."""


class _Passed:
    """Nothing was launched that a fence could be behind."""

    __slots__ = ()

    def done(self) -> bool:
        return True


PASSED: Final = _Passed()


class EventFence:
    """A recorded event of TorchNeuron's."""

    __slots__ = ("_event", "_passed")

    def __init__(self, event: Any) -> None:
        self._event = event
        self._passed = False

    def done(self) -> bool:
        """Ask the event. Once passed it is not asked again."""
        if not self._passed and self._event.query():
            self._passed, self._event = True, None
        return self._passed


class Events:
    """Records events on the calling thread's current stream."""

    def __init__(self, neuron: Any) -> None:
        self._neuron = neuron

    def fence(self) -> Fence:
        """Record an event. One that were not recorded would pass at once, so it is recorded before it can be asked."""
        event = self._neuron.Event()
        event.record()
        return EventFence(event)


class ReadFence:
    """Passes when a read that began after it was recorded has come back."""

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed = False

    def done(self) -> bool:
        """Tell whether it has passed."""
        return self._passed

    def passed(self) -> None:
        """Let it pass: the reading thread calls this."""
        self._passed = True


class ReadBack:
    """Reads one element of every tensor, in a thread, for all fences that wait.

    One pass serves every fence that was recorded before it began, so that reads never queue up behind each other. A read that
    fails ends it: no fence passes any more, and recording one raises PlatformError with the cause.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._elements = [tensor[(0,) * len(tensor.shape)] for tensor in storages.values()]
        self._waiting: queue.SimpleQueue[ReadFence] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def fence(self) -> Fence:
        """Record a fence: the thread reads after this."""
        if self._failure is not None:
            raise PlatformError(
                f"reading the KV cache back from the Neuron device failed, and with it all knowledge of when work has "
                f"finished: {self._failure!r}. The device or its runtime is gone: start the engine again"
            ) from self._failure
        fence = ReadFence()
        self._waiting.put(fence)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvxfer-neuron-fence", daemon=True)
            self._thread.start()
        return fence

    def _run(self) -> None:
        while True:
            fences = [self._waiting.get()]
            while not self._waiting.empty():
                fences.append(self._waiting.get())
            try:
                for element in self._elements:
                    element.cpu()
            except BaseException as failure:
                self._failure = failure  # whatever it is, no fence may pass after it
                logger.exception("reading the KV cache back failed: no fence passes any more")
                return
            for fence in fences:
                fence.passed()


def choose(environment: Mapping[str, str], tensors: Iterable[Any]) -> Fences:
    """Choose how fences are recorded for a cache: ``events``, ``readback``, or by default whichever there is, events first."""
    said = environment.get(VARIABLE, "").strip() or "auto"
    if said not in ("auto", "events", "readback"):
        raise ConfigError(f"{VARIABLE}={said!r} must be auto, events or readback")
    neuron = getattr(sys.modules.get("torch"), "neuron", None)
    event = getattr(neuron, "Event", None)
    if event is not None and all(hasattr(event(), name) for name in ("record", "query")):
        if said != "readback":
            return Events(neuron)
    elif said == "events":
        raise PlatformError(
            f"{VARIABLE}=events, and this torch has no torch.neuron.Event: libtorch-neuronx-lite has none; set readback, or run "
            "TorchNeuron"
        )
    return ReadBack(tensors)

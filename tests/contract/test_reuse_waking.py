"""A decode engine that retains conversations sleeps when it is idle, and is woken when somebody asks. Steps are counted.

Its engine core turns as vLLM's does (0.29, v1/engine/core.py ``run_busy_loop``), and sleeps in the queue that vLLM's sleeps in.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.engine import EngineCoreRequestType

from kvxfer.bench import model
from kvxfer.transport.twin import TwinFabric
from tests.support.engine import SimEngine, expected

pytestmark = pytest.mark.contract

BLOCK = 16
ENDED = object()


class Core:
    """An engine core in a thread of its own. What is put into its queue is what vLLM's takes, or a call."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.woken = 0
        self.engine = SimEngine(*args, **settings)
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def ask(self, act) -> None:
        self.input_queue.put_nowait(act)

    def close(self) -> None:
        self.ask(ENDED)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.engine.close()

    def _loop(self) -> None:
        while True:
            while not self.engine.busy:
                if self._take(self.input_queue.get()):
                    return
            while not self.input_queue.empty():
                if self._take(self.input_queue.get_nowait()):
                    return
            self.engine.step()
            time.sleep(0.001)

    def _take(self, item: Any) -> bool:
        if item == (EngineCoreRequestType.WAKEUP, None):
            self.woken += 1
        elif item is not ENDED:
            item()
        return item is ENDED


@pytest.fixture
def cores():
    made = []
    tiny, fabric = str(model.build()), TwinFabric()
    shared = {"block_size": BLOCK, "num_blocks": 128, "bidirectional_kv_xfer": True}

    def make(name: str, **settings: Any) -> Core:
        made.append(Core(name, fabric, tiny, **{**shared, **settings}))
        return made[-1]

    yield make
    for core in made:
        core.close()


def until(holds, what: str) -> None:
    end = time.monotonic() + 40
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def still(core: Core) -> int:
    """Return the steps of a core that makes none any more."""
    seen = -1
    while seen != core.engine.steps:
        seen = core.engine.steps
        time.sleep(0.3)
    return seen


def test_an_idle_engine_sleeps_with_what_it_retains_and_answers_when_it_is_asked(cores) -> None:
    d = cores("d", role="kv_consumer", decoder_kv_idle_ttl=3.0)
    p = cores("p", role="kv_producer", policy="recompute", prefix_caching=False)
    history = [seed % 499 + 1 for seed in range(150)]
    d.ask(lambda: d.engine.add("first", history, None, max_tokens=20))
    until(lambda: "first" in d.engine.finish_reasons, "decode does not answer")
    before = still(d)
    assert not d.woken
    history += [*d.engine.outputs["first"], *range(1, 20)]
    port = d.engine.scheduler.connector._scheduler.control.port
    where = {"reuse_engine_id": "d", "reuse_host": "127.0.0.1", "reuse_port": port}
    p.ask(lambda: p.engine.add("next", history, where, max_tokens=3))
    until(lambda: "next" in p.engine.finish_reasons, "prefill does not come to an end")
    assert p.engine.outputs["next"] == expected(history, 3)
    assert p.engine.scheduler.connector._scheduler._reuse.counters["reuse_fetched_tokens"] == 169 // BLOCK * BLOCK
    retained = d.engine.scheduler.connector._scheduler._reuse._retains
    until(lambda: retained.pinned == 0, "what was read is not let go of")
    assert d.woken
    after = still(d)
    assert after - before <= 2 * d.woken, "it goes on stepping although nobody asks"


def test_a_lease_that_nobody_ends_wakes_the_engine_once_to_be_ended(cores) -> None:
    d = cores("d", role="kv_consumer", decoder_kv_idle_ttl=2.1)
    p = cores("p", role="kv_producer", policy="recompute", prefix_caching=False)
    history = [seed % 499 + 1 for seed in range(150)]
    d.ask(lambda: d.engine.add("first", history, None, max_tokens=20))
    until(lambda: "first" in d.engine.finish_reasons, "decode does not answer")
    retained = d.engine.scheduler.connector._scheduler._reuse._retains
    retained.release = lambda frm, handoff: None
    p.engine.scheduler.connector._scheduler._reuse._takes.on_round = lambda now: None
    history += [*d.engine.outputs["first"], *range(1, 20)]
    port = d.engine.scheduler.connector._scheduler.control.port
    where = {"reuse_engine_id": "d", "reuse_host": "127.0.0.1", "reuse_port": port}
    p.ask(lambda: p.engine.add("next", history, where, max_tokens=3))
    until(lambda: "next" in p.engine.finish_reasons, "prefill does not come to an end")
    assert retained.pinned > 0
    until(lambda: retained.pinned == 0, "its time is over, and it is still pinned")
    still(d)

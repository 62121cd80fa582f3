"""A prompt that is pushed while it is computed, by vLLM's real scheduler and hooks: behind each chunk's fence, and not before.

The engines' work is late, as on an accelerator: what a step computes is there some time after the hooks have returned. Without the
fence behind it, the mover would write what is not there yet; the last test proves that such an engine is found out.
"""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.transport import steps
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.support.engine import SimEngine, expected

pytestmark = pytest.mark.contract

CHUNK, LENGTH, BLOCK = 64, 600, 16
LATE = 0.1
"""Seconds after which a step's work is there."""


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


class Push:
    """One prompt through a pair."""

    def __init__(self, tiny: str, runner: str) -> None:
        fabric = TwinFabric(Faults(delay=(0.0, 0.002)))
        late = HostPlatform(fence_delay=LATE)
        blocks = 2 * -(-LENGTH // BLOCK) + 8  # half of them may be pinned, and so written while prefill computes
        settings = {"runner": runner, "block_size": BLOCK, "num_blocks": blocks}
        self.p = SimEngine("p", fabric, tiny, budget=CHUNK, platform=late, **settings)
        self.d = SimEngine("d", fabric, tiny, **settings)
        rng = random.Random(7)
        self.prompt = [rng.randrange(1, 500) for _ in range(LENGTH)]

    def run(self, *, pace: bool = False) -> None:
        """Serve the prompt. ``pace``: prefill makes a step only when all blocks have arrived that it has filled so far."""
        self.d.add("d", self.prompt, self._decode_leg(), max_tokens=4)
        self.d.step()
        self.p.add("p", self.prompt, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"})
        deadline = time.monotonic() + 60.0
        while self.p.busy or self.d.busy:
            assert time.monotonic() < deadline
            if not pace or self._arrived():
                self.p.step()
            self.d.step()
            time.sleep(0.0005)

    def _arrived(self) -> bool:
        request = self.p.scheduler.requests.get("p")
        if request is None or not 0 < request.num_computed_tokens < LENGTH:
            return True
        filled = request.num_computed_tokens // BLOCK * self.p.worker._worker._threads.mover.cache.block_bytes
        record = self.record()  # the mover may not have come to it yet
        return record is not None and record.completed_by(time.monotonic()) >= filled

    def _decode_leg(self) -> dict:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
            "remote_port": self.p.scheduler.connector._scheduler.control.port,
            "tp_size": 1,
            "transfer_id": "t",
        }

    def record(self):
        """Return the source's record of the handoff; None before there is one."""
        mover = self.p.worker._worker._threads.mover
        return next((record for record in mover.records.last(10) if record.side == "source"), None)

    def close(self) -> None:
        for engine in (self.p, self.d):
            engine.close()


@pytest.fixture(params=["v1", "v2"])
def push(request, tiny):
    made = Push(tiny, request.param)
    yield made
    made.close()


def test_what_a_chunk_has_filled_arrives_before_the_next_is_computed(push) -> None:
    """Prefill waits for it here, and would wait for ever if it came with the prompt's end. Almost all is there by then."""
    push.run(pace=True)
    assert push.d.outputs["d"] == expected(push.prompt, 4)
    assert push.p.problems == push.d.problems == []
    record = push.record()
    last = record.times.chunks_final[-1]
    assert len(record.times.chunks_final) == -(-LENGTH // CHUNK)
    assert record.completed[-1][1] == record.bytes
    assert 0.8 * record.bytes <= record.completed_by(last) < record.bytes


def test_without_the_fence_behind_a_chunk_wrong_bytes_are_found(push, monkeypatch) -> None:
    class Passed:
        def done(self) -> bool:
            return True

    end = steps.Steps.end
    monkeypatch.setattr(steps.Steps, "end", lambda self, _fence: end(self, Passed()))
    push.run()
    wrong = [problem for problem in push.d.problems if "is not its own KV" in problem]
    assert wrong, "decode attended to KV that prefill had not computed yet, and nobody noticed"
    assert push.p.problems == [], "prefill's own work is in order"

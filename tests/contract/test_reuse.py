"""Conversations that prefill takes back from decode, by vLLM's real schedulers and pools, over the in-memory twin.

What is computed from KV that is not its own shows at once (``tests/support/engine``); how much was computed, and how much
fetched, is read off the schedulers' outputs and our records.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.connector import private
from kvxfer.transport.twin import Faults, TwinFabric
from tests.support.engine import SimEngine, expected

pytestmark = pytest.mark.contract

BLOCK = 16


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


class Pair:
    """Prefill and decode, and a router's part: both legs at once in push, one after the other in pull."""

    def __init__(self, tiny: str, mode: str = "push", faults: Faults | None = None, **settings: Any) -> None:
        fabric = TwinFabric(faults or Faults(delay=(0.0, 0.002)))
        self.fabric, self.mode, self.tiny = fabric, mode, tiny
        shared = {"mode": mode, "block_size": BLOCK, "num_blocks": 128, "bidirectional_kv_xfer": True, **settings}
        prefill = {"prefix_caching": False, "policy": "recompute", "role": "kv_producer", "runner": "v2"}
        decode = {"role": "kv_consumer", "prefix_caching": True, "runner": "v1"}
        only = {key: shared.pop(key) for key in list(shared) if key.startswith(("p_", "d_"))}
        prefill |= {key[2:]: value for key, value in only.items() if key.startswith("p_")}
        decode |= {key[2:]: value for key, value in only.items() if key.startswith("d_")}
        self.p = SimEngine("p", fabric, tiny, **{**shared, **prefill})
        self.d = SimEngine("d", fabric, tiny, **{**shared, **decode})
        self.computed: dict[str, int] = {}
        self._count(self.p)
        self.names = (f"r{i}" for i in itertools.count())

    def _count(self, engine: SimEngine) -> None:
        """Count the positions that an engine computes of each request."""
        execute = engine._execute

        def counted(scheduled: Any) -> Any:
            for request, tokens in scheduled.num_scheduled_tokens.items():
                self.computed[request] = self.computed.get(request, 0) + tokens
            return execute(scheduled)

        engine._execute = counted

    def turn(self, tokens: list[int], count: int = 20, *, reuse: bool = True, salt: str | None = None) -> list[int]:
        name = self.begin(tokens, count, reuse=reuse, salt=salt)
        self.settle()
        assert self.p.problems == self.d.problems == []
        return self.d.outputs[f"{name}-d"]

    def begin(self, tokens: list[int], count: int = 20, *, reuse: bool = True, salt: str | None = None) -> str:
        """Send both legs."""
        name = next(self.names)
        first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        if reuse:
            first |= {
                "reuse_engine_id": "d",
                "reuse_host": "127.0.0.1",
                "reuse_port": self.d.scheduler.connector._scheduler.control.port,
            }
        second = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
            "remote_port": self.p.scheduler.connector._scheduler.control.port,
        }
        self.p.add(f"{name}-p", tokens, first, salt=salt)
        if self.mode == "pull":
            self.run(lambda: f"{name}-p" in self.p.finish_reasons)
        self.d.add(f"{name}-d", tokens, second, max_tokens=count, salt=salt)
        return name

    def settle(self) -> None:
        self.run(lambda: not (self.p.busy or self.d.busy))

    def run(self, over) -> None:
        deadline = time.monotonic() + 40.0
        while not over():
            assert time.monotonic() < deadline, "the engines do not come to an end"
            self.step()

    def step(self) -> None:
        self.p.step()
        self.d.step()
        time.sleep(0.0005)

    def counters(self, engine: SimEngine) -> dict[str, int]:
        return engine.scheduler.connector._scheduler._reuse.counters

    def fetched(self) -> int:
        return self.counters(self.p)["reuse_fetched_tokens"]

    def close(self) -> None:
        for engine in (self.p, self.d):
            engine.close()


@pytest.fixture
def pair(tiny, monkeypatch):
    """Make pairs. Their engines can be woken: they are stepped all the time, and step when there is something to do."""
    made = []
    monkeypatch.setattr(private, "waker", lambda: lambda: None)

    def make(*args: Any, **settings: Any) -> Pair:
        made.append(Pair(tiny, *args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 500) for _ in range(count)]


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("caching", [False, True], ids=["p-forgets", "p-caches"])
def test_a_conversation_of_six_turns(pair, mode, caching) -> None:
    both = pair(mode, p_prefix_caching=caching)
    history: list[int] = []
    for turn in range(6):
        history += tokens(70, turn)
        before, known = both.fetched(), (len(history) - 70) // BLOCK * BLOCK if turn else 0
        answer = both.turn(history)
        assert answer == expected(history, 20), turn
        computed, fetched = both.computed[f"r{turn}-p"], both.fetched() - before
        if not caching:
            # Of the last answer's last token there is no KV.
            assert fetched in (known, (len(history) - 71) // BLOCK * BLOCK if turn else 0)
            assert computed == len(history) - fetched
        assert computed <= 70 + BLOCK + 64 if turn else computed == len(history)
        history += answer
    assert both.counters(both.d)["reuse_pinned"] == 0
    assert both.p.usage == both.d.usage == 0

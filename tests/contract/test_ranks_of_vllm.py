"""Engines of several ranks under vLLM's real scheduler, runner hooks and output aggregator: who reports what, and what vLLM makes of it."""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.transport.twin import Faults, TwinAgent, TwinFabric
from tests.support.engine import SimEngine, expected

pytestmark = pytest.mark.contract

HEADS = 2


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


@pytest.fixture
def pair(tiny):
    made: list[SimEngine] = []

    def make(sizes: tuple[int, int], **options) -> tuple[SimEngine, SimEngine]:
        fabric = TwinFabric(Faults(delay=(0.0, 0.003)))
        for name, size in zip("pd", sizes, strict=True):
            made.append(SimEngine(name, fabric, tiny, tp=size, heads=HEADS, **options))
        return made[0], made[1]

    yield make
    for engine in made:
        engine.close()


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(1, 500) for _ in range(length)] for length in lengths]


def serve(p: SimEngine, d: SimEngine, tokens: list[list[int]], **decode) -> None:
    port = p.scheduler.connector._scheduler.control.port
    for number, prompt in enumerate(tokens):
        leg = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
        }
        leg |= {"remote_port": port, "tp_size": len(p.ranks), "transfer_id": f"t{number}"}
        d.add(f"d{number}", prompt, leg, max_tokens=4, **decode)
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"t{number}"}
        p.add(f"p{number}", prompt, params)
    deadline = time.monotonic() + 60.0
    while p.busy or d.busy:
        assert time.monotonic() < deadline, f"p: {p.scheduler.requests.keys()}, d: {d.scheduler.requests.keys()}"
        p.step()
        d.step()
        time.sleep(0.0005)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_every_rank_attends_to_its_own_heads(pair, mode, sizes, runner) -> None:
    p, d = pair(sizes, mode=mode, runner=runner)
    tokens = prompts(2, 17, 64, 150, 33)
    serve(p, d, tokens)
    assert [d.outputs[f"d{number}"] for number in range(5)] == [expected(prompt, 4) for prompt in tokens]
    assert p.problems == d.problems == []
    assert p.usage == d.usage == 0
    outcomes = {one.outcome for rank in d.ranks for one in rank.worker._worker._threads.mover.records.last(10)}
    assert outcomes == {"done"}, "nothing was computed again"


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_load_that_fails_on_one_rank_is_computed_again_on_all(pair, mode, monkeypatch) -> None:
    """The ranks end at different times, and vLLM has the blocks back when the last has."""
    p, d = pair((1, 2), mode=mode, policy="recompute")
    (failing,) = [rank.worker._worker.me.agent for rank in d.ranks[1:]]
    post = TwinAgent.post

    def refuse(self, operation, local, remote, memory, peer, notification=b""):
        if failing in (peer, self.name):
            raise OSError("no way")
        return post(self, operation, local, remote, memory, peer, notification)

    monkeypatch.setattr(TwinAgent, "post", refuse)
    tokens = prompts(150, 40)
    serve(p, d, tokens)
    assert [d.outputs[f"d{number}"] for number in range(2)] == [expected(prompt, 4) for prompt in tokens]
    assert p.problems == d.problems == []
    assert p.usage == d.usage == 0
    ends = [{one.outcome for one in rank.worker._worker._threads.mover.records.last(10)} for rank in d.ranks]
    assert ends == [{"done"}, {"failed"}]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_decode_request_that_is_aborted_ends_on_every_rank(pair, mode) -> None:
    p, d = pair((2, 2), mode=mode)
    (prompt,) = prompts(100)
    leg = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_host": "127.0.0.1"}
    leg |= {"remote_port": p.scheduler.connector._scheduler.control.port, "tp_size": 2, "transfer_id": "t"}
    d.add("d", prompt, leg, max_tokens=4)
    d.step()
    p.add("p", prompt, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"})
    p.step()
    d.abort("d")
    deadline = time.monotonic() + 30.0
    while p.busy or d.busy or p.usage or d.usage:
        assert time.monotonic() < deadline
        p.step()
        d.step()
        time.sleep(0.001)
    assert p.problems == d.problems == []

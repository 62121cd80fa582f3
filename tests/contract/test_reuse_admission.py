"""A request that is put off must not stop the engine: the dead-lock that vLLM before 0.32 runs into, and how it is avoided.

A asks and is told "later". B, behind it, is loaded: it holds its blocks, and its KV arrives. If A then does not fit, vLLM stops
scanning at A, B is never let on, and nothing ever frees anything.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.connector import private
from kvxfer.connector.taking_back import TakingBack
from tests.contract.test_reuse import BLOCK, Pair, tokens
from tests.support.engine import expected

pytestmark = pytest.mark.contract


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


@pytest.fixture
def pair(tiny, monkeypatch):
    monkeypatch.setattr(private, "waker", lambda: lambda: None)
    # Either of the two fits, both do not.
    made = Pair(tiny, num_blocks=30, d_num_blocks=128, p_budget=256, reuse_timeout=30.0, reuse_pin_limit=0.5)
    yield made
    made.close()


def collide(both: Pair, monkeypatch, patience: float) -> tuple[list[int], list[int], bool]:
    """A waits for its answer while B, behind it, is answered and loads. Returns both prompts, and whether all came to an end."""
    prompts = [tokens(17 * BLOCK, 1), tokens(17 * BLOCK, 2)]
    for at, prompt in enumerate(prompts):
        prompts[at] = [*prompt, *both.turn(prompt, 4), *tokens(2 * BLOCK, 3)]
    retained = both.d.scheduler.connector._scheduler._reuse._retains
    withheld: list = []
    ask = retained.ask

    def first_later(frm, message) -> None:
        if not withheld and message.chain:
            withheld.append((frm, message))
        else:
            ask(frm, message)

    monkeypatch.setattr(retained, "ask", first_later)
    takes = both.p.scheduler.connector._scheduler._reuse._takes
    port = both.d.scheduler.connector._scheduler.control.port
    where = {"reuse_engine_id": "d", "reuse_host": "127.0.0.1", "reuse_port": port}
    both.p.add("a", prompts[0], where, max_tokens=2)
    both.run(lambda: withheld)
    both.p.add("b", prompts[1], where, max_tokens=2)
    both.run(lambda: "b" in takes._loading)
    ask(*withheld[0])
    deadline = time.monotonic() + patience
    while len(both.p.finish_reasons) < 4:
        if time.monotonic() > deadline:
            return *prompts, False
        both.step()
    return *prompts, True


def test_a_request_that_was_put_off_lets_a_load_behind_it_through(pair, monkeypatch) -> None:
    a, b, ended = collide(pair, monkeypatch, 30.0)
    assert ended
    assert pair.p.outputs["a"] == expected(a, 2)
    assert pair.p.outputs["b"] == expected(b, 2)
    assert pair.p.problems == []
    assert pair.fetched() == 2 * 17 * BLOCK
    assert pair.p.usage == 0


def test_without_the_admission_the_engine_stands_still(pair, monkeypatch) -> None:
    monkeypatch.setattr(TakingBack, "_fits", lambda self, request: True)
    *_, ended = collide(pair, monkeypatch, 4.0)
    if hasattr(pair.p.scheduler, "kv_holding_waiting"):
        pytest.skip("this vLLM never lets a holder of blocks stand behind another")
    assert not ended

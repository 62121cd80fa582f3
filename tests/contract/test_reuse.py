"""Conversations that prefill takes back from decode, by vLLM's real schedulers and pools, over the in-memory twin.

What is computed from KV that is not its own shows at once (``tests/support/engine``); how much was computed, and how much
fetched, is read off the schedulers' outputs and our records.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.connector import private
from kvxfer.errors import ConfigError
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

    def turn(self, tokens: list[int], count: int = 20, *, reuse: bool = True, **shaping: Any) -> list[int]:
        name = self.begin(tokens, count, reuse=reuse, **shaping)
        self.settle()
        assert self.p.problems == self.d.problems == []
        return self.d.outputs[f"{name}-d"]

    def begin(self, tokens: list[int], count: int = 20, *, reuse: bool = True, **shaping: Any) -> str:
        """Send both legs. ``shaping``: a salt, or multimodal features."""
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
        self.p.add(f"{name}-p", tokens, first, **shaping)
        if self.mode == "pull":
            self.run(lambda: f"{name}-p" in self.p.finish_reasons)
        self.d.add(f"{name}-d", tokens, second, max_tokens=count, **shaping)
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


# --- histories that are not simply continued --------------------------------------------------------------------------


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_what_is_rewritten_truncated_or_branched_reuses_exactly_what_it_shares(pair, mode) -> None:
    both = pair(mode)
    first = tokens(200, 1)
    answer = both.turn(first)
    known = [*first, *answer][:-1]  # of the last answer's last token there is no KV
    rewritten = [*first[:100], (first[100] + 1) % 500 or 1, *first[101:], *answer, *tokens(40, 2)]
    truncated = [*first[:150], *tokens(40, 3)]
    branches = [[*first, *answer, *tokens(50, seed)] for seed in (4, 5)]
    system = [(first[0] + 1) % 500 or 1, *first[1:], *answer, *tokens(30, 6)]
    for name, prompt in (
        ("rewritten", rewritten),
        ("truncated", truncated),
        ("one branch", branches[0]),
        ("another branch", branches[1]),
        ("a changed system prompt", system),
    ):
        before = both.fetched()
        assert both.turn(prompt, 8) == expected(prompt, 8), name
        same = shared(known, prompt) // BLOCK * BLOCK
        wanted = same if same >= 64 else 0
        assert both.fetched() - before == wanted, name
    assert both.counters(both.d)["reuse_pinned"] == 0


def test_the_same_tokens_under_another_salt_are_another_conversation(pair) -> None:
    both = pair()
    history = tokens(150, 1)
    history += both.turn(history, salt="one tenant")
    history += tokens(20, 2)
    both.turn(history, 4, salt="another")
    both.turn(history, 4)
    assert both.fetched() == 0
    assert both.counters(both.p)["reuse_declined_not_held"] > 0
    both.turn(history, 4, salt="one tenant")
    assert both.fetched() > 0


def test_the_same_turn_twice_at_once_and_two_conversations_beside_it(pair) -> None:
    both = pair(num_blocks=256)
    histories = [tokens(120, seed) for seed in (1, 2)]
    histories = [history + both.turn(history) + tokens(30, 3) for history in histories]
    names = [both.begin(history, 12) for history in (histories[0], histories[0], histories[1])]
    both.settle()
    for name, history in zip(names, (histories[0], histories[0], histories[1]), strict=True):
        assert both.d.outputs[f"{name}-d"] == expected(history, 12)
    assert both.p.problems == both.d.problems == []
    assert both.fetched() == 3 * (139 // BLOCK * BLOCK)
    assert both.p.usage == both.d.usage == 0


def test_the_same_turn_again_and_a_prompt_that_is_all_there(pair) -> None:
    """vLLM must compute something: the last block is not fetched when nothing comes behind it."""
    both = pair()
    history = tokens(8 * BLOCK, 1)
    for _ in range(2):
        assert both.turn(history, 5) == expected(history, 5)
    assert both.fetched() == 7 * BLOCK


def test_after_eviction_nothing_is_fetched_and_nothing_is_wrong(pair) -> None:
    both = pair(num_blocks=40)
    history = tokens(150, 1)
    history += both.turn(history)
    for seed in range(2, 6):
        both.turn(tokens(300, seed), 4)
    history += tokens(30, 7)
    assert both.turn(history, 8) == expected(history, 8)
    assert both.fetched() == 0
    assert both.counters(both.d)["reuse_not_held"] >= 1


def test_part_of_it_evicted_the_rest_is_fetched(pair) -> None:
    both = pair(num_blocks=32)
    history = tokens(150, 1)
    history += both.turn(history)
    both.turn(tokens(320, 2), 4)  # vLLM evicts the end of the oldest first
    history += tokens(30, 7)
    assert both.turn(history, 8) == expected(history, 8)
    assert 0 < both.fetched() < 150 // BLOCK * BLOCK
    assert both.counters(both.d)["reuse_pinned"] == 0


def test_decode_does_not_answer_and_prefill_computes_after_the_time_out(pair, monkeypatch) -> None:
    both = pair(reuse_timeout=0.3)
    history = tokens(150, 1)
    history += both.turn(history) + tokens(10, 2)
    retained = both.d.scheduler.connector._scheduler._reuse._retains
    monkeypatch.setattr(retained, "ask", lambda frm, message: None)
    assert both.turn(history, 4) == expected(history, 4)
    assert both.fetched() == 0
    assert both.counters(both.p)["reuse_declined_no_answer"] == len(history) // BLOCK * BLOCK


def test_an_answer_that_comes_too_late_is_let_go_of(pair, monkeypatch) -> None:
    both = pair(reuse_timeout=0.2)
    history = tokens(150, 1)
    history += both.turn(history) + tokens(10, 2)
    asked = []
    retained = both.d.scheduler.connector._scheduler._reuse._retains
    ask = retained.ask
    monkeypatch.setattr(retained, "ask", lambda frm, message: asked.append((frm, message)))
    name = both.begin(history, 4)
    both.run(lambda: "reuse_declined_no_answer" in both.counters(both.p))
    (late,) = asked
    ask(*late)
    both.settle()
    assert both.d.outputs[f"{name}-d"] == expected(history, 4)
    assert both.counters(both.d)["reuse_granted_tokens"] > 0
    assert both.fetched() == 0
    both.run(lambda: both.counters(both.d)["reuse_pinned"] == 0)


def test_a_decode_engine_that_is_not_there(pair) -> None:
    both = pair()
    history = tokens(150, 1)
    first = {"do_remote_decode": False, "do_remote_prefill": False, "reuse_host": "127.0.0.1", "reuse_port": 9}
    both.p.add("plain", history, first, max_tokens=3)
    both.run(lambda: "plain" in both.p.finish_reasons)
    assert both.p.outputs["plain"] == expected(history, 3)
    assert any(name.startswith("reuse_declined_no") for name in both.counters(both.p))


def test_a_plain_request_takes_back_too(pair) -> None:
    both = pair()
    history = tokens(150, 1)
    history += both.turn(history) + tokens(10, 2)
    port = both.d.scheduler.connector._scheduler.control.port
    both.p.add("plain", history, {"reuse_engine_id": "d", "reuse_host": "127.0.0.1", "reuse_port": port}, max_tokens=3)
    both.run(lambda: "plain" in both.p.finish_reasons)
    assert both.p.outputs["plain"] == expected(history, 3)
    assert both.fetched() == 169 // BLOCK * BLOCK


@pytest.mark.parametrize("when", ["asked", "held", "reading"])
def test_a_client_that_goes_while_its_history_is_fetched(pair, when) -> None:
    """The load's report is the one that is owed; the handoff forward, whose prompt was never computed, fails at decode."""
    both = pair(faults=Faults(delay=(0.2, 0.3)), d_policy="recompute")
    history = tokens(150, 1)
    history += both.turn(history) + tokens(10, 2)
    name = both.begin(history, 3)
    takes = both.p.scheduler.connector._scheduler._reuse._takes
    state = {"asked": "ASKED", "held": "ASKED", "reading": "OPEN"}[when]
    both.run(lambda: takes._reuses[f"{name}-p"].state.name == state)
    if when == "held":
        both.d.step()
        time.sleep(0.2)
    both.p.abort(f"{name}-p")
    both.settle()
    assert both.p.problems == both.d.problems == []
    assert both.d.outputs[f"{name}-d"] == expected(history, 3)
    assert both.p.usage == both.d.usage == 0
    both.run(lambda: both.counters(both.d)["reuse_pinned"] == 0)
    assert both.turn(history, 3) == expected(history, 3), "and the next one is as ever"


def test_a_read_that_fails_is_computed(pair, monkeypatch) -> None:
    both = pair()
    history = tokens(150, 1)
    history += both.turn(history) + tokens(10, 2)
    mover = both.p.worker._worker._threads.mover
    read_done = mover.sink.read_done
    monkeypatch.setattr(
        mover.sink, "read_done", lambda number, now: read_done(number, now + 1e6)
    )  # after the lease's end
    assert both.turn(history, 6) == expected(history, 6)
    assert both.fetched() == 0
    assert both.counters(both.p)["reuse_recomputed_tokens"] == 169 // BLOCK * BLOCK


def test_only_the_difference_travels_forward(pair) -> None:
    both = pair()
    history = tokens(200, 1)
    history += both.turn(history) + tokens(60, 2)
    both.turn(history, 4)
    mover = both.p.worker._worker._threads.mover
    forward = [one for one in mover.records.last(10) if one.side == "source"]
    back = [one for one in mover.records.last(10) if one.side == "sink"]
    assert [one.mode for one in forward] == ["push", "push"]
    assert [one.mode for one in back] == ["pull"]
    assert back[0].tokens == 219 // BLOCK * BLOCK
    assert forward[1].tokens == len(history) - 1 - 219 // BLOCK * BLOCK


def test_a_decode_engine_that_has_it_off_says_so_at_once(pair, monkeypatch) -> None:
    both = pair(reuse_timeout=30.0)
    monkeypatch.setattr(both.d.scheduler.connector._scheduler, "_reuse", None)
    history = tokens(150, 1)
    history += both.turn(history) + tokens(10, 2)
    assert both.turn(history, 4) == expected(history, 4)
    assert both.fetched() == 0
    assert "reuse_declined_no_answer" not in both.counters(both.p)


@pytest.mark.parametrize("role", ["p", "d"])
def test_what_must_hold_is_checked_when_a_connector_is_made(tiny, role) -> None:
    mode, settings = {"p": ("kv_producer", {"policy": "fail"}), "d": ("kv_consumer", {"prefix_caching": False})}[role]
    before = threading.active_count()
    with pytest.raises(ConfigError, match="kv_load_failure_policy" if role == "p" else "--enable-prefix-caching"):
        SimEngine(role, TwinFabric(), tiny, role=mode, bidirectional_kv_xfer=True, **settings)
    assert threading.active_count() == before, "nothing was started that nobody would stop"
    gc.collect()  # or a socket that nobody closed waits here for ever

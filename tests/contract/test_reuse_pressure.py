"""A decode engine under pressure: what it retains costs its own requests nothing, no preemption and no step.

A cache for four sequences, fifty conversations of two turns, eight at a time: always more than fit. Prefill engines ask for the
conversations that are over all the while, and are slow readers. The same work is done without them, and compared step for step.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.connector import private
from kvxfer.connector.retained import Retained
from kvxfer.connector.shaping import chain_of
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Ask
from kvxfer.transport.twin import TwinFabric
from tests.contract.test_reuse import tokens
from tests.support.engine import SimEngine, expected

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

BLOCK, CONVERSATIONS, TURNS, FIRST, MORE, ANSWER, AT_ONCE = 16, 50, 2, 64, 40, 24, 8
LONGEST = FIRST + (TURNS - 1) * (MORE + ANSWER) + ANSWER
READS = 25
"""Steps for which a reader reads."""
READER = RankId("prefill", "i", -1)


class Decode:
    """A decode engine by itself, and what its readers do to it, all in one thread."""

    def __init__(self, tiny: str, *, asks: bool, blocks: int = 4 * -(-LONGEST // BLOCK) + 1) -> None:
        self.engine = SimEngine(
            "d", TwinFabric(), tiny, role="kv_consumer", num_blocks=blocks, block_size=BLOCK, bidirectional_kv_xfer=True
        )
        self.retained = self.engine.scheduler.connector._scheduler._reuse._retains
        self.retained._reply = self._heard
        self.asks = asks
        self.granted: list[int] = []
        self.reading: list[tuple[int, HandoffId]] = []
        self.over: list[list[int]] = []
        self.preempted = 0
        preempt = self.engine.scheduler._preempt_request

        def counted(*args, **kwargs):
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.engine.scheduler._preempt_request = counted

    def _heard(self, _reader: RankId, held) -> None:
        if held.tokens:
            self.granted.append(held.tokens)
            self.reading.append((self.engine.steps + READS, held.handoff))

    def ask(self, history: list[int]) -> None:
        request = type("Request", (), {"prompt_token_ids": history})()
        chain = chain_of(request, history, self.engine.config.model_config.model)
        self.retained.ask(READER, Ask(HandoffId(f"ask{self.engine.steps}"), 0, chain, 1.0))

    def step(self) -> None:
        steps = self.engine.steps
        while self.reading and self.reading[0][0] <= steps:
            self.retained.release(READER, self.reading.pop(0)[1])
        if self.asks and self.over and steps % 3 == 0:
            self.ask(self.over[(steps * 7) % len(self.over)])
        self.engine.step()

    def serve(self) -> tuple[int, int]:
        """Serve all conversations. Returns steps and preemptions."""
        histories = {number: tokens(FIRST, number) for number in range(CONVERSATIONS)}
        todo = [(turn, number) for turn in range(TURNS) for number in range(CONVERSATIONS)]
        running: dict[str, int] = {}
        while todo or running:
            while todo and len(running) < AT_ONCE and todo[0][1] not in running.values():
                turn, number = todo.pop(0)
                self.engine.add(f"{number}-{turn}", histories[number], None, max_tokens=ANSWER)
                running[f"{number}-{turn}"] = number
            self.step()
            for name in [name for name in running if name in self.engine.finish_reasons]:
                number, answer = running.pop(name), self.engine.outputs[name]
                assert answer == expected(histories[number], ANSWER)
                histories[number] = [*histories[number], *answer, *tokens(MORE, 1000 + number)]
                self.over.append(histories[number])
        assert self.engine.problems == []
        return self.engine.steps, self.preempted


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


@pytest.fixture
def decode(tiny, monkeypatch):
    made = []
    monkeypatch.setattr(private, "waker", lambda: lambda: None)

    def make(**settings) -> Decode:
        made.append(Decode(tiny, **settings))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def test_fifty_conversations_in_a_cache_for_four(decode) -> None:
    off, on = decode(asks=False), decode(asks=True)
    costs = off.serve()
    assert costs[1] > 0, "the cache is too large for this to show anything"
    assert on.serve() == costs
    assert on.retained.counters["reuse_asked"] > 100


def test_with_room_to_spare_readers_get_what_they_ask_for(decode) -> None:
    """So that the test above does not pass because nothing is ever granted."""
    off, on = (decode(asks=asks, blocks=16 * -(-LONGEST // BLOCK) + 1) for asks in (False, True))
    (steps, preempted), (before, _) = on.serve(), off.serve()
    assert preempted == 0
    assert steps <= before, "what is kept for a reader is cached for decode as well"
    assert len(on.granted) > 20


def test_without_the_headroom_it_costs_steps(decode, monkeypatch) -> None:
    off, on = decode(asks=False), decode(asks=True)
    monkeypatch.setattr(Retained, "_needed", lambda self, output: 0)
    assert on.serve()[0] > off.serve()[0]

"""What keeps a reader from taking foreign KV for a conversation's: each guard is taken away, and the wrong bytes are found.

Decode has a small cache, and is made to overwrite what it had of a conversation while prefill's READ of it is under way.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.connector import private, shaping
from kvxfer.connector.pins import Pins
from kvxfer.connector.retained import Retained
from kvxfer.protocol.sink import Sink
from kvxfer.transport.twin import Faults
from tests.contract.test_reuse import Pair, tokens
from tests.support.engine import expected

pytestmark = pytest.mark.contract


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


@pytest.fixture
def pair(tiny, monkeypatch):
    made = []
    monkeypatch.setattr(private, "waker", lambda: lambda: None)

    def make(delay: float = 0.5, **settings) -> Pair:
        made.append(Pair(tiny, faults=Faults(delay=(delay, delay)), num_blocks=40, reuse_pin_limit=0.5, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def overwritten_while_read(both: Pair) -> tuple[list[int], list[int]]:
    """Let prefill read back a conversation, and decode meanwhile compute as much else as its cache takes."""
    history = tokens(200, 1)
    both.fabric.faults = Faults(delay=(0.0, 0.0))
    history += both.turn(history) + tokens(20, 2)
    both.fabric.faults = Faults(delay=(0.5, 0.5))
    takes = both.p.scheduler.connector._scheduler._reuse._takes
    port = both.d.scheduler.connector._scheduler.control.port
    both.p.add("next", history, {"reuse_engine_id": "d", "reuse_host": "127.0.0.1", "reuse_port": port}, max_tokens=3)
    mover = both.p.worker._worker._threads.mover
    both.run(lambda: takes._loading and mover.transfers.in_flight)
    for number in range(3):
        both.d.add(f"other{number}", tokens(250, 10 + number), None, max_tokens=3)
    both.run(lambda: "next" in both.p.finish_reasons and all(f"other{n}" in both.d.finish_reasons for n in range(3)))
    return both.p.outputs["next"], expected(history, 3)


def test_what_is_read_is_pinned_until_it_has_been_read(pair) -> None:
    both = pair()
    answer, right = overwritten_while_read(both)
    assert answer == right
    assert both.p.problems == both.d.problems == []
    assert both.fetched() > 0
    both.run(lambda: both.counters(both.d)["reuse_pinned"] == 0)


def test_without_the_pin_foreign_kv_is_found(pair, monkeypatch) -> None:
    both = pair()
    monkeypatch.setattr(Pins, "pin", lambda self, name, blocks: True)
    overwritten_while_read(both)
    assert any("is not its own KV" in problem for problem in both.p.problems)


def test_a_pin_that_ends_before_the_lease_is_found(pair, monkeypatch) -> None:
    both = pair()
    grant = Retained._grant

    def short(self, *args):
        held = list(grant(self, *args))
        for lease in self._leases.values():
            lease.until = 0.0
        self._look_ahead()
        return held

    monkeypatch.setattr(Retained, "_grant", short)
    overwritten_while_read(both)
    assert any("is not its own KV" in problem for problem in both.p.problems)


@pytest.mark.parametrize("trusting", [False, True], ids=["with-the-lease", "without"])
def test_a_reader_that_is_too_slow_does_not_take_what_it_read_for_valid(pair, monkeypatch, trusting) -> None:
    both = pair(decoder_kv_idle_ttl=2.5, pull_lease=2.0)
    takes = both.p.scheduler.connector._scheduler._reuse._takes
    monkeypatch.setattr(takes, "on_round", lambda now: None)  # it does not ask for more time
    read_done = Sink.read_done
    monkeypatch.setattr(Sink, "failed", lambda self, frm, message: iter(()))  # nor hear that decode has let it go
    if trusting:
        monkeypatch.setattr(Sink, "read_done", lambda self, number, now: read_done(self, number, 0.0))
    history = tokens(200, 1)
    both.fabric.faults = Faults(delay=(0.0, 0.0))
    history += both.turn(history) + tokens(20, 2)
    both.fabric.faults = Faults(delay=(4.0, 4.0))
    port = both.d.scheduler.connector._scheduler.control.port
    both.p.add("next", history, {"reuse_engine_id": "d", "reuse_host": "127.0.0.1", "reuse_port": port}, max_tokens=3)
    mover = both.p.worker._worker._threads.mover
    both.run(lambda: takes._loading and mover.transfers.in_flight)
    until = time.monotonic() + 3.0
    both.run(lambda: time.monotonic() > until and both.counters(both.d)["reuse_pinned"] == 0)
    for number in range(3):
        both.d.add(f"other{number}", tokens(250, 10 + number), None, max_tokens=3)
    both.run(lambda: "next" in both.p.finish_reasons)
    if trusting:
        assert any("is not its own KV" in problem for problem in both.p.problems)
        return
    assert both.p.outputs["next"] == expected(history, 3)
    assert both.p.problems == []
    assert both.counters(both.p)["reuse_recomputed_tokens"] > 0


def test_with_a_seed_that_forgets_the_salt_another_tenants_kv_is_taken(pair, monkeypatch) -> None:
    both = pair(delay=0.0)
    monkeypatch.setattr(shaping, "seed", lambda *shapes: b"the same for all")
    history = tokens(150, 1)
    history += both.turn(history, salt="one tenant")
    both.turn(history + tokens(20, 2), 4, salt="another")
    assert both.fetched() > 0, (
        "test_the_same_tokens_under_another_salt_are_another_conversation would pass without the seed"
    )

"""How prefill renews what decode keeps for it, by itself: its control channel is a list of what was said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.config import Settings
from kvxfer.connector.taking_back import TakingBack
from kvxfer.layout.tables import Shape, Tables
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Ask, Held, Release
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.dialer import Outcome

DECODE = RankId("decode", "1", -1)
WHERE = EngineAddress("10.0.0.2", 5600, "decode", front=True)
LEASE = 9.0


class Control:
    def __init__(self) -> None:
        self.said: list[object] = []

    def call(self, act, *, wake: bool = True) -> None:
        act(0.0)

    def send(self, _to, message) -> None:
        self.said.append(message)

    def connect(self, _address) -> None:
        pass


@pytest.mark.parametrize("waited", [0.0, 2.0, 3.0, 5.0, 6.5])
def test_a_lease_is_renewed_in_time_however_long_its_request_has_waited(waited) -> None:
    """From the answer on, by which the lease counts, and not from the moment on in which there is room for the load."""
    control, name = Control(), HandoffId("reuse-1")
    taking = TakingBack(Settings(), Tables([Shape(16)]), "m", control, name=lambda: name)
    request = SimpleNamespace(request_id="r", prompt_token_ids=list(range(200)), num_prompt_tokens=200, num_tokens=200)
    taking.began(request, WHERE, 100.0)
    assert taking.matched(request, 0, 100.0) == (None, False)
    taking.on_outcome(Outcome(WHERE, (DECODE,), None))
    (asked,) = control.said
    assert isinstance(asked, Ask)
    taking.on_held(DECODE, Held(name, 192, 100.0, LEASE))
    assert taking.matched(request, 0, 100.0) == (192, True)
    opened = taking.allocated(request, [list(range(12))], 192, 100.0 + waited)
    assert opened is not None
    control.said.clear()
    rounds = [100.0 + waited + 0.25 * number for number in range(1, 60)]
    first = next(now for now in rounds if (taking.on_round(now), control.said)[1])
    assert control.said == [Ask(name, 0, b"", first)]
    assert first <= max(100.0 + LEASE / 3, 100.0 + waited) + 0.25, "the lease has lost more than a third of its time"


def held() -> tuple[Control, TakingBack, SimpleNamespace, HandoffId]:
    """A request for which decode holds what it asked for."""
    control, name = Control(), HandoffId("reuse-1")
    taking = TakingBack(Settings(kv_recompute_threshold="auto"), Tables([Shape(16)]), "m", control, name=lambda: name)
    request = SimpleNamespace(request_id="r", prompt_token_ids=list(range(200)), num_prompt_tokens=200, num_tokens=200)
    taking.began(request, WHERE, 100.0)
    taking.matched(request, 0, 100.0)
    taking.on_outcome(Outcome(WHERE, (DECODE,), None))
    taking.on_held(DECODE, Held(name, 192, 100.0, LEASE))
    assert taking.matched(request, 0, 100.0) == (192, True)
    control.said.clear()
    return control, taking, request, name


def test_an_answer_that_comes_twice_does_not_let_go_of_what_will_be_read() -> None:
    control, taking, request, name = held()
    taking.on_held(DECODE, Held(name, 192, 100.0, LEASE))
    assert control.said == [], "decode would give the blocks to others, and its ranks let them be read"
    taking.allocated(request, [list(range(12))], 192, 100.0)
    taking.on_held(DECODE, Held(name, 192, 100.0, LEASE))
    assert control.said == []
    taking.finished("r")
    taking.loaded(["r"], set(), 100.5)
    control.said.clear()
    taking.on_held(DECODE, Held(name, 192, 100.0, LEASE))
    assert control.said == [Release(name, "the answer came too late")]
    assert [len(some) for some in (taking._kept, taking._pending, taking._answers, taking._leases)] == [0, 0, 0, 0]


def test_of_a_load_that_was_given_up_nothing_is_counted_as_fetched() -> None:
    """Its workers report it as received, whatever came: nobody wants it."""
    _, taking, request, _ = held()
    taking.allocated(request, [list(range(12))], 192, 100.0)
    assert taking.finished("r")
    taking.loaded(["r"], set(), 100.001)
    assert taking.counters["reuse_fetched_tokens"] == taking.counters["reuse_recomputed_tokens"] == 0
    assert not taking._worth._peers, "and nothing is learnt of how fast that peer is"

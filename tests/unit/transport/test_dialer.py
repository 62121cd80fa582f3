"""Calls end once, with all ranks or with a reason that says what to change."""

from __future__ import annotations

import pytest

from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Directory, RankAddress
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.dialer import RETRY, Dialer

HERE = EngineAddress("10.0.0.1", 5600, "p")
R0, R1 = RankId("p", "i", 0), RankId("p", "i", 1)


class Wires:
    def __init__(self) -> None:
        self.asked: list[EngineAddress] = []
        self.greeted: list[tuple[RankId, str, int]] = []
        self.open: set[RankId] = set()

    def ask(self, address) -> None:
        self.asked.append(address)

    def greet(self, address, rank, host, port, now) -> None:
        self.greeted.append((rank, host, port))

    def is_open(self, rank) -> bool:
        return rank in self.open


@pytest.fixture
def wires() -> Wires:
    return Wires()


@pytest.fixture
def dialer(wires) -> Dialer:
    made = Dialer(wires, timeout=5.0)
    made.call(HERE, 0.0)
    return made


def directory(*hosts: str, ready: bool = True, engine: str = "p") -> Directory:
    ranks = tuple(RankAddress(i, "i", 0, 0, host, 7000 + i) for i, host in enumerate(hosts))
    return Directory(engine, 1, 1, ready, ranks)


def told(dialer: Dialer, message: Directory, now: float = 1.0, address: EngineAddress = HERE) -> list:
    return list(dialer.directory(address, message, now))


def test_a_call_asks_once_while_it_is_under_way(dialer, wires) -> None:
    dialer.call(HERE, 1.0)
    assert wires.asked == [HERE]
    assert len(dialer) == 1


def test_ends_when_all_ranks_are_open_and_not_before(dialer, wires) -> None:
    assert told(dialer, directory("a", "b")) == []
    assert wires.greeted == [(R0, "a", 7000), (R1, "b", 7001)]
    assert list(dialer.opened(R1)) == []
    assert list(dialer.opened(R1)) == [], "said twice"
    (outcome,) = dialer.opened(R0)
    assert (outcome.address, outcome.ranks, outcome.reason) == (HERE, (R0, R1), None)
    assert len(dialer) == 0
    assert list(dialer.opened(R0)) == []


def test_ranks_that_are_open_already_are_not_greeted_again(dialer, wires) -> None:
    wires.open = {R0, R1}
    (outcome,) = told(dialer, directory("a", "b"))
    assert outcome.ranks == (R0, R1)
    assert wires.greeted == []


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "*"])
def test_a_rank_without_an_address_of_its_own_is_where_the_engine_was_reached(dialer, wires, host) -> None:
    told(dialer, directory(host))
    assert wires.greeted == [(R0, "10.0.0.1", 7000)]


def test_another_engine_at_the_address_is_named_and_nobody_is_greeted(dialer, wires) -> None:
    (outcome,) = told(dialer, directory("a", engine="q"))
    assert "at 10.0.0.1:5600 lives the engine 'q', the request names 'p': correct remote_engine_id" in outcome.reason
    assert outcome.ranks == ()
    assert wires.greeted == []


def test_a_request_that_names_no_engine_takes_any(wires) -> None:
    dialer, anywhere = Dialer(wires, 5.0), EngineAddress("h", 1, "")
    dialer.call(anywhere, 0.0)
    assert told(dialer, directory("a", engine="q"), address=anywhere) == []
    assert wires.greeted == [(RankId("q", "i", 0), "a", 7000)]


@pytest.mark.parametrize("early", [directory(ready=False), directory()])
def test_an_engine_without_ranks_is_asked_again_until_it_has_some(dialer, wires, early) -> None:
    """One that says that it is ready and names no rank as well: with no rank a handoff would be registered nowhere."""
    assert told(dialer, early) == []
    assert list(dialer.tick(1.0 + RETRY / 2)) == []
    assert wires.asked == [HERE]
    assert list(dialer.tick(1.0 + RETRY)) == []
    assert list(dialer.tick(1.1 + RETRY)) == []
    assert wires.asked == [HERE, HERE]
    told(dialer, directory("a"), 2.0)
    assert len(list(dialer.opened(R0))) == 1


def test_a_directory_that_nobody_asked_for_or_that_comes_twice_changes_nothing(dialer, wires) -> None:
    assert told(dialer, directory("x"), address=EngineAddress("else", 1, "p")) == []
    told(dialer, directory("a"))
    told(dialer, directory("b", "c"))
    assert wires.greeted == [(R0, "a", 7000)]


def test_a_refusal_ends_the_call_with_its_reason(dialer) -> None:
    told(dialer, directory("a", "b"))
    assert list(dialer.refused(EngineAddress("else", 1, "p"), "no")) == []
    (outcome,) = dialer.refused(HERE, "block size differs")
    assert (outcome.ranks, outcome.reason) == ((), "block size differs")
    assert list(dialer.refused(HERE, "again")) == list(dialer.tick(99.0)) == []


def test_silence_ends_a_call_and_says_where_it_was_stuck(dialer, wires) -> None:
    assert list(dialer.tick(4.9)) == []
    (outcome,) = dialer.tick(5.0)
    assert outcome.reason.startswith(
        "no answer from p at 10.0.0.1:5600 within 5 s: check that remote_host and remote_port"
    )
    dialer.call(HERE, 10.0)
    told(dialer, directory(ready=False), 14.9)
    (outcome,) = dialer.tick(15.0)
    assert outcome.reason == "p at 10.0.0.1:5600 had not started all its ranks after 5 s"
    dialer.call(HERE, 20.0)
    told(dialer, directory("a", "b"), 21.0)
    list(dialer.opened(R0))
    (outcome,) = dialer.tick(25.0)
    assert outcome.reason == "no answer from p rank 1 within 5 s: check the firewall between the two hosts"


def test_a_call_after_the_end_begins_anew(dialer, wires) -> None:
    list(dialer.tick(5.0))
    dialer.call(HERE, 6.0)
    assert wires.asked == [HERE, HERE]


def test_one_session_ends_every_call_that_waits_for_it(dialer, wires) -> None:
    other = EngineAddress("name-of-the-same-host", 5600, "p")
    dialer.call(other, 0.0)
    told(dialer, directory("a"))
    told(dialer, directory("a"), address=other)
    assert {outcome.address for outcome in dialer.opened(R0)} == {HERE, other}


def test_a_call_for_the_scheduler_process_greets_it_alone_where_it_answered(wires) -> None:
    front, sender = EngineAddress("10.0.0.1", 5600, "p", front=True), RankId("p", "s", -1)
    dialer = Dialer(wires, timeout=5.0)
    dialer.call(front, 0.0)
    assert list(dialer.directory(front, directory("a", "b"), 1.0, sender)) == []
    assert wires.greeted == [(sender, "10.0.0.1", 5600)]
    (outcome,) = dialer.opened(sender)
    assert (outcome.address, outcome.ranks, outcome.reason) == (front, (sender,), None)

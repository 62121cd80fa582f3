"""How often a mover looks at the fabric: each look takes the interpreter's lock from the engine's thread."""

from __future__ import annotations

import dataclasses

import pytest

from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.messages import Posted
from kvxfer.transport import commands as cmd
from kvxfer.transport.mover_settings import LINGER, WATCH
from kvxfer.transport.twin import TwinFabric
from tests.support.ranks import Rank, wait_until

H = HandoffId("x")


@pytest.fixture
def pair():
    fabric = TwinFabric()
    p, d = Rank("p", fabric), Rank("d", fabric)
    yield p, d
    p.close()
    d.close()


def wait_time(rank: Rank) -> float | None:
    return rank.mover._wait_time()


def test_a_sink_looks_seldom_until_it_hears_of_a_write_and_a_source_seldom_soon_after_one(pair) -> None:
    p, d = pair
    poll = d.mover.settings.poll
    assert poll < WATCH
    d.open(H, "d1", p.address, [1], 4)
    wait_until(d.mover.sink.receiving, what="the registration")
    wait_until(lambda: wait_time(d) == WATCH, what="looking seldom, while nobody writes")
    (attempt,) = (one.attempt for one in d.mover.sink._handoffs.values())
    d.mover.post(cmd.Inbound(p.me, Posted(H, attempt, 1)))
    wait_until(lambda: wait_time(d) == poll, what="looking often, for what was announced")
    p.fill([1], 1)
    p.prefill(H, "p1", [1], 4)
    assert d.wait("d1").reason is None
    assert p.wait("p1")
    wait_until(lambda: wait_time(d) is None, what="sleep, since nothing is under way")
    wait_until(lambda: wait_time(p) == WATCH, what="looking seldom, while a notification may linger")
    wait_until(lambda: wait_time(p) is None, timeout=LINGER + 5, what="sleep")


def test_nobody_looks_oftener_for_what_may_come_than_for_what_comes(pair) -> None:
    p, d = pair
    d.mover.settings = dataclasses.replace(d.mover.settings, poll=5 * WATCH)
    d.open(H, "d1", p.address, [1], 4)
    wait_until(d.mover.sink.receiving, what="the registration")
    assert not d.mover.sink.arriving()
    wait_until(lambda: wait_time(d) == 5 * WATCH, what="looking as seldom as it was told")


def test_a_write_is_announced_to_the_mover_that_receives_it(pair) -> None:
    p, d = pair
    heard = []
    posted = d.mover.sink.posted
    d.mover.sink.posted = lambda frm, message: (heard.append((frm, message.handoff)), posted(frm, message))
    d.open(H, "d1", p.address, [1], 4)
    p.fill([1], 1)
    p.prefill(H, "p1", [1], 4)
    assert d.wait("d1").reason is None
    assert p.wait("p1")
    wait_until(lambda: heard == [(p.me, H)], what="the announcement")

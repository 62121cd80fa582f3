"""How often a mover looks at the fabric: each look takes the interpreter's lock from the engine's thread."""

from __future__ import annotations

import dataclasses

import pytest

from kvxfer.layout.tables import packed
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.messages import Posted
from kvxfer.transport import commands as cmd
from kvxfer.transport import mover
from kvxfer.transport.mover_settings import LINGER, TICK, WATCH
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


def test_both_look_still_more_often_when_a_transfer_has_just_begun(pair, monkeypatch) -> None:
    monkeypatch.setattr(mover, "BRISK", 60.0)
    p, d = pair
    poll = d.mover.settings.poll
    d.open(H, "d1", p.address, [1], 4)
    wait_until(d.mover.sink.receiving, what="the registration")
    (attempt,) = (one.attempt for one in d.mover.sink._handoffs.values())
    d.mover.post(cmd.Inbound(p.me, Posted(H, attempt, 1)))
    wait_until(lambda: wait_time(d) == poll / 3, what="looking at once for what was announced")
    p.fill([1], 1)
    p.prefill(H, "p1", [1], 4)
    assert d.wait("d1").reason is None
    assert p.wait("p1")
    assert p.mover._poll() == poll / 3
    wait_until(lambda: wait_time(d) is None, what="sleep, since nothing is under way")


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


class _Fence:
    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed


def test_a_source_leaves_the_interpreter_to_the_thread_that_launches_a_step(pair) -> None:
    p, d = pair
    poll, before, behind = p.mover.settings.poll, _Fence(), _Fence()
    before.passed = True
    d.open(H, "d1", p.address, [1], 4)
    p.fill([1], 1)
    step = cmd.Step(started=[cmd.SourceStart(H, "p1", 4, 0.0, ())], progress=[cmd.SourceProgress("p1", packed([1]), 4)])
    p.mover.post(cmd.StepBegin(step, before))
    wait_until(lambda: p.mover.source.state(H) is not None, what="the step")
    wait_until(lambda: p.mover._steps and wait_time(p) == TICK, what="no look while it is being launched")
    p.mover.post(cmd.StepEnd(behind))
    wait_until(lambda: wait_time(p) == poll, what="looking often, at the fence behind it")
    assert not p.mover.source.serving()
    behind.passed = True
    assert d.wait("d1").reason is None, "nothing wakes a mover for a fence: it looked"

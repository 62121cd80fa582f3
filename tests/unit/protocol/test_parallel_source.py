"""A source rank from which several sink ranks take their shares: each is served for itself, and the blocks go back once."""

from __future__ import annotations

import pytest

from kvxfer.protocol.actions import Send
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.messages import Cancel, CancelAck, Expect, Failed, Grant, Register, Release, Seal
from kvxfer.protocol.source import State
from tests.unit.protocol.test_source import SCHEDULER, D, H, Rig, finished, posts, quiet, sent, transfers

D1 = RankId("d", "i3", 1)
D2 = RankId("d", "i4", 2)
D1_AGAIN = RankId("d", "i9", 1)
OTHER = RankId("x", "i1", 1)


class Pair(Rig):
    """A source that ranks 0 and 1 of decode take their shares from."""

    takers = 2

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        for rank in (D1, D2):
            self.do("leased", rank, 1e6)

    def register(self, frm=D, attempt=1, mode="push", takers=None, **kwargs) -> list:
        message = Register(H, attempt, mode, 0, kwargs.pop("end", 8), bytes(8), **{"asked": 7.0, **kwargs})
        return self.do("register", frm, message, takers=self.takers if takers is None else takers)

    def cancel(self, frm=D, attempt=1, takers=None) -> list:
        return self.do("cancel", frm, Cancel(H, attempt, "gone"), takers=self.takers if takers is None else takers)

    def release(self, frm=D, takers=None) -> list:
        return self.do("release", frm, Release(H, "done"), takers=self.takers if takers is None else takers)

    def written(self, *numbers: int) -> list:
        return [action for number in numbers for action in self.do("written", number)]


def told(actions: list, kind: type) -> list[RankId]:
    return [a.to for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def both_pulling(rig: Pair) -> None:
    rig.start()
    rig.complete()
    rig.finish()
    for rank in (D, D1):
        rig.register(rank, mode="pull")


# --- push -------------------------------------------------------------------------------------------------------------


def test_each_rank_is_written_to_and_sealed_and_the_blocks_go_back_after_the_last() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.complete()
    late = rig.register(D1, attempt=4)
    rig.finish()
    assert posts(late) == [(0, 8)]
    first = rig.written(1)
    assert told(first, Seal) == [D]
    assert finished(first) == []
    assert rig.state is State.FINAL
    last = rig.written(2)
    assert sent(last, Seal) == [Seal(H, 4, 0, 8)]
    assert told(last, Seal) == [D1]
    assert finished(last) == ["r1"]


def test_before_the_second_has_registered_nothing_is_over() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.complete()
    rig.finish()
    assert finished(rig.written(1) + rig.wait(29.9)) == []
    assert posts(rig.register(D1)) == [(0, 8)]
    assert finished(rig.written(2)) == ["r1"]


@pytest.mark.parametrize("declines", ["never", "cancel", "release"])
def test_who_never_comes_is_given_up_when_its_time_is_over_or_it_says_so(declines) -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.complete()
    rig.finish()
    rig.written(1)
    actions = rig.wait(30.0) if declines == "never" else getattr(rig, declines)(D1)
    assert finished(actions) == ["r1"]
    (reason,) = [failed.reason for failed in sent(rig.register(D1), Failed)]
    assert {
        "never": "of the 2 ranks of decode that take their share here only 1 came in 30 s",
        "cancel": "decode cancelled: gone",
        "release": "done",
    }[declines] in reason


def test_while_one_is_still_written_to_the_time_of_the_other_may_end() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.complete()
    rig.finish()
    assert finished(rig.wait(30.0)) == []
    actions = rig.written(1)
    assert told(actions, Seal) == [D]
    assert finished(actions) == ["r1"]


@pytest.mark.parametrize("way", ["cancel", "fail", "lose", "longer"])
def test_what_ends_one_rank_does_not_touch_another(way) -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.register(D1, end=9) if way == "longer" else rig.register(D1)
    rig.complete()
    rig.finish()
    other = None if way == "longer" else 2
    if way == "cancel":
        assert told(rig.cancel(D1), CancelAck) == [], "its write is not terminal"
        assert told(rig.written(2), CancelAck) == [D1]
    elif way == "fail":
        assert told(rig.do("write_failed", other, "torn"), Failed) == []
        assert told(rig.wait(2.0), Failed) == [D1]
    elif way == "lose":
        rig.do("peer_lost", D1, "silent")
        rig.written(2)
    assert rig.state is State.FINAL
    actions = rig.written(1)
    assert told(actions, Seal) == [D]
    assert finished(actions) == ["r1"]


def test_what_the_engine_aborts_is_told_to_every_rank_that_is_not_served() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.complete()
    rig.written(1)
    rig.register(D1)
    rig.do("preempt", "r1")
    actions = rig.finish(aborted="stopped", held=False)
    assert told(actions, Failed) == [], "the write to it is not terminal"
    assert told(rig.written(2), Failed) == [D1]


def test_a_preemption_after_one_seal_writes_again_to_the_other_only() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.register(D1)
    rig.complete()
    assert told(rig.written(1), Seal) == [D]
    assert quiet(rig.do("preempt", "r1", token=5)) == [], "the write to the second reads them"
    assert quiet(rig.written(2)) == [5]
    assert [a.to for a in rig.complete() if a in transfers_to(rig.all)] == [D1]
    assert sent(rig.written(3), Seal) == [Seal(H, 1, 1, 8)]


def transfers_to(actions: list) -> list:
    return [a for a in actions if hasattr(a, "transfer") and hasattr(a, "to")]


def test_a_lease_of_one_rank_says_nothing_of_another() -> None:
    rig = Pair(leased=False)
    rig.source._may_post_until.clear()
    rig.start()
    rig.register(D)
    rig.register(D1)
    rig.complete()
    assert [a.to for a in transfers_to(rig.do("leased", D1, 1e6))] == [D1]
    assert [a.to for a in transfers_to(rig.do("leased", D, 1e6))] == [D]


def test_a_write_of_any_rank_that_failed_keeps_the_pinned_blocks() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.register(D1)
    rig.complete()
    rig.do("preempt", "r1", token=7)
    rig.do("write_failed", 1, "torn")
    assert quiet(rig.written(2)) == []
    assert quiet(rig.wait(2.0)) == [7]


# --- pull -------------------------------------------------------------------------------------------------------------


def test_each_reader_has_a_grant_of_its_own_and_the_blocks_go_back_after_the_last_release() -> None:
    rig = Pair()
    both_pulling(rig)
    assert told(rig.all, Grant) == [D, D1]
    assert rig.source.serving()
    assert finished(rig.release(D)) == []
    assert rig.source.serving(), "the second may be reading"
    assert finished(rig.release(D1)) == ["r1"]
    assert not rig.source.serving()


def test_a_lease_that_one_reader_does_not_renew_ends_for_that_one() -> None:
    rig = Pair()
    both_pulling(rig)
    rig.now += 5.0
    rig.register(D1, mode="pull", again=True, asked=12.0)
    assert finished(rig.wait(5.0)) == []
    assert sent(rig.register(D, mode="pull", again=True), Failed) == [
        Failed(H, 1, "the pull's lease ended and was not renewed")
    ]
    assert finished(rig.wait(5.0)) == ["r1"]


def test_a_reader_that_is_out_of_hearing_keeps_what_it_was_promised() -> None:
    rig = Pair()
    both_pulling(rig)
    rig.do("peer_lost", D, "silent")
    assert finished(rig.release(D1)) == []
    assert finished(rig.wait(10.0)) == ["r1"]


# --- who may register -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frm", "takers", "reason"),
    [
        (D1, 4, "says that 4 ranks of its engine take their share here, another one said 2"),
        (D1, 0, "says that 0 ranks of its engine take their share here, another one said 2"),
        (OTHER, 2, "d rank 0 has registered attempt 1 of it"),
        (RankId("d", "i7", 0), 2, "d rank 0 has registered attempt 1 of it"),
    ],
)
def test_a_registration_that_contradicts_another_is_refused(frm, takers, reason) -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    (failed,) = sent(rig.register(frm, takers=takers), Failed)
    assert reason in failed.reason
    rig.complete()
    assert sent(rig.written(1), Seal), "the first is served"


def test_no_more_ranks_register_than_take_a_share() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.register(D1)
    (failed,) = sent(rig.register(D2), Failed)
    assert failed.reason == "2 ranks of d take their share here, and all of them have registered"


def test_who_takes_nothing_cannot_register() -> None:
    rig = Pair()
    rig.start()
    (failed,) = sent(rig.register(D, takers=0), Failed)
    assert failed.reason == "0 ranks of d take their share here, and all of them have registered"


def test_who_declined_cannot_register_later() -> None:
    rig = Pair()
    rig.start()
    rig.cancel(D1)
    (failed,) = sent(rig.register(D1, attempt=2), Failed)
    assert failed.reason == "decode cancelled: gone"
    rig.register(D)
    rig.complete()
    rig.finish()
    assert finished(rig.written(1)) == ["r1"]


def test_a_registration_that_is_said_again_after_its_seal_is_answered_with_it() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.complete()
    (seal,) = sent(rig.written(1), Seal)
    assert sent(rig.register(D, again=True)) == [seal]


def test_a_registration_that_is_said_again_while_it_is_cancelled_waits_for_its_write() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.complete()
    rig.cancel(D)
    assert sent(rig.register(D, again=True)) == []
    assert told(rig.written(1), CancelAck) == [D]


# --- source ranks that nobody takes anything from ---------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_a_source_that_nobody_takes_from_waits_for_nobody(early) -> None:
    rig = Pair()
    rig.do("expect", SCHEDULER, Expect(H, 30.0))
    if early:
        rig.release(D, takers=0)
    rig.start()
    rig.complete()
    assert posts(rig.all) == []
    actions = rig.finish()
    if not early:
        assert finished(actions) == []
        actions = rig.release(D1, takers=0)
    assert finished(actions) == ["r1"]
    assert sent(rig.release(D, takers=0)) == [], "over"


@pytest.mark.parametrize("word", ["cancel", "release"])
def test_another_engine_cannot_say_that_nothing_is_wanted(word) -> None:
    rig = Pair()
    rig.do("expect", SCHEDULER, Expect(H, 30.0))
    rig.start()
    getattr(rig, word)(OTHER, takers=0)
    assert rig.state is State.COMPUTING
    rig.register(D)
    getattr(rig, word)(OTHER, takers=0)
    rig.release(SCHEDULER)
    assert rig.state is State.COMPUTING, "a rank of it has registered"


def test_a_scheduler_process_speaks_for_all_ranks_that_have_not_registered() -> None:
    rig = Pair()
    rig.start()
    rig.cancel(D)
    assert rig.state is State.COMPUTING
    rig.release(SCHEDULER)
    assert rig.state is State.SERVED


def test_a_registration_without_its_prefill_is_failed_for_each_rank_that_waits() -> None:
    rig = Pair()
    rig.register(D)
    rig.register(D1)
    rig.cancel(D)
    assert told(rig.wait(30.0), Failed) == [D1]


def test_who_declined_and_nobody_else_came() -> None:
    rig = Pair()
    rig.start()
    rig.complete()
    rig.release(D)
    assert finished(rig.finish()) == []
    assert finished(rig.wait(30.0)) == ["r1"]


def test_transfers_are_numbered_over_all_ranks() -> None:
    rig = Pair()
    rig.start()
    rig.register(D)
    rig.register(D1)
    assert transfers(rig.complete()) == [1, 2]

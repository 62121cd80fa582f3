"""The sink machine by itself: every transition, every refusal, and when the engine gets its blocks back."""

from __future__ import annotations

import pytest

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.protocol.actions import PostRead, Revoke, Send, SinkFinished
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Cancel, CancelAck, Failed, Grant, Posted, Register, Release, Seal, Written
from kvxfer.protocol.sink import LOOKS, TRANSITIONS, Event, Sink, State
from kvxfer.protocol.sink_data import SinkHandoff

H = HandoffId("h")
P = RankId("p", "i1", 0)
P1 = RankId("p", "i1", 1)
STRANGER = RankId("x", "i1", 0)
BLOCKS = bytes(8)


class Rig:
    """A sink that remembers the transitions it took. Clock starts at 100 s; lease margin 0.5, drain bound 2, renewal 5 s."""

    def __init__(self, **settings) -> None:
        self.taken: list[tuple[State, Event]] = []
        rig = self

        class Recorded(Sink):
            def _step(self, one, event) -> None:
                before = one.state
                super()._step(one, event)
                rig.taken.append((before, event))

        self.sink = Recorded(drain_bound=2.0, lease_margin=0.5, renew_after=5.0, **settings)
        self.now = 100.0
        self.all: list = []

    def do(self, what: str, *args) -> list:
        actions = list(getattr(self.sink, what)(*args))
        self.all += actions
        return actions

    def wait(self, seconds: float) -> list:
        self.now += seconds
        return self.do("tick", self.now)

    def look_in_vain(self) -> list:
        """The drain bound passes, and then as many ticks in which a notification could be found."""
        return self.wait(2.0) + [action for _ in range(LOOKS - 1) for action in self.wait(0.25)]

    def open(self, mode: str = "push", request: str = "r1", start: int = 0, end: int = 8) -> list:
        return self.do("open", H, request, mode, start, end, BLOCKS, self.now)

    def connect(self, *ranks: RankId) -> list:
        return self.do("connected", H, ranks or (P,), self.now)

    def push(self, *ranks: RankId) -> None:
        self.open()
        self.connect(*ranks)

    def pull(self) -> None:
        self.open("pull")
        self.connect()

    def written(self, start: int, end: int, generation: int = 0, attempt: int = 1, frm: RankId = P) -> list:
        return self.do("written", frm.agent, Written(H, attempt, generation, frm.rank, start, end))

    def posted(self, writes: int = 1, attempt: int = 1, frm: RankId = P) -> None:
        self.sink.posted(frm, Posted(H, attempt, writes))

    def seal(self, generation: int = 0, attempt: int = 1, frm: RankId = P) -> list:
        return self.do("seal", frm, Seal(H, attempt, generation, 8), self.now)

    def grant(
        self, tokens: int = 8, asked: float = 100.0, lease: float = 10.0, attempt: int = 1, frm: RankId = P
    ) -> list:
        return self.do("grant", frm, Grant(H, attempt, 0, tokens, bytes(8), asked, lease), self.now)

    def fail(self, frm: RankId = P, attempt: int = 1, reason: str = "no") -> list:
        return self.do("failed", frm, Failed(H, attempt, reason))

    def ack(self, frm: RankId = P, attempt: int = 1) -> list:
        return self.do("cancel_ack", frm, CancelAck(H, attempt))

    def cancel(self, reason: str = "gone") -> list:
        return self.do("cancel", "r1", reason)

    def lose(self, granted_until: float = 0.0, frm: RankId = P, *, dead: bool = False) -> list:
        actions = list(self.sink.peer_lost(frm, "silent", granted_until, self.now, dead=dead))
        self.all += actions
        return actions

    def back(self, frm: RankId = P) -> list:
        return self.do("peer_back", frm, self.now)

    def read_done(self, transfer: int = 1) -> list:
        return self.do("read_done", transfer, self.now)

    def read_failed(self, transfer: int = 1) -> list:
        return self.do("read_failed", transfer, "torn", self.now)

    @property
    def state(self) -> State | None:
        return self.sink.state(H)


def sent(actions: list, kind: type) -> list:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def ends(actions: list) -> list[str | None]:
    return [a.reason for a in actions if isinstance(a, SinkFinished)]


# --- every transition -------------------------------------------------------------------------------------------------


def reading(rig: Rig) -> None:
    rig.pull()
    rig.grant()


def cancelling(rig: Rig) -> None:
    rig.push()
    rig.cancel()


def fencing(rig: Rig, *, dead: bool = False) -> None:
    rig.push(P, P1)
    rig.lose(dead=dead)
    rig.ack(frm=P1)


SCENARIOS = {
    (State.OPENING, Event.CONNECT): lambda r: r.push(),
    (State.OPENING, Event.FAIL): lambda r: (r.open(), r.do("unreachable", H, "no answer")),
    (State.OPENING, Event.CANCEL): lambda r: (r.open(), r.cancel()),
    (State.REGISTERED, Event.READ): reading,
    (State.REGISTERED, Event.RENEW): lambda r: (r.pull(), r.wait(5.0)),
    (State.REGISTERED, Event.COMPLETE): lambda r: (r.push(), r.written(0, 8), r.seal()),
    (State.REGISTERED, Event.FAIL): lambda r: (r.push(), r.seal(), r.look_in_vain()),
    (State.REGISTERED, Event.CANCEL): cancelling,
    (State.REGISTERED, Event.LOSE): fencing,
    (State.READING, Event.READ): lambda r: (r.open("pull"), r.connect(P, P1), r.grant(), r.grant(frm=P1)),
    (State.READING, Event.RENEW): lambda r: (reading(r), r.wait(5.0)),
    (State.READING, Event.COMPLETE): lambda r: (reading(r), r.read_done()),
    (State.READING, Event.FAIL): lambda r: (reading(r), r.wait(10.0), r.read_done()),
    (State.READING, Event.CANCEL): lambda r: (reading(r), r.cancel()),
    (State.READING, Event.LOSE): lambda r: (reading(r), r.read_failed()),
    (State.CANCELLING, Event.RENEW): lambda r: (cancelling(r), r.wait(5.0)),
    (State.CANCELLING, Event.FAIL): lambda r: (cancelling(r), r.ack()),
    (State.CANCELLING, Event.CANCEL): lambda r: (cancelling(r), r.cancel()),
    (State.CANCELLING, Event.LOSE): lambda r: (cancelling(r), r.lose()),
    (State.REGISTERED, Event.REVOKED): lambda r: (r.push(), r.do("revoked")),
    (State.CANCELLING, Event.REVOKED): lambda r: (cancelling(r), r.do("revoked")),
    (State.FENCING, Event.RENEW): lambda r: (r.push(P, P1), r.lose(), r.wait(5.0)),
    (State.FENCING, Event.FAIL): lambda r: (fencing(r), r.back(), r.ack()),
    (State.FENCING, Event.CANCEL): lambda r: (fencing(r), r.cancel()),
    (State.FENCING, Event.LOSE): lambda r: (r.push(P, P1), r.lose(), r.lose(frm=P1)),
    (State.FENCING, Event.FENCE): lambda r: (fencing(r, dead=True), r.wait(2.0)),
    (State.FENCING, Event.REVOKED): lambda r: (fencing(r), r.do("revoked")),
}


@pytest.mark.parametrize(("state", "event"), [(s, e) for s, events in TRANSITIONS.items() for e in events])
def test_every_transition_of_the_table_can_happen(state, event) -> None:
    rig = Rig()
    SCENARIOS[state, event](rig)
    assert rig.taken[-1] == (state, event)
    after = TRANSITIONS[state][event]
    assert rig.state is (None if after is State.CLOSED else after)
    assert len(ends(rig.all)) == (1 if after is State.CLOSED else 0)


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in State for e in Event if e not in TRANSITIONS[s]])
def test_every_other_transition_is_a_defect_of_ours_and_says_so(state, event) -> None:
    one = SinkHandoff(H, "r1", "push", 0, 8, BLOCKS, 1, state)
    with pytest.raises(LocalProtocolError, match=f"sink handoff h: {event.value} while {state.value}"):
        Sink()._step(one, event)
    assert one.state is state


# --- opening ----------------------------------------------------------------------------------------------------------


def test_a_request_cannot_open_twice() -> None:
    rig = Rig()
    rig.open()
    with pytest.raises(LocalProtocolError, match="r1 opened a second handoff"):
        rig.do("open", HandoffId("other"), "r1", "push", 0, 8, BLOCKS, rig.now)


def test_a_second_sink_for_one_handoff_gets_its_blocks_back_at_once_and_does_not_disturb_the_first() -> None:
    rig = Rig()
    rig.push()
    (end,) = rig.open(request="r2")
    assert end == SinkFinished(H, "r2", "request r1 has this handoff id")
    assert rig.do("cancel", "r2", "gone") == []
    rig.written(0, 8)
    assert ends(rig.seal()) == [None]
    assert rig.sink.request(H) is None


def test_the_registration_names_attempt_span_blocks_and_time_and_goes_to_every_rank() -> None:
    rig = Rig()
    rig.open(start=3)
    assert rig.sink.request(H) == "r1"
    rig.now += 1.0
    actions = rig.connect(P, P1)
    assert [a.to for a in actions if isinstance(a, Send)] == [P, P1]
    assert sent(actions, Register) == [Register(H, 1, "push", 3, 8, BLOCKS, 101.0)] * 2
    assert rig.connect() == rig.do("unreachable", H, "late") == [], "said again, it changes nothing"


def test_words_of_the_transport_about_unknown_handoffs_change_nothing() -> None:
    rig = Rig()
    assert rig.connect() == rig.do("unreachable", H, "x") == rig.cancel() == rig.lose() == rig.wait(100.0) == []


def test_attempts_rise_so_that_an_earlier_ones_words_are_harmless() -> None:
    rig = Rig()
    rig.open()
    rig.do("unreachable", H, "no answer")
    rig.open()
    (register,) = sent(rig.connect(), Register)
    assert register.attempt == 2
    for say in (rig.written, rig.seal):
        assert say(*((0, 8) if say == rig.written else ()), attempt=1) == []
    assert rig.fail(attempt=1) == rig.ack(attempt=1) == rig.grant(attempt=1) == []
    assert rig.sink.ignored == 5
    assert rig.state is State.REGISTERED


# --- push -------------------------------------------------------------------------------------------------------------


def test_an_open_handoff_knows_its_positions_and_its_blocks() -> None:
    rig = Rig()
    rig.open(start=4, end=8)
    assert rig.sink.span(H) == (4, 8, BLOCKS)


@pytest.mark.parametrize("order", ["seal last", "seal first", "seal between"])
@pytest.mark.parametrize("doubled", [1, 2])
def test_received_when_the_sealed_generation_covers_the_span_in_any_order_and_not_before(order, doubled) -> None:
    rig = Rig()
    rig.push()
    words = [lambda: rig.written(4, 8), lambda: rig.written(0, 4)]
    words.insert({"seal first": 0, "seal between": 1, "seal last": 2}[order], rig.seal)
    for say in words:
        assert ends(rig.all) == []
        for _ in range(doubled):
            say()
    assert ends(rig.all) == [None]
    assert not rig.sink.receiving()
    assert len(rig.sink) == 0


def test_data_is_arriving_from_the_announcement_of_a_write_to_its_notification_of_each_rank() -> None:
    rig = Rig()
    rig.push(P, P1)
    assert rig.sink.receiving()
    assert not rig.sink.arriving(), "nobody has said that he writes"
    rig.posted(1)
    rig.posted(2)
    rig.posted(2)
    rig.posted(frm=P1)
    for frm, start in ((P, 0), (P1, 0), (P, 4)):
        assert rig.sink.arriving()
        rig.written(start, start + 4, frm=frm)
    assert not rig.sink.arriving()
    rig.written(4, 8, frm=P1)
    assert not rig.sink.arriving(), "a notification may overtake its announcement"
    rig.posted(2, frm=P1)
    assert not rig.sink.arriving()


def test_an_announcement_that_is_taken_back_or_was_lost_is_not_waited_for() -> None:
    rig = Rig()
    rig.push()
    rig.posted(1)
    rig.posted(0)
    assert not rig.sink.arriving(), "the write was not posted"
    rig.written(0, 4)
    rig.posted(2)
    assert rig.sink.arriving(), "the first one's announcement was lost"
    rig.written(4, 8)
    assert not rig.sink.arriving()


def test_of_several_ranks_those_are_looked_for_that_have_not_delivered() -> None:
    rig = Rig()
    rig.push(P, P1)
    rig.posted(7)
    rig.written(0, 8)
    assert rig.sink.arriving()
    rig.seal()
    assert not rig.sink.arriving(), "all that it sealed is here, however many writes it spoke of"
    rig.posted(frm=P1)
    assert rig.sink.arriving()
    rig.written(0, 8, frm=P1)
    rig.seal(frm=P1, generation=1)
    assert rig.sink.arriving()


def test_in_pull_nobody_announces_anything() -> None:
    rig = Rig()
    rig.pull()
    rig.posted(9)
    assert not rig.sink.arriving()


def test_what_is_sealed_is_looked_for_though_its_announcement_was_lost() -> None:
    rig = Rig()
    rig.push()
    rig.seal()
    assert rig.sink.arriving()
    rig.written(0, 8)
    assert rig.state is None
    assert not rig.sink.arriving()


def test_an_announcement_of_another_attempt_or_rank_says_nothing() -> None:
    rig = Rig()
    rig.posted()
    rig.push()
    rig.posted(attempt=2)
    rig.posted(frm=STRANGER)
    assert not rig.sink.arriving()


def test_positions_of_another_generation_do_not_count() -> None:
    rig = Rig()
    rig.push()
    rig.written(0, 8, generation=0)
    rig.written(0, 4, generation=1)
    assert ends(rig.seal(generation=1)) == []
    rig.written(4, 8, generation=2)
    assert ends(rig.written(4, 8, generation=1)) == [None]


def test_every_rank_must_cover_the_span() -> None:
    rig = Rig()
    rig.push(P, P1)
    rig.written(0, 8)
    rig.written(0, 8)
    rig.seal()
    rig.written(0, 8, frm=P1)
    assert ends(rig.all) == []
    assert ends(rig.seal(frm=P1)) == [None]


def test_only_the_registered_span_is_needed() -> None:
    rig = Rig()
    rig.open(start=5)
    rig.connect()
    rig.seal()
    assert ends(rig.written(4, 8)) == [None]


@pytest.mark.parametrize("span", [(5, 4), (-1, 3)])
def test_a_notification_without_meaning_is_the_peers_defect(span) -> None:
    rig = Rig()
    rig.push()
    with pytest.raises(RemoteProtocolError, match=r"p/i1/0 says it wrote positions"):
        rig.written(*span)


def test_a_strangers_words_are_counted_and_ignored() -> None:
    rig = Rig()
    rig.push()
    before = len(rig.all)
    rig.written(0, 8, frm=STRANGER)
    rig.seal(frm=STRANGER)
    rig.fail(frm=STRANGER)
    rig.ack(frm=STRANGER)
    assert rig.all[before:] == []
    assert rig.sink.ignored == 4


def test_a_lost_notification_fails_the_handoff_and_names_the_positions() -> None:
    rig = Rig()
    rig.push()
    rig.written(0, 4)
    rig.seal()
    assert ends(rig.wait(1.9)) == []
    (reason,) = ends(rig.look_in_vain())
    assert reason == "sealed, but the notifications of these positions never came: {'p rank 0': [(4, 8)]}"


def test_a_lost_notification_waits_for_ranks_that_may_still_write() -> None:
    rig = Rig()
    rig.push(P, P1)
    rig.seal()
    assert ends(rig.wait(10.0)) == [], "rank 1 may still write into the blocks"
    rig.seal(frm=P1)
    assert len(ends(rig.look_in_vain())) == 1


def test_a_notification_that_waits_for_a_driver_that_was_asleep_is_not_lost() -> None:
    rig = Rig()
    rig.push()
    rig.seal()
    assert ends(rig.wait(60.0)) == [], "nobody has looked"
    assert ends(rig.written(0, 8)) == [None]


def test_a_rank_that_has_not_sealed_is_asked_again_although_another_has() -> None:
    rig = Rig()
    rig.push(P, P1)
    rig.seal()
    assert [a.to for a in rig.wait(5.0) if isinstance(a, Send)] == [P1]


def test_what_is_not_answered_is_said_again_to_those_who_have_not_answered() -> None:
    """A connection that breaks and is made anew within the time-out loses messages without ending the session."""
    rig = Rig()
    rig.push(P, P1)
    assert rig.wait(4.9) == []
    first = [a for a in rig.wait(0.1) if isinstance(a, Send)]
    assert [(a.to, type(a.message)) for a in first] == [(P, Register), (P1, Register)]
    rig.fail()
    assert [a.to for a in rig.wait(5.0) if isinstance(a, Send) and isinstance(a.message, Cancel)] == [P1]
    assert sent(rig.wait(4.9), Cancel) == []
    assert sent(rig.wait(0.1), Cancel) == [Cancel(H, 1, "no")]
    assert ends(rig.ack(frm=P1)) == ["no"]


# --- the ways out -----------------------------------------------------------------------------------------------------


def test_a_cancelled_push_waits_for_every_ranks_acknowledgement_and_keeps_the_first_reason() -> None:
    rig = Rig()
    rig.push(P, P1)
    assert sent(rig.cancel("first"), Cancel) == [Cancel(H, 1, "first")] * 2
    assert rig.cancel("second") == []
    assert ends(rig.ack() + rig.ack() + rig.wait(1000.0)) == []
    assert ends(rig.ack(frm=P1)) == ["first"]


@pytest.mark.parametrize("word", ["ack", "fail", "seal"])
def test_each_word_that_says_nothing_flies_ends_a_cancelled_push(word) -> None:
    rig = Rig()
    cancelling(rig)
    assert ends(getattr(rig, word)()) == ["gone"]


def test_data_that_completes_after_a_cancel_does_not_make_it_a_success() -> None:
    rig = Rig()
    cancelling(rig)
    assert ends(rig.written(0, 8)) == []
    assert ends(rig.seal()) == ["gone"]


def test_a_failure_of_one_rank_cancels_the_others_and_waits_for_them() -> None:
    rig = Rig()
    rig.push(P, P1)
    actions = rig.fail()
    assert [a.to for a in actions if isinstance(a, Send)] == [P1]
    assert ends(actions) == []
    assert ends(rig.ack(frm=P1)) == ["no"]


def test_a_cancel_after_every_seal_needs_no_acknowledgement() -> None:
    rig = Rig()
    rig.push()
    rig.seal()
    actions = rig.cancel()
    assert sent(actions, Cancel) == []
    assert ends(actions) == ["gone"]


def test_a_failure_after_the_seal_says_nothing_about_what_was_sealed() -> None:
    """A registration said again after the end is answered with Failed; the data is complete, its notification under way."""
    rig = Rig()
    rig.push()
    rig.seal()
    assert ends(rig.fail()) == []
    assert ends(rig.written(0, 8)) == [None]


@pytest.mark.parametrize("first", ["nothing", "cancel"])
def test_a_lost_source_that_may_live_is_waited_for_and_then_the_keys_are_revoked(first) -> None:
    rig = Rig()
    rig.push()
    if first == "cancel":
        rig.cancel()
    rig.lose(granted_until=103.0)
    rig.cancel()
    rig.written(0, 8)
    assert rig.sink.receiving()
    assert rig.wait(4.9) == [], "the source may have posted until 103, and that may land until 105"
    (revoke,) = [a for a in rig.wait(0.1) if isinstance(a, Revoke)]
    reason = "gone" if first == "cancel" else "p rank 0 is gone: silent"
    assert revoke.reason == f"handoff h: {reason}, and may still write"
    assert rig.wait(1000.0) == [], "the driver was told"
    assert ends(rig.do("revoked")) == [reason]
    assert not rig.sink.receiving()


def test_without_revocation_the_time_alone_is_trusted() -> None:
    rig = Rig(revoke=False)
    rig.push()
    rig.lose(granted_until=103.0)
    assert ends(rig.wait(4.9)) == []
    assert ends(rig.wait(0.1)) == ["p rank 0 is gone: silent"]


@pytest.mark.parametrize("learnt", ["at once", "later"])
def test_of_a_source_that_has_ended_nothing_is_revoked(learnt) -> None:
    """Its leases are waited for all the same: what shows that it has ended rests on more than this process can see."""
    rig = Rig()
    rig.push()
    rig.lose(granted_until=104.0, dead=learnt == "at once")
    if learnt == "later":
        assert rig.wait(4.0) == []
        rig.sink.peer_ended(P, rig.now)
        rig.sink.peer_ended(P1, rig.now)
    assert ends(rig.wait(105.9 - rig.now)) == []
    assert ends(rig.wait(0.11)) == ["p rank 0 is gone: silent"]


@pytest.mark.parametrize(
    "learnt", [5.5, 6.0, 9.0], ids=["before the fence", "when keys are to be revoked", "after that"]
)
def test_what_a_source_left_to_the_fabric_when_it_ended_is_waited_for(learnt) -> None:
    """It was asleep with writes under way until just now, longer than any lease: the drain begins with its end."""
    rig = Rig()
    rig.push()
    rig.lose(granted_until=104.0)
    rig.wait(learnt)
    rig.sink.peer_ended(P, rig.now)
    assert ends(rig.wait(1.0)) == []
    rig.sink.peer_ended(P, rig.now)  # told again, it has not ended again
    assert ends(rig.wait(0.9)) == []
    assert ends(rig.wait(0.11)) == ["p rank 0 is gone: silent"]


def test_a_lease_that_ended_long_ago_still_leaves_the_drain() -> None:
    rig = Rig(revoke=False)
    rig.push()
    rig.lose(granted_until=50.0)
    assert ends(rig.wait(1.9)) == []
    assert len(ends(rig.wait(0.1))) == 1


def test_a_loss_after_the_seal_changes_nothing() -> None:
    rig = Rig()
    rig.push(P, P1)
    rig.written(0, 8)
    rig.seal()
    assert rig.lose(granted_until=1e6) == []
    rig.written(0, 8, frm=P1)
    assert ends(rig.seal(frm=P1)) == [None]


def test_when_one_rank_is_lost_the_others_are_cancelled_and_waited_for() -> None:
    rig = Rig()
    rig.push(P, P1)
    actions = rig.lose(dead=True)
    assert [(a.to, type(a.message)) for a in actions if isinstance(a, Send)] == [(P1, Cancel)]
    assert ends(rig.wait(4.9)) == [], "the other may still write"
    assert [a.to for a in rig.wait(0.1) if isinstance(a, Send)] == [P1], "and is asked again"
    assert ends(rig.ack(frm=P1)) == []
    assert ends(rig.wait(0.25)) == ["p rank 0 is gone: silent"]


def test_two_lost_ranks_are_fenced_until_the_later_of_both() -> None:
    rig = Rig(revoke=False)
    rig.push(P, P1)
    rig.lose(granted_until=110.0)
    rig.lose(granted_until=105.0, frm=P1)
    assert ends(rig.wait(11.9)) == []
    assert len(ends(rig.wait(0.1))) == 1


def test_one_lost_rank_that_may_live_is_enough_to_revoke() -> None:
    rig = Rig()
    rig.push(P, P1)
    rig.lose(dead=True)
    rig.lose(granted_until=105.0, frm=P1)
    assert [type(a) for a in rig.wait(7.0) if not isinstance(a, Send)][-1] is Revoke


def test_a_lost_source_that_comes_back_is_asked_and_its_word_is_enough() -> None:
    rig = Rig()
    rig.push()
    rig.lose(granted_until=104.0)
    assert rig.back(P1) == []
    (cancel,) = sent(rig.back(), Cancel)
    assert cancel == Cancel(H, 1, "p rank 0 is gone: silent")
    assert rig.back() == [], "once"
    assert sent(rig.wait(5.0), Cancel) == [cancel], "and again when it does not answer"
    assert ends(rig.ack()) == ["p rank 0 is gone: silent"]


@pytest.mark.parametrize("then", ["acknowledged", "lost again", "cancelled"])
def test_while_the_keys_are_being_revoked_a_handoff_can_still_end_otherwise(then) -> None:
    rig = Rig()
    rig.push()
    rig.lose()
    assert [a for a in rig.wait(2.0) if isinstance(a, Revoke)]
    if then == "acknowledged":
        rig.back()
        assert ends(rig.ack()) == ["p rank 0 is gone: silent"]
        assert rig.do("revoked") == []
        return
    if then == "lost again":
        rig.back()
        rig.lose(dead=True)
        assert ends(rig.wait(2.0)) == ["p rank 0 is gone: silent"]
        return
    assert ends(rig.cancel()) == []
    assert len(ends(rig.do("revoked"))) == 1


def test_a_revocation_ends_every_exposed_push_and_no_other() -> None:
    rig = Rig()
    rig.push()
    other, reads, waits = HandoffId("i"), HandoffId("j"), HandoffId("k")
    for handoff, request, mode in ((other, "r2", "push"), (reads, "r3", "pull"), (waits, "r4", "push")):
        rig.do("open", handoff, request, mode, 0, 8, BLOCKS, rig.now)
    rig.do("connected", other, (P1,), rig.now)
    rig.do("connected", reads, (P1,), rig.now)
    told = "this rank revoked the keys of its memory, since a lost peer might still have written into it"
    assert [(a.request_id, a.reason) for a in rig.do("revoked")] == [("r1", told), ("r2", told)]
    assert rig.sink.state(reads) is State.REGISTERED
    assert rig.sink.state(waits) is State.OPENING


def test_a_read_that_never_ends_is_stopped_by_revoking_the_keys_once() -> None:
    rig = Rig()
    rig.pull()
    rig.grant(lease=1e6)
    assert [a for a in rig.wait(119.9) if isinstance(a, Revoke)] == []
    (revoke,) = [a for a in rig.wait(0.2) if isinstance(a, Revoke)]
    assert revoke.reason == "handoff h: a read has not ended for 120 s"
    assert [a for a in rig.wait(500.0) if isinstance(a, Revoke)] == []
    rig.read_failed()
    assert len(ends(rig.wait(2.0))) == 1


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_before_the_registration_left_a_handoff_ends_at_once(mode) -> None:
    for end in ("cancel", "unreachable"):
        rig = Rig()
        rig.open(mode)
        assert rig.lose() == [], "not yet one of its ranks"
        actions = rig.cancel() if end == "cancel" else rig.do("unreachable", H, "gone")
        assert ends(actions) == ["gone"]
        assert sent(actions, Cancel) == sent(actions, Release) == []


# --- pull -------------------------------------------------------------------------------------------------------------


def test_a_grant_is_read_once_and_the_source_told_when_it_is_done() -> None:
    rig = Rig()
    rig.open("pull", start=5)
    rig.connect()
    assert not rig.sink.receiving()
    (read,) = [a for a in rig.grant() if isinstance(a, PostRead)]
    assert (read.frm, read.handoff, read.attempt, read.start, read.end) == (P, H, 1, 5, 8)
    assert (read.span, read.source_blocks, read.registered) == ((5, 8), bytes(8), BLOCKS)
    assert rig.sink.receiving()
    assert rig.grant() == [], "doubled"
    actions = rig.read_done(read.transfer)
    assert sent(actions, Release) == [Release(H, "done")]
    assert ends(actions) == [None]
    assert not rig.sink.receiving()


@pytest.mark.parametrize(("after", "valid"), [(9.5, True), (9.51, False)])
def test_a_read_counts_only_if_it_ended_before_its_lease_less_the_margin_by_our_own_clock(after, valid) -> None:
    rig = Rig()
    rig.pull()
    rig.grant(asked=100.0, lease=10.0)
    rig.now += after
    actions = rig.read_done()
    assert sent(actions, Release)
    (reason,) = ends(actions)
    assert reason == (None if valid else "the read completed 0.010 s after its lease had ended")


def test_a_renewed_lease_counts_and_an_overtaken_grant_does_not_shorten_it() -> None:
    rig = Rig()
    reading(rig)
    assert sent(rig.wait(5.0), Register) == [Register(H, 1, "pull", 0, 8, BLOCKS, 105.0, again=True)]
    assert sent(rig.wait(1.0), Register) == []
    rig.grant(asked=105.0)
    rig.grant(asked=100.0)
    rig.wait(8.5)
    assert ends(rig.read_done()) == [None]


@pytest.mark.parametrize(
    ("lease", "every"), [(100.0, 5.0), (20.0, 5.0), (10.0, 2.5), (3.0, 0.75), (1.0, 0.25), (0.6, 0.25)]
)
def test_a_lease_is_renewed_in_a_quarter_of_what_was_granted_and_not_more_often_than_four_times_a_second(
    lease, every
) -> None:
    rig = Rig()
    rig.pull()
    rig.grant(lease=lease)
    for asked in (100.0, 100.0 + every):
        assert sent(rig.wait(every - 0.01), Register) == []
        (register,) = sent(rig.wait(0.01), Register)
        assert (register.again, register.asked) == (True, pytest.approx(asked + every))
        rig.grant(asked=register.asked, lease=lease)
    assert ends(rig.read_done()) == [None], "valid, however long it took: every lease was renewed before its end"


def test_a_grant_that_is_too_old_is_asked_for_again() -> None:
    rig = Rig()
    rig.pull()
    rig.now += 9.5
    (register,) = sent(rig.grant(), Register)
    assert register.asked == 109.5
    assert [a.transfer for a in rig.grant(asked=109.5) if isinstance(a, PostRead)] == [1]


@pytest.mark.parametrize("state", [State.REGISTERED, State.READING])
def test_a_source_that_has_fewer_tokens_is_an_error_with_both_numbers(state) -> None:
    rig = Rig()
    reading(rig) if state is State.READING else rig.pull()
    actions = rig.grant(tokens=7)
    if state is State.READING:
        assert ends(actions) == [], "our read may still write into the blocks"
        actions = rig.read_done()
    (reason,) = ends(actions)
    assert "prefill's prompt has 7 tokens, decode wants positions up to 8" in reason
    assert sent(actions, Release)


@pytest.mark.parametrize("why", ["cancel", "fail", "lose"])
@pytest.mark.parametrize("posted", [True, False])
def test_a_pull_that_fails_ends_when_its_own_read_is_terminal(why, posted) -> None:
    rig = Rig()
    reading(rig) if posted else rig.pull()
    actions = getattr(rig, why)()
    assert sent(actions, Cancel) == []
    if posted:
        assert ends(actions + rig.grant() + rig.wait(100.0) + rig.ack()) == []
        actions = rig.read_done()
    assert ends(actions) == [{"cancel": "gone", "fail": "no", "lose": "p rank 0 is gone: silent"}[why]]


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_failed_read_drains_before_the_blocks_go_back(cancelled) -> None:
    rig = Rig()
    reading(rig)
    if cancelled:
        rig.cancel()
    rig.read_failed()
    rig.lose()
    assert ends(rig.wait(1.9)) == []
    actions = rig.wait(0.1)
    assert ends(actions) == ["gone" if cancelled else "a read failed: torn"]
    assert sent(actions, Release)


# --- a source that says what it likes -----------------------------------------------------------------------------------


def test_positions_that_were_not_asked_for_are_not_remembered() -> None:
    rig = Rig()
    rig.push()
    for i in range(0, 10_000, 2):
        rig.written(8 + i, 9 + i)
        rig.written(2**31 - 2 - i, 2**31 - 1 - i)
    assert rig.sink._handoffs[H].parts[P].valid[0].missing(0, 2**31) == [(0, 2**31)]
    rig.written(0, 2**31 - 1)
    assert rig.sink._handoffs[H].parts[P].valid[0].missing(0, 2**31) == [(8, 2**31)]


def test_a_source_cannot_name_generations_without_end(monkeypatch) -> None:
    monkeypatch.setattr("kvxfer.protocol.sink.MAX_GENERATIONS", 3)
    rig = Rig()
    rig.push()
    for generation in (5, 6, 7, 6):
        rig.written(0, 4, generation)
    with pytest.raises(RemoteProtocolError, match="p/i1/0 writes h under more than 3 generations"):
        rig.written(0, 4, 8)
    assert len(rig.sink._handoffs[H].parts[P].valid) == 3


def test_another_rank_completes_fails_and_cancels_nothing() -> None:
    """Not even with the right attempt: the ranks that were registered with are the only ones that count."""
    rig = Rig()
    rig.push()
    before = rig.sink._handoffs[H]
    state = (before.state, before.reason)
    rig.do("written", STRANGER.agent, Written(H, 1, 0, 0, 0, 8))
    rig.do("seal", STRANGER, Seal(H, 1, 0, 8), rig.now)
    rig.do("failed", STRANGER, Failed(H, 1, "x"))
    rig.do("cancel_ack", STRANGER, CancelAck(H, 1))
    rig.do("grant", STRANGER, Grant(H, 1, 0, 8, BLOCKS, rig.now, 10.0), rig.now)
    assert (before.state, before.reason) == state
    assert not before.parts[P].quiet


def test_a_registration_is_said_again_to_those_ranks_only_that_may_still_write() -> None:
    rig = Rig()
    rig.push(P, P1)
    rig.seal()
    again = [action for action in rig.wait(6.0) if isinstance(action, Send)]
    assert [(action.to, action.message.again) for action in again] == [(P1, True)]


# --- words out of place ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("word", ["ack", "seal", "grant"])
def test_a_word_that_nobody_waits_for_does_not_make_a_request_wait_for_ever(mode, word) -> None:
    """A defective peer acknowledges what was not cancelled, seals what is read, grants what is written."""
    rig = Rig()
    rig.push() if mode == "push" else rig.pull()
    if (mode, word) in (("push", "seal"), ("pull", "grant")):
        return  # these are in their place
    assert getattr(rig, word)() == []
    assert rig.state is State.REGISTERED
    assert sent(rig.wait(5.0), Register), "it is still asked"
    rig.lose(dead=True)
    rig.wait(2.0)
    assert len(ends(rig.all)) == 1


def test_a_lost_source_is_called_back_once_for_each_handoff() -> None:
    rig = Rig()
    assert not rig.sink.wants_back(P)
    rig.push()
    assert not rig.sink.wants_back(P), "it is not lost"
    rig.lose()
    assert rig.sink.wants_back(P)
    rig.back()
    rig.lose()
    assert not rig.sink.wants_back(P), "one that answers calls and nothing else must not put the fence off for ever"
    assert [a for a in rig.wait(2.0) if isinstance(a, Revoke)]


# --- what is copied when it has arrived -------------------------------------------------------------------------------


def test_only_words_of_an_open_push_from_its_own_sources_say_that_something_has_arrived() -> None:
    word = Written(H, 1, 0, 0, 0, 4)
    rig = Rig()
    assert rig.sink.receives(P.agent, word) is None
    rig.push()
    assert rig.sink.receives(P.agent, word) == P
    assert rig.sink.receives(STRANGER.agent, word) is None
    assert rig.sink.receives(P.agent, Written(H, 2, 0, 0, 0, 4)) is None
    rig.cancel()
    assert rig.sink.receives(P.agent, word) is None
    rig = Rig()
    rig.pull()
    assert rig.sink.receives(P.agent, word) is None

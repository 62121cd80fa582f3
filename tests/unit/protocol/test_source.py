"""The source machine by itself: every transition, every refusal, and what it posts when."""

from __future__ import annotations

from array import array

import pytest

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.protocol import parking
from kvxfer.protocol import source as module
from kvxfer.protocol.actions import PostWrite, Revoke, Send, SourceFinished, SourceQuiet
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Cancel, CancelAck, Expect, Failed, Grant, Posted, Register, Release, Seal
from kvxfer.protocol.source import TRANSITIONS, Event, Source, State

H = HandoffId("h")
D = RankId("d", "i1", 0)
D2 = RankId("d2", "i1", 0)
SCHEDULER = RankId("d", "i2", -1)
BLOCK = 4


class Rig:
    """A source that remembers the transitions it took and the actions it wanted. Its lease towards D is long."""

    def __init__(self, *, leased: bool = True, **settings) -> None:
        self.taken: list[tuple[State, Event]] = []
        rig = self

        class Recorded(Source):
            def _step(self, one, event) -> None:
                before = one.state
                super()._step(one, event)
                rig.taken.append((before, event))

        self.source = Recorded(BLOCK, leg_timeout=30.0, lease=10.0, drain_bound=2.0, **settings)
        self.now = 100.0
        self.all: list = []
        if leased:
            self.do("leased", D, 1e6)

    def do(self, what: str, *args, **kwargs) -> list:
        actions = list(getattr(self.source, what)(*args, self.now, **kwargs))
        self.all += actions
        return actions

    def wait(self, seconds: float) -> list:
        self.now += seconds
        return self.do("tick")

    # the engine's and the sink's usual words

    def start(self, tokens: int = 8, request: str = "r1") -> list:
        return self.do("start", H, request, tokens)

    def progress(self, final: int, blocks: tuple[int, ...] = (), request: str = "r1") -> list:
        return self.do("progress", request, array("i", blocks).tobytes(), final)

    def complete(self) -> list:
        return self.progress(8, (5, 6))

    def finish(self, request: str = "r1", **kwargs) -> list:
        return self.do("finish", request, **kwargs)

    def register(
        self, attempt: int = 1, mode: str = "push", start: int = 0, end: int = 8, frm: RankId = D, **kwargs
    ) -> list:
        blocks = array("i", range(10, 10 + -(-end // BLOCK) - start // BLOCK)).tobytes()
        return self.do("register", frm, Register(H, attempt, mode, start, end, blocks, **{"asked": 7.0, **kwargs}))

    def cancel(self, attempt: int = 1, frm: RankId = D) -> list:
        return self.do("cancel", frm, Cancel(H, attempt, "gone"))

    def release(self, frm: RankId = D) -> list:
        return self.do("release", frm, Release(H, "enough"))

    @property
    def state(self) -> State | None:
        return self.source.state(H)


def posts(actions: list) -> list[tuple[int, int]]:
    return [(a.start, a.end) for a in actions if isinstance(a, PostWrite)]


def transfers(actions: list) -> list[int]:
    return [a.transfer for a in actions if isinstance(a, PostWrite)]


def blocks_of(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def sent(actions: list, kind: type | None = None) -> list:
    return [a.message for a in actions if isinstance(a, Send) and (kind is None or isinstance(a.message, kind))]


def finished(actions: list) -> list[str]:
    return [a.request_id for a in actions if isinstance(a, SourceFinished)]


# --- every transition -------------------------------------------------------------------------------------------------


def served_without_a_leg(rig: Rig) -> None:
    rig.do("expect", SCHEDULER, Expect(H, 1.0))
    rig.release(SCHEDULER)


def served_while_computing(rig: Rig) -> None:
    rig.start()
    rig.release(SCHEDULER)


SCENARIOS = {
    (State.EXPECTED, Event.START): lambda r: (r.register(), r.start()),
    (State.EXPECTED, Event.SERVE): served_without_a_leg,
    (State.EXPECTED, Event.EXPIRE): lambda r: (r.register(), r.wait(30.0)),
    (State.COMPUTING, Event.COMPLETE): lambda r: (r.start(), r.complete()),
    (State.COMPUTING, Event.PREEMPT): lambda r: (r.start(), r.progress(4, (5,)), r.do("preempt", "r1")),
    (State.COMPUTING, Event.ABORT): lambda r: (r.start(), r.finish(aborted="stop", held=False)),
    (State.COMPUTING, Event.SERVE): lambda r: (r.start(), r.register(), r.cancel()),
    (State.FINAL, Event.PREEMPT): lambda r: (r.start(), r.complete(), r.do("preempt", "r1")),
    (State.FINAL, Event.ABORT): lambda r: (r.start(), r.complete(), r.finish(held=False)),
    (State.FINAL, Event.SERVE): lambda r: (r.start(), r.complete(), r.release()),
    (State.FINAL, Event.EXPIRE): lambda r: (r.start(), r.complete(), r.finish(), r.wait(30.0)),
    (State.SERVED, Event.START): lambda r: (served_without_a_leg(r), r.start()),
    (State.SERVED, Event.COMPLETE): lambda r: (served_while_computing(r), r.complete()),
    (State.SERVED, Event.PREEMPT): lambda r: (served_while_computing(r), r.do("preempt", "r1")),
    (State.SERVED, Event.EXPIRE): lambda r: (served_without_a_leg(r), r.wait(30.0)),
    (State.SERVED, Event.CLOSE): lambda r: (served_while_computing(r), r.complete(), r.finish()),
}


@pytest.mark.parametrize(("state", "event"), [(s, e) for s, events in TRANSITIONS.items() for e in events])
def test_every_transition_of_the_table_can_happen(state, event) -> None:
    rig = Rig()
    SCENARIOS[state, event](rig)
    assert rig.taken[-1][0] is state or (state, event) in rig.taken
    assert (state, event) in rig.taken
    assert rig.state is TRANSITIONS[rig.taken[-1][0]][rig.taken[-1][1]]


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in State for e in Event if e not in TRANSITIONS[s]])
def test_every_other_transition_is_a_defect_of_ours_and_says_so(state, event) -> None:
    one = module.SourceHandoff(H, state, 0.0)
    with pytest.raises(LocalProtocolError, match=f"source handoff h: {event.value} while {state.value}"):
        Source(BLOCK)._step(one, event)
    assert one.state is state


# --- the engine's part ------------------------------------------------------------------------------------------------


def test_a_request_cannot_be_started_twice_nor_finished_unstarted() -> None:
    rig = Rig()
    rig.start()
    with pytest.raises(LocalProtocolError, match="r1 was started twice"):
        rig.start()
    with pytest.raises(LocalProtocolError, match="r9 finished and was never started"):
        rig.finish("r9")


def test_words_about_unknown_requests_change_nothing() -> None:
    rig = Rig()
    assert rig.progress(4, (1,), "nobody") == []
    assert rig.do("preempt", "nobody") == []


def test_a_second_request_of_the_same_name_is_plain_prefill_and_gets_its_blocks_back_at_once() -> None:
    rig = Rig()
    rig.start()
    rig.start(request="r2")
    rig.progress(8, (1, 2), "r2")
    rig.do("preempt", "r2")
    assert rig.state is State.COMPUTING, "the second request's progress counted for the first"
    assert finished(rig.finish("r2")) == ["r2"]
    rig.start(request="r3")
    assert finished(rig.finish("r3", held=False)) == []
    rig.complete()
    rig.register()
    assert posts(rig.all) == [(0, 8)]


@pytest.mark.parametrize("held", [True, False])
def test_an_unfinished_prompt_fails_the_sink_and_names_how_far_it_came(held) -> None:
    rig = Rig()
    rig.start()
    rig.register()
    rig.progress(3, (5,))
    actions = rig.finish(held=held)
    (failed,) = sent(actions, Failed)
    assert failed.reason == "prefill ended with 3 of 8 prompt tokens computed"
    assert finished(actions) == (["r1"] if held else [])
    assert rig.state is State.CLOSED


def test_blocks_that_were_not_kept_are_not_read_any_more() -> None:
    rig = Rig(leased=False)
    rig.start()
    rig.register()
    rig.complete()
    (failed,) = sent(rig.finish(held=False), Failed)
    assert failed.reason == "the engine kept no blocks for the handoff"
    assert posts(rig.do("leased", D, 1e6)) == []
    assert rig.state is State.CLOSED


def test_a_request_that_ends_under_a_write_is_closed_when_the_write_is_terminal() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.progress(4, (5,)))
    assert sent(rig.finish(aborted="client went away", held=True)) == []
    assert finished(rig.all) == []
    actions = rig.do("written", transfer)
    assert [message.reason for message in sent(actions, Failed)] == ["client went away"]
    assert finished(actions) == ["r1"]


def test_progress_that_says_nothing_new_posts_nothing_but_keeps_its_blocks() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    rig.progress(4, (5,))
    assert rig.progress(4, (6,)) == []
    (write,) = [a for a in rig.progress(8) if isinstance(a, PostWrite)]
    assert list(array("i", write.source_blocks)) == [5, 6]


def test_positions_beyond_the_prompt_are_not_the_handoffs() -> None:
    rig = Rig()
    rig.start(tokens=6)
    rig.register(end=6)
    assert posts(rig.progress(9, (5, 6, 7))) == [(0, 6)]


# --- posting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_whole_blocks_are_posted_as_they_become_final(stream) -> None:
    rig = Rig(stream=stream)
    rig.start(tokens=10)
    rig.register(end=10)
    got = [posts(rig.progress(3, (5,))), posts(rig.progress(6, (6,))), posts(rig.progress(10, (7,)))]
    assert got == ([[], [(0, 4)], [(4, 10)]] if stream else [[], [], [(0, 10)]])


def test_each_write_is_announced_before_it_is_posted() -> None:
    rig = Rig()
    rig.start()
    rig.register(attempt=3)
    for count, final in enumerate((4, 8), 1):
        announced, write = (a for a in rig.progress(final, (5,)) if isinstance(a, (Send, PostWrite)))
        assert announced == Send(D, Posted(H, 3, count))
        assert (write.to, write.end) == (D, final)


def test_the_announcement_of_a_write_that_was_not_posted_is_taken_back() -> None:
    """Or the sink would look for it until the handoff ends."""
    rig = Rig()
    rig.start()
    rig.register()
    rig.progress(4, (5,))
    (write,) = [a for a in rig.progress(8, (6,)) if isinstance(a, PostWrite)]
    assert rig.do("unposted", write.transfer) == [Send(D, Posted(H, 1, 1))]
    again = [a for a in rig.do("leased", D, 1e6) if isinstance(a, (Send, PostWrite))]
    assert again[0] == Send(D, Posted(H, 1, 2))
    assert (again[1].start, again[1].end) == (4, 8)


def test_a_write_names_blocks_positions_attempt_and_generation() -> None:
    rig = Rig()
    rig.start()
    rig.do("preempt", "r1")
    rig.register(attempt=3, start=5)
    (write,) = [a for a in rig.complete() if isinstance(a, PostWrite)]
    assert (write.to, write.handoff, write.attempt, write.generation) == (D, H, 3, 1)
    assert (write.start, write.end, write.span) == (5, 8, (5, 8))
    assert list(array("i", write.source_blocks)) == [5, 6]
    assert list(array("i", write.registered)) == [10]


@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_posted_without_a_lease_and_everything_as_soon_as_there_is_one(early) -> None:
    rig = Rig(leased=False)
    if early:
        rig.do("leased", D, rig.now)  # over already
    rig.do("leased", D2, 1e6)  # another's
    rig.start()
    rig.register()
    assert posts(rig.complete()) == []
    assert posts(rig.do("leased", D, rig.now + 1.0)) == [(0, 8)]


def test_a_lease_that_ended_stops_posting_until_it_is_renewed_and_cannot_be_shortened() -> None:
    rig = Rig(leased=False)
    rig.do("leased", D, rig.now + 5.0)
    rig.do("leased", D, rig.now + 1.0)
    rig.start()
    rig.register()
    rig.now += 4.9
    assert posts(rig.progress(4, (5,))) == [(0, 4)]
    rig.now += 0.1
    assert posts(rig.progress(8, (6,))) == []
    assert posts(rig.do("leased", D, rig.now + 1.0)) == [(4, 8)]


def test_who_is_suspended_is_not_posted_to_before_the_lease_is_renewed() -> None:
    """After a broken connection, whose is not known, it is nobody's turn."""
    rig = Rig()
    rig.do("leased", D2, 1e6)
    rig.start()
    rig.register()
    assert posts(rig.progress(4, (5,))) == [(0, 4)]
    rig.source.suspend()
    assert posts(rig.progress(8, (6,))) == []
    assert posts(rig.do("leased", D2, 2e6)) == []
    assert posts(rig.do("leased", D, rig.now + 1.0)) == [(4, 8)]


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_could_not_be_begun_is_posted_when_the_lease_is_renewed(cancelled) -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (first,) = [action for action in rig.progress(4, (5,)) if isinstance(action, PostWrite)]
    (second,) = [action for action in rig.progress(8, (6,)) if isinstance(action, PostWrite)]
    rig.do("written", first.transfer)
    if cancelled:
        rig.do("cancel", D, Cancel(H, 1, "enough"))
        assert CancelAck(H, 1) in [a.message for a in rig.do("unposted", second.transfer) if isinstance(a, Send)]
        assert posts(rig.do("leased", D, 2e6)) == []
        return
    assert posts(rig.do("unposted", second.transfer)) == []
    assert posts(rig.wait(1.0)) == []
    assert posts(rig.do("leased", D, 2e6)) == [(4, 8)]


def test_nothing_is_posted_twice() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    rig.complete()
    rig.finish()
    again = (
        rig.register()
        + rig.register(again=True)
        + rig.do("leased", D, 2e6)
        + rig.wait(1.0)
        + rig.do("expect", SCHEDULER, Expect(H, 1.0))
    )
    assert posts(again) == []


def test_a_preempted_position_is_not_posted_again_while_an_older_write_to_it_flies() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (old,) = transfers(rig.progress(4, (5,)))
    rig.do("preempt", "r1")
    assert posts(rig.complete()) == [], "two writes to one position at a time: the fabric keeps no order"
    actions = rig.do("written", old)
    assert posts(actions) == [(0, 8)]
    assert [a.generation for a in actions if isinstance(a, PostWrite)] == [1]


def test_a_write_of_a_revoked_generation_is_never_sealed() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (old,) = transfers(rig.complete())
    rig.do("preempt", "r1")
    rig.progress(8, (7, 8))
    actions = rig.do("written", old)
    assert sent(actions, Seal) == []
    (new,) = transfers(actions)
    assert sent(rig.do("written", new), Seal) == [Seal(H, 1, 1, 8)]


@pytest.mark.parametrize("old", ["terminal before the preemption", "terminal after it"])
def test_what_a_revoked_generation_wrote_is_not_sealed_though_nothing_new_can_be_posted(old) -> None:
    """The lease has ended, so nothing flies that could hold a seal back: only what counts as written does."""
    rig = Rig(leased=False)
    rig.do("leased", D, rig.now + 1.0)
    rig.start()
    rig.register()
    (first,) = transfers(rig.progress(4, (5,)))
    if old == "terminal before the preemption":
        rig.do("written", first)
    (second,) = transfers(rig.complete())
    rig.do("preempt", "r1")
    rig.now += 1.0
    rig.progress(8, (7, 8))
    for transfer in [second] if old == "terminal before the preemption" else [first, second]:
        assert sent(rig.do("written", transfer), Seal) == []
    assert sent(rig.wait(1.0), Seal) == []
    (new,) = transfers(rig.do("leased", D, rig.now + 1.0))
    assert sent(rig.do("written", new), Seal) == [Seal(H, 1, 1, 8)]


def test_what_was_written_before_a_preemption_is_written_again() -> None:
    rig = Rig(leased=False)
    rig.do("leased", D, rig.now + 1.0)
    rig.start()
    rig.register(end=4)
    (old,) = transfers(rig.progress(4, (5,)))
    rig.do("written", old)
    rig.do("preempt", "r1")
    rig.now += 1.0
    assert sent(rig.progress(8, (7, 8)), Seal) == []
    assert posts(rig.do("leased", D, rig.now + 1.0)) == [(0, 4)]


def test_sealed_only_when_every_write_is_terminal_and_finished_only_when_the_engine_is() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (first,) = transfers(rig.progress(4, (5,)))
    (second,) = transfers(rig.progress(8, (6,)))
    assert sent(rig.do("written", second), Seal) == []
    assert sent(rig.do("written", first), Seal) == [Seal(H, 1, 0, 8)]
    assert finished(rig.all) == []
    assert finished(rig.finish()) == ["r1"]
    assert len(rig.source) == 0
    assert not rig.source.serving()


# --- registrations ----------------------------------------------------------------------------------------------------


def test_a_sink_that_wants_more_than_the_prompt_is_refused_with_both_numbers() -> None:
    for order in ("start first", "register first"):
        rig = Rig()
        actions = rig.start() + rig.register(end=12) if order == "start first" else rig.register(end=12) + rig.start()
        (failed,) = sent(actions, Failed)
        assert "decode wants positions up to 12, prefill's prompt has 8 tokens" in failed.reason
        assert finished(rig.complete() + rig.finish()) == ["r1"]


def test_a_second_sink_is_refused_and_the_first_is_served() -> None:
    rig = Rig()
    rig.do("leased", D2, 1e6)
    rig.start()
    rig.register()
    (failed,) = sent(rig.register(frm=D2), Failed)
    assert failed.reason == "d rank 0 has registered attempt 1 of it"
    assert [a.to for a in rig.complete() if isinstance(a, PostWrite)] == [D]


@pytest.mark.parametrize("attempt", [1, 3])
def test_another_attempt_of_the_same_sink_is_refused_while_one_has_not_ended(attempt) -> None:
    rig = Rig()
    rig.start()
    rig.register(attempt=2)
    (failed,) = sent(rig.register(attempt=attempt), Failed)
    assert failed.attempt == attempt
    assert "attempt 2" in failed.reason


def test_registering_what_was_given_up_says_why_it_was() -> None:
    rig = Rig()
    served_while_computing(rig)
    (failed,) = sent(rig.register(), Failed)
    assert failed.reason == "enough"


def test_registering_after_the_end_is_answered_and_starts_nothing() -> None:
    rig = Rig()
    rig.start()
    rig.complete()
    rig.finish()
    rig.wait(30.0)
    (failed,) = sent(rig.register(), Failed)
    assert failed.reason == "the handoff is over: no decode request came for 30 s"
    assert rig.do("expect", SCHEDULER, Expect(H, 9.0)) == rig.release() == []
    assert len(rig.source) == 0


@pytest.mark.parametrize("restarted", [True, False])
def test_a_registration_said_again_never_begins_anything(restarted) -> None:
    """It may have been overtaken by the end of its attempt: its blocks may be the engine's again."""
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.complete())
    rig.do("written", transfer)
    rig.finish()
    if restarted:
        rig.start(request="r2")
    assert [message.attempt for message in sent(rig.register(again=True), Failed)] == [1]
    if restarted:
        assert posts(rig.progress(8, (7, 8), "r2")) == []


def test_a_registration_of_which_only_the_repetition_arrives_is_failed_not_awaited() -> None:
    for known in (True, False):
        rig = Rig()
        if known:
            rig.start()
        (failed,) = sent(rig.register(again=True), Failed)
        assert failed.reason == "the handoff is over: this registration never arrived"
        assert len(rig.source) == known


def test_what_ended_is_forgotten_in_time_and_may_be_started_again() -> None:
    rig = Rig(memory=1)
    rig.start()
    rig.finish()
    rig.do("start", HandoffId("other"), "r2", 8)
    rig.finish("r2")
    assert rig.source.state(HandoffId("other")) is State.CLOSED
    assert rig.state is None
    rig.do("start", HandoffId("other"), "r3", 8)
    assert rig.source.state(HandoffId("other")) is State.COMPUTING


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"start": -4}, r"positions \[-4, 8\)"),
        ({"start": 8, "end": 4}, r"positions \[8, 4\)"),
        ({"mode": "pushh"}, "mode 'pushh'"),
    ],
)
def test_a_registration_without_meaning_is_the_peers_defect_and_changes_nothing(changes, text) -> None:
    rig = Rig()
    rig.start()
    with pytest.raises(RemoteProtocolError, match=text):
        rig.do(
            "register", D, Register(H, 1, **{"mode": "push", "start": 0, "end": 8, **changes}, blocks=b"", asked=1.0)
        )
    assert finished(rig.complete() + rig.finish() + rig.wait(30.0)) == ["r1"]


# --- cancel, release, loss --------------------------------------------------------------------------------------------


def test_a_cancel_is_acknowledged_when_nothing_flies_and_nothing_is_posted_after_it() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.progress(4, (5,)))
    assert sent(rig.cancel()) == []
    assert posts(rig.progress(8, (6,))) == []
    assert sent(rig.do("written", transfer)) == [CancelAck(H, 1)]
    assert sent(rig.cancel()) == [CancelAck(H, 1)], "a doubled cancel is answered as well"
    assert finished(rig.finish()) == ["r1"]
    assert sent(rig.cancel()) == [CancelAck(H, 1)], "even after the end"


def test_a_cancel_that_overtakes_the_failure_it_crosses_is_the_one_that_is_answered() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.progress(4, (5,)))
    rig.finish(aborted="stop")
    rig.cancel()
    assert sent(rig.do("written", transfer)) == [CancelAck(H, 1)]


def test_cancelling_what_was_never_registered_frees_the_source() -> None:
    rig = Rig()
    rig.start()
    rig.complete()
    rig.finish()
    actions = rig.cancel()
    assert sent(actions) == [CancelAck(H, 1)]
    assert finished(actions) == ["r1"]


def test_a_strangers_cancel_is_acknowledged_and_stops_nobody() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    assert sent(rig.cancel(frm=D2)) == [CancelAck(H, 1)]
    assert posts(rig.complete()) == [(0, 8)]


@pytest.mark.parametrize("known", [True, False], ids=["computing", "expected"])
@pytest.mark.parametrize("announced", [SCHEDULER, D])
def test_what_an_engine_announced_is_cancelled_and_released_by_that_engine_alone(known, announced) -> None:
    """A peer that has heard of a handoff has a session, too; it must not be able to end what it has no part in."""
    rig = Rig()
    if known:
        rig.start()
    rig.do("expect", announced, Expect(H, 30.0))
    state = rig.state
    assert rig.release(frm=D2) == []
    assert sent(rig.cancel(frm=D2)) == [CancelAck(H, 1)]
    assert rig.state is state
    if not known:
        rig.start()
    rig.register()
    assert posts(rig.complete()) == [(0, 8)]


OVER = {
    "said again before it came": lambda rig: rig.register(again=True),
    "cancelled before it came": lambda rig: rig.cancel(),
    "refused, and doubled": lambda rig: rig.register(end=9999),
    "a later attempt cancelled": lambda rig: rig.cancel(attempt=3),
}
"""After each of these the sink may take it that nothing of its attempt 1 is or will be in flight."""


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("why", OVER)
def test_an_attempt_that_is_over_stays_over_whatever_comes_late(why, begun) -> None:
    """A registration that an old connection brought is read after words that were said over a new one."""
    rig = Rig()
    if begun or why.startswith("refused"):
        rig.start()
        rig.complete()
    (answer,) = sent(OVER[why](rig))
    assert isinstance(answer, (Failed, CancelAck))
    for again in (False, True, False):
        (failed,) = sent(rig.register(again=again))
        assert isinstance(failed, Failed)
        assert failed.attempt == 1
    if not (begun or why.startswith("refused")):
        rig.start()
        assert posts(rig.complete()) == []
    rig.finish()
    assert posts(rig.all) == []


@pytest.mark.parametrize("why", ["said again before it came", "cancelled before it came"])
def test_the_next_attempt_begins(why) -> None:
    rig = Rig()
    OVER[why](rig)
    assert sent(rig.register(attempt=2)) == []
    rig.start()
    assert posts(rig.complete()) == [(0, 8)]


def test_of_a_name_that_is_used_again_the_earlier_attempt_stays_over() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    assert posts(rig.complete()) == [(0, 8)]
    (post,) = [action for action in rig.all if isinstance(action, PostWrite)]
    rig.do("written", post.transfer)
    rig.finish()
    assert rig.state is State.CLOSED
    rig.start(request="r2")
    (failed,) = sent(rig.register())
    assert failed.reason.startswith("the handoff is over")
    assert sent(rig.register(attempt=2)) == []


def test_attempts_are_remembered_for_a_while_and_not_for_ever() -> None:
    rig = Rig(memory=2)
    for number in range(100):
        rig.do("cancel", D, Cancel(HandoffId(f"h{number}"), 1, "gone"))
    assert len(rig.source._over) == 16


def test_what_an_engine_announced_is_registered_by_no_other_while_that_engine_is_there() -> None:
    rig = Rig()
    rig.start()
    rig.do("expect", SCHEDULER, Expect(H, 30.0))
    (failed,) = sent(rig.register(frm=D2), Failed)
    assert failed.reason == "d has announced itself for it"
    rig.do("peer_lost", SCHEDULER, "silent")
    assert sent(rig.register(frm=D2, attempt=2)) == []
    rig.do("leased", D2, 1e6)
    assert posts(rig.complete()) == [(0, 8)]
    (post,) = [action for action in rig.all if isinstance(action, PostWrite)]
    assert post.to == D2


def test_the_engine_itself_may_release_by_any_of_its_processes() -> None:
    rig = Rig()
    rig.start()
    rig.do("expect", SCHEDULER, Expect(H, 30.0))
    rig.cancel()
    assert rig.state is State.SERVED


def parked(rig: Rig, frm: RankId, count: int, size: int = 0, name: str = "") -> list:
    """Register handoffs that this engine does not know. Returns the refusals."""
    refused = []
    for i in range(count):
        handoff = HandoffId(f"{name or frm.engine}-{i}")
        refused += sent(rig.do("register", frm, Register(handoff, 1, "push", 0, 4, bytes(size), 7.0)), Failed)
    return refused


def test_one_engine_cannot_take_all_the_room_for_handoffs_whose_prefill_leg_is_late(monkeypatch) -> None:
    monkeypatch.setattr(parking, "MAX_PARKED", 5)
    rig = Rig()
    refused = parked(rig, D2, 8)
    assert [failed.reason for failed in refused] == ["too many handoffs wait for their prefill leg"] * 3
    assert (
        rig.do("expect", D2, Expect(HandoffId("more"), 9.0)) == rig.do("release", D2, Release(HandoffId("m"), "")) == []
    )
    assert len(rig.source) == 5
    assert parked(rig, D, 5) == [], "another engine's room"
    rig.start()
    rig.do("leased", D2, 1e6)
    rig.register(frm=D2)
    assert posts(rig.complete()) == [(0, 8)], "what the engine knows needs no room"
    rig.wait(31.0)
    assert len(rig.source._parking) == 0
    assert parked(rig, D2, 5, name="later") == []


def test_one_engine_cannot_fill_the_memory_with_registrations_of_unknown_handoffs(monkeypatch) -> None:
    monkeypatch.setattr(parking, "MAX_PARKED_BYTES", 100)
    rig = Rig()
    refused = parked(rig, D2, 8, size=40)
    assert [failed.reason for failed in refused] == ["too many handoffs wait for their prefill leg"] * 6
    assert sum(len(sink.blocks) for one in rig.source._handoffs.values() for sink in one.sinks.values()) == 80
    assert parked(rig, D, 2, size=40) == []


def test_a_release_after_a_cancel_changes_nothing() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.complete())
    rig.cancel()
    assert rig.release() == []
    assert sent(rig.do("written", transfer)) == [CancelAck(H, 1)]


def test_a_strangers_release_does_not_take_a_registered_sinks_data_away() -> None:
    """Two decode requests with one id: the one that is rejected while it queues says Release, the other is registered."""
    rig = Rig()
    rig.start()
    rig.register()
    rig.release(SCHEDULER)
    (transfer,) = transfers(rig.complete())
    assert sent(rig.do("written", transfer), Seal)


@pytest.mark.parametrize("other_ends", ["before", "after"])
def test_a_failed_write_is_told_when_nothing_of_it_can_land_any_more(other_ends) -> None:
    rig = Rig()
    rig.start()
    rig.register()
    first, second = *transfers(rig.progress(4, (5,))), *transfers(rig.progress(8, (6,)))
    rig.finish()
    assert sent(rig.do("write_failed", first, "torn")) == []
    if other_ends == "before":
        assert sent(rig.wait(1.0) + rig.do("written", second)) == []
        assert sent(rig.wait(0.9)) == []
        actions = rig.wait(0.1)
    else:
        assert sent(rig.wait(5.0)) == [], "another write still flies"
        actions = rig.do("written", second)
    assert [message.reason for message in sent(actions, Failed)] == ["a write failed: torn"]
    assert finished(actions) == ["r1"]
    assert rig.wait(100.0) == []


def test_a_write_that_fails_after_a_cancel_delays_its_acknowledgement() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.complete())
    rig.cancel()
    assert sent(rig.do("write_failed", transfer, "torn")) == []
    assert sent(rig.wait(1.9)) == []
    assert sent(rig.wait(0.1)) == [CancelAck(H, 1)]


def test_a_lost_sink_is_not_written_to_any_more_and_the_blocks_come_back_after_the_last_write() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.progress(4, (5,)))
    assert sent(rig.do("peer_lost", D, "silent")) == []
    assert posts(rig.progress(8, (6,)) + rig.do("leased", D, 2e6)) == []
    assert finished(rig.finish()) == []
    assert finished(rig.do("written", transfer)) == ["r1"]
    assert rig.do("peer_lost", D, "again") == []


def test_a_sink_that_is_lost_twice_is_lost() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    rig.complete()
    rig.do("peer_lost", D, "silent")
    assert rig.do("peer_lost", D, "silent") == []


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_an_expected_handoff_ends_when_its_time_is_over_unless_it_is_renewed() -> None:
    rig = Rig()
    rig.do("expect", SCHEDULER, Expect(H, 1.0))
    rig.wait(20.0)
    rig.do("expect", SCHEDULER, Expect(H, 30.0))
    rig.wait(29.9)
    assert rig.state is State.EXPECTED
    rig.wait(0.1)
    assert rig.state is State.CLOSED


def test_a_registration_whose_prefill_never_comes_is_failed_with_the_time() -> None:
    rig = Rig()
    rig.register()
    (failed,) = sent(rig.wait(30.0), Failed)
    assert failed.reason == "no prefill request with this id came for 30 s"


def test_a_prefill_whose_decode_never_comes_ends_but_not_before_the_engine_is_done() -> None:
    rig = Rig()
    rig.start()
    rig.complete()
    assert rig.wait(1000.0) == []
    rig.finish()
    assert finished(rig.wait(29.9)) == []
    assert finished(rig.wait(0.1)) == ["r1"]


# --- pull -------------------------------------------------------------------------------------------------------------


def test_a_pull_is_granted_once_the_engine_is_done_and_again_when_asked_again() -> None:
    rig = Rig(leased=False)
    rig.register(mode="pull", asked=50.0)
    rig.start()
    assert sent(rig.complete()) == [], "a preemption could still take the blocks"
    grant = Grant(H, 1, 0, 8, array("i", [5, 6]).tobytes(), 50.0, 10.0)
    assert sent(rig.finish()) == [grant]
    assert rig.source.serving()
    assert sent(rig.wait(1.0)) == []
    assert [(g.asked, g.lease) for g in sent(rig.register(mode="pull", asked=60.0), Grant)] == [(60.0, 10.0)]
    assert [g.asked for g in sent(rig.register(mode="pull", asked=55.0), Grant)] == [60.0], "overtaken"
    actions = rig.release()
    assert finished(actions) == ["r1"]
    assert not rig.source.serving()


def test_a_pull_lease_that_is_not_renewed_frees_the_blocks_and_a_late_renewal_is_refused() -> None:
    rig = Rig()
    rig.start()
    rig.complete()
    rig.finish()
    rig.register(mode="pull")
    rig.wait(9.9)
    rig.register(mode="pull")
    assert finished(rig.wait(9.9)) == []
    actions = rig.wait(0.1)
    assert finished(actions) == ["r1"]
    assert sent(actions) == []
    (failed,) = sent(rig.register(mode="pull"), Failed)
    assert failed.reason == "the handoff is over: the pull's lease ended and was not renewed"


def test_a_sink_that_only_announces_itself_cannot_hold_the_blocks_for_ever() -> None:
    """Two engines whose caches are full of handoffs that wait for each other must come free again."""
    rig = Rig(hold_limit=100.0)
    rig.start()
    for _ in range(20):  # while prefill computes, waiting costs nothing
        rig.do("expect", SCHEDULER, Expect(H, 30.0))
        assert rig.wait(20.0) == []
    rig.complete()
    rig.finish()
    for _ in range(5):
        rig.do("expect", SCHEDULER, Expect(H, 30.0))
        assert not [a for a in rig.wait(19.0) if isinstance(a, SourceFinished)]
    rig.do("expect", SCHEDULER, Expect(H, 30.0))
    ended = rig.wait(6.0)
    assert [a for a in ended if isinstance(a, SourceFinished)] == [SourceFinished(H, "r1")]
    assert "had no blocks for the request within 100 s" in str(ended)


def test_a_registration_ends_the_hold_limit() -> None:
    rig = Rig(hold_limit=50.0, leased=False)
    rig.start()
    rig.complete()
    rig.finish()
    rig.register()
    assert not [a for a in rig.wait(500.0) if isinstance(a, SourceFinished)]


def test_a_reader_that_is_out_of_hearing_keeps_what_its_lease_promises() -> None:
    """The session is lost on this side alone: the reader may still be reading, and would take what it reads for valid."""
    rig = Rig()
    rig.start()
    rig.complete()
    rig.finish()
    rig.register(mode="pull")
    assert finished(rig.do("peer_lost", D, "silent")) == []
    assert rig.source.serving()
    assert finished(rig.wait(9.9)) == []
    assert finished(rig.wait(0.2)) == ["r1"]


def test_a_sink_with_another_prompt_is_refused_whichever_comes_first() -> None:
    for sink_first in (True, False):
        rig = Rig()
        steps = [lambda r=rig: r.register(prompt=b"theirs"), lambda r=rig: r.do("start", H, "r1", 8, prompt=(b"ours",))]
        for step in steps if sink_first else reversed(steps):
            step()
        rig.complete()
        assert not [a for a in rig.all if isinstance(a, PostWrite)]
        (failed,) = sent(rig.all, Failed)
        assert "the two legs' prompts differ" in failed.reason


@pytest.mark.parametrize(
    ("end", "prompt", "may"),
    [
        (8, b"8", True),
        (7, b"7", True),
        (6, b"6", True),
        (5, b"5", False),
        (8, b"7", False),
        (7, b"8", False),
        (6, b"8", False),
    ],
)
def test_a_prompt_may_be_longer_than_what_the_sink_wants_of_it(end, prompt, may) -> None:
    """By as many tokens as the source has digests for; and what the sink wants must be what the prompt begins with."""
    rig = Rig()
    rig.do("start", H, "r1", 8, prompt=(b"8", b"7", b"6"))
    rig.register(end=end, prompt=prompt)
    rig.complete()
    writes = [a for a in rig.all if isinstance(a, PostWrite)]
    assert [(write.start, write.end) for write in writes] == ([(0, end)] if may else [])
    assert [("prompts differ" in one.reason) for one in sent(rig.all, Failed)] == ([] if may else [True])


@pytest.mark.parametrize(("mine", "theirs"), [((), b"x"), ((b"x",), b""), ((b"x",), b"x")])
def test_a_prompt_that_is_not_known_is_not_compared(mine, theirs) -> None:
    rig = Rig()
    rig.do("start", H, "r1", 8, prompt=mine)
    rig.register(prompt=theirs)
    rig.complete()
    assert [a for a in rig.all if isinstance(a, PostWrite)]


@pytest.mark.parametrize("ttl", [float("inf"), float("nan"), 0.0, -1.0, 1e9])
def test_an_expect_without_a_sensible_time_is_refused(ttl) -> None:
    rig = Rig()
    with pytest.raises(RemoteProtocolError, match="expects h for"):
        rig.do("expect", SCHEDULER, Expect(H, ttl))
    assert rig.state is None


def test_a_write_says_until_when_it_may_be_posted() -> None:
    rig = Rig(leased=False)
    rig.do("leased", D, 123.0)
    rig.start()
    rig.register()
    (write,) = [a for a in rig.complete() if isinstance(a, PostWrite)]
    assert write.until == 123.0


def test_a_registration_whose_prefill_never_comes_is_not_put_off_by_who_only_expects() -> None:
    """Found by simulation: a second decode request of the same name queues for the blocks that the first has registered."""
    rig = Rig()
    rig.register()
    failures = []
    for _ in range(20):
        rig.do("expect", SCHEDULER, Expect(H, 30.0))
        failures += sent(rig.wait(2.0), Failed)
    assert [f.reason for f in failures] == ["no prefill request with this id came for 30 s"]


# --- blocks that a preempted request does not have any more ---------------------------------------------------------------


def quiet(actions: list) -> list[int]:
    return [a.token for a in actions if isinstance(a, SourceQuiet)]


def writing() -> tuple[Rig, int]:
    """A request whose whole prompt is being written."""
    rig = Rig()
    rig.start()
    rig.register()
    (transfer,) = transfers(rig.complete())
    return rig, transfer


@pytest.mark.parametrize("gone", ["preempt", "finish"])
def test_blocks_are_pinned_until_no_write_reads_them(gone) -> None:
    rig, transfer = writing()
    if gone == "preempt":
        actions = rig.do("preempt", "r1", token=7)
    else:
        actions = rig.do("finish", "r1", aborted="preempted", held=False, token=7)
    assert quiet(actions) == []
    assert quiet(rig.wait(50.0)) == []
    assert quiet(rig.do("written", transfer)) == [7]
    assert quiet(rig.wait(50.0)) == [], "once"


def test_what_nothing_reads_is_let_go_at_once() -> None:
    rig = Rig()
    rig.start()
    rig.progress(4, (5,))
    assert quiet(rig.do("preempt", "r1", token=3)) == [3], "nobody has registered"
    rig.register()
    assert quiet(rig.do("preempt", "r1", token=4)) == [4], "nothing is posted"
    assert quiet(rig.do("preempt", "r1")) == [], "nothing was pinned"


def test_each_generations_pin_waits_for_its_own_writes() -> None:
    rig, first = writing()
    rig.do("preempt", "r1", token=1)
    assert posts(rig.complete()) == [], "the earlier write to these positions is in flight"
    assert quiet(rig.do("preempt", "r1", token=2)) == [], "the first generation's write may read blocks it had kept"
    rig.complete()
    assert quiet(rig.do("written", first)) == [1, 2]
    assert transfers(rig.all)[1:] == [2], "and now the third generation's is posted"


def test_a_write_that_failed_may_read_until_the_drain_bound_is_over() -> None:
    rig, transfer = writing()
    rig.do("preempt", "r1", token=7)
    assert quiet(rig.do("write_failed", transfer, "torn")) == []
    assert quiet(rig.wait(1.9)) == []
    assert quiet(rig.wait(0.2)) == [7]


def test_pins_of_requests_that_the_source_does_not_serve_are_let_go_at_once() -> None:
    rig = Rig()
    rig.start()
    rig.start(request="r2")  # a second request of the same name: plain local prefill
    assert quiet(rig.do("preempt", "r2", token=5)) == [5]
    assert quiet(rig.do("finish", "r2", held=False, token=6)) == [6]
    assert quiet(rig.do("preempt", "nobody")) == []


def test_a_write_that_never_ends_is_stopped_by_revoking_the_keys_once() -> None:
    rig, transfer = writing()
    assert [a for a in rig.wait(119.9) if isinstance(a, Revoke)] == []
    (revoke,) = [a for a in rig.wait(0.2) if isinstance(a, Revoke)]
    assert revoke.reason == "handoff h: a write to d rank 0 has not ended for 120 s"
    assert [a for a in rig.wait(500.0) if isinstance(a, Revoke)] == []
    rig.do("write_failed", transfer, "revoked")
    assert sent(rig.wait(2.0), Failed)


def test_an_earlier_attempts_cancel_does_not_touch_a_later_one() -> None:
    rig = Rig()
    rig.start()
    rig.register(attempt=2)
    assert sent(rig.cancel(attempt=1)) == [CancelAck(H, 1)]
    assert posts(rig.complete()) == [(0, 8)]


# --- held for a reuse -------------------------------------------------------------------------------------------------


def test_what_is_held_is_granted_for_no_longer_than_it_is_held_and_nothing_is_owed_to_the_engine() -> None:
    rig = Rig()
    rig.do("hold", H, 8, blocks_of(1, 2), 125.0)
    assert rig.source.state(H) is State.FINAL
    (first,) = sent(rig.register(mode="pull", asked=50.0), Grant)
    assert (first.tokens, first.blocks, first.lease) == (8, blocks_of(1, 2), 10.0)
    rig.now = 118.0
    (second,) = sent(rig.register(mode="pull", asked=68.0), Grant)
    assert second.lease == 7.0, "it is let go at 125"
    rig.now = 124.5
    assert sent(rig.register(mode="pull", asked=74.5), Grant) == [], "too short a lease is none"
    assert rig.source.state(H) is State.FINAL, "the reader has what it was granted"
    rig.wait(0.5)
    assert rig.source.state(H) is State.CLOSED
    assert not rig.source.serving()
    assert not any(isinstance(action, SourceFinished) for action in rig.all)


def test_a_reader_that_has_read_ends_what_is_held() -> None:
    rig = Rig()
    rig.do("hold", H, 8, blocks_of(1, 2), 125.0)
    rig.register(mode="pull")
    rig.do("release", D, Release(H, "done"))
    assert rig.source.state(H) is State.CLOSED
    assert not any(isinstance(action, SourceFinished) for action in rig.all)
    assert rig.do("hold", H, 8, blocks_of(1, 2), 125.0) == [], "it is over"


def test_a_reader_may_come_before_what_is_held_for_it() -> None:
    rig = Rig()
    assert sent(rig.register(mode="pull"), Grant) == []
    assert len(sent(rig.do("hold", H, 8, blocks_of(1, 2), 125.0), Grant)) == 1


def test_what_is_held_for_longer_is_granted_for_longer() -> None:
    rig = Rig()
    rig.do("hold", H, 8, blocks_of(1, 2), 108.0)
    assert [one.lease for one in sent(rig.register(mode="pull"), Grant)] == [8.0]
    assert rig.do("hold", H, 8, b"", 130.0) == []
    assert [one.lease for one in sent(rig.register(mode="pull", asked=8.0), Grant)] == [10.0]
    rig.do("hold", H, 8, b"", 120.0)
    rig.now = 122.0
    (grant,) = sent(rig.register(mode="pull", asked=30.0), Grant)
    assert (grant.lease, grant.blocks) == (8.0, blocks_of(1, 2)), "never for less than was said before"
    rig.do("release", D, Release(H, "done"))
    rig.do("hold", H, 8, b"", 140.0)
    assert len(rig.source) == 0, "over is over"
    rig.do("hold", HandoffId("never held"), 8, b"", 140.0)
    assert len(rig.source) == 0


def test_a_reader_that_gave_up_before_it_was_held() -> None:
    rig = Rig()
    rig.register(mode="pull")
    rig.do("release", D, Release(H, "gave up"))
    rig.do("hold", H, 8, blocks_of(1, 2), 125.0)
    assert rig.source.state(H) is State.CLOSED
    assert len(rig.source) == 0


def test_a_reader_that_comes_too_late_is_refused() -> None:
    rig = Rig()
    rig.do("hold", H, 8, blocks_of(1, 2), 125.0)
    rig.now = 124.5
    (failed,) = sent(rig.register(mode="pull"), Failed)
    assert "about to be let go" in failed.reason
    assert rig.source.state(H) is State.CLOSED


def test_nobody_comes_for_what_is_held() -> None:
    rig = Rig()
    rig.do("hold", H, 8, blocks_of(1, 2), 125.0)
    rig.wait(24.0)
    assert rig.source.state(H) is State.FINAL
    rig.wait(1.0)
    assert rig.source.state(H) is State.CLOSED
    (failed,) = sent(rig.register(mode="pull"), Failed)
    assert "nobody came to read" in failed.reason


# --- what is copied before it is written, or read ---------------------------------------------------------------------


def test_writes_are_cut_into_slices_at_the_prompts_own_marks() -> None:
    rig = Rig(slice_tokens=8)
    rig.start(30)
    rig.register(start=5, end=30)
    assert posts(rig.progress(20, (1, 2, 3, 4, 5))) == [(5, 8), (8, 16), (16, 20)]
    rest = rig.progress(30, (6, 7, 8))
    assert posts(rest) == [(20, 24), (24, 30)]
    assert [word.writes for word in sent(rig.all, Posted)] == [1, 2, 3, 4, 5]
    for transfer in transfers(rig.all)[::-1]:
        last = rig.do("written", transfer)
    assert len(sent(last, Seal)) == 1


def test_a_write_is_wanted_while_its_sink_and_its_generation_are() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (write,) = transfers(rig.progress(4, (5,)))
    assert rig.source.wanted(write, 0)
    assert not rig.source.wanted(write, 1)
    rig.do("preempt", "r1", token=3)
    assert not rig.source.wanted(write, 0)


def test_a_write_that_is_not_wanted_any_more_is_dropped_and_posted_anew_under_the_next_generation() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (write,) = transfers(rig.progress(4, (5,)))
    rig.do("preempt", "r1", token=3)
    dropped = rig.do("dropped", write)
    assert SourceQuiet(3) in dropped
    assert sent(dropped, Posted) == [Posted(H, 1, 0)]
    assert posts(rig.complete()) == [(0, 8)]


def test_a_cancel_is_acknowledged_when_what_was_not_posted_is_dropped() -> None:
    rig = Rig()
    rig.start()
    rig.register()
    (write,) = transfers(rig.progress(4, (5,)))
    assert sent(rig.cancel()) == []
    assert not rig.source.wanted(write, 0)
    assert sent(rig.do("dropped", write)) == [CancelAck(H, 1)]


def test_it_says_what_a_peer_asks_for() -> None:
    rig = Rig()
    assert rig.source.asks(H, D) is None
    rig.start()
    assert rig.source.asks(H, D) is None
    rig.register(start=4)
    assert rig.source.asks(H, D) == (4, 8)


def test_a_grant_that_cannot_be_kept_is_a_failure_of_that_attempt_alone() -> None:
    rig = Rig()
    assert rig.do("withheld", H, D, 1, "broken") == []
    rig.start()
    assert rig.do("withheld", H, D, 1, "broken") == []
    rig.complete()
    rig.finish()
    assert len(sent(rig.register(mode="pull"), Grant)) == 1
    assert rig.do("withheld", H, D, 2, "broken") == []
    ended = rig.do("withheld", H, D, 1, "broken")
    assert sent(ended) == [Failed(H, 1, "broken")]
    assert finished(ended) == ["r1"]
    assert rig.do("withheld", H, D, 1, "broken") == []

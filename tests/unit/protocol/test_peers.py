"""Liveness and leases: what holds whatever the network does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import LocalProtocolError
from kvxfer.protocol.peers import TRANSITIONS, Event, Peer, State, Timing

TIMING = Timing(interval=1.0, timeout=5.0, lease=4.0, margin=0.5)


def up(now: float = 1.0) -> Peer:
    return Peer(TIMING, now)


@given(
    offset=st.floats(-1e6, 1e6),
    script=st.lists(
        st.tuples(
            st.sampled_from(["holder beats", "grantor beats"]),
            st.floats(0.0, 8.0),  # the time until then
            st.floats(0.0, 20.0),  # how long its message travels
            st.booleans(),  # lost
            st.booleans(),  # doubled
        ),
        max_size=30,
    ),
)
def test_a_holders_lease_never_ends_after_what_its_grantor_granted(offset, script) -> None:
    """Delays, losses, doubled and overtaking heartbeats, and clocks that show different times."""
    start = 2e6
    holder, grantor = up(start), up(start + offset)
    now, travelling, granted = start, [], False
    for who, wait, delay, lost, doubled in script:
        now += wait
        for item in sorted(travelling):
            if item[0] <= now:
                arrival, towards_holder, sent, echo, lease = item
                travelling.remove(item)
                if towards_holder:
                    holder.hear(sent, echo, lease, arrival)
                else:
                    grantor.hear(sent, echo, lease, arrival + offset)
        beat = holder.beat(now) if who == "holder beats" else grantor.beat(now + offset)
        copies = 0 if lost else 2 if doubled else 1
        travelling += [
            (now + delay * (i + 1), who != "holder beats", beat.sent, beat.echo, beat.lease) for i in range(copies)
        ]
        if holder.may_post_until > 0.0:
            granted = True
            assert holder.may_post_until <= grantor.granted_until - offset - TIMING.margin + 1e-6
        assert granted or holder.may_post_until == 0.0


def test_two_peers_that_beat_in_time_always_hold_each_others_leases() -> None:
    a, b, now = up(), up(), 1.0
    for _ in range(20):
        for mine, other in ((a, b), (b, a)):
            beat = mine.beat(now)
            other.hear(beat.sent, beat.echo, beat.lease, now + 0.01)
        now += TIMING.interval
    assert a.may_post_until > now
    assert b.may_post_until > now
    assert not a.silent(now)


def test_who_was_never_heard_is_granted_nothing() -> None:
    peer = up()
    beat = peer.beat(7.0)
    assert peer.granted_until == 0.0
    other = up()
    other.hear(beat.sent, beat.echo, beat.lease, 7.1)
    assert other.may_post_until == 0.0


def test_an_overtaken_grant_does_not_shorten_a_lease() -> None:
    peer = up()
    peer.hear(5.0, 4.0, 4.0, 5.0)
    peer.hear(3.0, 2.0, 4.0, 5.1)
    assert peer.may_post_until == 4.0 + 4.0 - TIMING.margin
    assert peer.beat(6.0).echo == 5.0, "an older stamp was echoed"


def test_beats_are_due_once_an_interval_and_only_while_up() -> None:
    peer = Peer(TIMING, 1.0)
    assert not peer.due(1.99)
    assert peer.due(2.0)
    peer.beat(2.0)
    assert not peer.due(2.5)
    assert peer.silent(100.0)
    assert not peer.due(200.0)


@pytest.mark.parametrize("heard", ["heartbeat", "any other message"])
def test_silence_is_counted_from_the_last_message_of_any_kind_and_told_once(heard) -> None:
    peer = up(1.0)
    if heard == "heartbeat":
        peer.hear(1.0, 0.0, 0.0, 4.0)
    else:
        peer.touch(4.0)
    assert not peer.silent(8.9)
    assert peer.silent(9.0)
    assert peer.state is State.LOST
    assert not peer.silent(10.0)
    assert not peer.replaced()


def test_a_peer_is_replaced_once() -> None:
    peer = up()
    assert peer.replaced()
    assert not peer.replaced()
    assert not peer.silent(1e9)


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in State for e in Event])
def test_the_table_is_what_the_machine_does(state, event) -> None:
    peer = Peer(TIMING, 0.0)
    peer.state = state
    if event in TRANSITIONS[state]:
        peer._step(event)
        assert peer.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(LocalProtocolError, match=f"session: {event.value} while {state.value}"):
            peer._step(event)


def test_the_default_times_are_sound() -> None:
    assert Timing().problems() == []


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ({"interval": 0.0}, "heartbeat_interval=0 must be above 0"),
        ({"interval": float("nan")}, "heartbeat_interval=nan must be above 0"),
        ({"lease": 2.5}, "post_lease=2.5 less its margin of 0.5 must be above twice heartbeat_interval=1"),
        ({"lease": float("nan")}, "post_lease=nan less its margin"),
        ({"timeout": 2.0}, "peer_timeout=2 must be above twice heartbeat_interval=1"),
        ({"timeout": float("nan")}, "peer_timeout=nan must be above twice"),
    ],
)
def test_times_that_cannot_work_are_named(times, text) -> None:
    assert any(text in problem for problem in Timing(**times).problems())


@given(st.builds(Timing, *[st.floats(0.01, 60.0)] * 3, st.floats(0.0, 5.0)))
def test_sound_times_survive_one_lost_heartbeat(timing) -> None:
    """If problems() finds nothing, then losing every second heartbeat neither ends posting nor loses the peer."""
    if timing.problems():
        return
    asked, renewed = 0.0, 2 * timing.interval
    assert asked + timing.lease - timing.margin > renewed
    assert timing.timeout > renewed


@pytest.mark.parametrize(
    ("mine", "interval", "timeout", "clash"),
    [
        (Timing(1.0, 5.0), 1.0, 5.0, False),
        (Timing(1.0, 5.0), 0.0, 0.0, False),  # a peer that does not say
        (Timing(1.0, 5.0), 2.5, 30.0, True),
        (Timing(3.0, 10.0, 10.0), 0.3, 1.5, True),
    ],
)
def test_peers_that_would_think_each_other_dead_know_it(mine, interval, timeout, clash) -> None:
    said = mine.clash(interval, timeout)
    assert bool(said) is clash
    assert not clash or "set the same heartbeat_interval and peer_timeout on both" in said


def test_the_latest_stamp_heard_never_runs_back() -> None:
    """What is said in a session names it: the peer knows by it that the word is of this session, and not of one before."""
    peer = up()
    assert peer.heard == 0.0
    peer.hear(5.0, 0.0, 0.0, 5.0)
    peer.hear(3.0, 0.0, 0.0, 5.1)
    assert peer.heard == 5.0

"""Two real control channels over 127.0.0.1, and strangers who send them whatever they like."""

from __future__ import annotations

import itertools
import threading
import time

import msgspec
import pytest
import zmq

from kvxfer.errors import TransportError
from kvxfer.layout.blocks import CacheLayout, Region
from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Directory, RankAddress, pack, unpack
from kvxfer.protocol.peers import Timing
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.control import ControlChannel
from tests.support.ranks import wait_until

TIMING = Timing(interval=0.05, timeout=0.6, lease=0.4, margin=0.05)
LAYOUT = CacheLayout(4, 8, "float32", 1, 1, 4, "test", "DRAM", (Region("r", 0, 64, 64, 0),), ((0, 512, 0),))
RELEASE = messages.Release(HandoffId("h"), "x")

_lives = itertools.count(1)


class Engine:
    """A channel that listens as an engine's control address and as its only rank; it remembers all that it hears."""

    def __init__(
        self, engine: str, port: int = 0, *, card: bool = True, rank: int = 0, timing: Timing = TIMING, **changes
    ) -> None:
        self.me = RankId(engine, f"i{next(_lives)}", rank)
        self.heard: list[tuple] = []
        self.leases: list[float] = []
        self.rounds = 0
        self.turning = True
        self.control = ControlChannel(self.me, "127.0.0.1", port, self, timing, connect_timeout=0.6)
        if card:
            mine = RankCard(engine, "m", 0, 1, 0, 1, "twin", LAYOUT, b"a")
            self.control.present(msgspec.structs.replace(mine, **changes))
        where = RankAddress(rank, self.me.incarnation, 0, 0, "", self.control.port)
        self.control.publish(Directory(engine, 1, 1, ready=True, ranks=(where,)))
        self.control.start()

    def address(self, engine: str | None = None) -> EngineAddress:
        return EngineAddress("127.0.0.1", self.control.port, self.me.engine if engine is None else engine)

    def on_message(self, frm, message) -> None:
        self.heard.append(("message", frm, message))

    def on_up(self, rank, card) -> None:
        self.heard.append(("up", rank, card))

    def beating(self, now) -> bool:
        return self.turning

    def on_ended(self, rank) -> None:
        self.heard.append(("ended", rank))

    def on_lost(self, rank, reason, granted_until, *, dead) -> None:
        self.heard.append(("lost", rank, reason))

    def on_lease(self, rank, until) -> None:
        self.leases.append(until)

    def on_outcome(self, outcome) -> None:
        self.heard.append(("outcome", outcome.ranks, outcome.reason))

    def on_round(self, now) -> None:
        self.rounds += 1

    def on_report(self, last) -> messages.Report:
        return messages.Report(0, {}, {"last": last}, [])

    def of(self, kind: str) -> list[tuple]:
        return [one[1:] for one in list(self.heard) if one[0] == kind]

    def wait(self, kind: str, count: int = 1) -> list[tuple]:
        wait_until(lambda: len(self.of(kind)) >= count, what=f"{count} × {kind!r} at {self.me}; heard {self.heard}")
        return self.of(kind)

    def has_lease(self) -> bool:
        return bool(self.leases) and self.leases[-1] > time.monotonic()


@pytest.fixture
def engines():
    made: list[Engine] = []

    def make(*args, **kwargs) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.control.stop()


@pytest.fixture
def pair(engines):
    """Two engines of which d has called p."""
    p, d = engines("p"), engines("d")
    d.control.connect(p.address())
    d.wait("outcome")
    return p, d


class Stranger:
    """A bare socket at an engine's door."""

    def __init__(self, port: int) -> None:
        self.me = RankId("x", "life", 0)
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, message: messages.Message, to: str = "", frm: RankId | None = None) -> None:
        self.socket.send(pack(frm or self.me, to, message))

    def hears(self, timeout: float = 5.0):
        assert self.socket.poll(int(timeout * 1000)), "no answer"
        return unpack(self.socket.recv())

    def hears_nothing(self) -> bool:
        return not self.socket.poll(150)


@pytest.fixture
def stranger():
    made: list[Stranger] = []

    def make(engine: Engine) -> Stranger:
        made.append(Stranger(engine.control.port))
        return made[-1]

    yield make
    for one in made:
        one.socket.close()


# --- two that get on --------------------------------------------------------------------------------------------------


def test_a_call_opens_a_session_on_both_sides_with_cards_and_leases(pair) -> None:
    p, d = pair
    assert d.of("outcome") == [((p.me,), None)]
    ((rank, card),) = p.wait("up")
    assert (rank, card.engine) == (d.me, "d")
    ((rank, card),) = d.of("up")
    assert (rank, card.engine) == (p.me, "p")
    wait_until(p.has_lease, what="prefill's lease")
    wait_until(d.has_lease, what="decode's lease")
    time.sleep(3 * TIMING.lease)
    assert p.has_lease(), "not renewed"
    assert p.of("lost") == d.of("lost") == []


def test_messages_arrive_in_order_in_both_directions(pair) -> None:
    p, d = pair
    for i in range(50):
        d.control.send(p.me, messages.Release(HandoffId(str(i)), "x"))
        p.control.send(d.me, messages.Failed(HandoffId(str(i)), 1, "x"))
    for engine, frm in ((p, d), (d, p)):
        got = engine.wait("message", 50)
        assert [sender for sender, _ in got] == [frm.me] * 50
        assert [message.handoff.transfer for _, message in got] == [str(i) for i in range(50)]


def test_a_second_call_finds_the_session_open(pair) -> None:
    p, d = pair
    d.control.connect(p.address())
    assert d.wait("outcome", 2)[1] == ((p.me,), None)
    assert len(p.of("up")) == 1


def test_two_that_call_each_other_both_get_through(engines) -> None:
    p, d = engines("p"), engines("d")
    d.control.connect(p.address())
    p.control.connect(d.address())
    assert d.wait("outcome")[0][1] is None
    assert p.wait("outcome")[0][1] is None
    wait_until(lambda: p.has_lease() and d.has_lease(), what="leases")
    d.control.send(p.me, RELEASE)
    p.control.send(d.me, RELEASE)
    p.wait("message")
    d.wait("message")
    time.sleep(2 * TIMING.timeout)
    assert p.of("lost") == d.of("lost") == []


def test_what_is_sent_without_a_session_is_dropped(pair) -> None:
    p, d = pair
    d.control.send(RankId("nobody", "i", 0), RELEASE)
    d.control.send(p.me, RELEASE)
    assert p.wait("message") == [(d.me, RELEASE)]


def test_an_idle_channel_sleeps(engines) -> None:
    p = engines("p")
    wait_until(lambda: p.rounds > 0, what="the first round")
    time.sleep(0.1)
    before = p.rounds
    time.sleep(0.4)
    assert p.rounds == before


# --- two that do not --------------------------------------------------------------------------------------------------


def test_engines_that_do_not_fit_refuse_each_other_and_say_why(engines) -> None:
    p, d = engines("p"), engines("d", model="other")
    d.control.connect(p.address())
    ((ranks, reason),) = d.wait("outcome")
    assert ranks == ()
    assert "model differs: p has m, d has other" in reason
    assert p.of("up") == d.of("up") == []
    good = engines("d2")
    good.control.connect(p.address())
    assert good.wait("outcome")[0][1] is None, "a refusal harmed the channel"


def test_the_caller_compares_as_well(engines) -> None:
    p, d = engines("p", model="other"), engines("d")
    p.control.sessions._fits = lambda rank, message: None
    d.control.connect(p.address())
    assert "model differs: d has m, p has other" in d.wait("outcome")[0][1]


def test_another_engine_at_the_address_is_named(engines) -> None:
    p, d = engines("p"), engines("d")
    d.control.connect(p.address("somebody"))
    assert "lives the engine 'p', the request names 'somebody'" in d.wait("outcome")[0][1]


@pytest.mark.parametrize("host", ["127.0.0.1", "not a host", "[::1", "bad\0host"])
def test_an_address_where_nobody_answers_ends_the_call_in_time(engines, host) -> None:
    p, d = engines("p"), engines("d")
    d.control.connect(EngineAddress(host, 1, "p"))
    assert "no answer from p at" in d.wait("outcome")[0][1]
    d.control.connect(p.address())
    assert d.wait("outcome", 2)[1][1] is None


def test_a_rank_without_its_card_yet_welcomes_nobody(engines) -> None:
    p, d = engines("p", card=False), engines("d")
    d.control.connect(p.address())
    assert "no answer from p rank 0" in d.wait("outcome")[0][1]
    assert p.of("up") == []


def test_a_port_in_use_is_named_with_what_to_change(engines) -> None:
    p = engines("p")
    with pytest.raises(TransportError) as raised:
        Engine("q", p.control.port)
    for part in (
        "engine 'q' cannot listen",
        f"127.0.0.1:{p.control.port}",
        "set control_port",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    ):
        assert part in str(raised.value)


def test_a_host_that_is_none_of_ours_is_named() -> None:
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(TransportError, match=f"cannot listen for its peers at {host}:0"):
            ControlChannel(RankId("q", "i", 0), host, 0, None, TIMING)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_silent_peer_is_lost_within_the_timeout_and_told_once(pair) -> None:
    p, d = pair
    p.control.stop()
    assert d.wait("lost") == [(p.me, "nothing heard from it for 0.6 s")]
    time.sleep(2 * TIMING.timeout)
    assert len(d.of("lost")) == 1


def test_a_peer_that_starts_anew_at_the_same_port_is_recognised_and_reconnects(engines, pair) -> None:
    p, d = pair
    d.control.send(p.me, RELEASE)
    p.wait("message")
    p.control.stop()
    again = engines("p", p.control.port)
    d.wait("lost")
    d.control.connect(again.address())
    assert d.wait("outcome", 2)[1] == ((again.me,), None)
    d.control.send(again.me, RELEASE)
    d.control.send(p.me, messages.Failed(HandoffId("to the dead"), 1, "x"))
    d.control.send(again.me, RELEASE)
    assert again.wait("message", 2) == [(d.me, RELEASE)] * 2
    assert len(d.of("lost")) == 1
    again_lost = [rank for rank, _ in d.of("lost")]
    assert again_lost == [p.me]


def test_a_replaced_peer_is_lost_at_once_when_its_directory_shows_it(engines, pair) -> None:
    """Before the timeout: whoever calls the address learns that the old process is gone."""
    p, d = pair
    p.control.stop()
    again = engines("p", p.control.port)
    d.control.connect(again.address())
    d.wait("outcome", 2)
    assert d.of("lost") == [(p.me, "another process has taken its place")]


def test_a_decode_that_starts_anew_replaces_its_old_session_at_prefill(engines, pair) -> None:
    p, d = pair
    d.control.stop()
    again = engines("d", d.control.port)
    again.control.connect(p.address())
    again.wait("outcome")
    assert p.wait("lost")[0] == (d.me, "another process has taken its place")


def test_a_process_that_was_stopped_hears_that_its_session_is_over_before_it_is_granted_anew(pair) -> None:
    """A paused prefill wakes up: decode had lost it, fenced, and gave the blocks back; what was registered is not to be written."""
    p, d = pair
    wait_until(p.has_lease, what="prefill's lease")
    asleep, wake = threading.Event(), threading.Event()
    p.control.call(lambda _now: (asleep.set(), wake.wait(10.0)))
    assert asleep.wait(5.0)
    d.wait("lost")
    d.control.connect(p.address())
    wake.set()
    d.wait("outcome", 2)
    before = len(p.leases)
    wait_until(lambda: len(p.leases) > before, what="a lease of the new session")
    assert p.of("lost") != [], "a lease was granted for registrations that decode has forgotten"


# --- strangers --------------------------------------------------------------------------------------------------------


def test_who_is_there_is_told_to_anybody(engines, stranger) -> None:
    p = engines("p")
    x = stranger(p)
    x.say(messages.WhoIs())
    envelope, answer = x.hears()
    assert (envelope.sender, envelope.to) == (p.me, "life")
    assert answer.ranks[0].port == p.control.port
    x.say(messages.ReportAsk(7))
    assert x.hears()[1].counters == {"last": 7}


def test_a_stale_incarnation_is_told_so_and_not_heard(pair, stranger) -> None:
    p, _ = pair
    x = stranger(p)
    x.say(messages.WhoIs(), to="an earlier life")
    assert isinstance(x.hears()[1], messages.Stale)
    x.say(messages.Stale(), to="an earlier life")
    assert x.hears_nothing(), "two stale processes would answer each other for ever"


@pytest.mark.parametrize("message", [RELEASE, messages.Heartbeat(1.0, 1.0, 1e9)])
def test_without_a_session_nothing_is_heard(engines, stranger, message) -> None:
    p = engines("p")
    x = stranger(p)
    x.say(message, to=p.me.incarnation)
    assert isinstance(x.hears()[1], messages.Stale)
    assert p.of("message") == []
    assert p.leases == []


@pytest.mark.parametrize(
    "answer",
    [
        Directory("p", 1, 1, ready=True, ranks=()),
        messages.Welcome({}, 1.0, 1.0, 1e9),
        messages.Refused("because"),
    ],
)
def test_an_answer_that_nobody_asked_for_opens_nothing(pair, stranger, answer) -> None:
    p, d = pair
    x = stranger(p)
    x.say(answer)
    x.say(messages.WhoIs())
    x.hears()
    assert [rank for rank, _ in p.of("up")] == [d.me]


def test_garbage_does_not_disturb_those_who_talk(pair, stranger) -> None:
    p, d = pair
    x = stranger(p)
    envelope = pack(x.me, "", messages.WhoIs())
    for frames in (
        [b""],
        [b"", b""],
        [b"\x00" * 1000],
        [b"\x91" * 5000],
        [envelope[:-1]],
        [b"a", b"b", b"c"],
        [envelope * 2],
    ):
        x.socket.send_multipart(frames)
    x.socket.send(msgspec.msgpack.encode([messages.WIRE_VERSION + 1, x.me, "", "new"]))
    x.say(messages.WhoIs())
    assert isinstance(x.hears()[1], Directory)
    d.control.send(p.me, RELEASE)
    p.wait("message")
    assert p.control.is_alive()
    assert p.of("lost") == []


def test_another_wire_version_is_said_in_the_log(engines, stranger, caplog) -> None:
    p = engines("p")
    x = stranger(p)
    x.socket.send(msgspec.msgpack.encode([messages.WIRE_VERSION + 1, x.me, "", {}]))
    wait_until(lambda: "wire version" in caplog.text, what="the log line")
    assert (
        f"the peer speaks wire version {messages.WIRE_VERSION + 1}, this process {messages.WIRE_VERSION}" in caplog.text
    )


def test_a_peer_too_large_for_the_limit_is_cut_off_and_others_are_not(pair, stranger) -> None:
    p, d = pair
    x = stranger(p)
    x.socket.send(bytes(messages.MAX_MESSAGE_BYTES + 1))
    d.control.send(p.me, RELEASE)
    p.wait("message")
    assert p.of("lost") == []


def test_a_listener_that_fails_does_not_end_the_thread(engines, pair) -> None:
    p, d = pair

    def fail(*args) -> None:
        raise RuntimeError("a defect")

    p.on_message = fail
    d.control.send(p.me, RELEASE)
    time.sleep(0.1)
    del p.on_message
    d.control.send(p.me, RELEASE)
    p.wait("message")


@pytest.mark.parametrize("hook", ["on_round", "on_lost"])
def test_a_listener_that_fails_once_a_round_does_not_end_the_thread(pair, hook) -> None:
    p, d = pair

    def fail(*args) -> None:
        raise RuntimeError("a defect")

    setattr(p, hook, fail)
    d.control.stop()
    p.control.join(3 * TIMING.timeout)
    assert p.control.is_alive()


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_channel_stops_whatever_it_is_doing_and_may_be_stopped_twice(engines) -> None:
    p, d = engines("p"), engines("d")
    d.control.connect(EngineAddress("127.0.0.1", 1, "p"))
    d.control.stop()
    assert not d.control.is_alive()
    d.control.stop()
    d.control.send(p.me, RELEASE)
    never = ControlChannel(RankId("n", "i", 0), "127.0.0.1", 0, p, TIMING)
    never.stop()
    never.stop()


def test_peers_with_clashing_heartbeats_refuse_each_other(engines) -> None:
    """Each is right by itself; together they would lose each other again and again."""
    p, d = engines("p", timing=Timing(3.0, 10.0, 10.0, 0.5)), engines("d")
    d.control.connect(p.address())
    assert "would think each other dead" in d.wait("outcome")[0][1]

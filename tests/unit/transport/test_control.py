"""Two real control channels over 127.0.0.1, and strangers who send them whatever they like."""

from __future__ import annotations

import itertools
import threading
import time

import msgspec
import pytest
import zmq

from kvxfer import addresses
from kvxfer.bench.process import free_ports
from kvxfer.errors import RemoteProtocolError, TransportError
from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages
from kvxfer.protocol.auth import Secret
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Directory, RankAddress, pack, unpack
from kvxfer.protocol.peers import Timing
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.control import ControlChannel
from kvxfer.transport.query import fetch_records
from tests.support.cards import CACHE
from tests.support.peers import has_ipv6
from tests.support.ranks import wait_until

TIMING = Timing(interval=0.05, timeout=0.6, lease=0.4, margin=0.05)
SECRET = Secret(b"what the engines share")
RELEASE = messages.Release(HandoffId("h"), "x")

_lives = itertools.count(1)


class Engine:
    """A channel that listens as an engine's control address and as its only rank; it remembers all that it hears."""

    def __init__(
        self,
        engine: str,
        port: int = 0,
        *,
        card: bool = True,
        rank: int = 0,
        timing: Timing = TIMING,
        host: str = "127.0.0.1",
        secret: Secret | None = None,
        connect_timeout: float = 0.6,
        **changes,
    ) -> None:
        self.me = RankId(engine, f"i{next(_lives)}", rank)
        self.heard: list[tuple] = []
        self.leases: list[float] = []
        self.rounds = 0
        self.turning = True
        self.dead: list[RankId] = []
        self.control = ControlChannel(self.me, host, port, self, timing, connect_timeout, secret=secret)
        if card:
            mine = RankCard(engine, "m", 0, 1, 0, 1, "twin", CACHE, b"a")
            self.control.present(msgspec.structs.replace(mine, **changes))
        where = RankAddress(rank, self.me.incarnation, 0, 0, "", self.control.port)
        self.control.publish(Directory(engine, 1, 1, ready=True, ranks=(where,)))
        self.control.start()

    def address(self, engine: str | None = None) -> EngineAddress:
        return EngineAddress(self.control.host, self.control.port, self.me.engine if engine is None else engine)

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
        self.dead += [rank] if dead else []

    def on_lease(self, rank, until, asked) -> None:
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


@pytest.fixture(params=[None, SECRET], ids=["no secret", "secret"])
def secret(request):
    return request.param


@pytest.fixture
def pair(engines, secret):
    """Two engines of which d has called p."""
    p, d = engines("p", secret=secret), engines("d", secret=secret)
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


def test_two_that_call_each_other_both_get_through(engines, secret) -> None:
    p, d = engines("p", secret=secret), engines("d", secret=secret)
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


def test_what_has_time_is_done_first_when_something_wakes_the_thread(engines) -> None:
    control = engines("a").control
    woken = threading.Event()
    done: list[str] = []
    control.call(lambda _now: done.append("has time"), wake=False)
    control.call(lambda _now: (done.append("has none"), woken.set()))
    assert woken.wait(5.0)
    assert done == ["has time", "has none"]


def test_engines_that_do_not_fit_refuse_each_other_and_say_why(engines, secret) -> None:
    p, d = engines("p", secret=secret), engines("d", model="other", secret=secret)
    d.control.connect(p.address())
    ((ranks, reason),) = d.wait("outcome")
    assert ranks == ()
    assert "model differs: p has m, d has other" in reason
    assert p.of("up") == d.of("up") == []
    good = engines("d2", secret=secret)
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
    p.turning = False
    assert d.wait("lost") == [(p.me, "nothing heard from it for 0.6 s")]
    time.sleep(2 * TIMING.timeout)
    assert len(d.of("lost")) == 1


def test_a_peer_that_starts_anew_at_the_same_port_is_recognised_and_reconnects(engines, pair, secret) -> None:
    p, d = pair
    d.control.send(p.me, RELEASE)
    p.wait("message")
    p.control.stop()
    again = engines("p", p.control.port, secret=secret)
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


def test_a_replaced_peer_is_lost_at_once_when_its_directory_shows_it(engines, pair, secret) -> None:
    """Before the timeout: whoever calls the address learns that the old process is gone."""
    p, d = pair
    d.control.knock = lambda *_: None
    p.control.stop()
    again = engines("p", p.control.port, secret=secret)
    d.control.connect(again.address())
    d.wait("outcome", 2)
    assert d.of("lost") == [(p.me, "another process has taken its place")]


def test_a_decode_that_starts_anew_replaces_its_old_session_at_prefill(engines, pair, secret) -> None:
    p, d = pair
    d.control.stop()
    again = engines("d", d.control.port, secret=secret)
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


@pytest.mark.parametrize("secret", [None], ids=["no secret"])
def test_a_stale_incarnation_is_told_so_and_not_heard(pair, stranger) -> None:
    p, _ = pair
    x = stranger(p)
    x.say(messages.WhoIs(), to="an earlier life")
    assert isinstance(x.hears()[1], messages.Stale)
    x.say(messages.Stale(), to="an earlier life")
    assert x.hears_nothing(), "two stale processes would answer each other for ever"


@pytest.mark.parametrize("message", [RELEASE, messages.Heartbeat(1.0, 1.0, 1e6)])
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
        messages.Welcome({}, 1.0, 1.0, 1e6),
        messages.Refused("because"),
    ],
)
@pytest.mark.parametrize("secret", [None], ids=["no secret"])
def test_an_answer_that_nobody_asked_for_opens_nothing(pair, stranger, answer) -> None:
    p, d = pair
    x = stranger(p)
    x.say(answer)
    x.say(messages.WhoIs())
    x.hears()
    assert [rank for rank, _ in p.of("up")] == [d.me]


def test_garbage_does_not_disturb_those_who_talk(pair, stranger, secret) -> None:
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
    with pytest.raises(RemoteProtocolError, match="speaks wire version"):
        x.hears()
    x.say(messages.WhoIs())
    if secret is None:
        assert isinstance(x.hears()[1], Directory)
    else:
        with pytest.raises(RemoteProtocolError, match="x rank 0 has no shared secret, p rank 0 asks for one"):
            x.hears()
    d.control.send(p.me, RELEASE)
    p.wait("message")
    assert p.control.is_alive()
    assert p.of("lost") == []


@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
@pytest.mark.parametrize(
    "envelope", [[], ["", {}], ["", msgspec.Raw(b"\xc0"), ["link", -1]]], ids=["new", "old", "ours"]
)
def test_another_wire_version_is_refused_at_both_ends(engines, stranger, caplog, secret, envelope) -> None:
    """Whatever the other version's envelope looks like after the version and, if it can be read, the sender."""
    p = engines("p", secret=secret)
    x = stranger(p)
    theirs, ours = messages.WIRE_VERSION + 1, messages.WIRE_VERSION
    x.socket.send(msgspec.msgpack.encode([theirs, x.me, *envelope]))
    said = f"x rank 0 speaks wire version {theirs}, p rank 0 speaks {ours}: install kvxfer releases with the same"
    assert x.socket.poll(5000)
    version, what, reason = msgspec.msgpack.decode(x.socket.recv())
    assert (version, what) == (ours, "refused")
    assert said in reason
    assert said in caplog.text
    x.socket.send(msgspec.msgpack.encode([theirs, x.me, *envelope]))
    x.socket.send(msgspec.msgpack.encode([theirs, "who"]))
    wait_until(lambda: p.control.counters["control_refused"] == 3, what="the count")
    assert caplog.text.count("x rank 0 speaks") == 1, "said once for each peer"
    assert "the peer speaks wire version" in caplog.text


@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
def test_the_refusal_of_another_wire_version_fails_a_call_at_once(engines, secret) -> None:
    """A listener of a future version answers in the shape that never changes."""
    with zmq.Context.instance().socket(zmq.ROUTER) as future:
        future.linger = 0
        port = future.bind_to_random_port("tcp://127.0.0.1")
        d = engines("d", secret=secret, connect_timeout=30.0)
        d.control.connect(EngineAddress("127.0.0.1", port, "p"))
        assert future.poll(5000)
        name, asked = future.recv_multipart()
        assert msgspec.msgpack.decode(asked)[0] == messages.WIRE_VERSION
        future.send_multipart([name, msgspec.msgpack.encode([99, "refused", "d speaks\n2, p speaks 99"])])
        assert d.wait("outcome") == [((), "d speaks\\n2, p speaks 99")]


def test_what_is_told_to_everybody_is_told_in_printable_words(engines, stranger, caplog) -> None:
    p = engines("p")
    x = stranger(p)
    liar = RankId("x\nWARNING kvxfer: all is well\x1b[2J", "life", 0)
    x.say(messages.Hello({"not": "a card"}, 1.0), frm=liar)
    assert isinstance(x.hears()[1], messages.Refused)
    x.say(messages.Failed(HandoffId("h\n"), 1, "a\rb" * 10_000), frm=liar, to=p.me.incarnation)
    x.hears()
    assert "x\\nWARNING kvxfer: all is well\\x1b[2J rank 0" in caplog.text
    assert len(caplog.records) == len(caplog.text.splitlines())


# --- a shared secret --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (None, SECRET, "d rank 0 has no shared secret, p rank 0 asks for one: give both engines the same secret"),
        (SECRET, None, "d rank 0 has a shared secret, p rank 0 has none: give both engines the same secret"),
        (Secret(b"quite another secret"), SECRET, "d rank 0 and p rank 0 have different shared secrets: give both"),
    ],
)
def test_unlike_secrets_refuse_each_other_at_both_ends_and_at_once(engines, caplog, theirs, ours, said) -> None:
    p, d = engines("p", secret=ours), engines("d", secret=theirs, connect_timeout=30.0)
    for count in (1, 2, 3):
        d.control.connect(p.address())
        ranks, reason = d.wait("outcome", count)[-1]
        assert ranks == ()
        assert reason.startswith(said), reason
    assert "KVXFER_SECRET_FILE" in reason
    assert p.of("up") == d.of("up") == []
    assert caplog.text.count(f"refused what a peer sent: {said}") == 2, "once at each end"
    wait_until(lambda: p.control.counters["control_refused"] == 3, what="the count")


def test_an_engine_with_another_secret_at_the_address_is_recognised_by_the_caller(engines) -> None:
    """A listener that answers every knock, whether or not it can check it."""
    from kvxfer.transport import links

    p = engines("p", secret=Secret(b"quite another secret"))
    d = engines("d", secret=SECRET, connect_timeout=30.0)
    p.control._switchboard._links._challenge = lambda envelope, proof, route, now: p.control.put(
        route, pack(p.me, "", messages.Challenge(), lambda _: messages.Proof(proof.link + bytes(24), 0, bytes(32)))
    )
    d.control.connect(p.address())
    assert d.wait("outcome") == [((), f"d rank 0 and p rank 0 have different shared secrets: {links.CURE}")]


def test_a_new_process_at_the_address_is_noticed_before_the_timeout(engines) -> None:
    """The connection goes on by itself; what comes by it has a link that the new process does not know."""
    slow = Timing(interval=0.05, timeout=60.0, lease=0.4, margin=0.05)
    p, d = engines("p", secret=SECRET, timing=slow), engines("d", secret=SECRET, timing=slow)
    d.control.knock = lambda *_: None
    d.control.connect(p.address())
    d.wait("outcome")
    p.control.stop()
    engines("p", p.control.port, secret=SECRET, timing=slow)
    assert d.wait("lost") == [(p.me, "another process has taken its place")]
    assert d.dead == [], "its address may have moved to another host"


def test_the_records_are_told_to_who_knows_the_secret(engines, monkeypatch) -> None:
    p = engines("p", secret=SECRET)
    p.on_report = lambda last: messages.Report(0, p.control.sessions._card(), {"last": last}, [])
    for wrong, said in ((None, "has no shared secret"), (Secret(b"quite another secret"), "different shared secrets")):
        with pytest.raises(TransportError, match=said + ".*name the engines' own: --secret-file FILE"):
            fetch_records("127.0.0.1", p.control.port, secret=wrong)
    assert fetch_records("127.0.0.1", p.control.port, secret=SECRET, last=7).ranks[0].counters == {"last": 7}
    monkeypatch.setenv("KVXFER_SECRET", "what the engines share\n")
    assert fetch_records("127.0.0.1", p.control.port).engine == "p"


# --- addresses --------------------------------------------------------------------------------------------------------


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
BINDS = [
    ("127.0.0.1", "127.0.0.1"),
    ("localhost", "localhost"),
    ("0.0.0.0", "127.0.0.1"),
    ("*", "127.0.0.1"),
    pytest.param("::1", "::1", marks=IPV6),
    pytest.param("[::1]", "::1", marks=IPV6),
    pytest.param("::1", "[::1]", marks=IPV6),
    pytest.param("::", "::1", marks=IPV6),
    pytest.param("::", "127.0.0.1", marks=IPV6),
]


@pytest.mark.parametrize(("bound", "called"), BINDS)
def test_an_engine_is_reached_where_it_listens(engines, secret, bound, called) -> None:
    """The directory names no host, or a wildcard: its ranks are where the engine itself was reached."""
    for told in ("", bound if addresses.is_wildcard(bound) else ""):
        p, d = engines("p", host=bound, secret=secret), engines("d", secret=secret)
        where = RankAddress(0, p.me.incarnation, 0, 0, told, p.control.port)
        p.control.publish(Directory("p", 1, 1, ready=True, ranks=(where,)))
        d.control.connect(EngineAddress(called, p.control.port, "p"))
        assert d.wait("outcome") == [((p.me,), None)]
        p.on_report = lambda last, p=p: messages.Report(0, p.control.sessions._card(), {}, [])
        assert fetch_records(called, p.control.port, secret=secret).engine == "p"


@IPV6
def test_ranks_are_reached_at_the_address_that_is_advertised_for_them(engines) -> None:
    p, rank, d = engines("p"), engines("p", host="::1"), engines("d")
    where = RankAddress(0, rank.me.incarnation, 0, 0, "::1", rank.control.port)
    p.control.publish(Directory("p", 1, 1, ready=True, ranks=(where,)))
    d.control.connect(p.address())
    assert d.wait("outcome") == [((rank.me,), None)]


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


# --- who has ended, and who only says nothing ------------------------------------------------------------------------------


def test_a_process_that_ends_is_known_to_have_ended_at_once(engines) -> None:
    """Long before the time-out: its connection breaks, and its port refuses."""
    slow = Timing(interval=1.0, timeout=60.0, lease=4.0, margin=0.5)
    p, d = engines("p", timing=slow), engines("d", timing=slow)
    d.control.connect(p.address())
    wait_until(lambda: d.of("outcome"), what="the session")
    p.control.stop()
    wait_until(lambda: d.of("lost"), what="the loss")
    (lost,) = d.of("lost")
    assert "its process has ended" in lost[1]
    assert d.dead == [p.me]
    assert d.control.sessions.get(p.me) is None


def test_a_process_that_only_says_nothing_is_lost_and_not_thought_dead(engines) -> None:
    """Its port accepts, as the kernel does for a process that is stopped; when it does end, that is heard, too."""
    p, d = engines("p"), engines("d")
    d.control.connect(p.address())
    wait_until(lambda: d.of("outcome"), what="the session")
    p.turning = False
    wait_until(lambda: d.of("lost"), what="the loss")
    (lost,) = d.of("lost")
    assert "nothing heard from it" in lost[1]
    assert d.dead == []
    p.control.stop()
    wait_until(lambda: d.of("ended"), what="the end")
    assert d.of("ended") == [(p.me,)]


def test_another_process_at_the_same_address_does_not_show_that_the_first_has_ended(engines) -> None:
    """The address may have moved to another host."""
    slow = Timing(interval=1.0, timeout=60.0, lease=4.0, margin=0.5)
    p, d = engines("p", timing=slow), engines("d", timing=slow)
    d.control.connect(p.address())
    wait_until(lambda: d.of("outcome"), what="the session")
    port = p.control.port
    d.control.knock = lambda *_: None
    p.control.stop()
    engines("p", port=port, timing=slow)
    wait_until(
        lambda: d.of("lost") or d.control.send(p.me, messages.Release(HandoffId("h"), "a word for the dead")),
        what="the loss",
    )
    assert d.dead == []


def test_dialed_sockets_and_their_monitors_are_closed(engines) -> None:
    p, d = engines("p"), engines("d")
    for _ in range(3):
        d.control.connect(p.address())
        wait_until(lambda: d.control.sessions.get(p.me), what="the session")
        assert len(d.control._dealers) == len(d.control._monitors) == 1
        p.control.renew(p.control.sessions.card)
        wait_until(lambda: d.control.sessions.get(p.me) is None, what="its end")
        wait_until(lambda: not d.control._dealers and not d.control._monitors, what="the sockets' end")


def test_the_called_side_knows_where_its_caller_listens_once_it_has_seen_it_there(engines) -> None:
    slow = Timing(interval=0.1, timeout=60.0, lease=4.0, margin=0.05)
    p, d = engines("p", timing=slow), engines("d", timing=slow)
    d.control.connect(p.address())
    wait_until(lambda: p.control.sessions.get(d.me) and p.control.sessions.get(d.me).listens, what="the knock")
    assert p.control.sessions.get(d.me).listens == ("127.0.0.1", d.control.port)
    d.control.stop()
    wait_until(lambda: p.of("lost"), what="the loss")
    assert p.dead == [d.me], "after two missed beats"


def test_a_caller_that_cannot_be_seen_where_it_says_it_listens_is_never_thought_dead(engines) -> None:
    """Behind an address translation, what refuses there is somebody else."""
    p, d = engines("p"), engines("d")
    d.control.sessions.port = free_ports(1)[0]
    d.control.connect(p.address())
    d.wait("outcome")
    wait_until(lambda: not p.control._switchboard._said, what="the knock")
    assert p.control.sessions.get(d.me).listens is None
    d.control.stop()
    wait_until(lambda: p.of("lost"), what="the loss")
    assert p.dead == []

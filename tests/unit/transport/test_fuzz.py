"""A storm of nonsense, lies and old words at two ranks that work: nothing of theirs is touched, nothing grows without end.

``zebra`` has a session with both and an agent that both can hear: it may say anything that a peer may say, about handoffs of
others as well. Strangers have none. Nobody speaks in the name of prefill or decode themselves, unless these share a secret:
then everybody tries that, too, and repeats what the two have said to each other.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import tracemalloc
import typing

import msgspec
import numpy as np
import pytest
import zmq

from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages as m
from kvxfer.protocol.auth import Secret
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.parking import MAX_PARKED
from kvxfer.protocol.peers import Timing
from kvxfer.transport.refusals import MAX_LINES
from kvxfer.transport.sessions import MAX_SESSIONS
from kvxfer.transport.twin import TwinFabric
from tests.support.ranks import Rank, wait_until

SECRET = Secret(b"what the engines share")
KINDS = typing.get_args(m.AnyMessage)
STRANGERS = 40
ODD = [0, 1, -1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), -0.0, 1e308, "", "x" * 600]
ODD += ["a\nWARNING kvxfer: b", "\x1b[2J", b"", b"\xff" * 7, None, True, [], [[[[]]]], {}, {"t": "hello"}, "\ud7ff"]


class Storm:
    """Makes messages out of a seed. ``handoffs`` and ``heard`` are what an eavesdropper has learned so far."""

    def __init__(self, seed: int, victims: list[Rank], zebra: Rank, *, spoof: bool) -> None:
        self.random = random.Random(seed)
        self.spoof = spoof
        self.victims = victims
        self.zebra = zebra
        self.handoffs: list[HandoffId] = [HandoffId("nobody's")]
        self.heard: list[bytes] = []
        self.senders = [zebra.me] * 3 + [RankId(f"stranger{i}", "life", i % 3 - 1) for i in range(STRANGERS)]
        if spoof:
            self.senders += [rank.me for rank in victims] * 8
            self.senders += [RankId(rank.me.engine, "another life", 0) for rank in victims]
        self.cards = [{}, msgspec.to_builtins(zebra.card, builtin_types=(bytes,))]

    def value(self, name: str):
        draw = self.random
        match name:
            case "handoff":
                one = draw.choice(self.handoffs)
                return draw.choice([list(msgspec.structs.astuple(one)), [f"new{draw.randrange(10_000)}", 0, 0]])
            case "card":
                return draw.choice(self.cards)
            case "blocks" | "prompt" | "chain":
                return (
                    draw.randbytes(4 * draw.choice([0, 1, 2, 100])) if draw.random() < 0.9 else draw.randbytes(1 << 16)
                )
            case (
                "attempt"
                | "generation"
                | "start"
                | "end"
                | "tokens"
                | "rank"
                | "last"
                | "tp_size"
                | "pp_size"
                | "writes"
            ):
                return draw.choice([0, 1, 2, 3, 8, draw.randrange(100)])
            case "port":
                return draw.choice([0, 1, 5600, 65535])
            case "mode":
                return draw.choice(["push", "pull", "x"])
            case "ranks":
                return [{"rank": 0, "incarnation": "i", "tp_rank": 0, "pp_rank": 0, "host": "h", "port": 1}]
            case "sent" | "echo" | "lease" | "asked" | "ttl" | "interval" | "timeout" | "now":
                return draw.choice([0.0, 0.05, 1.0, time.monotonic(), 1e6])
            case "reason" | "engine":
                return draw.choice(["because", "prefill", "decode", "zebra", "a\nb" * 50])
            case "ready" | "again":
                return draw.random() < 0.5
            case "what":
                return draw.choice(["ask", "come", "done"])
            case "counters":
                return {}
            case "records":
                return []
        raise AssertionError(f"no values for {name}")

    def body(self) -> dict:
        kind = self.random.choice(KINDS)
        while kind is m.ReportAsk and self.random.random() < 0.9:
            kind = self.random.choice(KINDS)
        plain = {"t": kind.__struct_config__.tag}
        return plain | {name: self.value(name) for name in kind.__struct_fields__}

    def envelope(self, victim: Rank) -> bytes:
        """Make something to say: valid, nearly valid, or not at all."""
        draw = self.random
        what = draw.random()
        if what < 0.1 and self.spoof and self.heard:
            packed = draw.choice(self.heard)
            return self.renumbered(packed) if draw.random() < 0.5 else self.damaged(packed)
        if what < 0.15:
            return draw.choice(
                [draw.randbytes(draw.randrange(200)), b"\x91" * 3000, b"\x81" * 3000, b"\xdd\xff\xff\xff\xff"]
            )
        body = self.body()
        if what < 0.45:
            for _ in range(draw.randrange(1, 3)):
                key = draw.choice(list(body))
                body[key] = draw.choice([*ODD, *body.values()])
        to = draw.choice(["", victim.me.incarnation, victim.me.incarnation, "an earlier life"])
        sender = list(msgspec.structs.astuple(draw.choice(self.senders)))
        whole = [m.WIRE_VERSION, sender, to, body]
        if what < 0.5:
            whole[draw.randrange(4)] = draw.choice(ODD)
        if draw.random() < 0.3:
            whole.append(
                draw.choice(
                    [None, [draw.randbytes(draw.choice([16, 40])), draw.choice([0, 1, 99]), draw.randbytes(32)], 1]
                )
            )
        packed = msgspec.msgpack.encode(whole)
        return self.damaged(packed) if what > 0.85 else packed

    def damaged(self, packed: bytes) -> bytes:
        draw = self.random
        if draw.random() < 0.2 or not packed:
            return packed
        if draw.random() < 0.3:
            return packed[: draw.randrange(len(packed))]
        # Behind the sender only: without a secret, one changed letter would be somebody else's true word.
        changed, start = bytearray(packed), min(40, len(packed) - 1)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(start, len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)

    def renumbered(self, packed: bytes) -> bytes:
        """Say what was said, or anything else, as if it came next."""
        try:
            whole = msgspec.msgpack.decode(packed)
            whole[4][1] += self.random.choice([1, 10, 1000, 2**40])
            whole[3] = self.random.choice([whole[3], self.body()])
        except (msgspec.MsgspecError, TypeError, IndexError, KeyError, RecursionError):
            return packed
        return msgspec.msgpack.encode(whole)

    def notification(self) -> tuple[str, bytes]:
        draw = self.random
        names = ["handoff", "attempt", "generation", "rank", "start", "end"]
        fields = [self.value(name) for name in names]
        if draw.random() < 0.3:
            fields[draw.randrange(6)] = draw.choice(ODD)
        frm = draw.choice([self.zebra.me.agent, "nobody", "", "prefill/another life/0"])
        packed = msgspec.msgpack.encode(fields)
        return frm, draw.choice([packed, packed, packed[:-1], draw.randbytes(20), packed * 300])


def inject(victim: Rank, words: list[bytes]) -> None:
    """Let the victim's own control thread hear words, by a connection of which nothing is known."""
    done = threading.Event()
    board = victim.control._switchboard
    route = (victim.control._router, b"stranger")

    def hear(now: float) -> None:
        for packed in words:
            board.guarded(board.receive, packed, route, now)
        done.set()

    victim.control.call(hear)
    assert done.wait(60.0), "the control thread does not answer any more"


def tap(victim: Rank, heard: list[bytes]) -> None:
    board = victim.control._switchboard
    original = board.receive

    def receive(packed, route, now) -> None:
        if len(heard) < 2000 and route[1] != b"stranger":
            heard.append(packed)
        original(packed, route, now)

    board.receive = receive


def sizes(rank: Rank) -> dict[str, int]:
    board, mover = rank.control._switchboard, rank.mover
    return {
        "sessions": len(list(board.sessions)),
        "links": len(board._links) if board._links else 0,
        "said": len(board._refusals),
        "source": len(mover.source),
        "parked": len(mover.source._parking),
        "ended": len(mover.source._ended),
        "leases": len(mover.source._may_post_until),
        "sink": len(mover.sink),
        "cards": len(mover.transfers.reach._cards),
        "agents": len(mover.transfers.reach._agents),
        "approached": sum(map(len, mover._approaches._tables)),
        "records": len(mover.records._open),
        "inbox": len(mover.transfers.keeper.agent.inbox),
    }


def storm(seed: int, volume: int, secret: Secret | None, caplog, *, by_socket: int = 3000) -> None:
    caplog.set_level(logging.WARNING)
    fabric = TwinFabric(seed=seed)
    # A machine that is busy elsewhere must not look like a peer that was silenced.
    settings = {"leg_timeout": 3.0, "secret": secret, "timing": Timing(0.1, 30.0, 10.0, 0.1)}
    p, d = (Rank(name, fabric, eager=True, **settings) for name in ("prefill", "decode"))
    zebra = Rank("zebra", fabric, **settings)
    zebra.card = RankCard("zebra", "lone", 0, 1, 0, 1, "LIBFABRIC", zebra.cache, zebra.mover.transfers.keeper.metadata)
    victims = [p, d]
    made = Storm(seed, victims, zebra, spoof=secret is not None)
    for victim in victims:
        tap(victim, made.heard)
    context = zmq.Context()
    try:
        d.control.connect(p.address)
        for victim in victims:
            zebra.control.connect(victim.address)
        wait_until(lambda: all(v.control.sessions.get(zebra.me) for v in victims), what="zebra's sessions")
        wait_until(lambda: d.control.sessions.get(p.me), what="the pair's session")
        wait_until(lambda: p.control.sessions.get(d.me), what="the pair's other session")
        sessions = {rank: one.control.sessions.get(rank) for one, rank in ((p, d.me), (d, p.me))}
        sockets = []
        for victim in victims:
            sockets.append(context.socket(zmq.DEALER))
            sockets[-1].linger = 0
            sockets[-1].connect(f"tcp://127.0.0.1:{victim.control.port}")
        tracemalloc.start()
        batch, sent, handoffs = 1000, 0, 0
        largest: dict[str, int] = {}
        while sent < volume:
            # As a router makes them: one changed letter of the last id must not be the next one.
            handoff = HandoffId(f"real{handoffs}-{made.random.getrandbits(64):016x}")
            blocks, mine = [1 + handoffs % 20, 30 + handoffs % 20], [25, 40 + handoffs % 10]
            p.fill(blocks, handoffs)
            d.control.send(p.me, m.Expect(handoff, 60.0))  # as an engine's scheduler does
            wait_until(lambda handoff=handoff: p.mover.source.state(handoff) is not None, what="the announcement")
            made.handoffs = [*made.handoffs[-4:], handoff]
            d.open(handoff, f"d{handoffs}", p.address, mine, 8)
            for victim, socket in zip(victims, sockets, strict=True):
                zebra.control.connect(victim.address)  # whatever it said may have ended its own session
                words = [made.envelope(victim) for _ in range(batch // 2)]
                few = min(by_socket, 50)
                by_socket -= few
                for packed in words[:few]:
                    socket.send(packed, zmq.NOBLOCK)
                inject(victim, words[few:])
                agent = fabric.agents[victim.me.agent]
                agent.inbox.extend(made.notification() for _ in range(batch // 10))
                for word in (made.body() for _ in range(5)):  # by zebra's own session, with its proofs
                    say(zebra, victim, word)
            p.prefill(handoff, f"p{handoffs}", blocks, 8, chunks=2)
            assert d.wait(f"d{handoffs}").reason is None
            assert getattr(p.wait(f"p{handoffs}"), "reason", None) is None
            assert np.array_equal(p.memory[:, blocks], d.memory[:, mine])
            sent += batch
            handoffs += 1
            for victim in victims:
                for name, size in sizes(victim).items():
                    largest[name] = max(largest.get(name, 0), size)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 200 << 20, f"{peak:,} bytes"
        assert largest["sessions"] <= min(MAX_SESSIONS, STRANGERS + 4), largest
        assert largest["cards"] <= STRANGERS + 4, largest
        assert largest["approached"] <= 3 * (STRANGERS + 4), largest
        assert largest["parked"] <= MAX_PARKED * (STRANGERS + 1), largest
        assert largest["ended"] <= 4096, largest
        assert largest["said"] <= MAX_LINES + 1, largest
        for victim in victims:
            assert victim.mover.is_alive()
            assert victim.control.is_alive()
            assert victim.control.counters["control_refused"] > volume / 20
            if secret is None:
                assert victim.mover.counters["refused_messages"] > 100
        for victim, other in ((p, d), (d, p)):
            assert victim.control.sessions.get(other.me) is sessions[other.me], "the pair lost each other"
            assert sessions[other.me].liveness.may_post_until > time.monotonic()
    finally:
        tracemalloc.stop()
        for rank in (p, d, zebra):
            rank.close()
        context.destroy(linger=0)
    records = [record for record in caplog.records if record.name.startswith("kvxfer")]
    assert [record for record in records if record.levelno >= logging.ERROR] == []
    assert all(record.getMessage().isprintable() for record in records)
    refused = [record.getMessage() for record in records if "refused what a peer sent" in record.getMessage()]
    assert len(refused) <= 6 * (MAX_LINES + 1)
    assert any("zebra" in text for text in refused)


def say(frm: Rank, to: Rank, body: dict) -> None:
    """Say something over a session that is open, whatever it is."""
    board = frm.control._switchboard
    raw = msgspec.Raw(msgspec.msgpack.encode(body))

    def put(_now: float) -> None:
        session = board.sessions.get(to.me)
        if session is None:
            return
        link = None if board._links is None else board._links._by_route.get(session.route)
        proof = None if link is None else link.prove(bytes(raw))
        board._wires.put(
            session.route, msgspec.msgpack.encode(m.Envelope(m.WIRE_VERSION, frm.me, to.me.incarnation, raw, proof))
        )

    frm.control.call(put)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
def test_a_storm_of_a_hundred_thousand_words_disturbs_nobody(secret, caplog) -> None:
    storm(1, 100_000, secret, caplog)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
def test_longer_storms(secret, seed, caplog) -> None:
    storm(seed, 500_000, secret, caplog)

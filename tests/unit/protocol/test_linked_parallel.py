"""Several real Sources and Sinks, linked: every source rank feeds every sink rank its own share, and one may feed nobody.

A smaller world than ``test_linked``'s, about what several ranks add to it. Words of each pair keep their order and may be lost,
sessions end, transfers land in any order or fail and go on landing, one rank's request is cancelled while the others' goes on.
What must hold, whatever happens:

* a received handoff holds, from each source rank, at every position, what that rank's sealed (granted) generation computed there;
* a rank's blocks go back when nothing of any rank may land in them, or is written or read under a grant out of them;
* each rank reports each request exactly once, and nothing is stuck in the end.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvxfer.protocol.actions import Note, PostRead, PostWrite, Revoke, Send, SinkFinished, SourceFinished, SourceQuiet
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Cancel, CancelAck, Failed, Grant, Posted, Register, Release, Seal, Written
from kvxfer.protocol.sink import Sink
from kvxfer.protocol.source import Source

BLOCK, DRAIN, LEASE, TOKENS = 4, 2.0, 4.0, 10
SHAPES = [(1, 2), (2, 1), (2, 2), (3, 2), (1, 3)]
PICK = st.integers(0, 11)


@dataclass(eq=False)
class Rank:
    """A worker process: one machine, its blocks, and what it has reported. ``key`` changes when its keys are revoked."""

    id: RankId
    machine: Source | Sink
    blocks: dict[str, list[int]] = field(default_factory=dict)  # request -> blocks that are not its engine's
    reports: dict[str, int] = field(default_factory=dict)
    key: int = 0


@dataclass(eq=False)
class Transfer:
    action: PostWrite | PostRead
    source: Rank
    sink: Rank
    key: int
    torn_until: float | None = None  # terminal, and still landing until then

    def pairs(self):
        a = self.action
        sources, sinks = array("i", a.source_blocks), array("i", a.registered)
        return [(p, sources[p // BLOCK], sinks[p // BLOCK]) for p in range(a.start, a.end)]


class Parallel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.numbers = itertools.count(1)
        self.memory: dict[tuple[Rank, int], list] = {}  # of a sink: [(position's content) by source rank]
        self.flying: list[Transfer] = []
        self.truth: dict[tuple[Rank, Rank, HandoffId, int], int] = {}  # what was sealed or granted: a generation
        self.pins: dict[tuple[Rank, int], list[int]] = {}

    @initialize(
        shape=st.sampled_from(SHAPES),
        idle=st.booleans(),
        mode=st.sampled_from(["push", "pull"]),
        trouble=st.integers(0, 5),
    )
    def begin(self, shape, idle, mode, trouble) -> None:
        self.mode, self.trouble = mode, trouble
        self.sources = [
            Rank(RankId("p", f"p{i}", i), Source(BLOCK, leg_timeout=30.0, lease=6.0, drain_bound=DRAIN))
            for i in range(shape[0] + idle)
        ]
        self.feeding = self.sources[: shape[0]]
        self.sinks = [
            Rank(RankId("d", f"d{i}", i), Sink(drain_bound=DRAIN, lease_margin=0.5, renew_after=2.5))
            for i in range(shape[1])
        ]
        self.words = {(a, b): deque() for a in self.sources for b in self.sinks}
        self.words |= {(b, a): deque() for a in self.sources for b in self.sinks}
        for source, sink in itertools.product(self.sources, self.sinks):
            self.of(source, source.machine.leased(sink.id, 1e9, self.now))
        self.request, self.generation, self.final, self.state = "", 0, 0, "none"
        self.rounds = 0
        self.new_round()

    # --- the two engines ----------------------------------------------------------------------------------------------

    def new_round(self) -> None:
        """Both legs of another handoff, when the last one is over; one sink rank may lag behind."""
        if self.rounds and (self.state != "over" or any(rank.blocks for rank in self.sinks + self.sources)):
            return
        self.rounds += 1
        self.handoff, self.request = HandoffId(f"h{self.rounds}"), f"r{self.rounds}"
        self.generation, self.final, self.state = 0, 0, "running"
        for rank in self.sources:
            rank.blocks[self.request] = []
            self.of(rank, rank.machine.start(self.handoff, self.request, TOKENS, self.now))
        self.to_open = list(self.sinks)

    def in_trouble(self) -> bool:
        self.trouble -= 1
        return self.trouble >= 0

    @rule()
    def another(self) -> None:
        self.new_round()

    @precondition(lambda self: self.to_open)
    @rule(pick=PICK, never=st.booleans())
    def open(self, pick, never) -> None:
        rank = self.to_open.pop(pick % len(self.to_open))
        if never and self.in_trouble():
            return
        blocks = [next(self.numbers) for _ in range(-(-TOKENS // BLOCK))]
        rank.blocks[self.request] = blocks
        for block in blocks:
            self.memory[rank, block] = [[None] * BLOCK for _ in self.sources]
        packed = array("i", blocks).tobytes()
        self.of(rank, rank.machine.open(self.handoff, self.request, self.mode, 0, TOKENS, packed, self.now))
        feeding, idle = [s.id for s in self.feeding], [s.id for s in self.sources if s not in self.feeding]
        self.of(rank, rank.machine.connected(self.handoff, feeding, self.now, None, idle))

    @precondition(lambda self: self.state == "running")
    @rule(tokens=st.integers(1, 12))
    def compute(self, tokens) -> None:
        self.final = min(TOKENS, self.final + tokens)
        for rank in self.sources:
            blocks, new = rank.blocks[self.request], []
            while (len(blocks) + len(new)) * BLOCK < self.final:
                new.append(next(self.numbers))
            blocks += new
            for p in range(self.final):
                self.memory.setdefault((rank, blocks[p // BLOCK]), [None] * BLOCK)[p % BLOCK] = self.tag(rank, p)
            self.of(rank, rank.machine.progress(self.request, array("i", new).tobytes(), self.final, self.now))

    def tag(self, rank: Rank, p: int) -> tuple:
        return self.request, self.generation, rank.id.rank, p

    @precondition(lambda self: self.state == "running" and self.final)
    @rule()
    def preempt(self) -> None:
        if not self.in_trouble():
            return
        self.generation, self.final = self.generation + 1, 0
        for rank in self.sources:
            token = next(self.numbers)
            self.pins[rank, token], rank.blocks[self.request] = rank.blocks[self.request], []
            self.of(rank, rank.machine.preempt(self.request, self.now, token))

    @precondition(lambda self: self.state == "running")
    @rule(aborts=st.booleans())
    def finish(self, aborts) -> None:
        if not (aborts and self.in_trouble()):
            self.compute(TOKENS)
        self.state = "over"
        aborted = None if self.final == TOKENS else "aborted"
        for rank in self.sources:
            held = bool(rank.blocks[self.request])
            if not held:
                del rank.blocks[self.request]
            self.of(rank, rank.machine.finish(self.request, self.now, aborted=aborted, held=held))

    @rule(pick=PICK)
    def cancel(self, pick) -> None:
        rank = self.sinks[pick % len(self.sinks)]
        if self.request in rank.blocks and self.in_trouble():
            self.of(rank, rank.machine.cancel(self.request, "cancelled"))

    # --- what the machines want ---------------------------------------------------------------------------------------

    def of(self, rank: Rank, actions) -> None:
        for action in list(actions):
            match action:
                case Send(to, message):
                    self.send(rank, next(r for r in self.sources + self.sinks if r.id == to), message)
                case PostWrite():
                    self.post(Transfer(action, rank, self.rank_of(action.to), self.rank_of(action.to).key))
                case PostRead():
                    self.post(Transfer(action, self.rank_of(action.frm), rank, rank.key))
                case SourceQuiet(token):
                    self.forget(rank, self.pins.pop((rank, token)))
                case SourceFinished(_, request) | SinkFinished(_, request, _):
                    rank.reports[request] = rank.reports.get(request, 0) + 1
                    assert rank.reports[request] == 1, "reported twice"
                    if isinstance(action, SinkFinished):
                        self.received(rank, action)
                    self.forget(rank, rank.blocks.pop(request))
                case Revoke():
                    rank.key += 1
                    self.flying = [t for t in self.flying if t.sink is not rank or isinstance(t.action, PostRead)]
                    self.of(rank, rank.machine.revoked())
                case _:
                    assert isinstance(action, Note)

    def rank_of(self, name: RankId) -> Rank:
        return next(rank for rank in self.sources + self.sinks if rank.id == name)

    def send(self, frm: Rank, to: Rank, message) -> None:
        if isinstance(message, (Seal, Grant)):
            self.truth[frm, to, message.handoff, message.attempt] = message.generation
        self.words[frm, to].append(message)

    def post(self, new: Transfer) -> None:
        assert new.source in self.feeding
        mine = {(block, p % BLOCK) for p, _, block in new.pairs()}
        for other in self.flying:
            if (other.source, other.sink) == (new.source, new.sink) and isinstance(other.action, PostWrite):
                assert mine.isdisjoint((block, p % BLOCK) for p, _, block in other.pairs()), (
                    "two writes to a position fly"
                )
        assert all((new.sink, block) in self.memory for _, _, block in new.pairs()), "into blocks that are the engine's"
        self.flying.append(new)

    def forget(self, rank: Rank, blocks: list[int]) -> None:
        """Blocks go back to their engine."""
        for t in self.flying:
            if t.sink is rank:
                assert not {block for _, _, block in t.pairs()} & set(blocks), "something may still land in them"
            if t.source is rank and isinstance(t.action, PostWrite):
                assert not {block for _, block, _ in t.pairs()} & set(blocks), "a write still reads from them"
        for block in blocks:
            self.memory.pop((rank, block), None)

    def received(self, rank: Rank, end: SinkFinished) -> None:
        if end.reason is not None:
            return
        for source in self.feeding:
            attempts = [a for s, d, h, a in self.truth if (s, d, h) == (source, rank, end.handoff)]
            generation = self.truth[source, rank, end.handoff, max(attempts)]
            for p in range(TOKENS):
                block = rank.blocks[end.request_id][p // BLOCK]
                got = self.memory[rank, block][source.id.rank][p % BLOCK]
                assert got == (end.request_id, generation, source.id.rank, p)

    # --- the world ----------------------------------------------------------------------------------------------------

    @rule(pick=PICK, count=st.integers(1, 4))
    def deliver(self, pick, count) -> None:
        waiting = [pair for pair, words in self.words.items() if words]
        for _ in range(count if waiting else 0):
            frm, to = waiting[pick % len(waiting)]
            if self.words[frm, to]:
                self.hear(frm, to, self.words[frm, to].popleft())

    def hear(self, frm: Rank, to: Rank, message) -> None:
        m, now = to.machine, self.now
        takers = len(self.sinks) if to in self.feeding else 0
        match message:
            case Register():
                self.of(to, m.register(frm.id, message, now, takers))
            case Cancel():
                self.of(to, m.cancel(frm.id, message, now, takers))
            case Release():
                self.of(to, m.release(frm.id, message, now, takers))
            case Posted():
                m.posted(frm.id, message)
            case Seal():
                self.of(to, m.seal(frm.id, message, now))
            case Grant():
                self.of(to, m.grant(frm.id, message, now))
            case CancelAck():
                self.of(to, m.cancel_ack(frm.id, message))
            case Failed():
                self.of(to, m.failed(frm.id, message))

    @precondition(lambda self: self.flying)
    @rule(pick=PICK, fails=st.booleans())
    def land(self, pick, fails) -> None:
        one = self.flying[pick % len(self.flying)]
        if one.torn_until is not None:
            return self.copy(one)
        a = one.action
        if fails and self.in_trouble():
            one.torn_until = self.now + DRAIN
            write = isinstance(a, PostWrite)
            rank = one.source if write else one.sink
            failed = rank.machine.write_failed if write else rank.machine.read_failed
            return self.of(rank, failed(a.transfer, "torn", self.now))
        self.copy(one)
        self.flying.remove(one)
        if isinstance(a, PostRead):
            return self.of(one.sink, one.sink.machine.read_done(a.transfer, self.now))
        done = Written(a.handoff, a.attempt, a.generation, one.source.id.rank, a.start, a.end)
        self.of(one.sink, one.sink.machine.written(one.source.id.agent, done))
        return self.of(one.source, one.source.machine.written(a.transfer, self.now))

    def copy(self, one: Transfer) -> None:
        for p, theirs, mine in one.pairs():
            content = self.memory.get((one.source, theirs), [("freed",)] * BLOCK)[p % BLOCK]
            self.memory[one.sink, mine][one.source.id.rank][p % BLOCK] = content

    @rule(pick=PICK)
    def lose_words(self, pick) -> None:
        """A connection breaks and is made anew: what was under way is lost, and no session has ended."""
        pairs = [(a, b) for a in self.sources for b in self.sinks]
        a, b = pairs[pick % len(pairs)]
        if self.in_trouble():
            self.words[a, b].clear()
            self.words[b, a].clear()

    @rule(pick=PICK)
    def cut(self, pick) -> None:
        """A session ends, and another begins; what the source has posted may land until its lease and the drain are over."""
        pairs = [(a, b) for a in self.sources for b in self.sinks]
        a, b = pairs[pick % len(pairs)]
        if not self.in_trouble():
            return
        self.words[a, b].clear()
        self.words[b, a].clear()
        self.of(b, b.machine.peer_lost(a.id, "cut", self.now + LEASE, self.now))
        self.of(a, a.machine.peer_lost(b.id, "cut", self.now))
        self.of(a, a.machine.leased(b.id, 1e9, self.now))
        if pick % 2:
            self.of(b, b.machine.peer_back(a.id, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def wait(self, seconds) -> None:
        self.now += seconds
        for one in [t for t in self.flying if t.torn_until is not None and t.torn_until <= self.now]:
            self.flying.remove(one)
        for rank in self.sources + self.sinks:
            self.of(rank, rank.machine.tick(self.now))

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.trouble = 0
        while self.to_open:
            self.open(0, never=False)
        if self.state == "running":
            self.finish(aborts=False)
        for _ in range(200):
            while any(self.words.values()):
                self.deliver(0, 1)
            while any(t.torn_until is None for t in self.flying):
                self.land(next(i for i, t in enumerate(self.flying) if t.torn_until is None), fails=False)
            if not any(self.words.values()):
                self.wait(1.0)
        for rank in self.sources + self.sinks:
            assert len(rank.machine) == 0, f"{rank.id} is stuck"
            assert not rank.blocks
        assert not self.pins


TestParallel = Parallel.TestCase
TestParallel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

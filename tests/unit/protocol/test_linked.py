"""A real Source and a real Sink, linked by a world that delays, loses, doubles and reorders whatever may be.

The world plays both engines, the control channel (ordered, may lose messages, sessions may end), the fabric (writes land in
any order, torn ones go on landing until the drain bound is over), and memory: each position of a block holds the tag of what
was computed there. What must hold, whatever happens:

* a received handoff holds, at every position, what its sealed (granted) generation computed there;
* blocks that went back to an engine are never written (read) by a transfer any more, although a process that is only asleep
  may land what it has posted at any time, until the keys are revoked;
* what a write carries is always its own request's: blocks of a preempted one stay pinned while it reads them;
* no two writes to one position fly at a time, and none is posted that the sink has not granted;
* each request is reported exactly once, and nothing is stuck in the end.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.protocol.actions import Note, PostRead, PostWrite, Revoke, Send, SinkFinished, SourceFinished, SourceQuiet
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import (
    Cancel,
    CancelAck,
    Expect,
    Failed,
    Grant,
    Heartbeat,
    Register,
    Release,
    Seal,
    Written,
)
from kvxfer.protocol.peers import Peer, Timing
from kvxfer.protocol.sink import Sink
from kvxfer.protocol.sink import State as SinkState
from kvxfer.protocol.source import Source

BLOCK, DRAIN, OFFSET = 4, 2.0, 5000.0  # OFFSET: the two clocks show different times
TIMING = Timing(interval=1.0, timeout=5.0, lease=4.0, margin=0.5)
TOKENS = {HandoffId("a"): 10, HandoffId("b"): 7, HandoffId("c", 1): 4}
HANDOFFS = st.sampled_from(list(TOKENS))
PICK = st.integers(0, 7)
D, SCHEDULER = RankId("d", "1", 0), RankId("d", "1", -1)


@dataclass(eq=False)
class Session:
    """One session of the control channel, with both ends' liveness."""

    source: RankId
    at_sink: Peer
    at_source: Peer
    cut: bool = False


@dataclass(eq=False)
class Prefill:
    """A request of the source's engine."""

    id: str
    handoff: HandoffId
    prompt: int
    blocks: list[int] = field(default_factory=list)
    generation: int = 0
    final: int = 0
    state: str = "running"  # running, held, gone


@dataclass(eq=False)
class Decode:
    """A request of the sink's engine."""

    id: str
    handoff: HandoffId
    mode: str
    start: int
    blocks: list[int]
    refused: bool
    reports: int = 0


@dataclass(eq=False)
class Transfer:
    """A posted transfer. ``until``: it has landed by then, or never will; ``torn`` ones are terminal and still landing."""

    action: PostWrite | PostRead
    session: Session
    until: float = float("inf")
    torn: bool = False

    def pairs(self):
        """(position, source block, sink block) of every position it moves."""
        a = self.action
        sources, sinks = array("i", a.source_blocks), array("i", a.registered)
        for p in range(a.start, a.end):
            yield p, sources[p // BLOCK], sinks[p // BLOCK - a.span[0] // BLOCK]


class Linked(RuleBasedStateMachine):
    WORDS: ClassVar = ["cancel", "cut", "cut", "die", "break", "unreachable", "release"]

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.numbers = itertools.count(1)
        self.sink = Sink(drain_bound=DRAIN, lease_margin=0.5, renew_after=2.5)
        self.memory_p: dict[int, list] = {}
        self.memory_d: dict[int, list] = {}
        self.prefills: list[Prefill] = []
        self.decodes: list[Decode] = []
        self.flying: list[Transfer] = []
        self.terminal: list[tuple[Transfer, bool]] = []  # observed by nobody yet; failed or not
        self.notifications: list[tuple[str, Written]] = []
        self.truth: dict[tuple[HandoffId, int], tuple[str, int]] = {}  # attempt -> what was sealed or granted
        self.attempts: dict[str, int] = {}
        self.source_reports: Counter[str] = Counter()
        self.unnoticed: list[tuple[RankId, float]] = []  # sessions of which the sink does not know that they ended
        self.dead: set[RankId] = set()
        self.pinned: dict[int, list[int]] = {}  # token -> blocks of a preempted request
        self.revoking = False
        self.stuck = False
        self.source_unaware = False
        self.lives = itertools.count(1)

    @initialize(stream=st.booleans(), trouble=st.integers(0, 6), pull=st.booleans())
    def begin(self, stream, trouble, pull) -> None:
        """``trouble`` is how often something may go wrong: else nearly every run would be over before it came far."""
        self.stream = stream
        self.trouble = trouble
        self.new_life()
        self.new_session()
        self.both_legs(next(iter(TOKENS)), "pull" if pull else "push", 0, prefill_first=False)
        self.beats()

    def new_life(self) -> None:
        self.me = RankId("p", str(next(self.lives)), 0)
        self.source = Source(BLOCK, stream=self.stream, leg_timeout=30.0, lease=6.0, drain_bound=DRAIN, memory=3)
        self.source_unaware = False

    def new_session(self) -> None:
        at_sink, at_source = Peer(TIMING, self.now), Peer(TIMING, self.there)
        self.session = Session(self.me, at_sink, at_source)
        self.to_source: deque = deque()
        self.to_sink: deque = deque()

    @property
    def there(self) -> float:
        """The source's clock."""
        return self.now + OFFSET

    def in_trouble(self) -> bool:
        self.trouble -= 1
        return self.trouble >= 0

    # --- what the machines want ---------------------------------------------------------------------------------------

    def at_source(self, actions) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    assert to == D
                    if isinstance(message, Seal | Grant):
                        owner = self.source._handoffs[message.handoff].request_id
                        (prefill,) = [p for p in self.prefills if p.id == owner]
                        assert message.generation == prefill.generation
                        self.truth[message.handoff, message.attempt] = (prefill.id, message.generation)
                    if not self.session.cut:
                        self.to_sink.append((self.me, message))
                case PostWrite():
                    self.post_write(action)
                case SourceFinished(_, request_id):
                    self.source_finished(request_id)
                case SourceQuiet(token):
                    self.unpin(token)
                case Revoke():
                    self.stuck = True
                case _:
                    assert isinstance(action, Note)

    def post_write(self, action: PostWrite) -> None:
        assert action.to == D
        assert self.there < self.session.at_source.may_post_until, "posted without a lease"
        assert self.now < self.session.at_sink.granted_until, "posted longer than the sink had granted"
        new = Transfer(action, self.session)
        for _, _, block in new.pairs():
            assert block in self.memory_d, "posted into blocks that are the engine's"
        mine = {(block, p % BLOCK) for p, _, block in new.pairs()}
        for other in self.flying:
            if isinstance(other.action, PostWrite):
                assert mine.isdisjoint((block, p % BLOCK) for p, _, block in other.pairs()), (
                    "two writes to a position fly"
                )
        self.flying.append(new)

    def source_finished(self, request_id: str) -> None:
        (prefill,) = [p for p in self.prefills if p.id == request_id]
        assert prefill.state == "held", f"{request_id} is {prefill.state}"
        self.source_reports[request_id] += 1
        for transfer in self.flying:
            if isinstance(transfer.action, PostWrite):
                assert not {block for _, block, _ in transfer.pairs()} & set(prefill.blocks), (
                    "a write still reads from them"
                )
        self.give_away(prefill)
        prefill.state = "gone"

    def pin(self, prefill: Prefill) -> int:
        """Keep the blocks that a request does not have any more, until nothing reads them."""
        token = next(self.numbers)
        self.pinned[token], prefill.blocks = prefill.blocks, []
        return token

    def unpin(self, token: int) -> None:
        blocks = self.pinned.pop(token)
        for transfer in self.flying:
            if isinstance(transfer.action, PostWrite) and transfer.session.source == self.me:
                assert not {block for _, block, _ in transfer.pairs()} & set(blocks), "a write still reads from them"
        for block in blocks:
            del self.memory_p[block]

    def give_away(self, prefill: Prefill) -> None:
        for block in prefill.blocks:
            self.memory_p.pop(block, None)
        prefill.blocks = []

    def at_sink(self, actions) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    if not self.session.cut and to == self.session.source:
                        self.to_source.append((D, message))
                case PostRead():
                    assert action.frm == self.session.source or self.session.cut
                    self.flying.append(Transfer(action, self.session))
                case SinkFinished():
                    self.sink_finished(action)
                case Revoke():
                    self.revoking = True
                case _:
                    assert isinstance(action, Note)

    def sink_finished(self, end: SinkFinished) -> None:
        (decode,) = [d for d in self.decodes if d.id == end.request_id]
        decode.reports += 1
        assert decode.reports == 1, "reported twice"
        assert not decode.refused or end.reason is not None
        for transfer in self.flying:
            assert not {block for _, _, block in transfer.pairs()} & set(decode.blocks), (
                "something may still land in them"
            )
        if end.reason is None:
            attempt = self.attempts[decode.id]
            request, generation = self.truth[end.handoff, attempt]
            for p in range(decode.start, TOKENS[end.handoff]):
                block = decode.blocks[p // BLOCK - decode.start // BLOCK]
                assert self.memory_d[block][p % BLOCK] == (request, generation, p)
        for block in decode.blocks:
            self.memory_d.pop(block)

    # --- the source's engine ------------------------------------------------------------------------------------------

    def start(self, handoff) -> None:
        alive = [p for p in self.prefills if p.state != "gone"]
        if len(alive) >= 4 or (any(p.handoff == handoff for p in alive) and not self.in_trouble()):
            return
        prefill = Prefill(f"p{next(self.numbers)}", handoff, TOKENS[handoff])
        self.prefills.append(prefill)
        self.at_source(self.source.start(handoff, prefill.id, prefill.prompt, self.there))

    def running(self) -> list[Prefill]:
        return [p for p in self.prefills if p.state == "running"]

    @precondition(lambda self: self.running())
    @rule(pick=PICK, tokens=st.integers(1, 10))
    def compute(self, pick, tokens) -> None:
        running = self.running()
        self.compute_of(running[pick % len(running)], tokens)

    def compute_of(self, prefill: Prefill, tokens: int) -> None:
        final = min(prefill.final + tokens, prefill.prompt)
        new = []
        while len(prefill.blocks) * BLOCK < final:
            block = next(self.numbers)
            self.memory_p[block] = [None] * BLOCK
            prefill.blocks.append(block)
            new.append(block)
        for p in range(prefill.final, final):
            self.memory_p[prefill.blocks[p // BLOCK]][p % BLOCK] = (prefill.id, prefill.generation, p)
        prefill.final = final
        self.at_source(self.source.progress(prefill.id, array("i", new).tobytes(), final, self.there))

    def preempt(self, pick) -> None:
        running = self.running()
        prefill = running[pick % len(running)]
        prefill.generation += 1
        prefill.final = 0
        self.at_source(self.source.preempt(prefill.id, self.there, self.pin(prefill)))

    @precondition(lambda self: self.running())
    @rule(pick=PICK, complete=st.booleans(), keep=st.sampled_from([True, True, True, False]))
    def finish(self, pick, complete, keep) -> None:
        running = self.running()
        prefill = running[pick % len(running)]
        if complete or not self.in_trouble():
            self.compute_of(prefill, prefill.prompt)
        self.finish_of(prefill, keep=keep or not self.in_trouble())

    def finish_of(self, prefill: Prefill, *, keep: bool) -> None:
        held = keep and bool(prefill.blocks)
        aborted = None if prefill.final == prefill.prompt else "prefill ended"
        prefill.state = "held" if held else "gone"
        token = 0 if held else self.pin(prefill)
        self.at_source(self.source.finish(prefill.id, self.there, aborted=aborted, held=held, token=token))

    # --- the sink's engine --------------------------------------------------------------------------------------------

    def open(self, handoff, mode, start) -> None:
        if sum(d.reports == 0 for d in self.decodes) >= 4 or (
            self.sink.state(handoff) is not None and not self.in_trouble()
        ):
            return
        start = min(start, TOKENS[handoff] - 1)
        blocks = [next(self.numbers) for _ in range(-(-TOKENS[handoff] // BLOCK) - start // BLOCK)]
        for block in blocks:
            self.memory_d[block] = [None] * BLOCK
        decode = Decode(f"d{next(self.numbers)}", handoff, mode, start, blocks, self.sink.state(handoff) is not None)
        self.decodes.append(decode)
        packed = array("i", blocks).tobytes()
        self.at_sink(self.sink.open(handoff, decode.id, mode, start, TOKENS[handoff], packed, self.now))
        if not decode.refused:
            self.attempts[decode.id] = self.sink._handoffs[handoff].attempt

    def opening(self) -> list[HandoffId]:
        return [h for h in TOKENS if self.sink.state(h) is SinkState.OPENING]

    def sink_thinks_it_is_connected(self) -> bool:
        return not self.session.cut or bool(self.unnoticed)

    def connect(self, pick) -> None:
        opening = self.opening()
        self.at_sink(self.sink.connected(opening[pick % len(opening)], (self.session.source,), self.now))

    @rule(
        handoff=HANDOFFS,
        mode=st.sampled_from(["push", "push", "pull"]),
        start=st.integers(0, 9),
        prefill_first=st.booleans(),
    )
    def both_legs(self, handoff, mode, start, prefill_first) -> None:
        if self.sink.state(handoff) is not None or any(
            p.handoff == handoff and p.state != "gone" for p in self.prefills
        ):
            return
        if prefill_first:
            self.start(handoff)
        self.open(handoff, mode, start)
        if self.sink.state(handoff) is SinkState.OPENING and self.sink_thinks_it_is_connected():
            self.at_sink(self.sink.connected(handoff, (self.session.source,), self.now))
        if not prefill_first:
            self.start(handoff)

    def unreachable(self, pick) -> None:
        opening = self.opening()
        self.at_sink(self.sink.unreachable(opening[pick % len(opening)], "no answer"))

    def cancel(self, pick) -> None:
        waiting = [d for d in self.decodes if d.reports == 0] or self.decodes
        self.at_sink(self.sink.cancel(waiting[pick % len(waiting)].id, "client went away"))

    # --- the control channel ------------------------------------------------------------------------------------------

    def sink_beats(self) -> None:
        self.to_source.append((D, self.session.at_sink.beat(self.now)))

    def source_beats(self) -> None:
        self.to_sink.append((self.me, self.session.at_source.beat(self.there)))

    @precondition(lambda self: self.to_source)
    @rule(count=st.integers(1, 4))
    def deliver_to_source(self, count) -> None:
        for _ in range(min(count, len(self.to_source))):
            frm, message = self.to_source.popleft()
            match message:
                case Heartbeat():
                    peer = self.session.at_source
                    peer.hear(message.sent, message.echo, message.lease, self.there)
                    if peer.may_post_until > self.there:
                        self.at_source(self.source.leased(D, peer.may_post_until, self.there))
                case Register():
                    self.at_source(self.source.register(frm, message, self.there))
                case Cancel():
                    self.at_source(self.source.cancel(frm, message, self.there))
                case Release():
                    self.at_source(self.source.release(frm, message, self.there))
                case Expect():
                    self.at_source(self.source.expect(frm, message, self.there))

    @precondition(lambda self: self.to_sink)
    @rule(count=st.integers(1, 4))
    def deliver_to_sink(self, count) -> None:
        for _ in range(min(count, len(self.to_sink))):
            frm, message = self.to_sink.popleft()
            match message:
                case Heartbeat():
                    self.session.at_sink.hear(message.sent, message.echo, message.lease, self.now)
                case Seal():
                    self.at_sink(self.sink.seal(frm, message, self.now))
                case Grant():
                    self.at_sink(self.sink.grant(frm, message, self.now))
                case Failed():
                    self.at_sink(self.sink.failed(frm, message))
                case CancelAck():
                    self.at_sink(self.sink.cancel_ack(frm, message))

    @rule()
    @precondition(lambda self: not self.session.cut)
    def beats(self) -> None:
        """Both beat, all is delivered: enough for a lease."""
        for _ in range(2):
            self.sink_beats()
            self.source_beats()
            while self.to_source or self.to_sink:
                if self.to_source:
                    self.deliver_to_source(1)
                if self.to_sink:
                    self.deliver_to_sink(1)

    def the_session_is_cut(self) -> None:
        self.session.cut = True
        self.to_source.clear()
        self.to_sink.clear()
        self.unnoticed.append((self.session.source, self.session.at_sink.granted_until))
        self.source_unaware = True

    @precondition(lambda self: self.unnoticed)
    @rule(proven=st.booleans())
    def sink_notices(self, proven) -> None:
        rank, granted_until = self.unnoticed.pop()
        dead = proven and rank in self.dead
        self.at_sink(self.sink.peer_lost(rank, "silent", granted_until, self.now, dead=dead))

    @precondition(lambda self: self.dead)
    @rule()
    def sink_learns_of_a_death(self) -> None:
        for rank in self.dead:
            self.sink.peer_ended(rank, self.now)

    @precondition(lambda self: self.revoking)
    @rule()
    def keys_are_revoked(self) -> None:
        """What the mover does: its transfers fail, nobody's write lands any more, and all sessions end."""
        self.revoking = False
        for transfer in [t for t in self.flying if not t.torn]:
            if isinstance(transfer.action, PostRead):
                self.tear_of(transfer)
                self.see_of(self.terminal[-1])
            else:
                self.tear_of(transfer)
        self.flying = [t for t in self.flying if isinstance(t.action, PostRead)]
        self.at_sink(self.sink.revoked())
        if not self.session.cut:
            self.the_session_is_cut()
        while self.unnoticed:
            self.sink_notices(proven=False)

    @precondition(lambda self: self.source_unaware)
    @rule()
    def source_notices(self) -> None:
        self.source_unaware = False
        self.at_source(self.source.peer_lost(D, "silent", self.there))

    @precondition(lambda self: self.stuck)
    @rule()
    def the_source_closes_its_agent(self) -> None:
        """What its mover does about a write that never ends: none of its writes goes on, and all of them have failed."""
        self.stuck = False
        for transfer in [t for t in self.flying if isinstance(t.action, PostWrite) and t.session.source == self.me]:
            self.flying.remove(transfer)
            if not transfer.torn:
                self.at_source(self.source.write_failed(transfer.action.transfer, "revoked", self.there))

    @precondition(lambda self: self.session.cut and not self.unnoticed and not self.source_unaware)
    @rule()
    def reconnect(self) -> None:
        """The channel's duty: a new session begins only when both sides know that the old one is over."""
        self.new_session()
        self.at_sink(self.sink.peer_back(self.me, self.now))

    def the_source_dies(self) -> None:
        if not self.session.cut:
            self.the_session_is_cut()
        for transfer in self.flying:
            transfer.until = min(transfer.until, self.now + DRAIN)
        self.terminal = [(t, failed) for t, failed in self.terminal if isinstance(t.action, PostRead)]
        for prefill in self.prefills:
            self.give_away(prefill)
            prefill.state = "gone"
        for blocks in self.pinned.values():
            for block in blocks:
                del self.memory_p[block]
        self.pinned.clear()
        self.dead.add(self.me)
        self.stuck = False
        self.new_life()

    # --- the fabric ---------------------------------------------------------------------------------------------------

    def copy(self, transfer: Transfer, positions=None) -> None:
        for p, source, sink in transfer.pairs():
            if positions is None or p in positions:
                assert sink in self.memory_d, "landed in blocks that are the engine's"
                if isinstance(transfer.action, PostWrite) and transfer.session.source == self.me:
                    assert self.memory_p[source][p % BLOCK][2] == p, "carries what is not its own"
                self.memory_d[sink][p % BLOCK] = self.memory_p.get(source, ["garbage"] * BLOCK)[p % BLOCK]

    def land_of(self, transfer: Transfer) -> None:
        self.copy(transfer)
        self.flying.remove(transfer)
        a = transfer.action
        if isinstance(a, PostWrite):
            frm = transfer.session.source
            self.notifications.append((frm.agent, Written(a.handoff, a.attempt, a.generation, 0, a.start, a.end)))
            if frm != self.me:
                return  # nobody is left to hear of it
        self.terminal.append((transfer, False))

    def can_land(self) -> list[Transfer]:
        return [
            t for t in self.flying if not t.torn and (isinstance(t.action, PostWrite) or t.session.source == self.me)
        ]

    @precondition(lambda self: self.can_land())
    @rule(pick=PICK)
    def land(self, pick) -> None:
        flying = self.can_land()
        self.land_of(flying[pick % len(flying)])

    def tear(self, pick, positions, seen) -> None:
        """A transfer fails; or a failed one goes on landing."""
        transfer = self.flying[pick % len(self.flying)]
        if isinstance(transfer.action, PostWrite) or transfer.session.source == self.me:
            self.copy(transfer, positions)
        if not transfer.torn:
            self.tear_of(transfer)
            if seen and self.terminal and self.terminal[-1][0] is transfer:
                self.see_of(self.terminal[-1])

    def tear_of(self, transfer: Transfer) -> None:
        transfer.torn = True
        transfer.until = min(transfer.until, self.now + DRAIN)
        if isinstance(transfer.action, PostRead) or transfer.session.source == self.me:
            self.terminal.append((transfer, True))  # else nobody is left to hear of it

    @precondition(lambda self: self.terminal)
    @rule(pick=PICK)
    def see(self, pick) -> None:
        """The mover hears that a transfer is terminal."""
        self.see_of(self.terminal[pick % len(self.terminal)])

    def see_of(self, item: tuple[Transfer, bool]) -> None:
        if item not in self.terminal:
            return
        self.terminal.remove(item)
        transfer, failed = item
        number = transfer.action.transfer
        if isinstance(transfer.action, PostWrite):
            if failed:
                self.at_source(self.source.write_failed(number, "torn", self.there))
            else:
                self.at_source(self.source.written(number, self.there))
        elif failed:
            self.at_sink(self.sink.read_failed(number, "torn", self.now))
        else:
            self.at_sink(self.sink.read_done(number, self.now))

    @precondition(lambda self: self.notifications)
    @rule(pick=PICK, fate=st.sampled_from(["arrives", "arrives", "arrives", "doubled", "lost"]))
    def notify(self, pick, fate) -> None:
        at = pick % len(self.notifications)
        frm, written = self.notifications[at]
        if fate != "doubled":
            del self.notifications[at]
        if fate != "lost" or not self.in_trouble():
            self.at_sink(self.sink.written(frm, written))

    # --- what goes wrong, and what is said alone ---------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["sink beats", "source beats", "start", "open", "connect", "expect"]),
        handoff=HANDOFFS,
        pick=PICK,
    )
    def something_small(self, kind, handoff, pick) -> None:
        if kind == "start":
            self.start(handoff)
        elif kind == "open":
            self.open(handoff, "pull" if pick < 2 else "push", pick)
        elif kind == "connect" and self.opening() and self.sink_thinks_it_is_connected():
            self.connect(pick)
        elif not self.session.cut:
            if kind == "sink beats":
                self.sink_beats()
            elif kind == "source beats":
                self.source_beats()
            elif kind == "expect":
                self.to_source.append((SCHEDULER, Expect(handoff, 5.0)))

    @precondition(lambda self: self.trouble > 0 and (self.running() or self.flying))
    @rule(tears=st.booleans(), pick=PICK, positions=st.sets(st.integers(0, 9)), seen=st.booleans())
    def data_is_in_trouble(self, tears, pick, positions, seen) -> None:
        self.trouble -= 1
        if self.flying and (tears or not self.running()):
            self.tear(pick, positions, seen)
        else:
            self.preempt(pick)

    @precondition(lambda self: self.trouble > 0)
    @rule(
        kind=st.integers(0, 13),
        handoff=HANDOFFS,
        pick=PICK,
    )
    def words_are_in_trouble(self, kind, handoff, pick) -> None:
        kind = self.WORDS[kind % len(self.WORDS)]
        can = {
            "cancel": self.decodes,
            "cut": not self.session.cut,
            "sleep": not self.session.cut and self.flying,
            "die": True,
            "break": self.to_source or self.to_sink,
            "unreachable": self.opening(),
            "release": not self.session.cut,
        }
        if not can[kind]:
            return
        self.trouble -= 1
        match kind:
            case "cancel":
                self.cancel(pick)
            case "cut":
                self.the_session_is_cut()
            case "sleep":
                self.the_session_is_cut()
                self.sink_notices(proven=False)
                for _ in range(pick):
                    self.time_passes(1.0)
            case "die":
                self.the_source_dies()
            case "break":  # and is made anew: what was under way is lost, the session lives
                self.to_source.clear()
                self.to_sink.clear()
            case "unreachable":
                self.unreachable(pick)
            case "release":
                self.to_source.append((SCHEDULER, Release(handoff, "not wanted")))

    # --- time ---------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.4, 0.5, 1.0, 2.0, 3.0, 5.0, 12.0, 31.0]))
    def time_passes(self, seconds) -> None:
        if seconds > 3.0 and not self.in_trouble():
            seconds = 0.2
        then = self.now + seconds
        for transfer in list(self.flying):
            until = transfer.until
            if until > then or (isinstance(transfer.action, PostRead) and not transfer.torn and until == float("inf")):
                continue
            if transfer.torn:
                self.flying.remove(transfer)  # what has not landed by now never will
            elif transfer in self.can_land():
                self.land_of(transfer)  # in the last moment
            else:
                self.tear_of(transfer)
                self.flying.remove(transfer) if transfer in self.flying else None
        self.now = then
        self.at_source(self.source.tick(self.there))
        self.at_sink(self.sink.tick(self.now))

    # --- always, and in the end ---------------------------------------------------------------------------------------

    @invariant()
    def the_machines_know_whether_the_fabric_needs_progress(self) -> None:
        if not hasattr(self, "source"):
            return
        alive = [t for t in self.flying if not t.torn and t.session.source == self.me]
        if any(isinstance(t.action, PostWrite) for t in alive):
            assert self.source.serving()
        if any(isinstance(t.action, PostRead) for t in self.flying if not t.torn):
            assert self.sink.receiving()

    def teardown(self) -> None:
        """Whatever happened: when the network works and both engines go on, everything comes to its end."""
        if not hasattr(self, "source"):
            return
        for turn in range(50):
            if self.revoking:
                self.keys_are_revoked()
            if self.stuck:
                self.the_source_closes_its_agent()
            while self.unnoticed:
                self.sink_notices(proven=turn % 2 == 0)
            if self.source_unaware:
                self.source_notices()
            if self.session.cut:
                self.reconnect()
            for handoff in self.opening():
                self.at_sink(self.sink.connected(handoff, (self.me,), self.now))
            for prefill in self.running():
                if turn % 2:
                    self.compute_of(prefill, prefill.prompt)
                self.finish_of(prefill, keep=True)
            self.sink_beats()
            self.source_beats()
            for transfer in self.can_land():
                self.land_of(transfer)
            while self.terminal:
                self.see_of(self.terminal[0])
            while self.notifications:
                self.notify(0, "arrives")
            while self.to_source or self.to_sink:
                if self.to_source:
                    self.deliver_to_source(1)
                if self.to_sink:
                    self.deliver_to_sink(1)
            self.time_passes(1.0)
        assert len(self.sink) == 0, self.sink._handoffs
        assert len(self.source) == 0, self.source._handoffs
        assert not self.sink.receiving()
        assert not self.source.serving()
        assert not self.flying
        assert not self.memory_p
        assert not self.pinned
        assert not self.memory_d
        assert [d for d in self.decodes if d.reports != 1] == []
        assert all(count == 1 for count in self.source_reports.values())
        assert {p.state for p in self.prefills} <= {"gone"}
        for machine in (self.sink, self.source):
            for name in ("_handoffs", "_by_request", "_transfers"):
                assert not getattr(machine, name), f"{name} keeps something of what has ended"


class Preempting(Linked):
    """Only data is in trouble: more preemptions under flying writes than the whole world comes to."""

    words_are_in_trouble = None

    @initialize(pull=st.sampled_from([False, False, True]))
    def begin(self, pull) -> None:
        super().begin(stream=True, trouble=12, pull=pull)


class Forgetful(Linked):
    """Only words are lost or taken back."""

    WORDS: ClassVar = ["break", "break", "cancel"]
    data_is_in_trouble = None


class Asleep(Linked):
    """The source's process is out of hearing for long, with writes under way, and only sometimes dead."""

    WORDS: ClassVar = ["sleep", "sleep", "cut", "die"]
    data_is_in_trouble = None


EFFORT = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestLinked, TestPreempting, TestForgetful, TestAsleep = (
    one.TestCase for one in (Linked, Preempting, Forgetful, Asleep)
)
TestLinked.settings = TestPreempting.settings = TestForgetful.settings = TestAsleep.settings = EFFORT

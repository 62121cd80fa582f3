"""A seeded world of readers that take conversations back from a decode engine that forgets, sleeps, evicts and starts anew.

What runs is the product's: the index and its leases (``Retained``), the machine that grants (``Source``), the one that reads
(``Sink``). Around them everything is simulated on one virtual time: clocks of other rates and offsets, words that are late, lost,
doubled or overtaken, processes that sleep, reads that take as long as they like. A block's content is a name; what a read finds in
it when it *ends* is what counts.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from collections import Counter, OrderedDict
from types import SimpleNamespace

from kvxfer.config import Settings
from kvxfer.connector import shaping
from kvxfer.connector.retained import Retained
from kvxfer.protocol.actions import PostRead, Send, SinkFinished, SourceFinished
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Ask, Held, Register, Release
from kvxfer.protocol.sink import Sink
from kvxfer.protocol.source import Source

BLOCK, BLOCKS, TRUNKS = 16, 64, 6
P = RankId("prefill", "1", 0)
SETTINGS = Settings(decoder_kv_idle_ttl=6.0, decoder_kv_blocks_ttl=15.0, reuse_pin_limit=0.5)


class Pool:
    """A block pool of vLLM's kind: what nobody refers to is free, keeps its hash, and goes to whoever asks, oldest first."""

    def __init__(self) -> None:
        self.num_gpu_blocks = BLOCKS
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0, hash=None) for i in range(BLOCKS)]
        self.free = OrderedDict((i, None) for i in range(1, BLOCKS))
        self.content = [""] * BLOCKS
        self.cached: dict[object, SimpleNamespace] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_cached_block(self, theirs, groups):
        assert groups == [0]
        block = self.cached.get(theirs)
        return None if block is None else [block]

    def touch(self, blocks) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.pop(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "a block was freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free[block.block_id] = None

    def take(self, content: str) -> SimpleNamespace:
        """Give a block to somebody, who writes into it."""
        number, _ = self.free.popitem(last=False)
        block = self.blocks[number]
        if self.cached.get(block.hash) is block:
            del self.cached[block.hash]
        block.ref_cnt, block.hash, self.content[number] = 1, None, content
        return block


class Process:
    """Has a clock, and sleeps at times: what comes meanwhile is handled afterwards."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rate = world.rate()
        self.offset = world.random.uniform(0.0, 1e5)
        self.awake_at = 0.0
        self.gone = False

    def now(self) -> float:
        return self.offset + self.rate * self.world.now

    def soon(self, delay: float, act) -> None:
        self.world.after(delay, lambda: self._awake(act))

    def _awake(self, act) -> None:
        if self.gone:
            return
        if self.world.now < self.awake_at:
            self.world.after(self.awake_at - self.world.now + 1e-6, lambda: self._awake(act))
        else:
            act()

    def sleep(self, seconds: float) -> None:
        self.awake_at = max(self.awake_at, self.world.now + seconds)


class Decode:
    """One life of the decode engine: its scheduler's process and its worker's, which share a clock and sleep apart."""

    def __init__(self, world: World, life: int) -> None:
        self.world, self.life = world, life
        self.front, self.worker = Process(world), Process(world)
        self.worker.rate, self.worker.offset = self.front.rate, self.front.offset
        self.rank = RankId("decode", str(life), 0)
        self.pool = Pool()
        self._told = 0.0
        self.retained = Retained(SETTINGS, BLOCK, "m", self._reply, lambda: None)
        self.retained.bind(self.pool)
        self.source = Source(BLOCK, lease=world.pull_lease, leg_timeout=6.0)
        self.front.soon(0.0, self._step)
        self.worker.soon(0.0, self._tick)

    def die(self) -> None:
        self.front.gone = self.worker.gone = True

    def churn(self) -> None:
        """Somebody else's prompt takes, writes and gives back whatever is free."""
        for block in [self.pool.take("somebody else's") for _ in range(len(self.pool.free))]:
            self.pool.free_blocks([block])

    def _reply(self, _reader: RankId, held: Held) -> None:
        self.world.network(self.world.prefill, lambda: self.world.held(held))

    def _step(self) -> None:
        """Decode something, or somebody else's prompt; end with what the connector does at the end of a ``schedule()``."""
        world, now = self.world, self.front.now()
        if world.random.random() < 0.15:
            self._converse()
        if world.random.random() < world.pressure:
            for block in [self.pool.take("somebody else's") for _ in range(min(12, len(self.pool.free)))]:
                self.pool.free_blocks([block])
        output = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
        for held in self.retained.serve(output, now):
            self.world.counts["granted" if held.blocks else "renewed"] += 1
            self._told = max(self._told, world.now + world.random.random() * 0.05)  # vLLM carries steps in order
            self.worker.soon(
                self._told - world.now,
                lambda held=held: self._run(
                    self.source.hold(held.handoff, held.tokens, held.blocks, held.until, self.worker.now())
                ),
            )
        self.front.soon(0.02 + 0.03 * world.random.random(), self._step)

    def _converse(self) -> None:
        """Finish a request of some conversation: its blocks stay in the prefix cache, as far as there is room."""
        salt, tokens = self.world.conversation()
        hashes = [(salt, tuple(tokens[: end + BLOCK])) for end in range(0, len(tokens), BLOCK)]
        mine = []
        for theirs in hashes:
            block = self.pool.cached.get(theirs)
            if block is None:
                if not self.pool.free:
                    break
                block = self.pool.take(repr(theirs))
                block.hash = theirs
                self.pool.cached[theirs] = block
            else:
                self.pool.touch([block])
            mine.append(block)
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=tokens, all_token_ids=tokens, num_tokens=len(tokens), cache_salt=salt,
            num_computed_tokens=len(mine) * BLOCK, block_hashes=hashes,
        )  # fmt: skip
        self.pool.free_blocks(reversed(mine))
        self.retained.finished(request, self.front.now())

    def _tick(self) -> None:
        self._run(self.source.tick(self.worker.now()))
        self.worker.soon(0.25, self._tick)

    def _run(self, actions) -> None:
        for action in list(actions):
            assert not isinstance(action, SourceFinished), "the engine was told of a request that it does not know"
            if isinstance(action, Send):
                self.world.to_prefill(self, action.message)

    def hear(self, message) -> None:
        now = self.worker.now()
        if isinstance(message, Register):
            self._run(self.source.register(P, message, now))
        elif isinstance(message, Release):
            self._run(self.source.release(P, message, now))


class Reading:
    """One request of the prefill engine that takes a conversation back."""

    def __init__(self, decode: Decode, salt: str, tokens: list[int], asked: float) -> None:
        self.decode, self.salt, self.tokens, self.asked = decode, salt, tokens, asked
        self.renewing = True
        self.first = 0  # what is before it was not asked for, and is not named
        self.end = 0
        self.found: list[str] = []


class World:
    """One seed. ``run`` returns what must not be: reads that were taken for valid and are not the conversation's, leftovers.

    ``drift``: clocks run up to so much faster or slower. Here it is half of a lease's margin of 0.5 s in 8 s.
    """

    drift = 0.02
    pull_lease = 4.0
    renewals = 0.7  # how many readers renew

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list = []
        self._numbers = itertools.count()
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.pressure = self.random.choice([0.0, 0.02, 0.1, 0.4])
        self.slow = self.random.choice([0.2, 2.0, 9.0])
        self.lossy = self.random.choice([0.0, 0.1])
        self.quiet = False
        self.prefill = Process(self)
        self.sink = Sink(renew_after=self.pull_lease / 4, drain_bound=2.0)
        self.readings: dict[HandoffId, Reading] = {}
        self.decode = Decode(self, 0)

    def after(self, delay: float, act) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), act))

    def network(self, to: Process, act) -> None:
        """Carry a word: late, and at times lost or doubled."""
        if not self.quiet and self.random.random() < self.lossy:
            self.counts["lost"] += 1
            return
        for _ in range(1 + (not self.quiet and self.random.random() < self.lossy)):
            to.soon(self.random.choice([0.001, 0.01, 0.3]) * self.random.random(), act)

    def conversation(self) -> tuple[str, list[int]]:
        """Return one of few trunks, cut or branched somewhere, of one of two tenants."""
        trunk = self.random.randrange(TRUNKS)
        tokens = [trunk * 1000 + at for at in range(BLOCK * self.random.randrange(2, 9))]
        if self.random.random() < 0.3:
            at = self.random.randrange(len(tokens))
            tokens[at:] = [token + 500 for token in tokens[at:]]
        return self.random.choice(["a", "b"]), tokens

    # --- prefill ----------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        salt, tokens = self.conversation()
        handoff, now = HandoffId(f"reuse-{next(self._numbers)}"), self.prefill.now()
        request = SimpleNamespace(prompt_token_ids=tokens, cache_salt=salt)
        start = BLOCK * self.random.choice([0, 0, 1])
        chain = shaping.chain_of(request, tokens, "m")[start:]  # sixteen bytes a digest, sixteen tokens a block
        decode = self.decode
        self.readings[handoff] = Reading(decode, salt, tokens, now)
        self.readings[handoff].first = start
        self.network(decode.front, lambda: decode.retained.ask(P, Ask(handoff, start, chain, now)))
        self.prefill.soon(5.0, lambda: self._give_up(handoff))

    def _give_up(self, handoff: HandoffId) -> None:
        if handoff in self.readings and self.sink.state(handoff) is None:
            self._over(handoff)

    def held(self, held: Held) -> None:
        one = self.readings.get(held.handoff)
        if one is None:
            self.network(self.decode.front, lambda: self.decode.retained.release(P, held.handoff))
            return
        if self.sink.state(held.handoff) is not None or one.end:
            return
        if held.tokens == 0:
            self.counts["not held"] += 1
            del self.readings[held.handoff]
            return
        one.end, one.renewing = held.tokens, self.random.random() < self.renewals
        delay = self.random.choice([0.0, 0.5, 3.0]) * self.random.random()
        self.prefill.soon(delay, lambda: self._open(held.handoff, one))
        if self.random.random() < 0.1:
            self.prefill.soon(
                delay + 3.0 * self.random.random(), lambda: self._run(self.sink.cancel(str(held.handoff), "abort"))
            )

    def _open(self, handoff: HandoffId, one: Reading) -> None:
        if handoff not in self.readings:
            return
        now = self.prefill.now()
        blocks = array("i", range(one.end // BLOCK)).tobytes()
        self._run(self.sink.open(handoff, str(handoff), "pull", 0, one.end, blocks, now))
        if one.decode.front.gone:
            self._run(self.sink.unreachable(handoff, "nobody answers the call"))
            return
        self._run(self.sink.connected(handoff, (one.decode.rank,), now))
        self._renew(handoff, one)

    def _renew(self, handoff: HandoffId, one: Reading) -> None:
        if handoff in self.readings and one.renewing:
            ask = Ask(handoff, 0, b"", self.prefill.now())
            self.network(one.decode.front, lambda: one.decode.retained.ask(P, ask))
            self.prefill.soon(2.0, lambda: self._renew(handoff, one))

    def _run(self, actions) -> None:
        for action in list(actions):
            if isinstance(action, Send) and not self._is_lost(action.message):
                decode = self.readings[action.message.handoff].decode
                self.network(decode.worker, lambda decode=decode, word=action.message: decode.hear(word))
            elif isinstance(action, PostRead):
                self.after(self._takes(action), lambda action=action: self._landed(action))
            elif isinstance(action, SinkFinished):
                self._finished(action)

    def rate(self) -> float:
        """How fast a process's clock runs."""
        return 1.0 + self.random.uniform(-self.drift, self.drift)

    def _is_lost(self, message) -> bool:
        """Whether it is lost for sure, however kind the network is."""
        del message
        return False

    def _takes(self, action: PostRead) -> float:
        """How long a read takes."""
        del action
        return self.slow * self.random.random() ** 2

    def _landed(self, action: PostRead) -> None:
        """The bytes come, whoever is awake; whether they count is decided when this process looks."""
        decode = self.readings[action.handoff].decode
        table = memoryview(action.source_blocks).cast("i")
        found = [decode.pool.content[table[at]] for at in range(action.end // BLOCK)]
        self.readings[action.handoff].found = found

        def look() -> None:
            self._run(self.sink.read_done(action.transfer, self.prefill.now()))

        self.prefill.soon(0.001, look)

    def _finished(self, action: SinkFinished) -> None:
        one = self.readings[action.handoff]
        if action.reason is None:
            self.counts["read"] += 1
            for at, found in enumerate(one.found):
                named = found != "" and found == repr((one.salt, tuple(one.tokens[: (at + 1) * BLOCK])))
                if not named and at * BLOCK >= one.first:
                    self.violations.append(f"{self.now:.2f}: {action.handoff} took {found!r} at {at * BLOCK}")
                    break
        else:
            self.counts["late" if "after its lease" in action.reason else "failed"] += 1
        self._over(action.handoff)

    def _over(self, handoff: HandoffId) -> None:
        one = self.readings.pop(handoff)
        self.network(one.decode.front, lambda: one.decode.retained.release(P, handoff))

    def to_prefill(self, decode: Decode, message) -> None:
        def hear() -> None:
            now = self.prefill.now()
            act = self.sink.grant if type(message).__name__ == "Grant" else self.sink.failed
            if type(message).__name__ == "Grant":
                self._run(act(decode.rank, message, now))
            elif type(message).__name__ == "Failed":
                self._run(act(decode.rank, message))

        self.network(self.prefill, hear)

    def _tick(self) -> None:
        self._run(self.sink.tick(self.prefill.now()))
        self.prefill.soon(0.25, self._tick)

    # --- trouble ----------------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        what = self.random.random()
        if what < 0.3:
            self.random.choice([self.prefill, self.decode.front, self.decode.worker]).sleep(6.0 * self.random.random())
            self.counts["slept"] += 1
        elif what < 0.35:
            self.counts["restarted"] += 1
            self.decode.die()
            old, self.decode = self.decode, Decode(self, self.decode.life + 1)
            self.prefill.soon(
                1.0, lambda: self._run(self.sink.peer_lost(old.rank, "gone", 0.0, self.prefill.now(), dead=True))
            )

    def run(self, seconds: float = 60.0) -> list[str]:
        self.prefill.soon(0.0, self._tick)
        for _ in range(int(seconds * 1.5)):
            self.after(seconds * self.random.random(), lambda: self.prefill._awake(self.ask))
        for _ in range(int(seconds / 2)):
            self.after(seconds * self.random.random(), self._trouble)
        self._until(seconds)
        self.quiet = True
        self._until(seconds + 60.0)
        for what, left in (
            ("pins", self.decode.retained.pinned),
            ("leases", len(self.decode.retained._leases)),
            ("sources", len(self.decode.source)),
            ("sinks", len(self.sink)),
            ("blocks", BLOCKS - 1 - len(self.decode.pool.free)),
        ):
            if left:
                self.violations.append(f"{left} {what} are left")
        return self.violations

    def _until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end


class Edge(World):
    """No lease can be renewed, each ends with its pin, and reads land about then, by clocks as bad as the margin is good for."""

    drift = 0.04
    pull_lease = 2 * SETTINGS.decoder_kv_idle_ttl
    renewals = 0.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.pressure = 0.0
        self._granted: set[HandoffId] = set()

    def rate(self) -> float:
        return 1.0 + self.random.choice([-self.drift, self.drift])

    def _is_lost(self, message) -> bool:
        return isinstance(message, Register) and message.handoff in self._granted

    def _takes(self, action: PostRead) -> float:
        self._granted.add(action.handoff)
        (part,) = self.sink._handoffs[action.handoff].parts.values()
        left = part.valid_until + self.sink.lease_margin - self.prefill.now()
        seconds = max(0.0, left + self.random.uniform(-0.9, 0.3))
        self.after(seconds, self.decode.churn)  # just before it lands
        return seconds

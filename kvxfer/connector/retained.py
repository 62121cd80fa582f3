"""What a decode engine still has of conversations, and what of it is kept while a prefill engine reads it back.

Nothing is kept for its own sake: a finished request's blocks stay in vLLM's prefix cache, which evicts them by itself, and here
is only an *index*, from digests that prefill can compute to vLLM's own hashes of blocks. When prefill asks, the scheduler's
thread looks the blocks up, and references those that are there once more in the pool (``pins``), under a lease. All of that
happens in the scheduler's process and thread, at the end of a ``schedule()``: no other place knows what is free.

A pin never outlives its lease, and a lease ends when the reader has read, when it has not been renewed for
``decoder_kv_idle_ttl``, or ``decoder_kv_blocks_ttl`` after it was given. What a reader may read is not let go of before, so
what may be pinned is bounded: to a share of the pool, and to what is free beyond what running requests may grow by
meanwhile and what waits to be admitted. So a retained block never costs a preemption, and under pressure nothing is granted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.connector.pins import Pins
from kvxfer.connector.shaping import chain_of
from kvxfer.errors import RemoteProtocolError
from kvxfer.layout.tables import packed
from kvxfer.protocol.chain import CHUNK, DIGEST, link
from kvxfer.protocol.messages import Ask, Held
from kvxfer.transport.commands import SourceHeld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvxfer.config import Settings
    from kvxfer.protocol.ids import HandoffId, RankId

logger = logging.getLogger("kvxfer.reuse")

INDEXED = 4
"""Digests that are remembered, in multiples of the pool's blocks: those of evicted blocks are found out only when asked for."""

GROWTH = 256
"""Tokens by which each running request may grow while a reader reads."""

MOST_ASKS = 4096
"""Asks that may wait for the scheduler's thread."""

COUNTERS = ("reuse_asked", "reuse_granted_tokens", "reuse_not_held", "reuse_no_room")


@dataclass(slots=True)
class _Lease:
    """One grant. ``last`` is the end that no renewal can put off."""

    reader: RankId
    tokens: int
    until: float
    last: float


class Retained:
    """Of one engine. ``reply`` sends to a peer, from any thread; ``wake`` makes an idle engine step, if anything can."""

    def __init__(
        self,
        settings: Settings,
        block_size: int,
        model: str,
        reply: Callable[[RankId, Held], None],
        wake: Callable[[], None] | None,
    ) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._idle, self._ttl = settings.decoder_kv_idle_ttl, settings.decoder_kv_blocks_ttl
        self._share = settings.reuse_pin_limit
        self._block_size = block_size
        self._model = model
        self._reply = reply
        self._wake = wake
        self._inbox: deque[tuple[RankId, Ask | HandoffId]] = deque()
        self._index: OrderedDict[bytes, Any] = OrderedDict()
        self._digests: dict[Any, bytes] = {}  # the other way round
        self._requests: dict[str, Any] = {}
        self._leases: dict[HandoffId, _Lease] = {}
        self._recorded_at = 0.0
        self._pool: Any = None
        self._pins: Pins
        self._next_end: float | None = None

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool
        self._pins = Pins(pool, int(self._share * pool.num_gpu_blocks), 1)

    # --- from the control thread ------------------------------------------------------------------------------------

    def ask(self, frm: RankId, message: Ask) -> None:
        """Take a question; it is answered by the engine's next step, which is now."""
        if message.start % CHUNK or len(message.chain) % DIGEST:
            raise RemoteProtocolError(
                f"{frm} asks with {len(message.chain)} bytes of digests behind position {message.start}: they are of "
                f"{DIGEST} bytes, for {CHUNK} tokens each"
            )
        if self._pool is None or len(self._inbox) >= MOST_ASKS:
            self._reply(frm, Held(message.handoff, 0, message.asked, 0.0, "decode has too much to answer"))
            return
        self._inbox.append((frm, message))
        self._ring()

    def release(self, frm: RankId, handoff: HandoffId) -> None:
        """Take a reader's word that it reads no more."""
        if len(self._inbox) < MOST_ASKS:  # else the lease ends by itself
            self._inbox.append((frm, handoff))
            self._ring()

    def on_round(self, now: float) -> None:
        """Wake the engine for the end of a lease."""
        if self._next_end is not None and self._next_end <= now:
            self._ring()

    def _ring(self) -> None:
        if self._wake is not None:
            self._wake()

    # --- from the scheduler's thread --------------------------------------------------------------------------------

    def began(self, request: Any) -> None:
        """Know a request of this engine: what it may still need is not granted to readers."""
        self._requests[request.request_id] = request

    def finished(self, request: Any, now: float) -> None:
        """Remember what of a finished request the prefix cache may keep: whole blocks of computed tokens.

        vLLM's hash of a block stands for all that is before it as well, so that what is known needs no digest again.
        """
        self._requests.pop(request.request_id, None)
        size, known = self._block_size, min(request.num_computed_tokens, request.num_tokens)
        whole = min(known // size, len(request.block_hashes))
        known, last = 0, b""
        for theirs in request.block_hashes[:whole]:
            digest = self._digests.get(theirs)
            if digest is None:
                break
            self._index.move_to_end(digest)
            known, last = known + 1, digest
        tokens = request.all_token_ids[known * size : whole * size]
        chain = chain_of(request, tokens, self._model, known * size, last) if whole else None
        if chain is None:
            return
        for number, theirs in enumerate(request.block_hashes[known:whole], 1):
            digest = link(chain, number * size)
            self._forget(digest)
            self._forget(self._digests.get(theirs, b""))  # of requests that are one to vLLM, and two here
            self._index[digest], self._digests[theirs] = theirs, digest
        while len(self._index) > INDEXED * self._pool.num_gpu_blocks:
            self._forget(next(iter(self._index)))
        self._recorded_at = now

    def _forget(self, digest: bytes) -> None:
        if (theirs := self._index.pop(digest, None)) is not None:
            del self._digests[theirs]

    def pending(self, now: float) -> bool:
        """Tell whether a step is needed that no request asks for. Without a way to be woken: whether somebody may ask soon."""
        if self._inbox or (self._next_end is not None and self._next_end <= now):
            return True
        return self._wake is None and bool(self._index) and now - self._recorded_at < self._idle

    def let_go(self, now: float) -> None:
        """End the leases whose time is over. Called before vLLM allocates, too."""
        if self._next_end is not None and self._next_end <= now:
            for handoff in [handoff for handoff, lease in self._leases.items() if lease.until <= now]:
                self._end(handoff)

    def serve(self, output: Any, now: float) -> Iterator[SourceHeld]:
        """Answer what was asked. Yields what the ranks must know of; called at the end of a ``schedule()``."""
        self.let_go(now)
        while self._inbox:
            frm, item = self._inbox.popleft()
            if not isinstance(item, Ask):
                if (lease := self._leases.get(item)) is not None and lease.reader == frm:
                    self._end(item)
            elif (lease := self._leases.get(item.handoff)) is not None:
                if lease.reader == frm:
                    yield from self._renew(item, lease, now)
            else:
                yield from self._grant(frm, item, output, now)

    def _grant(self, frm: RankId, ask: Ask, output: Any, now: float) -> Iterator[SourceHeld]:
        self.counters["reuse_asked"] += 1
        first = ask.start // self._block_size
        found = self._find(ask, first)
        blocks = self._affordable(found, output)
        if not blocks:
            why = "reuse_no_room" if found else "reuse_not_held"
            self.counters[why] += 1
            reason = "decode has no room to keep it for a reader" if found else "decode does not hold it any more"
            self._reply(frm, Held(ask.handoff, 0, ask.asked, 0.0, reason))
            return
        ids = [block.block_id for block in blocks]
        self._pins.pin(str(ask.handoff), ids)
        tokens = (first + len(ids)) * self._block_size
        ttl = min(self._idle, self._ttl)
        self._leases[ask.handoff] = _Lease(frm, tokens, now + ttl, now + self._ttl)
        self._look_ahead()
        self.counters["reuse_granted_tokens"] += tokens - ask.start
        self._reply(frm, Held(ask.handoff, tokens, ask.asked, ttl))
        # What the reader has already is not named; nothing is read there.
        computing = output.total_num_scheduled_tokens > 0
        yield SourceHeld(ask.handoff, tokens, packed([0] * first + ids), now + ttl, computing)

    def _renew(self, ask: Ask, lease: _Lease, now: float) -> Iterator[SourceHeld]:
        lease.until = max(lease.until, min(now + self._idle, lease.last))
        self._look_ahead()
        self._reply(lease.reader, Held(ask.handoff, lease.tokens, ask.asked, lease.until - now))
        yield SourceHeld(ask.handoff, lease.tokens, b"", lease.until, computing=False)

    def _find(self, ask: Ask, first: int) -> list[Any]:
        """Return the blocks that hold what follows, in order, from the one on that holds the first position asked for."""
        blocks: list[Any] = []
        if first >= self._pool.num_gpu_blocks:
            return blocks  # no prompt reaches so far, and what is answered begins with as many empty places
        while digest := link(ask.chain, (first + len(blocks) + 1) * self._block_size, ask.start):
            theirs = self._index.get(digest)
            if theirs is None:
                break
            cached = self._pool.get_cached_block(theirs, [0])
            if cached is None:
                self._forget(digest)  # evicted
                break
            blocks.append(cached[0])
        return blocks

    def _affordable(self, blocks: list[Any], output: Any) -> list[Any]:
        """Return as many of the blocks as may be pinned."""
        fits = blocks[: max(0, self._pins.limit - self._pins.count)]
        room = self._pool.get_num_free_blocks() - self._needed(output)
        for number, block in enumerate(fits):
            room -= block.ref_cnt == 0  # else a request holds it, and it is not free anyhow
            if room < 0:
                return fits[:number]
        return fits

    def _needed(self, output: Any) -> int:
        """Return how many free blocks the engine's own requests may want while a reader reads."""
        needed = 0
        for request in self._requests.values():
            if request.request_id in output.num_scheduled_tokens or request.num_computed_tokens:
                prompt, computed = request.num_prompt_tokens, request.num_computed_tokens
                growth = min(max(0, prompt + request.max_tokens - max(prompt, computed)), GROWTH)
                needed += -(-(growth + max(0, prompt - computed)) // self._block_size) + 1
            else:
                needed += -(-request.num_tokens // self._block_size) + 1
        return needed

    def _end(self, handoff: HandoffId) -> None:
        del self._leases[handoff]
        self._pins.let_go(str(handoff))
        self._look_ahead()

    def _look_ahead(self) -> None:
        self._next_end = min((lease.until for lease in self._leases.values()), default=None)

    @property
    def pinned(self) -> int:
        """Blocks that are kept for readers now."""
        return 0 if self._pool is None else self._pins.count

"""The prefill engine's part of reuse: asks a decode engine what it holds of a conversation, and has it fetched.

A request that names where its conversation was decoded waits, unscheduled, for one answer: vLLM is told "later" until it has
come, or ``reuse_timeout`` has passed. Then positions behind this engine's own cache hits are loaded, if there are enough of them;
that is a pull handoff like any other, with decode's ranks as its sources, under a name of its own. Whatever goes wrong on the
way is counted under its reason, and the positions are computed here.

**No dead-lock before vLLM 0.32.** There a request that was put off, and then does not fit, stops the scan of the waiting
requests, before others that hold blocks and whose load is over: then nothing ever runs (0.26 and 0.29,
v1/core/sched/scheduler.py, tests/contract/test_reuse_admission.py). So a request that was put off once is let through only
when it fits for certain, or when nobody holds blocks whose load is open, or over without vLLM having let him on. While one
waits for that, no other load is opened.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kvxfer.config import LEAST_IDLE
from kvxfer.connector import compat
from kvxfer.connector.courier import Courier
from kvxfer.connector.shaping import chain_of
from kvxfer.connector.telemetry import trace_of
from kvxfer.connector.worth import Worth
from kvxfer.protocol.chain import CHUNK, DIGEST
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.messages import Ask, Held, Release
from kvxfer.transport.commands import SinkOpen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.config import Settings
    from kvxfer.layout.tables import Tables
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import Message
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.control import ControlChannel
    from kvxfer.transport.dialer import Outcome

logger = logging.getLogger("kvxfer.reuse")


class _State(Enum):
    NEW = "new"
    ASKED = "asked"
    HELD = "held"  # answered: decode holds something
    OPEN = "open"  # blocks are registered; vLLM waits for one report
    OVER = "over"


@dataclass(slots=True)
class _Reuse:
    """One request. ``tokens``: what decode holds; ``put_off``: vLLM was told "later" at least once."""

    address: EngineAddress
    handoff: HandoffId
    heard: float
    state: _State = _State.NEW
    start: int = 0
    tokens: int = 0
    until: float = 0.0
    asked: float = 0.0
    answered: float = 0.0
    opened: float = 0.0
    offered: int = 0
    put_off: bool = False
    failed: bool = False  # on some rank
    given_up: bool = False  # while it was open: how much of it came is not known
    blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Lease:
    """In the control thread: a load that is open, and when decode is asked to go on holding."""

    address: EngineAddress
    every: float
    next_at: float


def _unheard_of() -> HandoffId:
    return HandoffId(f"reuse-{secrets.token_hex(12)}")


class TakingBack:
    """Of one engine. All but ``on_…`` is called by the scheduler's thread, these by the control thread.

    ``name`` makes the name of each load, which nobody else may ever use.
    """

    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        model: str,
        control: ControlChannel,
        name: Callable[[], HandoffId] = _unheard_of,
        batches: int = 1,
    ) -> None:
        self.counters: dict[str, int] = {"reuse_fetched_tokens": 0, "reuse_recomputed_tokens": 0, "reuse_requests": 0}
        self._timeout = settings.reuse_timeout
        self._tables = tables
        self._block_size = tables.groups[0].block_size
        self._model = model
        self._control = control
        self._name = name
        self._courier = Courier(control)
        self._worth = Worth(settings.kv_recompute_threshold, batches)
        self._reuses: dict[str, _Reuse] = {}
        self._loading: dict[str, _Reuse] = {}
        self._holding: set[str] = (
            set()
        )  # requests with blocks that vLLM has not let on yet: their load is open, or just over
        self._blocked: str | None = None
        self._pending: set[HandoffId] = set()
        self._answers: dict[HandoffId, Held] = {}
        self._kept: set[HandoffId] = set()  # what decode holds, from its answer on until it is released
        self._leases: dict[HandoffId, _Lease] = {}
        self._pool: Any = None
        self._reserved: Callable[[], int] | None = None

    def bind(self, pool: Any, reserved: Callable[[], int] | None) -> None:
        """Take vLLM's block pool, and what says how much of it is spoken for."""
        self._pool, self._reserved = pool, reserved

    # --- requests ---------------------------------------------------------------------------------------------------

    def began(self, request: Any, address: EngineAddress, now: float) -> None:
        """Take note of a request whose conversation was decoded at ``address``."""
        self.counters["reuse_requests"] += 1
        self._reuses[request.request_id] = _Reuse(address, self._name(), now)

    def matched(self, request: Any, computed: int, now: float) -> tuple[int | None, bool]:
        """Say how many positions behind the first ``computed`` will be loaded; None for "ask again later"."""
        one = self._reuses.get(request.request_id)
        if one is None:
            return 0, False
        if self._blocked not in (None, request.request_id):
            return self._later(one)
        if one.state is _State.NEW:
            self._ask(one, request, computed, now)
        if one.state is _State.ASKED and not self._answered(one, request, computed, now):
            return self._later(one)
        wanted = self._wanted(one, request, computed, now)
        if one.put_off and self._holding and not self._fits(request):
            self._blocked = request.request_id
            return self._later(one)
        self._blocked = None
        one.offered = computed + wanted
        return wanted, wanted > 0

    def holds(self, request_id: str) -> None:
        """Note that a request holds blocks while something is loaded into them, for reuse or not."""
        self._holding.add(request_id)

    def allocated(self, request: Any, tables: Sequence[list[int]], tokens: int, now: float) -> SinkOpen | None:
        """Have ``tokens`` positions loaded into what vLLM allocated for them."""
        one = self._reuses.get(request.request_id)
        if one is None or one.state is not _State.HELD or tokens <= 0:
            return None
        one.state, one.opened = _State.OPEN, now
        self._loading[request.request_id] = one
        self.holds(request.request_id)
        start, end = one.offered - tokens, one.offered
        size = self._block_size
        one.start, one.tokens = start, tokens
        one.blocks = set(tables[0][start // size : -(-end // size)])
        every = max(0.5, (one.until - one.answered) / 3)
        lease = _Lease(one.address, every, one.answered + every)  # counted like the lease, however long this has waited
        self._control.call(lambda _now: self._leases.__setitem__(one.handoff, lease), wake=False)
        blocks = self._tables.spanning(tables, start, end)
        ranks = structs.replace(one.address, front=False)
        span, trace = (start, end, blocks), trace_of(request)
        return SinkOpen(one.handoff, request.request_id, ranks, *span, one.heard, now, mode="pull", trace=trace)

    def loaded(self, request_ids: Sequence[str], failed: set[int], now: float) -> None:
        """Note whose loads are over on all ranks; ``failed`` are blocks that did not get their KV on one."""
        for load in self._loading.values():
            load.failed = load.failed or not load.blocks.isdisjoint(failed)
        for request_id in request_ids:
            one = self._loading.pop(request_id, None)
            if one is None:
                continue
            one.state = _State.OVER
            self._release(one, "read")
            if one.given_up:
                continue
            if one.failed:
                self.counters["reuse_recomputed_tokens"] += one.tokens
                continue
            self.counters["reuse_fetched_tokens"] += one.tokens
            answer = max(0.0, one.answered - one.asked)
            self._worth.fetched(one.address, one.tokens, max(1e-6, now - one.opened), answer, now)
            logger.info(
                "request %s: %d positions of its conversation, behind %d that were cached here, fetched from %s in %.0f ms",
                request_id, one.tokens, one.start, one.address, (now - one.opened) * 1e3,
            )  # fmt: skip

    def finished(self, request_id: str) -> bool:
        """Note that a request is over, and tell whether a load of it is open, which vLLM then waits for."""
        one = self._reuses.pop(request_id, None)
        self._holding.discard(request_id)
        if self._blocked == request_id:
            self._blocked = None
        if one is None:
            return False
        if one.state in (_State.ASKED, _State.HELD):
            self._release(one, "prefill gave up")
        one.given_up = one.state is _State.OPEN
        return one.given_up

    def step(self, output: Any, now: float) -> None:
        """Note what the step that begins computes."""
        if self._holding:
            self._holding.difference_update(output.num_scheduled_tokens)
        if self._worth.measures:
            self._worth.step(output.total_num_scheduled_tokens, now)

    # --- inside -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _later(one: _Reuse) -> tuple[None, bool]:
        one.put_off = True
        return None, False

    def _ask(self, one: _Reuse, request: Any, computed: int, now: float) -> None:
        most = self._whole(request.num_prompt_tokens - 1) - computed
        if compat.needs_every_position(request):
            self._decline(one, most, "prompt_logprobs")
            return
        if most <= 0 or most < self._worth.threshold(one.address, now):
            self._decline(one, most, "threshold")
            return
        tokens = request.prompt_token_ids
        chain = chain_of(request, [] if tokens is None else tokens, self._model)
        if chain is None:
            self._decline(one, most, "prompt_embeddings")
            return
        one.state, one.asked, one.start = _State.ASKED, now, computed
        self._pending.add(one.handoff)
        # What ends behind the last position that can be loaded is nobody's business.
        links = chain[computed // CHUNK * DIGEST : (computed + most) // CHUNK * DIGEST]
        self._say(one.address, Ask(one.handoff, computed, links, now))

    def _answered(self, one: _Reuse, request: Any, computed: int, now: float) -> bool:
        """Take the answer if there is one, or give up waiting; False while neither."""
        answer = self._answers.pop(one.handoff, None)
        if answer is None and now < one.asked + self._timeout:
            return False
        if answer is not None and answer.tokens:
            self._kept.add(
                one.handoff
            )  # before it is not awaited any more: an answer that comes twice releases nothing
        self._pending.discard(one.handoff)
        most = self._whole(request.num_prompt_tokens - 1) - computed
        if answer is None:
            self._release(one, "prefill did not wait for the answer")
            self._decline(one, most, "no_answer")
        elif answer.tokens == 0:
            logger.debug("request %s: nothing is fetched from %s: %s", request.request_id, one.address, answer.reason)
            self._decline(one, most, "not_held")
        else:
            one.state, one.tokens, one.answered = _State.HELD, answer.tokens, now
            one.until = answer.asked + answer.lease
        return True

    def _wanted(self, one: _Reuse, request: Any, computed: int, now: float) -> int:
        """Return how many positions shall be loaded now: the longest prefix that is true, behind our own cache hits."""
        if one.state is not _State.HELD:
            return 0
        wanted = self._whole(min(one.tokens, request.num_prompt_tokens - 1)) - computed
        if computed < one.start:
            reason = (
                "cache_changed"  # less is cached here than when decode was asked: what lies between is not held for us
            )
        elif wanted <= 0 or wanted < self._worth.threshold(one.address, now):
            reason = "threshold"
        elif one.until - now < LEAST_IDLE:
            reason = "lease_over"
        else:
            return wanted
        self._release(one, "prefill computes it")
        self._decline(one, wanted, reason)
        return 0

    def _fits(self, request: Any) -> bool:
        """Tell whether vLLM will certainly find room for a request: for all of it, whatever of it is cached."""
        if self._pool is None or self._reserved is None:
            return False
        needed = -(-request.num_tokens // self._block_size) + 1 + self._reserved()
        return bool(needed <= self._pool.get_num_free_blocks())

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_size * self._block_size

    def _decline(self, one: _Reuse, tokens: int, reason: str) -> None:
        one.state = _State.OVER
        name = f"reuse_declined_{reason}"
        self.counters[name] = self.counters.get(name, 0) + max(0, tokens)

    def _release(self, one: _Reuse, reason: str) -> None:
        self._pending.discard(one.handoff)
        self._answers.pop(one.handoff, None)

        def release(_now: float) -> None:
            self._kept.discard(one.handoff)
            self._leases.pop(one.handoff, None)
            self._courier.send(one.address, Release(one.handoff, reason))

        self._control.call(release)

    def _say(self, address: EngineAddress, message: Message) -> None:
        self._control.call(lambda _now: self._courier.send(address, message))

    # --- in the control thread --------------------------------------------------------------------------------------

    def on_held(self, frm: RankId, message: Held) -> None:
        """Take an answer, if somebody waits for it; what comes too late is let go of again."""
        if message.handoff in self._pending:
            self._answers[message.handoff] = message
        elif message.tokens and message.handoff not in self._kept and message.handoff not in self._leases:
            self._control.send(frm, Release(message.handoff, "the answer came too late"))

    def on_outcome(self, outcome: Outcome) -> None:
        """Let what waited go to an engine that is connected now; or let those who asked know that it is not."""
        for message in self._courier.on_outcome(outcome):
            if isinstance(message, Ask) and message.handoff in self._pending:
                self._answers[message.handoff] = Held(message.handoff, 0, message.asked, 0.0, outcome.reason or "")

    def on_lost(self, rank: RankId) -> None:
        """Forget an engine that was lost."""
        self._courier.on_lost(rank)

    def on_round(self, now: float) -> None:
        """Ask decode to go on holding what is being read."""
        for handoff, lease in self._leases.items():
            if lease.next_at <= now:
                lease.next_at = now + lease.every
                self._courier.send(lease.address, Ask(handoff, 0, b"", now))

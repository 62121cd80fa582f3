"""Conversations in the simulation: a prefill engine takes back what decode still holds, by the product's own two parts.

``Taking`` stands where a prefill engine's scheduler half would, around the product's ``TakingBack``; ``Holding`` where a decode
engine's would, around ``Retained``. Both have what they need of vLLM from the simulated engine; what they say travels over the
scheduler processes' control channels, and what is read is a handoff of the movers like any other, in the other direction.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec

from kvxfer.chaos.concern import NAME
from kvxfer.chaos.process import BLOCK_SIZE
from kvxfer.chaos.turns import SCALE, AsVllm
from kvxfer.config import Settings
from kvxfer.connector.retained import Retained
from kvxfer.connector.taking_back import TakingBack
from kvxfer.errors import RemoteProtocolError
from kvxfer.layout.tables import Shape, Tables
from kvxfer.protocol.chain import CHUNK
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.messages import Ask, Held, Release

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvxfer.chaos.decode import DecodeEngine
    from kvxfer.chaos.engine import Request
    from kvxfer.chaos.prefill import PrefillEngine
    from kvxfer.chaos.profile import Profile
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import AnyMessage
    from kvxfer.transport import commands as cmd
    from kvxfer.transport.dialer import Outcome

MODEL = "m"


def settings_of(profile: Profile, threshold: int | str) -> Settings:
    """Return the settings of reuse in a world.

    Leases last as long as their margin of 0.5 s is good for, by clocks as bad as the world's: 0.5 s in 2.9 s is 17 %.
    """
    return Settings(
        kv_recompute_threshold=threshold,
        decoder_kv_idle_ttl=4.0 if profile.drift is None else 2.9,
        decoder_kv_blocks_ttl=14.0,
        reuse_pin_limit=0.6,
        reuse_timeout=1.5,
    )


class Taking:
    """A prefill engine's part."""

    side = "reader"

    def __init__(self, engine: PrefillEngine) -> None:
        self.engine, self.sim = engine, engine.sim
        self.process = engine.process
        self.tables = Tables([Shape(CHUNK)])
        self._part = TakingBack(
            self.sim.reuse_settings,
            self.tables,
            MODEL,
            self.process.scheduler,  # type: ignore[arg-type]  # stands for a control channel
            name=self._name,
        )
        self._part.bind(engine.pool, self.reserved)
        self._seen: dict[str, AsVllm] = {}
        self._addresses: dict[str, cmd.EngineAddress] = {}
        self.sim.counters.append(self._part.counters)

    def _name(self) -> HandoffId:
        self.sim.reuses += 1
        return HandoffId(f"{NAME}{self.sim.reuses}")

    def began(self, one: Request) -> None:
        """A request came; it may say where its conversation was decoded."""
        if one.before is not None:
            seen = self._seen[one.id] = AsVllm(one)
            self._part.began(seen, one.before, self.process.clock())
            self.sim.readers[self._part._reuses[one.id].handoff.transfer] = one.before.host, self.process.host  # noqa: SLF001

    def wanted(self, one: Request) -> int | None:
        """Say how many positions shall be loaded behind those that are cached here; None for "ask again later"."""
        if one.id not in self._seen:
            return self._part.matched(AsVllm(one), one.cached * SCALE, self.process.clock())[0]
        tokens, _ = self._part.matched(self._seen[one.id], one.cached * SCALE, self.process.clock())
        return None if tokens is None else tokens // SCALE

    def opened(self, one: Request, positions: int) -> cmd.SinkOpen:
        """Blocks were allocated for what shall be loaded."""
        opened = self._part.allocated(self._seen[one.id], [one.blocks], positions * SCALE, self.process.clock())
        assert opened is not None, "what was offered is not opened"
        return msgspec.structs.replace(opened, start=opened.start // SCALE, end=opened.end // SCALE)

    def loaded(self, one: Request, reason: str | None) -> None:
        """A load is over on all ranks."""
        self._part.loaded([one.id], set() if reason is None else set(one.blocks), self.process.clock())

    def finished(self, one: Request) -> bool:
        """A request is over; tell whether a load of it is open."""
        self._seen.pop(one.id, None)
        return self._part.finished(one.id)

    def step(self, scheduled: Collection[str], tokens: int) -> None:
        """A step begins."""
        output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduled, 1), total_num_scheduled_tokens=tokens)
        self._part.step(output, self.process.clock())

    def reserved(self) -> int:
        """Return the blocks that are spoken for by prompts that hold a load's blocks, and will need more."""
        return sum(
            self.engine.blocks_missing(one, one.tokens)
            for one in self.engine.requests.values()
            if one.blocks and one.state in ("loading", "waiting")
        )

    # --- for the control channel ------------------------------------------------------------------------------------

    def on_message(self, frm: RankId, message: AnyMessage) -> None:
        """Hear an answer."""
        if not isinstance(message, Held):
            raise RemoteProtocolError(f"{frm} sent {type(message).__name__} to an engine that does not expect it")
        self._part.on_held(frm, message)
        self.engine.stir()  # a real engine that has requests looks each millisecond

    def on_outcome(self, outcome: Outcome) -> None:
        """Hear how a call ended."""
        self._part.on_outcome(outcome)
        self.engine.stir()

    def on_lost(self, rank: RankId) -> None:
        """Forget an engine."""
        self._part.on_lost(rank)

    def on_round(self, now: float) -> None:
        """Renew leases."""
        self._part.on_round(now)

    # --- what can be looked at --------------------------------------------------------------------------------------

    def states(self) -> dict[HandoffId, str]:
        """Return what is asked and has no answer yet."""
        return dict.fromkeys(self._part._pending - self._part._answers.keys(), "asked")  # noqa: SLF001

    def request_of(self, handoff: HandoffId) -> str | None:
        """Return the request that a read is for."""
        return next((name for name, one in self._part._reuses.items() if one.handoff == handoff), None)  # noqa: SLF001

    def handoff_of(self, request_id: str) -> HandoffId | None:
        """Return the read that is for a request."""
        one = self._part._reuses.get(request_id)  # noqa: SLF001
        return None if one is None else one.handoff

    def pinned_until(self, handoff: HandoffId) -> float | None:
        """Nothing is kept by this engine."""

    @property
    def busy(self) -> bool:
        """Whether something is not over yet."""
        return bool(self._part._reuses or self._part._loading or self._part._leases)  # noqa: SLF001

    def leftovers(self) -> Iterator[tuple[object, str]]:
        """Name what must be empty at the end."""
        for name in ("_reuses", "_loading", "_holding", "_blocked", "_pending", "_answers", "_leases"):
            yield self._part, name
        yield self._part._courier, "_waiting"  # noqa: SLF001


class Holding:
    """A decode engine's part."""

    side = "holder"

    def __init__(self, engine: DecodeEngine) -> None:
        self.engine, self.sim = engine, engine.sim
        self.process = engine.process
        self._part = Retained(self.sim.reuse_settings, CHUNK, MODEL, self.process.scheduler.send, self.engine.stir)
        self._part.bind(engine.pool)
        self.sim.counters.append(self._part.counters)

    def began(self, one: Request) -> None:
        """A request came."""
        self.let_go()
        self._part.began(AsVllm(one))

    def finished(self, one: Request) -> None:
        """A request is over: what it has computed stays in the prefix cache, and is remembered."""
        seen = AsVllm(one)
        whole = min(seen.num_computed_tokens, seen.num_tokens) // CHUNK if one.state == "running" else 0
        for number, key in zip(one.blocks[:whole], seen.block_hashes, strict=False):
            self.engine.pool.cache(number, key)
        self._part.finished(seen, self.process.clock())

    def cached(self, one: Request) -> list[int]:
        """Take the blocks of a request's prompt that the prefix cache has, but never all of it."""
        found = []
        for key in AsVllm(one).block_hashes[: (one.tokens - 1) // BLOCK_SIZE]:
            block = self.engine.pool.get_cached_block(key, [0])
            if block is None:
                break
            found += block
        self.engine.pool.touch(found)
        return [block.block_id for block in found]

    def let_go(self) -> None:
        """End the leases whose time is over."""
        before = len(self._part._leases)  # noqa: SLF001
        self._part.let_go(self.process.clock())
        self._count("expired", before - len(self._part._leases))  # noqa: SLF001

    def serve(self, scheduled: Collection[str], step: cmd.Step) -> None:
        """End a step's schedule: answer what was asked."""
        self.let_go()
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(scheduled, 1), total_num_scheduled_tokens=len(scheduled)
        )
        for held in self._part.serve(output, self.process.clock()):
            self._count("pinned" if held.blocks else "renewed", 1)
            if held.blocks:
                self.sim.trouble.after_grant(self.process)
            step.held.append(msgspec.structs.replace(held, tokens=held.tokens // SCALE))

    def _count(self, what: str, times: int) -> None:
        if times:
            self.sim.result.reuse[what] += times

    def pending(self) -> bool:
        """Tell whether a step is needed that no request asks for."""
        return self._part.pending(self.process.clock())

    # --- for the control channel ------------------------------------------------------------------------------------

    def on_message(self, frm: RankId, message: AnyMessage) -> None:
        """Hear a question, or that its answer has been read."""
        if isinstance(message, Ask):
            self._part.ask(frm, message)
        elif isinstance(message, Release):
            self._part.release(frm, message.handoff)
        else:
            raise RemoteProtocolError(f"{frm} sent {type(message).__name__} to an engine that does not expect it")

    def on_outcome(self, outcome: Outcome) -> None:
        """Decode calls nobody for this."""

    def on_lost(self, rank: RankId) -> None:
        """Leases of readers that are lost end by themselves."""

    def on_round(self, now: float) -> None:
        """See Retained."""
        self._part.on_round(now)

    # --- what can be looked at --------------------------------------------------------------------------------------

    def states(self) -> dict[HandoffId, str]:
        """Return what is kept for readers."""
        return dict.fromkeys(self._part._leases, "pinned")  # noqa: SLF001

    def handoff_of(self, request_id: str) -> HandoffId | None:
        """Nothing is read for requests of this engine."""

    def pinned_until(self, handoff: HandoffId) -> float | None:
        """Return when a lease ends, in the world's time."""
        lease = self._part._leases.get(handoff)  # noqa: SLF001
        return None if lease is None else self.process.clock.when(lease.until)

    @property
    def busy(self) -> bool:
        """Whether something is not over yet."""
        return bool(self._part._leases or self._part._inbox)  # noqa: SLF001

    def leftovers(self) -> Iterator[tuple[object, str]]:
        """Name what must be empty at the end."""
        for name in ("_leases", "_inbox", "_requests", "pinned"):
            yield self._part, name

"""The bidirectional flow, as the scheduler half sees it: what is on, and which of the two parts an engine plays.

An engine that prefills takes conversations back (``taking_back``), one that decodes retains them (``retained``); an engine with
``kv_both`` does both. Everything that must hold for that is checked here, when the engine starts.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kvxfer.connector import compat
from kvxfer.connector.params import PlainParams, SourceParams
from kvxfer.connector.private import engine_transfer
from kvxfer.connector.retained import Retained
from kvxfer.connector.taking_back import TakingBack
from kvxfer.errors import ConfigError, RemoteProtocolError
from kvxfer.protocol.chain import CHUNK
from kvxfer.protocol.messages import Ask, Held, Release

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.config import Settings
    from kvxfer.layout.tables import Tables
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.messages import AnyMessage
    from kvxfer.transport.commands import SinkOpen, SourceHeld
    from kvxfer.transport.control import ControlChannel
    from kvxfer.transport.dialer import Outcome

logger = logging.getLogger("kvxfer.reuse")


def check(vllm_config: Any, tables: Tables, *, pinning: bool) -> None:
    """Raise ConfigError, with what to change, where conversations cannot be taken back, or not be proven to be.

    ``pinning``: this vLLM hands its block pool to connectors.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    size = tables.groups[0].block_size
    executor = getattr(parallel, "distributed_executor_backend", None)
    prefills, decodes = transfer.kv_role != "kv_consumer", transfer.kv_role != "kv_producer"
    for wrong, what in (
        (not tables.plain, "moves one group without a window: start with --disable-hybrid-kv-cache-manager"),
        (bool(size % CHUNK), f"needs blocks of a multiple of {CHUNK} tokens, these have {size}: set --block-size"),
        (
            prefills and engine_transfer(vllm_config).kv_load_failure_policy != "recompute",
            'needs "kv_load_failure_policy": "recompute" in --kv-transfer-config of an engine that prefills',
        ),
        (
            decodes and not vllm_config.cache_config.enable_prefix_caching,
            "retains conversations in the prefix cache of an engine that decodes: start it with --enable-prefix-caching",
        ),
        (
            decodes and not compat.may_pin(vllm_config),
            "pins blocks, which cascade attention takes for shared ones: start without --no-disable-cascade-attn",
        ),
        (not pinning, "needs a vLLM that lets connectors pin blocks (bind_gpu_block_pool): see docs/versions.md"),
        (
            getattr(parallel, "nnodes", 1) > 1 or (isinstance(executor, str) and executor not in ("mp", "uni")),
            "needs all processes of an engine on one host, since they share a clock: --distributed-executor-backend mp",
        ),
    ):
        if wrong:
            raise ConfigError(f"bidirectional_kv_xfer {what}; or leave it off")


class Bidirectional:
    """Of one engine for which ``check`` holds. All but ``on_…`` is called by the scheduler's thread."""

    def __init__(
        self,
        vllm_config: Any,
        tables: Tables,
        settings: Settings,
        control: ControlChannel,
        wake: Callable[[], None] | None,
    ) -> None:
        role = vllm_config.kv_transfer_config.kv_role
        model = settings.model_id or vllm_config.model_config.model
        size = self._block_size = tables.groups[0].block_size
        self._takes = None
        if role != "kv_consumer":
            self._takes = TakingBack(settings, tables, model, control, batches=compat.batches_queued(vllm_config))
        self._retains = None if role == "kv_producer" else Retained(settings, size, model, control.send, wake)
        if self._retains is not None and wake is None:
            logger.warning(
                "this vLLM's engine core cannot be woken, so it goes on stepping for %g s after each request, in case a prefill "
                "engine asks for what it holds",
                settings.decoder_kv_idle_ttl,
            )

    def bind(self, pool: Any, reserved: Callable[[], int] | None) -> None:
        """Take vLLM's block pool. Raises ConfigError for one whose hashes are not those of whole blocks."""
        if (hashed := getattr(pool, "hash_block_size", self._block_size)) != self._block_size:
            raise ConfigError(
                f"bidirectional_kv_xfer needs vLLM's prefix cache to hash whole blocks: it hashes {hashed} tokens, a block has "
                f"{self._block_size}; leave hash_block_size alone, or leave it off"
            )
        if self._takes is not None:
            self._takes.bind(pool, reserved)
        if self._retains is not None:
            self._retains.bind(pool)

    @property
    def answers(self) -> bool:
        """Whether what this engine's responses carry leads back to what it retains."""
        return self._retains is not None

    @property
    def counters(self) -> dict[str, int]:
        """What was asked, granted, fetched, computed again and declined, and why, since the start; in tokens, mostly."""
        found = {} if self._takes is None else dict(self._takes.counters)
        return (
            found if self._retains is None else found | self._retains.counters | {"reuse_pinned": self._retains.pinned}
        )

    # --- in the scheduler's thread ----------------------------------------------------------------------------------

    def began(self, request: Any, params: Any, now: float) -> None:
        """Take note of a request of this engine."""
        if self._retains is not None:
            self._retains.let_go(now)
            self._retains.began(request)
        if self._takes is not None and isinstance(params, (SourceParams, PlainParams)) and params.reuse is not None:
            self._takes.began(request, params.reuse, now)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """See TakingBack."""
        now = time.monotonic()
        if self._retains is not None:
            self._retains.let_go(now)
        return (0, False) if self._takes is None else self._takes.matched(request, computed, now)

    def holds(self, request_id: str) -> None:
        """See TakingBack."""
        if self._takes is not None:
            self._takes.holds(request_id)

    def allocated(self, request: Any, tables: Sequence[list[int]], tokens: int) -> SinkOpen | None:
        """See TakingBack."""
        return None if self._takes is None else self._takes.allocated(request, tables, tokens, time.monotonic())

    def step(self, output: Any) -> list[SourceHeld]:
        """End a step: answer what was asked of this engine."""
        now = time.monotonic()
        if self._takes is not None:
            self._takes.step(output, now)
        return [] if self._retains is None else list(self._retains.serve(output, now))

    def loaded(self, output: Any) -> None:
        """Hear what vLLM's output says of loads that are over."""
        failed = getattr(output, "invalid_block_ids", None) or set()
        if self._takes is not None and (output.finished_recving or failed):
            self._takes.loaded(output.finished_recving or (), failed, time.monotonic())

    def finished(self, request: Any) -> bool:
        """Note that a request is over, and tell whether a load for it is open."""
        if self._retains is not None:
            self._retains.finished(request, time.monotonic())
        return self._takes is not None and self._takes.finished(request.request_id)

    def pending(self) -> bool:
        """Tell whether a step is needed that no request asks for."""
        return self._retains is not None and self._retains.pending(time.monotonic())

    # --- in the control thread --------------------------------------------------------------------------------------

    def on_message(self, frm: RankId, message: AnyMessage) -> None:
        """Hear what another engine's scheduler process says. Raises RemoteProtocolError for what is none of ours."""
        if isinstance(message, Held) and self._takes is not None:
            self._takes.on_held(frm, message)
        elif isinstance(message, Ask) and self._retains is not None:
            self._retains.ask(frm, message)
        elif isinstance(message, Release) and self._retains is not None:
            self._retains.release(frm, message.handoff)
        else:
            raise RemoteProtocolError(f"{frm} sent {type(message).__name__} to an engine that does not expect it")

    def on_outcome(self, outcome: Outcome) -> None:
        """See TakingBack."""
        if self._takes is not None:
            self._takes.on_outcome(outcome)

    def on_lost(self, rank: RankId) -> None:
        """See TakingBack."""
        if self._takes is not None:
            self._takes.on_lost(rank)

    def on_round(self, now: float) -> None:
        """See both."""
        if self._takes is not None:
            self._takes.on_round(now)
        if self._retains is not None:
            self._retains.on_round(now)

"""The scheduler half of a connector: lives in the engine core's process, decides who takes part in which handoff.

It is called by the scheduler at every step and must cost what is new in that step. It makes no NIXL call and waits for no
network: what the worker ranks shall do travels as a ``Step`` in vLLM's own scheduler output, what prefill shall hear at once
goes to the control thread.

Each request that takes part owes vLLM one report at most: a source whose blocks are held (``finished_sending``), or a sink
whose load is asynchronous (``finished_recving``). Withholding it is how blocks stay out of everybody's hands.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import is_wildcard, shown_at
from kvxfer.connector import compat, private
from kvxfer.connector.announce import Announcer
from kvxfer.connector.at_once import AtOnce
from kvxfer.connector.bidirectional import Bidirectional
from kvxfer.connector.bidirectional import check as check_reuse
from kvxfer.connector.growing import Growing
from kvxfer.connector.idling import Idling
from kvxfer.connector.metadata import RankNews
from kvxfer.connector.params import ParamsError, PlainParams, SinkParams, SourceParams, parse
from kvxfer.connector.pins import Pins
from kvxfer.connector.telemetry import trace_of
from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol.messages import Ask, Directory, Held, Report
from kvxfer.transport.commands import (
    LESS,
    EngineAddress,
    SinkCancel,
    SinkOpen,
    SourceFinish,
    SourceProgress,
    SourceStart,
    Step,
)
from kvxfer.transport.control import ControlChannel
from kvxfer.transport.secret import load_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.config import Settings
    from kvxfer.layout.card import RankCard
    from kvxfer.protocol import messages
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.transport.dialer import Outcome

logger = logging.getLogger("kvxfer.scheduler")


class _SinkState(Enum):
    NEW = "new"  # no blocks yet
    OPEN = "open"  # registered; vLLM waits for one report
    DONE = "done"  # reported, or never needed


@dataclass(slots=True)
class _Sink:
    """A request whose prompt somebody else computes. ``offered``: positions that vLLM was told to count on."""

    params: SinkParams
    heard: float
    offered: int = 0
    state: _SinkState = _SinkState.NEW


@dataclass(slots=True)
class _Source:
    """A request whose KV somebody else wants. ``complete``: its last prompt position was scheduled.

    ``withheld``: blocks that the workers are not told of before the request has ended, since they could not be pinned.
    """

    handoff: HandoffId
    prompt_tokens: int
    growing: Growing
    complete: bool = False
    has_blocks: bool = False
    withheld: bytes | None = None


class SchedulerHalf:
    """Raises TransportError when the control address cannot be bound."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, mode: str, settings: Settings, me: RankId) -> None:
        self.mode = mode
        self.settings = settings
        parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
        self._tp_size = parallel.tensor_parallel_size
        self._pp_size = parallel.pipeline_parallel_size
        self._tables = compat.tables(kv_cache_config)
        self._receives = transfer.kv_role != "kv_producer"
        self._engine = me.engine
        self._features = compat.features()
        for cost in self._features.costs(mode, vllm_config):
            logger.warning("engine %s: %s", me.engine, cost)
        self._may_pin = compat.may_pin(vllm_config)
        self._pins: Pins | None = None
        self._noted: Step | None = None  # since the last step; None for nothing, as mostly
        self._sources: dict[str, _Source] = {}
        self._sinks: dict[str, _Sink] = {}
        self._failed: set[str] = set()  # loads that have failed on a rank, and are not over on all of them
        self._fail_load: Callable[[str], None] | None = None
        self._idling = Idling(vllm_config, settings.idle_wait)
        self._at_once = AtOnce(vllm_config, me.engine)
        if settings.bidirectional_kv_xfer:  # before there is a socket that would have to be closed
            check_reuse(vllm_config, self._tables, pinning=self._features.pinning)
        port = settings.control_port + compat.data_parallel_index(vllm_config)
        self.control = ControlChannel(
            me,
            settings.control_host,
            port,
            self,
            settings.timing,
            settings.connect_timeout,
            secret=load_secret(settings.secret_file),
        )
        self._announcer = Announcer(self.control, settings.leg_timeout)
        self._reuse: Bidirectional | None = None
        if settings.bidirectional_kv_xfer:
            self._reuse = Bidirectional(vllm_config, self._tables, settings, self.control, private.waker())
        self.control.start()
        if self._receives:  # the scheduler process of a decode engine announces its requests
            for host, peer_port in settings.peer_addresses:
                self.control.keep(EngineAddress(host, peer_port, ""))
        logger.info("engine %s: control channel at %s", me.engine, shown_at(settings.control_host, port))
        if is_wildcard(settings.told_host):
            logger.warning(
                "control_host=%s names no host that a peer could reach: kvxfer's router puts the host of the engine's URL "
                "in its place; for any other proxy set advertise_host",
                settings.control_host,
            )

    def bind_block_pool(self, pool: Any) -> None:
        """Take vLLM's block pool: with it, blocks can be pinned while writes read them, and hence written while they grow.

        Raises ConfigError where vLLM could not be told that a load has failed (``compat.whole_load_failures``).
        """
        self._at_once.bind()
        if self._receives and not self._tables.plain:
            self._fail_load = compat.whole_load_failures()
        if self._reuse is not None:
            self._reuse.bind(pool, private.reservations())
        if self._may_pin and self._features.pinning and (self.mode == "push" or self._tables.windowed):
            limit = int(self.settings.pin_limit * pool.num_gpu_blocks)
            self._pins = Pins(pool, limit, self._tp_size * self._pp_size)
        elif self.mode == "push" and not self._may_pin:
            logger.warning(
                "engine %s: cascade attention takes pinned blocks for shared ones, so prompts are written only when they are "
                "computed whole; start without --no-disable-cascade-attn to write them while they are computed",
                self._engine,
            )

    # --- requests come ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Take note of a request that takes part in a handoff."""
        request_id = request.request_id
        self._idling.came(request_id)
        compat.drop_params(request)
        now, params = time.monotonic(), None
        try:
            params = parse(request_id, request.kv_transfer_params)
        except ParamsError as error:
            logger.warning("request %s is computed here, without a handoff: %s", request_id, error)
        if self._reuse is not None:
            self._reuse.began(request, params, now)
        match params:
            case None | PlainParams():
                return
            case SinkParams(_, source) if source.engine == self._engine:
                logger.warning(
                    "request %s is computed here: it names this very engine as its prefill engine", request_id
                )
            case SinkParams():
                self._sinks[request_id] = _Sink(params, now)
                self._announcer.expect(params.handoff, request_id, params.source)
            case SourceParams(probe=True, peers=peers):
                self._step().introduced.extend(peers)  # to the workers, by way of this request's own step
                for address in peers:
                    self.control.keep(address, lasting=False)
            case SourceParams(handoff):
                growing = Growing(self._tables, request.num_prompt_tokens)
                self._sources[request_id] = _Source(handoff, request.num_prompt_tokens, growing)
                digests = compat.prompt_digests(request, *LESS)
                self._step().started.append(
                    SourceStart(handoff, request_id, request.num_prompt_tokens, now, digests, trace_of(request))
                )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer every prompt position that decode has not cached itself. May be asked again; changes nothing.

        The last one is offered as well, though it is not moved: of a prompt that is all there vLLM computes the last token
        again, in the place that it allocates for it now. A request that had to ask for that place later might wait for ever, not
        being preempted while it waits, for the blocks of others like it.

        A window's group that vLLM counts on with the last position may begin a block too late to compute that position again.
        Then it is not offered where its place is allocated nevertheless, and else the prompt is computed here.
        """
        sink = self._sinks.get(request.request_id)
        if sink is None and self._reuse is not None:
            return self._reuse.matched(request, num_computed_tokens)
        if sink is None or sink.state is not _SinkState.NEW:
            return 0, False
        if compat.needs_every_position(request):
            return 0, False  # the forward over the prompt is itself a part of the answer
        missing = request.num_prompt_tokens - num_computed_tokens
        if missing <= 1 or (num_computed_tokens > 0 and missing <= self._tables.step):
            # All but the last block, which no prefix cache ever holds whole, is here: computing it is quicker than waiting.
            return 0, False
        sink.offered = request.num_prompt_tokens
        if any(group.first_block(sink.offered + 1) > group.first_block(sink.offered) for group in self._tables.groups):
            sink.offered, missing = sink.offered - 1, missing - 1
            if any(sink.offered % group.block_size == 0 for group in self._tables.groups):
                return 0, False
        return missing, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Register the blocks that vLLM allocated; or note that nothing is wanted."""
        sink = self._sinks.get(request.request_id)
        if sink is None and self._reuse is not None:
            opened = self._reuse.allocated(request, blocks.get_block_ids(), num_external_tokens)
            if opened is not None:
                self._idling.waits(request.request_id)
                self._step().opened.append(opened)
            return
        if sink is None or sink.state is not _SinkState.NEW:
            return
        handoff, source = sink.params.handoff, sink.params.source
        if num_external_tokens <= 0:
            sink.state = _SinkState.DONE
            self._announcer.release(handoff, request.request_id, source, "decode computes what it lacks itself")
            return
        start, end = sink.offered - num_external_tokens, request.num_prompt_tokens - 1
        tables = self.registered_blocks(request.request_id, blocks.get_block_ids(), start, end)
        sink.state = _SinkState.OPEN
        if self._reuse is not None:
            self._reuse.holds(request.request_id)
        self._idling.waits(request.request_id)
        self._announcer.settle(handoff, request.request_id)
        self._step().opened.append(
            SinkOpen(
                handoff, request.request_id, source, start, end,
                tables, sink.heard, time.monotonic(),
                b"".join(compat.prompt_digests(request, 1)), trace=trace_of(request),
            )
        )  # fmt: skip

    def registered_blocks(self, request_id: str, tables: Sequence[list[int]], start: int, end: int) -> bytes:
        """Pack what is registered of a request's tables. What a demonstration of wrong KV overrides."""
        del request_id
        return self._tables.spanning(tables, start, end)

    # --- steps ------------------------------------------------------------------------------------------------------

    def build_step(self, output: Any) -> Step | None:
        """Collect what this step changes, from the scheduler's output and from what was noted since the last one.

        None when nothing has changed, which costs next to nothing: so it is in nearly every step of an engine that decodes,
        or that waits for handoffs, a thousand times a second.
        """
        if self._sources:
            self._note_sources(output)
        if self._reuse is not None and (held := self._reuse.step(output)):
            self._step().held.extend(held)
        step, self._noted = self._noted, None
        if step is None and self._idling.rest(output):
            self._at_once.deliver(self._idling.waiting)
        return step

    def _step(self) -> Step:
        """Return what the next step changes, to add something to it."""
        if self._noted is None:
            self._noted = Step(bell=self._idling.untold)
            self._idling.untold = ""
        return self._noted

    def _note_sources(self, output: Any) -> None:
        for request_id in compat.preempted_requests(output):
            source = self._sources.get(request_id)
            if source is not None:
                self._restart(request_id, source)
        for one in compat.scheduled_requests(output, self._sources):
            source = self._sources[one.request_id]
            if source.complete and not one.whole:
                continue
            if one.whole and source.has_blocks:
                self._restart(one.request_id, source)
            final = min(one.computed + one.scheduled, source.prompt_tokens)
            source.has_blocks = True
            source.complete = final == source.prompt_tokens
            grown = source.growing.grow(one.blocks)
            if grown.window and self._pins is not None:
                self._pins.pin_window(one.request_id, grown.window)
            if source.withheld is None and self._pinned(one.request_id, grown.whole):
                self._step().progress.append(SourceProgress(one.request_id, grown.tables, final))
            else:
                source.withheld = self._tables.join(source.withheld or b"", grown.tables)

    def _pinned(self, request_id: str, blocks: list[int]) -> bool:
        """Pin blocks that will be written from; in pull nothing reads them before vLLM holds them for us."""
        return self.mode == "pull" or (self._pins is not None and self._pins.pin(request_id, blocks))

    def _restart(self, request_id: str, source: _Source) -> None:
        if source.has_blocks:
            step = self._step()
            source.has_blocks = source.complete = False
            source.withheld = None
            source.growing.restart()
            step.preempted.append(request_id)
            token = 0 if self._pins is None else self._pins.orphan(request_id)
            if token:
                step.tokens[request_id] = token

    # --- requests go ------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, tables: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the blocks are still needed; a source's answer tells a router where to find the KV."""
        request_id = request.request_id
        loading = self._reuse is not None and self._reuse.finished(request)
        if loading:
            self._step().cancelled.append(SinkCancel(request_id, f"prefill gave up: {request.status.name}"))
        self._idling.went(request_id)
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            if sink.state is _SinkState.NEW:
                reason = f"decode gave up: {request.status.name}"
                self._announcer.release(sink.params.handoff, request_id, sink.params.source, reason)
            elif sink.state is _SinkState.OPEN:
                self._step().cancelled.append(SinkCancel(request_id, f"decode gave up: {request.status.name}"))
            elif self._reuse is not None and self._reuse.answers:
                return False, self._answer(sink.params.handoff, request_id, request.num_computed_tokens, back=True)
            return False, None
        source = self._sources.pop(request_id, None)
        if source is None:
            return False, self._probe_answer(request)
        status = request.status.name
        aborted = None
        if status not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"):
            aborted = f"prefill ended with {status}"
        elif any(
            len(table) * group.block_size < source.prompt_tokens
            for table, group in zip(tables, self._tables.groups, strict=True)
        ):
            aborted = "prefill was preempted while its last token was in flight"
        held = any(tables) and not loading  # what vLLM waits for then is the load's report
        self._step().finished.append(self._finish(request_id, source, aborted, tables, held=held))
        return held, None if aborted else self._answer(source.handoff, request_id, source.prompt_tokens)

    def _finish(
        self, request_id: str, source: _Source, aborted: str | None, tables: Sequence[list[int]], *, held: bool
    ) -> SourceFinish:
        token = 0
        if self._pins is not None and held:
            self._pins.let_go(request_id, tables)
        elif self._pins is not None:
            token = self._pins.orphan(request_id)
        withheld = None
        if source.withheld is not None and held and source.complete:
            withheld = SourceProgress(request_id, source.withheld, source.prompt_tokens)
        return SourceFinish(request_id, aborted, held, token, withheld)

    def update_connector_output(self, output: Any) -> None:
        """Note who has been reported, and owes nothing any more; whose load failed; which orphaned blocks nobody reads."""
        if self._reuse is not None:
            self._reuse.loaded(output)
        news = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(news, RankNews):
            if self._pins is not None:
                self._pins.quiet(news.quiet)
            self._failed |= news.failed
        for request_id in output.finished_recving or ():
            self._idling.may_go_on(request_id)
            sink = self._sinks.get(request_id)
            if sink is not None:
                sink.state = _SinkState.DONE
            if request_id in self._failed:
                self._failed.discard(request_id)
                if self._fail_load is not None:
                    self._fail_load(request_id)
        if self._pins is not None:
            for request_id in output.finished_sending or ():
                self._pins.sent(request_id)

    def has_pending_work(self) -> bool:
        """Tell whether something noted must reach the workers although no request may be left to schedule."""
        waits = self._reuse is not None and self._reuse.pending()
        return self._noted is not None or bool(self._pins) or waits

    def _probe_answer(self, request: Any) -> dict[str, Any] | None:
        try:
            params = parse(request.request_id, request.kv_transfer_params)
        except ParamsError:
            return None
        if isinstance(params, SourceParams) and params.probe:
            return self._answer(params.handoff, request.request_id, 0)
        return None

    def _answer(self, handoff: HandoffId, request_id: str, tokens: int, *, back: bool = False) -> dict[str, Any]:
        """Return what a router hands to the other leg; ``back``: to the next turn's prefill leg."""
        return {
            "do_remote_prefill": not back,
            "do_remote_decode": back,
            "remote_block_ids": [],
            "remote_engine_id": self._engine,
            "remote_request_id": request_id,
            "remote_host": self.settings.told_host,
            "remote_port": self.control.port,
            "tp_size": self._tp_size,
            "pp_size": self._pp_size,
            "remote_num_tokens": tokens,
            "transfer_mode": self.mode,
            "transfer_id": handoff.transfer,
        }

    # --- the ranks, and the control channel -------------------------------------------------------------------------

    def publish(self, addresses: list[messages.RankAddress]) -> None:
        """Let peers find this engine's ranks."""
        addresses = sorted(addresses, key=lambda address: address.rank)
        self.control.publish(Directory(self._engine, self._tp_size, self._pp_size, ready=True, ranks=tuple(addresses)))

    def shutdown(self) -> None:
        """Close the control channel."""
        self._idling.close()
        self.control.stop()

    def on_message(self, frm: RankId, message: messages.AnyMessage) -> None:
        """Hear of reuse; refuse the rest: handoffs are matters of the worker ranks."""
        if self._reuse is not None:
            self._reuse.on_message(frm, message)
        elif isinstance(message, Ask):  # who asks waits for an answer
            self.control.send(frm, Held(message.handoff, 0, message.asked, 0.0, "decode has bidirectional_kv_xfer off"))
        else:
            raise RemoteProtocolError(f"{frm} sent {type(message).__name__} to a scheduler process")

    def on_up(self, rank: RankId, card: RankCard | None) -> None:
        """Nothing to do: the announcer hears of whole engines."""

    def beating(self, now: float) -> bool:
        """A scheduler process has nothing that its peers wait for."""
        del now
        return True

    def on_lost(self, rank: RankId, reason: str, granted_until: float, *, dead: bool) -> None:
        """Forget the engine's ranks."""
        del reason, granted_until, dead
        self._announcer.on_lost(rank)
        if self._reuse is not None:
            self._reuse.on_lost(rank)

    def on_ended(self, rank: RankId) -> None:
        """Nothing to do: it was lost before."""

    def on_lease(self, rank: RankId, until: float, asked: float) -> None:
        """Nothing to do: a scheduler process posts nothing."""

    def on_outcome(self, outcome: Outcome) -> None:
        """Let the announcer say what waited."""
        if outcome.address.front:
            if self._reuse is not None:
                self._reuse.on_outcome(outcome)
            return
        self._announcer.on_outcome(outcome)

    def on_round(self, now: float) -> None:
        """Renew what decode expects, and what is held for readers."""
        self._announcer.on_round(now)
        if self._reuse is not None:
            self._reuse.on_round(now)

    def on_report(self, last: int) -> Report:
        """Answer with this process's counters; records are the worker ranks', whose addresses are in the directory."""
        del last
        return Report(-1, {}, self.control.counters | (self._reuse.counters if self._reuse is not None else {}), [])

"""The worker half of a connector: lives in a worker process, beside the mover and the control thread that it starts.

On the engine's thread it does three things: put a step's changes into the mover's mailbox, record fences, take results out.

Where the fences are recorded is a matter of correctness (vLLM 0.26 to 0.32, both runners, read; 0.29 and 0.32 run):

* in ``bind_connector_metadata``, which precedes the forward in every version: it covers all earlier steps, zeroing and block
  copies, one of which might still write into blocks that a sink has just been given;
* in ``wait_for_save``, which follows the forward, with metadata still bound: it covers what this step computed.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import bare
from kvxfer.connector import block_major, compat
from kvxfer.connector.idling import Ringer
from kvxfer.connector.telemetry import Telemetry
from kvxfer.errors import ConfigError, RailsError
from kvxfer.layout.card import RankCard
from kvxfer.layout.maps import spell
from kvxfer.layout.route import StagingArea
from kvxfer.layout.tables import Tables
from kvxfer.platform import platform_for
from kvxfer.protocol.actions import SinkFinished, SourceFinished, SourceQuiet
from kvxfer.protocol.messages import RankAddress
from kvxfer.rails.pinning import WorkerRails
from kvxfer.transport import commands as cmd
from kvxfer.transport.mirroring import HostMirror, mirror_of, slice_of
from kvxfer.transport.mover_settings import MoverSettings
from kvxfer.transport.nixl import NixlAgent
from kvxfer.transport.rank import RankThreads
from kvxfer.transport.secret import load_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from kvxfer.config import Settings
    from kvxfer.layout.maps import CacheMap
    from kvxfer.layout.repack import Call
    from kvxfer.platform import Fence, Platform, Staging
    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.agent import Agent

logger = logging.getLogger("kvxfer.worker")

_SLACK = 256
"""Tokens by which a prompt may take more room in a source's blocks, of this size at most, than in ours."""


class WorkerHalf:
    """One rank's worker half. Nothing is started before vLLM hands over the caches."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, mode: str, settings: Settings, me: RankId) -> None:
        self.me = me
        self.mode = mode
        self.settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._platform: Platform
        self._threads: RankThreads | None = None
        self._address: RankAddress | None = None
        self._staging: Staging | None = None
        self._computing = False
        self._opened: dict[str, bytes] = {}
        self._cancelled: set[str] = set()
        self._telemetry = Telemetry(vllm_config, settings, me)
        self.take_stats = self._telemetry.tally.take
        self._plain = True
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._quiet: list[int] = []

    # --- start and end ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, caches: Mapping[str, Any]) -> None:
        """Find out where the blocks lie, register them with NIXL, and listen. Raises a KvxferError with what to change."""
        if not caches:
            raise ConfigError("vLLM handed over no KV cache: kvxfer needs a model with attention layers")
        first = next(iter(caches.values()))
        self._platform = platform_for(first.device.type)
        cache = self._platform.describe(caches, compat.geometry(self._vllm_config, self._kv_cache_config))
        self._plain = Tables.of(cache).plain
        settings = self.settings
        staging = self._staging = self._staging_for(cache)
        tp_rank, pp_rank = compat.parallel_ranks(self._vllm_config)
        parallel, model = self._vllm_config.parallel_config, self._vllm_config.model_config
        mirror = self._mirror_for(cache, staging)
        card = RankCard(
            engine=self.me.engine,
            model=settings.model_id or model.model,
            tp_rank=tp_rank,
            tp_size=parallel.tensor_parallel_size,
            pp_rank=pp_rank,
            pp_size=parallel.pipeline_parallel_size,
            backend=settings.backend,
            cache=cache,
            agent=b"",
            staging=None if staging is None else StagingArea(staging.address, staging.size, self._platform.offers),
            role=self._vllm_config.kv_transfer_config.kv_role,
        )
        threads = self._threads = RankThreads(
            self.me,
            card if mirror is None else mirror.of(card),
            self.make_agent,
            MoverSettings(
                mode=self.mode,
                stream=settings.stream,
                leg_timeout=settings.leg_timeout,
                pull_lease=settings.pull_lease,
                hold_limit=settings.hold_limit,
                drain_bound=settings.drain_bound,
                transfer_limit=settings.transfer_limit,
                revoke=settings.revoke,
                poll=settings.poll_interval,
                records=settings.record_capacity,
                slice_tokens=None if mirror is None else slice_of(cache),
                eager=compat.posts(self._vllm_config, self.mode),
            ),
            settings.timing,
            host=settings.control_host,
            connect_timeout=settings.connect_timeout,
            mover_timeout=settings.mover_timeout,
            cpus=self._platform.background_cpus(),
            secret=load_secret(settings.secret_file),
            repack=self._repack_through(mirror),
            mirror=mirror,
            hear=self._telemetry.hear,
        )
        rails = WorkerRails(
            (settings.rails, settings.rails_policy), settings.backend, self._platform, cache.device
        )  # before there is an agent
        self._telemetry.start()
        with rails.watched():
            threads.start()
        try:
            rails.settle()
        except RailsError:
            threads.stop()
            raise
        self._address = RankAddress(
            self.me.rank, self.me.incarnation, tp_rank, pp_rank, bare(settings.advertise_host), threads.control.port
        )
        for host, port in settings.peer_addresses:
            threads.control.keep(cmd.EngineAddress(host, port, ""))
        if self.me.rank == 0:
            block_major.report(self._vllm_config, cache)
        logger.info(
            "%s: %d blocks of %s bytes in %s memory (%s), registered with NIXL %s",
            self.me, cache.num_blocks, f"{cache.block_bytes:,}", cache.memory, spell(cache), settings.backend,
        )  # fmt: skip

    def _staging_for(self, cache: CacheMap) -> Staging | None:
        """Allocate the staging area. Unasked, for two of the longest prompts; for one where two exceed a quarter of the cache."""
        if not self._platform.offers:
            return None
        size = self.settings.staging_bytes
        if size is None and not self._platform.stages_unasked:
            return None
        if size is None:
            longest = self._vllm_config.model_config.max_model_len
            one = -(-(longest + _SLACK) // cache.block_size)
            size = max(one, min(2 * one, cache.num_blocks // 4)) * cache.block_bytes
        return self._platform.staging(size, cache.device) if size else None

    def _mirror_for(self, cache: CacheMap, staging: Staging | None) -> HostMirror | None:
        """Allocate what vLLM's ``kv_buffer_device: cpu`` asks for, if the platform has a use for it."""
        if not compat.buffers_on_host(self._vllm_config):
            return None
        area = None if staging is None else StagingArea(staging.address, staging.size, ())
        mirror = mirror_of(self._platform, cache, area)
        if mirror is not None:
            logger.info(
                "%s: KV moves through a mirror of the cache in host memory, %s bytes, in slices of %d tokens",
                self.me, f"{mirror.memory.size:,}", slice_of(cache),
            )  # fmt: skip
        return mirror

    def _repack_through(self, mirror: HostMirror | None) -> Callable[[Call], Fence] | None:
        repack = self._platform.repack if self._platform.offers else None
        return repack if repack is None or mirror is None else mirror.repacking(repack)

    def make_agent(self) -> Agent:
        """Make what moves the bytes. Called in the mover's thread."""
        return NixlAgent(self.me.agent, self.settings.backend, self.settings.backend_options)

    def address(self) -> RankAddress | None:
        """Return where this rank listens; None before it does."""
        return self._address

    def shutdown(self) -> None:
        """Stop both threads."""
        if self._threads is not None:
            self._threads.stop()
        self._telemetry.stop()

    # --- each step, on the engine's thread --------------------------------------------------------------------------

    def begin_step(self, step: cmd.Step) -> None:
        """Hand a step's changes over, behind a fence for everything launched before it."""
        if self._threads is None:
            return
        for opened in step.opened:
            self._opened[opened.request_id] = opened.blocks
        # A request that has been reported meanwhile is not open any more: the abort crossed the report.
        self._cancelled.update(cancel.request_id for cancel in step.cancelled if cancel.request_id in self._opened)
        if step.bell:
            self._threads.mover.results.on_new = Ringer(step.bell, self.me.rank).ring
        for address in step.introduced:
            self._threads.control.keep(address, lasting=False)
        self._threads.mover.post(cmd.StepBegin(step, self._platform.fence()))
        self._computing = step.computing

    def end_step(self) -> None:
        """Record the fence behind what this step computed. Costs nothing on a step that computes for nobody else."""
        if self._computing and self._threads is not None:
            self._computing = False
            self._threads.mover.post(cmd.StepEnd(self._platform.fence()))

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Return the ids of (sources, sinks) whose blocks are the engine's again, each exactly once."""
        threads = self._threads
        if threads is None:
            return None, None
        threads.mover.check()
        results = threads.mover.results
        if not results:
            return None, None
        sent, received = set(), set()
        while results:
            done = results.popleft()
            if isinstance(done, SourceFinished):
                sent.add(done.request_id)
                continue
            if isinstance(done, SourceQuiet):
                self._quiet.append(done.token)
                continue
            received.add(done.request_id)
            blocks = self._opened.pop(done.request_id, b"")
            cancelled = done.request_id in self._cancelled
            self._cancelled.discard(done.request_id)
            if done.reason is not None and not cancelled:
                logger.warning(
                    "request %s did not get its KV (handoff %s): %s", done.request_id, done.handoff, done.reason
                )
                if self._plain:
                    self._failed_blocks.update(array("i", blocks))
                else:
                    self._failed_requests.add(done.request_id)
        return sent or None, received or None

    def take_whole_loads(self, wanted: Container[str]) -> set[str]:
        """Return the sinks among those wanted whose load has succeeded, each once; ``take_finished`` returns the rest."""
        if self._threads is None:
            return set()
        results = self._threads.mover.results
        received, left = set(), []
        while results:
            done = results.popleft()
            if (
                isinstance(done, SinkFinished)
                and done.reason is None
                and done.request_id in wanted
                and done.request_id not in self._cancelled
            ):
                received.add(done.request_id)
                self._opened.pop(done.request_id, None)
            else:
                left.append(done)
        if left:
            results.extendleft(reversed(left))
        return received

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks whose load failed, for requests that ``take_finished`` has just returned."""
        if not self._failed_blocks:
            return set()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose whole load failed, of those that ``take_finished`` has returned.

        Of several groups, or of a window, no part of a failed load can be kept: where to compute it again begins with blocks
        that vLLM has never allocated.
        """
        if not self._failed_requests:
            return set()
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_quiet(self) -> list[int]:
        """Return the tokens of orphaned blocks that no write of this rank reads any more. Asked after ``take_finished``."""
        quiet, self._quiet = self._quiet, []
        return quiet

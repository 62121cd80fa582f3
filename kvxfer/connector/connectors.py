"""The connectors as vLLM sees them: thin classes that hand each hook to the half that lives in this process.

Written once; a named connector only says who moves the bytes. ``KVConnectorBase_V1`` is vLLM's public base class; nothing is
taken from upstream's NIXL connectors.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvxfer.config import settings_from
from kvxfer.connector import at_once, block_major, checks, compat, plugin
from kvxfer.connector.metadata import NOTHING, RankHandshake, RankNews, StepMetadata
from kvxfer.connector.room import Room
from kvxfer.connector.scheduler import SchedulerHalf
from kvxfer.connector.stats import COUNTS, Stats
from kvxfer.connector.worker import WorkerHalf
from kvxfer.protocol.ids import RankId

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("kvxfer")


class KvxferConnector(KVConnectorBase_V1, *compat.supports_hybrids()):  # type: ignore[misc]  # vLLM is not typed where the checks run
    """Both halves' common front. Raises KvxferErrors at start, each with what to change; never at a step."""

    mode: ClassVar[str]
    """``push``: prefill writes into decode. ``pull``: decode reads from prefill."""

    implied: ClassVar[Mapping[str, Any]] = {}
    """Settings that the connector's name says; the configuration may say otherwise."""

    scheduler_half: ClassVar[type[SchedulerHalf]] = SchedulerHalf
    worker_half: ClassVar[type[WorkerHalf]] = WorkerHalf

    _scheduler: SchedulerHalf
    _worker: WorkerHalf  # each process has one of the two

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        plugin.register()  # where VLLM_PLUGINS left the plugin out, this is the first chance to set the environment
        transfer = vllm_config.kv_transfer_config
        settings, ignored = settings_from({**self.implied, **(transfer.kv_connector_extra_config or {})})
        if ignored and role is KVConnectorRole.SCHEDULER:
            logger.info("settings of upstream's connectors without effect here: %s", ", ".join(sorted(ignored)))
        checks.check_engine(vllm_config)
        compat.check_groups(vllm_config, kv_cache_config)
        checks.check_inputs(vllm_config)
        incarnation = secrets.token_hex(8)
        self._room = Room(vllm_config.cache_config.block_size)
        if role is KVConnectorRole.SCHEDULER:
            me = RankId(transfer.engine_id, incarnation, -1)
            self._scheduler = self.scheduler_half(vllm_config, kv_cache_config, self.mode, settings, me)
            self._news = self._room.news
        else:
            tp_rank, pp_rank = compat.parallel_ranks(vllm_config)
            rank = pp_rank * vllm_config.parallel_config.tensor_parallel_size + tp_rank
            me = RankId(transfer.engine_id, incarnation, rank)
            self._worker = self.worker_half(vllm_config, kv_cache_config, self.mode, settings, me)
            at_once.is_here(self._worker)
            self._news = self._worker.take_stats
        # Asked at every step: without a frame of ours in between.
        self.get_kv_connector_stats = self._news  # type: ignore[method-assign]

    # --- the scheduler's hooks --------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See SchedulerHalf."""
        self._scheduler.bind_block_pool(gpu_block_pool)
        self._room.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """See SchedulerHalf."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See SchedulerHalf."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See SchedulerHalf."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata | tuple[()]:
        """See SchedulerHalf.build_step."""
        step = self._scheduler.build_step(scheduler_output)
        return NOTHING if step is None else StepMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        """See SchedulerHalf."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerHalf. Asked where vLLM knows one group only."""
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerHalf."""
        return self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while something noted must still reach the workers."""
        return self._scheduler.has_pending_work()

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankHandshake]) -> None:
        """Learn where the ranks listen (single pipeline stage)."""
        self._scheduler.publish([one.address for one in metadata.values()])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], RankHandshake]) -> None:
        """Learn where the ranks of all pipeline stages listen."""
        self._scheduler.publish([one.address for one in metadata.values()])

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups: vLLM must not zero blocks that a peer writes into."""
        del request
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    @property
    def requires_kv_delivery(self) -> bool:
        """Have prompts computed again that were preempted with their last token in flight, since vLLM 0.29: see compat."""
        return compat.wants_delivery(self._vllm_config)

    # --- the workers' hooks -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See WorkerHalf."""
        self._worker.register_kv_caches(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Ask for a block-major cache, up to vLLM 0.28."""
        return block_major.prefers_cross_layers(self._vllm_config)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Take a block-major cache, up to vLLM 0.28."""
        self.register_kv_caches(block_major.layers_of(kv_cache, attn_backend, self._kv_cache_config))

    def get_handshake_metadata(self) -> RankHandshake | None:
        """Tell the scheduler half where this rank listens."""
        address = self._worker.address()
        return None if address is None else RankHandshake(address)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step: comes before the forward in every version and runner."""
        self._connector_metadata = connector_metadata
        if connector_metadata:
            self._worker.begin_step(connector_metadata.step)

    def has_connector_metadata(self) -> bool:
        """Say no: vLLM asks once a layer whether to call the two hooks of layers below, which do nothing (0.26 to 0.32)."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: loads began when their blocks were registered."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: a request is scheduled only when its load has finished."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: the mover reads the cache behind the step's fence."""

    def wait_for_save(self) -> None:
        """End a step: comes after the forward, and does not wait."""
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See WorkerHalf.take_finished."""
        del finished_req_ids
        return self._worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See WorkerHalf.take_failed_blocks. vLLM asks right after ``get_finished``, in the same pass."""
        return self._worker.take_failed_blocks()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what ``get_finished`` does, and whose whole load failed. Asked in its place since vLLM 0.31."""
        return compat.transfer_results(*self.get_finished(finished_req_ids), self._worker.take_failed_requests())

    def build_connector_worker_meta(self) -> RankNews | None:
        """Tell the scheduler half which orphaned blocks are read no more; comes after ``get_finished``, on every step."""
        quiet, failed = self._worker.take_quiet(), self._worker.take_failed_requests()
        return RankNews(dict.fromkeys(quiet, 1), failed) if quiet or failed else None

    # --- both -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the threads of this process."""
        half = self._scheduler if self._role is KVConnectorRole.SCHEDULER else self._worker
        half.shutdown()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for a block-major cache, since vLLM 0.29."""
        return block_major.required_layout(vllm_config)

    def get_kv_connector_stats(self) -> Stats | None:
        """Say what handoffs have ended (a worker), or how much KV a new request could be given (the scheduler's process)."""
        return self._news()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """For vLLM's log: handoffs. It has the cache's use already."""
        counts = (data or {}).get(COUNTS)
        # A copy: vLLM adds to it, and Prometheus reads the same data.
        return Stats({COUNTS: dict(counts)} if counts else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Add kvxfer's to the engine's metrics: ``docs/metrics.md``."""
        from kvxfer.connector.metrics import Metrics

        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, cls.mode)


class KvxferPushConnector(KvxferConnector):
    """Prefill's mover WRITEs the KV into the blocks that decode has registered, while prefill still computes."""

    mode = "push"


class KvxferPullConnector(KvxferConnector):
    """Decode's mover READs the KV out of the blocks that prefill holds for it."""

    mode = "pull"


class KvxferBidirectionalConnector(KvxferPushConnector):
    """Pushes, and takes back: prefill's mover READs what decode still holds of a conversation, before the next turn.

    For that with a forward pull, say ``bidirectional_kv_xfer`` to ``KvxferPullConnector``.
    """

    implied: ClassVar[Mapping[str, Any]] = {"bidirectional_kv_xfer": True}

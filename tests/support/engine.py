"""An engine without a model: vLLM's real scheduler and block pool, its real runner hooks, our real connector, tagged memory.

What a model would compute at a position is a function of the tokens up to it; the "forward" writes that tag into the cache
and checks the tags of everything that it attends to, so KV that is foreign, stale or misplaced shows at the step that would
have read it. With a late stream (``HostPlatform(fence_delay=…)``) writes and checks happen later than the hooks, in order, as
on an accelerator. The fabric is the in-memory twin.

With a ``window`` it is a hybrid: the last layer attends to so many positions, its group has a block table of its own, and both
groups' layers lie over each other in the same memory, as vLLM lays them.

With ``tp`` it has several worker ranks, each with its heads, whose outputs vLLM's own aggregator combines.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvxfer.bench.process import free_ports
from kvxfer.connector import connectors
from kvxfer.connector.worker import WorkerHalf
from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.transport.twin import TwinAgent, TwinFabric
from kvxfer_host import HostPlatform

LAYERS, HEADS, DIM = 2, 1, 4


def tag(tokens: list[int]) -> int:
    """What the KV at the last of these positions is: a function of every token up to it."""
    return int.from_bytes(hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=4).digest(), "big")


class _Rank(NamedTuple):
    worker: Any
    active: Any
    caches: dict[str, Any]


class SimEngine:
    """One engine. ``runner`` is ``v1`` or ``v2``: whose order of hooks drives the connector, and whose way to tell of resumed requests.

    ``ahead``: asynchronous scheduling, which schedules and launches a step before it knows what the one before it sampled.
    ``vllm``: more of vLLM's own arguments. ``beside``: the configuration of another connector, which vLLM's MultiConnector then
    puts behind ours.
    """

    def __init__(
        self,
        name: str,
        fabric: TwinFabric,
        model: str,
        *,
        mode: str = "push",
        runner: str = "v2",
        num_blocks: int = 64,
        block_size: int = 16,
        budget: int = 64,
        prefix_caching: bool = True,
        platform: HostPlatform | None = None,
        policy: str = "fail",
        ahead: bool = False,
        role: str = "kv_both",
        window: int | None = None,
        note: int | None = None,
        tp: int = 1,
        heads: int = HEADS,
        vllm: Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.heads = [heads_of(heads, Shard(rank, tp)) for rank in range(tp)]
        self.window = (
            window  # of the last layer, in a group of its own; ``note`` is written down in a group of all layers
        )
        self.name, self.runner, self.block_size = name, runner, block_size
        self.platform = platform or HostPlatform(fence_delay=0)
        (port,) = free_ports(1)
        ours = {
            "kv_connector": f"Kvxfer{mode.capitalize()}Connector",
            "kv_connector_module_path": "kvxfer.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"control_port": port, "leg_timeout": 5.0, "drain_bound": 0.3, **settings},
        }
        whole = ours if beside is None else several(ours, beside)
        self.config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            block_size=block_size,
            max_model_len=2048,
            max_num_seqs=min(64, budget),
            max_num_batched_tokens=budget,
            enable_prefix_caching=prefix_caching,
            kv_transfer_config={**whole, "engine_id": name},
            **(vllm or {}),
        ).create_engine_config()
        self.config.parallel_config.tensor_parallel_size = tp
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.config.cache_config.block_size = block_size
        self.config.scheduler_config.async_scheduling = ahead  # which vLLM's CPU platform turns off
        names = [f"layers.{i}" for i in range(LAYERS)]
        shape = {"block_size": block_size, "num_kv_heads": len(self.heads[0]), "head_size": DIM, "dtype": torch.float32}
        groups = [
            KVCacheGroupSpec(names if window is None else names[:-1], FullAttentionSpec(**shape, sliding_window=note))
        ]
        if window is not None:
            groups.append(KVCacheGroupSpec(names[-1:], SlidingWindowSpec(**shape, sliding_window=window)))
        self.groups = [(group.layer_names, getattr(group.kv_cache_spec, "sliding_window", None)) for group in groups]
        self.kv_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        hasher = get_hash_fn_by_name("sha256")
        init_none_hash(hasher)
        self._hasher = get_request_block_hasher(block_size, hasher)
        with set_current_vllm_config(self.config):
            self.scheduler = (AsyncScheduler if ahead else Scheduler)(
                vllm_config=self.config,
                kv_cache_config=self.kv_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=block_size,
                hash_block_size=block_size,
                log_stats=False,
            )
        self.scheduler.use_v2_model_runner = runner == "v2"
        self._launched: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._ahead = 1 if ahead else 0

        class Worker(WorkerHalf):
            def make_agent(self) -> TwinAgent:
                return TwinAgent(self.me.agent, fabric)

        cls = getattr(connectors, f"Kvxfer{mode.capitalize()}Connector")
        self.connector_class = type(cls.__name__, (cls,), {"worker_half": Worker})
        if beside is not None:
            self.connector_class = MultiConnector
            self._own_class, self._own_worker = cls, Worker
        self.ranks = [self._start_rank(rank, names, num_blocks) for rank in range(tp)]
        self.worker, self.active, self.caches = self.ranks[0]
        self._aggregator = KVOutputAggregator(tp)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): one.worker.get_handshake_metadata() for rank, one in enumerate(self.ranks)}
        )
        self.tables: dict[str, list[list[int]]] = {}
        self.outputs: dict[str, list[int]] = {}
        self._contents: dict[str, list[int]] = {}
        self._made: dict[str, list[int]] = {}  # sampled, whether or not the scheduler has taken it yet
        self.finish_reasons: dict[str, Any] = {}
        self.params: dict[str, Any] = {}
        self.problems: list[str] = []
        self.steps = 0

    def _start_rank(self, rank: int, names: list[str], num_blocks: int) -> _Rank:
        tensors, caches = self._allocate(names, num_blocks)
        active = None
        with _Patched(self.platform, rank, self.heads), self._workers_of_twins():
            worker = self.connector_class(self.config, connectors.KVConnectorRole.WORKER, self.kv_config)
            kv_transfer_state._KV_CONNECTOR_AGENT = worker
            if self.runner == "v2":
                active = ActiveKVConnector(self.config, tensors)
            else:
                worker.register_kv_caches(tensors)
        return _Rank(worker, active, caches)

    @contextlib.contextmanager
    def _workers_of_twins(self) -> Iterator[None]:
        """Where vLLM's MultiConnector makes our connector, from its name, it gets the twin's worker half."""
        if self.connector_class is not MultiConnector:
            yield
            return
        self._own_class.worker_half = self._own_worker
        try:
            yield
        finally:
            del self._own_class.worker_half

    def _allocate(self, layers: list[str], num_blocks: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors that the connector is handed, and views of them as [blocks, heads, tokens, …].

        The tag is repeated over what is behind the token.
        """
        shape = (num_blocks, len(self.heads[0]), self.block_size, 2 * DIM)
        caches = {layer: torch.zeros(shape, dtype=torch.float32) for layer in layers}
        if self.window is not None:
            caches = dict.fromkeys(layers, caches[layers[0]])
        return caches, caches

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: dict[str, Any] | None,
        max_tokens: int = 1,
        salt: str | None = None,
        lora: str | LoRARequest | None = None,
        images: Images = (),
        features: Sequence[MultiModalFeatureSpec] | None = None,
        **options: Any,
    ) -> None:
        """``images``: what stands at which positions of the prompt, by what hash. They, and an adapter's name, shape the tags.

        ``features``, and an adapter that is vLLM's own request for one, do not: vLLM hears of them, the model has the same for all.
        """
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=None, **options)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        name = lora if isinstance(lora, str) else None
        adapter = lora if name is None else LoRARequest(name, 1 + sum(name.encode()), "/nowhere")
        seen = [MultiModalFeatureSpec(None, "image", what, PlaceholderRange(at, length)) for at, length, what in images]
        seen += features or ()
        if seen:
            self.scheduler.max_num_encoder_input_tokens = 4096  # of a model that has an encoder
            cache = self.scheduler.encoder_cache_manager
            if not cache.cache_size:
                cache.cache_size = cache.num_free_slots = cache.num_freeable_slots = 4096
        request = Request(
            request_id, tokens, sampling, None,
            cache_salt=salt, lora_request=adapter, mm_features=seen or None, block_hasher=self._hasher,
        )  # fmt: skip
        request.kv_transfer_params = params
        self._contents[request_id] = contents(tokens, name, images)
        self.outputs[request_id] = []
        self._made[request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def ours(self) -> Any:
        """The scheduler's side of our connector."""
        return getattr(self.scheduler.connector, "_connectors", [self.scheduler.connector])[0]

    @property
    def usage(self) -> int:
        """Blocks in use."""
        return self.kv_config.num_blocks - 1 - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self._launched)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn of the engine core: schedule, execute, take the outputs of the oldest step that is under way."""
        self.steps += 1
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._launched.append((scheduled, self._execute(scheduled)))
            if len(self._launched) <= self._ahead:
                return
        if not self._launched:
            return
        scheduled, output = self._launched.popleft()
        for engine_outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in engine_outputs.outputs:
                self.outputs[one.request_id].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.finish_reasons[one.request_id] = one.finish_reason
                    self.params[one.request_id] = one.kv_transfer_params

    def _execute(self, scheduled: Any) -> ModelRunnerOutput:
        for request_id in scheduled.finished_req_ids:
            self.tables.pop(request_id, None)
        work, output = self._plan(scheduled)
        outputs = [self._execute_on(rank, scheduled, work, copy.copy(output)) for rank in range(len(self.ranks))]
        return outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)

    def _execute_on(self, rank: int, scheduled: Any, work: list[Any], output: ModelRunnerOutput) -> ModelRunnerOutput:
        worker, active, _ = self.ranks[rank]
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        if scheduled.total_num_scheduled_tokens == 0:
            return copy.copy(self._no_forward(scheduled, active))
        if self.runner == "v2":
            active.pre_forward(scheduled)
            self._forward(rank, work)
            kv = active.post_forward(scheduled.finished_req_ids)
        else:
            with (
                set_forward_context(None, self.config),
                KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled) as kv,
            ):
                self._forward(rank, work)
        output.kv_connector_output = kv
        return output

    def _no_forward(self, scheduled: Any, active: Any) -> ModelRunnerOutput:
        if self.runner == "v2":
            with set_forward_context(None, self.config):
                return active.no_forward(scheduled)
        return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)

    def _forward(self, rank: int, work: list[Any]) -> None:
        """Write the tags of the scheduled positions, on the stream; check, there too, the tags of all earlier ones."""
        for one in work:
            self._launch(lambda one=one: self._compute(rank, *one))

    def _plan(self, scheduled: Any) -> tuple[list[Any], ModelRunnerOutput]:
        """What a step computes, and what it samples."""
        for new in scheduled.scheduled_new_reqs:
            self.tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(one) for one in blocks]
            elif blocks is not None:
                for table, more in zip(self.tables[request_id], blocks, strict=True):
                    table.extend(more)
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids, sampled, works = [], [], []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            # Asynchronous scheduling computes on placeholders: what will be sampled is known here in advance.
            start = computed[request_id]
            tokens = [*self._contents[request_id], *self._made[request_id]][: start + count]
            work = (request_id, [list(table) for table in self.tables[request_id]], tokens, start, start + count)
            works.append(work)
            ids.append(request_id)
            if request.is_prefill_chunk:
                sampled.append([])
            else:
                token = tag(tokens) % 1000 + 1
                self._made[request_id] = [*tokens[request.num_prompt_tokens :], token]
                sampled.append([token])
        return works, ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)

    def _launch(self, work: Any) -> None:
        if self.platform.stream is None:
            work()
        else:
            self.platform.stream.launch(work)

    def _compute(
        self, rank: int, request_id: str, tables: list[list[int]], tokens: list[int], start: int, end: int
    ) -> None:
        bs, caches = self.block_size, self.ranks[rank].caches
        heads = torch.tensor([[float(head << 20)] for head in self.heads[rank]])  # [head, content]
        values = [float(tag(tokens[: position + 1]) % (1 << 20)) + heads for position in range(end)]
        for table, (layers, window) in zip(tables, self.groups, strict=True):
            for layer in layers:
                cache = caches[layer]
                for position in range(0 if window is None else max(0, start - window + 1), start):
                    if not bool((cache[table[position // bs], :, position % bs] == values[position]).all()):
                        self.problems.append(
                            f"{self.name}.{rank} {request_id}: {layer} position {position} is not its own KV"
                        )
                for position in range(start, end):
                    cache[table[position // bs], :, position % bs] = values[position]

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.shutdown()
        self.scheduler.connector.shutdown()


Images = Sequence[tuple[int, int, str]]
"""Of each: its first position, how many it takes, its hash."""


def contents(tokens: list[int], lora: str | None = None, images: Images = ()) -> list[int]:
    """What the KV of a prompt is a function of: its tokens, the images that stand in it, the adapter that computes it."""
    found = list(tokens)
    for offset, length, image in images:
        found[offset : offset + length] = [
            token + 1000 * sum(image.encode()) for token in found[offset : offset + length]
        ]
    if lora is not None:
        found[0] += 1_000_000 * sum(lora.encode())
    return found


def several(ours: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Configure both connectors as children of vLLM's MultiConnector; its role and policy are ours, or what ``engine`` says."""
    theirs = {"kv_role": ours["kv_role"], **other}
    top = {key: ours[key] for key in ("kv_role", "kv_load_failure_policy")} | theirs.pop("engine", {})
    children = {"connectors": [ours, theirs]}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": children, **top}


def expected(tokens: list[int], count: int) -> list[int]:
    """What any engine samples after this prompt (its ``contents``, where something else than tokens shapes them)."""
    made: list[int] = []
    for _ in range(count):
        made.append(tag(tokens + made) % 1000 + 1)
    return made


class _Patched:
    """Construct a connector without torch.distributed, on a given platform instance."""

    def __init__(self, platform: HostPlatform, rank: int, heads: list[tuple[int, ...]]) -> None:
        self.platform = platform
        self.rank, self.heads = rank, heads

    def __enter__(self) -> None:
        from kvxfer.connector import compat, worker

        self.saved = (compat.parallel_ranks, worker.platform_for, compat.geometry)
        compat.parallel_ranks = lambda _config: (self.rank, 0)
        worker.platform_for = lambda _device: self.platform
        original = compat.geometry

        def geometry(vllm_config: Any, kv_cache_config: Any) -> Any:
            found = original(vllm_config, kv_cache_config)
            total = max(max(one) for one in self.heads) + 1
            heads = {"heads": self.heads[self.rank], "total_heads": total, "head_size": DIM}
            return dataclasses.replace(found, groups=tuple(dataclasses.replace(one, **heads) for one in found.groups))

        compat.geometry = geometry

    def __exit__(self, *_: object) -> None:
        from kvxfer.connector import compat, worker

        compat.parallel_ranks, worker.platform_for, compat.geometry = self.saved


__all__ = ["KVConnectorOutput", "SimEngine", "contents", "expected", "tag"]

"""Everything in which vLLM's versions differ, by feature and never by version string. Nothing else in kvxfer knows a version.

Read in the wheels of 0.24.0, 0.26.0, 0.29.0, 0.31.0 and 0.32.0, whose real schedulers and runner hooks the contract tests drive;
``docs/versions.md`` says what each of them has. What is handled here:

* what a version cannot do is off, with one line at start that says what it costs (``Features``);
* a request that resumes after a preemption arrives among the cached requests with its whole block table (V1 runner), or
  among the new requests once more (V2 runner);
* the attention backends' names and the cache's geometry, as far as vLLM tells them at all;
* caches of several groups: whether they are known at all, which of them can be moved, and how a failed load is told.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.connector.private import caller_with, engine_transfer
from kvxfer.errors import ConfigError
from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.layout.tables import Shape, Tables
from kvxfer.platform import Geometry, LayerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

_packed = msgspec.msgpack.Encoder().encode

_HYBRID_KINDS = ("FullAttentionSpec", "SlidingWindowSpec")
"""What groups of a cache of several may keep."""

_NO_POSITIONS = ("MambaSpec", "ChunkedLocalAttentionSpec", "CircularBufferSpec")
"""What does not keep the state of each of the positions that a sliding window, or none, looks back to."""

_ONE_GROUP = "start with --disable-hybrid-kv-cache-manager"

NEEDED = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "register_kv_caches",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
    "bind_connector_metadata",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
)
"""Hooks of vLLM's base class. One that it lacks is called by nobody: handoffs would hang, or be wrong, without a word."""


@dataclass(frozen=True, slots=True)
class Features:
    """What this vLLM lets a connector do beyond ``NEEDED``."""

    pinning: bool
    """The scheduler hands over its block pool, and workers can say when blocks may go: ``bind_gpu_block_pool``, and
    ``build_connector_worker_meta`` with its ``KVConnectorWorkerMetadata``. Push writes while it computes only with both."""
    stepping: bool
    """An engine without requests goes on stepping while the connector says so: ``has_pending_push_work``."""
    delivery: bool
    """A prompt that was preempted with its last token in flight is computed again for its peer: ``requires_kv_delivery``."""
    failed_requests: bool
    """A load can fail by its request, not by its blocks: ``get_transfer_results``. In a cache of several groups, and where blocks
    are let go of, the only way that vLLM offers (``whole_load_failures``)."""
    block_major: str
    """How to ask for a cache whose blocks are one run of memory each: by ``layout``, by ``cross layers``, or not at all."""

    def costs(self, mode: str, vllm_config: Any) -> Iterator[str]:
        """Say, in a line each, what an engine in this mode goes without.

        What concerns the cache's layout is not among it: that depends on more than the version (``block_major.report``).
        """
        prefills = vllm_config.kv_transfer_config.kv_role != "kv_consumer"
        if prefills and mode == "push" and not self.pinning:
            yield (
                "this vLLM lets no connector pin blocks (bind_gpu_block_pool, build_connector_worker_meta), so prompts are "
                "written only when they are computed whole"
            )
        if not self.stepping:
            yield (
                "this vLLM does not step for a connector's sake (has_pending_push_work), so a cancel or a release that is left "
                "when an engine has no request any more waits for the next one"
            )
        if prefills and getattr(vllm_config.scheduler_config, "async_scheduling", False):
            if not self.delivery:
                yield (
                    "this vLLM does not compute a prompt again that was preempted with its last token in flight "
                    "(requires_kv_delivery), so the handoff of such a prompt fails; --no-async-scheduling avoids it"
                )
            elif not wants_delivery(vllm_config):
                yield (
                    "with kv_role kv_both a prompt that was preempted with its last token in flight is not computed again, so "
                    "its handoff fails; --no-async-scheduling avoids it, or kv_producer where the engine only prefills"
                )


@functools.cache
def features() -> Features:
    """Find out what the installed vLLM has. Raises ConfigError where it lacks a hook that nothing can stand in for."""
    base = _base()

    def has(*hooks: str) -> bool:
        return all(hasattr(base.KVConnectorBase_V1, hook) for hook in hooks)

    missing = [hook for hook in NEEDED if not has(hook)]
    if missing:
        raise ConfigError(
            f"this vLLM does not call {', '.join(missing)} of a KV connector, which kvxfer cannot do without: "
            "see docs/versions.md for the versions that it runs with"
        )
    return Features(
        pinning=has("bind_gpu_block_pool", "build_connector_worker_meta")
        and hasattr(base, "KVConnectorWorkerMetadata"),
        stepping=has("has_pending_push_work"),
        delivery=has("requires_kv_delivery"),
        failed_requests=has("get_transfer_results"),
        block_major="layout" if layouts() else "cross layers" if has("register_cross_layers_kv_cache") else "",
    )


def wants_delivery(vllm_config: Any) -> bool:
    """Tell whether vLLM shall drop what a preempted request had in flight, and compute it again.

    Not in an engine that is both: asynchronous scheduling there gives a preempted request's blocks back only when the step in
    flight is over (``defer_block_free``), so that one request too many gets all of them preempted; when each loses its
    token too, none ever gets on (0.29.0: run, ``tests/contract/test_async_scheduling.py``). What is lost there
    is noticed by ``request_finished``.
    """
    return bool(engine_transfer(vllm_config).kv_role == "kv_producer")


def layouts() -> Iterable[str]:
    """Name the layouts that a connector may ask for; none where they have no names."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return ()
    return tuple(KVCacheLayout.__members__)


def base_of(name: str) -> type:
    """Return vLLM's base class of what crosses between a connector's halves; ``object`` where nothing of the kind does."""
    found: type = getattr(_base(), name, object)
    return found


def _base() -> Any:
    """Return the module of vLLM's connector interface."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return base


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in a scheduler's output. ``blocks`` extend its tables, or replace them (``whole``); they are vLLM's own lists.

    A list for each group, or none at all where no group has new blocks.

    After this step positions [0, computed + scheduled) are final.
    """

    request_id: str
    blocks: tuple[list[int], ...]
    whole: bool
    computed: int
    scheduled: int


def scheduled_requests(output: Any, among: Container[str]) -> Iterator[Scheduled]:
    """Iterate over those requests of a SchedulerOutput, of any version and runner, that are ``among`` these."""
    counts: Mapping[str, int] = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        request_id = new.req_id
        if request_id in among:
            yield Scheduled(request_id, new.block_ids, True, new.num_computed_tokens, counts[request_id])
    cached = output.scheduled_cached_reqs
    for at, request_id in enumerate(cached.req_ids):
        if request_id in among:
            yield Scheduled(
                request_id,
                cached.new_block_ids[at] or (),
                request_id in cached.resumed_req_ids,
                cached.num_computed_tokens[at],
                counts[request_id],
            )


def preempted_requests(output: Any) -> set[str]:
    """Return the requests that this step preempted."""
    return getattr(output, "preempted_req_ids", None) or set()


def prompt_digests(request: Any, *less: int) -> tuple[bytes, ...]:
    """Digest everything that shapes the KV of a request's prompt without its last ``less`` tokens; () where it cannot be told.

    ``less`` ascends. Two legs of a handoff must have the same where they share positions: tokens, LoRA adapter (by name),
    multimodal inputs (by vLLM's own hashes, and where they stand) and cache salt. Called in the scheduler's thread, so no Python
    object is made for a token: 0.04 ms for 8,192 of them.
    """
    tokens = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None:
        return ()
    lora = getattr(request, "lora_request", None)
    shaping = (
        getattr(lora, "lora_name", None),
        getattr(request, "cache_salt", None),
        [
            (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in getattr(request, "mm_features", None) or ()
        ],
    )
    # One token's bytes after the other's, behind their number.
    packed = memoryview(_packed(tokens if isinstance(tokens, list) else list(tokens)))
    ends = {one: len(packed) - sum(len(_packed(token)) for token in tokens[len(tokens) - one :]) for one in less}
    # Processors have instructions for SHA-256, and it releases the interpreter's lock.
    digest, done, found = hashlib.sha256(repr(shaping).encode()), _header(len(tokens)), []
    for end in sorted(end for one, end in ends.items() if one < len(tokens)):
        digest.update(packed[done:end])
        found.append(digest.digest()[:16])
        done = end
    return tuple(reversed(found))


def _header(length: int) -> int:
    """Return how many bytes MessagePack puts before the items of an array."""
    return 1 if length < 16 else 3 if length < 1 << 16 else 5  # noqa: PLR2004


def needs_every_position(request: Any) -> bool:
    """Tell whether the answer needs a forward over the whole prompt: its log-probabilities were asked for.

    vLLM marks such requests by not reading its own prefix cache for them.
    """
    sampling = getattr(request, "sampling_params", None)
    return bool(
        getattr(request, "skip_reading_prefix_cache", False) or getattr(sampling, "prompt_logprobs", None) is not None
    )


def may_pin(vllm_config: Any) -> bool:
    """Tell whether blocks may be referenced beside their requests.

    Cascade attention, off by default, takes blocks with as many references as there are running requests for their common
    prefix (0.26 and 0.29, v1/core/single_type_kv_cache_manager.py ``get_num_common_prefix_blocks``).
    """
    return bool(getattr(vllm_config.model_config, "disable_cascade_attn", True))


def geometry(vllm_config: Any, kv_cache_config: Any) -> Geometry:
    """Collect what vLLM's configuration says of this rank's cache."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tensor, _ = parallel_ranks(vllm_config)
    # Of MLA's one latent every rank has a replica.
    total = 1 if getattr(model, "use_mla", False) else int(model.get_total_num_kv_heads())
    heads = heads_of(total, Shard(tensor, parallel.tensor_parallel_size))
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return Geometry(
        groups=tuple(_group(group, heads, total, model) for group in kv_cache_config.kv_cache_groups),
        num_blocks=kv_cache_config.num_blocks,
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        attention_backends=_attention_backends(vllm_config, names),
        model_dtype=str(getattr(model, "dtype", "")).removeprefix("torch."),
    )


def _group(group: Any, heads: tuple[int, ...], total: int, model: Any) -> LayerGroup:
    spec, specs = group.kv_cache_spec, _specs(group)
    return LayerGroup(
        layers=tuple(sorted(((name, _index(name, model)) for name in group.layer_names), key=lambda layer: layer[1])),
        block_size=spec.block_size,
        heads=heads,
        total_heads=total,
        head_size=specs[0].head_size,
        kind=type(specs[0]).__name__,
        window=_window(specs[0]),
    )


def _specs(group: Any) -> list[Any]:
    """Return what a group's layers keep: one for all, or one each where they differ."""
    return list(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()) or [group.kv_cache_spec]


def _window(spec: Any) -> int | None:
    """Return how far back a group's attention looks, as far as its blocks are concerned.

    With --disable-hybrid-kv-cache-manager a single group keeps all positions of all layers, and notes down the window of those
    that have one (vLLM 0.29 v1/kv_cache_interface.py ``FullAttentionSpec``).
    """
    return getattr(spec, "sliding_window", None) if type(spec).__name__.startswith("SlidingWindow") else None


def _index(name: str, model: Any) -> int:
    """Return the model's index of a layer: the one number in its name (vLLM: model_executor/models/utils.py).

    A draft model's layers are numbered from 0 on as well; here they follow the model's own, as those of EAGLE and MTP do by their
    names (0.24 to 0.32, v1/spec_decode/draft_model.py).
    """
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ConfigError(
            f"layer {name!r} has {len(numbers)} numbers in its name: which layer of the model it is cannot be told"
        )
    return numbers[0] + (int(model.get_total_num_hidden_layers()) if name.startswith("draft_model.") else 0)


def _attention_backends(vllm_config: Any, layer_names: list[str]) -> tuple[str, ...]:
    """Name the backends of the layers; empty where this vLLM does not tell."""
    context = getattr(vllm_config.compilation_config, "static_forward_context", None) or {}
    names = set()
    for layer in layer_names:
        backend = getattr(context.get(layer), "get_attn_backend", None)
        if backend is not None:
            names.add(str(backend().get_name()))
    return tuple(sorted(names))


def supports_hybrids() -> tuple[type, ...]:
    """Return the base class by which a connector tells vLLM that it takes caches of several groups, if there is one.

    Without it vLLM gives every layer one group, as --disable-hybrid-kv-cache-manager does. To a model of one group nothing else
    changes (0.29 and 0.32, v1/core/sched/scheduler.py ``_connector_finished``, config/vllm.py).
    """
    found = getattr(_base(), "SupportsHMA", None)
    return () if found is None else (found,)


def tables(kv_cache_config: Any) -> Tables:
    """Return how the block tables of a request are packed."""
    groups = kv_cache_config.kv_cache_groups
    return Tables(Shape(group.kv_cache_spec.block_size, _window(_specs(group)[0])) for group in groups)


def check_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError, with what to change, for a cache whose groups kvxfer cannot move, or not prove to move."""
    groups = kv_cache_config.kv_cache_groups
    kinds = {type(spec).__name__ for group in groups for spec in _specs(group)}
    if strange := sorted(kinds.intersection(_NO_POSITIONS) if len(groups) == 1 else kinds.difference(_HYBRID_KINDS)):
        lost = kinds.intersection(_NO_POSITIONS[:1])
        cure = "serve such a model without disaggregation" if lost else _ONE_GROUP
        raise ConfigError(
            f"this model's KV cache has {len(groups)} groups, with {', '.join(strange)}; of several groups kvxfer moves full "
            f"attention and sliding windows: {cure}"
        )
    if tables(kv_cache_config).plain:
        return
    windows = [
        {(_window(spec), getattr(spec, "extra_retained_tokens", 0)) for spec in _specs(group)} for group in groups
    ]
    speculative = getattr(vllm_config, "speculative_config", None) is not None
    for wrong, what in (
        (any(len(one) > 1 for one in windows), "a group whose layers have different windows"),
        (any(extra for one in windows for _, extra in one), "windows that keep more than attention looks back to"),
        (len(groups) > 1 and speculative, "several groups under speculative decoding"),
        (not features().pinning, "sliding windows, under a vLLM that lets no connector pin blocks"),
        (
            not may_pin(vllm_config),
            "sliding windows under cascade attention, which takes pinned blocks for shared ones",
        ),
    ):
        if wrong:
            raise ConfigError(f"this model's KV cache has {what}, which kvxfer does not move: {_ONE_GROUP}")


def transfer_results(sent: set[str] | None, received: set[str] | None, failed: set[str]) -> Any:
    """Make what ``get_transfer_results`` returns, since vLLM 0.31: ``failed`` are of those ``received``."""
    return _base().KVConnectorTransferResults(
        finished_sending=sent or set(), finished_recving=received or set(), failed_recving=failed
    )


def received(requests: set[str]) -> Any:
    """Make what the scheduler is told of loads that have ended."""
    from vllm.v1.outputs import KVConnectorOutput

    return KVConnectorOutput(finished_recving=requests)


def whole_load_failures() -> Callable[[str], None]:
    """Return what tells vLLM that a request's whole load has failed. Raises ConfigError where that is not possible.

    Where vLLM has no word for it (0.26 to 0.30: a block id stands for a place in one group's table, and of several the engine
    ends), the scheduler that calls us is told what ``_handle_failed_recving`` of later versions does: nothing of the request
    counts, so that it gets other blocks; and by the policy ``fail`` it then ends with an error, in the next step. To be called
    right before vLLM hears that the load is over. These are names of vLLM's own: what is not as expected counts as not possible.
    """
    if features().failed_requests:
        return lambda _request_id: None  # the workers have said so themselves
    scheduler = caller_with("failed_recving_kv_req_ids")
    failed: Any = getattr(scheduler, "failed_recving_kv_req_ids", None)
    errors: Any = getattr(scheduler, "grammar_compile_error_reqs", None)
    recomputes = getattr(scheduler, "recompute_kv_load_failures", None)
    requests = getattr(scheduler, "requests", None)
    known = isinstance(failed, set) and isinstance(errors, set) and isinstance(recomputes, bool)
    if not (known and isinstance(requests, dict)):
        raise ConfigError(
            "this model's KV cache has several groups or sliding windows, and this vLLM cannot be told that a load of such a "
            f"cache has failed: install vLLM 0.31 or later, or {_ONE_GROUP}"
        )

    def fail(request_id: str) -> None:
        request = requests.get(request_id)
        if request is None or request.status.name != "WAITING_FOR_REMOTE_KVS":
            return  # aborted meanwhile
        request.num_computed_tokens = 0
        failed.add(request_id)
        if not recomputes:
            errors.add(request_id)

    return fail


def data_parallel_index(vllm_config: Any) -> int:
    """Return which of a data-parallel deployment's engines this is; each listens at a port of its own."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def parallel_ranks(vllm_config: Any) -> tuple[int, int]:
    """Return (tensor, pipeline) rank of this worker process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    del vllm_config
    return get_tensor_model_parallel_rank(), get_pp_group().rank_in_group


def buffers_on_host(vllm_config: Any) -> bool:
    """Tell whether KV shall be moved through host memory. On its CPU build vLLM says so unasked."""
    return getattr(vllm_config.kv_transfer_config, "kv_buffer_device", "") == "cpu"


def posts(vllm_config: Any, mode: str) -> bool:
    """Tell whether an engine's ranks post transfers: in push those of prefill, in pull those of decode."""
    role = vllm_config.kv_transfer_config.kv_role
    return bool(role != ("kv_consumer" if mode == "push" else "kv_producer"))


def drop_params(request: Any) -> None:
    """Keep a request's kv_transfer_params out of what the scheduler sends to the workers at every new request.

    They travel in the sampling parameters as well, and nobody reads them there (vLLM 0.29: v1/request.py, core/sched/output.py).
    Yet they are as large as a client likes, and where a dictionary is nested some hundred deep, its pickle ends the engine core.
    """
    sampling = request.sampling_params
    extra = getattr(sampling, "extra_args", None)
    if extra and "kv_transfer_params" in extra:
        sampling = request.sampling_params = copy.copy(sampling)  # the caller's own, where the engine is in its process
        sampling.extra_args = {key: value for key, value in extra.items() if key != "kv_transfer_params"}


def batches_in_flight(vllm_config: Any) -> int:
    """Return how many batches an engine core may have launched and not taken the results of: no less than it really may.

    Asynchronous scheduling adds one to those of the pipeline's stages (0.29 config/vllm.py ``max_concurrent_batches``).
    """
    return int(vllm_config.parallel_config.pipeline_parallel_size) + 1


def batches_queued(vllm_config: Any) -> int:
    """Return how many batches an engine core launches before it waits for the first; before 0.29, what its executors say."""
    told = getattr(vllm_config, "max_concurrent_batches", None)
    if isinstance(told, int):
        return told
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    return 2 if stages == 1 and getattr(scheduler, "async_scheduling", False) else stages

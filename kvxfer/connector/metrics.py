"""kvxfer's part of an engine's ``/metrics``: who it is, how full it is, what handoffs have ended. ``docs/metrics.md`` lists it.

``kvxfer_info`` is how a router learns an engine's id and control address from the engine itself: vLLM shows neither over
HTTP, but it lets a connector add metrics in the API server's process, which has the configuration. One sample an engine
(data-parallel rank), with value 1; everything is in the labels.

Handoffs are counted by the worker ranks and carried here by vLLM (``stats``). Each rank counts its own part of a handoff, so an
engine of two ranks counts each twice.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvxfer.config import settings_from
from kvxfer.connector import room
from kvxfer.connector.stats import COUNTS, SECONDS, SEPARATOR
from kvxfer.protocol.messages import WIRE_VERSION

LABELS = ("engine_id", "host", "port", "tp_size", "pp_size", "role", "mode", "wire", "leg_timeout")

_OF_SEVERAL: Final = "mostrecent"
"""What several API servers of one engine show: one sample, and not one each, most of them out of date."""

COUNTERS: Final = {
    "handoffs": (
        "kvxfer_handoffs",
        "Handoffs that have ended on a rank.",
        ("side", "mode", "outcome"),
    ),
    "bytes": (
        "kvxfer_transferred_bytes",
        "Bytes of KV in transfers that this engine posted and that completed: writes of a push, reads of a pull.",
        ("side", "mode"),
    ),
    "descriptors": (
        "kvxfer_descriptors",
        "NIXL descriptors of the transfers that this engine posted.",
        ("side", "mode"),
    ),
    "tokens": ("kvxfer_handed_over_tokens", "Prompt positions of handoffs that ended well.", ("side", "mode")),
}
"""Figure → its counter. Prometheus adds ``_total`` to the name."""

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not typed where the checks run
    """Sets the identity once, when the API server starts, and the rest whenever one of the engine's processes says it."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        mode: str,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        settings, _ = settings_from(transfer.kv_connector_extra_config or {})
        gauge = self._gauge_cls(
            name="kvxfer_info",
            documentation="Identity and control address of this engine's kvxfer connector; the value is always 1.",
            labelnames=[*labelnames, *LABELS],
            multiprocess_mode=_OF_SEVERAL,
        )
        for index, values in per_engine_labelvalues.items():
            engine = transfer.engine_id
            if parallel.data_parallel_size > 1:
                engine = f"{engine}_dp{index}"  # as vLLM names it in that rank's own process
            identity = {
                "engine_id": engine,
                "host": settings.told_host,
                "port": settings.control_port + index,
                "tp_size": parallel.tensor_parallel_size,
                "pp_size": parallel.pipeline_parallel_size,
                "role": transfer.kv_role,
                "mode": mode,
                "wire": WIRE_VERSION,
                "leg_timeout": f"{settings.leg_timeout:g}",
            }
            gauge.labels(*values, *(str(identity[label]) for label in LABELS)).set(1)
        self._room = self._gauge_cls(
            name="kvxfer_reclaimable_tokens",
            documentation="KV tokens that a new request could be given: free blocks, and cached ones that nobody refers to.",
            labelnames=labelnames,
            multiprocess_mode=_OF_SEVERAL,
        )
        self._counters = {
            figure: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, *labels])
            for figure, (name, text, labels) in COUNTERS.items()
        }
        self._stages = self._histogram_cls(
            name="kvxfer_handoff_stage_seconds",
            documentation='How long each stage of a handoff took on a rank; the stage "handoff" is all of it.',
            labelnames=[*labelnames, "stage", "side", "mode"],
            buckets=_SECONDS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what the engine's processes say."""
        engine = self.per_engine_labelvalues[engine_idx]
        tokens = room.said(transfer_stats_data)
        if tokens is not None:
            self._room.labels(*engine).set(tokens)
        for key, count in transfer_stats_data.get(COUNTS, {}).items():
            figure, *labels = key.split(SEPARATOR)
            self._counters[figure].labels(*engine, *labels).inc(count)
        for key, seconds in transfer_stats_data.get(SECONDS, {}).items():
            stage = self._stages.labels(*engine, *key.split(SEPARATOR))
            for one in seconds:
                stage.observe(one)

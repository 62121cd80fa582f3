"""The ``kvxfer_info`` gauge: how a router learns an engine's id and control address from the engine itself; and how full it is.

vLLM shows neither over HTTP, but it lets a connector add metrics in the API server's process, which has the configuration.
One sample an engine (data-parallel rank), with value 1; everything is in the labels.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvxfer.config import settings_from
from kvxfer.connector import room
from kvxfer.protocol.messages import WIRE_VERSION

LABELS = ("engine_id", "host", "port", "tp_size", "pp_size", "role", "mode", "wire", "leg_timeout")


class InfoMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not typed where the checks run
    """Sets the identity once, when the API server starts, and the room whenever the scheduler's process says it."""

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
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what the scheduler's half says of the cache."""
        tokens = room.said(transfer_stats_data)
        if tokens is not None:
            self._room.labels(*self.per_engine_labelvalues[engine_idx]).set(tokens)

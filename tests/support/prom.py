"""vLLM's Prometheus plumbing as a connector's ``build_prom_metrics`` meets it, on a registry of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


def metric_types(registry: CollectorRegistry) -> dict[type, Any]:
    """vLLM's ``metric_types``: classes of metrics that register themselves there."""

    def own(kind: type) -> type:
        def begin(self, name, documentation, labelnames=(), **more):
            kind.__init__(self, name, documentation, labelnames, **(more | {"registry": registry}))

        return type(f"Own{kind.__name__}", (kind,), {"__init__": begin})

    return {kind: own(kind) for kind in (Gauge, Counter, Histogram)}


def config(**extra: Any) -> SimpleNamespace:
    """What of a vLLM configuration the metrics ask for."""
    transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id="e", kv_role="kv_consumer")
    parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


def described(registry: CollectorRegistry) -> dict[str, tuple[str, frozenset[str]]]:
    """Name → type and labels of all that is registered; ``engine`` left out, which vLLM adds."""
    found = {}
    for collector in registry._collector_to_names:
        families = [collector] if hasattr(collector, "_labelnames") else list(collector.collect())
        for one in families:
            name, kind = getattr(one, "_name", None) or one.name, getattr(one, "_type", None) or one.type
            found[name] = kind, frozenset(one._labelnames)
    return found

"""What has gone through the router: Prometheus metrics, and the last requests in detail."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from kvxfer.router.call import Trace
    from kvxfer.router.engines import Engines

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LAST = 256


class Seen:
    """Counts ended requests and keeps the last of them."""

    def __init__(self, engines: Engines) -> None:
        self.registry = CollectorRegistry()
        self.last: deque[Trace] = deque(maxlen=_LAST)
        self._requests = Counter(
            "kvxfer_router_requests", "Single requests that have ended.", ["outcome"], registry=self.registry
        )
        self._first = Histogram(
            "kvxfer_router_first_token_seconds", "From a request's arrival to the first of its answer.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._prefill = Histogram(
            "kvxfer_router_prefill_seconds", "A prefill leg.", buckets=_SECONDS, registry=self.registry
        )
        self._after = Histogram(
            "kvxfer_router_first_token_after_prefill_seconds",
            "From prefill's answer to the first of decode's, by when decode was chosen.",
            ["decode_chosen"], buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._retries = Counter("kvxfer_router_retries", "Attempts with other engines.", registry=self.registry)
        self._skipped = Counter(
            "kvxfer_router_prefill_skipped", "Requests that were given to decode alone.", registry=self.registry
        )
        self._reused = Counter(
            "kvxfer_router_reuse_offered",
            "Requests whose prefill was told who holds earlier turns.",
            registry=self.registry,
        )
        self._pieces = Counter("kvxfer_router_stream_pieces", "Pieces of streams passed on.", registry=self.registry)
        self.refused = Counter(
            "kvxfer_router_refused", "Client requests answered with an error.", ["status"], registry=self.registry
        )
        self.open = Gauge("kvxfer_router_open_requests", "Client requests in flight.", registry=self.registry)
        self.queued = Gauge(
            "kvxfer_router_queued_requests", "Single requests that wait for room on decode.", registry=self.registry
        )
        self.registry.register(_OfEngines(engines))

    def ended(self, trace: Trace, outcome: str) -> None:
        """Take in a single request that is over."""
        trace.done = time.monotonic()
        trace.outcome = outcome
        self.last.append(trace)
        self._requests.labels(outcome).inc()
        if trace.attempts > 1:
            self._retries.inc(trace.attempts - 1)
        if trace.skipped:
            self._skipped.inc()
        if trace.reused:
            self._reused.inc()
        if trace.pieces:
            self._pieces.inc(trace.pieces)
        if trace.first is not None:
            self._first.observe(trace.first - trace.received)
            if trace.prefill_done is not None:
                late = "late" if trace.late else "early"
                self._after.labels(late).observe(max(trace.first - trace.prefill_done, 0))
        if trace.prefill_done is not None and trace.prefill_sent is not None:
            self._prefill.observe(trace.prefill_done - trace.prefill_sent)

    def metrics(self) -> bytes:
        """The text of ``/metrics``."""
        text: bytes = generate_latest(self.registry)
        return text


class _OfEngines(Collector):  # type: ignore[misc]  # untyped where the checks run
    """Each engine's state at the moment of asking."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """One sample an engine."""
        families = {
            "healthy": GaugeMetricFamily(
                "kvxfer_router_engine_usable", "1 where the engine may be given requests.", labels=["role", "engine"]
            ),
            "requests": GaugeMetricFamily(
                "kvxfer_router_engine_requests", "Legs in flight.", labels=["role", "engine"]
            ),
            "waiting": GaugeMetricFamily(
                "kvxfer_router_engine_waiting_tokens",
                "Estimated prompt tokens: queued at prefill, or waiting for KV at decode.", labels=["role", "engine"],
            ),
            "reclaimable": GaugeMetricFamily(
                "kvxfer_router_engine_reclaimable_tokens", "KV tokens that a new request could take.",
                labels=["role", "engine"],
            ),
        }  # fmt: skip
        for engine in self._engines:
            labels = [engine.role.value, engine.name]
            load = engine.load
            families["healthy"].add_metric(labels, float(engine.usable))
            families["requests"].add_metric(labels, load.requests)
            families["waiting"].add_metric(labels, load.queued_tokens + load.waiting_tokens)
            if engine.says.reclaimable is not None:
                families["reclaimable"].add_metric(labels, engine.says.reclaimable)
        return families.values()

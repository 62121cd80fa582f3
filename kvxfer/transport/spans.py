"""Handoffs as OpenTelemetry spans: one of the whole handoff, below it one of each stage, in the trace of the request.

The parent is what the request's own ``traceparent`` names (W3C trace context). vLLM's span of a request (``llm_request``) has the
same parent, so both stand side by side under the client's or the router's: vLLM makes its span when the request has ended, so
nobody can stand below it. A request that no trace context came with, or whose trace is not sampled, has no spans.

OpenTelemetry's SDK is imported here alone (``kvxfer[otel]``; vLLM brings the same packages).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError
from kvxfer.transport.journal import epoch
from kvxfer.transport.stages import WHOLE, stages, whole

if TYPE_CHECKING:
    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.records import HandoffRecord

_ATTRIBUTES = (
    "handoff", "request_id", "side", "rank", "mode", "peer", "tokens", "blocks", "bytes", "descriptors", "backend", "outcome",
)  # fmt: skip


class Spans:
    """Makes spans of ended records, and sends them in batches by the SDK's own thread.

    ``exporter`` is what sends them: see ``otlp``. Raises ConfigError where OpenTelemetry is not installed.
    """

    def __init__(self, exporter: Any, me: RankId) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(_missing(error)) from error
        self._provider = TracerProvider(
            resource=Resource.create({"kvxfer.engine": me.engine, "kvxfer.rank": me.rank}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvxfer")

    def export(self, record: HandoffRecord) -> None:
        """Make the spans of a record that has ended."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        over = whole(record)
        if not record.trace or over is None:
            return
        parent = TraceContextTextMapPropagator().extract({"traceparent": record.trace})
        if not parent:  # not a trace context
            return
        zero = epoch()
        span = self._tracer.start_span(f"kvxfer.{WHOLE}", parent, start_time=_ns(zero + over.begin))
        for name in _ATTRIBUTES:
            span.set_attribute(f"kvxfer.{name}", getattr(record, name))
        if record.outcome != "done":
            span.set_status(Status(StatusCode.ERROR, f"{record.outcome}: {record.reason}"))
        below = set_span_in_context(span)
        for stage in stages(record):
            part = self._tracer.start_span(
                f"kvxfer.{stage.name.replace(' ', '_')}", below, start_time=_ns(zero + stage.begin)
            )
            part.end(_ns(zero + stage.end))
        span.end(_ns(zero + over.end))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def otlp(endpoint: str) -> Any:
    """Return an exporter to an OTLP collector, by the protocol that vLLM takes for its own spans.

    As vLLM chooses it (0.29 tracing/otel.py): ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``, ``grpc`` or ``http/protobuf``.
    Raises ConfigError.
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            return Grpc(endpoint=endpoint, insecure=True)
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            return Http(endpoint=endpoint)
    except ImportError as error:
        raise ConfigError(_missing(error)) from error
    raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol!r} must be grpc or http/protobuf")


def _missing(error: ImportError) -> str:
    return f"spans: OpenTelemetry is not installed ({error}): pip install 'kvxfer[otel]', or leave spans off"


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

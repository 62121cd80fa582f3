"""What a worker makes of its ended handoffs: figures for the metrics always; lines and spans where the settings say so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.connector.stats import Tally
from kvxfer.errors import ConfigError
from kvxfer.transport.journal import Journal, Lines
from kvxfer.transport.spans import Spans, otlp

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.config import Settings
    from kvxfer.protocol.ids import RankId
    from kvxfer.transport.records import HandoffRecord


class Telemetry:
    """Of one worker. ``hear`` is for the rank's record book. Raises ConfigError with what to change.

    ``spans`` needs vLLM's ``--otlp-traces-endpoint``: without it vLLM drops the requests' trace context in its API server (0.29
    entrypoints/generate/base/serving.py), and there would be nothing to stand below.
    """

    def __init__(self, vllm_config: Any, settings: Settings, me: RankId) -> None:
        self.tally = Tally()
        self.hear: list[Callable[[HandoffRecord], None]] = [self.tally.hear]
        self._journal: Journal | None = None
        lines = spans = None
        if settings.spans:
            endpoint = getattr(vllm_config.observability_config, "otlp_traces_endpoint", None)
            if not endpoint:
                raise ConfigError(
                    "spans: vLLM traces nothing: start it with --otlp-traces-endpoint, or leave spans off"
                )
            spans = Spans(otlp(endpoint), me)
        if settings.records_dir:
            lines = Lines(Path(settings.records_dir), me)
        if lines is not None or spans is not None:
            self._journal = Journal(lines, spans)
            self.hear.append(self._journal.hear)

    def start(self) -> None:
        """Start the thread, if there is anything to write."""
        if self._journal is not None:
            self._journal.start()

    def stop(self) -> None:
        """Write what has come so far."""
        if self._journal is not None:
            self._journal.stop()


def trace_of(request: Any) -> str:
    """Return a request's ``traceparent``; empty where none came, or where vLLM is not started to trace (0.29 v1/request.py)."""
    headers = getattr(request, "trace_headers", None)
    return str(headers.get("traceparent", ""))[:_LONGEST] if headers else ""


_LONGEST = 64  # W3C's version 00 has 55 characters

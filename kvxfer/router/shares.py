"""What one leg adds to its engine's load, taken back whichever way the leg ends."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.router.call import Trace
    from kvxfer.router.engine import Engine
    from kvxfer.router.engines import Engines
    from kvxfer.router.policies.asked import Asked
    from kvxfer.router.policies.timing import Timing

_WEIGHT = 0.1
"""Of the newest measurement in the moving average."""


class PrefillShare(AbstractContextManager["PrefillShare"]):
    """A prefill leg, until its answer has come."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._load = engine.load
        self._tokens = tokens

    def __enter__(self) -> PrefillShare:  # noqa: PYI034 -- Self is not in Python 3.10
        """Count it."""
        self._load.requests += 1
        self._load.queued_tokens += self._tokens
        return self

    def __exit__(self, *_error: object) -> None:
        """Count it no more."""
        self._load.requests -= 1
        self._load.queued_tokens -= self._tokens


class DecodeShare(AbstractContextManager["DecodeShare"]):
    """A decode leg: its tokens wait until the first one of its answer, and run from then on."""

    def __init__(self, engine: Engine, asked: Asked, engines: Engines, timing: Timing) -> None:
        self._load = engine.load
        self._tokens = asked.missing(engine)
        self._engines = engines
        self._timing = timing
        self._runs = False

    def __enter__(self) -> DecodeShare:  # noqa: PYI034
        """Count it among those that wait."""
        self._load.requests += 1
        self._load.waiting_tokens += self._tokens
        return self

    def first_token(self, trace: Trace) -> None:
        """It produces tokens from now on."""
        load = self._load
        self._runs = True
        load.waiting_tokens -= self._tokens
        load.running_tokens += self._tokens
        load.running += 1
        self._engines.changed.set()
        if not trace.skipped:
            now = time.monotonic()
            delay = now - min(trace.prefill_done or now, now)
            load.first_token_delay += _WEIGHT * (delay - load.first_token_delay)
            sent = trace.prefill_sent if trace.prefill_sent is not None else now
            in_prefill = min(trace.prefill_done or now, now) - sent
            self._timing.observed(trace.context, late=trace.late, delay=now - trace.begun - in_prefill)

    def __exit__(self, *_error: object) -> None:
        """Count it no more."""
        load = self._load
        load.requests -= 1
        if self._runs:
            load.running_tokens -= self._tokens
            load.running -= 1
        else:
            load.waiting_tokens -= self._tokens
        self._engines.changed.set()

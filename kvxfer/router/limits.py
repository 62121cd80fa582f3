"""How much clients may ask for: requests at one time over all, and requests a second of each API key.

Guarantees bounded memory: of keys that ask for nothing, nothing is kept for longer than their bucket takes to fill.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvxfer.router.openai import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvxfer.router.settings import RouterSettings

_MOST_OWNERS = 100_000


class Limits:
    """Admits client requests."""

    def __init__(self, settings: RouterSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.open = 0

    @contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """Count a request as long as the block lasts; raise ``ApiError`` 429 or 503 instead where it is too much."""
        if self.open >= self._settings.max_requests:
            raise ApiError(503, f"{self.open} requests are open already (--max-requests); try again soon")
        self._take(owner)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def _take(self, owner: str) -> None:
        rate, burst = self._settings.rate_limit, float(self._settings.rate_burst)
        if not rate:
            return
        now = self._clock()
        level, since = self._buckets.pop(owner, (burst, now))
        level = min(burst, level + rate * (now - since))
        if level < 1:
            self._buckets[owner] = level, now
            wait = math.ceil((1 - level) / rate)
            raise ApiError(429, f"more than {rate:g} requests a second (--rate-limit); try again in {wait} s")
        self._buckets[owner] = level - 1, now
        while self._buckets:
            oldest, (level, since) = next(iter(self._buckets.items()))
            if len(self._buckets) <= _MOST_OWNERS and level + rate * (now - since) < burst:
                break
            del self._buckets[oldest]


def owner_of(authorization: str | None) -> str:
    """Whose request it is: a digest of the API key, so that keys are kept and logged nowhere; empty for nobody's."""
    # What is not UTF-8 in a header comes as surrogates.
    return hashlib.sha256(authorization.encode(errors="surrogateescape")).hexdigest() if authorization else ""


def key_of(authorization: str | None) -> str:
    """The API key of a Bearer header, empty for none."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""

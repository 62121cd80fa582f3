"""Where conversations are remembered: the interface, and this process's memory.

A store keeps small values under opaque keys for a while. It may forget anything at any time, which costs reuse and nothing
else. The keys are digests, so a store learns neither prompts nor API keys.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Store(Protocol):
    """Remembers."""

    async def first(self, keys: Sequence[bytes]) -> bytes | None:
        """The value of the first of ``keys`` that is known, None for none; never raises for an outage."""
        ...

    async def put(self, keys: Sequence[bytes], value: bytes, ttl: float) -> None:
        """Remember ``value`` under each key for ``ttl`` seconds; never raises for an outage."""
        ...

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Forget these."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...

    def size(self) -> int | None:
        """How many keys this process holds; None where others hold them."""
        ...


class MemoryStore:
    """The memory of this process: at most ``most`` keys, the longest unused of them forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()

    async def first(self, keys: Sequence[bytes]) -> bytes | None:
        """The first that is known and not too old."""
        now = asyncio.get_running_loop().time()
        for key in keys:
            kept = self._kept.get(key)
            if kept is None:
                continue
            if kept[0] > now:
                self._kept.move_to_end(key)
                return kept[1]
            del self._kept[key]
        return None

    async def put(self, keys: Sequence[bytes], value: bytes, ttl: float) -> None:
        """Remember, and forget what is too much."""
        end = asyncio.get_running_loop().time() + ttl
        for key in keys:
            self._kept[key] = end, value
            self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Forget these."""
        for key in keys:
            self._kept.pop(key, None)

    async def close(self) -> None:
        """Nothing is open."""

    def size(self) -> int:
        """Keys that are held."""
        return len(self._kept)

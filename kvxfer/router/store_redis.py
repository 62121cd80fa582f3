"""Conversations remembered in Redis, so that several replicas of the router find each other's.

An outage of Redis costs reuse and nothing else: a question that is not answered within ``_PATIENCE`` is a conversation that is
not known, and while Redis does not answer it is asked at most every ``_PAUSE`` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import redis.asyncio
from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

log = logging.getLogger(__name__)

PREFIX = b"kvxfer:conversation:"
_PATIENCE = 0.05
"""Seconds: a conversation must not cost more than it saves."""
_PAUSE = 1.0


class RedisStore:
    """A Redis server, or what speaks like one."""

    def __init__(self, url: str, patience: float = _PATIENCE) -> None:
        self._client = redis.asyncio.from_url(url, socket_connect_timeout=1.0, socket_timeout=1.0)
        self._patience = patience
        self._not_before = 0.0

    async def first(self, keys: Sequence[bytes]) -> bytes | None:
        """The value of the first key that is known."""
        if not keys:
            return None
        values = await self._ask(lambda: self._client.mget([PREFIX + key for key in keys]))
        return next((value for value in values or () if value is not None), None)

    async def put(self, keys: Sequence[bytes], value: bytes, ttl: float) -> None:
        """Remember."""

        async def put_all() -> None:
            async with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.set(PREFIX + key, value, px=max(int(ttl * 1000), 1))
                await pipeline.execute()

        await self._ask(put_all)

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Forget these."""
        await self._ask(lambda: self._client.delete(*(PREFIX + key for key in keys)))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def size(self) -> None:
        """Others hold them."""

    async def _ask(self, question: Any) -> Any:
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            return None
        try:
            asking: Awaitable[Any] = question()
            answer = await asyncio.wait_for(asking, self._patience)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            if not self._not_before:
                log.warning(
                    "Redis does not answer, conversations are not found: %s", str(error) or type(error).__name__
                )
            self._not_before = loop.time() + _PAUSE
            return None
        if self._not_before:
            log.warning("Redis answers again")
            self._not_before = 0.0
        return answer

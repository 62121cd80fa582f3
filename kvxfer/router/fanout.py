"""Many single requests at once, a bounded number (``most``) in flight, and all ended by the first failure.

Memory is bounded too: streams meet in one queue of a few entries, so a slow client slows its engines down.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Any, TypeAlias

    from kvxfer.router.dispatch import Handoff
    from kvxfer.router.split import ClientRequest, SingleRequest

    Opener: TypeAlias = Callable[[SingleRequest], AbstractAsyncContextManager[Handoff]]

_QUEUED = 16


async def read_all(request: ClientRequest, most: int, open_handoff: Opener) -> list[bytes]:
    """The answers of all single requests, in their order; the first failure ends the others and is raised."""
    free = asyncio.Semaphore(most)

    async def one(single: SingleRequest) -> bytes:
        async with free, open_handoff(single) as handoff:
            return handoff.body

    tasks = [asyncio.ensure_future(one(single)) for single in request.singles]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end_all(tasks)


async def stream_all(
    request: ClientRequest, most: int, open_handoff: Opener
) -> AsyncGenerator[tuple[SingleRequest, list[bytes]], None]:
    """Yield the events of all single streams as they come; the first failure ends the others and is raised.

    Close the iterator (``contextlib.aclosing``) to end everything at once.
    """
    free = asyncio.Semaphore(most)
    queue: asyncio.Queue[tuple[SingleRequest, list[bytes]] | Exception | None] = asyncio.Queue(_QUEUED)

    async def one(single: SingleRequest) -> None:
        async with free, open_handoff(single) as handoff:
            async for events in handoff.events():
                await queue.put((single, events))

    async def everyone() -> None:
        try:
            await asyncio.gather(*tasks)
        except Exception as error:  # noqa: BLE001 -- raised by the consumer, where the client's answer is written
            await _end_all(tasks)
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(one(single)) for single in request.singles]
    end = asyncio.ensure_future(everyone())
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        await _end_all([*tasks, end])


async def _end_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

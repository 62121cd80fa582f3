"""Both legs of one single request: their order, and what the end of one means for the other.

Push sends both at once: decode registers while prefill computes. Pull waits for prefill's answer, which says where to
read.

Guarantees, as long as the block of ``Dispatcher.handoff`` is open, and whichever way it is left:

- The first leg that fails ends the other one and is the client's error. Of two that have failed, prefill's is told:
  decode then failed for want of the KV.
- Prefill's failure no longer counts once decode has produced a token: its KV is complete then (vLLM admits a request
  only after its load has ended), and the client can be served.
- Leaving the block early (a client gone, an error) closes both connections before anything else happens.
- After decode's success, a push's prefill leg has ``PREFILL_GRACE`` seconds to give its answer and is closed then. It
  is not closed at once, because with few output tokens both end together, and the engine would count an abort.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvxfer.router.engines import rank_header
from kvxfer.router.handoff import prefill_body, pull_decode_body, push_decode_body, returned_params
from kvxfer.router.legs import Leg, LegAnswer, open_leg
from kvxfer.router.openai import ApiError, Json, is_data
from kvxfer.router.settings import Mode, Role, RouterSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping

    import aiohttp

    from kvxfer.router.engines import Engines
    from kvxfer.router.split import SingleRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

PREFILL_GRACE = 5.0


class Handoff:
    """The decode leg's answer, guarded by the prefill leg."""

    def __init__(self, decode: Leg, dispatcher: Dispatcher, stack: AsyncExitStack) -> None:
        self._leg = decode
        self._dispatcher = dispatcher
        self._stack = stack
        self.prefill: asyncio.Task[Json] | None = None

    async def read(self) -> bytes:
        """The whole answer of a request that does not stream, as the decode engine wrote it."""
        return await self._guarded(self._read())

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yield the decode engine's events, unchanged, ``[DONE]`` last; raise ``ApiError`` where either leg fails."""
        answer = await self._guarded(self._open())
        while (some := await self._guarded(answer.next_events())) is not None:
            if self.prefill is not None and any(map(is_data, some)):
                self._dispatcher.let_end(self.prefill)
                self.prefill = None
            yield some

    async def _open(self) -> LegAnswer:
        return await self._stack.enter_async_context(
            open_leg(self._dispatcher.session, self._dispatcher.settings, self._leg)
        )

    async def _read(self) -> bytes:
        return await (await self._open()).read()

    async def _guarded(self, step: Coroutine[Any, Any, T]) -> T:
        """Take one step of the decode leg; prefill's failure ends it."""
        if self.prefill is None or _ended_well(self.prefill):
            return await step  # the common case for every token: no task of its own
        task = asyncio.ensure_future(step)
        try:
            await asyncio.wait({task, self.prefill}, return_when=asyncio.FIRST_COMPLETED)
            if self.prefill.done() and not (task.done() and task.exception() is None):
                self.prefill.result()  # raises prefill's error
            return await task
        finally:
            await _end(task)


class Dispatcher:
    """Sends single requests to pairs of engines."""

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession, engines: Engines) -> None:
        self.settings = settings
        self.session = session
        self._engines = engines
        self._ending: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def handoff(self, single: SingleRequest, headers: Mapping[str, str]) -> AsyncIterator[Handoff]:
        """Open both legs of one single request. ``headers`` are the client's, to be passed on."""
        headers = {**headers, "X-Request-Id": single.request_id}
        source = self._engines.pick(Role.PREFILL, single)
        sink = self._engines.pick(Role.DECODE, single)
        async with AsyncExitStack() as stack:
            if self.settings.mode is Mode.PULL:
                prefill = Leg(source, single.path, prefill_body(single), headers)
                params = returned_params(await self._prefill(prefill), source.name)
                decode = Leg(sink, single.path, pull_decode_body(single, params), headers)
                yield Handoff(decode, self, stack)
                return
            # One look at the identity for both legs: a check may replace it at any await.
            identity = source.identity
            prefill = Leg(source, single.path, prefill_body(single), headers | rank_header(identity))
            decode = Leg(sink, single.path, push_decode_body(single, identity), headers)
            handoff = Handoff(decode, self, stack)
            task = handoff.prefill = asyncio.ensure_future(self._prefill(prefill))
            try:
                yield handoff
            except BaseException:
                await _end(task)
                raise
            if handoff.prefill is not None:
                self.let_end(task)

    def let_end(self, task: asyncio.Task[Json]) -> None:
        """Give a prefill leg that nobody waits for a moment to end by itself."""
        ending = asyncio.ensure_future(_end_within(task, PREFILL_GRACE))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """Close what is still ending."""
        for ending in tuple(self._ending):
            await _end(ending)

    async def _prefill(self, leg: Leg) -> Json:
        async with open_leg(self.session, self.settings, leg) as answer:
            raw = await answer.read()
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise ApiError(502, f"{leg.title}: the answer is not JSON: {error}") from None
        return value if isinstance(value, dict) else {}


def _ended_well(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and return when it has closed what it held. Its error, if any, was told elsewhere."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def _end_within(task: asyncio.Task[Any], grace: float) -> None:
    try:
        await asyncio.wait({task}, timeout=grace)
    finally:
        await _end(task)
    if not _ended_well(task):
        log.info(
            "a prefill leg did not end well after its decode leg had: %r",
            None if task.cancelled() else task.exception(),
        )

"""Both legs of one single request: their order, what the end of one means for the other, and another try elsewhere.

Decode is chosen with prefill (*early*: both legs at once, decode registers while prefill computes) or when prefill has
answered (*late*; pull always, since prefill's answer says where to read).

Guarantees, as long as the block of ``Dispatcher.handoff`` is open, and whichever way it is left:

- The first leg that fails ends the other one. Of two that have failed, prefill's error is told: decode then failed for want
  of the KV.
- While nothing of the answer has been given to the caller, a leg's failure that is not the request's own fault is tried again
  with other engines, under fresh ids, at most ``retries`` times; the engine that failed is not asked again.
- Prefill's failure no longer counts once decode has produced a token: its KV is complete then (vLLM admits a request
  only after its load has ended), and the client can be served.
- Leaving the block early (a client gone, an error) closes both connections before anything else happens.
- After decode's success, a push's prefill leg has ``PREFILL_GRACE`` seconds to give its answer and is closed then. It
  is not closed at once, because with few output tokens both end together, and the engine would count an abort.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvxfer.router.checks import rank_header
from kvxfer.router.handoff import alone_body, prefill_body, pull_decode_body, push_decode_body, returned_params
from kvxfer.router.legs import Leg, LegAnswer, LegError, open_leg
from kvxfer.router.openai import Json, is_data, read_json
from kvxfer.router.settings import Mode, Role, RouterSettings
from kvxfer.router.shares import DecodeShare, PrefillShare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from kvxfer.router.call import Call, Trace
    from kvxfer.router.engine import Engine
    from kvxfer.router.engines import Engines
    from kvxfer.router.policies.admission import Admission
    from kvxfer.router.policies.timing import Timing
    from kvxfer.router.split import SingleRequest
    from kvxfer.router.upstream import Upstream

log = logging.getLogger(__name__)

PREFILL_GRACE = 5.0


class Handoff:
    """The decode leg's answer, guarded by the prefill leg."""

    def __init__(self, dispatcher: Dispatcher, stack: ExitStack, single: SingleRequest, trace: Trace) -> None:
        self._dispatcher = dispatcher
        self._stack = stack
        self.single = single
        self.trace = trace
        self.prefill: asyncio.Task[Json] | None = None
        self.decode: Leg
        self.share: DecodeShare
        self.answer: LegAnswer
        self.first: list[bytes] = []
        """Of a stream: its first events with data, and what came before them."""
        self.body = b""
        """Of a request that does not stream: the whole answer, as the decode engine wrote it."""

    async def begin(self) -> None:
        """Wait for the first of the answer that the client can be given."""
        self.trace.decode_sent = time.monotonic()
        await self._guarded(self._begin_stream() if self.single.body.get("stream") else self._read())
        self.trace.first = time.monotonic()
        self.share.first_token(self.trace)

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yield the decode engine's events, unchanged, ``[DONE]`` last; raise ``ApiError`` where the stream fails."""
        yield self.first
        while (some := await self.answer.next_events()) is not None:
            self.trace.pieces += 1
            yield some
        self.answer.answer.end()

    async def _open(self) -> LegAnswer:
        answer = await open_leg(self._dispatcher.upstream, self._dispatcher.settings, self.decode)
        self._stack.callback(answer.close)
        return answer

    async def _begin_stream(self) -> None:
        self.answer = await self._open()
        while not any(map(is_data, self.first)):
            some = await self.answer.next_events()
            if some is None:
                break
            self.first += some

    async def _read(self) -> None:
        self.body = await (await self._open()).read()

    async def _guarded(self, decode: Coroutine[Any, Any, None]) -> None:
        """Run the decode leg's part; prefill's failure ends it."""
        if self.prefill is None or _ended_well(self.prefill):
            await decode
            return
        task = asyncio.ensure_future(decode)
        try:
            await asyncio.wait({task, self.prefill}, return_when=asyncio.FIRST_COMPLETED)
            if self.prefill.done() and not (task.done() and task.exception() is None):
                self.prefill.result()  # raises prefill's error
            await task
        finally:
            if not _ended_well(task):
                await _end(task)


class Dispatcher:
    """Sends single requests to pairs of engines."""

    def __init__(
        self, settings: RouterSettings, upstream: Upstream, engines: Engines, timing: Timing, admission: Admission
    ) -> None:
        self.settings = settings
        self.upstream = upstream
        self._engines = engines
        self._timing = timing
        self._admission = admission
        self._ending: set[asyncio.Task[Json]] = set()

    @asynccontextmanager
    async def handoff(self, single: SingleRequest, call: Call, trace: Trace) -> AsyncIterator[Handoff]:
        """Open both legs of one single request, wherever they can be had; the first of its answer is there then."""
        failed: list[Engine] = []
        given = False
        while True:
            trace.attempts += 1
            trace.begun = time.monotonic()
            trace.transfer_id = single.transfer_id
            try:
                async with self._attempt(single, call, trace, failed) as handoff:
                    await handoff.begin()
                    given = True
                    yield handoff
            except LegError as error:
                if given or not self._again(error, failed):
                    raise
                failed.append(error.engine)
                single = single.again(trace.attempts)
                log.warning("request %s is tried elsewhere: %s", trace.request_id, error)
            else:
                return

    def _again(self, error: LegError, failed: list[Engine]) -> bool:
        left = self._engines.usable(error.engine.role, [*failed, error.engine])
        return error.again and bool(left) and len(failed) < self.settings.retries

    @asynccontextmanager
    async def _attempt(
        self, single: SingleRequest, call: Call, trace: Trace, failed: list[Engine]
    ) -> AsyncIterator[Handoff]:
        headers = {**call.headers, "X-Request-Id": single.request_id}
        asked = call.asked
        trace.prefill = trace.decode = None
        trace.prefill_sent = trace.prefill_done = trace.decode_sent = None
        trace.late, trace.context = self._timing.late(self._engines.usable(Role.DECODE, failed), asked)
        trace.late = trace.late or self.settings.mode is Mode.PULL
        with ExitStack() as stack:
            handoff = Handoff(self, stack, single, trace)
            if self._skips(call, trace, failed):
                sink = await self._choose_decode(call, failed, handoff)
                handoff.decode = Leg(sink, single.path, alone_body(single), headers)
                yield handoff
                return
            if trace.late:
                source, sent = self._choose_prefill(single, call, trace, failed, headers)
                answer = await self._prefill(sent, trace)
                sink = await self._choose_decode(call, failed, handoff)
                if self.settings.mode is Mode.PULL:
                    body = pull_decode_body(single, returned_params(answer, source.name))
                else:
                    body = push_decode_body(single, source.identity)
                handoff.decode = Leg(sink, single.path, body, headers)
                yield handoff
                return
            self._engines.need(Role.PREFILL, failed)
            sink = await self._choose_decode(call, failed, handoff)
            source, sent = self._choose_prefill(single, call, trace, failed, headers)
            # One look at the identity for both legs: a check may replace it at any await.
            identity = source.identity
            sent = replace(sent, headers=headers | rank_header(identity))
            handoff.decode = Leg(sink, single.path, push_decode_body(single, identity), headers)
            task = handoff.prefill = asyncio.ensure_future(self._prefill(sent, trace))
            try:
                yield handoff
            except BaseException:
                await _end(task)
                raise
            self.let_end(task)

    def _skips(self, call: Call, trace: Trace, failed: list[Engine]) -> bool:
        """Whether decode computes what is missing by itself, because it is too little to be worth a handoff."""
        most = self.settings.skip_prefill_below
        engines = self._engines.usable(Role.DECODE, failed)
        trace.skipped = most > 0 and any(call.asked.missing(one) < most for one in engines)
        return trace.skipped

    def _choose_prefill(
        self, single: SingleRequest, call: Call, trace: Trace, failed: list[Engine], headers: dict[str, str]
    ) -> tuple[Engine, Leg]:
        source = trace.prefill = self._engines.pick(Role.PREFILL, call.asked, failed)
        body = prefill_body(single, call)
        trace.reused = "reuse_engine_id" in body["kv_transfer_params"]
        return source, Leg(source, single.path, body, headers)

    async def _choose_decode(self, call: Call, failed: list[Engine], handoff: Handoff) -> Engine:
        sink = await self._admission.admitted(call.asked, failed, skipping=handoff.trace.skipped)
        handoff.trace.decode = sink
        handoff.share = handoff._stack.enter_context(DecodeShare(sink, call.asked, self._engines, self._timing))  # noqa: SLF001
        return sink

    def let_end(self, task: asyncio.Task[Json]) -> None:
        """Give a prefill leg that nobody waits for a moment to end by itself."""
        if _ended_well(task):
            return
        alarm = asyncio.get_running_loop().call_later(PREFILL_GRACE, task.cancel)

        def ended(_task: asyncio.Task[Json]) -> None:
            alarm.cancel()
            self._ending.discard(task)
            if not _ended_well(task):
                told = None if task.cancelled() else task.exception()
                log.info("a prefill leg did not end well after its decode leg had: %r", told)

        self._ending.add(task)
        task.add_done_callback(ended)

    async def stop(self) -> None:
        """Close what is still ending."""
        for ending in tuple(self._ending):
            await _end(ending)

    async def _prefill(self, leg: Leg, trace: Trace) -> Json:
        trace.prefill_sent = time.monotonic()
        with PrefillShare(leg.engine, trace.tokens):
            answer = await open_leg(self.upstream, self.settings, leg)
            try:
                raw = await answer.read()
            finally:
                answer.close()
        trace.prefill_done = time.monotonic()
        try:
            value = read_json(raw)
        except ValueError as error:
            raise leg.error(502, f"the answer is not JSON: {error}", again=False) from None
        return value if isinstance(value, dict) else {}


def _ended_well(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and return when it has closed what it held. Its error, if any, was told elsewhere."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()

"""The HTTP front: OpenAI's routes, health, and how an answer reaches the client.

Guarantees: a client always reads OpenAI's shapes, never a bare text page; a response's headers are sent only with its
first event, so that every failure before it has the right HTTP status; a client that goes away ends both legs at once
(the server runs handlers with cancellation); and at most one socket buffer of a stream is held for a slow client.
"""

from __future__ import annotations

import logging
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from kvxfer.errors import ConfigError
from kvxfer.router.dispatch import Dispatcher
from kvxfer.router.engines import Engines
from kvxfer.router.fanout import read_all, stream_all
from kvxfer.router.merge import StreamMerger, merge_answers
from kvxfer.router.openai import ApiError
from kvxfer.router.settings import Role, RouterSettings
from kvxfer.router.split import CHAT, COMPLETIONS, ClientRequest, read_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)

# What of a client's headers concerns the engines: who it is, and its trace.
_PASSED_ON = ("Authorization", "traceparent", "tracestate")
# uvicorn closes a connection that was idle for 5 s (vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A POST that meets this moment
# fails and may not be repeated, so our side lets go first.
_KEEP_ALIVE = 3.0
# How long a stop waits for the requests in flight.
_LAST_REQUESTS = 5.0


class Router:
    """The state behind the routes: settings, engines, and the one session that all legs share."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.session: aiohttp.ClientSession
        self.engines: Engines
        self.dispatcher: Dispatcher

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the session and check the engines for as long as the block lasts."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
        timeout = aiohttp.ClientTimeout(total=None)
        # Answers pass through as bytes, so they must come as they are, not compressed.
        headers = {"Accept-Encoding": "identity", "User-Agent": "kvxfer-router"}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as self.session:
            self.engines = Engines(self.settings, self.session)
            self.dispatcher = Dispatcher(self.settings, self.session, self.engines)
            self.engines.start()
            try:
                yield
            finally:
                await self.engines.stop()
                await self.dispatcher.stop()

    async def health(self, _request: web.Request) -> web.Response:
        """200 while a request could be served, and every engine with the reason why it is not used."""
        ready = self.engines.ready
        body = {
            "status": "ok" if ready else "unavailable",
            "mode": self.settings.mode.value,
            "engines": [engine.describe() for engine in self.engines],
        }
        return web.json_response(body, status=200 if ready else 503)

    async def models(self, request: web.Request) -> web.Response:
        """A decode engine's model list, as it is."""
        engine = self.engines.pick(Role.DECODE)
        status, body = await self.engines.models(engine, _passed_on(request))
        return web.Response(body=body, status=status, content_type="application/json")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Both completion routes."""
        asked = read_request(request.path, await self._body(request), self.settings.max_singles)
        try:
            return await self._answer(request, asked)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the client reads OpenAI's shape
            return _refusal(_told(error, asked.request_id), asked.request_id)

    async def _answer(self, request: web.Request, asked: ClientRequest) -> web.StreamResponse:
        headers = _passed_on(request)
        if asked.stream:
            return await _stream(request, asked.request_id, self._stream(asked, headers))
        if len(asked.singles) == 1:
            async with self.dispatcher.handoff(asked.singles[0], headers) as handoff:
                body = await handoff.read()
        else:
            body = merge_answers(asked, await read_all(self.dispatcher, asked, headers))
        answer_headers = {"X-Request-Id": asked.request_id}
        return web.Response(body=body, content_type="application/json", headers=answer_headers)

    async def _stream(self, asked: ClientRequest, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        if len(asked.singles) == 1:
            async with self.dispatcher.handoff(asked.singles[0], headers) as handoff:
                async for events in handoff.events():
                    yield b"\n\n".join(events) + b"\n\n"
            return
        merger = StreamMerger(asked)
        async with aclosing(stream_all(self.dispatcher, asked, headers)) as all_events:
            async for single, events in all_events:
                if data := merger.add(single, events):
                    yield data
        yield merger.end()

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = self.settings.max_body_size
            raise ApiError(413, f"the request's body is larger than {limit} bytes (--max-body-size)") from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise ApiError(400, f"the request's body could not be read: {error}") from None


async def _stream(request: web.Request, request_id: str, data: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Write a stream. Before its first bytes a failure is the caller's to answer; after them it is the last event."""
    response = web.StreamResponse(
        headers={"X-Request-Id": request_id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    async with aclosing(data):
        try:
            async for some in data:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(some)
        except ConnectionError:
            log.info("request %s: the client went away", request_id)
            return response
        except Exception as error:
            if not response.prepared:
                raise
            await response.write(_told(error, request_id).event())
        await response.write_eof()
    return response


def _told(error: Exception, request_id: str) -> ApiError:
    if isinstance(error, ApiError):
        log.warning("request %s failed: %s", request_id, error)
        return error
    log.error("request %s failed in an unforeseen way", request_id, exc_info=error)
    return ApiError(500, f"the router failed in an unforeseen way ({type(error).__name__}); its log says more")


def _refusal(told: ApiError, request_id: str | None = None) -> web.Response:
    headers = None if request_id is None else {"X-Request-Id": request_id}
    return web.Response(body=told.body(), status=told.status, content_type="application/json", headers=headers)


@web.middleware
async def _openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:  # noqa: PLR2004
            raise
        told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:  # noqa: BLE001 -- whatever it is, the client reads OpenAI's shape
        told = _told(error, f"{request.method} {request.path}")
    return _refusal(told)


def _passed_on(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}


def make_app(settings: RouterSettings) -> web.Application:
    """The router as an aiohttp application; run it with ``handler_cancellation``, as ``serve`` does."""
    router = Router(settings)

    async def context(_app: web.Application) -> AsyncIterator[None]:
        async with router.running():
            yield

    app = web.Application(middlewares=[_openai_errors], client_max_size=settings.max_body_size)
    app.cleanup_ctx.append(context)
    app.router.add_get("/health", router.health)
    app.router.add_get("/v1/models", router.models)
    app.router.add_post(COMPLETIONS, router.complete)
    app.router.add_post(CHAT, router.complete)
    return app


@asynccontextmanager
async def serve(settings: RouterSettings) -> AsyncIterator[int]:
    """Listen, and hand out the port (``settings.port`` 0 takes a free one); stop at the block's end."""
    runner = web.AppRunner(
        make_app(settings), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_REQUESTS
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error}") from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()

"""The HTTP front: OpenAI's routes, and how an answer reaches the client.

Guarantees: a client always reads OpenAI's shapes, never a bare text page; a response's headers are sent only with its
first event, so that every failure before it has the right HTTP status; a client that goes away ends both legs at once
(the server runs handlers with cancellation); and a stream holds a bounded number of bytes for a slow client.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from kvxfer.router.call import Call, Trace
from kvxfer.router.conversations import HEADER, estimated_tokens
from kvxfer.router.fanout import read_all, stream_all
from kvxfer.router.limits import key_of, owner_of
from kvxfer.router.merge import StreamMerger, merge_answers
from kvxfer.router.openai import ApiError
from kvxfer.router.policies.asked import Asked
from kvxfer.router.relay import Relay, joined
from kvxfer.router.settings import Role
from kvxfer.router.split import ClientRequest, SingleRequest, read_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from kvxfer.router.dispatch import Handoff
    from kvxfer.router.parts import Parts

log = logging.getLogger(__name__)

# What of a client's headers concerns the engines: who it is, and its trace.
_PASSED_ON = ("Authorization", "traceparent", "tracestate")


class ClientGoneError(Exception):
    """Whoever asked has closed the connection."""


class Front:
    """The handlers of completions, models and health."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def health(self, _request: web.Request) -> web.Response:
        """200 while a request could be served, and every engine with the reason why it is not used."""
        parts = self._parts
        ready = parts.engines.ready and not parts.leaving
        body = {
            "status": "ok" if ready else "stopping" if parts.leaving else "unavailable",
            "mode": parts.settings.mode.value,
            "engines": [engine.describe() for engine in parts.engines],
        }
        return web.json_response(body, status=200 if ready else 503)

    async def models(self, request: web.Request) -> web.Response:
        """A decode engine's model list, as it is."""
        engine = self._parts.engines.pick(Role.DECODE)
        status, body = await self._parts.engines.ask(engine, "v1/models", in_utf8(passed_on(request)))
        return web.Response(body=body, status=status, content_type="application/json")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Both completion routes."""
        parts = self._parts
        if parts.stopping:
            raise ApiError(503, "this router is stopping")
        with parts.limits.one(owner_of(request.headers.get("Authorization"))):
            asked = read_request(request.path, await self._body(request), parts.settings.max_singles)
            try:
                return await self._answer(request, asked)
            except ClientGoneError:
                return web.Response(status=499)  # nobody reads it
            except Exception as error:  # noqa: BLE001 -- whatever it is, the client reads OpenAI's shape
                told = _told(error, asked.request_id)
                parts.seen.refused.labels(str(told.status)).inc()
                return _refusal(told, asked.request_id)

    async def _answer(self, request: web.Request, asked: ClientRequest) -> web.StreamResponse:
        parts = self._parts
        headers = passed_on(request)
        headers.setdefault("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")
        authorization = request.headers.get("Authorization")
        call = Call(headers, Asked(estimated_tokens(asked.singles[0].body)))
        if parts.conversations is not None:
            call.conversation, call.asked = await parts.conversations.find(
                asked, request.headers.get(HEADER), owner_of(authorization)
            )
        if asked.client_params and key_of(authorization) in parts.settings.trusted_keys:
            call.client_params = asked.client_params

        def open_handoff(single: SingleRequest) -> _Handed:
            return self._handed(single, call)

        most = parts.settings.concurrent_singles
        told = {"X-Request-Id": asked.request_id}
        if len(asked.singles) == 1:
            async with self._handed(asked.singles[0], call) as handoff:
                if handoff.trace.skipped:
                    told["X-Kvxfer-Prefill"] = "skipped"
                if asked.stream:
                    return await _pass_on(request, told, handoff)
                return web.Response(body=handoff.body, content_type="application/json", headers=told)
        if asked.stream:
            return await _stream(request, told, _merged(asked, most, open_handoff))
        body = merge_answers(asked, await read_all(asked, most, open_handoff))
        return web.Response(body=body, content_type="application/json", headers=told)

    @asynccontextmanager
    async def _handed(self, single: SingleRequest, call: Call) -> AsyncIterator[Handoff]:
        """One single request, from its arrival to its end, seen and remembered."""
        parts = self._parts
        trace = Trace(single.request_id, trace_id(call.headers["traceparent"]), tokens=call.asked.tokens)
        outcome = "client gone"
        try:
            async with parts.dispatcher.handoff(single, call, trace) as handoff:
                yield handoff
            outcome = "ok"
        except ApiError as error:
            outcome = f"error {error.status}"
            raise
        except ClientGoneError:
            raise
        except Exception:
            outcome = "error 500"
            raise
        finally:
            if trace.outcome != "open":
                outcome = trace.outcome
            parts.seen.ended(trace, outcome)
            if outcome == "ok" and parts.conversations is not None and call.conversation is not None:
                tokens = call.asked.tokens + trace.pieces
                await parts.conversations.remember(call.conversation, trace.prefill, trace.decode, tokens)

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = self._parts.settings.max_body_size
            raise ApiError(413, f"the request's body is larger than {limit} bytes (--max-body-size)") from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise ApiError(400, f"the request's body could not be read: {error}") from None


if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from typing import TypeAlias

    _Handed: TypeAlias = AbstractAsyncContextManager[Handoff]


async def _merged(
    asked: ClientRequest, most: int, open_handoff: Callable[[SingleRequest], _Handed]
) -> AsyncGenerator[bytes, None]:
    merger = StreamMerger(asked)
    async with aclosing(stream_all(asked, most, open_handoff)) as all_events:
        async for single, events in all_events:
            if data := merger.add(single, events):
                yield data
    yield merger.end()


class EventStream(web.StreamResponse):
    """An answer whose head leaves with its first events, in one packet (aiohttp otherwise sends it alone)."""

    _send_headers_immediately = False


def _event_stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    response = EventStream(headers=headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    if request.version >= (1, 1):
        response.enable_chunked_encoding()
    return response


async def _pass_on(request: web.Request, headers: dict[str, str], handoff: Handoff) -> web.StreamResponse:
    """Pass a single stream on, which has begun. From here on a failure is the stream's last event."""
    response = _event_stream(request, headers)
    try:
        await response.prepare(request)
        try:
            last = await _relayed(request, response, handoff)
        except ApiError as error:
            handoff.trace.outcome = "error in the stream"
            last = _told(error, handoff.trace.request_id).event()
        await response.write_eof(last)
    except ConnectionError:
        log.info("request %s: the client went away", handoff.trace.request_id)
        raise ClientGoneError from None
    return response


async def _relayed(request: web.Request, response: web.StreamResponse, handoff: Handoff) -> bytes:
    """Write all of a stream but its last events, and return those."""
    answer = handoff.answer
    if answer.finished:
        answer.answer.end()
        return joined(handoff.first)
    await response.write(joined(handoff.first))
    if answer.failure is not None:
        raise answer.failure
    if request.transport is None:
        raise ConnectionResetError("the client went away")
    relay = Relay(answer, request.transport, chunked=response.chunked)
    try:
        return await relay.run()
    finally:
        handoff.trace.pieces = relay.pieces


async def _stream(
    request: web.Request, headers: dict[str, str], data: AsyncGenerator[bytes, None]
) -> web.StreamResponse:
    """Write a merged stream. Before its first bytes a failure is the caller's to answer; after them it is the last event."""
    response = _event_stream(request, headers)
    request_id = headers["X-Request-Id"]
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
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    if told.status in {429, 503}:
        headers["Retry-After"] = "1"
    return web.Response(body=told.body(), status=told.status, content_type="application/json", headers=headers)


@web.middleware
async def openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer whatever a handler raises in OpenAI's shape."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:  # noqa: PLR2004
            raise
        told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:  # noqa: BLE001 -- whatever it is, the client reads OpenAI's shape
        told = _told(error, f"{request.method} {request.path}")
    return _refusal(told)


def trace_id(traceparent: str) -> str:
    """The trace id of a W3C trace context; of anything else, all of it."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 else traceparent[:64]  # noqa: PLR2004


def in_utf8(headers: dict[str, str]) -> dict[str, str]:
    """The same headers; a 400 where one has bytes that a general HTTP client does not send."""
    for name, value in headers.items():
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ApiError(400, f"the header {name} has bytes that are not UTF-8")
    return headers


def passed_on(request: web.Request) -> dict[str, str]:
    """What of the client's headers an engine is sent."""
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}

"""The rest of OpenAI's API, passed to a decode engine as it is: what needs no handoff.

Only paths that clients may have are passed; an engine's control over itself (``/sleep``, ``/reset_prefix_cache``, ``/metrics``
and the like) is not reachable from here. ``kv_transfer_params`` are taken out of every body, as everywhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from aiohttp import web

from kvxfer.router.app import in_utf8, passed_on
from kvxfer.router.limits import key_of, owner_of
from kvxfer.router.openai import ApiError, read_json
from kvxfer.router.settings import Role
from kvxfer.router.split import CHAT, COMPLETIONS

if TYPE_CHECKING:
    from kvxfer.router.parts import Parts

PATHS = (
    "/v1/{rest:.+}",
    "/tokenize",
    "/detokenize",
    "/version",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
)
_OF_EACH = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""What one engine alone must not be told: adapters are known by their names, and all engines must have the same under one."""
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "server", "date"}


class Passing:
    """The handler."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def add_routes(self, app: web.Application) -> None:
        """After all routes of our own: the first that fits answers."""
        for path in PATHS:
            app.router.add_route("GET", path, self.passed)
            app.router.add_route("POST", path, self.passed)

    async def passed(self, request: web.Request) -> web.StreamResponse:
        """Ask a decode engine and hand its answer on while it comes."""
        names = request.path.split("/")[1:]
        if any(name in {"", ".", ".."} for name in names):  # percent-encoded ones as well: they lead out of PATHS
            raise web.HTTPNotFound
        if request.path in _OF_EACH:
            raise ApiError(403, f"{request.path} changes one engine: ask each prefill and each decode engine itself")
        if request.path in {COMPLETIONS, CHAT}:
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        parts = self._parts
        if parts.stopping:
            raise ApiError(503, "this router is stopping")
        authorization = request.headers.get("Authorization")
        with parts.limits.one(owner_of(authorization)):
            body = await request.read()
            kind = request.headers.get("Content-Type", "")
            if key_of(authorization) not in parts.settings.trusted_keys and not _is_form(kind):
                body = without_params(body)
            engine = parts.engines.pick(Role.DECODE)
            where = f"decode engine {engine.name}{request.path}"
            headers = passed_on(request)
            if kind:
                headers["Content-Type"] = kind
            headers = in_utf8(headers)
            url = engine.url.joinpath(*names).with_query(request.query)
            timeout = aiohttp.ClientTimeout(total=parts.settings.request_timeout)
            response: web.StreamResponse | None = None
            try:
                async with parts.session.request(
                    request.method, url, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
                ) as answer:
                    kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
                    response = web.StreamResponse(status=answer.status, headers=kept)
                    await response.prepare(request)
                    async for data in answer.content.iter_any():
                        await response.write(data)
                    await response.write_eof()
                    return response
            except asyncio.TimeoutError:
                error = ApiError(504, f"{where}: not finished within {timeout.total:g} s (--request-timeout)")
            except (aiohttp.ClientError, OSError) as failure:
                error = ApiError(502, f"{where}: {failure or type(failure).__name__}")
            if response is not None and response.prepared:
                # The status is out: what is left is to let the client see that this is not the whole answer.
                if request.transport is not None:
                    request.transport.abort()
                return response
            raise error


def _is_form(kind: str) -> bool:
    """Whether a content type is of uploads, which engines read no JSON from."""
    return kind.partition(";")[0].strip().lower() == "multipart/form-data"


def without_params(body: bytes) -> bytes:
    """The body without a client's ``kv_transfer_params``; one that is not a JSON object is returned as it is.

    One that may have them is a 400 where it is no JSON to us: to Python, by which engines read it, NaN is a number, half of a
    surrogate pair a character, and UTF-16 as good as UTF-8, in which all that is ASCII has zeros.
    """
    if not any(mark in body for mark in (b"kv_transfer_params", b"\\u", b"\0")):
        return body
    try:
        value = read_json(body)
    except ValueError as error:
        raise ApiError(400, f"the request's body is not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict) or value.pop("kv_transfer_params", None) is None:
        return body
    return msgspec.json.encode(value)

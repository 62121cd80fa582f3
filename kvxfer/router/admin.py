"""The admin API: engines come, drain and go while the router runs. Without an admin key there is none.

| call | what |
|---|---|
| ``GET /admin/engines`` | all engines, with who named them |
| ``POST /admin/engines`` ``{"role", "url"}`` | add one; it is used once it has passed a check |
| ``POST /admin/drain`` ``{"role", "url", "draining"}`` | no new requests (or again), what runs goes on |
| ``DELETE /admin/engines`` ``{"role", "url"}`` | take one away; a source that still names it will bring it back |
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from aiohttp import web

from kvxfer.errors import ConfigError
from kvxfer.router.limits import key_of
from kvxfer.router.openai import ApiError, Json, read_json
from kvxfer.router.settings import Role

if TYPE_CHECKING:
    from kvxfer.router.engine import Engine
    from kvxfer.router.engines import Engines

ORIGIN = "admin API"


class Admin:
    """The handlers."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._engines: Engines

    def bind(self, engines: Engines) -> None:
        """Say which engines; called before the first request."""
        self._engines = engines

    async def list(self, request: web.Request) -> web.Response:
        """All engines."""
        self._check(request)
        return web.json_response({"engines": [self._entry(one) for one in self._engines]})

    async def add(self, request: web.Request) -> web.Response:
        """Add one."""
        role, url, _ = await self._asked(request)
        try:
            engine = self._engines.add(role, url, ORIGIN)
        except ConfigError as error:
            raise ApiError(400, str(error), param="url") from None
        return web.json_response(self._entry(engine), status=201)

    async def drain(self, request: web.Request) -> web.Response:
        """Give one no new requests, or again."""
        role, url, body = await self._asked(request)
        draining = body.get("draining", True)
        if not isinstance(draining, bool):
            raise ApiError(400, "draining must be a boolean", param="draining")
        engine = self._find(role, url)
        engine.draining = draining
        self._engines.changed.set()
        return web.json_response(self._entry(engine))

    async def remove(self, request: web.Request) -> web.Response:
        """Take one away."""
        role, url, _ = await self._asked(request)
        engine = self._find(role, url)
        self._engines.remove(engine)
        return web.json_response(self._entry(engine))

    def _entry(self, engine: Engine) -> Json:
        return engine.status() | {"named_by": self._engines.origins(engine)}

    def _find(self, role: Role, url: str) -> Engine:
        try:
            engine = self._engines.find(role, url)
        except ConfigError as error:
            raise ApiError(400, str(error), param="url") from None
        if engine is None:
            raise ApiError(404, f"there is no {role.value} engine {url}", param="url")
        return engine

    def _check(self, request: web.Request) -> None:
        if self._key is None:
            raise ApiError(403, "this router has no admin API: start it with KVXFER_ADMIN_KEY set")
        given = key_of(request.headers.get("Authorization"))
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._key.encode(errors="surrogateescape")):
            raise ApiError(401, "the admin API needs Authorization: Bearer and the admin key")

    async def _asked(self, request: web.Request) -> tuple[Role, str, Json]:
        self._check(request)
        try:
            body = read_json(await request.read())
        except ValueError as error:
            raise ApiError(400, f"the request's body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the request's body must be an object with role and url")
        role, url = body.get("role"), body.get("url")
        if role not in [one.value for one in Role]:
            raise ApiError(400, f"role is {role!r}; it must be prefill or decode", param="role")
        if not isinstance(url, str):
            raise ApiError(400, "url is missing", param="url")
        return Role(role), url, body

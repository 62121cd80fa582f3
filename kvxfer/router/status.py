"""What an operator sees: ``/metrics``, ``/status``, the waterfall of recent requests, and ``/ui``, a page over the last two."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

from kvxfer.router.waterfall import Waterfall

if TYPE_CHECKING:
    from kvxfer.router.openai import Json
    from kvxfer.router.parts import Parts

_LAST = 50
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Status:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._waterfall = Waterfall()
        self._page = resources.files("kvxfer.router").joinpath("ui.html").read_bytes()

    async def metrics(self, _request: web.Request) -> web.Response:
        """Prometheus' text format."""
        return web.Response(body=self._parts.seen.metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def status(self, _request: web.Request) -> web.Response:
        """Everything that is known now."""
        return web.json_response(self._status())

    async def waterfall(self, _request: web.Request) -> web.Response:
        """The last requests, stage by stage, with what the engines' handoff records say of them."""
        traces = list(self._parts.seen.last)[-_LAST:]
        requests, missing = await self._waterfall.of(traces, list(self._parts.engines))
        return web.json_response({"requests": requests, "without_records": missing})

    async def page(self, _request: web.Request) -> web.Response:
        """The page."""
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=headers)

    def _status(self) -> Json:
        parts = self._parts
        settings = parts.settings
        return {
            "mode": settings.mode.value,
            "decode_chosen": settings.decode_when.value,
            "choice": settings.choice.value,
            "stopping": parts.leaving,
            "open_requests": parts.limits.open,
            "queued_requests": parts.admission.queued,
            "conversations_kept": parts.conversations.kept if parts.conversations is not None else 0,
            "conversations_in": "off" if parts.conversations is None else "redis" if settings.redis else "memory",
            "engines": [engine.status() | {"named_by": parts.engines.origins(engine)} for engine in parts.engines],
            "requests": [trace.describe() for trace in list(parts.seen.last)[-_LAST:]],
        }

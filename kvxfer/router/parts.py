"""A router's parts, made, started and stopped together; and the server that they stand behind."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from kvxfer.errors import ConfigError
from kvxfer.router.admin import Admin
from kvxfer.router.app import Front, openai_errors
from kvxfer.router.conversations import Conversations
from kvxfer.router.dispatch import Dispatcher
from kvxfer.router.engines import Engines
from kvxfer.router.limits import Limits
from kvxfer.router.passing import Passing
from kvxfer.router.policies.admission import Admission
from kvxfer.router.policies.timing import Adaptive, Fixed, Timing
from kvxfer.router.seen import Seen
from kvxfer.router.settings import RouterSettings, When
from kvxfer.router.sources import Sources
from kvxfer.router.split import CHAT, COMPLETIONS
from kvxfer.router.status import Status
from kvxfer.router.store import MemoryStore, Store
from kvxfer.router.upstream import KEEP_ALIVE, Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

log = logging.getLogger(__name__)


class Parts:
    """What the handlers share. Complete as long as ``running`` is."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.leaving = False
        """A stop has been asked for: ``/health`` says so, and everything is still answered."""
        self.stopping = False
        """Nothing new is taken."""
        self.session: aiohttp.ClientSession
        self.upstream: Upstream
        self.engines: Engines
        self.dispatcher: Dispatcher
        self.admission: Admission
        self.conversations: Conversations | None = None
        self.seen: Seen
        self.limits: Limits

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Make everything, and check the engines for as long as the block lasts."""
        settings = self.settings
        context = engine_tls(settings)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, ssl=context or True)
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Accept-Encoding": "identity", "User-Agent": "kvxfer-router"}
        async with AsyncExitStack() as stack:
            self.session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
            )
            self.upstream = Upstream(settings.connect_timeout, context)
            stack.callback(self.upstream.close)
            self.engines = Engines(settings, self.session)
            self.admission = Admission(settings, self.engines)
            self.dispatcher = Dispatcher(
                settings, self.upstream, self.engines, timing_of(settings.decode_when), self.admission
            )
            stack.push_async_callback(self.dispatcher.stop)
            self.limits = Limits(settings, asyncio.get_running_loop().time)
            self.seen = Seen(self.engines)
            self.seen.open.set_function(lambda: self.limits.open)
            self.seen.queued.set_function(lambda: self.admission.queued)
            if settings.conversations:
                store = await open_store(settings)
                stack.push_async_callback(store.close)
                self.conversations = Conversations(settings, self.engines, store)
            sources = Sources(settings, self.engines)
            await sources.start()
            stack.push_async_callback(sources.stop)
            self.engines.start()
            stack.push_async_callback(self.engines.stop)
            yield


def timing_of(when: When) -> Timing:
    """The policy of that name."""
    return Adaptive() if when is When.ADAPTIVE else Fixed(late=when is When.LATE)


async def open_store(settings: RouterSettings) -> Store:
    """Where conversations are remembered."""
    if settings.redis is None:
        return MemoryStore(settings.conversations)
    try:
        from kvxfer.router.store_redis import RedisStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"--redis needs {error.name}: pip install 'kvxfer[router]'") from None
    try:
        return RedisStore(settings.redis)
    except ValueError as error:
        raise ConfigError(f"--redis is no URL of a Redis server: {error}") from None


def engine_tls(settings: RouterSettings) -> ssl.SSLContext | None:
    """How engines with https URLs are verified; None: by the system's authorities."""
    if settings.engine_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=settings.engine_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--engine-ca {settings.engine_ca} cannot be used: {error}") from None


def make_app(parts: Parts) -> web.Application:
    """The router as an aiohttp application; run it with ``handler_cancellation``, as ``serve`` does."""

    async def context(_app: web.Application) -> AsyncIterator[None]:
        async with parts.running():
            admin.bind(parts.engines)
            yield

    settings = parts.settings
    app = web.Application(middlewares=[openai_errors], client_max_size=settings.max_body_size)
    app.cleanup_ctx.append(context)
    front, status, passing, admin = Front(parts), Status(parts), Passing(parts), Admin(settings.admin_key)
    add = app.router
    add.add_get("/health", front.health)
    add.add_get("/v1/models", front.models)
    add.add_post(COMPLETIONS, front.complete)
    add.add_post(CHAT, front.complete)
    add.add_get("/metrics", status.metrics)
    add.add_get("/status", status.status)
    add.add_get("/status/waterfall", status.waterfall)
    add.add_get("/ui", status.page)
    add.add_get("/admin/engines", admin.list)
    add.add_post("/admin/engines", admin.add)
    add.add_delete("/admin/engines", admin.remove)
    add.add_post("/admin/drain", admin.drain)
    passing.add_routes(app)
    return app


@asynccontextmanager
async def serve(settings: RouterSettings) -> AsyncIterator[int]:
    """Listen, and hand out the port (``settings.port`` 0 takes a free one).

    At the block's end: say so in ``/health`` for ``stop_delay`` seconds while everything is still taken, then take nothing new
    and give what is open ``stop_timeout`` seconds to end.
    """
    parts = Parts(settings)
    runner = web.AppRunner(
        make_app(parts), handler_cancellation=True, access_log=None, shutdown_timeout=settings.stop_timeout
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error}") from None
        yield runner.addresses[0][1]
        parts.leaving = True
        await asyncio.sleep(settings.stop_delay)
        parts.stopping = True
        if parts.limits.open:
            log.info("stopping: %d requests are still open", parts.limits.open)
    finally:
        await runner.cleanup()

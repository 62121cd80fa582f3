"""The engines of one router: who belongs to it, by whose word, and the choice among those that may be used.

Guarantees: an engine belongs as long as at least one origin (flags, a file, a name, the admin API) names it; one that is taken
away gets no new request from that instant, and what it is answering goes on to its end. Each engine is checked by a task of its
own (``checks``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import aiohttp

from kvxfer.router.checks import Checker
from kvxfer.router.engine import Engine
from kvxfer.router.openai import ApiError
from kvxfer.router.policies.asked import Asked
from kvxfer.router.policies.decode import SoonestToken
from kvxfer.router.policies.prefill import LeastWork, RoundRobin
from kvxfer.router.settings import Choice, Role, RouterSettings, engine_url

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from kvxfer.router.policies.asked import Picker

log = logging.getLogger(__name__)

FLAGS = "flags"
_ANYBODY = Asked()


class Engines:
    """All engines, their checks, and the choice among the usable ones."""

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self._checker = Checker(settings, session)
        smart = settings.choice is Choice.LOAD
        self._pickers: dict[Role, Picker] = {
            Role.PREFILL: LeastWork() if smart else RoundRobin(),
            Role.DECODE: SoonestToken() if smart else RoundRobin(),
        }
        self._tasks: dict[Engine, list[asyncio.Task[None]]] = {}
        self._origins: dict[Engine, set[str]] = {}
        self.by_role: dict[Role, list[Engine]] = {Role.PREFILL: [], Role.DECODE: []}
        self.changed = asyncio.Event()
        """Set whenever a decode engine may have become able to take more."""
        for role, urls in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
            for url in urls:
                self.add(role, url, FLAGS)

    def __iter__(self) -> Iterator[Engine]:
        for role in Role:
            yield from self.by_role[role]

    @property
    def ready(self) -> bool:
        """Whether a request could be served: one usable engine of each role."""
        return all(any(engine.usable for engine in self.by_role[role]) for role in Role)

    def find(self, role: Role, url: str) -> Engine | None:
        """The engine of that URL, however it is written."""
        wanted = engine_url(url)
        return next((one for one in self.by_role[role] if one.url == wanted), None)

    def add(self, role: Role, url: str, origin: str) -> Engine:
        """Let an engine belong by the word of ``origin``; it is used once it has passed a check."""
        engine = self.find(role, url)
        if engine is None:
            engine = Engine(role, engine_url(url))
            self.by_role[role].append(engine)
            if origin != FLAGS:
                log.info("%s engine %s is added (%s)", role.value, engine.name, origin)
        self._origins.setdefault(engine, set()).add(origin)
        if self._started and engine not in self._tasks:
            self._begin(engine)
        return engine

    def remove(self, engine: Engine, origin: str | None = None) -> bool:
        """Take back one origin's word, or (None) everybody's; return whether the engine is out by that."""
        origins = self._origins.get(engine, set())
        origins.discard(origin or "")
        if origins and origin is not None:
            return False
        self._origins.pop(engine, None)
        if engine in self.by_role[engine.role]:
            self.by_role[engine.role].remove(engine)
            log.info("%s engine %s is taken away (%s)", engine.role.value, engine.name, origin or "by hand")
        for task in self._tasks.pop(engine, []):
            task.cancel()
        return True

    def wanted(self, origin: str, urls: Mapping[Role, Collection[str]]) -> None:
        """Make what ``origin`` names be just these."""
        for role in Role:
            names = {str(engine_url(url)) for url in urls.get(role, ())}
            for engine in tuple(self.by_role[role]):
                if origin in self._origins.get(engine, ()) and str(engine.url) not in names:
                    self.remove(engine, origin)
            for name in sorted(names):
                self.add(role, name, origin)

    def origins(self, engine: Engine) -> list[str]:
        """By whose word an engine belongs."""
        return sorted(self._origins.get(engine, ()))

    def usable(self, role: Role, but: Iterable[Engine] = ()) -> list[Engine]:
        """The engines that may get a new request, without those of ``but``."""
        left = set(but)
        return [engine for engine in self.by_role[role] if engine.usable and engine not in left]

    def pick(self, role: Role, asked: Asked = _ANYBODY, but: Iterable[Engine] = ()) -> Engine:
        """Choose a usable engine; raise ``ApiError`` 503 that says why there is none."""
        return self.pick_of(role, self.usable(role, but), asked)

    def need(self, role: Role, but: Iterable[Engine] = ()) -> None:
        """Raise ``ApiError`` 503 where no engine could be chosen."""
        if not self.usable(role, but):
            raise ApiError(503, f"no {role.value} engine is healthy ({self._why_none(role)})")

    def pick_of(self, role: Role, engines: list[Engine], asked: Asked = _ANYBODY) -> Engine:
        """Choose one of these, likewise."""
        if not engines:
            raise ApiError(503, f"no {role.value} engine is healthy ({self._why_none(role)})")
        return self._pickers[role].pick(engines, asked)

    def _why_none(self, role: Role) -> str:
        engines = self.by_role[role]
        if not engines:
            return "there is none"
        return "; ".join(
            f"{one.name}: {one.reason or ('it is being drained' if one.draining else 'it failed this request')}"
            for one in engines
        )

    _started = False

    def start(self) -> None:
        """Begin checking, now and then every ``check_interval``."""
        self._started = True
        for engine in self:
            self._begin(engine)

    async def stop(self) -> None:
        """End the checks."""
        tasks = [task for some in self._tasks.values() for task in some]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, engine: Engine) -> None:
        tasks = [asyncio.ensure_future(self._watch(engine))]
        if engine.role is Role.DECODE:
            tasks.append(asyncio.ensure_future(self._introduce_all(engine)))
        self._tasks[engine] = tasks

    async def _watch(self, engine: Engine) -> None:
        while True:
            await self._checker.check(engine)
            self.changed.set()
            if engine.healthy:
                for decode in self.by_role[Role.DECODE]:
                    decode.news.set()
            engine.doubt.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(engine.doubt.wait(), self._settings.check_interval)

    async def _introduce_all(self, decode: Engine) -> None:
        while True:
            await decode.news.wait()
            decode.news.clear()
            await self._checker.introduce(decode, self.by_role[Role.PREFILL])

    async def ask(self, engine: Engine, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """One GET of a client to an engine, with the client's own headers: status and body as they came."""
        timeout = aiohttp.ClientTimeout(total=self._settings.check_timeout)
        where = f"{engine.role.value} engine {engine.name}/{path}"
        try:
            async with self._session.get(engine.url / path, headers=headers, timeout=timeout) as response:
                return response.status, await response.read()
        except asyncio.TimeoutError:
            raise ApiError(504, f"{where}: no answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(502, f"{where}: {error or type(error).__name__}") from None

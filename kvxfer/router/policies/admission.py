"""Whether a decode engine may be given one more handoff now, so that blocks of waiting handoffs cannot starve running ones.

A decode leg takes its blocks when it arrives and produces nothing until its KV has come. If such legs fill the cache, the
streams that run there are preempted. So an engine is given a handoff only while what waits there, with this one, is at most
``share`` of its cache and fits into what it can reclaim; an engine to which this router has given nothing always takes one
(whether the prompt can be served at all is vLLM's to say). When no engine has room the request waits here, in order of
arrival, and holds nothing. An engine that does not say how large its cache is has no limit. ``docs/policies/admission.md``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvxfer.router.openai import ApiError
from kvxfer.router.policies.decode import has_room
from kvxfer.router.settings import Role, RouterSettings
from kvxfer.router.timeouts import queue_timeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engine import Engine
    from kvxfer.router.engines import Engines
    from kvxfer.router.policies.asked import Asked


def admits(engine: Engine, asked: Asked, share: float) -> bool:
    """Whether the engine may be given this handoff now."""
    load, capacity = engine.load, engine.says.capacity
    if not load.requests or capacity is None:
        return True
    return load.waiting_tokens + asked.missing(engine) <= share * capacity and has_room(engine, asked)


class Admission:
    """The queue before the decode engines."""

    def __init__(self, settings: RouterSettings, engines: Engines) -> None:
        self._settings = settings
        self._engines = engines
        self._turn = asyncio.Lock()
        self.queued = 0

    async def admitted(self, asked: Asked, failed: Sequence[Engine], *, skipping: bool = False) -> Engine:
        """Choose a decode engine that has room, waiting for one; ``ApiError`` 503 where the wait is too long.

        Nothing may be awaited between this method's return and the leg's being counted. ``skipping``: only an engine that
        holds nearly the whole prompt will do.
        """
        if not self.queued and (engine := self._try(asked, failed, skipping=skipping)) is not None:
            return engine
        settings = self._settings
        if self.queued >= settings.queue_limit:
            raise ApiError(503, f"{self.queued} requests wait for room on a decode engine already (--queue-limit)")
        prefills = (identity for engine in self._engines.by_role[Role.PREFILL] for identity in engine.identities)
        timeout = queue_timeout(settings, prefills)
        self.queued += 1
        try:
            return await asyncio.wait_for(self._wait(asked, failed, skipping=skipping), timeout)
        except asyncio.TimeoutError:
            told = f"decode leg: no decode engine had room within {timeout:g} s (--queue-timeout)"
            raise ApiError(503, told) from None
        finally:
            self.queued -= 1

    async def _wait(self, asked: Asked, failed: Sequence[Engine], *, skipping: bool) -> Engine:
        async with self._turn:
            while (engine := self._try(asked, failed, skipping=skipping)) is None:
                self._engines.changed.clear()
                await self._engines.changed.wait()
            return engine

    def _try(self, asked: Asked, failed: Sequence[Engine], *, skipping: bool) -> Engine | None:
        engines = self._engines.usable(Role.DECODE, failed)
        if skipping:
            engines = [one for one in engines if asked.missing(one) < self._settings.skip_prefill_below] or engines
        roomy = [one for one in engines if admits(one, asked, self._settings.decode_share)]
        if engines and not roomy:
            return None
        return self._engines.pick_of(Role.DECODE, roomy, asked)

"""One leg: one HTTP request to one engine, and what its failures mean to a client.

Guarantees: whatever fails, a ``LegError`` is raised that names the leg and the engine's URL (or is the engine's own error,
unchanged), and says whether another engine may be asked instead. Leaving the leg's block closes its connection unless the
answer was read to its end; vLLM aborts a request whose connection closes, so nothing keeps running for a client that is gone.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from kvxfer.router.openai import DONE, ApiError, EventCutter, Json, engine_error, event_error, is_answer
from kvxfer.router.upstream import Answer, CannotConnect, Upstream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

    from kvxfer.router.engine import Engine
    from kvxfer.router.settings import RouterSettings

_MAX_ERROR_BODY = 1024 * 1024
_ERRORS_FROM = 400
_SERVER_ERRORS_FROM = 500


class LegError(ApiError):
    """A leg failed. ``again``: another engine may do better; ``engine`` is the one that did not."""

    engine: Engine
    again: bool = False

    def by(self, leg: Leg, *, again: bool) -> LegError:
        """Say which engine failed."""
        self.engine, self.again = leg.engine, again
        return self


@dataclass(frozen=True, slots=True)
class Leg:
    """What is sent where."""

    engine: Engine
    path: str
    body: Json
    headers: Mapping[str, str]

    @property
    def title(self) -> str:
        """The leg in an error message."""
        return f"{self.engine.role.value} leg, {self.engine.name}{self.path}"

    def error(self, status: int, message: str, *, again: bool) -> LegError:
        """An error of this leg in our own words."""
        return LegError(status, f"{self.title}: {message}").by(self, again=again)


class LegAnswer:
    """An engine's 200, not yet read. Read it either whole or event by event."""

    def __init__(self, leg: Leg, settings: RouterSettings, answer: Answer) -> None:
        self.leg = leg
        self.answer = answer
        self._settings = settings
        self._cutter = EventCutter()
        self.failure: ApiError | None = None
        self.finished = False
        self._answered = False

    def close(self) -> None:
        """Leave. It closes the connection unless the answer was read to its end, and then that one is kept."""
        self.answer.close()

    async def read(self) -> bytes:
        """The whole body."""
        with Translated(self.leg, self._settings):
            body = await self.answer.read()
        self.answer.end()
        return body

    async def next_events(self) -> list[bytes] | None:
        """The next whole events as they arrived, ``[DONE]`` last, then None; ``ApiError`` where the stream fails.

        The consumer sets the pace: little is read ahead.
        """
        if self.failure is not None:
            raise self.failure
        while not self.finished:
            with Translated(self.leg, self._settings):
                data = await self.answer.next()
            if not data:
                raise self.cut_short()
            if good := self.feed(data):
                return good
            if self.failure is not None:
                raise self.failure
        return None

    def feed(self, data: bytes) -> list[bytes]:
        """The whole events that ``data`` completes, up to the stream's end; then ``finished`` or ``failure`` is set."""
        try:
            events = self._cutter.feed(data)
        except ValueError as error:
            self.failure = self.leg.error(502, str(error), again=False)
            return []
        return self._until_end(events)

    @property
    def between_events(self) -> bool:
        """Whether all that came so far were whole events, with something of the answer among them."""
        return self._answered and not self._cutter.holds

    def told(self, failure: Exception) -> Exception:
        """What a failure of the connection means."""
        return translated(failure, self.leg, self._settings) or failure

    def cut_short(self) -> LegError:
        """The error for a stream that ended without its end."""
        return self.leg.error(502, "the stream ended before it was finished", again=True)

    def _until_end(self, events: list[bytes]) -> list[bytes]:
        """Cut off what follows the stream's end. Engines send ``[DONE]`` behind an error too; clients must not see it.

        Nor behind nothing: vLLM leaves out the chunk that says that a completion failed before its first token, and ends the
        stream as if all were well (0.29 and 0.32 entrypoints/openai/completion/serving.py, completion_stream_generator).
        """
        for number, event in enumerate(events):
            error = event_error(event)
            if error is not None:
                self.failure = LegError.of_engine(error.status, error.error).by(
                    self.leg, again=error.status >= _SERVER_ERRORS_FROM
                )
                return events[:number]
            if event == DONE and not self._answered:
                told = "the stream ended without an answer: the request failed in the engine, whose log says why"
                self.failure = self.leg.error(500, told, again=True)
                return events[:number]
            self._answered = self._answered or is_answer(event)
            if event == DONE:
                self.finished = True
                return events[: number + 1]
        return events


async def open_leg(upstream: Upstream, settings: RouterSettings, leg: Leg) -> LegAnswer:
    """Send one leg and return its answer, to be closed by the caller, once it is a 200; anything else is a ``LegError``."""
    with Translated(leg, settings):
        answer = await upstream.post(
            _where(leg.engine.url, leg.path), leg.headers, msgspec.json.encode(leg.body), settings.request_timeout
        )
        if answer.status == 200:  # noqa: PLR2004
            return LegAnswer(leg, settings, answer)
        try:
            raise _refusal(leg, answer.status, await answer.read(_MAX_ERROR_BODY))
        finally:
            answer.close()


@lru_cache(maxsize=4096)
def _where(engine: URL, path: str) -> URL:
    return engine / path.lstrip("/")


def _refusal(leg: Leg, status: int, body: bytes) -> LegError:
    error = engine_error(body)
    again = status >= _SERVER_ERRORS_FROM
    if error is not None and status >= _ERRORS_FROM:
        return LegError.of_engine(status, error).by(leg, again=again)
    said = body[:500].decode(errors="replace")
    # A 4xx is about the client's request, whatever its shape; any other status is a bad gateway to the client.
    told = status if _ERRORS_FROM <= status < _SERVER_ERRORS_FROM else 502
    return leg.error(told, f"the engine answered {status}: {said}", again=again)


def translated(error: BaseException, leg: Leg, settings: RouterSettings) -> LegError | None:
    """The leg's failure that an exception means; None for what is none. The engine learns what it says of it."""
    if isinstance(error, CannotConnect):
        leg.engine.failed(f"cannot be reached: {error}")
        return leg.error(502, f"cannot be reached: {error}", again=True)
    if isinstance(error, asyncio.TimeoutError):
        told = f"not finished within {settings.request_timeout:g} s (--request-timeout)"
        return leg.error(504, told, again=False)
    if isinstance(error, OSError):
        leg.engine.doubt.set()
        return leg.error(502, f"the connection failed: {error or type(error).__name__}", again=True)
    return None


class Translated(AbstractContextManager["Translated", None]):
    """Raises what fails in the block as the leg's failure."""

    __slots__ = ("_leg", "_settings")

    def __init__(self, leg: Leg, settings: RouterSettings) -> None:
        self._leg = leg
        self._settings = settings

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Translate."""
        if error is not None and (told := translated(error, self._leg, self._settings)) is not None:
            raise told from None

"""One leg: one HTTP request to one engine, and what its failures mean to a client.

Guarantees: whatever fails, ``ApiError`` is raised, and it names the leg and the engine's URL (or is the engine's own
error, unchanged). Leaving the leg's block closes its connection unless the answer was read to its end; vLLM aborts a
request whose connection closes, so nothing keeps running for a client that is gone.
"""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from kvxfer.router.openai import DONE, ApiError, EventCutter, Json, engine_error, event_error, is_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from kvxfer.router.engines import Engine
    from kvxfer.router.settings import RouterSettings

_MAX_ERROR_BODY = 1024 * 1024
_ERRORS_FROM = 400
_LARGE = 1024 * 1024


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


class LegAnswer:
    """An engine's 200, not yet read. Read it either whole or event by event."""

    def __init__(self, leg: Leg, settings: RouterSettings, response: aiohttp.ClientResponse) -> None:
        self._leg = leg
        self._settings = settings
        self._response = response
        self._cutter = EventCutter()
        self._failure: ApiError | None = None
        self._finished = False
        self._answered = False

    async def read(self) -> bytes:
        """The whole body."""
        with _translated(self._leg, self._settings):
            return await self._response.read()

    async def next_events(self) -> list[bytes] | None:
        """The next whole events as they arrived, ``[DONE]`` last, then None; ``ApiError`` where the stream fails.

        The consumer sets the pace: nothing is read ahead beyond one socket buffer.
        """
        if self._failure is not None:
            raise self._failure
        while not self._finished:
            with _translated(self._leg, self._settings):
                data = await self._response.content.readany()
            if not data:
                raise ApiError(502, f"{self._leg.title}: the stream ended before it was finished")
            try:
                events = self._cutter.feed(data)
            except ValueError as error:
                raise ApiError(502, f"{self._leg.title}: {error}") from None
            if good := self._until_end(events):
                return good
            if self._failure is not None:
                raise self._failure
        return None

    def _until_end(self, events: list[bytes]) -> list[bytes]:
        """Cut off what follows the stream's end. Engines send ``[DONE]`` behind an error too; clients must not see it.

        Nor behind nothing: vLLM leaves out the chunk that says that a completion failed before its first token, and ends the
        stream as if all were well (0.29 and 0.32 entrypoints/openai/completion/serving.py, completion_stream_generator).
        """
        for number, event in enumerate(events):
            self._failure = event_error(event)
            if self._failure is not None:
                return events[:number]
            if event == DONE and not self._answered:
                told = "the stream ended without an answer: the request failed in the engine, whose log says why"
                self._failure = ApiError(500, f"{self._leg.title}: {told}")
                return events[:number]
            self._answered = self._answered or is_answer(event)
            if event == DONE:
                self._finished = True
                return events[: number + 1]
        return events


@asynccontextmanager
async def open_leg(session: aiohttp.ClientSession, settings: RouterSettings, leg: Leg) -> AsyncIterator[LegAnswer]:
    """Send one leg and hand out its answer once it is a 200; anything else is an ``ApiError``."""
    with _translated(leg, settings):
        response = await session.post(
            leg.engine.url / leg.path.lstrip("/"),
            data=_payload(leg.body),
            headers={"Content-Type": "application/json", **leg.headers},
            timeout=aiohttp.ClientTimeout(total=settings.request_timeout, sock_connect=settings.connect_timeout),
        )
    try:
        if response.status != 200:  # noqa: PLR2004
            with _translated(leg, settings):
                raise _refusal(leg, response.status, await response.content.read(_MAX_ERROR_BODY))
        yield LegAnswer(leg, settings, response)
    finally:
        response.close()  # does nothing to a connection whose answer was read to its end: that one is kept alive


def _payload(body: Json) -> bytes | io.BytesIO:
    raw = msgspec.json.encode(body)
    return raw if len(raw) < _LARGE else io.BytesIO(raw)  # aiohttp writes a file in pieces, and bytes in one go


def _refusal(leg: Leg, status: int, body: bytes) -> ApiError:
    error = engine_error(body)
    if error is not None and status >= _ERRORS_FROM:
        return ApiError.of_engine(status, error)
    said = body[:500].decode(errors="replace")
    # A 4xx is about the client's request, whatever its shape; any other status is a bad gateway to the client.
    return ApiError(status if 400 <= status < 500 else 502, f"{leg.title}: the engine answered {status}: {said}")  # noqa: PLR2004


@contextmanager
def _translated(leg: Leg, settings: RouterSettings) -> Iterator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError:
        message = f"cannot be reached: no connection within {settings.connect_timeout:g} s"
        leg.engine.failed(message)
        raise ApiError(502, f"{leg.title}: {message}") from None
    except asyncio.TimeoutError:
        raise ApiError(
            504, f"{leg.title}: not finished within {settings.request_timeout:g} s (--request-timeout)"
        ) from None
    except aiohttp.ClientConnectorError as error:
        leg.engine.failed(f"cannot be reached: {error}")
        raise ApiError(502, f"{leg.title}: cannot be reached: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ApiError(502, f"{leg.title}: the connection failed: {error or type(error).__name__}") from None

"""A stream passes through: from the callback that receives a chunk straight into the client's connection.

Nothing is decoded and no task is woken for a chunk that is made of whole events, none of them an error or the end; such a
chunk even keeps its frame. Every other one goes through ``LegAnswer.feed``, which cuts events. Guarantees that the client gets
whole events only, nothing behind the stream's end or its error, and at most ``_HIGH`` bytes more than its connection takes:
beyond them the engine is no longer read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.router.legs import LegAnswer

_HIGH = 256 * 1024
_LOW = 64 * 1024
_LOOK = 0.02
"""Seconds between two looks at a client that was too slow."""


def joined(events: list[bytes]) -> bytes:
    """Events as they stand in a stream."""
    return b"\n\n".join(events) + b"\n\n"


class Relay:
    """One stream on its way, from its second piece on."""

    def __init__(self, leg: LegAnswer, client: asyncio.Transport, *, chunked: bool) -> None:
        self._leg = leg
        self._client = client
        self._chunked = chunked
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._slow = False
        self.pieces = 0

    async def run(self) -> None:
        """Return when the stream has ended well; raise what ended it otherwise (``ConnectionError``: the client left)."""
        self._leg.answer.relay(self._feed, self._end)
        await self._over

    def _feed(self, body: bytes, framed: bytes | None) -> None:
        leg = self._leg
        self.pieces += 1
        if (
            leg.between_events
            and body.endswith(b"\n\n")
            and b"data: [DONE]" not in body
            and b'data: {"error"' not in body
        ):
            self._write(body, framed)
            return
        if self._over.done():
            return
        if events := leg.feed(body):
            self._write(joined(events), None)
        if leg.failure is not None:
            self._fail(leg.failure)
        elif leg.finished:
            leg.answer.end()
            if not self._over.done():
                self._over.set_result(None)

    def _write(self, body: bytes, framed: bytes | None) -> None:
        client = self._client
        if client.is_closing():
            self._fail(ConnectionResetError("the client went away"))
            return
        if not self._chunked:
            client.write(body)
        else:
            client.write(framed or b"%x\r\n%b\r\n" % (len(body), body))
        if client.get_write_buffer_size() > _HIGH and not self._slow:
            self._slow = True
            self._leg.answer.pause()
            self._loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        if self._over.done():
            return
        if self._client.is_closing():
            self._fail(ConnectionResetError("the client went away"))
        elif self._client.get_write_buffer_size() > _LOW:
            self._loop.call_later(_LOOK, self._look)
        else:
            self._slow = False
            self._leg.answer.resume()

    def _end(self) -> None:
        """The engine's message is over; a stream that was whole has been told of by its last event already."""
        if not self._over.done():
            failure = self._leg.answer.failure
            self._fail(self._leg.cut_short() if failure is None else self._leg.told(failure))

    def _fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

"""A stream passes through: from the callback that receives chunks straight into the client's connection.

Nothing is decoded, copied or framed anew, and no task is woken, for chunks that are whole events, none of them an error or the
end: what one read brought is one write. Everything else goes through ``LegAnswer.feed``, which cuts events. Guarantees that the
client gets whole events only, nothing behind the stream's end or its error, and at most ``_HIGH`` bytes more than its connection
takes: beyond them the engine is no longer read.
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


def unframed(chunks: bytes) -> bytes:
    """Whole chunks without their frames."""
    pieces = []
    at = 0
    while at < len(chunks):
        line = chunks.index(b"\r\n", at)
        end = line + 2 + int(chunks[at:line], 16)
        pieces.append(chunks[line + 2 : end])
        at = end + 2
    return b"".join(pieces)


def _only_tokens(data: bytes) -> bool:
    return b"data: [DONE]" not in data and b'data: {"error"' not in data


class Relay:
    """One stream on its way, from its second piece on; what receives it calls ``chunks``, ``body`` and ``end``."""

    def __init__(self, leg: LegAnswer, client: asyncio.Transport, *, chunked: bool) -> None:
        self._leg = leg
        self._client = client
        self._chunked = chunked
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[bytes] = self._loop.create_future()
        self._slow = False
        self._between_events = leg.between_events
        self.pieces = 0

    async def run(self) -> bytes:
        """Return the last events when the stream has ended well: they are the caller's to write, with the end of the message.

        Raise what ended it otherwise (``ConnectionError``: the client left).
        """
        self._leg.answer.relay(self)
        return await self._over

    def chunks(self, framed: bytes, count: int) -> None:
        """Pass on whole chunks."""
        if self._chunked and self._between_events and _only_tokens(framed):
            self.pieces += count
            self._write(framed)
        else:
            self.body(unframed(framed))

    def body(self, data: bytes) -> None:
        """Pass on whole events of any other piece."""
        if self._over.done():
            return
        leg = self._leg
        self.pieces += data.count(b"\n\n")
        if self._between_events and data.endswith(b"\n\n") and _only_tokens(data):
            self._write(self._framed(data))
            return
        events = leg.feed(data)
        self._between_events = leg.between_events
        if leg.finished:
            leg.answer.end()
            self._over.set_result(joined(events))
            return
        if events:
            self._write(self._framed(joined(events)))
        if leg.failure is not None:
            self._fail(leg.failure)

    def end(self) -> None:
        """The engine's message is over; a stream that was whole has been told of by its last event already."""
        if not self._over.done():
            failure = self._leg.answer.failure
            self._fail(self._leg.cut_short() if failure is None else self._leg.told(failure))

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _write(self, data: bytes) -> None:
        client = self._client
        if client.is_closing():
            self._fail(ConnectionResetError("the client went away"))
            return
        client.write(data)
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

    def _fail(self, error: Exception) -> None:
        self._between_events = False  # nothing follows
        if not self._over.done():
            self._over.set_exception(error)

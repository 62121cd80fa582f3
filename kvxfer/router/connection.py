"""One HTTP/1.1 connection to an engine: what it sends is cut into head and body as it comes.

Guarantees: one exchange at a time; whoever reads sets the pace, beyond ``_HIGH`` bytes nothing is read from the socket; what does
not follow HTTP/1.1 is a ``BadAnswer``, never a guess; a connection is offered for another exchange only if its message was read
to the end, and nothing came behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

_END = b"\r\n\r\n"
_HEX = b"0123456789abcdefABCDEF"
_MAX_HEAD = 64 * 1024
_HIGH = 256 * 1024
_LINGER = 1.0
"""Seconds in which the rest of a message that nobody needs may come, so that the connection can be kept."""


class BadAnswer(ConnectionError):  # noqa: N818 -- reads as what came
    """The engine closed the connection too early, or what it sent is not HTTP/1.1."""


class Sink(Protocol):
    """Who takes a body in the very callback that receives it."""

    def chunks(self, framed: bytes, count: int) -> None:
        """So many whole chunks with their frames, each of them whole events."""
        ...

    def body(self, data: bytes) -> None:
        """Any other piece of the body, without frames."""
        ...

    def end(self) -> None:
        """The answer is over, well or not."""
        ...


def _size(text: bytes) -> int:
    """Read a chunk's size. Raises ValueError for more than digits: Python reads signs, ``0x`` and underscores, too."""
    if not text or text.translate(None, _HEX):
        raise ValueError(f"a chunk's size is {text[:20]!r}")
    return int(text, 16)


def _decimal(text: str) -> int:
    """Read a length, or a status. Raises ValueError."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text[:60]!r} is no number")
    return int(text)


def whole_events(data: bytes) -> int:
    """How many chunks ``data`` is, if it is whole chunks that each end with an event's blank line; 0 otherwise."""
    at = count = 0
    end = len(data)
    while at < end:
        line = data.find(b"\r\n", at, at + 18)
        try:
            size = _size(data[at:line])
        except ValueError:
            return 0
        at = line + 4 + size
        if size <= 0 or data[at - 4 : at] != b"\n\n\r\n":
            return 0
        count += 1
    return count


class Connection(asyncio.Protocol):
    """One connection to one engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._reset()
        self.idle: Callable[[Connection], None] | None = None
        """What to call when the message has ended and the connection can be used again."""
        self.gone = False
        self.released = True

    def _reset(self) -> None:
        self.head: asyncio.Future[None] = self._loop.create_future()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._rest = b""
        self._chunked = False
        self._left: int | None = None  # of the body, or of the present chunk; None: until the connection closes
        self._in_head = True
        self._trailers = False
        self._keep = True
        self.pieces: deque[bytes] = deque()
        self._held = 0
        self._paused = False
        self.complete = False
        self.failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Sink | None = None

    def begin(self, request: tuple[bytes, bytes]) -> None:
        """Send a request; the answer's head is there when ``head`` is done."""
        self._reset()
        self.released = False
        self._transport.writelines(request)

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Read the answer."""
        # The common case of a stream by far, between two chunks: whole ones, which can be passed on with their frames.
        if self.sink is not None and self._left == 0 and not self._rest and (count := whole_events(data)):
            self.sink.chunks(data, count)
            return
        try:
            self._feed(data)
        except BadAnswer as error:
            self.fail(error)
        except ValueError as error:
            self.fail(BadAnswer(f"the answer is not HTTP/1.1: {error}"))

    def eof_received(self) -> bool:
        """An end without a length ends here."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is over, well or not."""
        self.gone = True
        if not self.complete and not self._in_head and self._left is None and exc is None and not self._chunked:
            self._finish()
        elif not self.complete:
            told = "the engine closed the connection before its answer was complete"
            self.fail(BadAnswer(told if exc is None else f"{told}: {exc}"))

    # Reading.

    def _feed(self, data: bytes) -> None:
        if self.complete:
            if data:  # bytes that answer no request: whatever this is, it must answer nobody's next one
                self._keep = False
                self.abort()
            return
        data = self._rest + data if self._rest else data
        self._rest = b""
        if self._in_head:
            read = self._read_head(data)
            if read is None:
                return
            data = read
        if self._chunked:
            self._feed_chunks(data)
        elif self._left is None:
            self._take(data)
        else:
            self._take(data[: self._left])
            extra = data[self._left :]
            self._left -= min(self._left, len(data))
            if not self._left:
                self._finish(clean=not extra)

    def _read_head(self, data: bytes) -> bytes | None:
        """Read the head; return what follows it, or None while it is not whole."""
        while True:
            end = data.find(_END)
            if end < 0:
                if len(data) > _MAX_HEAD:
                    raise BadAnswer("the head of the answer is longer than 64 KiB")
                self._rest = data
                return None
            first, *lines = data[:end].decode("latin-1").split("\r\n")
            data = data[end + 4 :]
            version, _, rest = first.partition(" ")
            if version not in {"HTTP/1.1", "HTTP/1.0"}:
                raise BadAnswer(f"the answer begins with {first[:60]!r} and is not HTTP/1.1")
            self.status = _decimal(rest[:3])
            if self.status < 100 or self.status == 101:  # noqa: PLR2004 -- nobody has asked for another protocol
                raise BadAnswer(f"the answer's status is {self.status}")
            if self.status >= 200:  # noqa: PLR2004 -- an interim answer announces another
                break
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadAnswer(f"the answer has a header line without a colon: {line[:60]!r}")
            name, value = name.strip().lower(), value.strip()
            if name in {"content-length", "transfer-encoding"} and self.headers.get(name, value) != value:
                raise BadAnswer(f"the answer has more than one {name}")
            self.headers[name] = value
        connection = self.headers.get("connection", "").lower()
        self._keep = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
        encoding = self.headers.get("transfer-encoding", "").lower()
        if encoding not in {"", "chunked", "identity"}:
            raise BadAnswer(f"the answer's transfer encoding is {encoding[:60]!r}, and only chunked was offered")
        self._chunked = encoding == "chunked"
        length = self.headers.get("content-length")
        self._left = 0 if self._chunked else None if length is None else _decimal(length)
        if self.status in {204, 304}:  # they have no body, whatever else they say
            self._chunked, self._left = False, 0
        self._in_head = False
        if not self.head.done():
            self.head.set_result(None)
        if self._left == 0 and not self._chunked:
            self._finish(clean=not data)
        return data

    def _feed_chunks(self, data: bytes) -> None:
        pieces = []
        at, end = 0, len(data)
        while at < end and not self._trailers:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                if end - at > 4096:  # noqa: PLR2004
                    raise BadAnswer("the head of a chunk is longer than 4 KiB")
                break
            text = data[at:line]
            if text:
                size = _size(text.partition(b";")[0].rstrip(b" \t"))
                self._left, self._trailers = size, size == 0
            at = line + 2
        if pieces:
            self._take(b"".join(pieces))
        if self._trailers:
            self._feed_trailers(data[at:])
        else:
            self._rest = data[at:]

    def _feed_trailers(self, data: bytes) -> None:
        while True:
            line = data.find(b"\r\n")
            if line < 0:
                if len(data) > _MAX_HEAD:
                    raise BadAnswer("the trailers of the answer are longer than 64 KiB")
                self._rest = data
                return
            if not line:
                self._finish(clean=len(data) == 2)  # noqa: PLR2004
                return
            data = data[line + 2 :]

    def _take(self, data: bytes) -> None:
        if not data or self.released:
            return
        if self.sink is not None:
            self.sink.body(data)
            return
        self.pieces.append(data)
        self._held += len(data)
        if self._held > _HIGH:
            self.pause()
        self._wake()

    def _finish(self, *, clean: bool = True) -> None:
        self.complete = True
        self._keep = self._keep and clean and not self.gone
        self._wake()
        self._end_sink()
        if self.released:
            self._let_go()

    def fail(self, error: Exception) -> None:
        """End the exchange with an error."""
        if self.complete or self.failure is not None:
            return
        self.failure = error
        self.abort()
        if not self.head.done():
            self.head.set_exception(error)
            self.head.exception()  # told by whoever awaits it; nobody may
        self._wake()
        self._end_sink()

    def _end_sink(self) -> None:
        if self.sink is not None:
            sink, self.sink = self.sink, None
            sink.end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What readers call.

    async def wait(self) -> None:
        """Return when something has come, or the answer has ended."""
        if self.pieces or self.complete or self.failure is not None:
            return
        self.resume()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def taken(self) -> bytes:
        """Everything that is there."""
        data = b"".join(self.pieces) if len(self.pieces) != 1 else self.pieces[0]
        self.pieces.clear()
        self._held = 0
        return data

    def pause(self) -> None:
        """Read no more from the socket."""
        if not self._paused and not self.gone and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and not self.gone and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def release(self) -> None:
        """The reader leaves. Keep the connection if the message is over, or nearly."""
        if self.released:
            return
        self.released = True
        self.sink = None
        self.pieces.clear()
        if self.complete:
            self._let_go()
        else:
            self.abort()

    def linger(self) -> None:
        """The reader has all that it needs: keep the connection if the message ends within a moment."""
        if self.released:
            return
        if self.complete or self.failure is not None:
            self.release()
            return
        self.released = True
        self.sink = None
        self.resume()
        self._loop.call_later(_LINGER, self._end_of_linger, self.head)

    def _end_of_linger(self, of: asyncio.Future[None]) -> None:
        if self.head is of and not self.complete:
            self.abort()

    def _let_go(self) -> None:
        self.resume()
        if self._keep and not self.gone and self.idle is not None:
            self.idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once; the engine sees it."""
        self.gone = True
        self._transport.abort()

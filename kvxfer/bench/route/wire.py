"""HTTP/1.1 for both ends of a measurement: enough of it to be right, and too little to be what is measured.

A stand-in engine and a load generator that were made of an HTTP library would cost as much as the router between them.
These two classes read a message's head with one search, and its body by its length or its chunks.
"""

from __future__ import annotations

import asyncio
from typing import cast

_END = b"\r\n\r\n"
_HEAD = 64 * 1024


class Requests(asyncio.Protocol):
    """The server's end: whole requests of a connection, one after another, to ``asked``."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Hand on every request that is complete."""
        self._rest += data
        while (end := self._rest.find(_END)) >= 0:
            head = self._rest[:end]
            size = end + len(_END) + length_of(head)
            if len(self._rest) < size:
                return
            body, self._rest = self._rest[end + len(_END) : size], self._rest[size:]
            method, path, _ = head.split(b" ", 2)
            self.asked(method.decode(), path.decode(), head, body)
        if len(self._rest) > _HEAD and _END not in self._rest[:_HEAD]:
            self.transport.abort()

    def asked(self, method: str, path: str, head: bytes, body: bytes) -> None:
        """A whole request has come."""
        raise NotImplementedError

    def answer(self, body: bytes, *, status: str = "200 OK", kind: str = "application/json") -> None:
        """Send a whole answer."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)


def length_of(head: bytes) -> int:
    """The length of the body that a message's head announces, 0 for none."""
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    return 0 if at < 0 else int(lower[at + 17 :].split(b"\r\n", 1)[0])


def chunk(data: bytes) -> bytes:
    """Frame one piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

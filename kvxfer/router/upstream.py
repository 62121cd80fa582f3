"""The legs' own HTTP/1.1 client: what a general one spends on each chunk is most of what a router costs.

Guarantees: a connection is kept for another exchange only if its answer was read to the end of the message; closing an answer
earlier closes its connection, by which vLLM knows that nobody waits. A body may be handed on from the very callback that
receives it (``Answer.relay``), without a task being woken. An exchange is never repeated here: whether that is right is known to
the caller alone.
"""

from __future__ import annotations

import asyncio
import ssl as tls
from collections import deque
from typing import TYPE_CHECKING

from kvxfer.router.connection import BadAnswer, Connection, Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

__all__ = ["KEEP_ALIVE", "Answer", "BadAnswer", "CannotConnect", "Upstream"]

# uvicorn closes a connection that was idle for 5 s (vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A POST that meets this moment
# fails, so our side lets go first.
KEEP_ALIVE = 3.0
_MOST_IDLE = 1024


class CannotConnect(ConnectionError):  # noqa: N818
    """No connection could be made; nothing was sent."""


class Answer:
    """An answer whose head has come."""

    def __init__(self, connection: Connection, alarm: asyncio.TimerHandle) -> None:
        self._connection = connection
        self._alarm = alarm
        self._left = False  # the connection may be another exchange's by then
        self.status = connection.status
        self.headers = connection.headers

    async def next(self) -> bytes:
        """What has come since, waiting for something; empty at the end. Raises ``BadAnswer`` where the end is too early."""
        connection = self._connection
        while True:
            await connection.wait()
            if connection.pieces:
                return connection.taken()
            if connection.failure is not None:
                raise connection.failure
            if connection.complete:
                return b""

    async def read(self, most: int | None = None) -> bytes:
        """The whole body, or its first ``most`` bytes and a little more."""
        parts = []
        size = 0
        while data := await self.next():
            parts.append(data)
            size += len(data)
            if most is not None and size >= most:
                break
        return b"".join(parts)

    def relay(self, sink: Sink) -> None:
        """From now on give ``sink`` the body, and its end; ``failure`` tells how it ended."""
        connection = self._connection
        if connection.pieces:
            sink.body(connection.taken())
        if connection.complete or connection.failure is not None:
            sink.end()
        elif not self._left:
            connection.sink = sink
            connection.resume()

    @property
    def failure(self) -> Exception | None:
        """Why the answer ended too early."""
        return self._connection.failure

    def pause(self) -> None:
        """The client is slow: read no more."""
        if not self._left:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if not self._left:
            self._connection.resume()

    def end(self) -> None:
        """All that matters was read."""
        if not self._left:
            self._left = True
            self._alarm.cancel()
            self._connection.linger()

    def close(self) -> None:
        """Leave, whatever is still to come."""
        if not self._left:
            self._left = True
            self._alarm.cancel()
            self._connection.release()


class Upstream:
    """The connections to all engines."""

    def __init__(self, connect_timeout: float, ssl: tls.SSLContext | None = None) -> None:
        self._connect_timeout = connect_timeout
        self._ssl = ssl
        self._idle: dict[tuple[str, int, bool], deque[tuple[float, Connection]]] = {}

    async def post(
        self,
        url: URL,
        headers: Mapping[str, str],
        body: bytes,
        timeout: float,
    ) -> Answer:
        """Send one POST and return its answer when the head has come.

        ``timeout`` counts for the whole exchange: when it has passed the answer fails with ``TimeoutError``. Raises
        ``CannotConnect`` where nothing was sent, ``BadAnswer``, ``TimeoutError``.
        """
        loop = asyncio.get_running_loop()
        request = _request(url, headers, body)
        connection = await self._connection(url, min(self._connect_timeout, timeout))
        end = loop.call_later(timeout, connection.fail, asyncio.TimeoutError())
        try:
            connection.begin(request)
            await connection.head
        except BaseException:
            end.cancel()
            connection.release()
            raise
        return Answer(connection, end)

    async def _connection(self, url: URL, timeout: float) -> Connection:
        host, port, secure = url.raw_host or "", url.port or 0, url.scheme == "https"
        key = host, port, secure
        loop = asyncio.get_running_loop()
        kept = self._idle.get(key)
        while kept:
            since, connection = kept.pop()
            if not connection.gone and loop.time() - since < KEEP_ALIVE:
                return connection
            connection.abort()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(
                    Connection, host, port,
                    ssl=(self._ssl or True) if secure else None,
                    server_hostname=host if secure else None,
                ),
                timeout,
            )  # fmt: skip
        except asyncio.TimeoutError:
            raise CannotConnect(f"no connection within {timeout:g} s") from None
        except (OSError, tls.SSLError) as error:
            raise CannotConnect(str(error) or type(error).__name__) from None

        def idle(one: Connection) -> None:
            kept = self._idle.setdefault(key, deque())
            kept.append((loop.time(), one))
            while kept and (len(kept) > _MOST_IDLE or kept[0][1].gone):
                kept.popleft()[1].abort()

        connection.idle = idle
        return connection

    def close(self) -> None:
        """Close what is kept."""
        for kept in self._idle.values():
            for _, connection in kept:
                connection.abort()
        self._idle.clear()


def _request(url: URL, headers: Mapping[str, str], body: bytes) -> tuple[bytes, bytes]:
    host = f"{url.raw_host}:{url.port}" if ":" not in (url.raw_host or "") else f"[{url.raw_host}]:{url.port}"
    lines = [
        f"POST {url.raw_path_qs} HTTP/1.1",
        f"Host: {host}",
        "Accept-Encoding: identity",
        "User-Agent: kvxfer-router",
    ]
    for name, value in headers.items():
        if "\r" in value or "\n" in value:
            raise ValueError(f"the header {name} has a line break")
        lines.append(f"{name}: {value}")
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode(errors="surrogateescape"), body  # a client's headers byte for byte

"""The least that anything between can cost on this event loop: bytes from one connection to the other, unread.

It stands in the bench beside the router and the example proxies: what it needs for an event (a poll, a receive, a send) nobody
can save who passes events on one by one, so it says how far apart two proxies can be at all.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast


class Pipe(asyncio.Protocol):
    """One of two connections; what comes goes to the other."""

    def __init__(self) -> None:
        self.other: Pipe | None = None
        self.transport: asyncio.Transport
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def joined(self, other: Pipe) -> None:
        """The other connection is there."""
        self.other = other
        if self._early:
            other.transport.write(self._early)

    def data_received(self, data: bytes) -> None:
        """Hand it on."""
        if self.other is None:
            self._early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Both end together."""
        if self.other is not None:
            self.other.transport.abort()


class Front(Pipe):
    """A client's connection, which opens one to an engine."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the other one."""
        super().connection_made(transport)
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        _, other = await asyncio.get_running_loop().create_connection(Pipe, "127.0.0.1", self._port)
        other.joined(self)
        self.joined(other)


async def serve(port: int, engines: list[int]) -> None:
    """Listen for ever; the engines take turns."""
    turn = 0

    def front() -> Front:
        nonlocal turn
        turn += 1
        return Front(engines[turn % len(engines)])

    server = await asyncio.get_running_loop().create_server(front, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("engines", type=int, nargs="+")
    asked = parser.parse_args()
    import uvloop

    uvloop.run(serve(asked.port, asked.engines))


if __name__ == "__main__":
    main()

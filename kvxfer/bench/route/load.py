"""The load generator: so many streams at a time for so long; when the first token came, and how many events.

Its own limit is measured by pointing it at a stand-in engine with nothing between (``kvxfer bench route`` does so in every
run): what it reads there is what it could read, and its latency there is what is not the router's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast

_EVENT = b"data: "
_DONE = b"data: [DONE]"
_LAST = b"0\r\n\r\n"


@dataclass
class Counts:
    """What was seen."""

    requests: int = 0
    failed: int = 0
    events: int = 0
    first: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        """Count a failure and keep the first few."""
        self.failed += 1
        if len(self.errors) < 5:  # noqa: PLR2004
            self.errors.append(what)


class Stream(asyncio.Protocol):
    """One connection, one stream after another."""

    def __init__(self, request: bytes, counts: Counts) -> None:
        self._request = request
        self._counts = counts
        self._transport: asyncio.Transport
        self._sent = 0.0
        self._got_first = False
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def ask(self) -> asyncio.Future[bool]:
        """Send the request; the future's result says whether the connection can be used again."""
        self.ended = asyncio.get_running_loop().create_future()
        self._got_first, self._tail = False, b""
        self._sent = time.perf_counter()
        self._transport.write(self._request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        """Count events."""
        counts = self._counts
        found = data.count(_EVENT)
        if not self._got_first:
            if not (self._tail or data).startswith(b"HTTP/1.1 200"):
                counts.fail((self._tail + data)[:300].decode(errors="replace"))
                self._end(again=False)
                return
            if not found:
                self._tail = data
                return
            self._got_first = True
            counts.first.append(time.perf_counter() - self._sent)
        counts.events += found
        if data.endswith(_LAST) or (self._tail + data).endswith(_LAST):
            if _DONE not in self._tail + data:
                counts.fail("the stream ended without [DONE]")
            counts.requests += 1
            self._end(again=True)
            return
        self._tail = data[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits must know."""
        if not self.ended.done():
            self._counts.fail(f"the connection was lost: {exc}")
            self._end(again=False)

    def close(self) -> None:
        """Leave."""
        self._transport.abort()

    def _end(self, *, again: bool) -> None:
        if not self.ended.done():
            self.ended.set_result(again)


def request_of(host: str, body: dict[str, object]) -> bytes:
    """One POST /v1/completions."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


async def load(
    ports: list[int], streams: int, seconds: float, tokens: int, ramp: float, requests: int
) -> dict[str, object]:
    """Keep ``streams`` streams open for ``seconds`` (or until ``requests`` were begun); only what is after ``ramp`` counts."""
    loop = asyncio.get_running_loop()
    counts = Counts()
    body: dict[str, object] = {"model": "stand-in", "prompt": "once upon a time", "max_tokens": tokens, "stream": True}
    begun = 0
    start = loop.time()

    def over() -> bool:
        return begun >= requests if requests else loop.time() - start > seconds

    async def worker(number: int) -> None:
        nonlocal begun
        await asyncio.sleep(ramp * number / streams)
        port = ports[number % len(ports)]
        connection: Stream | None = None
        while not over():
            begun += 1
            if connection is None:
                _, connection = await loop.create_connection(
                    lambda: Stream(request_of(f"127.0.0.1:{port}", body), counts), "127.0.0.1", port
                )
            if not await connection.ask():
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    mark, window_from = 0, start

    async def windows() -> None:
        """Drop what came while the streams were being opened."""
        nonlocal mark, window_from
        await asyncio.sleep(ramp)
        counts.first = []
        mark, window_from = counts.events, loop.time()

    opening = asyncio.ensure_future(windows())
    workers = [asyncio.ensure_future(worker(number)) for number in range(streams)]
    if not requests:
        await asyncio.sleep(seconds)
        events, window = counts.events - mark, loop.time() - window_from
    await asyncio.gather(*workers)
    if requests:
        events, window = counts.events - mark, loop.time() - window_from
    opening.cancel()
    return {
        "requests": counts.requests,
        "failed": counts.failed,
        "errors": counts.errors,
        "events": events,
        "seconds": window,
        "events_per_s": events / window,
        "first_ms": [round(1000 * one, 3) for one in sorted(counts.first)],
        "processor_s": time.process_time(),
    }


def main() -> None:
    """See the module; prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--ramp", type=float, default=2)
    parser.add_argument("--requests", type=int, default=0)
    asked = parser.parse_args()
    import uvloop

    print(
        json.dumps(
            uvloop.run(load(asked.ports, asked.streams, asked.seconds, asked.tokens, asked.ramp, asked.requests))
        )
    )


if __name__ == "__main__":
    main()

"""The load generator: so many streams at a time for so long; when the first token came, and how many events.

It may keep other streams open beside them that go straight to the engines: whatever else the machine does strikes both kinds
alike, so their difference is what is between. Its own limit is measured by pointing it at stand-in engines with nothing between
(``kvxfer bench route`` does so in every run): what it reads there is what it could read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import cast

_EVENT = b"data: "
_DONE = b"data: [DONE]"
_LAST = b"0\r\n\r\n"
_FRAME = re.compile(rb"\r\n[0-9a-f]+\r\n")


@dataclass
class Counts:
    """What was seen."""

    requests: int = 0
    failed: int = 0
    events: int = 0
    first: list[tuple[float, float]] = field(default_factory=list)
    """Of each stream: when it was asked for, and the seconds until its first token."""
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
            counts.first.append((self._sent, time.perf_counter() - self._sent))
        counts.events += found
        if data.endswith(_LAST) or (self._tail + data).endswith(_LAST):
            if _DONE not in _FRAME.sub(
                b"", (self._tail + data)[-256:]
            ):  # a proxy may frame anew, in the midst of an event
                counts.fail("the stream ended without [DONE]")
            counts.requests += 1
            self._end(again=True)
            return
        self._tail = (self._tail + data)[-64:] if len(data) < 64 else data[-64:]  # noqa: PLR2004

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


@dataclass(frozen=True)
class Wanted:
    """One kind of load: so many streams at a time, on these ports."""

    ports: list[int]
    streams: int
    tokens: int = 100
    requests: int = 0
    """So many in all; 0: until the time is over."""


async def load(wanted: Wanted, seconds: float, ramp: float, beside: Wanted | None = None) -> dict[str, object]:
    """Keep those streams open for ``seconds`` (or until all requests were begun); only what is after ``ramp`` counts.

    What was counted of ``wanted``; under ``beside`` that of the other streams, which last as long.
    """
    loop = asyncio.get_running_loop()
    counts, others = Counts(), Counts()
    start = loop.time()
    begun = 0

    def over() -> bool:
        return begun >= wanted.requests if wanted.requests else loop.time() - start > seconds

    async def worker(number: int, kind: Wanted, into: Counts) -> None:
        nonlocal begun
        await asyncio.sleep(ramp * number / kind.streams)
        port = kind.ports[number % len(kind.ports)]
        body = {"model": "stand-in", "prompt": "once upon a time", "max_tokens": kind.tokens, "stream": True}
        connection: Stream | None = None
        while not over():
            begun += kind is wanted
            if connection is None:
                _, connection = await loop.create_connection(
                    lambda: Stream(request_of(f"127.0.0.1:{port}", body), into), "127.0.0.1", port
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
        counts.first, others.first = [], []
        mark, window_from = counts.events, loop.time()

    opening = asyncio.ensure_future(windows())
    workers = [
        asyncio.ensure_future(worker(number, kind, into))
        for kind, into in ((wanted, counts), (beside, others))
        if kind is not None
        for number in range(kind.streams)
    ]
    if not wanted.requests:
        await asyncio.sleep(seconds)
        events, window = counts.events - mark, loop.time() - window_from
    await asyncio.gather(*workers)
    if wanted.requests:
        events, window = counts.events - mark, loop.time() - window_from
    opening.cancel()
    found = told(counts) | {
        "events": events,
        "seconds": window,
        "events_per_s": events / window,
        "processor_s": time.process_time(),
        "all_events": counts.events,
    }
    return found if beside is None else found | {"beside": told(others)}


def told(counts: Counts) -> dict[str, object]:
    """What was seen, as JSON has it."""
    return {
        "requests": counts.requests,
        "failed": counts.failed,
        "errors": counts.errors,
        "first": [(round(when, 4), round(1000 * took, 3)) for when, took in sorted(counts.first)],
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
    parser.add_argument("--beside", type=int, nargs="*", default=[], help="ports of other streams, a quarter as many")
    asked = parser.parse_args()
    import uvloop

    wanted = Wanted(asked.ports, asked.streams, asked.tokens, asked.requests)
    beside = Wanted(asked.beside, max(asked.streams // 4, 1), asked.tokens) if asked.beside else None
    print(json.dumps(uvloop.run(load(wanted, asked.seconds, asked.ramp, beside))))


if __name__ == "__main__":
    main()

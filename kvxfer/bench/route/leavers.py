"""Clients that leave: one request in ten is broken off at a random moment; how long its legs go on in the engines.

Requests are told apart by their prompts, which are numbers; the stand-in engines note when each one's last leg ended, by the
monotonic clock that all processes of a host share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import urllib.request
from typing import Any

from kvxfer.bench.route.load import Counts, Stream, request_of

SHARE = 10
"""One request in so many leaves."""
_AT_ONCE = 50
_PATIENCE = 15.0


async def leave(
    port: int, requests: int, tokens: int, longest: float, seed: int = 7
) -> tuple[Counts, dict[str, float]]:
    """Send so many requests; what was counted of those that stayed, and when each of the others left."""
    counts = Counts()
    chance = random.Random(seed)  # noqa: S311 -- a load, not a secret
    left: dict[str, float] = {}
    free = asyncio.Semaphore(_AT_ONCE)
    loop = asyncio.get_running_loop()

    async def one(number: int, stays: float | None) -> None:
        body = {"model": "stand-in", "prompt": str(number), "max_tokens": tokens, "stream": True}
        raw = request_of(f"127.0.0.1:{port}", body)
        async with free:
            into = counts if stays is None else Counts()
            _, stream = await loop.create_connection(lambda: Stream(raw, into), "127.0.0.1", port)
            ended = stream.ask()
            if stays is None:
                await ended
            else:
                await asyncio.wait({ended}, timeout=stays)
                if not ended.done():
                    left[str(number)] = time.monotonic()
            stream.close()

    moments = [None if number % SHARE else chance.random() * longest for number in range(requests)]
    first = port * 1_000_000  # another run against the same engines has other numbers
    await asyncio.gather(*(one(first + number, stays) for number, stays in enumerate(moments)))
    return counts, left


def outlived(left: dict[str, float], engines: list[dict[str, Any]]) -> list[float]:
    """Seconds by which the last leg of each client outlived it, in order; 0 where all had ended."""
    return sorted(
        max(0.0, *(engine["ended"].get(number, 0.0) - when for engine in engines)) for number, when in left.items()
    )


def legs_of(ports: list[int]) -> list[dict[str, Any]]:
    """What the engines know, when no leg is open any more, or patience has ended."""
    end = time.monotonic() + _PATIENCE
    while True:
        found = []
        for port in ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/legs", timeout=5) as answer:
                found.append(json.load(answer))
        if not any(one["open"] for one in found) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def main() -> None:
    """See the module; prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("engines", type=int, nargs="+", help="the engines' own ports")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--longest", type=float, default=0.4, help="the latest moment at which one leaves, in seconds")
    asked = parser.parse_args()
    import uvloop

    counts, left = uvloop.run(leave(asked.port, asked.requests, asked.tokens, asked.longest))
    engines = legs_of(asked.engines)
    print(
        json.dumps(
            {
                "requests": asked.requests,
                "whole": counts.requests,
                "failed": counts.failed,
                "errors": counts.errors,
                "left": len(left),
                "open": sum(len(one["open"]) for one in engines),
                "outlived_s": outlived(left, engines),
            }
        )
    )


if __name__ == "__main__":
    main()

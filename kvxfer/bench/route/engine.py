"""Stand-in engines: they speak vLLM's HTTP as a kvxfer engine does, and send tokens at a pace that is given.

One process plays several engines, each on a port of its own, so that two cores suffice for a whole measurement. Every
``interval`` each stream gets one event in a write of its own, and the streams are spread over the interval: vLLM's API server,
too, needs time for each stream's token of a step. With ``--catch-up`` an engine that is behind sends what it owes by then in one
write, each token still an event in a chunk of its own: so it offers more than what stands before it can take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from kvxfer.bench.route.wire import LAST_CHUNK, STREAM_HEAD, Requests, chunk

_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1764500000,"model":"stand-in",'
    b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":%b,"stop_reason":null}],"usage":null}\n\n'
)
_SLOTS = 20
_TOKEN = chunk(_EVENT % b"null")
_END = chunk(_EVENT % b'"length"') + chunk(b"data: [DONE]\n\n") + LAST_CHUNK


@dataclass
class Legs:
    """What became of the requests whose prompt is a number: how long a leg outlives its client is found by it."""

    open: dict[Connection, str] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    """By prompt: the moment of this host's monotonic clock at which the last leg ended, well or not."""

    def begin(self, connection: Connection, prompt: Any) -> None:
        """Note a leg that can be told from others."""
        if isinstance(prompt, str) and prompt.isdecimal():
            self.open[connection] = prompt

    def end(self, connection: Connection) -> None:
        """Note its end."""
        prompt = self.open.pop(connection, None)
        if prompt is not None:
            self.ended[prompt] = time.monotonic()

    def told(self) -> bytes:
        """The answer to ``GET /legs``."""
        return json.dumps({"open": sorted(self.open.values()), "ended": self.ended}).encode()


@dataclass
class Pace:
    """How fast: seconds to the first token, seconds between tokens, and whether what was owed meanwhile comes with the next."""

    first: float
    interval: float
    catch_up: bool = False
    legs: Legs = field(default_factory=Legs)
    slots: list[dict[Connection, int]] = field(default_factory=lambda: [{} for _ in range(_SLOTS)])
    """Who is owed how many tokens, by when in the interval."""
    _next: int = 0

    def slot(self) -> dict[Connection, int]:
        """The place of a new stream."""
        self._next = (self._next + 1) % _SLOTS
        return self.slots[self._next]

    async def run(self) -> None:
        """Send one token to every stream, each ``interval``, for ever."""
        loop = asyncio.get_running_loop()
        sent = [loop.time()] * _SLOTS
        due = loop.time()
        while True:
            for number, slot in enumerate(self.slots):
                due = max(due + self.interval / _SLOTS, loop.time())
                await asyncio.sleep(max(due - loop.time(), 0))
                now = loop.time()
                owed = max(round((now - sent[number]) / self.interval), 1) if self.catch_up else 1
                sent[number] = now
                for stream in tuple(slot):
                    stream.tokens(owed)


class Connection(Requests):
    """One connection to one of the engines."""

    def __init__(self, role: str, number: int, pace: Pace) -> None:
        super().__init__()
        self._role = role
        self._name = f"{role}-{number}"
        self._port = 5600 + number
        self._pace = pace
        self._slot = pace.slot()

    def asked(self, method: str, path: str, head: bytes, body: bytes) -> None:  # noqa: ARG002
        """Answer like vLLM."""
        if path == "/metrics":
            self.answer(self._metrics(), kind="text/plain")
        elif path == "/legs":
            self.answer(self._pace.legs.told())
        elif path == "/v1/models":
            self.answer(b'{"object":"list","data":[{"id":"stand-in","object":"model"}]}')
        elif path.endswith("/completions") and method == "POST":
            self._complete(json.loads(body))
        else:
            self.answer(b"", kind="text/plain")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Forget the stream, as vLLM aborts its request."""
        self._slot.pop(self, None)
        self._pace.legs.end(self)

    def _complete(self, body: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        params = body.get("kv_transfer_params") or {}
        self._pace.legs.begin(self, body.get("prompt"))
        if params.get("kvxfer_probe"):
            self._whole()
        elif body.get("stream"):
            loop.call_later(self._pace.first, self._begin, int(body.get("max_tokens") or 16))
        else:
            # Decode has the KV when prefill has computed it: prefill's answer is there a little before.
            loop.call_later(self._pace.first * 0.8, self._whole)

    def _whole(self) -> None:
        params = None
        if self._role == "prefill":
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self._name,
                "remote_host": "127.0.0.1",
                "remote_port": self._port,
                "tp_size": 1,
                "remote_block_ids": [[1, 2, 3]],
            }
        answer = {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": 1,
            "model": "stand-in",
            "choices": [{"index": 0, "text": " token", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 64, "completion_tokens": 1, "total_tokens": 65},
            "kv_transfer_params": params,
        }
        self._pace.legs.end(self)
        if not self.transport.is_closing():
            self.answer(json.dumps(answer).encode())

    def _begin(self, tokens: int) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(STREAM_HEAD + _TOKEN)
        self._slot[self] = tokens - 1

    def tokens(self, owed: int) -> None:
        """Send the next tokens, in one write."""
        left = self._slot.get(self)
        if left is None:
            return
        if left > owed:
            self._slot[self] = left - owed
            self.transport.write(_TOKEN * owed)
        else:
            del self._slot[self]
            self._pace.legs.end(self)
            self.transport.write(_TOKEN * (left - 1) + _END)

    def _metrics(self) -> bytes:
        role = "kv_producer" if self._role == "prefill" else "kv_consumer"
        labels = {"engine": "0", "engine_id": self._name, "host": "127.0.0.1", "port": str(self._port), "tp_size": "1"}
        labels |= {"pp_size": "1", "role": role, "mode": "push", "wire": "1"}
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return f"kvxfer_info{{{text}}} 1.0\n".encode()


async def serve(prefill: int, decode: int, pace: Pace) -> None:
    """Serve that many engines; print their ports as one line of JSON; end with standard input."""
    loop = asyncio.get_running_loop()
    ports: dict[str, list[int]] = {"prefill": [], "decode": []}
    for role, count in (("prefill", prefill), ("decode", decode)):
        for number in range(count):
            server = await loop.create_server(
                lambda role=role, number=number: Connection(role, number, pace),  # type: ignore[misc]
                "127.0.0.1", 0, backlog=4096,
            )  # fmt: skip
            ports[role].append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    ticking = asyncio.ensure_future(pace.run())
    await loop.run_in_executor(None, sys.stdin.read)
    ticking.cancel()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--first", type=float, default=0.1)
    parser.add_argument("--interval", type=float, default=0.02)
    parser.add_argument("--catch-up", action="store_true")
    asked = parser.parse_args()
    import uvloop

    uvloop.run(serve(asked.prefill, asked.decode, Pace(asked.first, asked.interval, asked.catch_up)))


if __name__ == "__main__":
    main()

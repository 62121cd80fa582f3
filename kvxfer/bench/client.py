"""A small client of the OpenAI completions API that keeps time and gets token ids back.

Greedy by default, to ``max_tokens`` whatever the model says, with ``return_token_ids`` (vLLM 0.29 and 0.32 have it), so
that two engines' answers can be compared number by number rather than by their text. vLLM then sends the prompt's ids as well,
in the first event, which is large for a long prompt. Where time is what matters, ask for none (``token_ids`` False): each event
counts as an arrival, and the tokens are those that vLLM says there were. Times are the client's own:

- TTFT: from sending the request to the arrival of the first token
- TPOT: from the first to the last token's arrival, for each token after the first

Not streamed, an answer has neither: only the seconds that the whole took.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import aiohttp
import msgspec

from kvxfer.bench.engines import MODEL_NAME
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

_LINE_LIMIT = 1 << 22  # one event may carry a long prompt's token ids
_KEPT_ALIVE = (
    4.0  # seconds; vLLM's server closes what was idle for 5 s, and may do so in the moment of the next request
)
_OK = 200


class RequestError(KvxferError):
    """The server refused a request or broke off its answer. ``status`` is the HTTP status (200: in the stream)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. ``ttft`` and ``tpot`` in seconds, None where they cannot be told."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float
    ttft: float | None = None
    tpot: float | None = None
    finish_reason: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    started: float = 0.0
    """When it was asked for, by ``time.perf_counter``."""
    tokens: int = 0
    """How many were answered, by vLLM's own count where their ids were not asked for."""
    gaps: tuple[float, ...] = ()
    """Seconds from each arrival of tokens to the next: inter-token latencies, as long as tokens come one by one."""


@dataclass(slots=True)
class _Arrivals:
    """What a stream has brought so far, and when."""

    started: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    counted: int | None = None
    finish_reason: str | None = None
    ids_asked: bool = True

    def add(self, choice: Mapping[str, Any], now: float) -> None:
        # A chat event's token ids stand beside its delta, as a completion's stand beside its text.
        delta = choice.get("delta")
        self.text += (choice.get("text") if delta is None else delta.get("content")) or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        token_ids = choice.get("token_ids")
        self.token_ids += token_ids or ()
        if token_ids or not self.ids_asked:
            self.times.append(now)

    def completion(self, now: float) -> Completion:
        times = self.times
        tokens = len(self.token_ids) if self.counted is None else self.counted
        tpot = (
            (times[-1] - times[0]) / (tokens - 1) if len(times) > 1 and tokens > 1 else None
        )  # all at once tells nothing
        return Completion(
            token_ids=tuple(self.token_ids),
            text=self.text,
            seconds=now - self.started,
            ttft=times[0] - self.started if times else None,
            tpot=tpot,
            finish_reason=self.finish_reason,
            started=self.started,
            tokens=tokens,
            gaps=tuple(later - sooner for sooner, later in pairwise(times)),
        )


@final
class Client:
    """A client of one server; use it in an ``async with`` block. Any number of requests may run at once."""

    def __init__(self, url: str, *, model: str = MODEL_NAME, timeout: float = 120.0) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_ALIVE),
            read_bufsize=_LINE_LIMIT,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 16,
        *,
        stream: bool = True,
        token_ids: bool = True,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Completion:
        """Send one prompt, text or token ids, to ``/v1/completions``; ``extra`` is added to the body."""
        body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens}
        if not token_ids:
            body |= {"return_token_ids": False, **({"stream_options": {"include_usage": True}} if stream else {})}
        return await self._send("/v1/completions", body, stream=stream, extra=extra, headers=headers)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int = 16,
        *,
        stream: bool = True,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Completion:
        """Send a conversation to ``/v1/chat/completions``."""
        body = {"messages": list(messages), "max_tokens": max_tokens}
        return await self._send("/v1/chat/completions", body, stream=stream, extra=extra, headers=headers)

    async def metrics(self) -> str:
        """The server's ``/metrics``. Raises RequestError when it cannot be had."""
        assert self._session is not None, "use the client in an async with block"
        try:
            async with self._session.get(f"{self._url}/metrics") as response:
                return await response.text()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise RequestError(0, f"{self._url}/metrics: {type(error).__name__}: {error}") from error

    async def _send(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        stream: bool,
        extra: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
    ) -> Completion:
        assert self._session is not None, "use the client in an async with block"
        whole = {"model": self._model, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **body}
        whole["stream"] = stream
        extra = extra or {}
        asked = {**whole, **extra}
        started = time.perf_counter()
        try:
            data = _packed(whole, extra)
            content = {"Content-Type": "application/json", **(headers or {})}
            async with self._session.post(f"{self._url}{path}", data=data, headers=content) as response:
                if response.status != _OK:
                    raise RequestError(
                        response.status, f"{self._url}{path}: {response.status}: {await response.text()}"
                    )
                if stream:
                    return await self._streamed(response, path, started, ids_asked=asked["return_token_ids"])
                answer = await response.json()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise RequestError(0, f"{self._url}{path}: {type(error).__name__}: {error}") from error
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return Completion(
            token_ids=tuple(choice.get("token_ids") or ()),
            text=text or "",
            seconds=time.perf_counter() - started,
            started=started,
            tokens=(answer.get("usage") or {}).get("completion_tokens", len(choice.get("token_ids") or ())),
            finish_reason=choice.get("finish_reason"),
            kv_transfer_params=answer.get("kv_transfer_params"),
        )

    async def _streamed(
        self, response: aiohttp.ClientResponse, path: str, started: float, *, ids_asked: bool
    ) -> Completion:
        arrivals = _Arrivals(started, ids_asked=ids_asked)
        async for event in _events(response):
            now = time.perf_counter()
            if event is None and arrivals.finish_reason is None:
                # vLLM 0.29 leaves the error out of a completion's stream that failed before its first token.
                raise RequestError(_OK, f"{self._url}{path}: the stream ended without a finish_reason: it failed")
            if event is None:
                return arrivals.completion(now)
            if "error" in event:
                raise RequestError(_OK, f"{self._url}{path}: {event['error']}")
            for choice in event.get("choices", ()):
                arrivals.add(choice, now)
            if not ids_asked and event.get("usage"):
                arrivals.counted = event["usage"]["completion_tokens"]
        raise RequestError(_OK, f"{self._url}{path}: the stream ended before it was finished")


def _packed(whole: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """Encode a request. It is a part of the time that is kept: a long prompt's ids take Python's own encoder a millisecond.

    What is ``extra`` may be what no careful encoder takes (lone surrogates, numbers that are none): a server must bear it.
    """
    packed = msgspec.json.encode({key: value for key, value in whole.items() if key not in extra})
    return packed[:-1] + b"," + json.dumps(extra).encode()[1:] if extra else packed


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """The data of each server-sent event; None for ``[DONE]``."""
    async for raw in response.content:
        line = raw.strip()
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            yield None if data == b"[DONE]" else json.loads(data)

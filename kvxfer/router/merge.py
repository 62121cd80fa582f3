"""The answers of single requests become the one answer that the client asked for.

Guarantees: every choice carries its index (prompt index × n + child index), one id, one ``created`` and one model for
the whole answer, and one usage: a prompt's tokens counted once however many children it has, completion tokens summed. A
merged stream has at most one usage chunk, just before its single ``[DONE]``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.router.openai import DONE, ApiError, Json, read_json
from kvxfer.router.split import CHAT, ClientRequest, SingleRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DATA = b"data:"
_COUNTS = ("prompt_tokens", "completion_tokens")
# They describe one request inside one engine; vLLM itself leaves its metrics out where there are several.
_OF_ONE_REQUEST = ("metrics", "kv_transfer_params", "ec_transfer_params")


def merge_usage(parts: Iterable[tuple[SingleRequest, Json | None]]) -> Json | None:
    """Sum the usages; None where no engine sent one."""
    total: Json = {}
    for single, usage in parts:
        if usage is None:
            continue
        for name, value in usage.items():
            if name.startswith("prompt_") and single.child_index:
                continue
            total[name] = _add(total.get(name), value)
    if not total:
        return None
    total["total_tokens"] = (total.get("prompt_tokens") or 0) + (total.get("completion_tokens") or 0)
    return total


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {name: _add(one.get(name), value) for name, value in other.items()}
    if one is None or other is None:
        return other if one is None else one
    return one + other if isinstance(one, int) and isinstance(other, int) else one


def answer_id(request: ClientRequest) -> str:
    """The id of the whole answer, in vLLM's form."""
    return f"{'chatcmpl' if request.path == CHAT else 'cmpl'}-{request.request_id}"


def merge_answers(request: ClientRequest, bodies: Sequence[bytes]) -> bytes:
    """One answer out of the single answers, which are in the order of ``request.singles``."""
    answers = [_answer(body) for body in bodies]
    choices = []
    for single, answer in zip(request.singles, answers, strict=True):
        for choice in answer["choices"]:
            choice["index"] = single.index
            choices.append(choice)
    merged = answers[0] | {"id": answer_id(request), "choices": choices}
    for name in _OF_ONE_REQUEST:
        if name in merged:
            merged[name] = None
    usage = merge_usage((single, answer.get("usage")) for single, answer in zip(request.singles, answers, strict=True))
    if usage is not None:
        merged["usage"] = usage
    return msgspec.json.encode(merged)


def _answer(body: bytes) -> Json:
    answer = _read(body, "an answer")
    if answer.get("choices") is None:
        raise ApiError(502, "decode leg: an answer that must be merged has no choices")
    return answer


def _read(raw: bytes, what: str) -> Json:
    """An engine's JSON, of which at least what is merged has OpenAI's shape."""
    try:
        found = read_json(raw)
    except ValueError as error:
        raise ApiError(502, f"decode leg: {what} that must be merged is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(502, f"decode leg: {what} that must be merged is not an object")
    choices, usage = found.get("choices"), found.get("usage")
    if choices is not None and not (isinstance(choices, list) and all(isinstance(one, dict) for one in choices)):
        raise ApiError(502, f"decode leg: {what} that must be merged has choices that are no list of objects")
    if usage is not None and not (isinstance(usage, dict) and all(map(_countable, map(usage.get, _COUNTS)))):
        raise ApiError(502, f"decode leg: {what} that must be merged has a usage that counts no tokens")
    return found


def _countable(count: Any) -> bool:
    return count is None or isinstance(count, int)


class StreamMerger:
    """Rewrites the events of single streams into one stream's. Keeps one usage a single, and nothing else."""

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._common: Json = {"id": answer_id(request), "created": int(time.time())}
        self._last: Json = {}
        self._usages: dict[int, Json] = {}

    def add(self, single: SingleRequest, events: Iterable[bytes]) -> bytes:
        """Rewrite what one single stream sent; its ``[DONE]`` and its usage chunk wait for ``end``."""
        out = []
        for event in events:
            if event == DONE:
                continue
            if not event.startswith(_DATA):
                out.append(event + b"\n\n")  # a comment keeps the client's connection alive too
                continue
            chunk = _chunk(event)
            choices = chunk.get("choices")
            if not choices and chunk.get("usage"):
                self._usages[single.index] = chunk["usage"]
                self._last = {name: value for name, value in chunk.items() if name not in _OF_ONE_REQUEST}
                continue
            for choice in choices or ():
                choice["index"] = single.index
            self._common.setdefault("model", chunk.get("model"))
            out.append(_event(chunk | self._common))
        return b"".join(out)

    def end(self) -> bytes:
        """The usage chunk, if the engines sent any, and ``[DONE]``."""
        usage = merge_usage((single, self._usages.get(single.index)) for single in self._request.singles)
        last = b"" if usage is None else _event(self._last | self._common | {"choices": [], "usage": usage})
        return last + DONE + b"\n\n"


def _chunk(event: bytes) -> Json:
    return _read(event[len(_DATA) :], "an event of a stream")


def _event(chunk: Json) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

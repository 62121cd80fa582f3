"""One client request becomes single requests: one prompt, one choice each.

Why: vLLM copies one ``kv_transfer_params`` to every prompt of a list and to every child of n > 1, so that several
requests on both sides would share one transfer id (0.29 entrypoints/openai/completion/protocol.py, to_sampling_params).
A single request has an id of its own, the same on both legs, and nothing to be confused with.

Guarantees that the single requests of one client request together ask for what the client asked for, in vLLM's order:
choice index = prompt index × n + child index; child ``c`` samples with ``seed + c`` as in vLLM's own parallel sampling
(0.29 v1/engine/parallel_sampling.py). What cannot be kept is refused with a 400 that names the field.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from kvxfer.router.openai import ApiError, Json, read_json

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class SingleRequest:
    """One prompt and one choice. ``body`` is the client's, without any field that only the router may set."""

    path: str
    body: Json
    prompt_index: int
    child_index: int
    index: int
    request_id: str
    transfer_id: str

    def again(self, attempt: int) -> SingleRequest:
        """The same request for another try, under ids that no engine has met."""
        request_id = f"{self.request_id.partition('-r')[0]}-r{attempt}"
        return replace(
            self,
            body=self.body | {"request_id": request_id},
            request_id=request_id,
            transfer_id=f"xfer-{uuid.uuid4()}",
        )


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A checked request and the single requests that it is made of."""

    path: str
    stream: bool
    request_id: str
    singles: tuple[SingleRequest, ...]
    conversation_id: str | None = None
    """As the body named it."""
    client_params: Json = field(default_factory=dict)
    """``kv_transfer_params`` of the body; they reach an engine only from a trusted client."""


def read_request(path: str, raw: bytes, max_singles: int) -> ClientRequest:
    """Check a request's body and split it; raise ``ApiError`` 400 naming the field that is wrong."""
    body = _decode(raw)
    stream = _optional(body, "stream", bool, "a boolean") or False
    _optional(body, "stream_options", dict, "an object")
    seed = _optional(body, "seed", int, "an integer")
    if seed is not None and abs(seed) >= 1 << 64:
        raise ApiError(400, "seed is no integer of 64 bits", param="seed")
    n = _optional(body, "n", int, "an integer")
    n = 1 if n is None else n
    if (
        abs(n) >= 1 << 64
    ):  # Python writes no number of more than 4,300 digits, and products have more than their factors
        raise ApiError(400, "n is no integer of 64 bits", param="n")
    if n < 1:
        raise ApiError(400, f"n is {n}; it must be at least 1", param="n")
    _refuse(body, n)
    prompts = _prompts(body) if path == COMPLETIONS else _messages(body)
    if len(prompts) * n > max_singles:
        raise ApiError(
            400,
            f"{len(prompts)} prompts × n {n} make {len(prompts) * n} requests; this router takes at most "
            f"{max_singles} at once (--max-singles)",
            param="prompt" if len(prompts) > 1 else "n",
        )
    conversation = _optional(body, "conversation_id", str, "a string")
    client_params = body.get("kv_transfer_params")
    for name in ("kv_transfer_params", "best_of", "n", "request_id", "conversation_id"):
        body.pop(name, None)
    singles = []
    for prompt_index, prompt in enumerate(prompts):
        for child_index in range(n):
            own = body if prompt is None else body | {"prompt": prompt}
            if n > 1 and seed is not None:
                own = own | {"seed": seed + child_index}
            singles.append(_single(path, own, prompt_index, child_index, n))
    alone = len(singles) == 1
    return ClientRequest(
        path,
        stream,
        singles[0].request_id if alone else uuid.uuid4().hex,
        tuple(singles),
        conversation,
        client_params if isinstance(client_params, dict) else {},
    )


def _single(path: str, body: Json, prompt_index: int, child_index: int, n: int) -> SingleRequest:
    request_id = uuid.uuid4().hex
    # vLLM announces a request that it rejected before admission under the body's id, not the header's
    # (0.29 entrypoints/generate/base/serving.py), so both say the same.
    return SingleRequest(
        path=path,
        body=body | {"request_id": request_id},
        prompt_index=prompt_index,
        child_index=child_index,
        index=prompt_index * n + child_index,
        request_id=request_id,
        transfer_id=f"xfer-{uuid.uuid4()}",
    )


def _decode(raw: bytes) -> Json:
    try:
        body = read_json(raw)
    except ValueError as error:
        raise ApiError(400, f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the request's body is {_kind(body)}; it must be an object")
    return body


def _optional(body: Json, name: str, kind: type, words: str) -> Any:
    value = body.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ApiError(400, f"{name} is {_kind(value)}; it must be {words}", param=name)
    return value


def _refuse(body: Json, n: int) -> None:
    best_of = _optional(body, "best_of", int, "an integer")
    if best_of is not None and not best_of == n == 1:
        raise ApiError(
            400,
            "best_of is not supported with separate prefill and decode engines: choosing the best needs all candidates "
            "in one engine; ask for n choices and choose yourself",
            param="best_of",
        )
    if _optional(body, "use_beam_search", bool, "a boolean"):
        raise ApiError(
            400,
            "use_beam_search is not supported with separate prefill and decode engines: vLLM's beam search drops "
            "kv_transfer_params, so that nothing would be transferred",
            param="use_beam_search",
        )
    truncate = _optional(body, "truncate_prompt_tokens", int, "an integer")
    if truncate is not None and truncate < 0:
        # vLLM keeps max_model_len - max_tokens tokens (0.29 renderers/params.py, max_input_tokens), and the prefill
        # leg's max_tokens is 1: the legs would cut one prompt at two places, and decode read another prompt's KV.
        raise ApiError(
            400,
            f"truncate_prompt_tokens {truncate} depends on max_tokens, which differs between the prefill and the decode "
            "leg; give the number of tokens to keep",
            param="truncate_prompt_tokens",
        )


def _messages(body: Json) -> list[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        what = "missing" if messages is None else _kind(messages)
        raise ApiError(400, f"messages is {what}; it must be a list of objects", param="messages")
    return [None]


def _prompts(body: Json) -> list[Any]:
    """List the prompts; None stands for a body that is sent as it is."""
    prompt = body.get("prompt")
    wanted = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(body.get("prompt_embeds"), list):
        raise ApiError(400, "prompt_embeds is a list; send each in a request of its own", param="prompt_embeds")
    if prompt is None:
        if body.get("prompt_embeds") is None:
            raise ApiError(400, f"prompt is missing; it must be {wanted}", param="prompt")
        return [None]
    if body.get("prompt_embeds") is not None:
        raise ApiError(400, "prompt and prompt_embeds are both given; send one of them", param="prompt_embeds")
    if isinstance(prompt, str):
        return [None]
    if not isinstance(prompt, list):
        raise ApiError(400, f"prompt is {_kind(prompt)}; it must be {wanted}", param="prompt")
    if not prompt:
        raise ApiError(400, f"prompt is an empty list; it must be {wanted}", param="prompt")
    if _is_tokens(prompt):
        return [None]
    if all(isinstance(item, str) for item in prompt) or all(
        isinstance(item, list) and _is_tokens(item) for item in prompt
    ):
        return prompt
    raise ApiError(
        400, f"prompt is a list that mixes kinds or holds something else; it must be {wanted}", param="prompt"
    )


def _is_tokens(value: list[Any]) -> bool:
    # Exact types: a JSON true is an int to isinstance. all() over map runs in C, and prompts are long.
    return bool(value) and set(map(type, value)) == {int}


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)

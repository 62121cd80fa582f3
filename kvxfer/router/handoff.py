"""The two legs' bodies: what prefill and decode are told about one handoff.

These dictionaries are the contract with the connector, and the same as upstream's NIXL connectors read
(vLLM 0.29 distributed/kv_transfer/kv_connector/v1/nixl), with ``transfer_id`` on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.router.openai import ApiError, Json

if TYPE_CHECKING:
    from kvxfer.router.call import Call
    from kvxfer.router.identity import Identity
    from kvxfer.router.split import SingleRequest

# What shapes only the answer, never the prompt: the prefill leg's answer is thrown away, so it must not pay for them.
# min_tokens above max_tokens is refused by vLLM; prompt_logprobs (and echo with logprobs) makes vLLM bypass its prefix
# cache; top_logprobs and logprob_token_ids are refused without logprobs.
_ONLY_FOR_DECODE = (
    "stream_options",
    "min_tokens",
    "echo",
    "prompt_logprobs",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_prompt_text",
)


def prefill_body(single: SingleRequest, call: Call | None = None) -> Json:
    """The prefill leg: the same prompt, one token, no stream; and which decode engine holds earlier turns' KV."""
    body = {key: value for key, value in single.body.items() if key not in _ONLY_FOR_DECODE}
    body |= {"stream": False, "max_tokens": 1, "n": 1}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": single.transfer_id,
    }
    if call is not None:
        body["kv_transfer_params"] = call.client_params | body["kv_transfer_params"]
        if call.conversation is not None:
            body["kv_transfer_params"] |= call.conversation.reuse_params()
    return body


def alone_body(single: SingleRequest) -> Json:
    """The decode leg of a request that is not handed over: decode computes what it lacks by itself."""
    return single.body


def push_decode_body(single: SingleRequest, source: Identity) -> Json:
    """The decode leg of a push: where to register, known before prefill has begun."""
    return single.body | {
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": source.engine_id,
            "remote_host": source.host,
            "remote_port": source.port,
            "tp_size": source.tp_size,
            "pp_size": source.pp_size,
            "remote_request_id": single.request_id,
            "transfer_id": single.transfer_id,
        }
    }


def pull_decode_body(single: SingleRequest, params: Json) -> Json:
    """The decode leg of a pull: where to read, as prefill's answer says."""
    return single.body | {"kv_transfer_params": params | {"transfer_id": single.transfer_id}}


def returned_params(answer: Any, url: str) -> Json:
    """The ``kv_transfer_params`` of a prefill engine's answer; without them there is nothing to pull (502)."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict) or not params:
        raise ApiError(
            502,
            f"prefill engine {url} answered without kv_transfer_params: its connector did nothing for this "
            "request. Check that it was started with --kv-transfer-config naming a kvxfer pull connector and kv_role "
            "kv_producer, and its log for the reason",
        )
    return params

import json

import pytest

from kvxfer.router.handoff import prefill_body
from kvxfer.router.openai import DONE, ApiError, EventCutter, event_error
from kvxfer.router.split import CHAT, COMPLETIONS, read_request


def split(path=COMPLETIONS, most=64, **body):
    return read_request(path, json.dumps(body).encode(), most)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["only"], ["only"]),
    ],
)
def test_each_kind_of_prompt_becomes_single_prompts(prompt, parts):
    request = split(prompt=prompt)
    assert [single.body["prompt"] for single in request.singles] == parts
    assert [single.index for single in request.singles] == list(range(len(parts)))


def test_index_is_prompt_index_times_n_plus_child_index_and_seeds_count_within_a_prompt():
    request = split(prompt=["a", "b"], n=3, seed=10)
    assert [single.index for single in request.singles] == [0, 1, 2, 3, 4, 5]
    assert [single.body["seed"] for single in request.singles] == [10, 11, 12, 10, 11, 12]
    assert all("n" not in single.body for single in request.singles)


def test_one_choice_keeps_its_seed_and_many_prompts_keep_theirs():
    assert [single.body["seed"] for single in split(prompt=["a", "b"], seed=4).singles] == [4, 4]
    assert "seed" not in split(prompt="a", n=2).singles[1].body


def test_every_single_request_has_ids_of_its_own():
    singles = split(prompt=["a", "b"], n=2, request_id="mine", kv_transfer_params={"x": 1}).singles
    assert len({single.request_id for single in singles}) == len({single.transfer_id for single in singles}) == 4
    for single in singles:
        assert len(single.request_id) == 32
        assert int(single.request_id, 16) >= 0
        assert single.transfer_id.startswith("xfer-")
        assert single.body["request_id"] == single.request_id
        assert "kv_transfer_params" not in single.body


def test_a_lone_single_request_shares_the_clients_id():
    request = split(prompt="a")
    assert request.request_id == request.singles[0].request_id


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt_embeds": ["x"]}, "prompt_embeds"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 65}, "n"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream_options": []}, "stream_options"),
        ({"prompt": "a", "seed": "x"}, "seed"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 2, "n": 2}, "best_of"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_field_is_named(body, param):
    with pytest.raises(ApiError) as caught:
        split(**body)
    assert caught.value.status == 400
    assert caught.value.error["param"] == param
    assert param.split("_")[0] in caught.value.error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[1]", b'"x"', b"null", b"3", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(raw):
    with pytest.raises(ApiError) as caught:
        read_request(COMPLETIONS, raw, 64)
    assert caught.value.status == 400


@pytest.mark.parametrize("messages", [None, "hi", {}])
def test_chat_needs_messages(messages):
    with pytest.raises(ApiError) as caught:
        split(CHAT, messages=messages)
    assert caught.value.error["param"] == "messages"


def test_harmless_values_pass():
    request = split(prompt="a", n=None, stream=None, stream_options=None, seed=None, best_of=1, use_beam_search=False)
    assert not request.stream
    assert "best_of" not in request.singles[0].body
    assert split(prompt_embeds="base64").singles[0].body["prompt_embeds"] == "base64"
    assert split(prompt="a", truncate_prompt_tokens=8).singles[0].body["truncate_prompt_tokens"] == 8


def test_integers_of_any_size_survive():
    raw = b'{"prompt": "a", "seed": 9223372036854775807, "vllm_xargs": {"big": 123456789012345678901234567890}}'
    assert read_request(COMPLETIONS, raw, 64).singles[0].body["vllm_xargs"]["big"] == 123456789012345678901234567890


def test_the_prefill_leg_has_one_token_and_nothing_that_shapes_only_the_answer():
    single = split(
        prompt="a",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=50,
        min_tokens=9,
        echo=True,
        logprobs=2,
        prompt_logprobs=1,
        temperature=0.5,
        cache_salt="s",
    ).singles[0]
    body = prefill_body(single)
    params = body.pop("kv_transfer_params")
    assert params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": single.transfer_id,
    }
    assert body == {
        "prompt": "a",
        "stream": False,
        "max_tokens": 1,
        "n": 1,
        "temperature": 0.5,
        "cache_salt": "s",
        "request_id": single.request_id,
    }
    assert single.body["echo"] is True


def test_max_completion_tokens_is_one_only_where_it_was_given():
    messages = [{"role": "user", "content": "x"}]
    given = prefill_body(split(CHAT, messages=messages, max_completion_tokens=40).singles[0])
    assert (given["max_tokens"], given["max_completion_tokens"]) == (1, 1)
    assert "max_completion_tokens" not in prefill_body(split(CHAT, messages=messages).singles[0])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_whatever_the_pieces(size):
    raw = b'data: {"a":1}\n\n: ping\n\ndata: {"b":2}\r\n\r\ndata: [DONE]\n\n'
    cutter = EventCutter()
    events = [event for at in range(0, len(raw), size) for event in cutter.feed(raw[at : at + size])]
    assert events == [b'data: {"a":1}', b": ping", b'data: {"b":2}', DONE]


def test_an_engines_error_event_is_known():
    assert event_error(b'data: {"choices": []}') is None
    assert event_error(b"data: [DONE]") is None
    error = event_error(b'data: {"error": {"message": "no", "type": "T", "param": null, "code": 503}}')
    assert (error.status, error.error["message"]) == (503, "no")
    assert event_error(b'data: {"error": {"message": "no"}}').status == 502

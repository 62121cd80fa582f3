"""List prompts and n > 1: one answer with every choice in its place."""

import asyncio

import pytest
from router_fakes import pair, routed, run

from kvxfer.router.merge import StreamMerger, merge_usage
from kvxfer.router.openai import ApiError
from kvxfer.router.split import read_request


def named(engine):
    """Answer each single request with tokens that tell which one it was, and a prompt length of its own."""
    lock = asyncio.Lock()

    async def behave(call, request):
        prompt = call.body.get("prompt", "chat")
        async with lock:  # json() reads the engine's fields at once
            engine.tokens = [f"{prompt}/{call.body.get('seed')}", "-", "."][: 2 if prompt == "a" else 3]
            engine.prompt_tokens = 5 if prompt == "a" else 11
            if not call.body.get("stream"):
                return engine.json(call)
        response = await engine.begin(request)
        tokens, prompt_tokens = list(engine.tokens), engine.prompt_tokens
        for token in tokens:
            await response.write(b"data: " + _bytes(engine.chunk(call, token)) + b"\n\n")
            await asyncio.sleep(0.002)
        if (call.body.get("stream_options") or {}).get("include_usage"):
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(tokens),
                "total_tokens": prompt_tokens + len(tokens),
                "prompt_tokens_details": None,
            }
            await response.write(b"data: " + _bytes(engine.chunk(call, "") | {"choices": [], "usage": usage}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return behave


def _bytes(value):
    import json

    return json.dumps(value).encode()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_list_of_prompts_times_n(mode):
    async def main():
        p, d = pair()
        async with routed([p], [d], mode=mode) as router:
            d.behave = named(d)
            status, body, headers = await router.json(prompt=["a", "b"], n=2, seed=3)
            assert status == 200
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            texts = [choice["text"].rstrip("-.") for choice in body["choices"]]
            assert texts == ["a/3", "a/4", "b/3", "b/4"]
            assert body["usage"] == {
                "prompt_tokens": 5 + 11,
                "completion_tokens": 2 + 2 + 3 + 3,
                "total_tokens": 26,
                "prompt_tokens_details": {"cached_tokens": 6},
            }
            assert body["id"] == "cmpl-" + headers["X-Request-Id"]
            assert body["kv_transfer_params"] is None
            assert body["object"] == "text_completion"
            assert len(p.calls) == len(d.calls) == 4
            ids = {call.params["transfer_id"] for call in p.calls}
            assert ids == {call.params["transfer_id"] for call in d.calls}
            assert len(ids) == 4
            for call in p.calls:
                assert call.body["n"] == 1
            by_id = {call.params["transfer_id"]: call for call in d.calls}
            for call in p.calls:
                other = by_id[call.params["transfer_id"]]
                assert (call.body["prompt"], call.body["seed"]) == (other.body["prompt"], other.body["seed"])
                assert call.headers["X-Request-Id"] == other.headers["X-Request-Id"]

    run(main())


@pytest.mark.parametrize("usage", [False, True])
def test_merged_streams(usage):
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            d.behave = named(d)
            ask = {"stream_options": {"include_usage": True}} if usage else {}
            events = await router.events(prompt=["a", "b"], n=2, **ask)
            assert events.count("[DONE]") == 1
            assert events[-1] == "[DONE]"
            chunks = events[:-1]
            assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
            assert {chunk["model"] for chunk in chunks} == {"the-model"}
            assert chunks[0]["id"].startswith("cmpl-")
            if usage:
                last = chunks.pop()
                assert last["choices"] == []
                assert last["object"] == "text_completion"
                assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (16, 10)
                assert last["usage"]["total_tokens"] == 26
            assert not any("usage" in chunk for chunk in chunks)
            texts = ["", "", "", ""]
            for chunk in chunks:
                (choice,) = chunk["choices"]
                texts[choice["index"]] += choice["text"]
            assert [text.rstrip("-.") for text in texts] == ["a/None", "a/None", "b/None", "b/None"]
            assert [text.endswith(".") for text in texts] == [False, False, True, True]

    run(main())


def test_merged_streams_are_interleaved():
    async def main():
        p, d = pair()
        turn = asyncio.Barrier(2) if hasattr(asyncio, "Barrier") else None

        async def in_turns(call, request):
            response = await d.begin(request)
            for token in ("1", "2", "3"):
                if turn is not None:
                    await turn.wait()
                await response.write(b"data: " + _bytes(d.chunk(call, token)) + b"\n\n")
                await asyncio.sleep(0.01)
            await response.write(b"data: [DONE]\n\n")
            return response

        async with routed([p], [d]) as router:
            d.behave = in_turns
            events = await router.events(prompt=["a", "b"])
            order = [one["choices"][0]["index"] for one in events[:-1]]
            assert sorted(order) == [0, 0, 0, 1, 1, 1]
            if turn is not None:  # the second token of either comes only after the first of both
                assert set(order[:2]) == {0, 1}

    run(main())


def test_chat_with_n():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            d.behave = named(d)
            ask = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "x"}], "n": 3, "seed": 1}
            status, body, headers = await router.json(**ask)
            assert status == 200
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
            assert [choice["message"]["content"] for choice in body["choices"]] == ["chat/1-.", "chat/2-.", "chat/3-."]
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (11, 9)
            assert body["id"] == "chatcmpl-" + headers["X-Request-Id"]
            events = await router.events(**ask)
            assert {one["choices"][0]["index"] for one in events[:-1]} == {0, 1, 2}
            assert events[-1] == "[DONE]"

    run(main())


def test_token_id_prompts():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            _, body, _ = await router.json(prompt=[1, 2, 3])
            assert len(body["choices"]) == 1
            assert d.calls[0].body["prompt"] == [1, 2, 3]
            _, body, _ = await router.json(prompt=[[1, 2], [3]])
            assert len(body["choices"]) == 2
            assert sorted(call.body["prompt"] for call in d.calls[1:]) == [[1, 2], [3]]

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_only_so_many_are_in_flight(stream):
    async def main():
        p, d = pair()
        flying = most = 0

        async def count(call, request):
            nonlocal flying, most
            flying += 1
            most = max(most, flying)
            await asyncio.sleep(0.01)
            flying -= 1

        async with routed([p], [d], concurrent_singles=3) as router:
            d.behave = count
            ask = {"prompt": [str(i) for i in range(10)]}
            if stream:
                assert {one["choices"][0]["index"] for one in (await router.events(**ask))[:-1]} == set(range(10))
            else:
                assert len((await router.json(**ask))[1]["choices"]) == 10
            assert most == 3

    run(main())


def test_an_answer_that_cannot_be_merged_is_a_502():
    async def main():
        p, d = pair()

        async def nonsense(call, request):
            from aiohttp import web

            return web.Response(text="hello")

        async with routed([p], [d]) as router:
            d.behave = nonsense
            status, body, _ = await router.json(prompt=["a", "b"])
            assert status == 502
            assert "decode leg" in body["error"]["message"]

    run(main())


def test_usage_is_summed_by_its_meaning_and_absent_where_no_engine_sent_one():
    request = read_request("/v1/completions", b'{"prompt": ["a", "b"], "n": 2}', 8)
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "total_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert merge_usage((single, None) for single in request.singles) is None
    assert merge_usage((single, usage | {"prompt_tokens_details": None}) for single in request.singles) == {
        "prompt_tokens": 8,
        "completion_tokens": 4,
        "total_tokens": 12,
        "completion_tokens_details": {"reasoning_tokens": 8},
        "prompt_tokens_details": None,
    }


def test_a_merged_stream_keeps_comments_and_refuses_what_it_cannot_read():
    request = read_request("/v1/completions", b'{"prompt": ["a", "b"]}', 8)
    merger = StreamMerger(request)
    assert merger.add(request.singles[0], [b": ping", b"data: [DONE]"]) == b": ping\n\n"
    for wrong in (b"data: {", b"data: []"):
        with pytest.raises(ApiError, match="decode leg"):
            merger.add(request.singles[0], [wrong])
    assert merger.end() == b"data: [DONE]\n\n"

"""Clients as they are: OpenAI's own library, and one that speaks HTTP/1.0."""

import asyncio
import json

import pytest
from router_fakes import event, pair, routed, run


def test_openais_client_library():
    openai = pytest.importorskip("openai", reason="the openai package is not installed")

    def use(base):
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0)
        assert [one.id for one in client.models.list()] == ["the-model"]
        messages = [{"role": "user", "content": "x"}]
        whole = client.chat.completions.create(model="the-model", messages=messages)
        assert whole.choices[0].message.content == "abc"
        parts = client.chat.completions.create(
            model="the-model", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        parts = list(parts)
        assert "".join(one.choices[0].delta.content for one in parts if one.choices) == "abc"
        assert parts[-1].usage.completion_tokens == 3
        some = client.completions.create(model="the-model", prompt=["x", "y"], n=2, stream=True)
        assert {choice.index for one in some for choice in one.choices} == {0, 1, 2, 3}
        with pytest.raises(openai.BadRequestError, match="at least 1"):
            client.completions.create(model="the-model", prompt="x", n=0)
        with client.completions.create(model="the-model", prompt="x", stream=True) as stream:
            next(iter(stream))

    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            await asyncio.to_thread(use, router.base)

    run(main())


def test_a_stream_breaks_off_with_an_error_that_openais_library_raises():
    openai = pytest.importorskip("openai", reason="the openai package is not installed")

    def use(base):
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0)
        got = []
        with pytest.raises(openai.APIError, match="decode leg"):
            for one in client.completions.create(model="the-model", prompt="x", stream=True):
                got.append(one.choices[0].text)  # noqa: PERF401 -- what came before the error counts
        assert got == ["a"]

    async def main():
        p, d = pair()

        async def one_token_then_dead(call, request):
            response = await d.begin(request)
            await response.write(event(d.chunk(call, "a")))
            await asyncio.sleep(0.05)
            request.transport.abort()
            await asyncio.Event().wait()

        async with routed([p], [d]) as router:
            d.behave = one_token_then_dead
            await asyncio.to_thread(use, router.base)

    run(main())


def test_http_1_0_gets_a_stream_without_chunks():
    async def main():
        p, d = pair()

        async def slowly(call, request):
            response = await d.begin(request)
            for token in "abc":
                await response.write(event(d.chunk(call, token)))
                await asyncio.sleep(0.02)
            await response.write(b"data: [DONE]\n\n")
            return response

        async with routed([p], [d]) as router:
            d.behave = slowly
            host, port = router.base.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({"prompt": "x", "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
            head, _, stream = answer.partition(b"\r\n\r\n")
            assert b" 200 " in head.split(b"\r\n")[0]
            assert b"chunked" not in head.lower()
            events = stream.split(b"\n\n")
            assert [json.loads(one[6:])["choices"][0]["text"] for one in events[:3]] == ["a", "b", "c"]
            assert events[3:] == [b"data: [DONE]", b""]

    run(main())

import asyncio
import json

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

from kvxfer.bench.client import Client, RequestError  # noqa: E402


class FakeServer:
    """Answers each request with the next of the prepared answers, and keeps the bodies and headers."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def handle(self, request):
        self.asked.append((request.path, await request.json(), request.headers.copy()))
        answer = self.answers.pop(0)
        if not isinstance(answer, list):
            return answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for wait, event in answer:
            await asyncio.sleep(wait)
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        return response


def talk(server, talk_with, **settings):
    async def main():
        app = web.Application()
        app.router.add_post("/{path:.*}", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            async with Client(f"http://127.0.0.1:{port}/", **settings) as client:
                return await talk_with(client)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def token(*ids, text="x", **more):
    return {"choices": [{"index": 0, "text": text, "token_ids": list(ids), **more}]}


def test_a_stream_gives_tokens_text_and_times():
    server = FakeServer(
        [
            (0.0, {"choices": [{"index": 0, "text": "", "prompt_token_ids": list(range(30_000))}]}),
            (0.1, token(5, text="a")),
            (0.1, token(6, 7, text="bc")),
            (0.1, token(8, text="d", finish_reason="length")),
            (0.0, {"choices": [], "usage": {}}),
            (0.2, "[DONE]"),
        ]
    )
    one = talk(server, lambda client: client.complete([1, 2, 3], 4, headers={"X-Request-Id": "me"}))
    assert (one.token_ids, one.text, one.finish_reason) == ((5, 6, 7, 8), "abcd", "length")
    # The first token comes after 0.1 s, the last after 0.3 s, the end after 0.5 s; a busy machine adds to each.
    assert 0.1 <= one.ttft <= one.seconds - 0.4 + 0.05
    assert 0.19 / 3 <= one.tpot <= (one.seconds - 0.3 + 0.05) / 3
    assert one.seconds >= 0.5
    path, body, headers = server.asked[0]
    assert path == "/v1/completions"
    assert headers["X-Request-Id"] == "me"
    assert body == {
        "model": "kvxfer-bench", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True,
        "return_token_ids": True, "stream": True,
    }  # fmt: skip


def test_one_token_has_no_tpot_and_none_has_no_ttft():
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    server = FakeServer([(0.0, token(5)), (0.0, end), (0.0, "[DONE]")], [(0.0, end), (0.0, "[DONE]")])

    async def both(client):
        return await client.complete("a"), await client.complete("b")

    one, none = talk(server, both)
    assert one.ttft is not None
    assert one.tpot is None
    assert (none.ttft, none.token_ids) == (None, ())


def test_without_a_stream_the_whole_time_is_known():
    answer = token(1, 2, text="hey", finish_reason="stop") | {"kv_transfer_params": {"remote_port": 7}}
    server = FakeServer(web.json_response(answer))
    one = talk(server, lambda client: client.complete("hi", stream=False, extra={"n": 1, "temperature": 0.7}))
    assert (one.token_ids, one.text, one.finish_reason) == ((1, 2), "hey", "stop")
    assert (one.ttft, one.tpot) == (None, None)
    assert one.kv_transfer_params == {"remote_port": 7}
    body = server.asked[0][1]
    assert (body["n"], body["temperature"], body["stream"]) == (1, 0.7, False)


def test_chat_streamed_and_whole():
    server = FakeServer(
        [
            (0.0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
            (0.0, {"choices": [{"index": 0, "delta": {"content": "he"}, "token_ids": [3]}]}),
            (0.0, {"choices": [{"index": 0, "delta": {"content": None}, "token_ids": [4], "finish_reason": "length"}]}),
            (0.0, "[DONE]"),
        ],
        web.json_response({"choices": [{"index": 0, "message": {"content": "ho"}, "token_ids": [9]}]}),
    )

    async def both(client):
        messages = [{"role": "user", "content": "hi"}]
        return await client.chat(messages), await client.chat(messages, stream=False)

    streamed, whole = talk(server, both)
    assert (streamed.text, streamed.token_ids) == ("he", (3, 4))
    assert (whole.text, whole.token_ids) == ("ho", (9,))
    assert server.asked[0][0] == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (web.Response(status=503, text="no engine"), 503, "503: no engine"),
        ([(0.0, token(1)), (0.0, {"error": {"message": "KV load failed"}})], 200, "KV load failed"),
        ([(0.0, token(1))], 200, "ended before it was finished"),
        ([(0.0, token(1)), (0.0, "[DONE]")], 200, "ended without a finish_reason"),
        ([(0.0, "[DONE]")], 200, "ended without a finish_reason"),
    ],
)
def test_failures_are_errors_with_their_status(answer, status, text):
    with pytest.raises(RequestError, match=text) as caught:
        talk(FakeServer(answer), lambda client: client.complete("a"))
    assert caught.value.status == status


def test_a_silent_server_is_an_error_after_the_timeout():
    with pytest.raises(RequestError, match="Timeout"):
        talk(FakeServer([(0.6, "[DONE]")]), lambda client: client.complete("a"), timeout=0.2)


def test_nobody_there_is_an_error():
    async def main():
        async with Client("http://127.0.0.1:1") as client:
            await client.complete("a")

    with pytest.raises(RequestError, match="Cannot connect"):
        asyncio.run(main())


def test_without_token_ids_each_event_is_an_arrival_and_the_server_counts() -> None:
    events = [
        (0.0, {"choices": [{"index": 0, "text": "a"}]}),
        (0.02, {"choices": [{"index": 0, "text": ""}]}),
        (0.02, {"choices": [{"index": 0, "text": "c", "finish_reason": "length"}]}),
        (0.0, {"choices": [], "usage": {"completion_tokens": 4}}),
        (0.0, "[DONE]"),
    ]
    server = FakeServer(events)
    answer = talk(server, lambda client: client.complete([1, 2], 4, token_ids=False))
    body = server.asked[0][1]
    assert body["return_token_ids"] is False
    assert body["stream_options"] == {"include_usage": True}
    assert (answer.token_ids, answer.tokens, answer.text) == ((), 4, "ac")
    assert len(answer.gaps) == 2
    assert min(answer.gaps) >= 0.01
    assert answer.tpot == pytest.approx(sum(answer.gaps) / 3)


def test_an_answer_that_is_not_streamed_has_the_servers_count() -> None:
    whole = {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
    server = FakeServer(aiohttp.web.json_response(whole))
    answer = talk(server, lambda client: client.complete([1, 2], 1, stream=False, token_ids=False))
    assert answer.tokens == 1
    assert "stream_options" not in server.asked[0][1]


def test_tokens_that_all_come_in_one_event_tell_nothing_of_the_time_for_each() -> None:
    server = FakeServer([(0.0, token(5, 6, 7, finish_reason="length")), (0.0, "[DONE]")])
    answer = talk(server, lambda client: client.complete([1], 3))
    assert (answer.tokens, answer.gaps, answer.tpot) == (3, (), None)
    assert answer.ttft is not None

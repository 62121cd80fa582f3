"""What the two legs carry, in which order, and what reaches the client when all goes well."""

import asyncio
import json

import aiohttp
import pytest
from router_fakes import PATIENCE, FakeEngine, pair, routed, run


def test_push_sends_both_legs_at_once_with_the_same_ids():
    async def main():
        p, d = pair(port="5999", tp_size="2", pp_size="4")
        async with routed([p], [d]) as router:
            p.hold.clear()
            d.hold.clear()
            answer = asyncio.ensure_future(router.json(prompt="hi", max_tokens=9, kv_transfer_params={"evil": 1}))
            first, second = await p.called(), await d.called()  # both are there, and neither was answered
            p.hold.set()
            d.hold.set()
            status, body, headers = await answer
            assert status == 200
            assert body["choices"][0]["text"] == "abc"
            rid = first.headers["X-Request-Id"]
            assert len(rid) == 32
            assert second.headers["X-Request-Id"] == headers["X-Request-Id"] == rid
            assert (first.body["max_tokens"], second.body["max_tokens"]) == (1, 9)
            assert first.params["do_remote_decode"] is True
            assert second.params == {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": "p0",
                "remote_host": "127.0.0.1",
                "remote_port": 5999,
                "tp_size": 2,
                "pp_size": 4,
                "remote_request_id": rid,
                "transfer_id": first.params["transfer_id"],
            }
            assert first.params["transfer_id"].startswith("xfer-")

    run(main())


def test_pull_waits_for_prefill_and_passes_its_parameters_on():
    async def main():
        p, d = pair()
        async with routed([p], [d], mode="pull") as router:
            p.hold.clear()
            answer = asyncio.ensure_future(router.json(prompt=[5, 6], max_tokens=9))
            first = await p.called()
            await asyncio.sleep(0.05)
            assert not d.calls
            p.hold.set()
            status, body, _ = await answer
            assert (status, body["choices"][0]["text"]) == (200, "abc")
            second = await d.called()
            assert second.params == p.coordinates() | {"transfer_id": first.params["transfer_id"]}
            assert second.headers["X-Request-Id"] == first.headers["X-Request-Id"]
            assert first.body["prompt"] == second.body["prompt"] == [5, 6]

    run(main())


def test_pull_without_parameters_is_a_502_that_says_what_to_check():
    async def main():
        p, d = pair()
        async with routed([p], [d], mode="pull") as router:

            async def nothing(call, request):
                return p.json(call, None)

            p.behave = nothing
            status, body, _ = await router.json(prompt="x")
            assert status == 502
            assert "connector did nothing" in body["error"]["message"]
            assert "--kv-transfer-config" in body["error"]["message"]
            assert p.url in body["error"]["message"]
            assert not d.calls

    run(main())


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_single_stream_passes_through_byte_for_byte(mode):
    async def main():
        p, d = pair()
        written = [
            b'data: {"id":"cmpl-1",  "choices":[{"index":0,"text":"\xc3\xa9"}]}\n\n',
            b": keep-alive\n\n",
            b'data: {"choices":[{"index":0,"text":"x"}]}\n\ndata: {"cho',
            b'ices":[]}\n\n',
            b"data: [DONE]\n\n",
        ]

        async def behave(call, request):
            response = await d.begin(request)
            for part in written:
                await response.write(part)
                await asyncio.sleep(0.005)
            return response

        async with routed([p], [d], mode=mode) as router:
            d.behave = behave
            async with router.post(prompt="hi", stream=True) as response:
                assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                assert response.headers["X-Request-Id"] == p.calls[0].headers["X-Request-Id"]
                assert await response.read() == b"".join(written)
            assert p.calls[0].body["stream"] is False
            assert d.calls[0].body["stream"] is True

    run(main())


def test_a_token_reaches_the_client_before_the_next_is_made():
    async def main():
        p, d = pair()
        go = asyncio.Event()

        async def behave(call, request):
            response = await d.begin(request)
            await response.write(b'data: {"choices":[1]}\n\n')
            await go.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        async with routed([p], [d]) as router:
            d.behave = behave
            async with router.post(prompt="hi", stream=True) as response:
                assert await asyncio.wait_for(response.content.readany(), PATIENCE) == b'data: {"choices":[1]}\n\n'
                go.set()
                assert await response.read() == b"data: [DONE]\n\n"

    run(main())


def test_a_slow_client_slows_the_engine_down():
    async def main():
        p, d = pair()
        size, sent = 1 << 16, 0

        async def behave(call, request):
            nonlocal sent
            response = await d.begin(request)
            for _ in range(1000):
                await response.write(b"data: " + b"x" * size + b"\n\n")
                sent += size
            return response

        async with routed([p], [d]) as router:
            d.behave = behave
            response = await router.post(prompt="hi", stream=True)
            before = -1
            while before != sent or not sent:  # until nobody's buffer takes more
                before = sent
                await asyncio.sleep(0.3)
            assert 0 < sent < 1000 * size
            response.close()
            await asyncio.wait_for(d.calls[0].aborted.wait(), PATIENCE)

    run(main())


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_chat_single_and_streaming(mode):
    async def main():
        p, d = pair()
        async with routed([p], [d], mode=mode) as router:
            messages = [{"role": "user", "content": "hi"}]
            ask = {"path": "/v1/chat/completions", "messages": messages, "max_completion_tokens": 8}
            status, body, _ = await router.json(**ask)
            assert (status, body["choices"][0]["message"]["content"]) == (200, "abc")
            assert p.calls[0].path == d.calls[0].path == "/v1/chat/completions"
            assert (p.calls[0].body["max_tokens"], p.calls[0].body["max_completion_tokens"]) == (1, 1)
            assert d.calls[0].body["max_completion_tokens"] == 8
            events = await router.events(**ask)
            assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["a", "b", "c"]
            assert events[-1] == "[DONE]"

    run(main())


def test_echo_stays_with_decode():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            await router.json(prompt="hi", echo=True, logprobs=1, prompt_logprobs=1)
            assert not {"echo", "logprobs", "prompt_logprobs"} & set(p.calls[0].body)
            assert d.calls[0].body["echo"] is True
            assert d.calls[0].body["prompt_logprobs"] == 1

    run(main())


def test_round_robin_on_both_sides():
    async def main():
        ps = [FakeEngine("kv_producer", f"p{i}", port=str(7000 + i)) for i in range(2)]
        ds = [FakeEngine("kv_consumer", f"d{i}") for i in range(3)]
        async with routed(ps, ds) as router:
            for _ in range(6):
                await router.json(prompt="x")
            assert [len(p.calls) for p in ps] == [3, 3]
            assert [len(d.calls) for d in ds] == [2, 2, 2]
            for p in ps:
                for call in p.calls:
                    (leg,) = (c for d in ds for c in d.calls if c.params["transfer_id"] == call.params["transfer_id"])
                    assert leg.params["remote_engine_id"] == p.engine_id
                    assert leg.params["remote_port"] == int(p.info["port"])

    run(main())


def test_credentials_and_traces_are_passed_on_and_nothing_else():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            headers = {
                "Authorization": "Bearer me",
                "traceparent": "t",
                "X-Request-Id": "mine",
                "X-data-parallel-rank": "1",
                "Cookie": "a=b",
            }
            async with router.session.post(
                router.base + "/v1/completions", json={"prompt": "x"}, headers=headers
            ) as response:
                assert response.status == 200
            for call in (p.calls[0], d.calls[0]):
                assert call.headers["Authorization"] == "Bearer me"
                assert call.headers["traceparent"] == "t"
                assert call.headers["X-Request-Id"] != "mine"
                assert "X-data-parallel-rank" not in call.headers
                assert "Cookie" not in call.headers

    run(main())


def test_the_named_data_parallel_engine_gets_the_prefill():
    async def main():
        p, d = pair()
        p.more_info = 'kvxfer_info{engine="1",engine_id="p0_dp1",host="127.0.0.1",port="5601",tp_size="1"} 1.0'
        async with routed([p], [d]) as router:
            await router.json(prompt="x")
            assert d.calls[0].params["remote_engine_id"] == "p0"
            assert p.calls[0].headers["X-data-parallel-rank"] == p.probes[0].headers["X-data-parallel-rank"] == "0"
            assert "X-data-parallel-rank" not in d.calls[0].headers

    run(main())


def test_models_come_from_a_decode_engine():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router, router.session.get(router.base + "/v1/models") as response:
            assert response.status == 200
            assert (await response.json())["data"] == [{"id": "the-model", "by": "d0"}]

    run(main())


def test_connections_are_kept():
    async def main():
        p, d = pair()
        peers = set()

        async def behave(call, request):
            peers.add(request.transport.get_extra_info("peername"))

        async with routed([p], [d], check_interval=5.0) as router:
            d.behave = behave
            for _ in range(5):
                await router.json(prompt="x")
                assert (await router.events(prompt="x"))[-1] == "[DONE]"
            assert len(peers) == 1

    run(main())


def test_many_requests_at_once():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            d.hold.clear()
            router.session.connector._limit = 0
            asked = [asyncio.ensure_future(router.json(prompt="x")) for _ in range(120)]
            await d.called(120)  # no connection limit holds any back
            d.hold.set()
            assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}

    run(main())


def test_ipv6():
    async def main():
        p, d = pair(host="::")
        try:
            await p.start("::1")
            await d.start("::1")
        except OSError:
            pytest.skip("no ::1 here")
        async with routed([p], [d], start=False, listen="::1") as router:
            assert p.url.startswith("http://[::1]:")
            status, body, _ = await router.json(prompt="x")
            assert (status, body["choices"][0]["text"]) == (200, "abc")
            assert d.calls[0].params["remote_host"] == "::1"

    run(main())


def test_a_body_of_the_allowed_size_passes_and_a_larger_one_is_a_413():
    async def main():
        p, d = pair()
        async with routed([p], [d], max_body_size=1 << 21) as router:
            status, _, _ = await router.json(prompt="x" * (1 << 20))
            assert status == 200
            assert d.calls[0].body["prompt"] == p.calls[0].body["prompt"] == "x" * (1 << 20)
            status, body, _ = await router.json(prompt="x" * (1 << 21))
            assert status == body["error"]["code"] == 413
            assert str(1 << 21) in body["error"]["message"]

    run(main())


def test_errors_of_the_router_itself_have_openais_shape():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            for method, path, body, status in (
                ("POST", "/v1/completions", b"{", 400),
                ("POST", "/v1/completions", b"[]", 400),
                ("POST", "/v1/completions", json.dumps({"prompt": 1}).encode(), 400),
                ("POST", "/sleep", b"{}", 404),
                ("GET", "/v1/completions", b"", 405),
            ):
                async with router.session.request(method, router.base + path, data=body) as response:
                    assert response.status == status
                    error = (await response.json())["error"]
                    assert set(error) == {"message", "type", "param", "code"}
                    assert error["code"] == status
            assert not p.calls
            assert not d.calls

    run(main())


def test_a_defect_is_a_500_in_openais_shape(monkeypatch):
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            monkeypatch.setattr("kvxfer.router.dispatch.prefill_body", lambda single, call: 1 / 0)
            for ask in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
                status, body, _ = await router.json(prompt="x", **ask)
                assert status == 500
                assert body["error"]["type"] == "InternalServerError"
                assert "ZeroDivisionError" in body["error"]["message"]

    run(main())


def test_stop_ends_what_is_in_flight():
    async def main():
        p, d = pair()
        async with routed([p], [d], stop_timeout=0.05) as router:
            p.hold.clear()
            d.hold.clear()
            asked = asyncio.ensure_future(router.json(prompt="x"))
            calls = [await p.called(), await d.called()]
        for call in calls:
            assert call.aborted.is_set()
        with pytest.raises(aiohttp.ClientError):
            await asked

    run(main())

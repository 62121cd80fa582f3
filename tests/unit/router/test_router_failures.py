"""One leg fails, an engine dies, or the client goes away: who is told, and that nothing keeps running."""

import asyncio

import aiohttp
import pytest
from router_fakes import PATIENCE, always, error_answer, event, free_port, pair, routed, run

MODES = pytest.mark.parametrize("mode", ["push", "pull"])
STREAM = pytest.mark.parametrize("stream", [False, True])


@STREAM
def test_a_client_that_goes_away_ends_both_legs(stream):
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            p.hold.clear()
            d.hold.clear()
            asked = asyncio.ensure_future(router.json(prompt="x", stream=stream))
            calls = [await p.called(), await d.called()]
            asked.cancel()  # aiohttp closes the connection of a cancelled request
            for call in calls:
                await asyncio.wait_for(call.aborted.wait(), PATIENCE)

    run(main())


def test_a_client_that_goes_away_in_mid_stream_ends_both_legs(monkeypatch):
    monkeypatch.setattr(
        "kvxfer.router.dispatch.PREFILL_GRACE", 1000.0
    )  # that grace is for prefills whose client was served

    async def main():
        p, d = pair()

        async def first_token_then_nothing(call, request):
            response = await d.begin(request)
            await response.write(event(d.chunk(call, "a")))
            await asyncio.Event().wait()

        async with routed([p], [d]) as router:
            p.hold.clear()
            d.behave = first_token_then_nothing
            response = await router.post(prompt="x", stream=True)
            await response.content.readany()
            response.close()
            for call in (await p.called(), await d.called()):
                await asyncio.wait_for(call.aborted.wait(), PATIENCE)

    run(main())


def test_a_client_that_goes_away_during_a_pulls_prefill_never_reaches_decode():
    async def main():
        p, d = pair()
        async with routed([p], [d], mode="pull") as router:
            p.hold.clear()
            asked = asyncio.ensure_future(router.json(prompt="x"))
            call = await p.called()
            asked.cancel()
            await asyncio.wait_for(call.aborted.wait(), PATIENCE)
            assert not d.calls

    run(main())


def test_a_client_that_goes_away_ends_every_single_request_of_it():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            p.hold.clear()
            d.hold.clear()
            for ask in ({"stream": False}, {"stream": True}):
                asked = asyncio.ensure_future(router.json(prompt=["x", "y"], n=2, **ask))
                await p.called(4)
                await d.called(4)
                asked.cancel()
                for call in (*p.calls, *d.calls):
                    await asyncio.wait_for(call.aborted.wait(), PATIENCE)
                p.calls.clear()
                d.calls.clear()

    run(main())


@STREAM
def test_prefills_error_ends_a_push_and_is_the_answer(stream):
    async def main():
        p, d = pair()

        async def fail(call, request):
            await d.called()
            return error_answer(404, "no such model")

        async with routed([p], [d]) as router:
            p.behave = fail
            d.hold.clear()
            status, body, headers = await router.json(prompt="x", stream=stream)
            assert status == 404
            assert body == {
                "error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}
            }
            assert headers["X-Request-Id"] == p.calls[0].headers["X-Request-Id"]
            await asyncio.wait_for(d.calls[0].aborted.wait(), PATIENCE)

    run(main())


def test_prefills_error_is_the_answer_even_when_decodes_stream_was_opened():
    async def main():
        p, d = pair()
        opened = asyncio.Event()

        async def open_only(call, request):
            await d.begin(request)
            opened.set()
            await asyncio.Event().wait()

        async def fail(call, request):
            await opened.wait()
            await asyncio.sleep(0.05)
            return error_answer(400, "too long")

        async with routed([p], [d]) as router:
            p.behave, d.behave = fail, open_only
            status, body, _ = await router.json(prompt="x", stream=True)
            assert (status, body["error"]["message"]) == (400, "too long")
            await asyncio.wait_for(d.calls[0].aborted.wait(), PATIENCE)

    run(main())


@STREAM
def test_decodes_error_ends_a_pushs_prefill(stream):
    async def main():
        p, d = pair()

        async def fail(call, request):
            await p.called()
            return error_answer(429, "full")

        async with routed([p], [d]) as router:
            p.hold.clear()
            d.behave = fail
            status, body, _ = await router.json(prompt="x", stream=stream)
            assert (status, body["error"]["message"], body["error"]["code"]) == (429, "full", 429)
            await asyncio.wait_for(p.calls[0].aborted.wait(), PATIENCE)

    run(main())


@MODES
def test_prefill_failing_in_pull_or_decode_failing_passes_the_engines_error(mode):
    async def main():
        p, d = pair()
        async with routed([p], [d], mode=mode) as router:
            d.behave = always(lambda: error_answer(503, "overloaded"))
            status, body, _ = await router.json(prompt="x")
            assert (status, body["error"]["message"]) == (503, "overloaded")
            p.behave = always(lambda: error_answer(400, "bad"))
            d.behave = None
            d.hold.clear()
            status, body, _ = await router.json(prompt="x")
            assert (status, body["error"]["message"]) == (400, "bad")

    run(main())


@pytest.mark.parametrize(("status", "told"), [(401, 401), (500, 502), (302, 502), (204, 502)])
def test_an_engines_answer_in_no_known_shape_names_leg_and_url(status, told):
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            d.behave = always(lambda: aiohttp.web.Response(status=status, text=None if status == 204 else "oops"))
            got, body, _ = await router.json(prompt="x")
            assert got == body["error"]["code"] == told
            assert "decode leg" in body["error"]["message"]
            assert d.url in body["error"]["message"]

    run(main())


def test_prefills_late_failure_does_not_matter_once_decode_has_a_token():
    async def main():
        p, d = pair()
        failed = asyncio.Event()

        async def tokens(call, request):
            response = await d.begin(request)
            await response.write(event(d.chunk(call, "a")))
            await failed.wait()
            await asyncio.sleep(0.05)
            await response.write(event(d.chunk(call, "b")) + b"data: [DONE]\n\n")
            return response

        async def fail(call, request):
            await d.called()
            await asyncio.sleep(0.05)
            failed.set()
            return error_answer(500, "too late")

        async with routed([p], [d]) as router:
            p.behave, d.behave = fail, tokens
            events = await router.events(prompt="x")
            assert [one["choices"][0]["text"] for one in events[:-1]] == ["a", "b"]
            assert events[-1] == "[DONE]"

    run(main())


@STREAM
def test_prefill_is_not_left_running_after_decode_has_succeeded(stream, monkeypatch):
    monkeypatch.setattr("kvxfer.router.dispatch.PREFILL_GRACE", 0.05)

    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            p.hold.clear()
            status = (await router.json(prompt="x"))[0] if not stream else (await router.events(prompt="x"))[-1]
            assert status in {200, "[DONE]"}
            await asyncio.wait_for((await p.called()).aborted.wait(), PATIENCE)

    run(main())


def test_a_prefill_that_ends_within_its_grace_is_not_aborted():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            p.hold.clear()
            assert (await router.json(prompt="x"))[0] == 200
            p.hold.set()
            await asyncio.wait_for((await p.called()).ended.wait(), PATIENCE)
            assert not p.calls[0].aborted.is_set()

    run(main())


@MODES
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@STREAM
def test_an_engine_that_cannot_be_reached_is_a_502_naming_leg_and_url(mode, leg, stream):
    async def main():
        p, d = pair()
        async with routed([p], [d], mode=mode, check_interval=60.0) as router:
            gone, left = (p, d) if leg == "prefill" else (d, p)
            await gone.stop()
            if mode == "push":
                left.hold.clear()
            status, body, _ = await router.json(prompt="x", stream=stream)
            assert status == body["error"]["code"] == 502
            assert f"{leg} leg" in body["error"]["message"]
            assert gone.url in body["error"]["message"]
            # and it is not tried again before a check has passed
            status, body, _ = await router.json(prompt="x", stream=stream)
            assert status == 503
            assert gone.url in body["error"]["message"]
            assert (await router.health())[0] == 503
            gone.runner = None

    run(main())


@MODES
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_time_out_names_the_leg(mode, leg):
    async def main():
        p, d = pair()
        async with routed([p], [d], mode=mode, request_timeout=0.5) as router:
            slow = p if leg == "prefill" else d
            slow.hold.clear()
            if leg == "prefill" and mode == "push":
                d.behave = _stall  # and so never times out before prefill does
            status, body, _ = await router.json(prompt="x")
            assert status == 504
            assert "--request-timeout" in body["error"]["message"]
            assert f"{leg} leg" in body["error"]["message"] or (leg, mode) == ("prefill", "push")
            await asyncio.wait_for(slow.calls[0].aborted.wait(), PATIENCE)

    run(main())


async def _stall(call, request):
    await asyncio.Event().wait()


def broken_stream(engine, how):
    async def behave(call, request):
        response = await engine.begin(request)
        await response.write(event(engine.chunk(call, "a")))
        await asyncio.sleep(0.02)
        if how == "error":
            failure = {"error": {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}}
            await response.write(event(engine.chunk(call, "b")) + event(failure) + b"data: [DONE]\n\n")
        elif how == "cut":
            await response.write(b'data: {"half')
            request.transport.abort()
            await asyncio.sleep(0.02)
        elif how == "silent end":
            await response.write_eof()
        elif how == "stall":
            await asyncio.Event().wait()
        return response

    return behave


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("error", 500, "boom"),
        ("cut", 502, "decode leg"),
        ("silent end", 502, "ended before it was finished"),
        ("stall", 504, "--request-timeout"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_fails_ends_with_the_error_and_without_done(how, code, words, n):
    async def main():
        p, d = pair()
        async with routed([p], [d], request_timeout=1.0 if how == "stall" else 20.0) as router:
            d.behave = broken_stream(d, how)
            events = await router.events(prompt="x", n=n)
            assert "[DONE]" not in events
            assert all("choices" in one for one in events[:-1])
            assert events[0]["choices"][0]["text"] == "a"
            error = events[-1]["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == code
            assert words in error["message"]
            if how == "error" and n == 1:
                assert events[1]["choices"][0]["text"] == "b"

    run(main())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_with_nothing_in_it_is_an_error(n, usage):
    """As vLLM ends a completion that failed before its first token, whose text may look like anything."""

    async def main():
        p, d = pair()

        async def nothing(call, request):
            response = await d.begin(request)
            if usage:
                await response.write(event({**d.chunk(call, ""), "choices": [], "usage": {"prompt_tokens": 7}}))
            await response.write(b"data: [DONE]\n\n")
            return response

        async with routed([p], [d]) as router:
            d.behave = nothing
            events = await router.events(prompt="x", n=n) if usage and n == 1 else None
            if events is None:
                status, body, _ = await router.json(prompt="x", n=n, stream=True)
                assert status == 500
            else:
                body = events[-1]
            assert "ended without an answer" in body["error"]["message"]
            d.behave, d.tokens = None, ['{"choices": []}', '"choices":[]']
            events = await router.events(prompt="x")
            assert events[-1] == "[DONE]"

    run(main())


def test_an_error_that_is_a_streams_first_event_becomes_the_status():
    async def main():
        p, d = pair()

        async def behave(call, request):
            response = await d.begin(request)
            await response.write(
                b'data: {"error": {"message": "no", "type": "T", "param": null, "code": 422}}\n\ndata: [DONE]\n\n'
            )
            return response

        async with routed([p], [d]) as router:
            d.behave = behave
            status, body, _ = await router.json(prompt="x", stream=True)
            assert (status, body["error"]["message"]) == (422, "no")

    run(main())


@STREAM
def test_one_single_request_that_fails_ends_the_others(stream):
    async def main():
        p, d = pair()

        async def fail_one(call, request):
            if call.body["prompt"] == "bad":
                await d.called(4)
                return error_answer(400, "bad prompt")
            return None

        async with routed([p], [d]) as router:
            d.behave = fail_one
            d.hold.clear()
            status, body, _ = await router.json(prompt=["a", "b", "bad", "c"], stream=stream)
            assert (status, body["error"]["message"]) == (400, "bad prompt")
            for call in d.calls:
                if call.body["prompt"] != "bad":
                    await asyncio.wait_for(call.aborted.wait(), PATIENCE)

    run(main())


def test_no_engine_at_all_is_a_503_with_the_reason():
    async def main():
        p, d = pair()
        p.port, d.port = free_port(), free_port()
        async with routed([p], [d], start=False, wait=False) as router:
            await router.until(503, url=p.url, healthy=False)
            for ask in ({}, {"stream": True}, {"n": 2}):
                status, body, _ = await router.json(prompt="x", **ask)
                assert status == 503
                assert "no prefill engine is healthy" in body["error"]["message"]
                assert p.url in body["error"]["message"]
            async with router.session.get(router.base + "/v1/models") as response:
                assert response.status == 503
                assert "no decode engine" in (await response.json())["error"]["message"]

    run(main())


def test_a_model_list_that_cannot_be_had_is_a_502():
    async def main():
        p, d = pair()
        async with routed([p], [d], check_interval=60.0) as router:
            await d.stop()
            d.runner = None
            async with router.session.get(router.base + "/v1/models") as response:
                assert response.status == 502
                assert d.url in (await response.json())["error"]["message"]

    run(main())

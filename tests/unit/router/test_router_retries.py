"""What is tried again with other engines, and what must not be; drain; slow clients; a stop that waits; many that leave."""

import asyncio
import random

import aiohttp
import pytest
from router_fakes import PATIENCE, FakeEngine, always, error_answer, event, pair, read_event, routed, run

STREAM = pytest.mark.parametrize("stream", [False, True])


def two_pairs():
    return (
        [FakeEngine("kv_producer", f"p{n}", port=str(5600 + n)) for n in range(2)],
        [FakeEngine("kv_consumer", f"d{n}", port=str(5700 + n)) for n in range(2)],
    )


async def dead(call, request):
    """As an engine whose process dies with the request in its hands."""
    request.transport.abort()
    await asyncio.Event().wait()


async def a_moment_later(call, request):
    await asyncio.sleep(0.2)


async def ask(router, *, stream, **body):
    if stream:
        return (await router.events(prompt="x", **body))[-1] == "[DONE]"
    return (await router.json(prompt="x", **body))[0] == 200


@STREAM
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", [dead, always(lambda: error_answer(500, "engine dead"))], ids=["dies", "fails"])
def test_an_engine_that_fails_is_replaced_by_another(stream, mode, role, how):
    async def main():
        ps, ds = two_pairs()
        async with routed(ps, ds, mode=mode) as router:
            broken, other = ps if role == "prefill" else ds
            if role == "prefill":
                # Decode has no token before its KV is there.
                ds[0].behave = ds[1].behave = a_moment_later
            broken.behave = how
            for _ in range(4):
                assert await ask(router, stream=stream)
            assert broken.calls
            assert len(other.calls) >= 4
            ids = [call.headers["X-Request-Id"] for engine in (*ps, *ds) for call in engine.calls]
            transfers = [call.params.get("transfer_id") for call in other.calls]
            assert len(set(transfers)) == len(transfers)
            for one in (*ps, *ds):
                mine = [call.headers["X-Request-Id"] for call in one.calls]
                assert len(set(mine)) == len(mine), "an engine met an id twice"
            assert any("-r1" in one for one in ids)
            for call in broken.calls:
                assert call.body["request_id"] == call.headers["X-Request-Id"]

    run(main())


@STREAM
def test_both_engines_of_an_attempt_may_fail_and_the_first_answer_is_right(stream):
    async def main():
        ps, ds = two_pairs()
        async with routed(ps, ds) as router:
            ps[0].behave = ds[0].behave = dead
            for _ in range(4):
                assert await ask(router, stream=stream)

    run(main())


@STREAM
def test_the_requests_own_fault_is_not_tried_again(stream):
    async def main():
        ps, ds = two_pairs()
        async with routed(ps, ds) as router:
            for one in (*ps, *ds):
                one.behave = always(lambda: error_answer(400, "too long"))
            status, body, _ = await router.json(prompt="x", stream=stream)
            assert (status, body["error"]["message"]) == (400, "too long")
            assert len(ps[0].calls) + len(ps[1].calls) == 1

    run(main())


def test_no_attempts_are_left_at_last():
    async def main():
        ps, ds = two_pairs()
        async with routed(ps, ds, retries=0) as router:
            ds[0].behave = ds[1].behave = always(lambda: error_answer(500, "no"))
            status, body, _ = await router.json(prompt="x")
            assert (status, body["error"]["message"]) == (500, "no")
            assert len(ds[0].calls) + len(ds[1].calls) == 1
        ps, ds = two_pairs()
        async with routed(ps, ds, retries=3) as router:
            ds[0].behave = ds[1].behave = always(lambda: error_answer(500, "no"))
            assert (await router.json(prompt="x"))[0] == 500
            assert len(ds[0].calls) == len(ds[1].calls) == 1, "an engine is asked once"

    run(main())


def test_a_stream_that_has_begun_is_not_tried_again():
    async def main():
        ps, ds = two_pairs()

        async def one_token_then_dead(call, request):
            response = await ds[0].begin(request)
            await response.write(event(ds[0].chunk(call, "a")))
            await asyncio.sleep(0.05)
            request.transport.abort()
            await asyncio.Event().wait()

        async with routed(ps, ds) as router:
            ds[0].behave = ds[1].behave = one_token_then_dead
            events = await router.events(prompt="x")
            assert events[0]["choices"][0]["text"] == "a"
            assert events[-1]["error"]["code"] == 502
            assert "decode leg" in events[-1]["error"]["message"]
            assert len(ds[0].calls) + len(ds[1].calls) == 1

    run(main())


def test_singles_of_a_list_are_tried_again_each_for_itself():
    async def main():
        ps, ds = two_pairs()
        async with routed(ps, ds) as router:
            ds[0].behave = dead
            status, body, _ = await router.json(prompt=["x", "y"], n=2)
            assert status == 200
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            assert (await router.events(prompt=["x", "y"], n=2))[-1] == "[DONE]"

    run(main())


def test_a_rejected_decode_leg_is_tried_again_and_its_prefill_ends_at_once():
    """vLLM ends a stream without an answer where it has refused the request after admission."""

    async def main():
        ps, ds = two_pairs()

        async def nothing(call, request):
            response = await ds[0].begin(request)
            await response.write(b"data: [DONE]\n\n")
            return response

        async with routed(ps, ds) as router:
            ds[0].behave = nothing
            for one in ps:
                one.hold.clear()
            asked = asyncio.ensure_future(router.events(prompt="x"))
            await asyncio.sleep(0.2)
            for one in ps:
                one.hold.set()
            assert (await asked)[-1] == "[DONE]"
            refused = [call for call in (*ps[0].calls, *ps[1].calls) if "-r" not in call.headers["X-Request-Id"]]
            if ds[0].calls and "-r" not in ds[0].calls[0].headers["X-Request-Id"]:
                await asyncio.wait_for(refused[0].aborted.wait(), PATIENCE)

    run(main())


def test_a_client_that_is_slow_slows_its_engine_and_gets_everything():
    async def main():
        p, d = pair()
        size = 64 * 1024
        count = 1200
        sent = 0

        async def much(call, request):
            nonlocal sent
            response = await d.begin(request)
            for number in range(count):
                await response.write(event(d.chunk(call, f"{number}-" + "x" * size)))
                sent += 1
            await response.write(b"data: [DONE]\n\n")
            return response

        async with routed([p], [d]) as router:
            d.behave = much
            async with router.post(prompt="x", stream=True) as response:
                await asyncio.sleep(0.7)
                assert sent < count / 2, "nobody slowed the engine"
                raw = await response.read()
            texts = [part for part in raw.split(b"\n\n") if part]
            assert texts[-1] == b"data: [DONE]"
            assert len(texts) == count + 1
            for number, part in enumerate(texts[:-1]):
                assert f'"{number}-'.encode() in part

    run(main())


def test_a_stop_lets_what_has_begun_end_and_takes_nothing_new():
    async def main():
        p, d = pair()
        answers = {}

        async def leave(router):
            d.hold.clear()
            asked = asyncio.ensure_future(router.json(prompt="x"))
            await d.called()
            asyncio.get_running_loop().call_later(0.3, d.hold.set)
            return asked

        async with aiohttp.ClientSession() as session:
            async with routed([p], [d], stop_timeout=10.0) as router:
                router.session = session
                answers["asked"] = await leave(router)
            assert (await answers["asked"])[0] == 200
            with pytest.raises(aiohttp.ClientError):
                await router.json(prompt="x")

    run(main())


def test_health_says_that_the_router_stops_while_it_still_answers():
    async def main():
        p, d = pair()
        done = []

        async def look(router):
            for _ in range(200):
                status, body = await router.health()
                if body["status"] == "stopping":
                    done.append((status, (await router.json(prompt="x"))[0]))
                    return
                await asyncio.sleep(0.01)

        session = aiohttp.ClientSession()
        async with routed([p], [d], stop_delay=1.0) as router:
            router.session = session
            looking = asyncio.ensure_future(look(router))
            await asyncio.sleep(0.05)
        await looking
        await session.close()
        assert done == [(503, 200)]

    run(main())


@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_of_many_that_leave_at_any_moment_nothing_is_left(count):
    async def main():
        ps, ds = two_pairs()
        chance = random.Random(7)
        for one in ds:
            one.tokens = ["a"] * 8

        async def takes_a_while(call, request):
            await asyncio.sleep(chance.random() * 0.02)

        async with routed(ps, ds) as router:
            for one in (*ps, *ds):
                one.behave = takes_a_while

            async def client(number):
                work = asyncio.ensure_future(router.events(prompt="x"))
                if number % 10 == 0:
                    await asyncio.sleep(chance.random() * 0.05)
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                else:
                    assert (await work)[-1] == "[DONE]"

            for start in range(0, count, 50):
                await asyncio.gather(*(client(start + number) for number in range(50)))
            calls = [call for one in (*ps, *ds) for call in one.calls]
            await asyncio.wait_for(asyncio.gather(*(call.ended.wait() for call in calls)), PATIENCE)
            status = await (await router.session.get(router.base + "/status")).json()
            for engine in status["engines"]:
                assert (engine["requests"], engine["queued_tokens"]) == (0, 0), engine
                assert (engine["waiting_tokens"], engine["running_tokens"]) == (0, 0), engine
            assert status["open_requests"] == status["queued_requests"] == 0

    run(main(), 60 if count < 1000 else 800)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_an_engine_killed_under_load_fails_only_what_it_had_begun_to_stream(role, mode):
    async def main():
        ps, ds = two_pairs()
        killed = ps[0] if role == "prefill" else ds[0]
        transports = set()
        dead_now = asyncio.Event()
        chance = random.Random(11)

        async def takes_a_while(call, request):
            transports.add(request.transport)
            await asyncio.sleep(0.1 + chance.random() * 0.1)

        async def streams_slowly(call, request):
            transports.add(request.transport)
            await asyncio.sleep(0.25 + chance.random() * 0.1)
            response = await killed.begin(request)
            for _ in range(8):
                await response.write(event(killed.chunk(call, "a")))
                await asyncio.sleep(0.02)
            await response.write(b"data: [DONE]\n\n")
            return response

        for one in ps:
            one.behave = takes_a_while
        for one in ds:
            one.behave = streams_slowly

        async def kill():
            await asyncio.sleep(0.5)
            for site in tuple(killed.runner.sites):
                await site.stop()
            for transport in transports:
                if transport is not None and transport.get_extra_info("sockname")[1] == killed.port:
                    transport.abort()
            dead_now.set()

        async def client(number):
            await asyncio.sleep(number * 0.01)
            async with router.post(prompt="x", stream=True) as response:
                raw = await response.read()
                assert response.status == 200, raw
                return [read_event(part) for part in raw.split(b"\n\n") if part]

        async with routed(ps, ds, mode=mode) as router:
            killing = asyncio.ensure_future(kill())
            answers = await asyncio.gather(*(client(number) for number in range(100)))
            await killing
            whole = [one for one in answers if one[-1] == "[DONE]"]
            broken = [one for one in answers if one[-1] != "[DONE]"]
            assert all(len(one) == 9 for one in whole)
            for one in broken:
                assert len(one) > 1, "what had not begun to stream was not tried again"
                assert one[-1]["error"]["code"] == 502
            assert len(broken) <= (0 if role == "prefill" else 20)
            assert killed.calls

    run(main())

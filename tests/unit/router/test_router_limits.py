"""Limits, trusted clients, what is passed to decode as it is, and what an operator can see."""

import asyncio
import codecs
import json

import aiohttp
import pytest
from aiohttp import web
from router_fakes import PATIENCE, pair, routed, run
from yarl import URL

from kvxfer.router import waterfall
from kvxfer.router.call import Trace
from kvxfer.router.checks import Checker
from kvxfer.router.engine import Engine, Told
from kvxfer.router.gauges import read_gauges
from kvxfer.router.identity import Identity
from kvxfer.router.limits import Limits, key_of, owner_of
from kvxfer.router.openai import ApiError
from kvxfer.router.passing import without_params
from kvxfer.router.path import path
from kvxfer.router.settings import Role, RouterSettings
from kvxfer.router.waterfall import stages
from kvxfer.transport.query import EngineReport, RankReport
from kvxfer.transport.records import HandoffRecord, Times


def limits(**more):
    now = [0.0]
    return Limits(RouterSettings(prefill=("http://a:1",), decode=("http://b:1",), **more), lambda: now[0]), now


def take(some, owner="a"):
    try:
        with some.one(owner):
            return 200
    except ApiError as error:
        return error.status


def test_each_key_has_its_own_rate():
    some, now = limits(rate_limit=2.0, rate_burst=3)
    assert [take(some) for _ in range(4)] == [200, 200, 200, 429]
    assert take(some, "b") == 200
    now[0] = 0.5
    assert [take(some) for _ in range(2)] == [200, 429]
    now[0] = 1000.0
    assert [take(some) for _ in range(4)] == [200, 200, 200, 429]
    take(some, "c")
    assert len(some._buckets) <= 2, "of keys whose bucket is full nothing is kept"
    unlimited, _ = limits()
    assert {take(unlimited) for _ in range(100)} == {200}
    assert not unlimited._buckets


def test_requests_at_one_time_are_limited_and_given_back():
    some, _ = limits(max_requests=1)
    with some.one("a"):
        assert take(some, "b") == 503
    assert take(some, "b") == 200


def test_a_rate_over_http_is_a_429_that_says_when_to_come_again():
    async def main():
        p, d = pair()
        async with routed([p], [d], rate_limit=0.01, rate_burst=1) as router:
            assert (await router.json(prompt="x"))[0] == 200
            status, body, headers = await router.json(prompt="x")
            assert (status, body["error"]["type"]) == (429, "RateLimitError")
            assert headers["Retry-After"]
            async with router.session.post(
                router.base + "/v1/completions", json={"prompt": "x"}, headers={"Authorization": "Bearer other"}
            ) as response:
                assert response.status == 200

    run(main())


def test_keys():
    assert key_of("Bearer  abc ") == key_of("bearer abc") == "abc"
    assert key_of("abc") == key_of(None) == key_of("Basic abc") == ""
    assert owner_of("Bearer a") != owner_of("Bearer b")
    assert "secret" not in owner_of("Bearer secret")


def test_kv_transfer_params_of_a_trusted_client_alone_reach_engines():
    async def main():
        p, d = pair()
        async with routed([p], [d], trusted_keys=("friend",)) as router:
            for key, seen in (("friend", True), ("stranger", False)):
                async with router.session.post(
                    router.base + "/v1/completions",
                    json={"prompt": "x", "kv_transfer_params": {"mine": 1, "transfer_id": "mine"}},
                    headers={"Authorization": f"Bearer {key}"},
                ) as response:
                    assert response.status == 200
                assert ("mine" in p.calls[-1].params) == seen
                assert p.calls[-1].params["transfer_id"] == d.calls[-1].params["transfer_id"] != "mine"

    run(main())


def answers_also(engine, handler, *paths):
    """Let a fake engine, which has not started yet, answer these paths by ``handler``."""
    start, make = engine.start, web.Application

    async def start_with_others(*where, **more):
        def application(**options):
            app = make(**options)
            for one in paths:
                app.router.add_route("*", one, handler)
            return app

        web.Application = application
        try:
            await start(*where, **more)
        finally:
            web.Application = make

    engine.start = start_with_others


def test_the_rest_of_the_api_is_passed_to_decode_and_control_is_not():
    async def main():
        p, d = pair()
        seen = []

        async def other(request):
            seen.append((request.method, request.path_qs, await request.read(), request.headers.copy()))
            if request.path == "/v1/slow":
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(b"data: 1\n\n")
                await response.write(b"data: 2\n\n")
                return response
            if request.path == "/v1/broken":
                response = web.StreamResponse(headers={"Content-Length": "100"})
                await response.prepare(request)
                await response.write(b"half")
                request.transport.abort()
                return response
            return web.json_response({"ok": True}, status=201, headers={"X-Own": "1"})

        answers_also(
            d,
            other,
            "/v1/embeddings",
            "/tokenize",
            "/v1/slow",
            "/v1/broken",
            "/v1/load_lora_adapter",
            "/reset_prefix_cache",
        )
        async with routed([p], [d]) as router:
            body = {"input": "x", "kv_transfer_params": {"do_remote_prefill": True}}
            async with router.session.post(
                router.base + "/v1/embeddings?a=b", json=body, headers={"Authorization": "Bearer k", "Cookie": "c=d"}
            ) as response:
                assert (response.status, await response.json(), response.headers["X-Own"]) == (201, {"ok": True}, "1")
            method, path, raw, headers = seen[-1]
            assert (method, path, json.loads(raw)) == ("POST", "/v1/embeddings?a=b", {"input": "x"})
            assert headers["Authorization"] == "Bearer k"
            assert "Cookie" not in headers
            async with router.session.post(router.base + "/tokenize", json={"prompt": "x"}) as response:
                assert response.status == 201
            async with router.session.get(router.base + "/v1/slow") as response:
                assert await response.read() == b"data: 1\n\ndata: 2\n\n"
            with pytest.raises(aiohttp.ClientError):
                async with router.session.get(router.base + "/v1/broken") as response:
                    await response.read()
            count = len(seen)
            for path in ("/reset_prefix_cache", "/sleep", "/collective_rpc"):
                async with router.session.post(router.base + path) as response:
                    assert response.status == 404
            for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/%6coad_lora_adapter"):
                async with router.session.post(URL(router.base + path, encoded=True), json={}) as response:
                    assert response.status == 403
                    assert "each prefill and each decode engine" in await response.text()
            assert len(seen) == count

    run(main())


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"a": 1, "kv_transfer_params": {}}', {"a": 1}),
        (b'{"a": 1, "kv\\u005ftransfer_params": {"x": 1}}', {"a": 1}),
        (b'{"a": "kv_transfer_params"}', {"a": "kv_transfer_params"}),
        (b'["kv_transfer_params"]', ["kv_transfer_params"]),
    ],
)
def test_kv_transfer_params_are_taken_out_however_they_are_written(body, left):
    assert json.loads(without_params(body)) == left
    assert without_params(b"\xff no json") == b"\xff no json"


@pytest.mark.parametrize(
    "body",
    [
        b"kv_transfer_params no json",
        b'{"x": NaN, "kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"x": 1e999, "kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"x": "\\ud800", "kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"x": "\\ud800", "kv\\u005ftransfer_params": {"do_remote_prefill": true}}',
        b'{"kv_transfer_params": {"do_remote_prefill": true}, "x": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        codecs.BOM_UTF8 + b'{"kv_transfer_params": {"do_remote_prefill": true}}',
        '{"kv_transfer_params": {"do_remote_prefill": true}}'.encode("utf-16"),
        '{"kv_transfer_params": {"do_remote_prefill": true}}'.encode("utf-16-be"),
        '{"kv_transfer_params": {"do_remote_prefill": true}}'.encode("utf-32-le"),
    ],
)
def test_what_an_engine_might_read_params_in_and_this_router_cannot_is_a_400(body):
    with pytest.raises(ApiError) as failed:
        without_params(body)
    assert failed.value.status == 400


@pytest.mark.parametrize(
    "spelt",
    [
        "/v1/%2e%2e/sleep", "/v1/../sleep", "/v1/..%2fsleep", "/v1/%2e%2e%2fmetrics", "/v1/x/../../sleep", "/v1/./../metrics",
        "/v1/models/..%2f..%2fmetrics", "/v1/completions/", "/v1/chat/completions/", "/v1/x/%2e%2e/completions", "/v1//x",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_leads_elsewhere(spelt):
    """Neither to what engines keep to themselves, nor to a completion that is handed over to nobody."""

    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            host, port = router.base.removeprefix("http://").split(":")
            body = b'{"model": "m", "prompt": "x"}'
            for method in ("GET", "POST"):
                reader, writer = await asyncio.open_connection(host, int(port))
                head = (
                    f"{method} {spelt} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                answer = await asyncio.wait_for(reader.read(), PATIENCE)
                writer.close()
                assert answer.startswith(b"HTTP/1.1 404 "), answer
                assert b'"NotFoundError"' in answer, "the router's own word, and not an engine's"
            assert not d.calls

    run(main())


def test_an_upload_is_passed_as_it_is_and_a_query_keeps_its_escapes():
    async def main():
        p, d = pair()
        seen = []

        async def other(request):
            seen.append((request.raw_path, await request.read()))
            return web.json_response({})

        answers_also(d, other, "/v1/audio/transcriptions")
        async with routed([p], [d]) as router:
            sound, where = b"--b\r\n\0\1\\u kv_transfer_params", "/v1/audio/transcriptions?a=b%26c=d"
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            async with router.session.post(
                URL(router.base + where, encoded=True), data=sound, headers=kind
            ) as response:
                assert response.status == 200
            assert seen == [(where.replace("c=d", "c%3Dd"), sound)] or seen == [(where, sound)]

    run(main())


METRICS = """
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
process_start_time_seconds 1.7e+09
"""


def test_gauges():
    assert read_gauges(METRICS) == Told(running=5, waiting=1, capacity=16000, started="1.7e+09", reclaimable=12000)
    assert read_gauges(METRICS + 'kvxfer_reclaimable_tokens{engine="0"} 500\n').reclaimable == 500
    assert read_gauges("") == Told()
    assert (
        read_gauges("vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running NaN\nvllm:num_requests_waiting x")
        == Told()
    )


HANDOFFS = """
kvxfer_handoffs_total{engine="0",mode="push",model_name="m",outcome="done",side="source"} 7.0
kvxfer_handoffs_total{engine="0",mode="push",model_name="m",outcome="done",side="sink"} 5.0
kvxfer_handoffs_total{engine="1",mode="push",model_name="m",outcome="failed",side="sink"} 2.0
kvxfer_handoffs_total{side="sink",outcome="failed",mode="push"} NaN
kvxfer_handoffs_created{engine="0",mode="push",model_name="m",outcome="done",side="sink"} 1.7e+09
"""


def test_handoffs_that_fail_are_said_of_a_decode_engine_until_one_ends_well():
    assert read_gauges(HANDOFFS) == Told(received=5, not_received=2)
    identity = Identity("d", "10.0.0.2", 5600, 1, 1)
    engine = Engine(Role.DECODE, URL("http://10.0.0.2:8000"))
    said = []
    for done, failed, started in (
        (5, 2, "a"),
        (5, 2, "a"),
        (5, 3, "a"),
        (5, 3, "a"),
        (6, 4, "a"),
        (6, 5, "a"),
        (0, 0, "b"),
        (0, 1, "b"),
    ):
        says = Told(received=done, not_received=failed, started=started)
        said.append(engine.handoffs_fail(says, identity) is not None)
        engine.passed([identity], says)
    assert said == [False, False, True, True, False, True, False, True]
    assert "kvxfer records 10.0.0.2:5600" in (engine.handoffs_fail(says, identity) or "")


def test_a_port_that_speaks_no_http_is_said_to_be_another_one():
    async def main():
        async def silent(_reader, writer):
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = Engine(Role.PREFILL, URL(f"http://127.0.0.1:{port}"))
        async with aiohttp.ClientSession() as session:
            await Checker(RouterSettings(("http://a:1",), ("http://b:1",)), session).check(engine)
        server.close()
        assert "vLLM's HTTP server (--port)" in engine.reason

    run(main())


def test_metrics_status_and_trace_ids():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            given = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
            async with router.session.post(
                router.base + "/v1/completions", json={"prompt": "x"}, headers={"traceparent": given}
            ) as response:
                await response.read()
            await router.events(prompt="x")
            d.behave = lambda call, request: _refuse()
            assert (await router.json(prompt="x"))[0] == 400
            for call in (p.calls[0], d.calls[0]):
                assert call.headers["traceparent"] == given
            made = p.calls[1].headers["traceparent"]
            assert d.calls[1].headers["traceparent"] == made != given
            status = await (await router.session.get(router.base + "/status")).json()
            first, second, third = status["requests"]
            assert first["trace_id"] == "0123456789abcdef0123456789abcdef"
            assert second["trace_id"] == made.split("-")[1]
            assert [one["outcome"] for one in (first, second, third)] == ["ok", "ok", "error 400"]
            assert 0 <= second["prefill_sent_s"] <= second["first_token_s"] <= second["done_s"]
            assert (second["prefill"], second["decode"], second["attempts"]) == (p.url, d.url, 1)
            text = await (await router.session.get(router.base + "/metrics")).text()
            for line in (
                'kvxfer_router_requests_total{outcome="ok"} 2.0',
                'kvxfer_router_requests_total{outcome="error 400"} 1.0',
                "kvxfer_router_first_token_seconds_count 2.0",
                f'kvxfer_router_engine_usable{{engine="{d.url}",role="decode"}} 1.0',
                "kvxfer_router_open_requests 0.0",
            ):
                assert line in text, line

    async def _refuse():
        return web.json_response({"error": {"message": "no", "code": 400}}, status=400)

    run(main())


def test_a_waterfall_has_the_engines_stages_between_the_routers():
    trace = Trace(
        "r", received=100.0, prefill_sent=100.01, decode_sent=100.02, prefill_done=100.5, first=100.6, done=101.0
    )
    sink = HandoffRecord(
        "x", "r", "sink", 0, "push", times=Times(expected=7.0, allocated=7.1, registered=7.2, last_byte=7.5)
    )
    source = HandoffRecord(
        "x", "r", "source", 1, "push", times=Times(expected=3.0, registered=3.2, first_post=3.3, last_byte=3.5)
    )
    found = {(one["stage"], one["by"]): (one["start_s"], one["seconds"]) for one in stages(trace, [sink, source])}
    assert found == {
        ("router queue", "router"): (0.0, pytest.approx(0.01)),
        ("prefill", "router"): (pytest.approx(0.01), pytest.approx(0.49)),
        ("decode queue", "sink rank 0"): (pytest.approx(0.02), pytest.approx(0.1)),
        ("registration", "sink rank 0"): (pytest.approx(0.12), pytest.approx(0.1)),
        ("wait for KV", "sink rank 0"): (pytest.approx(0.22), pytest.approx(0.3)),
        ("registration wait", "source rank 1"): (pytest.approx(0.01), pytest.approx(0.2)),
        ("transfer", "source rank 1"): (pytest.approx(0.31), pytest.approx(0.2)),
        ("first token", "router"): (pytest.approx(0.5), pytest.approx(0.1)),
        ("decode", "router"): (pytest.approx(0.6), pytest.approx(0.4)),
    }
    assert stages(Trace("r"), []) == []
    bare = HandoffRecord("x", "r", "sink", 0, "push")
    assert [one["by"] for one in stages(trace, [bare])] == ["router"] * 4


def chain(trace, *records):
    found = [(one["stage"], one["seconds"]) for one in path(trace, records)]
    assert sum(seconds for _, seconds in found) == pytest.approx(trace.first - trace.received, abs=1e-5)
    return dict(found)


def test_what_the_first_token_waited_for_adds_up_where_all_share_a_clock():
    trace = Trace("r", received=100.0, prefill_sent=100.01, decode_sent=100.02, prefill_done=100.6, first=100.75)
    times = Times(expected=100.05, allocated=100.1, registered=100.12, notified=100.61, released=100.65)
    sink = HandoffRecord("x", "r", "sink", 0, "push", times=times)
    early = HandoffRecord("x", "r", "sink", 1, "push", times=Times(expected=100.04, released=100.3))
    source = HandoffRecord("x", "r", "source", 0, "push", times=Times(chunks_final=[100.3, 100.55]))
    assert chain(trace, early, source, sink) == {
        "router queue": pytest.approx(0.01),
        "router, until decode's leg": pytest.approx(0.01),
        "decode's front end": pytest.approx(0.03),
        "decode queue": pytest.approx(0.05),
        "registration": pytest.approx(0.02),
        "prefill computes": pytest.approx(0.43),
        "wait for KV": pytest.approx(0.06),
        "report": pytest.approx(0.04),
        "decode's first token": pytest.approx(0.1),
        "the rest": pytest.approx(0.0, abs=1e-5),
    }


def test_what_no_clock_tells_is_the_rest():
    trace = Trace(
        "r", received=100.0, late=True, prefill_sent=100.01, prefill_done=100.5, decode_sent=100.52, first=100.75
    )
    times = Times(expected=7.0, allocated=7.05, registered=7.07, last_byte=7.13, released=7.15)
    sink = HandoffRecord("x", "r", "sink", 0, "pull", times=times)
    source = HandoffRecord("x", "r", "source", 0, "pull", times=Times(chunks_final=[3.0]))
    assert chain(trace, source, sink) == {
        "router queue": pytest.approx(0.01),
        "prefill": pytest.approx(0.49),
        "between the legs": pytest.approx(0.02),
        "decode queue": pytest.approx(0.05),
        "registration": pytest.approx(0.02),
        "wait for KV": pytest.approx(0.06),
        "report": pytest.approx(0.02),
        "the rest": pytest.approx(0.08),
    }
    assert chain(trace) == {
        "router queue": pytest.approx(0.01),
        "prefill": pytest.approx(0.49),
        "between the legs": pytest.approx(0.02),
        "the rest": pytest.approx(0.23),
    }
    assert chain(Trace("r", received=1.0, first=1.5)) == {"the rest": pytest.approx(0.5)}
    assert path(Trace("r"), [sink]) == [], "no first token, nothing that it waited for"


def test_the_waterfall_asks_every_data_parallel_rank_of_an_engine(monkeypatch):
    def fetch(host, port, **options):
        record = HandoffRecord(
            f"xfer-{port}",
            "r",
            "sink",
            0,
            "push",
            outcome="done",
            times=Times(expected=1.0, allocated=1.05, registered=1.1, released=1.4),
        )
        return EngineReport("d", [RankReport(0, None, "LIBFABRIC", {}, [record], 2.0)])

    monkeypatch.setattr(waterfall, "fetch_records", fetch)
    engine = Engine(Role.DECODE, URL("http://10.0.0.2:8000"))
    engine.identities = [Identity("d", "10.0.0.2", 5600 + rank, 1, 1) for rank in range(2)]
    found = asyncio.run(
        waterfall.Waterfall().of(
            [
                Trace("r", transfer_id=f"xfer-{5600 + rank}", received=1.0, decode_sent=1.0, first=1.5)
                for rank in range(2)
            ],
            [engine],
        )
    )
    assert ["sink rank 0" in {one["by"] for one in request["stages"]} for request in found[0]] == [True, True]
    assert found[1] == []


def test_the_waterfall_says_whose_records_it_could_not_have():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            await router.json(prompt="x")
            fall = await asyncio.wait_for((await router.session.get(router.base + "/status/waterfall")).json(), 20)
            assert fall["requests"][0]["stages"][0]["stage"] == "router queue"
            assert len(fall["without_records"]) == 2  # the fakes have no control channel
            assert p.url in fall["without_records"][0]

    run(main())

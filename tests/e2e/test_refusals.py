"""What two real engines say when they do not fit, and what a starting engine says when it cannot start."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from collections import Counter

import aiohttp
import pytest

from kvxfer.bench import engines
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.process import ServerError, free_ports, running
from kvxfer.transport.query import fetch_records
from tests.e2e.conftest import PYTHON, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_engines_of_different_geometry(bench_model, tmp_path) -> None:
    """Block size and dtype differ: the handoff is refused with both sides' layouts and the cure; both engines serve on."""
    prefill, decode = engines.pair_specs("push", bench_model, python=PYTHON, max_model_len=4096)
    decode = dataclasses.replace(decode, block_size=128, dtype="bfloat16")
    first, second, router = engines.make_pair("push", prefill, decode, tmp_path)

    async def go() -> None:
        tokens = prompt(300, 1)
        async with Client(router.url) as client:
            with pytest.raises(RequestError):
                await client.complete(tokens, 4, stream=False)
        reason = fetch_records(second.control_host, second.control_port).records[-1].reason
        for text in (
            "element type differs: the source has float32, the sink bfloat16",
            "push-prefill rank 0 lays k of layers 0-3",
            "[token 32] float32",
            "[token 128] bfloat16",
            "with the same model, --dtype and --kv-cache-dtype",
        ):
            assert text in reason
        for engine in (first, second):
            assert engine.server.healthy()
            async with Client(engine.url) as client:
                assert len((await client.complete(tokens, 4, stream=False)).token_ids) == 4

    with running(first.server, second.server, router):
        asyncio.run(go())


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


SINK = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "remote_engine_id": "x"}
ODD = [
    7,
    -1,
    2**63,
    1e308,
    "x",
    "x" * 1_000_000,
    "a\nb\x1b[2J\0",
    "\ud800",
    [],
    [[[]]],
    {},
    nested(200),
    None,
    True,
    False,
]
LONG = "x" * 1_000_000
NASTY: list[object] = [
    *({**SINK, key: value} for key in [*SINK, "transfer_id", "remote_request_id", "unknown"] for value in ODD),
    *(
        {"do_remote_decode": True, key: value}
        for key in ["transfer_id", "do_remote_prefill", "kvxfer_probe"]
        for value in ODD
    ),
    *(
        {**SINK, "remote_port": port}
        for port in [0, -5600, 65536, 10**30, "5600x", "9" * 5000, 1.5, float("nan"), float("inf")]
    ),
    *(
        {**SINK, "remote_host": host}
        for host in ["", "::", "0.0.0.0", "*", "fe80::1%lo", "[::1", "tcp://x", "a b", "../..", "\0"]
    ),
    *({"a": nested(depth)} for depth in [10, 500]),
    {**SINK, **{f"key{i}": i for i in range(10_000)}},
    {LONG: LONG},
    *ODD,
]


def test_kv_transfer_params_of_every_shape_through_the_real_front(bench_model, tmp_path) -> None:
    """Each is answered: by tokens that were computed locally, or by an error that says so. Both engines serve on."""
    prefill, decode = engines.pair_specs("push", bench_model, python=PYTHON, max_model_len=4096)
    quick = {"connect_timeout": 1.0, "leg_timeout": 2.0}
    prefill, decode = (dataclasses.replace(spec, connector_config=quick) for spec in (prefill, decode))
    first, second, _ = engines.make_pair("push", prefill, decode, tmp_path)
    statuses: Counter[int] = Counter()

    async def ask(client: Client, params: object, reference: tuple[int, ...]) -> None:
        status, said = 200, ""
        try:
            answer = await client.complete(prompt(40, 1), 4, stream=False, extra={"kv_transfer_params": params})
            assert answer.token_ids == reference, str(params)[:200]
        except RequestError as error:
            status, said = error.status, str(error)
        statuses[status] += 1
        assert status in (200, 400, 422, 500), f"{str(params)[:200]}: {said[:500]}"

    async def ask_all(url: str, reference: tuple[int, ...]) -> None:
        for start in range(0, len(NASTY), 12):
            # A client for each dozen: a server closes connections that were idle for some seconds.
            async with Client(url) as client:
                await asyncio.gather(*(ask(client, params, reference) for params in NASTY[start : start + 12]))

    async def go() -> None:
        async with Client(first.url) as client:
            reference = (await client.complete(prompt(40, 1), 4, stream=False)).token_ids
        await asyncio.gather(ask_all(first.url, reference), ask_all(second.url, reference))
        deep = '{"a":' * 20_000 + "1" + "}" * 20_000  # deeper than this process could write it
        body = f'{{"model": "{engines.MODEL_NAME}", "prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": {deep}}}'
        async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
            for engine in (first, second):
                async with session.post(f"{engine.url}/v1/completions", data=body) as response:
                    statuses[response.status] += 1
                    assert response.status in (200, 400, 422, 500), await response.text()
        for engine in (first, second):
            assert engine.server.healthy()
            async with Client(engine.url) as client:
                assert (await client.complete(prompt(40, 1), 4, stream=False)).token_ids == reference
        print(f"{len(NASTY)} to each engine: {dict(statuses)}")
        assert statuses[200] > len(NASTY)
        for engine in (first, second):
            log = engine.server.log.read_text()
            assert "defect in" not in log
            assert "\x1b[2J" not in log

    with running(first.server, second.server):
        asyncio.run(go())


@pytest.mark.parametrize(
    "why",
    ["port in use", *(pytest.param(why, marks=pytest.mark.slow) for why in ("library missing", "unknown setting"))],
)
def test_an_engine_that_cannot_start_says_why(bench_model, tmp_path, why) -> None:
    spec, _ = engines.pair_specs("push", bench_model, python=PYTHON, max_model_len=4096)
    expected = {
        "port in use": r"cannot listen for its peers at 127\.0\.0\.1:\d+: .*[Aa]ddress already in use.*set control_port",
        "library missing": r"libfabric.*KVXFER_LIBFABRIC",
        "unknown setting": r"'control_prot' is not a setting; did you mean 'control_port'\?",
    }[why]
    if why == "library missing":
        spec = dataclasses.replace(spec, environment={"KVXFER_LIBFABRIC": str(tmp_path / "libfabric.so.1")})
    if why == "unknown setting":
        spec = dataclasses.replace(spec, connector_config={"control_prot": 1})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = free_ports(2)
        if why == "port in use":
            ports[1] = taken.getsockname()[1]
        engine = engines.make_engine(spec, tmp_path, ports)
        with pytest.raises(ServerError, match="ended with status"):
            try:
                engine.server.start()
                engine.server.wait_ready()
            finally:
                engine.server.stop()
    log = engine.server.log.read_text()
    assert re.search(expected, log, re.DOTALL), log[-3000:]

"""What two real engines say when they do not fit, and what a starting engine says when it cannot start."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket

import pytest

from kvxfer.bench import engines
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.process import ServerError, free_ports, running
from kvxfer.transport.query import fetch_records
from tests.e2e.conftest import PYTHON, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_engines_of_different_geometry(bench_model, tmp_path) -> None:
    """Block size and dtype differ: the handoff is refused with both sides' values and the cure; both engines serve on."""
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
            "block size differs: push-prefill has 32, push-decode has 128; set the same --block-size on both",
            "cache dtype differs: push-prefill has float32, push-decode has bfloat16; set the same --dtype",
        ):
            assert text in reason
        for engine in (first, second):
            assert engine.server.healthy()
            async with Client(engine.url) as client:
                assert len((await client.complete(tokens, 4, stream=False)).token_ids) == 4

    with running(first.server, second.server, router):
        asyncio.run(go())


@pytest.mark.parametrize("why", ["port in use", "library missing", "unknown setting"])
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

"""vLLM's own example proxies, their sources unchanged, and ``vllm bench serve`` drive our connectors.

The sources are not ours: ``VLLM_SRC`` names a checkout of vLLM, or what ``scripts/fetch_vllm_sources.sh --examples`` unpacks of
its source distribution. A proxy that is not there is left out, with its path.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.bench import vllm_serve
from kvxfer.bench.client import Client
from kvxfer.bench.engines import MODEL_NAME
from kvxfer.bench.process import Server, free_ports, running
from tests.e2e.conftest import Pair, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SOURCES = os.environ.get("VLLM_SRC")
EXAMPLES = "examples/disaggregated/disaggregated_serving"
TESTS = "tests/v1/kv_connector/nixl_integration"
PUSH_DEMO = f"{EXAMPLES}/disagg_proxy_pushconnector_demo.py"
PULL_DEMO = f"{EXAMPLES}/disagg_proxy_demo.py"
TOY = f"{TESTS}/toy_proxy_server.py"
TOY_PUSH = f"{TESTS}/toy_push_proxy_server.py"

HANDS_OVER = (PUSH_DEMO, TOY, TOY_PUSH)
"""The pull demo sends no ``kv_transfer_params`` at all (0.29): under any connector, decode computes its prompts itself."""
ALL = (*HANDS_OVER, PULL_DEMO)


@contextmanager
def proxy(pair: Pair, path: str, logs: Path) -> Iterator[str]:
    """Run an unchanged proxy over the pair; its URL."""
    if SOURCES is None:
        pytest.skip("VLLM_SRC is not set: it names a checkout of vLLM, whose example proxies are run")
    script = Path(SOURCES) / path
    if not script.exists():
        pytest.skip(f"{script} does not exist in this vLLM")
    (port,) = free_ports(1)
    ports = [engine.url.rpartition(":")[2] for engine in (pair.prefill, pair.decode)]
    command = [sys.executable, str(script), "--port", str(port)]
    if path.startswith(TESTS):
        for role, number in zip(("prefiller", "decoder"), ports, strict=True):
            command += [f"--{role}-hosts", "127.0.0.1", f"--{role}-ports", number]
    else:
        command += ["--model", MODEL_NAME, "--prefill", f"127.0.0.1:{ports[0]}", "--decode", f"127.0.0.1:{ports[1]}"]
    if path == PUSH_DEMO:
        command += ["--prefill-engine-id", pair.prefill.spec.name, "--prefill-kv-host", pair.prefill.control_host]
        command += ["--prefill-side-channel-port", str(pair.prefill.control_port)]
    server = Server(
        name=script.stem,
        command=command,
        environment={**os.environ, "OPENAI_API_KEY": "none"},
        log=logs / f"{script.stem}.log",
        url=f"http://127.0.0.1:{port}",
        ready_seconds=60.0,
        ready_path="/healthcheck" if path.startswith(TESTS) else "/status",
    )
    with running(server):
        yield server.url


@pytest.mark.parametrize("path", ALL, ids=lambda path: Path(path).stem)
def test_an_unchanged_proxy(pair: Pair, path: str, tmp_path: Path) -> None:
    """Streamed and whole, alone and twelve at once: the tokens of one engine, and the KV was handed over, not computed again."""

    seed = 1000 * ALL.index(path)  # no prompt twice: decode has a prefix cache

    async def go(url: str) -> None:
        async with Client(url) as client:
            for length in (1, 33, 700):
                for stream in (True, False) if path in HANDS_OVER else (True,):  # whose answers name no type
                    tokens = prompt(length, seed + length + stream)
                    answer = await client.complete(tokens, 12, stream=stream)
                    assert answer.token_ids == await pair.reference(tokens, 12), (length, stream)
                    if length > 1 and path in HANDS_OVER:
                        source, sink = pair.records(pair.prefill)[-1], pair.records(pair.decode)[-1]
                        assert (source.outcome, sink.outcome, source.handoff) == ("done", "done", sink.handoff)
                        assert source.bytes + sink.bytes == -(-(length - 1) // 32) * 262_144
            messages = [{"role": "user", "content": f"Tell {Path(path).stem} about descriptors. " * 10}]
            async with Client(pair.prefill.url) as alone:
                reference = (await alone.chat(messages, 12, stream=False)).text
            assert (await client.chat(messages, 12)).text == reference
            prompts = [prompt(50 + 61 * number, seed + 900 + number) for number in range(12)]
            references = [await pair.reference(tokens, 12) for tokens in prompts]
            answers = await asyncio.gather(*(client.complete(tokens, 12) for tokens in prompts))
            assert [answer.token_ids for answer in answers] == references
        await pair.all_free(within=5.0)

    before = handoffs(pair)
    with proxy(pair, path, tmp_path) as url:
        asyncio.run(go(url))
    outcomes = handoffs(pair)[len(before) :]
    assert outcomes == (["done"] * len(outcomes))
    # All but the prompts of one token, of which there is nothing to hand over but the word that nothing is.
    assert len(outcomes) >= 17 if path in HANDS_OVER else not outcomes


def handoffs(pair: Pair) -> list[str]:
    return [record.outcome for record in pair.records(pair.decode)]


SEEDS = {"router": 6, "proxy": 8}
"""vLLM's random prompts count upwards from a random token, and those of some seeds (5 and 6) have a prompt in common here."""


@pytest.mark.parametrize("through", ["router", "proxy"])
def test_vllm_bench_serve(pair: Pair, through: str, tmp_path: Path) -> None:
    """vLLM's own load, at 4 a second: nothing fails, and each of its prompts was handed over."""

    def load(url: str) -> None:
        raw = vllm_serve.measure(
            pair.prefill.spec.python,
            qps=4.0, input_tokens=200, output_tokens=8, requests=12, seed=SEEDS[through], url=url,
            model=str(pair.prefill.spec.model), served_model_name=MODEL_NAME, warm_up=1,
        )  # fmt: skip
        assert raw["completed"] == 12
        assert raw["output_lens"] == [8] * 12
        assert not any(raw.get("errors") or [])

    before = len(handoffs(pair))
    if through == "router":
        load(pair.router.url)
    else:
        with proxy(pair, {"push": PUSH_DEMO, "pull": TOY}[pair.mode], tmp_path) as url:
            load(url)
    made = handoffs(pair)[before:]
    assert len(made) >= 12
    assert set(made) == {"done"}
    asyncio.run(pair.all_free(within=5.0))

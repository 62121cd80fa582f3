"""Real vLLM pairs on real GPUs: the tokens of one engine alone, whatever the runner and the cache's layout.

NIXL's UCX moves VRAM; or LIBFABRIC moves host memory over tcp, and kvxfer copies (``kv_buffer_device: cpu``).

pytest -m gpu tests/gpu        needs vLLM for CUDA, NIXL, and a GPU; two GPUs are used where there are two
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("nixl")

import torch

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client
from kvxfer.bench.process import running
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here"),
]

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 300, 2000, 6000)
VRAM, HOST = {"backend": "UCX"}, {"backend": "LIBFABRIC"}
RUNNERS = [
    *[(mode, runner, VRAM) for mode, runner in (("push", "0"), ("push", "1"), ("pull", "0"))],
    *[(mode, runner, HOST) for mode, runner in (("push", "0"), ("push", "1"), ("pull", "0"))],
]
"""Mode, VLLM_USE_V2_MODEL_RUNNER (the V1 runner has block-major caches up to 0.28, the V2 runner has not), and what moves the KV."""


@pytest.fixture(scope="module", params=RUNNERS, ids=lambda one: f"{one[0]}-V{1 + int(one[1])}-{one[2]['backend']}")
def pair(request, tmp_path_factory) -> Iterator[tuple]:
    mode, runner, config = request.param
    logs = Path(os.environ.get("OUT") or tmp_path_factory.mktemp("logs")) / f"{mode}{runner}{config['backend']}"
    logs.mkdir(parents=True, exist_ok=True)
    prefill, decode = engines.pair_specs(
        mode,
        model.build(),
        python=sys.executable,
        prefix_caching=True,
        num_blocks=1024,
        max_model_len=8192,
        max_num_batched_tokens=1024,
        connector_config=config,
        buffer_device="cpu" if config is HOST else None,
        args=("--attention-backend", "TRITON_ATTN", "--gpu-memory-utilization", "0.3"),
    )
    last = min(torch.cuda.device_count(), 2) - 1

    def on(spec: engines.EngineSpec, device: int) -> engines.EngineSpec:
        here = {
            "CUDA_VISIBLE_DEVICES": str(device),
            "VLLM_USE_V2_MODEL_RUNNER": runner,
            # Without it, an engine alone has other tokens in a crowd than one by one: 14 of 192 answers on H200s.
            "VLLM_BATCH_INVARIANT": "1",
            **({"FI_PROVIDER": "tcp"} if config is HOST else {}),
        }
        return dataclasses.replace(spec, environment=here)

    first, second, router = engines.make_pair(mode, on(prefill, 0), on(decode, last), logs)
    with running(first.server, second.server, router):
        yield first, second, router
        told = [{"engine": engine.spec.name, "records": records_of(engine)} for engine in (first, second)]
        (logs / "records.json").write_bytes(msgspec.json.encode(told))


def records_of(engine: engines.Engine) -> list:
    return fetch_records(engine.control_host, engine.control_port, last=1000).records


def test_prompts_of_many_lengths_have_the_tokens_of_one_engine(pair) -> None:
    prefill, decode, router = pair

    async def go() -> None:
        async with Client(router.url) as client, Client(prefill.url) as alone:
            for length in LENGTHS:
                tokens = model.prompt_tokens(length, 100 + length)
                answer = await client.complete(tokens, 12)
                reference = await alone.complete(tokens, 12, stream=False)
                assert answer.token_ids == reference.token_ids, length
                if length > 1:
                    record = records_of(decode)[-1]
                    assert (record.outcome, record.tokens) == ("done", length - 1)
                    assert record.backend == decode.spec.connector_config["backend"]

    asyncio.run(go())


def test_a_crowd_with_hits_on_both_sides_has_the_tokens_of_one_engine(pair) -> None:
    prefill, decode, router = pair
    before = len(records_of(decode))

    async def go() -> None:
        shared = model.prompt_tokens(640, 7)
        prompts = [shared + model.prompt_tokens(50 + 61 * i, 900 + i) for i in range(24)]
        async with Client(router.url) as client, Client(prefill.url) as alone:
            answers = await asyncio.gather(*(client.complete(tokens, 16) for tokens in prompts))
            for tokens, answer in zip(prompts, answers, strict=True):
                reference = await alone.complete(tokens, 16, stream=False)
                assert answer.token_ids == reference.token_ids, len(tokens)

    asyncio.run(go())
    assert {record.outcome for record in records_of(decode)[before:]} == {"done"}

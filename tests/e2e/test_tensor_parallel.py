"""Engines of several tensor-parallel ranks: each rank of one hands its heads to, or takes them from, the ranks that hold them.

The reference is the decode engine itself, asked directly, since another number of ranks adds up in another order. More ranks
than KV heads are too many for two cores: the contract tests have them.

vLLM's ranks spin while they wait for each other, six busy processes on two cores: nobody is thought dead for being late here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvxfer.bench import engines
from kvxfer.bench.client import Client
from kvxfer.bench.process import running
from tests.e2e.conftest import PYTHON, Pair, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

PATIENCE = {"leg_timeout": 120.0, "peer_timeout": 60.0, "connect_timeout": 60.0}

MODES = [
    pytest.param(("push", 1, 2), id="push-1-2"),
    pytest.param(("pull", 2, 1), id="pull-2-1"),
    pytest.param(("push", 2, 1), id="push-2-1", marks=pytest.mark.slow),
    pytest.param(("pull", 1, 2), id="pull-1-2", marks=pytest.mark.slow),
    pytest.param(("push", 2, 2), id="push-2-2", marks=pytest.mark.slow),
    pytest.param(("pull", 2, 2), id="pull-2-2", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=MODES)
def pair(request, bench_model, tmp_path_factory) -> Iterator[Pair]:
    mode, ours, theirs = request.param
    prefill, decode = engines.pair_specs(
        mode,
        bench_model,
        python=PYTHON,
        prefix_caching=False,
        num_blocks=260,
        max_model_len=4096,
        max_num_batched_tokens=512,
        threads=1,
        ready_seconds=500.0,
        connector_config=PATIENCE,
    )
    sizes = zip((prefill, decode), (ours, theirs), strict=True)
    specs = [dataclasses.replace(spec, tensor_parallel=size) for spec, size in sizes]
    first, second, router = engines.make_pair(mode, *specs, tmp_path_factory.mktemp("tensor-parallel"))
    with running(first.server, second.server, router):
        yield Pair(mode, first, second, router)


def test_prompts_of_many_lengths(pair: Pair) -> None:
    async def go() -> None:
        async with Client(pair.router.url) as client, Client(pair.decode.url) as alone:
            for length in (2, 33, 128, 700, 2000):
                tokens = prompt(length, 900 + length)
                answer = await client.complete(tokens, 12)
                assert answer.token_ids == (await alone.complete(tokens, 12, stream=False)).token_ids, length
            for engine in (pair.prefill, pair.decode):
                records = pair.records(engine)
                assert {record.rank for record in records} == set(range(engine.spec.tensor_parallel))
                assert {record.outcome for record in records} == {"done"}
        await pair.all_free(within=5.0)

    asyncio.run(go())


def test_many_at_once(pair: Pair) -> None:
    async def go() -> None:
        prompts = [prompt(length, 950 + length) for length in (40, 333, 700, 1200, 90, 510)]
        async with Client(pair.router.url) as client, Client(pair.decode.url) as alone:
            answers = await asyncio.gather(*(client.complete(tokens, 10) for tokens in prompts))
            for tokens, answer in zip(prompts, answers, strict=True):
                assert answer.token_ids == (await alone.complete(tokens, 10, stream=False)).token_ids, len(tokens)
        await pair.all_free(within=5.0)

    asyncio.run(go())

"""Engines whose blocks differ in size, under a kernel that turns K inside each block: every handoff goes through the re-pack."""

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

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STAGED_TOKENS = 2560
"""Of the staging area: one of the longest prompts at a time, and a crowd has to queue for it."""

MODES = [
    pytest.param(("push", 32, 128), id="push-32-128"),
    pytest.param(("pull", 128, 32), id="pull-128-32", marks=pytest.mark.slow),
    pytest.param(("push", 128, 32), id="push-128-32", marks=pytest.mark.slow),
    pytest.param(("pull", 32, 128), id="pull-32-128", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=MODES)
def pair(request, bench_model, tmp_path_factory) -> Iterator[Pair]:
    mode, ours, theirs = request.param
    prefill, decode = engines.pair_specs(
        mode,
        bench_model,
        python=PYTHON,
        prefix_caching=True,
        max_model_len=4096,
        max_num_batched_tokens=512,
        connector_config={"leg_timeout": 8.0, "staging_bytes": STAGED_TOKENS * 8192},
    )
    prefill = dataclasses.replace(prefill, block_size=ours, num_blocks=8192 // ours)
    decode = dataclasses.replace(decode, block_size=theirs, num_blocks=8192 // theirs)
    first, second, router = engines.make_pair(mode, prefill, decode, tmp_path_factory.mktemp("block-sizes"))
    with running(first.server, second.server, router):
        yield Pair(mode, first, second, router)


def test_prompts_of_many_lengths(pair: Pair) -> None:
    async def go() -> None:
        async with Client(pair.router.url) as client:
            for length in (2, 31, 32, 33, 34, 127, 128, 129, 130, 700, 2000):
                tokens = prompt(length, 500 + length)
                answer = await client.complete(tokens, 12)
                assert answer.token_ids == await pair.reference(tokens, 12), length
                record = pair.records(pair.decode)[-1]
                assert (record.outcome, record.tokens) == ("done", length - 1)
        await pair.all_free()

    asyncio.run(go())


def test_prefix_hits_on_both_sides(pair: Pair) -> None:
    """They end at other positions on each side, and the block in which decode's ends must not be touched before them."""

    async def go() -> None:
        async with Client(pair.router.url) as client:
            tokens, held = prompt(700, 61), 0
            for more in (0, 1, 95, 300):
                tokens = tokens + prompt(more, 62 + more) if more else tokens
                assert (await client.complete(tokens, 12)).token_ids == await pair.reference(tokens, 12), more
                record = pair.records(pair.decode)[-1]
                size = pair.decode.spec.block_size
                if len(tokens) - held > size:  # else decode computes the rest itself
                    assert (record.outcome, record.tokens) == ("done", len(tokens) - 1 - held)
                held = len(tokens) // size * size
        await pair.all_free()

    asyncio.run(go())


@pytest.mark.parametrize("longer", ["decode", "prefill"])
def test_a_prompt_longer_by_one_token_on_one_side(pair: Pair, longer: str) -> None:
    async def go() -> None:
        for length in (33, 129, 600, 1025):
            tokens = prompt(length, 700 + length + 5000 * (longer == "decode"))
            extra = prompt(1, 3)
            ours, theirs = (tokens, tokens + extra) if longer == "decode" else (tokens + extra, tokens)
            prefill, decode = pair.legs()
            async with Client(pair.prefill.url) as p, Client(pair.decode.url) as d:
                first = asyncio.create_task(p.complete(ours, 1, stream=False, extra=prefill))
                answer = await d.complete(theirs, 12, extra=decode)
                await first
            assert answer.token_ids == await pair.reference(theirs, 12), length
            record = pair.record(pair.decode, decode)
            assert (record.outcome, record.tokens) == ("done", len(theirs) - 1)
        await pair.all_free()

    asyncio.run(go())


def test_a_crowd_queues_for_the_staging_area(pair: Pair) -> None:
    async def go() -> None:
        prompts = [prompt(200 + 97 * i, 900 + i) for i in range(12)]
        assert sum(map(len, prompts)) > 3 * STAGED_TOKENS
        async with Client(pair.router.url) as client:
            answers = await asyncio.gather(*(client.complete(tokens, 8) for tokens in prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == await pair.reference(tokens, 8), len(tokens)
        assert {record.outcome for record in pair.records(pair.decode, last=12)} == {"done"}
        await pair.all_free()

    asyncio.run(go())

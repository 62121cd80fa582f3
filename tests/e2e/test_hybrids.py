"""A model with full attention and sliding windows, in two KV cache groups, over a real pair: tokens of an engine alone."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.hybrid import HybridRecipe
from kvxfer.bench.process import running
from tests.e2e.conftest import PYTHON, Pair, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

RECIPE = HybridRecipe()
BLOCK, TOKEN = 32, RECIPE.kv_bytes_per_token() // 2
"""Tokens in a block; bytes of a token in one of the two groups."""

MODES = [
    pytest.param(("push", PYTHON), id="push"),
    pytest.param(("pull", PYTHON), id="pull"),
    pytest.param(("push", os.environ.get("KVXFER_VLLM032_PYTHON")), id="push-0.32", marks=pytest.mark.vllm032),
    pytest.param(("pull", os.environ.get("KVXFER_VLLM032_PYTHON")), id="pull-0.32", marks=pytest.mark.vllm032),
]


@pytest.fixture(scope="module", params=MODES)
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    mode, python = request.param
    if python is None:
        pytest.skip("KVXFER_VLLM032_PYTHON is not set: scripts/test.sh --vllm032 sets it")
    prefill, decode = engines.pair_specs(
        mode,
        model.build(RECIPE),
        python=python,
        prefix_caching=True,
        num_blocks=260,
        max_model_len=4096,
        max_num_batched_tokens=512,
        connector_config={"leg_timeout": 4.0},
    )
    first, second, router = engines.make_pair(mode, prefill, decode, tmp_path_factory.mktemp("hybrids"))
    with running(first.server, second.server, router):
        yield Pair(mode, first, second, router)


def test_prompts_shorter_and_longer_than_the_window(pair: Pair) -> None:
    async def go() -> None:
        async with Client(pair.router.url) as client:
            for length in (2, 31, 64, 95, 96, 97, 98, 126, 127, 128, 129, 700, 1311, 2000):
                tokens = prompt(length, 100 + length)
                answer = await client.complete(tokens, 12)
                assert answer.token_ids == await pair.reference(tokens, 12), length
                source, sink = pair.records(pair.prefill)[-1], pair.records(pair.decode)[-1]
                assert (source.outcome, sink.outcome, sink.tokens) == ("done", "done", length - 1)
                end = -(-(length - 1) // BLOCK)
                blocks = end + end - max(0, length - RECIPE.window) // BLOCK
                assert source.bytes + sink.bytes == blocks * BLOCK * TOKEN, length
        await pair.all_free()

    asyncio.run(go())


def test_what_comes_over_answers_later_prompts_too(pair: Pair) -> None:
    """From decode's prefix cache, which holds of a window only what was moved."""

    async def go() -> None:
        base = prompt(1000, 7)
        async with Client(pair.router.url) as client, Client(pair.decode.url) as alone:
            for length, more in ((640, 0), (640, 200), (610, 90), (730, 40), (1000, 0), (960, 9)):
                tokens = base[:length] + prompt(more, length)
                assert (await client.complete(tokens, 12)).token_ids == await pair.reference(tokens, 12), (length, more)
            for length in (600, 650, 740, 999):
                assert (await alone.complete(base[:length], 12)).token_ids == await pair.reference(base[:length], 12)
        await pair.all_free()

    asyncio.run(go())


def test_a_crowd_in_a_cache_too_small_for_it(pair: Pair) -> None:
    async def go() -> None:
        prompts = [prompt(40 + 131 * i % 1900, 300 + i) for i in range(24)]
        references = [await pair.reference(tokens, 16) for tokens in prompts]
        async with Client(pair.router.url, timeout=300) as client:
            answers = await asyncio.gather(*(client.complete(tokens, 16) for tokens in prompts))
        for answer, reference, tokens in zip(answers, references, prompts, strict=True):
            assert answer.token_ids == reference, len(tokens)
        await pair.all_free()

    asyncio.run(go())


def test_a_load_that_fails_fails_its_request_and_nothing_else(pair: Pair) -> None:
    async def go() -> None:
        tokens = prompt(500, 41)
        _, decode = pair.legs()
        async with Client(pair.decode.url) as d:
            with pytest.raises(RequestError):
                await d.complete(tokens, 8, stream=False, extra=decode)
        assert "no prefill request with this id came" in pair.record(pair.decode, decode).reason
        async with Client(pair.router.url) as client:
            assert (await client.complete(tokens, 8)).token_ids == await pair.reference(tokens, 8)
        await pair.all_free()

    asyncio.run(go())


def test_the_models_answers_depend_on_the_prompt(pair: Pair) -> None:
    """Inside the last window and before it: without this, equal tokens would prove nothing."""

    async def go() -> None:
        tokens = prompt(600, 71)
        for position in (3, 300, 520, 560, 597):
            changed = [*tokens]
            changed[position] = (changed[position] + 17) % 900 + 8
            assert await pair.reference(tokens, 12) != await pair.reference(changed, 12), position

    asyncio.run(go())

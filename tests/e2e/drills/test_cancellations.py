"""Clients that leave, at every stage and in a crowd."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from kvxfer.bench.client import Client
from kvxfer.bench.engines import MODEL_NAME

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def under_way(drill, known: int) -> bool:
    """A transfer has been posted in a handoff that is not among the first ``known``."""
    poster = drill.prefill if drill.mode == "push" else drill.decode
    return any(record.times.first_post for record in drill.records(poster)[known:])


@pytest.mark.parametrize("stage", ["prefill", "transfer", "decode"])
def test_the_client_leaves(drill, stage) -> None:
    async def go() -> None:
        poster = drill.prefill if drill.mode == "push" else drill.decode
        known = len(drill.records(poster))
        body = {
            "model": MODEL_NAME,
            "prompt": drill.prompt(3000),
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
        with drill.slow(2.0 if stage == "transfer" else 0.0):
            async with aiohttp.ClientSession() as session:

                async def ask() -> None:
                    async with session.post(f"{drill.router.url}/v1/completions", json=body) as response:
                        await response.content.readany()
                        if stage == "decode":
                            first.set()
                        await asyncio.sleep(60)

                first = asyncio.Event()
                request = asyncio.create_task(ask())
                if stage == "prefill":
                    await asyncio.sleep(0.3)
                elif stage == "transfer":
                    await drill.until(lambda: under_way(drill, known), "the first transfer")
                else:
                    await asyncio.wait_for(first.wait(), 30)
                request.cancel()
                drill.fault()
                await asyncio.wait({request})
            for engine in (drill.prefill, drill.decode):
                await drill.serves_others(engine)
                await drill.free(engine)
        await drill.whole()

    asyncio.run(go())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_crowd_of_which_half_leaves(drill, seed) -> None:
    """64 requests, some 40,000 tokens in caches of 8,300; about half are cancelled at random moments. Who stays is served."""

    async def go() -> None:
        chance = random.Random(seed)
        prompts = [drill.prompt(chance.choice((5, 64, 200, 700, 1300, 1900))) for _ in range(64)]
        leaves = [chance.uniform(0.0, 25.0) if chance.random() < 0.5 else None for _ in prompts]
        plan = list(zip(prompts, leaves, strict=True))
        references = [None if leave else await drill.reference(tokens, 16) for tokens, leave in plan]
        async with Client(drill.router.url, timeout=300) as client:

            async def one(tokens: list[int], leave: float | None):
                request = asyncio.create_task(client.complete(tokens, 16))
                await asyncio.wait({request}, timeout=leave)
                if leave is not None and request.cancel():
                    await asyncio.wait({request})
                    return None
                return (await request).token_ids

            answers = await asyncio.gather(*(one(*each) for each in plan))
        drill.fault()
        for i, (answer, reference) in enumerate(zip(answers, references, strict=True)):
            assert reference is None or answer == reference, f"request {i} of {len(prompts[i])} tokens"
        for engine in (drill.prefill, drill.decode):
            await drill.free(engine)
        await drill.whole()

    asyncio.run(go())

"""Real vLLM, real NIXL, real tokens: what a user sees of a prefill/decode pair."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid

import aiohttp
import pytest

from kvxfer.bench import model
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.engines import MODEL_NAME
from tests.e2e.conftest import Pair, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def moved(pair: Pair) -> int:
    """Bytes that the pair's movers have posted."""
    return sum(record.bytes for engine in (pair.prefill, pair.decode) for record in pair.records(engine))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_completions_of_many_lengths(pair: Pair, stream: bool) -> None:
    async def go() -> None:
        async with Client(pair.router.url) as client:
            for length in (1, 31, 32, 33, 127, 128, 129, 700, 2000):
                tokens = prompt(length, 100 + length + stream)
                answer = await client.complete(tokens, 12, stream=stream)
                assert answer.token_ids == await pair.reference(tokens, 12), length
                if length == 1:
                    continue  # decode computes the last token itself, and that is all there is
                source = pair.records(pair.prefill)[-1]
                sink = pair.records(pair.decode)[-1]
                assert source.handoff == sink.handoff
                assert (source.outcome, sink.outcome) == ("done", "done")
                assert source.backend == sink.backend == "LIBFABRIC"
                assert source.bytes + sink.bytes == -(-(length - 1) // 32) * 262_144
        await pair.all_free()

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_chat(pair: Pair, stream: bool) -> None:
    async def go() -> None:
        messages = [{"role": "user", "content": "Tell me about descriptors, " * 20 + str(stream)}]
        async with Client(pair.router.url) as client, Client(pair.prefill.url) as alone:
            answer = await client.chat(messages, 12, stream=stream)
            reference = await alone.chat(messages, 12, stream=False)
            assert answer.text == reference.text
            assert pair.records(pair.decode)[-1].outcome == "done"
        await pair.all_free()

    asyncio.run(go())


@pytest.mark.parametrize("arrival", ["before", "during", "after"])
def test_the_registration_comes_before_during_or_after_prefill(pair: Pair, arrival: str) -> None:
    async def go() -> None:
        tokens = prompt(3500, {"before": 1, "during": 2, "after": 3}[arrival])
        prefill, decode = pair.legs()
        async with Client(pair.prefill.url) as p, Client(pair.decode.url) as d:

            async def first_leg() -> None:
                await asyncio.sleep(1.5 if arrival == "before" else 0.0)
                await p.complete(tokens, 1, stream=False, extra=prefill)

            async def second_leg() -> tuple[int, ...]:
                if arrival == "during":
                    await asyncio.sleep(0.4)
                if arrival == "after":
                    await legs[0]
                    await asyncio.sleep(1.0)
                return (await d.complete(tokens, 12, extra=decode)).token_ids

            legs = [asyncio.create_task(first_leg())]
            legs.append(asyncio.create_task(second_leg()))
            answer = await legs[1]
            await legs[0]
        assert answer == await pair.reference(tokens, 12)
        record = pair.record(pair.prefill, prefill)
        times = record.times
        assert record.outcome == "done"
        if arrival == "before":
            assert times.registered < times.chunks_final[0]
        elif arrival == "after":
            assert times.registered > times.chunks_final[-1]
        await pair.all_free()

    asyncio.run(go())


def test_prefix_hits_on_decode(pair: Pair) -> None:
    """A partial hit moves the rest alone; a full one moves nothing and releases prefill at once."""

    async def go() -> None:
        base = prompt(640, 7)
        async with Client(pair.router.url) as client:
            await client.complete(base, 8)
            longer = base + prompt(200, 8)
            assert (await client.complete(longer, 12)).token_ids == await pair.reference(longer, 12)
            sink = pair.records(pair.decode)[-1]
            assert (sink.tokens, sink.blocks) == (199, 7), "a partial hit must move what is missing and no more"
            before = moved(pair)
            assert (await client.complete(longer, 12)).token_ids == await pair.reference(longer, 12)
            assert moved(pair) == before, "a full hit must move nothing"
        await pair.all_free()

    asyncio.run(go())


def test_a_list_of_prompts_and_several_choices(pair: Pair) -> None:
    async def go() -> None:
        prompts = [prompt(50, 21), prompt(333, 22), prompt(97, 23)]
        body = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "max_tokens": 10, "return_token_ids": True}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{pair.router.url}/v1/completions", json={**body, "prompt": prompts}) as response:
                choices = (await response.json())["choices"]
            assert [choice["index"] for choice in choices] == [0, 1, 2]
            for choice, tokens in zip(choices, prompts, strict=True):
                assert tuple(choice["token_ids"]) == await pair.reference(tokens, 10)
            sampled = {**body, "prompt": prompts[1], "n": 3, "temperature": 1.0, "seed": 11}
            answers = []
            for url in (pair.router.url, pair.prefill.url):
                async with session.post(f"{url}/v1/completions", json=sampled) as response:
                    choices = sorted((await response.json())["choices"], key=lambda choice: choice["index"])
                    answers.append([choice["token_ids"] for choice in choices])
            assert len(answers[0]) == 3
            assert answers[0] == answers[1]
            assert len({tuple(ids) for ids in answers[0]}) == 3, "three equal samples prove nothing"
        await pair.all_free()

    asyncio.run(go())


def test_a_crowd_in_a_cache_too_small_for_it(pair: Pair) -> None:
    """32 requests of mixed length: together some 20,000 tokens, in caches of 8,000. Decode preempts and queues."""

    async def go() -> None:
        rng = random.Random(5)
        prompts = [prompt(rng.choice((5, 64, 200, 700, 1300, 1900)), 300 + i) for i in range(32)]
        references = [await pair.reference(tokens, 24) for tokens in prompts]
        async with Client(pair.router.url, timeout=300) as client:
            answers = await asyncio.gather(*(client.complete(tokens, 24) for tokens in prompts))
        for i, (answer, reference) in enumerate(zip(answers, references, strict=True)):
            assert answer.token_ids == reference, f"request {i} of {len(prompts[i])} tokens"
        await pair.all_free()

    asyncio.run(go())


def test_a_client_that_leaves_frees_both_engines(pair: Pair) -> None:
    async def go() -> None:
        body = {"model": MODEL_NAME, "prompt": prompt(3000, 31), "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as session:
            for wait in (0.05, 0.5, None):  # in prefill, about the transfer, in decode
                response = await session.post(f"{pair.router.url}/v1/completions", json=body) if wait is None else None
                if response is not None:
                    await response.content.readany()
                    response.close()
                else:
                    task = asyncio.create_task(session.post(f"{pair.router.url}/v1/completions", json=body))
                    await asyncio.sleep(wait)
                    task.cancel()
                await pair.all_free(within=10.0)
        async with Client(pair.router.url) as client:
            tokens = prompt(100, 32)
            assert (await client.complete(tokens, 8)).token_ids == await pair.reference(tokens, 8)

    asyncio.run(go())


def test_a_leg_that_never_comes(pair: Pair) -> None:
    async def go() -> None:
        tokens = prompt(200, 41)
        prefill, decode = pair.legs()
        started = time.monotonic()
        async with Client(pair.decode.url) as d:
            with pytest.raises(RequestError):
                await d.complete(tokens, 8, stream=False, extra=decode)
        assert time.monotonic() - started < 20
        assert "no prefill request with this id came" in pair.record(pair.decode, decode).reason
        prefill, _ = pair.legs()
        async with Client(pair.prefill.url) as p:
            await p.complete(tokens, 1, stream=False, extra=prefill)
        await pair.all_free(within=15.0)
        assert "no decode request came" in pair.record(pair.prefill, prefill).reason
        assert all(record.outcome != "open" for record in pair.records(pair.prefill)), "a record was never closed"

    asyncio.run(go())


def test_wrong_addresses_fail_the_request_and_nothing_else(pair: Pair) -> None:
    async def go() -> None:
        tokens = prompt(200, 51)
        wrong = {
            "lives the engine": {"remote_engine_id": "somebody-else"},
            "no answer from": {"remote_port": 9},
        }
        for text, change in wrong.items():
            _, decode = pair.legs()
            decode["kv_transfer_params"].update(change)
            async with Client(pair.decode.url) as d:
                with pytest.raises(RequestError):
                    await d.complete(tokens, 8, stream=False, extra=decode)
            assert text in pair.record(pair.decode, decode).reason
        async with Client(pair.router.url) as client:
            assert (await client.complete(tokens, 8)).token_ids == await pair.reference(tokens, 8)
        await pair.all_free()

    asyncio.run(go())


def test_params_made_for_upstreams_proxies(pair: Pair) -> None:
    """Upstream's push demo proxy (legs at once, ids by X-Request-Id) and its pull demo proxy (prefill's answer to decode)."""

    async def go() -> None:
        tokens = prompt(400, 61)
        request_id = str(uuid.uuid4())
        headers = {"X-Request-Id": request_id}
        prefill = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        async with Client(pair.prefill.url) as p, Client(pair.decode.url) as d:
            if pair.mode == "push":
                _, decode = pair.legs()
                del decode["kv_transfer_params"]["transfer_id"]
                decode["kv_transfer_params"]["remote_request_id"] = request_id
                legs = (
                    p.complete(tokens, 1, stream=False, extra={"kv_transfer_params": prefill}, headers=headers),
                    d.complete(tokens, 8, extra=decode, headers=headers),
                )
                _, answer = await asyncio.gather(*legs)
            else:
                first = await p.complete(
                    tokens, 1, stream=False, extra={"kv_transfer_params": prefill}, headers=headers
                )
                assert first.kv_transfer_params["remote_num_tokens"] == 400
                params = dict(first.kv_transfer_params)
                answer = await d.complete(tokens, 8, extra={"kv_transfer_params": params}, headers=headers)
        assert answer.token_ids == await pair.reference(tokens, 8)
        assert pair.records(pair.decode)[-1].outcome == "done"
        await pair.all_free()

    asyncio.run(go())


def test_the_models_answers_depend_on_the_prompt(pair: Pair) -> None:
    """Without this, equal tokens would prove nothing."""

    async def go() -> None:
        tokens = prompt(600, 71)
        changed = [*tokens]
        changed[3] = (changed[3] + 17) % 900 + 1
        assert await pair.reference(tokens, 12) != await pair.reference(changed, 12)

    asyncio.run(go())
    assert json.dumps(model.prompt_tokens(3, 1))

"""A leg that never comes, and a leg that vLLM refuses: the other one ends, and both engines are free."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.engines import MODEL_NAME

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

BAD = {"too long": {"max_tokens": 4000}, "bad parameter": {"temperature": -1.0}}
"""What vLLM refuses before admission; the prompts have 600 of 4,096 tokens."""


def test_the_decode_leg_never_comes(drill) -> None:
    async def go() -> None:
        leg, _ = drill.legs()
        async with Client(drill.prefill.url) as p:
            await p.complete(drill.prompt(600), 1, stream=False, extra=leg)
        drill.fault()
        await drill.serves_others(drill.prefill)
        await drill.free(drill.prefill)
        assert "no decode request came" in drill.record(drill.prefill, leg).reason
        await drill.whole()

    asyncio.run(go())


def test_the_prefill_leg_never_comes(drill) -> None:
    async def go() -> None:
        _, leg = drill.legs()
        async with Client(drill.decode.url) as d:
            drill.fault()
            waiting = asyncio.create_task(d.complete(drill.prompt(600), 8, extra=leg))
            await drill.serves_others(drill.decode)
            await drill.fails(waiting)
        await drill.free(drill.decode)
        assert "no prefill request with this id came" in drill.record(drill.decode, leg).reason
        await drill.whole()

    asyncio.run(go())


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_leg_is_refused_before_admission(drill, leg, how) -> None:
    async def go() -> None:
        tokens, (prefill, decode) = drill.prompt(600), drill.legs()
        drill.fault()
        async with Client(drill.prefill.url) as p, Client(drill.decode.url) as d:
            if leg == "prefill":
                other = asyncio.create_task(d.complete(tokens, 8, stream=False, extra=decode))
                with pytest.raises(RequestError, match="400"):
                    await p.complete(tokens, 1, stream=False, extra={**prefill, **BAD[how]})
                await drill.fails(other)
            else:
                other = asyncio.create_task(p.complete(tokens, 1, stream=False, extra=prefill))
                with pytest.raises(RequestError, match="400"):
                    await d.complete(tokens, 8, stream=False, extra={**decode, **BAD[how]})
                await other
        for engine in (drill.prefill, drill.decode):
            await drill.free(engine)
        await drill.whole()

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_router_tells_the_refusal_of_one_leg(drill, stream) -> None:
    """Decode alone refuses: prefill's leg has other parameters. The client is told, and prefill is free."""

    async def go() -> None:
        body = {"model": MODEL_NAME, "prompt": drill.prompt(600), "stream": stream, **BAD["too long"]}
        drill.fault()
        url = f"{drill.router.url}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.status == 400
            assert "4096" in (await response.json())["error"]["message"]
        for engine in (drill.prefill, drill.decode):
            await drill.free(engine)
        await drill.whole()

    asyncio.run(go())

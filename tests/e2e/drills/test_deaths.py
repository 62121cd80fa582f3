"""Engines that die by kill -9 at bad moments, and come back at the same addresses under the same names."""

from __future__ import annotations

import asyncio
import signal

import pytest

from kvxfer.bench.client import Client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def posted(drill, legs) -> bool:
    """A transfer of this handoff has been posted."""
    engine, leg = (drill.prefill, legs[0]) if drill.mode == "push" else (drill.decode, legs[1])
    transfer = leg["kv_transfer_params"]["transfer_id"]
    return any(record.handoff == transfer and record.times.first_post for record in drill.records(engine))


@pytest.mark.slow
def test_prefill_dies_while_decode_waits(drill) -> None:
    async def go() -> None:
        _, leg = drill.legs()
        async with Client(drill.decode.url) as d:
            waiting = asyncio.create_task(d.complete(drill.prompt(300), 8, stream=False, extra=leg))
            await asyncio.sleep(0.7)
            drill.kill(drill.prefill)
            await drill.serves_others(drill.decode)
            await drill.fails(waiting)
        await drill.free(drill.decode)
        assert "gone" in drill.record(drill.decode, leg).reason
        drill.restart("prefill")
        await drill.whole()

    asyncio.run(go())


def test_prefill_dies_in_mid_transfer(drill) -> None:
    async def go() -> None:
        tokens, legs = drill.prompt(2000), drill.legs()
        async with Client(drill.prefill.url) as p, Client(drill.decode.url) as d:
            with drill.slow(3.0):
                computing = asyncio.create_task(p.complete(tokens, 1, stream=False, extra=legs[0]))
                waiting = asyncio.create_task(d.complete(tokens, 8, extra=legs[1]))
                await drill.until(lambda: posted(drill, legs), "the first transfer")
                drill.kill(drill.prefill)
            await drill.serves_others(drill.decode)
            await drill.fails(waiting)
            await asyncio.wait({computing})
            computing.exception()
        await drill.free(drill.decode)
        assert drill.record(drill.decode, legs[1]).outcome == "failed"
        drill.restart("prefill")
        await drill.whole()

    asyncio.run(go())


@pytest.mark.slow
def test_prefill_dies_during_the_handshake(drill) -> None:
    """It is stopped before decode has ever met this process, and dies while decode asks who is there."""

    async def go() -> None:
        drill.kill(drill.prefill)
        await asyncio.sleep(3.5)
        drill.restart("prefill").server.signal(signal.SIGSTOP)
        _, leg = drill.legs()
        async with Client(drill.decode.url) as d:
            waiting = asyncio.create_task(d.complete(drill.prompt(300), 8, stream=False, extra=leg))
            await asyncio.sleep(0.7)
            drill.kill(drill.prefill)
            await drill.serves_others(drill.decode)
            await drill.fails(waiting)
        await drill.free(drill.decode)
        assert "no answer from" in drill.record(drill.decode, leg).reason
        drill.restart("prefill")
        await drill.whole()

    asyncio.run(go())


@pytest.mark.slow
def test_decode_dies_before_its_registration(drill) -> None:
    async def go() -> None:
        tokens, legs = drill.prompt(1500), drill.legs()
        async with Client(drill.prefill.url) as p, Client(drill.decode.url) as d:
            doomed = asyncio.create_task(d.complete(tokens, 8, extra=legs[1]))
            await asyncio.sleep(0.0)
            computing = asyncio.create_task(p.complete(tokens, 1, stream=False, extra=legs[0]))
            drill.kill(drill.decode)
            await drill.serves_others(drill.prefill)
            await drill.fails(doomed)
            await computing
            drill.fault()  # what remains is a decode leg that does not come
            await drill.free(drill.prefill)
        drill.restart("decode")
        await drill.whole()

    asyncio.run(go())


def test_decode_dies_in_mid_transfer(drill) -> None:
    """Several handoffs are under way, and prefill goes on to compute for them."""

    async def go() -> None:
        legs = [drill.legs() for _ in range(3)]
        async with Client(drill.prefill.url) as p, Client(drill.decode.url) as d:
            with drill.slow(0.5):
                requests = [drill.prompt(1800) for _ in legs]
                doomed = [
                    asyncio.create_task(d.complete(tokens, 8, extra=leg[1]))
                    for tokens, leg in zip(requests, legs, strict=True)
                ]
                computing = [
                    asyncio.create_task(p.complete(tokens, 1, stream=False, extra=leg[0]))
                    for tokens, leg in zip(requests, legs, strict=True)
                ]
                await drill.until(lambda: posted(drill, legs[0]), "the first transfer")
                drill.kill(drill.decode)
                for request in doomed:
                    await drill.fails(request)
                await drill.serves_others(drill.prefill)
                await asyncio.gather(*computing)
                drill.fault()  # prefill has computed until now
                await drill.free(drill.prefill)
        drill.restart("decode")
        await drill.whole()

    asyncio.run(go())


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("times", [4])
def test_an_idle_engine_is_killed_and_comes_back(drill, role, times) -> None:
    """Nothing is under way; the first handoff to each new process must succeed."""

    async def go() -> None:
        for _ in range(times):
            drill.kill(getattr(drill, role))
            drill.restart(role)
            await drill.whole()

    asyncio.run(go())

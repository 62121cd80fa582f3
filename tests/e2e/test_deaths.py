"""Engines that die by kill -9 at bad moments, and come back at the same addresses under the same names."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvxfer.bench import engines
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.process import running
from tests.e2e.conftest import PYTHON, Pair, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

BOUND = 15.0
"""Seconds in which a lost peer's handoffs have ended: peer_timeout + post_lease + drain_bound, and some for a busy machine."""


def restarted(engine: engines.Engine) -> engines.Engine:
    """The same engine again: same name, same ports, another process."""
    again = engines.make_engine(engine.spec, engine.server.log.parent, (engine.port, engine.control_port))
    again.server.start()
    again.server.wait_ready()
    return again


async def serves(pair: Pair, seed: int) -> None:
    """The pair answers, through the router, by a handoff; the router may need a moment to see a restarted engine."""
    tokens = prompt(500, seed)
    async with Client(pair.router.url) as client:
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = await client.complete(tokens, 8)
                break
            except RequestError:
                assert time.monotonic() < deadline, "the pair does not serve again"
                await asyncio.sleep(1.0)
    assert answer.token_ids == await pair.reference(tokens, 8)
    assert pair.records(pair.decode)[-1].outcome == "done"
    await pair.all_free()


async def free(pair: Pair, engine: engines.Engine) -> None:
    deadline = time.monotonic() + BOUND
    while await pair.usage(engine) > 0.0:
        assert time.monotonic() < deadline, f"{engine.spec.name} still holds blocks of a dead peer's handoff"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_either_engine_dies_and_comes_back(mode: str, bench_model, tmp_path) -> None:
    prefill, decode = engines.pair_specs(
        mode, bench_model, python=PYTHON, num_blocks=260, max_model_len=4096, max_num_batched_tokens=256
    )
    first, second, router = engines.make_pair(mode, prefill, decode, tmp_path)
    extra: list[engines.Engine] = []

    async def prefill_dies_while_decode_waits(pair: Pair) -> None:
        tokens = prompt(300, 1)
        _, leg = pair.legs()
        async with Client(pair.decode.url) as d:
            waiting = asyncio.create_task(d.complete(tokens, 8, stream=False, extra=leg))
            await asyncio.sleep(1.0)
            pair.prefill.server.kill()
            started = time.monotonic()
            assert len((await d.complete(prompt(40, 2), 4)).token_ids) == 4, "an unrelated request must be served"
            with pytest.raises(RequestError):
                await waiting
            assert time.monotonic() - started < BOUND
        assert "gone" in pair.record(pair.decode, leg).reason
        await free(pair, pair.decode)

    async def decode_dies_in_mid_transfer(pair: Pair) -> None:
        tokens = prompt(3800, 3)
        legs = pair.legs()
        async with Client(pair.prefill.url) as p, Client(pair.decode.url) as d:
            doomed = asyncio.create_task(d.complete(tokens, 8, extra=legs[1]))
            computing = asyncio.create_task(p.complete(tokens, 1, stream=False, extra=legs[0]))
            await asyncio.sleep(0.8)
            pair.decode.server.kill()
            with pytest.raises(RequestError):
                await doomed
            await computing
            await free(pair, pair.prefill)
            assert len((await p.complete(prompt(40, 4), 4)).token_ids) == 4

    with running(first.server, second.server, router):
        pair = Pair(mode, first, second, router)
        try:
            asyncio.run(serves(pair, 10))
            asyncio.run(prefill_dies_while_decode_waits(pair))
            pair.prefill = restarted(pair.prefill)
            extra.append(pair.prefill)
            asyncio.run(serves(pair, 11))
            asyncio.run(decode_dies_in_mid_transfer(pair))
            pair.decode = restarted(pair.decode)
            extra.append(pair.decode)
            asyncio.run(serves(pair, 12))
        finally:
            for engine in extra:
                engine.server.stop()

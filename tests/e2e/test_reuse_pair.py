"""Conversations through real engines whose prefill forgets: decode's KV is taken back, and every token stays what it is."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client
from kvxfer.bench.process import cpu_seconds, free_ports, running
from kvxfer.transport.query import fetch_records
from tests.e2e.conftest import PYTHON

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK, FIRST, MORE, ANSWER, TURNS = 32, 700, 90, 24, 6


class Conversing:
    """A pair with reuse, and a router's part: what kvxfer's own router sends, by hand."""

    def __init__(self, mode: str, prefill: engines.Engine, decode: engines.Engine) -> None:
        self.mode, self.prefill, self.decode = mode, prefill, decode
        self._alone: dict[tuple[Any, ...], tuple[int, ...]] = {}

    async def alone(self, prompt: Sequence[int], **extra: Any) -> tuple[int, ...]:
        """Return what one engine answers by itself."""
        key = (tuple(prompt), *sorted(extra.items()))
        if key not in self._alone:
            async with Client(self.prefill.url) as client:
                self._alone[key] = (await client.complete(prompt, ANSWER, stream=False, extra=extra)).token_ids
        return self._alone[key]

    def at(self, engine: engines.Engine, which: str) -> dict[str, Any]:
        return {
            f"{which}_engine_id": engine.spec.name,
            f"{which}_host": engine.control_host,
            f"{which}_port": engine.control_port,
        }

    async def turn(
        self,
        prompt: Sequence[int],
        *,
        stream: bool = True,
        before: dict[str, Any] | None = None,
        **extra: Any,
    ) -> Any:
        """Send both legs of a turn. ``before``: what the prefill leg is told of the turn before, instead of the address."""
        transfer = f"turn-{uuid.uuid4().hex}"
        leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        source = leg | (self.at(self.decode, "reuse") if before is None else before)
        sink = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer}
        sink |= self.at(self.prefill, "remote")
        async with Client(self.prefill.url) as p, Client(self.decode.url) as d:
            first = p.complete(prompt, 1, stream=False, extra={"kv_transfer_params": source, **extra})
            if self.mode == "pull":
                await first
                return await d.complete(prompt, ANSWER, stream=stream, extra={"kv_transfer_params": sink, **extra})
            second = d.complete(prompt, ANSWER, stream=stream, extra={"kv_transfer_params": sink, **extra})
            return (await asyncio.gather(first, second))[1]

    def counters(self, engine: engines.Engine) -> dict[str, int]:
        return fetch_records(engine.control_host, engine.control_port).counters

    def fetched_bytes(self) -> int:
        """Bytes that prefill has READ."""
        records = fetch_records(self.prefill.control_host, self.prefill.control_port).records
        return sum(record.bytes for record in records if record.side == "sink")

    def block_bytes(self) -> int:
        return fetch_records(self.prefill.control_host, self.prefill.control_port).ranks[0].cache.block_bytes

    async def computed(self) -> int:
        """Return how many prompt tokens prefill has computed, by vLLM's own counters."""
        async with Client(self.prefill.url) as client:
            text = await client.metrics()
        by_source = re.findall(
            r'^vllm:prompt_tokens_by_source_total\{.*source="local_compute".*\} ([\d.e+]+)$', text, re.MULTILINE
        )
        assert len(by_source) == 1, "vLLM does not say how many tokens it computed"
        return int(float(by_source[0]))

    async def usage(self, engine: engines.Engine) -> float:
        async with Client(engine.url) as client:
            for line in (await client.metrics()).splitlines():
                if line.startswith("vllm:kv_cache_usage_perc"):
                    return float(line.rsplit(" ", 1)[1])
        raise AssertionError("the engine shows no usage of its KV cache")

    async def all_free(self, within: float = 3.0) -> None:
        deadline = time.monotonic() + within
        while True:
            used = [await self.usage(engine) for engine in (self.prefill, self.decode)]
            if used == [0.0, 0.0]:
                return
            assert time.monotonic() < deadline, f"KV usage of prefill and decode is still {used}"
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module", params=["push", pytest.param("pull", marks=pytest.mark.slow)])
def talk(request, bench_model, tmp_path_factory) -> Iterator[Conversing]:
    mode = request.param
    prefill, decode = engines.pair_specs(
        mode,
        bench_model,
        python=PYTHON,
        prefix_caching=True,
        num_blocks=260,
        max_model_len=4096,
        max_num_batched_tokens=512,
        args=("--enable-prompt-tokens-details",),
        connector_config={"leg_timeout": 8.0, "bidirectional_kv_xfer": True, "reuse_timeout": 10.0},
    )
    prefill = dataclasses.replace(prefill, prefix_caching=False, load_failure_policy="recompute")
    if mode == "push":
        prefill = dataclasses.replace(prefill, connector="KvxferBidirectionalConnector")
    logs = tmp_path_factory.mktemp(f"reuse-{mode}-logs")
    ports = free_ports(4)
    first, second = engines.make_engine(prefill, logs, ports[:2]), engines.make_engine(decode, logs, ports[2:])
    with running(first.server, second.server):
        yield Conversing(mode, first, second)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_conversation_of_six_turns(talk: Conversing, stream: bool) -> None:
    async def go() -> None:
        history: list[int] = []
        block = talk.block_bytes()
        for turn in range(TURNS):
            known = max(0, len(history) - 1)  # of the last answer's last token there is no KV
            history += model.prompt_tokens(MORE if turn else FIRST, 500 + 10 * turn + stream)
            reference = await talk.alone(history)
            bytes_before, computed_before = talk.fetched_bytes(), await talk.computed()
            answer = await talk.turn(history, stream=stream)
            assert answer.token_ids == reference, f"turn {turn}"
            computed, fetched = await talk.computed() - computed_before, talk.fetched_bytes() - bytes_before
            blocks = known // BLOCK
            assert fetched == blocks * block, f"turn {turn}"
            assert computed == len(history) - blocks * BLOCK, f"turn {turn}"
            assert turn == 0 or computed <= MORE + 1 + BLOCK + 64
            history += answer.token_ids
        assert talk.counters(talk.decode)["reuse_pinned"] == 0
        await talk.all_free()

    asyncio.run(go())


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_histories_that_are_not_simply_continued(talk: Conversing) -> None:
    async def go() -> None:
        first = model.prompt_tokens(FIRST, 900)
        answer = (await talk.turn(first)).token_ids
        known = [*first, *answer][:-1]
        new = model.prompt_tokens(60, 901)
        for name, prompt in {
            "rewritten": [*first[:300], 1 + first[300] % 7, *first[301:], *answer, *new],
            "truncated": [*first[:400], *new],
            "one branch": [*first, *answer, *new],
            "another branch": [*first, *answer, *model.prompt_tokens(60, 902)],
            "another system prompt": [1 + first[0] % 7, *first[1:], *answer, *new],
        }.items():
            before = talk.fetched_bytes()
            assert (await talk.turn(prompt)).token_ids == await talk.alone(prompt), name
            same = shared(known, prompt) // BLOCK
            wanted = same if same * BLOCK >= 64 else 0
            assert talk.fetched_bytes() - before == wanted * talk.block_bytes(), name
        await talk.all_free()

    asyncio.run(go())


def test_another_salt_is_another_conversation(talk: Conversing) -> None:
    async def go() -> None:
        first = model.prompt_tokens(FIRST, 910)
        await talk.turn(first, cache_salt="one tenant")
        more = [*first, *model.prompt_tokens(60, 911)]
        before = talk.fetched_bytes()
        for other in ({"cache_salt": "another tenant"}, {}):
            assert (await talk.turn(more, **other)).token_ids == await talk.alone(more)
            assert talk.fetched_bytes() == before, other
        again = [*first, *model.prompt_tokens(60, 912)]
        assert (await talk.turn(again, cache_salt="one tenant")).token_ids == await talk.alone(again)
        assert talk.fetched_bytes() - before == FIRST // BLOCK * talk.block_bytes()
        await talk.all_free()

    asyncio.run(go())


def test_the_same_turn_twice_at_once(talk: Conversing) -> None:
    async def go() -> None:
        first = model.prompt_tokens(FIRST, 920)
        more = [*first, *(await talk.turn(first)).token_ids, *model.prompt_tokens(60, 921)]
        answers = await asyncio.gather(talk.turn(more), talk.turn(more, stream=False))
        assert [one.token_ids for one in answers] == 2 * [await talk.alone(more)]
        await talk.all_free()

    asyncio.run(go())


def test_what_decodes_answer_carries_is_enough(talk: Conversing) -> None:
    """Upstream's multi-turn proxy hands decode's kv_transfer_params to the next prefill leg as they are."""

    async def go() -> None:
        history = model.prompt_tokens(FIRST, 930)
        answer = await talk.turn(history, stream=False)
        for seed in (931, 932):
            carried = dict(answer.kv_transfer_params)
            assert carried["do_remote_decode"] is True
            assert carried["remote_engine_id"] == talk.decode.spec.name
            assert carried["remote_num_tokens"] == len(history) + ANSWER - 1
            del carried["transfer_id"]  # the proxy's own ids are the request's
            history = [*history, *answer.token_ids, *model.prompt_tokens(60, seed)]
            before = talk.fetched_bytes()
            answer = await talk.turn(history, stream=False, before=carried)
            assert answer.token_ids == await talk.alone(history)
            assert talk.fetched_bytes() - before == (len(history) - 61) // BLOCK * talk.block_bytes()
        await talk.all_free()

    asyncio.run(go())


def test_cached_tokens_say_what_was_not_computed(talk: Conversing) -> None:
    async def go() -> None:
        first = model.prompt_tokens(FIRST, 940)
        more = [*first, *(await talk.turn(first)).token_ids, *model.prompt_tokens(60, 941)]
        body = {"model": engines.MODEL_NAME, "prompt": more, "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = talk.at(talk.decode, "reuse")  # a plain request, which takes back as well
        url = f"{talk.prefill.url}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            usage = (await response.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (FIRST + ANSWER - 1) // BLOCK * BLOCK
        await talk.all_free()

    asyncio.run(go())


def test_an_idle_decode_engine_sleeps_and_is_woken_by_a_question(talk: Conversing) -> None:
    async def go() -> None:
        first = model.prompt_tokens(FIRST, 950)
        more = [*first, *(await talk.turn(first)).token_ids, *model.prompt_tokens(60, 951)]
        await asyncio.sleep(0.5)
        pids = talk.decode.server.pids()
        before = cpu_seconds(pids)
        await asyncio.sleep(4.0)
        idle = (cpu_seconds(pids) - before) / 4.0
        assert idle < 0.5, f"{idle:.0%} of a core: an engine that steps takes more"
        assert "cannot be woken" not in talk.decode.server.log.read_text()
        asked = talk.counters(talk.decode)["reuse_asked"]
        assert (await talk.turn(more)).token_ids == await talk.alone(more)
        assert talk.counters(talk.decode)["reuse_asked"] == asked + 1
        assert "reuse_declined_no_answer" not in talk.counters(talk.prefill)
        await talk.all_free()

    asyncio.run(go())


def test_after_eviction_and_after_decodes_restart(talk: Conversing) -> None:
    """Comes last: the decode engine of this pair ends here."""

    async def go() -> None:
        first = model.prompt_tokens(FIRST, 960)
        answer = (await talk.turn(first)).token_ids
        for seed in range(961, 965):  # 260 blocks of 32 tokens are 8,320
            await talk.turn(model.prompt_tokens(3000, seed))
        more = [*first, *answer, *model.prompt_tokens(60, 970)]
        before = talk.fetched_bytes()
        assert (await talk.turn(more)).token_ids == await talk.alone(more)
        assert talk.fetched_bytes() == before
        await talk.turn(first)
        before = talk.fetched_bytes()
        talk.decode.server.kill()
        again = engines.make_engine(
            talk.decode.spec, talk.decode.server.log.parent, (talk.decode.port, talk.decode.control_port)
        )
        with running(again.server):
            talk.decode = again
            another = [*first, *model.prompt_tokens(60, 971)]
            assert (await talk.turn(another)).token_ids == await talk.alone(another)
            assert talk.fetched_bytes() == before, "the engine that held it is gone"
            third = [*another, *model.prompt_tokens(90, 972)]
            assert (await talk.turn(third)).token_ids == await talk.alone(third)
            assert talk.fetched_bytes() > before, "and the new one holds what it has decoded"
            await talk.all_free()

    asyncio.run(go())

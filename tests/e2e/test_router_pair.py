"""The router before real vLLM engines, as clients and operators use it: OpenAI's library, vLLM's own load generator, the status page."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvxfer.bench import vllm_serve
from kvxfer.bench.engines import MODEL_NAME
from tests.e2e.conftest import PYTHON, Pair, prompt

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.parametrize(
        "pair",
        [pytest.param(("push", PYTHON), id="push"), pytest.param(("pull", PYTHON), id="pull", marks=pytest.mark.slow)],
        indirect=True,
        scope="module",
    ),
]


def test_openais_client_library(pair: Pair) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{pair.router.url}/v1", api_key="k", max_retries=0)
    assert [one.id for one in client.models.list()] == [MODEL_NAME]
    messages = [{"role": "user", "content": "Tell me about rails, " * 30}]
    whole = client.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=8, temperature=0)
    parts = client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for part in parts:
        text += "".join(choice.delta.content or "" for choice in part.choices)
        usage = part.usage or usage
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens == 8
    some = client.completions.create(
        model=MODEL_NAME, prompt=[prompt(200, 1), prompt(90, 2)], n=2, max_tokens=4, temperature=0
    )
    assert [choice.index for choice in some.choices] == [0, 1, 2, 3]
    assert some.choices[0].text == some.choices[1].text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL_NAME, prompt="x", n=0)


def test_vllms_own_load_generator(pair: Pair, bench_model) -> None:
    raw = vllm_serve.measure(
        PYTHON, qps=4, input_tokens=150, output_tokens=8, requests=12, seed=5, url=pair.router.url, model=str(bench_model),
        served_model_name=MODEL_NAME, warm_up=1,
    )  # fmt: skip
    assert raw["completed"] == 12
    assert raw["total_output_tokens"] == 12 * 8


def test_what_an_operator_sees(pair: Pair) -> None:
    async def go() -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": MODEL_NAME, "prompt": prompt(700, 77), "max_tokens": 4, "stream": True}
            async with session.post(f"{pair.router.url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                request_id = answer.headers["X-Request-Id"]
                await answer.read()
            for _ in range(40):  # the check that reads the gauges comes every five seconds
                async with session.get(f"{pair.router.url}/status") as answer:
                    status = await answer.json()
                if all(one["kv_capacity_tokens"] and one["kv_reclaimable_tokens"] for one in status["engines"]):
                    break
                await asyncio.sleep(0.5)
            for engine in status["engines"]:
                assert 0 < engine["kv_reclaimable_tokens"] <= engine["kv_capacity_tokens"] == 260 * 32
            async with session.get(f"{pair.decode.url}/metrics") as answer:
                assert "kvxfer_reclaimable_tokens{" in await answer.text()
            async with session.get(f"{pair.router.url}/status/waterfall") as answer:
                fall = await answer.json()
            assert fall["without_records"] == []
            (mine,) = (one for one in fall["requests"] if one["request_id"] == request_id)
            stages = {one["stage"] for one in mine["stages"]}
            assert {"router queue", "prefill", "registration", "transfer", "first token", "decode"} <= stages, mine
            assert mine["outcome"] == "ok"
            path = {one["stage"]: one["seconds"] for one in mine["path"]}
            assert sum(path.values()) == pytest.approx(mine["first_token_s"], abs=1e-4)
            assert min(path.values()) > -1e-4, path
            assert abs(path["the rest"]) <= 0.05 * mine["first_token_s"], path
            assert {"decode's front end", "wait for KV", "decode's first token"} <= set(path), path
        await pair.all_free()

    asyncio.run(go())

"""Conversations through kvxfer's router, and through upstream's own multi-turn proxy, before engines that really prefill and decode.

One prefill engine that forgets, two decode engines, LoRA adapters on all: slow, since they start for this module alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client
from kvxfer.bench.process import Server, free_ports, running
from tests.e2e.conftest import PYTHON
from tests.e2e.test_reuse_pair import ANSWER, BLOCK, FIRST, Conversing
from tests.support import adapters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

PROXY = "examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py"
"""Upstream's, in a checkout of vLLM: ``VLLM_SRC``, as for scripts/serve_pd_multiturn.sh."""
TTL = 3.0


class Routed(Conversing):
    """A pair that can be talked to by hand, another decode engine, and a router before all."""

    def __init__(self, prefill: engines.Engine, decodes: Sequence[engines.Engine], router: Server) -> None:
        super().__init__("push", prefill, decodes[0])
        self.other, self.router = decodes[1], router

    def asked(self) -> tuple[int, int]:
        """How often each decode engine was asked for a conversation."""
        return tuple(self.counters(one)["reuse_asked"] for one in (self.decode, self.other))  # type: ignore[return-value]

    def fetched(self) -> int:
        return self.counters(self.prefill)["reuse_fetched_tokens"]


@pytest.fixture(scope="module")
def routed(bench_model, tmp_path_factory) -> Iterator[Routed]:
    directory = tmp_path_factory.mktemp("reuse-routed")
    names = [f"{name}={adapters.adapter(directory / name, seed)}" for seed, name in enumerate(("one", "two"))]
    prefill, decode = engines.pair_specs(
        "push",
        bench_model,
        python=PYTHON,
        prefix_caching=True,
        num_blocks=260,
        max_model_len=4096,
        max_num_batched_tokens=512,
        args=("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *names),
        connector_config={
            "leg_timeout": 8.0, "reuse_timeout": 10.0, "decoder_kv_blocks_ttl": TTL, "decoder_kv_idle_ttl": TTL,
        },
    )  # fmt: skip
    bidirectional = {"connector": "KvxferBidirectionalConnector"}
    prefill = dataclasses.replace(prefill, prefix_caching=False, load_failure_policy="recompute", **bidirectional)
    specs = [prefill, *(dataclasses.replace(decode, name=f"push-decode-{i}", **bidirectional) for i in range(2))]
    ports = free_ports(6)
    made = [engines.make_engine(spec, directory, ports[2 * i : 2 * i + 2]) for i, spec in enumerate(specs)]
    router = engines.make_router("push", [made[0].url], [one.url for one in made[1:]], directory)
    with running(*(one.server for one in made), router):
        yield Routed(made[0], made[1:], router)


def test_another_adapter_is_another_conversation(routed: Routed) -> None:
    async def go() -> None:
        first = model.prompt_tokens(FIRST, 600)
        more = [*first, *model.prompt_tokens(60, 601)]
        await routed.turn(first, model="one")
        answers = {name: await routed.alone(more, model=name) for name in ("one", "two", engines.MODEL_NAME)}
        assert len(set(answers.values())) == 3, "the adapters make no difference, so that nothing is shown"
        before = routed.fetched_bytes()
        for name in ("two", engines.MODEL_NAME):
            assert (await routed.turn(more, model=name)).token_ids == answers[name], name
            assert routed.fetched_bytes() == before, name
        # Of the turn before and of nothing else; what the other adapter has decoded meanwhile does not disturb it.
        assert (await routed.turn(more, model="one")).token_ids == answers["one"]
        assert routed.fetched_bytes() - before == FIRST // BLOCK * routed.block_bytes()
        await routed.all_free()

    asyncio.run(go())


def test_a_turn_after_its_lease_would_be_over_takes_what_is_there(routed: Routed) -> None:
    """Leases are for readers; between turns nothing is kept, and nothing expires that the prefix cache still has."""

    async def go() -> None:
        history = model.prompt_tokens(FIRST, 610)
        for seed in (611, 612):
            answer = (await routed.turn(history)).token_ids
            known = len(history) + len(answer) - 1
            history = [*history, *answer, *model.prompt_tokens(60, seed)]
            await asyncio.sleep(TTL + 1.0)
            assert routed.counters(routed.decode)["reuse_pinned"] == 0
            before = routed.fetched_bytes()
            assert (await routed.turn(history)).token_ids == await routed.alone(history)
            assert routed.fetched_bytes() - before == known // BLOCK * routed.block_bytes()
        await routed.all_free()

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("how", ["body", "header"])
def test_the_router_knows_a_conversation_by_its_name(routed: Routed, how: str, stream: bool) -> None:
    async def go() -> None:
        name = uuid.uuid4().hex
        extra = {"conversation_id": name} if how == "body" else {}
        headers = {"X-Conversation-Id": name} if how == "header" else {}
        history = model.prompt_tokens(FIRST, 620 + 2 * (how == "body") + stream)
        asked = routed.asked()
        async with Client(routed.router.url) as client:
            for turn in range(4):
                before = routed.fetched()
                answer = await client.complete(history, ANSWER, stream=stream, extra=extra, headers=headers)
                assert answer.token_ids == await routed.alone(history), f"turn {turn}"
                known = len(history) - 60 - 1 if turn else 0
                assert routed.fetched() - before == known // BLOCK * BLOCK, f"turn {turn}"
                history = [*history, *answer.token_ids, *model.prompt_tokens(60, 630 + turn)]
        # Which one goes on with it is the policy's to say: one that has been slow is left by a conversation that is short.
        grown = sum(after - before for before, after in zip(asked, routed.asked(), strict=True))
        assert grown == 3, "of both engines the one that holds the conversation is asked"
        await routed.all_free()

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_router_finds_a_conversation_by_its_messages(routed: Routed, stream: bool) -> None:
    async def go() -> None:
        words = "of rails and engines, " * 40
        messages: list[dict[str, str]] = [{"role": "user", "content": f"{stream}: tell me {words}"}]
        async with Client(routed.router.url) as client, Client(routed.prefill.url) as alone:
            for turn in range(4):
                before = routed.fetched()
                answer = await client.chat(messages, ANSWER, stream=stream)
                assert answer.text == (await alone.chat(messages, ANSWER, stream=False)).text
                assert (routed.fetched() - before > 0) == (turn > 0), f"turn {turn}"
                messages.append({"role": "assistant", "content": answer.text})
                messages.append({"role": "user", "content": f"and {turn} {words}"})
        await routed.all_free()

    asyncio.run(go())


def test_a_conversations_name_is_bound_to_the_key(routed: Routed) -> None:
    async def go() -> None:
        name, history = uuid.uuid4().hex, model.prompt_tokens(FIRST, 640)
        extra = {"conversation_id": name}
        mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        async with Client(routed.router.url) as client:
            answer = await client.complete(history, ANSWER, extra=extra, headers=mine)
            history = [*history, *answer.token_ids, *model.prompt_tokens(60, 641)]
            wanted = routed.counters(routed.prefill)["reuse_requests"]
            other = await client.complete(history, ANSWER, extra=extra, headers=theirs)
            assert other.token_ids == await routed.alone(history)
            assert routed.counters(routed.prefill)["reuse_requests"] == wanted, "another key's conversation was named"
            before = routed.fetched()
            assert (await client.complete(history, ANSWER, extra=extra, headers=mine)).token_ids == other.token_ids
            assert routed.fetched() > before
        await routed.all_free()

    asyncio.run(go())


# --- upstream's proxy -----------------------------------------------------------------------------------------------


class Whole:
    """Stands before decode, and has what is asked for as a stream answered whole: one event, with ``kv_transfer_params``.

    Upstream's proxy streams from decode always, and takes these out of a stream, in which a stock vLLM (0.29, 0.32) puts none.
    """

    def __init__(self, decode: str) -> None:
        self.decode = decode
        (self.port,) = free_ports(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        yield
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        asked.pop("stream_options", None)
        asked["stream"] = False
        url = f"{self.decode}{request.path}"
        async with aiohttp.ClientSession() as session, session.post(url, json=asked) as response:
            whole = await response.json()
        event = f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n"
        return web.Response(text=event, content_type="text/event-stream", status=response.status)


@pytest.mark.parametrize("told", [False, True], ids=["stock", "told"])
def test_upstreams_multi_turn_proxy_works_unchanged(routed: Routed, tmp_path: Path, told: bool) -> None:
    """With what it is told by a stock vLLM, nothing of a turn before; and with what it wants to be told."""
    source = Path(os.environ.get("VLLM_SRC", "/nowhere")) / PROXY
    if not source.exists():
        pytest.skip("VLLM_SRC names no checkout of vLLM, which has upstream's proxy")
    (port,) = free_ports(1)
    whole = Whole(routed.decode.url)
    with whole.serving():
        decode = whole.port if told else routed.decode.port
        command = [
            sys.executable, str(source), "--host", "127.0.0.1", "--port", str(port), "--prefiller-host", "127.0.0.1",
            "--prefiller-port", str(routed.prefill.port), "--decoder-host", "127.0.0.1", "--decoder-port", str(decode),
        ]  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        proxy = Server("proxy", command, dict(os.environ), tmp_path / "proxy.log", url)

        async def go() -> None:
            history = model.prompt_tokens(FIRST, 660 + told)
            body: dict[str, Any] = {"model": engines.MODEL_NAME, "max_tokens": ANSWER, "temperature": 0}
            body |= {"ignore_eos": True, "conversation_id": uuid.uuid4().hex}
            async with aiohttp.ClientSession() as session, Client(routed.prefill.url) as alone:
                for turn in range(3):
                    before = routed.fetched()
                    async with session.post(f"{url}/v1/completions", json={**body, "prompt": history}) as response:
                        assert response.status == 200, await response.text()
                        answer = await response.json()
                    reference = await alone.complete(history, ANSWER, stream=False)
                    assert answer["choices"][0]["text"] == reference.text, f"turn {turn}"
                    known = len(history) - 60 - 1 if turn and told else 0
                    assert routed.fetched() - before == known // BLOCK * BLOCK, f"turn {turn}"
                    history = [*history, *reference.token_ids, *model.prompt_tokens(60, 670 + turn)]
            await routed.all_free()

        with running(proxy):
            asyncio.run(go())

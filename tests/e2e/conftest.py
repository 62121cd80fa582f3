"""A real pair for the whole of a module: two vLLM engines, our connector, our router. About 40 seconds to start.

The reference is the prefill engine itself, asked directly: without ``kv_transfer_params`` it computes by itself, as an engine
alone does. Caches are too small for the crowd tests on purpose. ``KVXFER_E2E_PYTHON`` names the Python whose vLLM is run.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client, Completion
from kvxfer.bench.process import Server, running
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvxfer.transport.records import HandoffRecord

PYTHON = os.environ.get("KVXFER_E2E_PYTHON", sys.executable)


@dataclass
class Pair:
    mode: str
    prefill: engines.Engine
    decode: engines.Engine
    router: Server
    _references: dict[tuple, Completion] = field(default_factory=dict)

    async def reference(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        key = (tuple(prompt), max_tokens)
        if key not in self._references:
            async with Client(self.prefill.url) as client:
                self._references[key] = await client.complete(prompt, max_tokens, stream=False)
        return self._references[key].token_ids

    def legs(self, transfer: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """kv_transfer_params of a prefill and a decode leg that are sent by hand, in push."""
        transfer = transfer or f"xfer-{uuid.uuid4()}"
        prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        decode = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self.prefill.spec.name,
            "remote_host": self.prefill.control_host,
            "remote_port": self.prefill.control_port,
            "tp_size": 1,
            "pp_size": 1,
            "transfer_id": transfer,
        }
        return {"kv_transfer_params": prefill, "max_tokens": 1}, {"kv_transfer_params": decode}

    def records(self, engine: engines.Engine, last: int = 1000) -> list[HandoffRecord]:
        return fetch_records(engine.control_host, engine.control_port, last=last).records

    def record(self, engine: engines.Engine, leg: dict[str, Any]) -> HandoffRecord:
        """The record of a leg that was sent by hand."""
        transfer = leg["kv_transfer_params"]["transfer_id"]
        return next(record for record in self.records(engine) if record.handoff == transfer)

    async def usage(self, engine: engines.Engine) -> float:
        async with Client(engine.url) as client:
            for line in (await client.metrics()).splitlines():
                if line.startswith("vllm:kv_cache_usage_perc"):
                    return float(line.rsplit(" ", 1)[1])
        raise AssertionError("the engine shows no usage of its KV cache")

    async def all_free(self, within: float = 2.0) -> None:
        """Both engines' caches are empty within that time."""
        deadline = time.monotonic() + within
        while True:
            used = [await self.usage(engine) for engine in (self.prefill, self.decode)]
            if used == [0.0, 0.0]:
                return
            assert time.monotonic() < deadline, f"KV usage of prefill and decode is still {used}"
            await asyncio.sleep(0.1)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """Where references, cells and geometries of this run are kept (``tests/e2e/matrix/results.py``)."""
    kept = os.environ.get("KVXFER_MATRIX")
    return Path(kept) if kept else tmp_path_factory.mktemp("run")


@pytest.fixture(scope="session")
def bench_model():
    return model.build()


MODES = [
    pytest.param(("push", PYTHON), id="push"),
    pytest.param(("pull", PYTHON), id="pull"),
    pytest.param(("push", os.environ.get("KVXFER_VLLM032_PYTHON")), id="push-0.32", marks=pytest.mark.vllm032),
    pytest.param(("pull", os.environ.get("KVXFER_VLLM032_PYTHON")), id="pull-0.32", marks=pytest.mark.vllm032),
]


@pytest.fixture(scope="module", params=MODES)
def pair(request, bench_model, tmp_path_factory) -> Iterator[Pair]:
    mode, python = request.param
    if python is None:
        pytest.skip("KVXFER_VLLM032_PYTHON is not set: scripts/test.sh --vllm032 sets it")
    prefill, decode = engines.pair_specs(
        mode,
        bench_model,
        python=python,
        prefix_caching=True,
        num_blocks=260,
        max_model_len=4096,
        max_num_batched_tokens=512,
        connector_config={"leg_timeout": 8.0},
    )
    first, second, router = engines.make_pair(mode, prefill, decode, tmp_path_factory.mktemp(f"{mode}-logs"))
    with running(first.server, second.server, router):
        yield Pair(mode, first, second, router)


def prompt(length: int, seed: int = 0) -> list[int]:
    return model.prompt_tokens(length, seed)

"""Every cell of the cover: a real pair of these versions, mode, ranks, model and blocks answers as an engine alone does.

The engine alone is of decode's version, ranks and block size, since another number of ranks adds up in another order: decode's own,
asked directly before anything is handed to it, so that it computes all by itself. Where another cell has asked such an engine
before, the answers must have been the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import json
import os
import subprocess
import time
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client
from kvxfer.bench.process import ServerError, running
from kvxfer.bench.verdict import BACKEND, MIN_DISTINCT
from tests.e2e.conftest import PYTHON, Pair, prompt
from tests.e2e.matrix import results
from tests.e2e.matrix.cover import MODELS, SKIPPED, Cell, cover
from tests.e2e.recording import record

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

PYTHONS = {"0.29.0": PYTHON, "0.32.0": os.environ.get("KVXFER_VLLM032_PYTHON")}
PROMPTS = (1, 2, 31, 33, 128, 300, 700, 1500)
VERY_SHORT = 2
TOKENS = 12
CACHED = 16384
"""Tokens that fit into the cache of each engine."""

PATIENCE = {"leg_timeout": 120.0, "peer_timeout": 60.0, "connect_timeout": 60.0}
"""vLLM's ranks spin while they wait for each other, six busy processes on two cores: nobody is thought dead for being late."""

CELLS = [
    pytest.param(cell, id=cell.name, marks=[pytest.mark.vllm032] * ("0.32.0" in cell.versions)) for cell in cover()
]


def prompts() -> list[list[int]]:
    return [prompt(length, 1200 + length) for length in PROMPTS]


def spec(cell: Cell, base: engines.EngineSpec, side: int) -> engines.EngineSpec:
    python = PYTHONS[cell.vllm[side]]
    if python is None:
        pytest.skip("KVXFER_VLLM032_PYTHON is not set: scripts/test.sh --vllm032 sets it")
    size = cell.block_sizes[side]
    return dataclasses.replace(
        base,
        python=python,
        tensor_parallel=cell.sizes[side],
        block_size=size,
        num_blocks=CACHED // size,
        max_model_len=4096,
        max_num_batched_tokens=512,
        threads=None if cell.ranks == "1-1" else 1,  # halves of the cores, or one thread a rank wherever it runs
        ready_seconds=600.0,
    )


async def references(cell: Cell, url: str, run: Path) -> dict[int, list[int]]:
    """What decode's engine answers by itself, which is held against what such an engine answered in other cells."""
    async with Client(url, timeout=600) as client:
        answers = [list((await client.complete(tokens, TOKENS, stream=False)).token_ids) for tokens in prompts()]
    found = dict(zip(map(str, PROMPTS), answers, strict=True))
    name = f"{cell.reference}_{MODELS[cell.model].digest}"
    before = results.read(run, "references", name)
    assert before in (None, found), "an engine of the same kind answered otherwise in another cell"
    results.write(run, "references", name, found)
    assert len({tuple(answer) for answer in found.values()}) == len(PROMPTS), "equal answers would prove nothing"
    for length, answer in found.items():  # after a token or two a model may well repeat itself
        assert len(set(answer)) >= MIN_DISTINCT or int(length) <= VERY_SHORT, (length, answer)
    return {int(length): answer for length, answer in found.items()}


def version(engine: engines.Engine) -> str:
    with urllib.request.urlopen(f"{engine.url}/version", timeout=10) as answer:
        return json.load(answer)["version"].partition("+")[0]


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "not a checkout"


async def through(cell: Cell, pair: Pair, run: Path) -> int:
    """One by one, then all at once; returns how many answers there were. All are the engine's alone."""
    expected = await references(cell, pair.decode.url, run)
    async with Client(pair.router.url, timeout=600) as client:
        for tokens in prompts():
            answer = await client.complete(tokens, TOKENS)
            assert list(answer.token_ids) == expected[len(tokens)], len(tokens)
        answers = await asyncio.gather(*(client.complete(tokens, TOKENS) for tokens in prompts()))
    for tokens, answer in zip(prompts(), answers, strict=True):
        assert list(answer.token_ids) == expected[len(tokens)], ("at once", len(tokens))
    await pair.all_free(within=10.0)
    return 2 * len(PROMPTS)


@pytest.mark.parametrize("cell", CELLS)
def test_a_pair_answers_as_an_engine_alone(cell: Cell, run: Path, tmp_path) -> None:
    base = engines.pair_specs(cell.mode, model.build(MODELS[cell.model]), connector_config=PATIENCE)
    specs = [spec(cell, one, side) for side, one in enumerate(base)]
    first, second, router = engines.make_pair(cell.mode, *specs, tmp_path)
    if cell.name in SKIPPED:
        with pytest.raises(ServerError) as refused, running(first.server, second.server, router):
            pass
        assert SKIPPED[cell.name] in str(refused.value)
        pytest.skip(SKIPPED[cell.name])
    began = time.monotonic()
    with running(first.server, second.server, router):
        up, pair = time.monotonic(), Pair(cell.mode, first, second, router)
        versions = [version(engine) for engine in (first, second)]
        answers = asyncio.run(through(cell, pair, run))
        done = time.monotonic()
        sides = [pair.records(engine) for engine in (first, second)]
        for engine, told, size in zip((first, second), versions, cell.sizes, strict=True):
            record(run, engine, told, cell.model, ranks=size)
    assert versions == list(cell.vllm)
    handoffs = {one.handoff for one in sides[1]}
    assert len(handoffs) == 2 * sum(length > 1 for length in PROMPTS), "each prompt of more than one token takes one"
    for records, size in zip(sides, cell.sizes, strict=True):
        taken = [one for one in records if one.handoff in handoffs]
        assert {one.rank for one in taken} == set(range(size))
        assert {one.outcome for one in taken} == {"done"}, [one.reason for one in taken]
        assert "failed" not in {one.outcome for one in records}
    moved = [one for records in sides for one in records if one.bytes]
    assert {one.backend for one in moved} == {BACKEND}
    found = {
        "verdict": "identical",
        "answers": answers,
        "prompts": list(PROMPTS),
        "vllm": versions,
        "handoffs": len(handoffs),
        "bytes": sum(one.bytes for one in moved),
        "start_seconds": round(up - began, 1),
        "run_seconds": round(done - up, 1),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "software": f"NIXL {metadata.version('nixl')}, {BACKEND}",
    }
    results.write(run, "cells", cell.name, found)

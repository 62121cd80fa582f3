"""Conversations over a fabric that is slow, on real engines: leases that are renewed, leases that end, and ``auto``.

Slow: a pair of its own, in pull, so that what prefill's agent posts are reads for conversations and nothing else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.bench import engines, model
from kvxfer.bench.process import free_ports, running
from tests.e2e.conftest import PYTHON
from tests.e2e.test_reuse_pair import BLOCK, Conversing

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LONG = 3000
IDLE, TTL = 3.0, 12.0
PLUGINS = Path(__file__).parent.parent / "support" / "plugins"


class Slow(Conversing):
    """``pace`` is the file with the seconds that a read takes at least."""

    pace: Path

    def counted(self, name: str) -> int:
        return self.counters(self.prefill).get(name, 0)


@pytest.fixture(scope="module")
def talk(bench_model, tmp_path_factory) -> Iterator[Slow]:
    directory = tmp_path_factory.mktemp("reuse-slowly")
    pace = directory / "pace"
    pace.write_text("0")
    prefill, decode = engines.pair_specs(
        "pull",
        bench_model,
        python=PYTHON,
        prefix_caching=True,
        num_blocks=400,
        max_model_len=6144,
        max_num_batched_tokens=512,
        connector_config={
            "leg_timeout": 30.0, "bidirectional_kv_xfer": True, "reuse_timeout": 10.0, "kv_recompute_threshold": "auto",
            "decoder_kv_idle_ttl": IDLE, "decoder_kv_blocks_ttl": TTL, "reuse_pin_limit": 0.5,
        },
    )  # fmt: skip
    path = os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")])
    prefill = dataclasses.replace(
        prefill,
        prefix_caching=False,
        load_failure_policy="recompute",
        environment={"PYTHONPATH": path, "SLOW_FABRIC": str(pace)},
    )
    ports = free_ports(4)
    first, second = (
        engines.make_engine(prefill, directory, ports[:2]),
        engines.make_engine(decode, directory, ports[2:]),
    )
    with running(first.server, second.server):
        found = Slow("pull", first, second)
        found.pace = pace
        yield found


def test_leases_end_are_renewed_and_auto_tells_a_slow_peer_from_a_fast_one(talk: Slow) -> None:
    async def go() -> None:
        history = model.prompt_tokens(LONG, 700)
        number = 0

        async def another() -> tuple[int, int, int]:
            """Take another turn. Returns what was fetched, had to be computed after all, and was not worth while."""
            nonlocal history, number
            number += 1
            names = ("reuse_fetched_tokens", "reuse_recomputed_tokens", "reuse_declined_threshold")
            before = [talk.counted(name) for name in names]
            answer = (await talk.turn(history)).token_ids
            assert answer == await talk.alone(history), f"turn {number}"
            history = [*history, *answer, *model.prompt_tokens(60, 700 + number)]
            return tuple(talk.counted(name) - old for name, old in zip(names, before, strict=True))  # type: ignore[return-value]

        def known() -> int:
            return (len(history) - 61) // BLOCK * BLOCK

        await another()
        talk.pace.write_text(str(TTL + 4.0))  # longer than decode keeps anything for anybody
        wanted = known()
        assert await another() == (0, wanted, 0), "what was read after its lease had ended is computed"

        talk.pace.write_text("0")
        for _ in range(3):
            wanted = known()
            assert await another() == (wanted, 0, 0), "a fast peer is read from"

        talk.pace.write_text(str(IDLE + 2.0))
        wanted = known()
        assert await another() == (wanted, 0, 0), "read for longer than an idle lease lasts: it was renewed"
        for _ in range(6):
            wanted = known()
            found = await another()
            if found[:2] == (0, 0) and found[2] >= wanted:  # what it has of this, decode was not asked
                break
            assert found == (wanted, 0, 0)
        else:
            pytest.fail("a peer that takes seconds for what is computed in less is read from, again and again")
        await talk.all_free()

    asyncio.run(go())

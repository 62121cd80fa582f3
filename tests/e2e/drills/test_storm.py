"""Crowds, clients that leave, caches that are too small, engines that are killed in mid-transfer: no wrong token."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.bench import engines
from kvxfer.bench.process import running
from tests.e2e.conftest import PYTHON
from tests.support.storm import Storm, storm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_no_wrong_token_in_a_storm(mode, bench_model, tmp_path) -> None:
    prefill, decode = engines.pair_specs(
        mode,
        bench_model,
        python=PYTHON,
        prefix_caching=False,
        num_blocks=80,
        max_model_len=2048,
        max_num_batched_tokens=256,
        connector_config={"peer_timeout": 3.0, "heartbeat_interval": 0.5, "post_lease": 2.0},
    )
    first, second, router = engines.make_pair(mode, prefill, decode, tmp_path, router_args=["--check-interval", "0.5"])
    with running(first.server, second.server, router):
        one = Storm(first, second, router, longest=1200, at_once=12, output=64)
        asyncio.run(storm(one, calm=60, struck=24, quiet_within=60))

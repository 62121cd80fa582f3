"""Crowds, clients that leave, caches that are too small, engines that are killed in mid-transfer, on GPU memory: no wrong token.

pytest -m gpu tests/gpu/test_cuda_storm.py        two engines on two GPUs, or on one
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("nixl")

import torch

from kvxfer.bench import engines, model
from kvxfer.bench.process import running
from tests.support.storm import Storm, storm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here"),
]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_no_wrong_token_in_a_storm(mode, tmp_path) -> None:
    logs = Path(os.environ.get("OUT") or tmp_path) / f"storm-{mode}"
    logs.mkdir(parents=True)
    prefill, decode = engines.pair_specs(
        mode,
        model.build(),
        python=sys.executable,
        prefix_caching=False,
        num_blocks=300,
        max_model_len=8192,
        max_num_batched_tokens=1024,
        load_failure_policy="fail",
        connector_config={"backend": "UCX", "peer_timeout": 3.0, "heartbeat_interval": 0.5, "post_lease": 2.0},
        args=("--attention-backend", "TRITON_ATTN", "--gpu-memory-utilization", "0.3"),
    )
    last = min(torch.cuda.device_count(), 2) - 1
    here = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_BATCH_INVARIANT": "1"}
    first, second, router = engines.make_pair(
        mode,
        dataclasses.replace(prefill, environment={**here, "CUDA_VISIBLE_DEVICES": "0"}),
        dataclasses.replace(decode, environment={**here, "CUDA_VISIBLE_DEVICES": str(last)}),
        logs,
        router_args=["--check-interval", "0.5"],
    )
    with running(first.server, second.server, router):
        one = Storm(first, second, router, longest=6000, output=64)
        asyncio.run(storm(one, calm=300, struck=130, quiet_within=30))

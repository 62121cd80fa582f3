"""The worker's start under ``kv_buffer_device``: what peers and NIXL are told of, and what each platform makes of the setting."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvxfer.bench.lone import layer_major
from kvxfer.config import Settings
from kvxfer.connector import worker as module
from kvxfer.connector.worker import WorkerHalf
from kvxfer.errors import PlatformError
from kvxfer.platform import Platform
from kvxfer.protocol.ids import RankId
from kvxfer_host import HostPlatform
from kvxfer_neuron import NeuronPlatform

MEMORY = np.zeros((2, 64, 1 << 16), dtype=np.uint8)
CACHES = {"layer": SimpleNamespace(device=SimpleNamespace(type="cpu"))}


class Device(HostPlatform):
    def __init__(self, copy_delay=0.0) -> None:
        super().__init__(0, copy_delay)

    def describe(self, caches, geometry):
        return layer_major(MEMORY, 16)


def start(platform, monkeypatch, device="cpu", **settings) -> SimpleNamespace:
    """Start a worker; returns what its threads were made with."""
    made = SimpleNamespace()

    class Threads:
        def __init__(self, me, card, make_agent, mover, timing, **more) -> None:
            made.card, made.mover, made.mirror, made.repack = card, mover, more["mirror"], more["repack"]
            self.control = SimpleNamespace(port=1)
            self.start = self.stop = lambda: None

    rails = SimpleNamespace(watched=nullcontext, settle=lambda: None)
    monkeypatch.setattr(module, "platform_for", lambda _: platform)
    monkeypatch.setattr(module.compat, "parallel_ranks", lambda _: (0, 0))
    monkeypatch.setattr(module.compat, "geometry", lambda *_: None)
    monkeypatch.setattr(module.block_major, "report", lambda *_: None)
    monkeypatch.setattr(module, "RankThreads", Threads)
    monkeypatch.setattr(module, "WorkerRails", lambda *_: rails)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(model="m", max_model_len=64),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_buffer_device=device),
    )
    WorkerHalf(config, None, "push", Settings(**settings), RankId("p", "0" * 16, 0)).register_kv_caches(CACHES)
    return made


def test_peers_and_nixl_are_told_of_the_mirror_and_its_staging_area(monkeypatch) -> None:
    made = start(Device(), monkeypatch)
    cache = made.card.cache
    assert cache.memory == "DRAM"
    assert cache.spans[0][0] == made.mirror.memory.addresses[0] != MEMORY.ctypes.data
    assert made.card.staging.address == made.mirror.memory.addresses[1]
    assert made.mirror.cache.spans[0][0] == MEMORY.ctypes.data
    assert made.mirror.memory.size == MEMORY.nbytes + made.card.staging.size


def test_slices_are_whole_blocks_of_some_megabytes(monkeypatch) -> None:
    made = start(Device(), monkeypatch)
    assert made.mover.slice_tokens % 16 == 0
    per_token = MEMORY.nbytes // (64 * 16)
    assert 16 << 20 < made.mover.slice_tokens * per_token < 64 << 20


@pytest.mark.parametrize(("platform", "device"), [(Device(None), "cpu"), (Device(), "cuda")], ids=["host", "unasked"])
def test_without_a_use_for_it_nothing_is_changed(monkeypatch, platform, device) -> None:
    made = start(platform, monkeypatch, device)
    assert made.card.cache.spans[0][0] == MEMORY.ctypes.data
    assert (made.mirror, made.mover.slice_tokens) == (None, None)


def test_neuron_says_in_one_line_that_it_is_without_effect(caplog) -> None:
    assert NeuronPlatform().mirror([(0, 1)], 0) is None
    (line,) = caplog.messages
    assert "kv_buffer_device=cpu is without effect on Neuron" in line


def test_a_platform_that_has_none_refuses_and_says_what_to_set() -> None:
    class Other(Device):
        name = "other"
        mirror = Platform.mirror

    with pytest.raises(PlatformError, match="'other' does not move KV through host memory: leave kv_buffer_device out"):
        Other().mirror([(0, 1)], 0)

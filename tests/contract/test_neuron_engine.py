"""A Neuron engine and a CUDA one under vLLM's real scheduler and runner hooks: platform, connector, mover and fences together.

The Neuron engine's work is late, and its platform knows of its end only by reading back: a mover that did not wait for its
fences would move zeros, or write under a step that still runs.
"""

from __future__ import annotations

import random
import time

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvxfer.bench import model
from kvxfer.layout.describe import Content, Heads, Tensor, strided
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from kvxfer_neuron import NeuronPlatform
from tests.support.engine import DIM, HEADS, SimEngine, expected
from tests.unit.platforms.neuron_doubles import (
    READY,
    InHbm,
    Work,
    built_libnrt,
    libnrt,
    needs_compiler,
    trn2_files,
    trn2_host,
)

__all__ = ["built_libnrt", "libnrt", "trn2_files", "trn2_host"]
pytestmark = [pytest.mark.contract, needs_compiler]


class NeuronEngine(SimEngine):
    """(2, blocks, heads, tokens, channels) a layer, on a device whose work is late."""

    def __init__(self, *args, libnrt, work: Work, **options) -> None:
        self._libnrt, self._work = libnrt, work
        super().__init__(*args, **options)

    def _allocate(self, layers, num_blocks):
        whole = {name: torch.zeros((2, num_blocks, HEADS, self.block_size, DIM)) for name in layers}
        for tensor in whole.values():
            self._libnrt.adopt(tensor)
        handed = {name: InHbm(tensor, self._work) for name, tensor in whole.items()}
        return handed, {name: tensor.permute(1, 2, 3, 0, 4) for name, tensor in whole.items()}

    def _launch(self, work) -> None:
        self._work.launch(work)


class CudaEngine(SimEngine):
    """(blocks, 2, heads, tokens, channels) a layer, HND: vLLM up to 0.25."""

    def _allocate(self, layers, num_blocks):
        whole = {name: torch.zeros((num_blocks, 2, HEADS, self.block_size, DIM)) for name in layers}
        return whole, {name: tensor.permute(0, 2, 3, 1, 4) for name, tensor in whole.items()}


class NeuronInHost(NeuronPlatform):
    """The Neuron platform, but for the kind of memory: the twin moves the host's."""

    def describe(self, caches, geometry) -> CacheMap:
        return msgspec.structs.replace(super().describe(caches, geometry), memory="DRAM")


class CudaLaidOut(HostPlatform):
    """Host memory as ``CudaEngine`` lays it out."""

    def describe(self, caches, geometry) -> CacheMap:
        (group,) = geometry.groups
        tensors = [
            Tensor(
                index, caches[name].data_ptr(), caches[name].shape, tuple(4 * step for step in caches[name].stride())
            )
            for name, index in group.layers
        ]
        contents, heads = [Content("k", DIM), Content("v", DIM)], Heads(group.heads, group.total_heads)
        planes = strided(tensors, "BPHNC", contents, dtype="float32", item=4, heads=heads)
        spans = tuple((cache.data_ptr(), cache.nbytes) for cache in caches.values())
        return CacheMap((Group(group.block_size, geometry.num_blocks, planes),), spans, "DRAM")


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(model.build())


@pytest.fixture
def engines(tiny, libnrt, trn2_host, monkeypatch):
    monkeypatch.delattr(torch, "neuron", raising=False)
    libnrt.init()
    libnrt.attach(0, "0000:c9:00.0")
    made: list[SimEngine] = []

    def make(kind: str, name: str, fabric: TwinFabric, **options) -> SimEngine:
        if kind == "neuron":
            environment = {**READY, "NEURON_RT_VISIBLE_CORES": "0", "KVXFER_LIBNRT": str(libnrt.path)}
            platform = NeuronInHost(trn2_host, environment, lambda: "")
            extra = {"libnrt": libnrt, "work": Work(delay=0.01)}
            made.append(NeuronEngine(name, fabric, tiny, platform=platform, **extra, **options))
        else:
            made.append(CudaEngine(name, fabric, tiny, platform=CudaLaidOut(fence_delay=0), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(1, 500) for i in range(length)]


def legs(p: SimEngine, transfer: str) -> tuple[dict, dict]:
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    control = p.scheduler.connector._scheduler.control
    decode = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": p.name, "tp_size": 1}
    return prefill, {**decode, "remote_host": "127.0.0.1", "remote_port": control.port, "transfer_id": transfer}


def run(*engines: SimEngine) -> None:
    deadline = time.monotonic() + 60.0
    while any(engine.busy for engine in engines):
        assert time.monotonic() < deadline, [(e.name, e.usage, e.problems[:3]) for e in engines]
        for engine in engines:
            engine.step()
        time.sleep(0.0005)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("source", "sink"), [("neuron", "cuda"), ("cuda", "neuron")])
def test_tokens_are_right_between_a_neuron_and_a_cuda_engine(engines, mode, runner, source, sink) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.005)))
    p = engines(source, "p", fabric, mode=mode, runner=runner)
    d = engines(sink, "d", fabric, mode=mode, runner=runner, block_size=32 if sink == "neuron" else 16)
    for i, length in enumerate((1, 17, 64, 200)):
        tokens = prompt(length, i)
        prefill, decode = legs(p, f"t{i}")
        p.add(f"p{i}", tokens, prefill)
        d.add(f"d{i}", tokens, decode, max_tokens=4)
        run(p, d)
        assert d.outputs[f"d{i}"] == expected(tokens, 4)
    assert p.problems == d.problems == []
    record = d.worker._worker._threads.mover.records.last(1)[0]
    assert record.outcome == "done", record
    assert p.usage == d.usage == 0

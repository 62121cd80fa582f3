"""VRAM through pinned host memory on real GPUs: VRAM → mirror → NIXL LIBFABRIC over tcp → mirror → VRAM, byte for byte.

pytest -m gpu tests/gpu/test_cuda_mirror.py        two GPUs are used where there are two
"""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

import torch

from kvxfer.bench.lone import LoneRank
from kvxfer.layout.tables import packed
from kvxfer.platform import Geometry, LayerGroup
from kvxfer.protocol.actions import SinkFinished
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport import commands as cmd
from kvxfer.transport.nixl import NixlAgent
from kvxfer_cuda import CudaPlatform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here"),
]

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 600, 16, 8, 128, 12
os.environ.setdefault("FI_PROVIDER", "tcp")  # libfabric reads it when it starts, which importing does not do
CYCLES = 2_000_000_000  # a second, or a little more
H = HandoffId("x")


class Passed:
    def done(self) -> bool:
        return True


class Gpu(LoneRank):
    """A rank whose cache is on a GPU: a storage a layer (HND), or all layers of a block in one run."""

    def __init__(self, engine: str, device: int, *, block_major: bool, **options) -> None:
        self.device = device
        shape = (HEADS, TOKENS, 2 * DIM)
        with torch.cuda.device(device):
            if block_major:
                whole = torch.zeros((BLOCKS, LAYERS, *shape), dtype=torch.bfloat16, device="cuda")
                self.layers = [whole[:, layer] for layer in range(LAYERS)]
            else:
                self.layers = [
                    torch.zeros((BLOCKS, *shape), dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)
                ]
        caches = {f"model.layers.{i}.self_attn.attn": layer for i, layer in enumerate(self.layers)}
        numbered = tuple((name, number) for number, name in enumerate(caches))
        group = LayerGroup(numbered, TOKENS, heads=tuple(range(HEADS)), total_heads=HEADS, head_size=DIM)
        platform = CudaPlatform()
        cache = platform.describe(caches, Geometry((group,), BLOCKS, "auto", ("FLASH_ATTN",)))
        options = {"slice_tokens": 256, **options}
        agent = lambda name: NixlAgent(name, "LIBFABRIC")  # noqa: E731
        super().__init__(engine, agent, platform=platform, cache=cache, block_size=TOKENS, mirrored=True, **options)

    def fill(self, seed: int) -> None:
        generator = torch.Generator(device=f"cuda:{self.device}").manual_seed(seed)
        with torch.cuda.device(self.device):
            for layer in self.layers:
                layer.view(torch.int16).random_(1, 1 << 14, generator=generator)

    def begin(self, **changes) -> None:
        with torch.cuda.device(self.device):
            super().begin(**changes)

    def end(self) -> None:
        with torch.cuda.device(self.device):
            super().end()

    def blocks(self, ids):
        torch.cuda.synchronize(self.device)
        return torch.stack([layer[list(ids)].view(torch.int16).cpu() for layer in self.layers])


@pytest.fixture
def ranks():
    made = []

    def make(*args, **options) -> Gpu:
        made.append(Gpu(*args, **options))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


LAST = torch.cuda.device_count() - 1 if torch.cuda.is_available() else 0


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("ours", "theirs"), [(True, True), (False, False)], ids=["block-major", "layer-major"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in a row", "scattered"])
def test_every_byte_arrives_and_no_other_block_changes(ranks, mode, ours, theirs, scattered) -> None:
    p, d = ranks("p", 0, mode=mode, block_major=ours), ranks("d", LAST, mode=mode, block_major=theirs)
    p.fill(1)
    d.fill(2)
    order = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(3)) + 1
    before = d.blocks(range(BLOCKS))
    for number, tokens in enumerate((1, 17, 4000)):
        need = -(-tokens // TOKENS)
        source = order[:need].tolist() if scattered else list(range(1, 1 + need))
        sink = order[-need:].tolist() if scattered else list(range(BLOCKS - need, BLOCKS))
        handoff = HandoffId(f"h{number}")
        d.open(handoff, f"d{number}", p.address, sink, tokens)
        p.prefill(handoff, f"p{number}", source, tokens, chunks=2 if tokens > TOKENS else 1)
        assert d.wait(f"d{number}", 60.0) == SinkFinished(handoff, f"d{number}", None)
        p.wait(f"p{number}", 60.0)
        before[:, sink] = p.blocks(source)
        assert torch.equal(d.blocks(range(BLOCKS)), before)


def test_what_a_kernel_has_not_written_yet_is_not_copied(ranks) -> None:
    p, d = ranks("p", 0, block_major=True), ranks("d", LAST, block_major=True)
    d.open(H, "d1", p.address, list(range(1, 101)), 1600)
    p.begin(started=[cmd.SourceStart(H, "p1", 1600, time.monotonic())])
    p.begin(progress=[cmd.SourceProgress("p1", packed(range(1, 101)), 1600)])
    with torch.cuda.device(0):
        torch.cuda._sleep(CYCLES // 2)
        p.fill(5)
    p.end()
    p.begin(finished=[cmd.SourceFinish("p1", None, held=True)])
    assert d.wait("d1", 60.0).reason is None
    assert torch.equal(d.blocks(range(1, 101)), p.blocks(range(1, 101)))


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_copies_neither_wait_for_what_the_engines_compute_nor_hold_it_up(ranks, mode) -> None:
    p, d = ranks("p", 0, mode=mode, block_major=True), ranks("d", LAST, mode=mode, block_major=True)
    p.fill(6)
    p.prefill(HandoffId("first"), "p0", [1], 1)
    d.open(HandoffId("first"), "d0", p.address, [1], 1)
    assert d.wait("d0", 60.0).reason is None  # connected
    torch.cuda.synchronize(0)
    p.prefill(H, "p1", list(range(1, 101)), 1600)
    torch.cuda.synchronize(0)
    ends = []
    for device in {0, LAST}:
        with torch.cuda.device(device):
            torch.cuda._sleep(10 * CYCLES)
            ends.append(torch.cuda.Event())
            ends[-1].record()
    now = time.monotonic()
    opened = cmd.SinkOpen(H, "d1", p.address, 0, 1600, packed(range(1, 101)), now, now)
    d.mover.post(cmd.StepBegin(cmd.Step(opened=[opened]), Passed()))
    assert d.wait("d1", 60.0).reason is None
    assert not any(end.query() for end in ends), "the handoff waited for the engines' kernels"
    assert torch.equal(d.blocks(range(1, 101)), p.blocks(range(1, 101)))

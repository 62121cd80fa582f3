"""Engines of several ranks over the twin: every head of every layer arrives where it is held, whoever holds it at the source."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.layout.ranks import Shard, heads_of
from kvxfer.protocol.actions import SinkFinished, SourceFinished
from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.sink import IDLE
from kvxfer.transport import commands as cmd
from kvxfer.transport.twin import Faults, TwinAgent, TwinFabric
from tests.support.ranks import Rank, wait_until

H = HandoffId("x")
HEADS, LAYERS, BLOCK, TOKEN = 2, 4, 4, 16
TOKENS, MINE, THEIRS = 23, [9, 8, 7, 6, 5, 4], [20, 22, 24, 26, 28, 30]
RNG = np.random.default_rng(5)
TRUTH = RNG.integers(1, 255, size=(LAYERS, HEADS, 6 * BLOCK, TOKEN), dtype=np.uint8)
"""[layer, head, position, byte]"""


class Engine:
    """Its ranks: tensor-parallel ones of each stage."""

    def __init__(self, name: str, fabric: TwinFabric, tp: int, pp: int = 1, total: int = HEADS, **options) -> None:
        self.ranks: list[Rank] = []
        for stage in range(pp):
            for number in range(tp):
                heads = heads_of(total, Shard(number, tp))
                layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
                size = BLOCK * TOKEN
                own = {"heads": heads, "total_heads": total, "head_stride": size, "layers": tuple(layers)}
                changes = own | {"tokens": ((BLOCK, TOKEN),), "channels": ((TOKEN, 1),)}
                shape = {"layers": len(layers), "block_size": BLOCK, "block_bytes": len(heads) * size}
                place = {"shard": (number, tp), "stage": (stage, pp)}
                self.ranks.append(Rank(name, fabric, changes=changes, **shape, **place, **options))
        self.ranks[0].lead([rank.where for rank in self.ranks])

    @property
    def address(self) -> cmd.EngineAddress:
        return self.ranks[0].address

    @staticmethod
    def held(rank: Rank) -> np.ndarray:
        """What it should hold: [layer, head, position, byte]."""
        (group,) = rank.cache.groups
        (plane,) = group.planes
        return TRUTH[list(plane.layers)][:, list(plane.heads)]

    @staticmethod
    def view(rank: Rank) -> np.ndarray:
        """Its memory as [layer, block, head, token, byte]."""
        return rank.memory.reshape(rank.memory.shape[0], rank.memory.shape[1], -1, BLOCK, TOKEN)

    def prefill(self) -> None:
        for rank in self.ranks:
            for number, block in enumerate(THEIRS):
                self.view(rank)[:, block] = self.held(rank)[:, :, number * BLOCK : (number + 1) * BLOCK]
            rank.prefill(H, "p", THEIRS, TOKENS, chunks=3)

    def open(self, source: cmd.EngineAddress) -> None:
        for rank in self.ranks:
            rank.open(H, "d", source, MINE, TOKENS)

    def received(self) -> bool:
        for rank in self.ranks:
            got = np.concatenate([self.view(rank)[:, block] for block in MINE], axis=2)
            if not np.array_equal(got[:, :, :TOKENS], self.held(rank)[:, :, :TOKENS]):
                return False
        return True

    def wait(self, request: str) -> list[SourceFinished | SinkFinished]:
        return [rank.wait(request) for rank in self.ranks]

    def settled(self) -> bool:
        return all(len(rank.mover.source) == len(rank.mover.sink) == 0 for rank in self.ranks)


@pytest.fixture
def engines():
    made: list[Engine] = []

    def make(*args, **kwargs) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        for rank in engine.ranks:
            rank.close()


SIZES = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4)]
"""Two heads: of four ranks two hold replicas, and nobody takes anything from two of them."""


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("early", [True, False], ids=["decode first", "prefill first"])
def test_every_head_arrives(engines, mode, sizes, early) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.02), notification_delay=(0.0, 0.01)))
    p, d = (engines(name, fabric, size, mode=mode) for name, size in zip("pd", sizes, strict=True))
    if early:
        d.open(p.address)
        p.prefill()
    else:
        p.prefill()
        d.open(p.address)
    assert d.wait("d") == [SinkFinished(H, "d", None)] * sizes[1]
    assert d.received()
    assert p.wait("p") == [SourceFinished(H, "p")] * sizes[0]
    idle = max(0, sizes[0] - max(sizes[1], HEADS)) if sizes[0] > HEADS else 0
    reasons = [rank.record("source", H).reason for rank in p.ranks]
    assert sorted(reasons) == sorted(["done"] * (sizes[0] - idle) + [IDLE] * idle), "nobody waits for its time to end"
    assert p.settled()
    assert d.settled()
    heads = sum(len(rank.cache.groups[0].planes[0].heads) for rank in d.ranks)
    moved = sum(rank.mover.counters["bytes"] for rank in (p if mode == "push" else d).ranks)
    assert moved == heads * LAYERS * len(MINE) * BLOCK * TOKEN, "each sink gets each of its heads once"


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_of_one_latent_each_sink_takes_a_replica(engines, mode, sizes) -> None:
    """MLA: every rank of either engine holds all of it."""
    fabric = TwinFabric()
    p, d = (engines(name, fabric, size, total=1, mode=mode) for name, size in zip("pd", sizes, strict=True))
    p.prefill()
    d.open(p.address)
    assert d.wait("d") == [SinkFinished(H, "d", None)] * sizes[1]
    assert d.received()
    assert p.wait("p") == [SourceFinished(H, "p")] * sizes[0]
    reasons = {rank.record("source", H).reason for rank in p.ranks}
    assert reasons == ({"done"} if sizes[1] >= sizes[0] else {"done", IDLE})


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1)])
def test_every_stage_of_prefill_brings_its_layers(engines, mode, tp) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, tp[0], pp=2, mode=mode), engines("d", fabric, tp[1], mode=mode)
    p.prefill()
    d.open(p.address)
    assert d.wait("d") == [SinkFinished(H, "d", None)] * tp[1]
    assert d.received()
    assert p.wait("p") == [SourceFinished(H, "p")] * (2 * tp[0])


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_layers_that_no_stage_holds_fail_with_their_number(engines, mode) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, 1, pp=2, mode=mode), engines("d", fabric, 2, mode=mode)
    p.ranks[0].lead([p.ranks[0].where])
    d.open(p.address)
    for one in d.wait("d"):
        assert "no rank of p brings d rank" in one.reason
        assert "plane 'kv' of layer 2" in one.reason


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_failure_on_one_rank_of_decode_leaves_the_others_alone(engines, mode) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, 1, mode=mode), engines("d", fabric, 2, mode=mode)
    d.open(p.address)
    source = p.ranks[0].mover.source
    wait_until(lambda: H in source._handoffs and len(source._handoffs[H].sinks) == 2, what="both registrations")
    d.ranks[1].begin(cancelled=[cmd.SinkCancel("d", "this rank alone")])
    assert d.ranks[1].wait("d") == SinkFinished(H, "d", "this rank alone")
    p.prefill()
    assert d.ranks[0].wait("d") == SinkFinished(H, "d", None)
    assert p.wait("p") == [SourceFinished(H, "p")]


def test_a_rank_that_dies_before_it_registers_does_not_keep_the_source(engines) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, 1, leg_timeout=1.0), engines("d", fabric, 2)
    d.ranks[0].open(H, "d", p.address, MINE, TOKENS)
    p.prefill()
    assert d.ranks[0].wait("d") == SinkFinished(H, "d", None)
    assert p.wait("p") == [SourceFinished(H, "p")]
    record = p.ranks[0].record("source", H)
    assert "of the 2 ranks of decode that take their share here only 1 came in 1 s" in record.reason


def test_a_write_to_one_rank_that_fails_fails_that_rank(engines) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, 1), engines("d", fabric, 2)
    failing = d.ranks[1].me.agent
    post = TwinAgent.post

    def refuse(self, operation, local, remote, memory, peer, notification=b""):
        if peer == failing:
            raise OSError("no way")
        return post(self, operation, local, remote, memory, peer, notification)

    TwinAgent.post = refuse
    try:
        d.open(p.address)
        p.prefill()
        first, second = d.wait("d")
    finally:
        TwinAgent.post = post
    assert first == SinkFinished(H, "d", None)
    assert second.reason == "a write failed: no way"
    assert p.wait("p") == [SourceFinished(H, "p")]

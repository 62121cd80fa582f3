"""Plans between unlike layouts, carried out by real NIXL LIBFABRIC over libfabric's tcp provider, written and read."""

from __future__ import annotations

import threading
import time
import uuid

import numpy as np
import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.layout.describe import Content, Heads, Tensor, strided
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table
from kvxfer.layout.ranks import Shard, heads_of, share
from kvxfer.transport.agent import Status
from kvxfer.transport.nixl import NixlAgent
from kvxfer_host import HostPlatform

pytestmark = pytest.mark.integration

LAYERS, BLOCKS, HEADS, DIM, TOKENS = 3, 24, 4, 32, 230
NAMES = "LBHNC"


class Rank:
    """A cache [layer, block, head, token, k + v] in an order of axes of its own, and the agent that has it registered."""

    def __init__(self, order: str, block: int, shard: Shard, seed: int) -> None:
        self.block, self.shard, self.heads = block, shard, heads_of(HEADS, shard)
        size = {"L": LAYERS, "B": BLOCKS, "H": len(self.heads), "N": block, "C": 2 * DIM}
        self.memory = np.zeros([size[axis] for axis in order], dtype=np.float32)
        self.array = self.memory.transpose([order.index(axis) for axis in NAMES])
        tensors = [Tensor(i, one.ctypes.data, one.shape, one.strides) for i, one in enumerate(self.array)]
        contents, heads = [Content("k", DIM), Content("v", DIM)], Heads(self.heads, HEADS)
        planes = strided(tensors, "BHNC", contents, dtype="float32", item=4, heads=heads)
        span = (self.memory.ctypes.data, self.memory.nbytes)
        self.cache = CacheMap((Group(block, BLOCKS, planes),), (span,), "DRAM")
        order_of_ids = np.random.default_rng(seed).permutation(BLOCKS).astype(np.int32)
        self.table = Table(order_of_ids[: -(-TOKENS // block)])
        self.agent = NixlAgent(f"layouts-{uuid.uuid4().hex}")
        self.agent.register([(*span, 0)], "DRAM")

    def tokens(self) -> np.ndarray:
        """[layer, head, position, k + v]."""
        return np.concatenate([self.array[:, block] for block in self.table.ids.tolist()], axis=2)

    def move(self, operation: str, local, remote, other: Rank) -> None:
        """Carry out a plan, and wait until the bytes are there: of a WRITE, the notification behind it tells the sink."""
        done, seen = threading.Event(), threading.Event()
        # Connecting and moving want both sides' progress; an agent is used by one thread at a time.
        other_side = threading.Thread(target=other.progress, args=(done, seen), daemon=True)
        metadata = other.agent.metadata()
        other_side.start()
        try:
            transfer = self.agent.post(operation, local, remote, "DRAM", self.agent.add_peer(metadata), b"moved")
            deadline = time.monotonic() + 30
            while (status := self.agent.status(transfer)) is Status.PENDING and time.monotonic() < deadline:
                time.sleep(0.001)
            assert status is Status.DONE
            while not seen.wait(0.001) and time.monotonic() < deadline:
                self.agent.notifications()
            assert seen.is_set()
        finally:
            done.set()
            other_side.join()
        self.agent.release(transfer)

    def progress(self, until: threading.Event, seen: threading.Event) -> None:
        while not until.is_set():
            if any(message == b"moved" for _, message in self.agent.notifications()):
                seen.set()
            time.sleep(0.001)


@pytest.fixture
def ranks(monkeypatch):
    for name, value in HostPlatform().environment().items():
        monkeypatch.setenv(name, value)
    made: list[Rank] = []

    def make(*args) -> Rank:
        made.append(Rank(*args))
        return made[-1]

    yield make
    for one in made:
        one.agent.close()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
@pytest.mark.parametrize(
    ("source", "sink"),
    [
        (("BLHNC", 16, 1), ("BLHNC", 16, 1)),
        (("LBHNC", 16, 2), ("BLHNC", 32, 1)),
        (("LHBNC", 32, 1), ("LBHNC", 16, 4)),
        (("LBNHC", 16, 1), ("LBHNC", 16, 2)),
    ],
)
def test_every_position_arrives_in_the_sinks_own_layout(ranks, operation, source, sink) -> None:
    start, end = 21, TOKENS
    order, block, tp = source
    sources = [ranks(order, block, Shard(rank, tp), 1) for rank in range(tp)]
    content = np.random.default_rng(0).standard_normal((LAYERS, HEADS, TOKENS, 2 * DIM)).astype(np.float32)
    for one in sources:
        for position in range(TOKENS):
            at = one.array[:, one.table.ids[position // block], :, position % block]
            at[...] = content[:, list(one.heads), position]
    order, block, tp = sink
    for rank in range(tp):
        one = ranks(order, block, Shard(rank, tp), 2)
        for other in sources:
            part = share(other.cache, other.shard, one.cache, one.shard)
            if not part:
                continue
            plan = prepare(other.cache, one.cache, part, useful=0).plan([other.table], [one.table], start, end)
            if operation == "WRITE":
                other.move(operation, plan.source, plan.sink, one)
            else:
                one.move(operation, plan.sink, plan.source, other)
        assert (one.tokens()[:, :, start:end] == content[:, list(one.heads), start:end]).all()
        assert not one.tokens()[:, :, :start].any()

"""Whole ranks without vLLM: real memory, the real mover, the real control channel; the fabric is the twin or NIXL itself.

``Rank`` plays the part of one worker process and of its engine's scheduler process (which answers WhoIs). A test plays the
engine: it fills blocks, begins and ends steps, takes results.
"""

from __future__ import annotations

import itertools
import time
from array import array
from typing import Any

import msgspec
import numpy as np

from kvxfer.layout.blocks import CacheLayout, Region
from kvxfer.layout.card import RankCard
from kvxfer.protocol.actions import SinkFinished, SourceFinished
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Directory, RankAddress, Report
from kvxfer.protocol.peers import Timing
from kvxfer.transport import commands as cmd
from kvxfer.transport.control import ControlChannel
from kvxfer.transport.mover import Mover, MoverSettings
from kvxfer.transport.twin import TwinAgent, TwinFabric
from kvxfer_host import HostPlatform

FAST = Timing(interval=0.05, timeout=1.0, lease=0.6, margin=0.05)
LAYERS, HEADS, DIM = 3, 2, 4

_numbers = itertools.count()


def layout_over(memory: np.ndarray, block_size: int, num_blocks: int, **changes: Any) -> CacheLayout:
    """Describe ``memory`` as a layer-major cache of float32 blocks: [layers, blocks, bytes]."""
    block_bytes = memory.shape[2]
    layer_bytes = num_blocks * block_bytes
    base = memory.ctypes.data
    values = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "dtype": "float32",
        "layers": LAYERS,
        "kv_heads": HEADS,
        "head_dim": DIM,
        "interior": "test",
        "memory": "DRAM",
        "regions": tuple(Region(f"layer{i}", base + i * layer_bytes, block_bytes, block_bytes, 0) for i in range(LAYERS)),
        "spans": ((base, memory.nbytes, 0),),
    }
    return CacheLayout(**{**values, **changes})


class Rank:
    """One engine of a single rank. Also a Listener, as the worker half is."""

    def __init__(
        self,
        engine: str,
        fabric: TwinFabric | None = None,
        *,
        mode: str = "push",
        block_size: int = 4,
        num_blocks: int = 64,
        make_agent: Any = None,
        platform: HostPlatform | None = None,
        timing: Timing = FAST,
        model: str = "m",
        changes: dict[str, Any] | None = None,
        connect_timeout: float = 5.0,
        **settings: Any,
    ) -> None:
        self.block_size = block_size
        self.memory = np.zeros((LAYERS, num_blocks, block_size * HEADS * DIM * 2 * 4), dtype=np.uint8)
        self.layout = layout_over(self.memory, block_size, num_blocks, **(changes or {}))
        self.me = RankId(engine, f"i{next(_numbers)}", 0)
        self.platform = platform or HostPlatform(fence_delay=0)
        make = make_agent or (lambda name: TwinAgent(name, fabric))
        # One channel plays both: the engine's control address and the rank's.
        self.control = ControlChannel(self.me, "127.0.0.1", 0, self, timing, connect_timeout)
        self.mover = Mover(
            self.me,
            self.layout,
            lambda: make(self.me.agent),
            MoverSettings(**{"mode": mode, "leg_timeout": 5.0, "drain_bound": 0.3, **settings}),
            self.control.send,
            self.control.connect,
        )
        self.mover.start_and_wait()
        self.card = RankCard(engine, model, 0, 1, 0, 1, "twin", self.layout, self.mover.agent_metadata)
        self.control.present(self.card)
        where = RankAddress(0, self.me.incarnation, 0, 0, "", self.control.port)
        self.control.publish(Directory(engine, 1, 1, ready=True, ranks=(where,)))
        self.control.start()
        self.finished: list[SourceFinished | SinkFinished] = []

    # --- the engine's part ------------------------------------------------------------------------------------------

    @property
    def address(self) -> cmd.EngineAddress:
        return cmd.EngineAddress("127.0.0.1", self.control.port, self.me.engine)

    def fill(self, blocks: list[int], seed: int) -> None:
        """Write bytes that tell layer, block position and seed apart."""
        rng = np.random.default_rng(seed)
        for block in blocks:
            self.memory[:, block] = rng.integers(1, 255, size=self.memory[:, block].shape, dtype=np.uint8)

    def begin(self, **changes: Any) -> None:
        self.mover.post(cmd.StepBegin(cmd.Step(**changes), self.platform.fence()))

    def end(self) -> None:
        self.mover.post(cmd.StepEnd(self.platform.fence()))

    def prefill(self, handoff: HandoffId, request: str, blocks: list[int], tokens: int, chunks: int = 1) -> None:
        """Start, compute in chunks (the bytes are expected to be there), finish and hold the blocks."""
        self.begin(started=[cmd.SourceStart(handoff, request, tokens, time.monotonic())])
        done = 0
        for i in range(chunks):
            final = tokens * (i + 1) // chunks
            have = -(-done // self.block_size)
            new = tuple(blocks[have : -(-final // self.block_size)])
            self.begin(progress=[cmd.SourceProgress(request, new, final)])
            self.end()
            done = final
        self.begin(finished=[cmd.SourceFinish(request, None, held=True)])

    def open(
        self, handoff: HandoffId, request: str, source: cmd.EngineAddress, blocks: list[int], tokens: int, start: int = 0
    ) -> None:
        now = time.monotonic()
        packed = array("i", blocks).tobytes()
        self.begin(opened=[cmd.SinkOpen(handoff, request, source, start, tokens, packed, now, now)])

    def wait(self, request: str, timeout: float = 10.0) -> SourceFinished | SinkFinished:
        """Wait for the one report of a request."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            while self.mover.results:
                self.finished.append(self.mover.results.popleft())
            for one in self.finished:
                if one.request_id == request:
                    return one
            time.sleep(0.001)
        raise AssertionError(f"{self.me} never reported {request}; source {self.mover.source.__dict__}, sink {self.mover.sink.__dict__}")

    def record(self, side: str, handoff: HandoffId) -> Any:
        return next(r for r in reversed(self.mover.records.last(1000)) if r.side == side and r.handoff == str(handoff))

    def kill(self) -> None:
        """Go without a word."""
        self.control.stop()
        self.mover.stop()

    close = kill

    # --- the listener's part ----------------------------------------------------------------------------------------

    def on_message(self, frm, message) -> None:
        self.mover.post(cmd.Inbound(frm, message))

    def on_up(self, rank, card) -> None:
        if card is not None:
            self.mover.post(cmd.PeerUp(rank, card))

    def on_lost(self, rank, reason, granted_until) -> None:
        self.mover.post(cmd.PeerLost(rank, reason, granted_until))

    def on_lease(self, rank, until) -> None:
        self.mover.post(cmd.Leased(rank, until))

    def on_outcome(self, outcome) -> None:
        if outcome.reason is None:
            self.mover.post(cmd.Connected(outcome.address, outcome.ranks))
        else:
            self.mover.post(cmd.Unreachable(outcome.address, outcome.reason))

    def on_round(self, now) -> None:
        pass

    def on_report(self, last) -> Report:
        records = [msgspec.to_builtins(record) for record in self.mover.records.last(last)]
        return Report(0, self.card.to_builtins(), dict(self.mover.counters), records)


def wait_until(condition, timeout: float = 10.0, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(0.002)

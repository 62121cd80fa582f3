"""A rank without an engine: real memory, the real mover, the real control channel; the fabric is the twin or NIXL itself.

``LoneRank`` is one worker process's part of kvxfer together with the address under which an engine would be found. Its caller
plays the engine: fills blocks, begins and ends steps, takes results. Measurements and tests are built on it.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvxfer.errors import TransportError
from kvxfer.layout.card import RankCard
from kvxfer.layout.check import MAX_CHANNELS
from kvxfer.layout.maps import CacheMap, Group, Plane
from kvxfer.layout.route import StagingArea
from kvxfer.layout.tables import packed
from kvxfer.protocol.actions import SinkFinished, SourceFinished, SourceQuiet
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Directory, RankAddress
from kvxfer.protocol.peers import Timing
from kvxfer.transport import commands as cmd
from kvxfer.transport.mirroring import mirror_of
from kvxfer.transport.mover_settings import MoverSettings
from kvxfer.transport.rank import RankThreads
from kvxfer_host import HostPlatform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.protocol.auth import Secret
    from kvxfer.transport.agent import Agent
    from kvxfer.transport.records import HandoffRecord


def layer_major(memory: np.ndarray[Any, np.dtype[np.uint8]], block_size: int, **changes: Any) -> CacheMap:
    """Describe an array of bytes [layers, blocks, bytes of a block] as a cache; ``changes`` override fields of its plane."""
    layers, num_blocks, block_bytes = memory.shape
    base, stride, token = memory.ctypes.data, num_blocks * block_bytes, block_bytes // block_size
    item = 1 if token <= MAX_CHANNELS else 8  # a layout has no more channels than that, of whatever size
    plane = Plane(
        name="kv",
        dtype="uint8",
        item=item,
        layers=tuple(range(layers)),
        bases=tuple(base + number * stride for number in range(layers)),
        heads=(0,),
        total_heads=1,
        block_stride=block_bytes,
        head_stride=0,
        tokens=((block_size, token),),
        channels=((token // item, item),),
    )
    group = Group(block_size, num_blocks, (msgspec.structs.replace(plane, **changes),))
    return CacheMap((group,), ((base, memory.nbytes),), "DRAM")


class LoneRank:
    """One engine of a single rank; or, with ``shard`` or ``stage`` (its number and how many there are), a rank of one of several.

    Of several ranks the first one's ``address`` is the engine's once it has been told of all (``lead``).

    ``make_agent`` gets the agent's name. ``changes`` override fields of the plane that peers are told; ``settings`` the mover's.
    ``staging_bytes``: of an area in which it re-packs what it receives. ``mirrored``: its memory is the platform's device's, and
    the fabric reaches a mirror of it (set ``slice_tokens``). ``cache`` is memory of the caller's in place of its own.
    """

    def __init__(
        self,
        engine: str,
        make_agent: Callable[[str], Agent],
        *,
        mode: str = "push",
        layers: int = 3,
        num_blocks: int = 64,
        block_size: int = 4,
        block_bytes: int = 256,
        platform: HostPlatform | None = None,
        timing: Timing | None = None,
        model: str = "lone",
        backend: str = "LIBFABRIC",
        changes: dict[str, Any] | None = None,
        connect_timeout: float = 5.0,
        mover_timeout: float = 30.0,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: Secret | None = None,
        staging_bytes: int = 0,
        cache: CacheMap | None = None,
        shard: tuple[int, int] = (0, 1),
        stage: tuple[int, int] = (0, 1),
        mirrored: bool = False,
        **settings: Any,
    ) -> None:
        self.block_size = block_size
        self.memory = np.zeros((layers, num_blocks, block_bytes), dtype=np.uint8)
        self.cache = cache or layer_major(self.memory, block_size, **(changes or {}))
        self.me = RankId(engine, secrets.token_hex(4), stage[0] * shard[1] + shard[0])
        self.shard, self.stage = shard, stage
        self.platform = platform or HostPlatform(fence_delay=0)
        self.staging = self.platform.staging(staging_bytes, 0) if staging_bytes else None
        area = None
        if self.staging is not None:
            area = StagingArea(self.staging.address, self.staging.size, self.platform.offers)
        mirror = mirror_of(self.platform, self.cache, area) if mirrored else None
        card = RankCard(engine, model, *shard, *stage, backend, self.cache, b"", area)
        # One channel plays both parts: the engine's control address and the rank's.
        self.threads = RankThreads(
            self.me,
            card if mirror is None else mirror.of(card),
            lambda: make_agent(self.me.agent),
            MoverSettings(**{"mode": mode, **settings}),
            timing or Timing(),
            host=host,
            port=port,
            connect_timeout=connect_timeout,
            mover_timeout=mover_timeout,
            secret=secret,
            repack=self.platform.repack if mirror is None else mirror.repacking(self.platform.repack),
            mirror=mirror,
        )
        self.mover, self.control = self.threads.mover, self.threads.control
        self.lead([self.where])
        self.threads.start()
        self.finished: list[SourceFinished | SinkFinished | SourceQuiet] = []

    @property
    def where(self) -> RankAddress:
        """Where this rank listens."""
        return RankAddress(self.me.rank, self.me.incarnation, self.shard[0], self.stage[0], "", self.control.port)

    def lead(self, ranks: Sequence[RankAddress]) -> None:
        """Tell peers of all ranks of the engine, of which this is the first."""
        self.control.publish(Directory(self.me.engine, self.shard[1], self.stage[1], ready=True, ranks=tuple(ranks)))

    # --- the engine's part ------------------------------------------------------------------------------------------

    @property
    def address(self) -> cmd.EngineAddress:
        """Where a sink finds this rank's engine."""
        return cmd.EngineAddress(self.control.host, self.control.port, self.me.engine)

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Write bytes that tell layers, blocks and seeds apart, none of them zero."""
        rng = np.random.default_rng(seed)
        for block in blocks:
            self.memory[:, block] = rng.integers(1, 255, size=self.memory[:, block].shape, dtype=np.uint8)

    def begin(self, **changes: Any) -> None:
        """Begin a step with these changes (fields of ``Step``)."""
        self.mover.post(cmd.StepBegin(cmd.Step(**changes), self.platform.fence()))

    def end(self) -> None:
        """End the step: its work is behind this fence."""
        self.mover.post(cmd.StepEnd(self.platform.fence()))

    def prefill(self, handoff: HandoffId, request: str, blocks: Sequence[int], tokens: int, chunks: int = 1) -> None:
        """Start, compute in chunks (the bytes are expected to be there), finish and hold the blocks."""
        self.begin(started=[cmd.SourceStart(handoff, request, tokens, time.monotonic())])
        done = 0
        for i in range(chunks):
            final = tokens * (i + 1) // chunks
            new = packed(blocks[-(-done // self.block_size) : -(-final // self.block_size)])
            self.begin(progress=[cmd.SourceProgress(request, new, final)])
            self.end()
            done = final
        self.begin(finished=[cmd.SourceFinish(request, None, held=True)])

    def open(
        self,
        handoff: HandoffId,
        request: str,
        source: cmd.EngineAddress,
        blocks: Sequence[int],
        tokens: int,
        start: int = 0,
    ) -> None:
        """Hand over blocks that shall receive positions [start, tokens) from ``source``."""
        now = time.monotonic()
        self.begin(opened=[cmd.SinkOpen(handoff, request, source, start, tokens, packed(blocks), now, now)])

    def wait(self, request: str, timeout: float = 10.0) -> SourceFinished | SinkFinished:
        """Wait for the one report of a request. Raises TransportError when it does not come in time."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            while self.mover.results:
                self.finished.append(self.mover.results.popleft())
            for one in self.finished:
                if not isinstance(one, SourceQuiet) and one.request_id == request:
                    return one
            time.sleep(0.0002)
        raise TransportError(f"{self.me} did not report {request} within {timeout:g} s")

    def record(self, side: str, handoff: HandoffId) -> HandoffRecord:
        """Return the latest record of a handoff."""
        records = reversed(self.mover.records.last(1 << 30))
        return next(record for record in records if record.side == side and record.handoff == str(handoff))

    def close(self) -> None:
        """Go without a word, as a process that is killed."""
        self.threads.stop()

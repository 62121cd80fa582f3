"""One process stays, its peer is killed and started again: over real NIXL, without vLLM.

The one that stays is this process. What it must not do: hang in a call to NIXL (a post to a dead peer never returns), keep a
handoff open, fail the next incarnation for what the last one left, or run out of anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.protocol.ids import HandoffId
from kvxfer.protocol.peers import Timing
from kvxfer.transport import commands as cmd
from kvxfer.transport.nixl import NixlAgent
from tests.support.forked import ForkedPeer
from tests.support.ranks import Rank, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TIMING = (0.3, 3.0, 1.5, 0.2)
DRAIN = 0.5
PULL_LEASE = 3.0
BOUND = TIMING[1] + max(TIMING[2], PULL_LEASE) + DRAIN
"""Seconds in which everything has ended that concerned a peer that died: the silence, its leases, the drain."""

SLACK = 20.0
"""For a machine that is busy with something else."""


class Pair:
    """The rank that stays, and the one that dies. ``dying`` names the one that dies: p, the source, or d, the sink."""

    def __init__(self, dying: str, mode: str, logs: Path, **sizes: int) -> None:
        self.dying, self.logs = dying, logs
        self.options = {"mode": mode, "drain_bound": DRAIN, "pull_lease": PULL_LEASE, **sizes}
        self.stays = Rank("d" if dying == "p" else "p", make_agent=NixlAgent, timing=Timing(*TIMING), **self.options)
        self.lives = 0
        self.peer: ForkedPeer
        self.start()

    def start(self) -> None:
        self.lives += 1
        log = self.logs / f"{self.dying}{self.lives}.log"
        self.peer = ForkedPeer(self.dying, log, timing=TIMING, **self.options)

    def close(self) -> None:
        self.peer.kill()

    def expect(self, name: str, blocks: list[int]) -> str:
        """Open a handoff at the sink. Returns what the one that stays calls its request."""
        tokens = len(blocks) * self.stays.block_size
        if self.dying == "d":
            port = self.stays.control.port
            self.peer("open", handoff=name, request=name, engine="p", port=port, blocks=blocks, tokens=tokens)
        else:
            source = cmd.EngineAddress("127.0.0.1", self.peer.port, "p")
            self.stays.open(HandoffId(name), name, source, blocks, tokens)
        return name

    def prefill(self, name: str, blocks: list[int]) -> None:
        tokens = len(blocks) * self.stays.block_size
        if self.dying == "d":
            self.stays.prefill(HandoffId(name), name, blocks, tokens)
        else:
            self.peer("prefill", handoff=name, request=name, blocks=blocks, tokens=tokens)

    def one_that_succeeds(self, seed: int, blocks: list[int]) -> None:
        """One handoff with the right bytes, the two sides' blocks in different orders."""
        name, there = f"good{seed}", blocks[::-1]
        self.expect(name, there)
        if self.dying == "d":
            self.stays.fill(blocks, seed)
        else:
            self.peer("fill", blocks=blocks, seed=seed)
        self.prefill(name, blocks)
        assert getattr(self.stays.wait(name, SLACK), "reason", None) is None
        assert self.peer("wait", request=name) is None
        mine, theirs = (blocks, there) if self.dying == "d" else (there, blocks)
        digest = hashlib.sha256(self.stays.memory[:, mine].tobytes()).hexdigest()
        assert self.peer("digest", blocks=theirs) == digest

    def nothing_is_left(self) -> None:
        mover = self.stays.mover
        for what in (mover.source, mover.sink, mover.transfers.in_flight):
            wait_until(lambda what=what: not len(what), SLACK, "an end of what the dead peer was part of")
        mover.check()


@pytest.fixture
def pair(request, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(dying: str, mode: str, **sizes: int) -> Pair:
            made = Pair(dying, mode, tmp_path, **sizes)
            stack.callback(made.stays.close)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("dying", ["d", "p"], ids=["decode-dies", "prefill-dies"])
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_peer_dies_in_mid_transfer_and_comes_back(pair, dying, mode, times) -> None:
    """Many handoffs are under way at the death, and the survivor's engine goes on to compute for them after it."""
    pair = pair(dying, mode, layers=8, num_blocks=1040, block_bytes=32_768)
    chance = random.Random(f"{dying}{mode}")
    blocks = list(range(1, 129))
    for life in range(times):
        pair.one_that_succeeds(life, blocks)
        killed_after = chance.uniform(0.0, 0.3)
        kill = threading.Timer(killed_after, pair.peer.kill)
        names = []
        spans = [list(range(1 + 128 * i, 129 + 128 * i))[:: chance.choice((1, -1))] for i in range(8)]
        with contextlib.suppress(AssertionError, OSError, EOFError):  # what is asked of the dead
            for i, span in enumerate(spans):
                names.append(pair.expect(f"doomed{life}-{i}", span))
            kill.start()
            for i, span in enumerate(spans):
                if dying == "p":
                    pair.prefill(f"doomed{life}-{i}", span)
                time.sleep(chance.uniform(0.0, 0.05))
        if dying == "d":
            for i, span in enumerate(spans):
                pair.prefill(f"doomed{life}-{i}", span)
                time.sleep(0.05)
        kill.join()
        died = time.monotonic()
        for name in names:
            pair.stays.wait(name, SLACK)
        assert time.monotonic() - died < BOUND + SLACK
        pair.start()
        pair.one_that_succeeds(1000 + life, blocks)
        pair.nothing_is_left()


def _weight() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return {"fds": sum(1 for _ in Path("/proc/self/fd").iterdir()), "threads": threading.active_count(), "rss_kib": rss}


@pytest.mark.parametrize("dying", ["d", "p"], ids=["decode-dies", "prefill-dies"])
@pytest.mark.parametrize("times", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_restarts_of_a_peer_cost_nothing(pair, dying, times, record_property) -> None:
    """More lives than NIXL's LIBFABRIC plugin has indexes for agents, in the slow run."""
    pair = pair(dying, "push", layers=2, num_blocks=64, block_bytes=1024)
    warm, begin = min(10, times // 2), {}
    for life in range(times):
        pair.one_that_succeeds(life, [1, 2, 3])
        pair.peer.kill()
        pair.start()
        if life == warm:
            pair.one_that_succeeds(10_000, [1, 2, 3])
            pair.nothing_is_left()
            begin = _weight()
    pair.one_that_succeeds(20_000, [1, 2, 3])
    pair.nothing_is_left()
    end = _weight()
    slope = (end["rss_kib"] - begin["rss_kib"]) / (times - warm)
    record_property("rss_kib_per_restart", round(slope, 1))
    print(f"\n{times} restarts: {begin} -> {end}, {slope:.1f} KiB of memory each")
    assert end["threads"] == begin["threads"]
    assert end["fds"] <= begin["fds"] + 2
    assert slope < 200
    mover = pair.stays.mover
    assert sum(1 for _ in pair.stays.control.sessions) == 1
    assert len(mover.transfers.reach._cards) == 1
    assert len(mover.transfers.reach._agents) == (dying == "d"), "only who posts adds its peers to NIXL"
    assert len(mover.transfers.keeper.agent._all) == 1, "NIXL agents whose peers are all dead must be closed"

"""Memory that NIXL is not told of, moved through mirrors of it: two processes, real NIXL over tcp, copies that are late."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

pytest.importorskip("torch")

from tests.integration.test_stopped_source import BLOCKS, stop_in_mid_write
from tests.support.laid_out import TOKENS

pytestmark = pytest.mark.integration

DEVICE = {"mirrored": True, "slice_tokens": 16, "env": {"KVXFER_HOST_COPY_DELAY": "0.01"}}


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_bytes_arrive_through_both_mirrors(peers, mode) -> None:
    p, d = peers("p", mode=mode, **DEVICE), peers("d", mode=mode, **DEVICE)
    for i, tokens in enumerate((1, 4, 33, 200)):
        blocks = list(range(1, 1 + -(-tokens // 4)))
        mine = blocks[::-1]
        p("fill", blocks=blocks, seed=i)
        if i % 2:
            p("prefill", handoff=f"h{i}", request=f"p{i}", blocks=blocks, tokens=tokens, chunks=3)
        d("open", handoff=f"h{i}", request=f"d{i}", engine="p", port=p.port, blocks=mine, tokens=tokens)
        if not i % 2:
            p("prefill", handoff=f"h{i}", request=f"p{i}", blocks=blocks, tokens=tokens, chunks=3)
        assert d("wait", request=f"d{i}") is None
        assert d("digest", blocks=mine) == p("digest", blocks=blocks)
        assert p("wait", request=f"p{i}") is None


@pytest.mark.parametrize("through", ["p", "d"])
def test_one_side_may_be_host_memory(peers, through) -> None:
    p, d = (peers(name, **(DEVICE if name == through else {})) for name in "pd")
    p("fill", blocks=[1, 2, 3], seed=7)
    p("prefill", handoff="h", request="p1", blocks=[1, 2, 3], tokens=11)
    d("open", handoff="h", request="d1", engine="p", port=p.port, blocks=[9, 8, 7], tokens=11)
    assert d("wait", request="d1") is None
    assert d("digest", blocks=[9, 8, 7]) == p("digest", blocks=[1, 2, 3])


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_unlike_caches_are_re_packed_behind_the_mirror(peers, mode) -> None:
    """Neuron's blocks of 32, K and V apart, into CUDA's of 16 that join them: into the mirror's slots, the device's, its blocks."""
    device = {**DEVICE, "slice_tokens": 64, "mode": mode}
    p, d = peers("p", layout="neuron", **device), peers("d", layout="cuda joined", staging_bytes=1 << 20, **device)
    d("put", blocks=list(range(1, TOKENS // 16 + 1)), tokens=TOKENS, seed=77)
    for i, (tokens, start) in enumerate([(1, 0), (33, 0), (512, 0), (200, 64)]):
        theirs, mine = list(range(1, 1 + -(-tokens // 32))), list(range(32, 32 - -(-tokens // 16), -1))
        p("put", blocks=theirs, tokens=tokens, seed=i)
        d("put", blocks=list(range(1, TOKENS // 16 + 1)), tokens=TOKENS, seed=77)
        names = {"handoff": f"h{i}", "tokens": tokens}
        d("open", request=f"d{i}", engine="p", port=p.port, blocks=mine[start // 16 :], start=start, **names)
        p("prefill", request=f"p{i}", blocks=theirs, chunks=3, **names)
        assert d("wait", request=f"d{i}") is None
        assert d("wrong", blocks=mine, tokens=tokens, seed=i, start=start, others=77) == 0


def test_what_a_stopped_source_writes_late_stays_in_the_mirror(peers) -> None:
    """Not even revoked: over tcp the rest of the write does land, in the mirror, from where nobody copies it."""
    size = {"num_blocks": 64, "block_bytes": 2 << 20, "mirrored": True, "slice_tokens": 20}
    late = {"KVXFER_HOST_COPY_DELAY": "0"}
    p, d = peers("p", env=late, **size), peers("d", revoke=False, env=late, **size)
    p("fill", blocks=BLOCKS, seed=1)
    d("open", handoff="h", request="d", engine="p", port=p.port, blocks=BLOCKS, tokens=4 * len(BLOCKS))
    stop_in_mid_write(p, d, 90.0)
    assert "nothing heard from it" in d("wait", request="d")
    d("fill", blocks=BLOCKS, seed=9)
    mine = d("digest", blocks=BLOCKS)
    os.kill(p.process.pid, signal.SIGCONT)
    p("fill", blocks=[61, 62], seed=3)
    d("open", handoff="y", request="e", engine="p", port=p.port, blocks=[62, 63], tokens=8)
    p("prefill", handoff="y", request="q", blocks=[61, 62], tokens=8)
    assert d("wait", request="e") is None
    assert d("digest", blocks=[62, 63]) == p("digest", blocks=[61, 62])
    p("wait", request="p")
    time.sleep(0.2)
    assert d("digest", blocks=BLOCKS) == mine

"""A source that is stopped in the middle of a write, and goes on long after it was given up: real NIXL, two processes."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")


if TYPE_CHECKING:
    from tests.support.peers import PeerProcess

pytestmark = pytest.mark.integration

BLOCKS = list(range(1, 61))
SIZE = {"num_blocks": 64, "block_bytes": 2 << 20}


def stop_in_mid_write(p: PeerProcess, d: PeerProcess, seconds: float = 20.0) -> None:
    p("prefill", handoff="h", request="p", blocks=BLOCKS, tokens=4 * len(BLOCKS))
    deadline = time.monotonic() + seconds
    while not (arrived := d("arrived", blocks=BLOCKS)) > 0:
        assert time.monotonic() < deadline
    os.kill(p.process.pid, signal.SIGSTOP)
    assert arrived < 2 * len(BLOCKS), "all had arrived already: nothing is tested"


@pytest.mark.parametrize("revoke", [True, False], ids=["revoked", "not revoked"])
def test_what_a_stopped_source_had_begun_does_not_land_after_its_blocks_were_given_back(peers, revoke) -> None:
    """Not revoked is the check of the check: over tcp, the rest of the write lands when the process goes on."""
    p, d = peers("p", **SIZE), peers("d", revoke=revoke, **SIZE)
    p("fill", blocks=BLOCKS, seed=1)
    d("open", handoff="h", request="d", engine="p", port=p.port, blocks=BLOCKS, tokens=4 * len(BLOCKS))
    stop_in_mid_write(p, d)
    assert "nothing heard from it" in d("wait", request="d")
    d("fill", blocks=BLOCKS, seed=9)
    mine = d("digest", blocks=BLOCKS)
    os.kill(p.process.pid, signal.SIGCONT)
    for i in range(2):  # both serve each other again; and while they do, what is under way makes progress
        p("fill", blocks=[61, 62], seed=i)
        d("open", handoff=f"h{i}", request=f"d{i}", engine="p", port=p.port, blocks=[62, 63], tokens=8)
        p("prefill", handoff=f"h{i}", request=f"q{i}", blocks=[61, 62], tokens=8)
        assert d("wait", request=f"d{i}") is None
        assert d("digest", blocks=[62, 63]) == p("digest", blocks=[61, 62])
    p("wait", request="p")
    assert (d("digest", blocks=BLOCKS) == mine) is revoke

"""Ranks in processes of their own, over real NIXL."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.peers import PeerProcess


@pytest.fixture
def peers(tmp_path):
    """Make peers, which go with the test, stopped ones too."""
    made = []

    def make(engine: str, **options) -> PeerProcess:
        made.append(PeerProcess(engine, tmp_path / f"{engine}{len(made)}.log", **options))
        return made[-1]

    yield make
    for peer in made:
        if peer.process.poll() is None:
            os.kill(peer.process.pid, signal.SIGCONT)
        peer.close()

"""Two processes, real NIXL LIBFABRIC over libfabric's tcp provider: the whole path but vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

from tests.support.peers import PeerProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def peers(tmp_path):
    made = []

    def make(engine: str, **options) -> PeerProcess:
        made.append(PeerProcess(engine, tmp_path / f"{engine}{len(made)}.log", **options))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_bytes_arrive(peers, mode) -> None:
    p, d = peers("p", mode=mode), peers("d", mode=mode)
    for i, tokens in enumerate((1, 4, 33, 200)):
        blocks = list(range(1, 1 + -(-tokens // 4)))
        mine = blocks[::-1]
        p("fill", blocks=blocks, seed=i)
        if i % 2:
            p("prefill", handoff=f"h{i}", request=f"p{i}", blocks=blocks, tokens=tokens, chunks=2)
        d("open", handoff=f"h{i}", request=f"d{i}", engine="p", port=p.port, blocks=mine, tokens=tokens)
        if not i % 2:
            p("prefill", handoff=f"h{i}", request=f"p{i}", blocks=blocks, tokens=tokens, chunks=2)
        assert d("wait", request=f"d{i}") is None
        assert p("wait", request=f"p{i}") is None
        assert d("digest", blocks=mine) == p("digest", blocks=blocks)

"""Engines of unequal tensor parallelism over real NIXL, each rank a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

if TYPE_CHECKING:
    from tests.support.peers import PeerProcess

pytestmark = pytest.mark.integration

HEADS = 2


def engine(peers, name: str, size: int, **options) -> list[PeerProcess]:
    each = HEADS // size
    ranks = [
        peers(name, shard=[rank, size], heads=[list(range(rank * each, (rank + 1) * each)), HEADS], **options)
        for rank in range(size)
    ]
    ranks[0]("lead", ranks=[rank("where") for rank in ranks])
    return ranks


def head_of(ranks: list[PeerProcess], head: int, blocks: list[int]) -> str:
    each = HEADS // len(ranks)
    return ranks[head // each]("digest", blocks=blocks, head=head % each)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
def test_every_head_arrives_again_and_again(peers, mode, sizes) -> None:
    p, d = (engine(peers, name, size, mode=mode) for name, size in zip("pd", sizes, strict=True))
    for number in range(5):
        name, theirs, mine = f"h{number}", [1, 2, 3], [9 + number, 8, 7]
        for seed, rank in enumerate(p):
            rank("fill", blocks=theirs, seed=10 * number + seed)
            rank("prefill", handoff=name, request=f"p{name}", blocks=theirs, tokens=11, chunks=2)
        for rank in d:
            rank("open", handoff=name, request=f"d{name}", engine="p", port=p[0].port, blocks=mine, tokens=11)
        assert [rank("wait", request=f"d{name}") for rank in d] == [None] * len(d)
        assert [rank("wait", request=f"p{name}") for rank in p] == [None] * len(p)
        for head in range(HEADS):
            assert head_of(d, head, mine) == head_of(p, head, theirs)

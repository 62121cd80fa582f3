"""A Neuron-laid-out engine and a CUDA-laid-out one, a process each, real NIXL over tcp: every byte, both ways, written and read."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")
pytest.importorskip("torch")

from tests.support.forked import ForkedPeer
from tests.support.laid_out import KINDS, TOKENS

pytestmark = pytest.mark.integration

STAGING = 1 << 20


@pytest.fixture
def peers(tmp_path):
    made = []

    def make(engine: str, layout: str, **options) -> ForkedPeer:
        made.append(ForkedPeer(engine, tmp_path / f"{engine}.log", layout=layout, **options))
        return made[-1]

    yield make
    for peer in made:
        peer.kill()


def table(layout: str, tokens: int, seed: int) -> list[int]:
    """Blocks of a request, in no order; never vLLM's null block."""
    block = KINDS[layout].block
    return random.Random(seed).sample(range(1, TOKENS // block + 1), -(-tokens // block))


def hand_over(peers, mode: str, source: str, sink: str, **sink_options):
    """Hand requests of several lengths over, the last one from its second block on; yield what went wrong in each."""
    p, d = peers("p", source, mode=mode), peers("d", sink, mode=mode, **sink_options)
    for number, (tokens, start) in enumerate([(1, 0), (33, 0), (200, 0), (512, 0), (200, 64)]):
        theirs, mine = table(source, tokens, number), table(sink, tokens, number + 100)
        p("put", blocks=theirs, tokens=tokens, seed=number)
        d("put", blocks=table(sink, TOKENS, 0), tokens=TOKENS, seed=77)
        names = {"handoff": f"h{number}", "tokens": tokens}
        opened = mine[start // KINDS[sink].block :]
        if number % 2:
            p("prefill", request=f"p{number}", blocks=theirs, chunks=3, **names)
            d("open", request=f"d{number}", engine="p", port=p.port, blocks=opened, start=start, **names)
        else:
            d("open", request=f"d{number}", engine="p", port=p.port, blocks=opened, start=start, **names)
            p("prefill", request=f"p{number}", blocks=theirs, chunks=3, **names)
        assert d("wait", request=f"d{number}") is None
        assert p("wait", request=f"p{number}") is None
        yield d, mine, tokens, number, start


@pytest.mark.parametrize(
    ("mode", "cuda"), [("push", "cuda halves"), ("pull", "cuda halves"), ("push", "cuda halves of 32")]
)
@pytest.mark.parametrize("way", ["neuron to cuda", "cuda to neuron"])
def test_every_byte_arrives_and_nothing_else_is_written(peers, mode, cuda, way) -> None:
    """vLLM up to 0.25 lays K and V out in halves on CUDA, as 0.24 under vllm-neuron does: a head's part of a block is a run in both."""
    source, sink = ("neuron", cuda) if way == "neuron to cuda" else (cuda, "neuron")
    for d, mine, tokens, seed, start in hand_over(peers, mode, source, sink):
        assert d("wrong", blocks=mine, tokens=tokens, seed=seed, start=start, others=77) == 0


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_sink_that_re_packs_takes_neurons_blocks_into_joined_ones(peers, mode) -> None:
    """From 0.26 on K and V are joined in a token on CUDA: whole blocks of Neuron's into staging, tokens from there."""
    for d, mine, tokens, seed, start in hand_over(peers, mode, "neuron", "cuda joined", staging_bytes=STAGING):
        assert d("wrong", blocks=mine, tokens=tokens, seed=seed, start=start, others=77) == 0


@pytest.mark.parametrize(("source", "sink"), [("cuda joined", "neuron"), ("neuron", "cuda joined")])
def test_without_re_packing_crumbs_are_refused_with_both_layouts_and_the_cure(peers, source, sink) -> None:
    """Neuron re-packs nothing; a run would be one token of one head, 128 bytes."""
    p, d = peers("p", source), peers("d", sink)
    d("open", handoff="h", request="d1", engine="p", port=p.port, blocks=[1], tokens=16)
    reason = d("wait", request="d1")
    for said in ("runs of 128 bytes on average", "p rank 0 lays k+v", "d rank 0 lays k+v", "[block][head][token"):
        assert said in reason

"""The index of what a decode engine has: bounded, and made again only of what is new."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.config import Settings
from kvxfer.connector import retained as module
from kvxfer.connector.retained import INDEXED, MOST_ASKS, Retained
from kvxfer.connector.shaping import chain_of
from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol.ids import HandoffId, RankId
from kvxfer.protocol.messages import Ask
from tests.unit.chaos.reuse_world import BLOCK, BLOCKS, Pool

READER, OTHER = RankId("p", "i", -1), RankId("q", "i", -1)
IDLE = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
BUSY = SimpleNamespace(num_scheduled_tokens={"x": 1}, total_num_scheduled_tokens=1)


class Rig:
    def __init__(self, wake=lambda: None, **settings) -> None:
        self.said: list = []
        self.woken = 0
        self.pool = Pool()
        self.retained = Retained(
            Settings(**{"reuse_pin_limit": 0.5, **settings}),
            BLOCK,
            "m",
            lambda _frm, held: self.said.append(held),
            wake,
        )
        self.retained.bind(self.pool)

    def finish(self, tokens: list[int], now: float = 0.0, *, cached: bool = True) -> None:
        """A request of these tokens, whole blocks, has finished."""
        hashes = [tuple(tokens[: end + BLOCK]) for end in range(0, len(tokens), BLOCK)]
        for theirs in hashes if cached else ():
            if theirs not in self.pool.cached:
                block = self.pool.take(repr(theirs))
                block.hash = theirs
                self.pool.cached[theirs] = block
                self.pool.free_blocks([block])
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=tokens, all_token_ids=tokens, num_tokens=len(tokens),
            num_computed_tokens=len(tokens), block_hashes=hashes,
        )  # fmt: skip
        self.retained.finished(request, now)

    def ask(self, tokens: list[int], name: str = "h", output=IDLE, now: float = 1.0, start: int = 0) -> list:
        request = SimpleNamespace(prompt_token_ids=tokens)
        self.retained.ask(READER, Ask(HandoffId(name), start, chain_of(request, tokens, "m")[start:], now))
        return list(self.retained.serve(output, now))


def tokens(blocks: int, seed: int = 0) -> list[int]:
    return [seed * 100_000 + at for at in range(blocks * BLOCK)]


def test_the_index_is_bounded_and_forgets_what_finished_first() -> None:
    rig = Rig()
    for seed in range(2 * INDEXED * BLOCKS // 4):
        rig.finish(tokens(4, seed), cached=False)
    assert len(rig.retained._index) == len(rig.retained._digests) == INDEXED * BLOCKS
    rig.finish(tokens(4, 1000))
    rig.ask(tokens(4, 1000))
    assert rig.said[-1].tokens == 4 * BLOCK


def test_of_what_is_known_nothing_is_digested_again(monkeypatch) -> None:
    rig, digested = Rig(), []
    monkeypatch.setattr(
        module, "chain_of", lambda request, new, *rest: (digested.append(len(new)), chain_of(request, new, *rest))[1]
    )
    rig.finish(tokens(4))
    rig.finish(tokens(7))
    rig.finish(tokens(7))
    assert digested == [4 * BLOCK, 3 * BLOCK, 0]
    rig.ask(tokens(7))
    assert rig.said[-1].tokens == 7 * BLOCK, "and the chain that goes on is the same"


def test_what_a_step_may_still_compute_is_behind_its_fence() -> None:
    rig = Rig()
    rig.finish(tokens(4))
    assert [one.computing for one in rig.ask(tokens(4), "one")] == [False]
    assert [one.computing for one in rig.ask(tokens(4), "two", output=BUSY)] == [True]


def test_only_what_is_asked_for_is_pinned_and_named() -> None:
    rig = Rig()
    rig.finish(tokens(4))
    (held,) = rig.ask(tokens(4), start=2 * BLOCK)
    ids = memoryview(held.blocks).cast("i").tolist()
    assert ids[:2] == [0, 0]
    assert all(rig.pool.blocks[number].ref_cnt == 1 for number in ids[2:])
    assert rig.retained.pinned == 2


def test_a_lease_ends_by_its_readers_word_alone_or_by_its_time() -> None:
    rig = Rig(decoder_kv_idle_ttl=10.0, decoder_kv_blocks_ttl=25.0)
    rig.finish(tokens(4))
    rig.ask(tokens(4))
    rig.retained.release(OTHER, HandoffId("h"))
    rig.retained.release(READER, HandoffId("another"))
    list(rig.retained.serve(IDLE, 2.0))
    assert rig.retained.pinned == 4
    for now, until in ((9.0, 19.0), (18.0, 26.0)):
        rig.retained.ask(READER, Ask(HandoffId("h"), 0, b"", now))
        (renewed,) = rig.retained.serve(IDLE, now)
        assert (renewed.until, renewed.blocks) == (until, b"")
    assert not rig.retained.pending(25.9)
    assert rig.retained.pending(26.0)
    rig.retained.let_go(26.0)
    assert rig.retained.pinned == 0
    assert not rig.retained.pending(26.0)


def test_without_a_way_to_be_woken_an_engine_goes_on_stepping_for_a_while() -> None:
    rig = Rig(wake=None, decoder_kv_idle_ttl=10.0)
    assert not rig.retained.pending(0.0)
    rig.finish(tokens(2), now=5.0)
    assert rig.retained.pending(14.9)
    assert not rig.retained.pending(15.1)


@pytest.mark.parametrize(("start", "chain"), [(8, b""), (0, b"x" * 17)])
def test_a_question_that_is_none_is_refused(start, chain) -> None:
    with pytest.raises(RemoteProtocolError, match="digests"):
        Rig().retained.ask(READER, Ask(HandoffId("h"), start, chain, 1.0))


def test_what_cannot_be_queued_is_answered_at_once() -> None:
    rig = Rig()
    for number in range(MOST_ASKS + 1):
        rig.retained.ask(READER, Ask(HandoffId(f"h{number}"), 0, b"", 1.0))
    (held,) = rig.said
    assert (held.handoff.transfer, held.tokens) == (f"h{MOST_ASKS}", 0)


def test_what_running_and_waiting_requests_may_need_is_not_granted() -> None:
    rig = Rig(reuse_pin_limit=1.0)
    rig.finish(tokens(20))
    free = rig.pool.get_num_free_blocks()
    waiting = SimpleNamespace(
        request_id="w", num_tokens=(free - 8) * BLOCK, num_computed_tokens=0, num_prompt_tokens=0, max_tokens=1
    )
    rig.retained.began(waiting)
    rig.ask(tokens(20))
    assert rig.said[-1].tokens == 7 * BLOCK, "a block more than its prompt is left to who waits"
    running = SimpleNamespace(
        request_id="x", num_tokens=16, num_computed_tokens=16, num_prompt_tokens=16, max_tokens=10_000
    )
    rig.retained.began(running)
    rig.ask(tokens(20), "again", output=BUSY)
    assert rig.said[-1].tokens == 0
    assert rig.retained.counters["reuse_no_room"] == 1


def test_blocks_that_are_the_same_to_vllm_under_two_digests_are_indexed_once() -> None:
    """vLLM takes an empty cache salt for none; we do not. The index is full in the middle of the first one's blocks."""
    rig, mine = Rig(), tokens(4)

    def finish(salt: str | None) -> None:
        hashes = [tuple(mine[: end + BLOCK]) for end in range(0, len(mine), BLOCK)]
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=mine, all_token_ids=mine, num_tokens=len(mine), cache_salt=salt,
            num_computed_tokens=len(mine), block_hashes=hashes,
        )  # fmt: skip
        rig.retained.finished(request, 0.0)

    finish(None)
    rig.finish(tokens(INDEXED * BLOCKS - 3, 1), cached=False)  # one too many
    assert tuple(mine[:BLOCK]) not in rig.retained._digests
    finish("")
    for seed in range(2, 8):
        rig.finish(tokens(INDEXED * BLOCKS // 2, seed), cached=False)
        assert len(rig.retained._index) == len(rig.retained._digests)


def test_a_position_that_no_prompt_reaches_is_not_held() -> None:
    rig = Rig()
    rig.finish(tokens(4))
    request = SimpleNamespace(prompt_token_ids=tokens(4))
    rig.retained.ask(READER, Ask(HandoffId("h"), 1 << 30, chain_of(request, tokens(4), "m"), 1.0))
    assert list(rig.retained.serve(IDLE, 1.0)) == []
    assert rig.said[-1].tokens == 0

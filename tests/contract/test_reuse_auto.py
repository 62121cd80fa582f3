"""``kv_recompute_threshold: auto`` under vLLM's real schedulers: a fabric slower than prefill is left alone, a quicker one is used."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.transport.twin import Faults
from tests.contract.test_reuse import BLOCK, Pair, pair, tiny, tokens  # noqa: F401 - fixtures

pytestmark = pytest.mark.contract


def conversation(both: Pair, turns: int) -> list[tuple[int, int]]:
    """Hold one. Returns what was fetched in each turn after the first, and what was declined since it was not worth while."""
    history, found = tokens(200, 1), []
    for turn in range(turns + 1):
        before = dict(both.counters(both.p))
        history += both.turn(history, 4)
        after = both.counters(both.p)
        names = ("reuse_fetched_tokens", "reuse_declined_threshold")
        found.append(tuple(after.get(name, 0) - before.get(name, 0) for name in names))
        history += tokens(20, 2 + turn)
    return found[1:]


def known(turn: int) -> int:
    """Positions that decode holds before a turn."""
    return (200 + 24 * (turn - 1) + 3) // BLOCK * BLOCK


def test_a_slow_fabric_is_tried_once(pair) -> None:  # noqa: F811
    both = pair("pull", Faults(delay=(2.0, 2.1)), kv_recompute_threshold="auto")
    first, *later = conversation(both, 3)
    assert first == (known(1), 0), "nothing is known of it yet"
    for turn, (fetched, declined) in enumerate(later, 2):
        assert fetched == 0
        assert declined == (200 + 24 * turn - 1) // BLOCK * BLOCK, "all that might have been fetched, under its reason"


def test_a_fast_fabric_is_used_again_and_again(pair) -> None:  # noqa: F811
    both = pair("pull", kv_recompute_threshold="auto")
    execute = both.p._execute

    def slow(scheduled: Any) -> Any:
        time.sleep(0.002 * scheduled.total_num_scheduled_tokens)
        return execute(scheduled)

    both.p._execute = slow
    assert conversation(both, 3) == [(known(turn), 0) for turn in (1, 2, 3)]

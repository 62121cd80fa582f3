"""Turns by what answers carry alone, handed on unread: what upstream's multi-turn proxy does, under vLLM's real schedulers.

It sends the prefill leg what decode's answer to the turn before carried, then the decode leg what the prefill leg's answer carries.
No id is its own: one handoff's name lasts for the conversation.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.contract.test_reuse import BLOCK, pair, tiny, tokens  # noqa: F401 - fixtures
from tests.support.engine import expected

pytestmark = pytest.mark.contract

NOTHING = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ANSWER = 20


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_conversation_by_what_answers_carry(pair, mode) -> None:  # noqa: F811
    both = pair(mode)
    both._count(both.d)
    carried: dict = {}
    history: list[int] = tokens(150, 1)
    for turn in range(4):
        before = both.fetched()
        first = {**(carried or NOTHING), "do_remote_decode": True, "do_remote_prefill": False}
        both.p.add(f"p{turn}", history, first)
        both.run(lambda turn=turn: f"p{turn}" in both.p.finish_reasons)
        both.d.add(f"d{turn}", history, both.p.params[f"p{turn}"], max_tokens=ANSWER)
        both.run(lambda turn=turn: f"d{turn}" in both.d.finish_reasons)
        carried = both.d.params[f"d{turn}"]
        assert carried["do_remote_decode"] is True
        assert both.p.problems == both.d.problems == []
        assert both.d.outputs[f"d{turn}"] == expected(history, ANSWER)
        known = len(history) - 20 - 1 if turn else 0
        assert both.fetched() - before == known // BLOCK * BLOCK, f"turn {turn}"
        assert both.computed[f"d{turn}"] <= ANSWER + BLOCK, "decode computed a prompt that was handed over"
        history = [*history, *both.d.outputs[f"d{turn}"], *tokens(20, 2 + turn)]
    both.settle()

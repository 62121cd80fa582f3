"""Both engines of a pair must give one handoff one name, from ids that they decorate differently."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.protocol.ids import HandoffId, RankId, handoff_id, shown, split_request_id

HEX = st.text("0123456789abcdef", min_size=8, max_size=8)
# What routers put into X-Request-Id: uuids, and everything that looks like one of vLLM's own decorations.
HEADERS = st.one_of(
    st.uuids().map(str),
    st.uuids().map(lambda u: u.hex),
    st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=24),
    st.from_regex(r"[a-z0-9_-]{1,8}-[0-9a-f]{8}", fullmatch=True),
    st.from_regex(r"[0-9]{1,3}_[a-z0-9-]{1,8}", fullmatch=True),
    st.from_regex(r"(cmpl|chatcmpl)-[a-z0-9-]{1,8}", fullmatch=True),
    st.from_regex(r"[a-z]{1,4}-[0-9]{1,3}", fullmatch=True),
)
INDEX = st.integers(0, 500)


def completion(header: str, prompt: int, tail: str, child: int | None) -> str:
    """vLLM 0.29 and 0.32: completion/serving.py:143, 179; input_processor.py:279; parallel_sampling.py:94."""
    return ("" if child is None else f"{child}_") + f"cmpl-{header}-{prompt}-{tail}"


def chat(header: str, tail: str, child: int | None) -> str:
    """vLLM 0.29 and 0.32: chat_completion/serving.py:282; the rest as above."""
    return ("" if child is None else f"{child}_") + f"chatcmpl-{header}-{tail}"


@given(HEADERS, INDEX, HEX, st.none() | INDEX)
@example("a-0a1b2c3d", 0, "00000000", None)
@example("cmpl-a-0-0a1b2c3d", 3, "00000000", 2)
@example("line\nbreak", 0, "00000000", None)
def test_a_completion_id_gives_back_what_it_was_made_of(header, prompt, tail, child) -> None:
    assert split_request_id(completion(header, prompt, tail, child)) == (header, prompt, child or 0)


@given(HEADERS, HEX, st.none() | INDEX)
@example("a-7", "00000000", None)
@example("ends in a line break\n", "00000000", 1)
def test_a_chat_id_gives_back_what_it_was_made_of(header, tail, child) -> None:
    assert split_request_id(chat(header, tail, child)) == (header, 0, child or 0)


@given(st.uuids(), INDEX, st.none() | INDEX)
def test_ids_that_vllm_did_not_randomise(header, prompt, child) -> None:
    """VLLM_DISABLE_REQUEST_ID_RANDOMIZATION leaves the tail off."""
    front = "" if child is None else f"{child}_"
    assert split_request_id(f"{front}cmpl-{header}-{prompt}") == (str(header), prompt, child or 0)
    assert split_request_id(f"{front}chatcmpl-{header}") == (str(header), 0, child or 0)


@pytest.mark.parametrize("request_id", ["7", "cmpl", "x-1", "a_b", "", "-0a1b2c3d", "０_x"])
def test_an_undecorated_id_is_its_own_base(request_id) -> None:
    assert split_request_id(request_id) == (request_id, 0, 0)


@given(st.text(max_size=300))
@example("9" * 6000 + "_x")
@example("cmpl-x-" + "9" * 6000)
def test_any_text_is_split_without_error_into_indices_that_a_message_can_carry(request_id) -> None:
    base, prompt, child = split_request_id(request_id)
    assert base in request_id
    assert 0 <= prompt < 2**31
    assert 0 <= child < 2**31


@given(HEADERS, INDEX, HEX, HEX, st.none() | INDEX, st.booleans())
def test_push_legs_with_a_transfer_id_share_one_name(header, prompt, tail_p, tail_d, child, is_chat) -> None:
    """Newer upstream proxies: the same header on both legs, transfer_id on both, and remote_request_id on decode's."""
    if is_chat:
        p, d = chat(header, tail_p, child), chat(header, tail_d, child)
    else:
        p, d = completion(header, prompt, tail_p, child), completion(header, prompt, tail_d, child)
    name = f"xfer-{header}"
    assert handoff_id(p, name) == handoff_id(d, name, header)


@given(HEADERS, INDEX, HEX, HEX, st.none() | INDEX, st.booleans())
@example("job-deadbeef", 0, "00000000", "11111111", None, False)
@example("cmpl-x", 0, "00000000", "11111111", None, True)
@example("2_x", 4, "00000000", "11111111", 1, False)
def test_push_legs_without_a_transfer_id_share_one_name(header, prompt, tail_p, tail_d, child, is_chat) -> None:
    """Older upstream push proxies: one header on both legs, and decode's remote_request_id is that header."""
    if is_chat:
        p, d = chat(header, tail_p, child), chat(header, tail_d, child)
    else:
        p, d = completion(header, prompt, tail_p, child), completion(header, prompt, tail_d, child)
    assert handoff_id(p, None) == handoff_id(d, None, header)


@given(HEADERS, HEADERS, INDEX, HEX, HEX, st.none() | INDEX, st.booleans(), st.booleans())
def test_pull_legs_share_one_name(header, other, prompt, tail_p, tail_d, child, is_chat, same_header) -> None:
    """Upstream's pull: decode's remote_request_id is prefill's internal id; decode's own header may be another one."""
    mine = header if same_header else other
    if is_chat:
        p, d = chat(header, tail_p, child), chat(mine, tail_d, child)
    else:
        p, d = completion(header, prompt, tail_p, child), completion(mine, prompt, tail_d, child)
    assert handoff_id(p, None) == handoff_id(d, None, p)


@given(
    st.uuids(),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), unique=True),
    HEX,
    st.sampled_from(["x", None]),
)
def test_prompts_and_children_of_one_request_have_names_of_their_own(header, parts, tail, transfer) -> None:
    names = {handoff_id(completion(str(header), prompt, tail, child), transfer) for prompt, child in parts}
    assert len(names) == len(parts)


def test_pull_of_a_list_prompt_keeps_decodes_prompt_index_where_prefill_answers_for_the_first() -> None:
    """A completion's answer carries the params of its first prompt only (completion/serving.py:637)."""
    first = "cmpl-x-0-00000000"
    assert handoff_id("cmpl-x-3-11111111", None, first) == HandoffId("x", 3, 0)


def test_names_for_people() -> None:
    assert str(HandoffId("x")) == "x"
    assert str(HandoffId("x", 1)) == "x/1/0"
    assert str(HandoffId("x", 0, 2)) == "x/0/2"
    assert str(RankId("decode-1", "abc", 3)) == "decode-1 rank 3"
    assert str(RankId("decode-1", "abc", -1)) == "decode-1"


@given(st.lists(st.builds(RankId, st.sampled_from("ab"), st.sampled_from("xy"), st.integers(-1, 3)), unique=True))
def test_agents_of_different_ranks_and_lives_have_different_names(ranks) -> None:
    assert len({rank.agent for rank in ranks}) == len(ranks)
    assert all(re.fullmatch(r"[ab]/[xy]/-?\d", rank.agent) for rank in ranks)


@pytest.mark.parametrize(
    ("text", "fit"),
    [
        ("plain – words × 2", "plain – words × 2"),
        ("a\nb\r\x1b[2J\0\x85\u2028", "a\\nb\\r\\x1b[2J\\x00\\x85\\u2028"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("x" * 3000, "x" * 2000 + "… (3,000 characters)"),
        ("\n" * 3000, "\\n" * 2000 + "… (3,000 characters)"),
    ],
)
def test_what_is_shown_stays_on_its_line_and_has_an_end(text, fit) -> None:
    assert shown(text) == fit
    assert str(HandoffId(text)) == fit
    assert str(RankId(text, "i", -1)) == fit

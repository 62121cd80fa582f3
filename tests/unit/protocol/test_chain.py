"""The chain that says what a conversation's KV is: equal exactly as far as the histories are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.protocol.chain import CHUNK, DIGEST, chain, link, seed

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6 * CHUNK)
SEED = seed("model", None, None)


def shared(a: bytes, b: bytes) -> int:
    """Chunks that two chains have in common, from the first on."""
    count = 0
    while (count + 1) * DIGEST <= min(len(a), len(b)) and a[: (count + 1) * DIGEST] == b[: (count + 1) * DIGEST]:
        count += 1
    return count


@given(TOKENS, TOKENS, TOKENS)
def test_branches_share_what_they_share_and_no_more(trunk, left, right) -> None:
    one, other = trunk + left, trunk + right
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert shared(chain(SEED, one), chain(SEED, other)) == same // CHUNK


@given(TOKENS, st.integers(0, 6 * CHUNK))
def test_a_truncated_history_is_a_prefix(tokens, length) -> None:
    whole, short = chain(SEED, tokens), chain(SEED, tokens[:length])
    assert whole.startswith(short)
    assert len(short) == min(length, len(tokens)) // CHUNK * DIGEST


def test_after_a_rewritten_message_nothing_is_the_same_again() -> None:
    tokens = list(range(5 * CHUNK))
    other = list(tokens)
    other[2 * CHUNK + 3] += 1
    one, two = chain(SEED, tokens), chain(SEED, other)
    assert [one[i : i + DIGEST] == two[i : i + DIGEST] for i in range(0, len(one), DIGEST)] == [True, True] + 3 * [
        False
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("m", "lora", None), ("m", None, "lora")),
        (("m", None, None), ("m", "", None)),
        (("ab", "c"), ("a", "bc")),
        (("m", None), ("m",)),
        (("m", "-"), ("m", None)),
        (("m", "1:x"), ("m", "x")),
        (("m", "\ud800"), ("m", "?")),
    ],
)
def test_seeds_of_other_things_are_others(one, other) -> None:
    assert seed(*one) != seed(*other)
    tokens = list(range(CHUNK))
    assert chain(seed(*one), tokens) != chain(seed(*other), tokens)


def test_a_mark_changes_what_follows_it_and_nothing_before() -> None:
    tokens = list(range(4 * CHUNK))
    plain, image, other = (chain(SEED, tokens, marks) for marks in (None, {2: b"image"}, {2: b"other"}))
    assert shared(plain, image) == shared(image, other) == 2
    assert chain(SEED, tokens, {9: b"behind the last chunk"}) == plain


def test_the_link_for_a_position() -> None:
    links = chain(SEED, range(4 * CHUNK))
    assert link(links, CHUNK) == links[:DIGEST]
    assert link(links, 3 * CHUNK) == links[2 * DIGEST : 3 * DIGEST]
    assert link(links[DIGEST:], 3 * CHUNK, start=CHUNK) == links[2 * DIGEST : 3 * DIGEST]
    for position, start in ((0, 0), (CHUNK + 1, 0), (CHUNK, CHUNK), (CHUNK, 2 * CHUNK), (5 * CHUNK, 0)):
        assert link(links, position, start) == b""

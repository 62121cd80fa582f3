"""Proofs hold for exactly what they were made for; nothing else opens anything."""

from __future__ import annotations

import itertools

import pytest

from kvxfer.protocol import auth, messages
from kvxfer.protocol.auth import CHALLENGE_LIFE, LINK_BYTES, NONCE_BYTES, Challenges, Secret
from kvxfer.protocol.ids import RankId

D, P = RankId("d", "i1", 0), RankId("p", "i1", 0)
OTHERS = [RankId("x", "i1", 0), RankId("d", "i2", 0), RankId("d", "i1", 1)]
S, WRONG = Secret(b"0123456789abcdef"), Secret(b"0123456789abcdeg")
NONCE = bytes(range(NONCE_BYTES))


def test_a_secret_is_never_shown_and_long_enough() -> None:
    assert "0123" not in f"{S!r} {S}"
    with pytest.raises(ValueError, match="15 bytes; at least 16"):
        Secret(b"0123456789abcde")


def test_every_proof_depends_on_all_that_it_covers() -> None:
    """All derived values differ: by secret, use, each identity and its place, and the link."""
    made = []
    for secret, (a, b), link in itertools.product((S, WRONG), itertools.permutations([D, P, *OTHERS], 2), (b"l", b"m")):
        made += [secret.challenge(a, b, link).mac, secret.gone(a, b, link).mac, *secret.keys(a, b, link)]
    made += [one.knock(rank, link).mac for one in (S, WRONG) for rank in (D, P, *OTHERS) for link in (b"l", b"m")]
    made += [auth.mac(key, number, body) for key in (b"k", b"l") for number in (1, 2) for body in (b"", b"\0", b"a")]
    assert len(set(made)) == len(made)


def test_identities_are_not_confused_by_where_their_parts_are_cut() -> None:
    one = S.keys(RankId("ab", "c", 0), P, b"l")
    assert one != S.keys(RankId("a", "bc", 0), P, b"l")


def test_keys_depend_on_the_wire_version(monkeypatch) -> None:
    before = S.keys(D, P, b"l")
    monkeypatch.setattr(auth, "WIRE_VERSION", messages.WIRE_VERSION + 1)
    assert S.keys(D, P, b"l") != before


def test_a_challenge_is_answerable_by_whom_it_was_issued_to_at_its_issuer_and_for_a_while() -> None:
    mine, another = Challenges(b"k" * 32), Challenges(b"l" * 32)
    link = mine.issue(D, NONCE, 100.0)
    assert len(link) == LINK_BYTES
    assert mine.answerable(D, link, 100.0)
    assert mine.answerable(D, link, 100.0 + CHALLENGE_LIFE)
    assert not mine.answerable(D, link, 100.1 + CHALLENGE_LIFE)
    assert not another.answerable(D, link, 100.0), "a process that started anew"
    assert not any(mine.answerable(rank, link, 100.0) for rank in [P, *OTHERS])
    for i in range(LINK_BYTES):
        damaged = bytearray(link)
        damaged[i] ^= 1
        assert not mine.answerable(D, bytes(damaged), 100.0)
    assert not mine.answerable(D, link[:-1], 100.0)
    assert not mine.answerable(D, b"", 100.0)

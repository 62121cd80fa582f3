"""What a conversation's KV is, said in digests: a hash chain over its tokens and everything else that shapes KV.

One digest for each ``CHUNK`` tokens, each made of the one before it, so the digest at position b stands for all of
[0, b): two requests with equal digests there have the same KV there, and a rewritten, truncated or branched history has
equal digests exactly as far as it is the same. The first link hangs on a *seed*, of what shapes every position (model,
LoRA adapter, cache salt); what shapes the positions from some place on, as an image does, is mixed in where it begins.

vLLM's own block hashes are not exchanged: they depend on the process (PYTHONHASHSEED), the algorithm and the block size.
Of ours, blocks of every multiple of ``CHUNK`` tokens have an end in common.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CHUNK = 16
"""Tokens of a link: the smallest block that KV caches are made of, and a divisor of the others."""

DIGEST = 16
"""Bytes of a digest."""


def seed(*shaping: str | None) -> bytes:
    """Digest what shapes all positions, in a fixed order; None for what a request does not have."""
    digest = hashlib.blake2b(digest_size=DIGEST)
    for one in shaping:
        text = b"" if one is None else one.encode(errors="surrogatepass")
        # With its length, and a mark for None: ("ab", "c") is not ("a", "bc"), and "" is not None.
        digest.update(b"-" if one is None else b"%d:" % len(text))
        digest.update(text)
    return digest.digest()


def chain(first: bytes, tokens: Iterable[int], marks: Mapping[int, bytes] | None = None) -> bytes:
    """Return the digests of all whole chunks of a request's tokens, ``DIGEST`` bytes each, one after the other.

    ``first`` is a seed; ``marks`` are digests of what begins in a chunk and shapes the positions from there on, by the
    chunk's index.
    """
    packed = memoryview(array("q", tokens).tobytes())
    size = CHUNK * 8
    last, links = first, []
    for index in range(len(packed) // size):
        link = hashlib.blake2b(last, digest_size=DIGEST)
        link.update(packed[index * size : (index + 1) * size])
        if marks and index in marks:
            link.update(marks[index])
        last = link.digest()
        links.append(last)
    return b"".join(links)


def link(links: bytes, position: int, start: int = 0) -> bytes:
    """Return the digest that stands for positions [0, ``position``) in a chain that begins behind ``start``; b"" for none."""
    at = (position - start) // CHUNK * DIGEST
    return b"" if position <= start or position % CHUNK else links[at - DIGEST : at]

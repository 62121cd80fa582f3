"""What of a request shapes its KV, as the chain of ``protocol/chain`` wants it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvxfer.protocol.chain import CHUNK, chain, seed

if TYPE_CHECKING:
    from collections.abc import Sequence


def chain_of(request: Any, tokens: Sequence[int], model: str, start: int = 0, last: bytes = b"") -> bytes | None:
    """Return the chain over ``tokens`` of a request of vLLM's; None where it cannot be told what shapes its KV.

    They are its first, or follow position ``start``, a multiple of a chunk, whose digest is ``last``.

    That is so of prompt embeddings, which have no tokens. LoRA adapters are told apart by name, multimodal inputs by vLLM's own
    hashes, and where they stand; the cache salt, by which deployments part their tenants, as it is.
    """
    if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
        return None
    lora = getattr(request, "lora_request", None)
    first = last or seed(model, getattr(lora, "lora_name", None), getattr(request, "cache_salt", None))
    marks: dict[int, bytes] = {}
    for feature in getattr(request, "mm_features", None) or ():
        offset, length = feature.mm_position.offset, feature.mm_position.length
        what = f"{offset}:{length}:{feature.identifier}".encode(errors="surrogatepass")
        chunk = (offset - start) // CHUNK
        marks[chunk] = hashlib.blake2b(marks.get(chunk, b"") + what, digest_size=16).digest()
    return chain(first, tokens, marks)

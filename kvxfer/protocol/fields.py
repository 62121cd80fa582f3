"""What a field of a message may hold."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

MAX_MESSAGE_BYTES = 8 << 20
"""Largest envelope accepted: two million block ids, or any card."""

MAX_RANKS = 1024
"""Ranks of one engine."""

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Position = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""A token's position, or a number of tokens."""
Stamp = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A moment of somebody's monotonic clock. The limits keep NaN and infinity out as well."""
MAX_DURATION = 1e6
"""Seconds that may be said to a peer; settings allow no more."""
Duration = Annotated[float, Meta(ge=0.0, le=MAX_DURATION)]
Blocks = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]
"""A request's packed block tables, words of four bytes; read_body refuses what is not whole."""
Card = Annotated[dict[str, Any], Meta(max_length=64)]

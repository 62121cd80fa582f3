"""A cache map for tests that need a rank card and no memory."""

from __future__ import annotations

from kvxfer.layout.maps import CacheMap, Group, Plane

BASE = 1 << 40
CACHE = CacheMap(
    (Group(4, 8, (Plane("kv", "float32", 4, (0,), (BASE,), (0,), 1, 64, 0, ((4, 16),), ((4, 4),)),)),),
    ((BASE, 512),),
    "DRAM",
)
"""One layer, 8 blocks of 4 tokens of 16 bytes."""

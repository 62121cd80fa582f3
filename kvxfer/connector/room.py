"""How much KV a new request could be given: ``kvxfer_reclaimable_tokens``, from the scheduler's block pool to the metrics.

Reclaimable is what vLLM's pool counts as free: empty blocks and cached ones that nobody refers to. Blocks that wait for a handoff
or are pinned until writes have read them are not. It is said when it has changed by ``_STEP`` of the pool, or at all after
``_INTERVAL`` seconds, so that a step that changes nothing costs one comparison.
"""

from __future__ import annotations

import time
from typing import Any

from kvxfer.connector.stats import ROOM, Stats

_STEP = 1 / 128
_INTERVAL = 0.5


class Room:
    """Watches the pool."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pool: Any = None
        self._said = -1
        self._when = 0.0

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool; without one nothing is said."""
        self._pool = pool if hasattr(pool, "get_num_free_blocks") else None

    def news(self) -> Stats | None:
        """What has changed enough to be said; asked in every step."""
        if self._pool is None:
            return None
        free = self._pool.get_num_free_blocks()
        if free == self._said:
            return None
        now = time.monotonic()
        if abs(free - self._said) < _STEP * self._pool.num_gpu_blocks and now - self._when < _INTERVAL:
            return None
        self._said, self._when = free, now
        return Stats({ROOM: free * self._block_size})


def said(data: dict[str, Any]) -> int | None:
    """The figure in what has reached the API server; None where there is none."""
    value = data.get(ROOM)
    return value if isinstance(value, int) else None

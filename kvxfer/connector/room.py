"""How much KV a new request could be given: ``kvxfer_reclaimable_tokens``, from the scheduler's block pool to the metrics.

Reclaimable is what vLLM's pool counts as free: empty blocks and cached ones that nobody refers to. Blocks that wait for a handoff
or are pinned until writes have read them are not. It is said when it has changed by ``_STEP`` of the pool, or at all after
``_INTERVAL`` seconds, so that a step that changes nothing costs one comparison.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

_NAME = "reclaimable_tokens"
_STEP = 1 / 128
_INTERVAL = 0.5


@dataclass
class RoomStats:
    """One figure on its way to the API server. The newest counts, so there is nothing to add up and nothing to log.

    It has what vLLM's ``KVConnectorStats`` has in any version (kv_connector/v1/metrics.py): until 0.29 the scheduler takes
    ``data``, from 0.31 on it calls ``to_dict``, and an engine whose connector has no answer ends.
    """

    data: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, int]:
        """What is sent."""
        return self.data

    def aggregate(self, other: RoomStats) -> RoomStats:
        """Take the newer one."""
        return other if other.data else self

    def reduce(self) -> dict[str, int | float]:
        """The figure as it is."""
        return dict(self.data)

    def reset(self) -> None:
        """Forget it."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether there is none."""
        return not self.data


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

    def news(self) -> RoomStats | None:
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
        return RoomStats(data={_NAME: free * self._block_size})


def said(data: dict[str, Any]) -> int | None:
    """The figure in what has reached the API server; None where there is none."""
    value = data.get(_NAME)
    return value if isinstance(value, int) else None

"""Pins: references that keep a source's blocks out of everybody's hands while posted writes may read them.

vLLM gives the blocks of a preempted request away within the very ``schedule()`` that preempts it, and tells no connector
before (0.26 to 0.32, v1/core/sched/scheduler.py ``_preempt_request``). So whatever may be read by a write is referenced once
more in the block pool from the step on that computes it (``BlockPool.touch``), in the scheduler's thread. A request that ends
in the usual way gives its pins back at once: vLLM itself then holds the blocks. One that lost its blocks leaves them as an
*orphan* under a token, until every rank has said that no write reads them any more (``SourceQuiet``).

Pinned blocks delay what a preemption wanted to free, so their number is bounded. What exceeds the bound is not pinned and
hence not written before its request has ended and vLLM holds the blocks: later, but never wrong.

Of a sliding window's group vLLM holds less at the end than decode needs (``growing``). So the last window's blocks are pinned
whatever the bound, no more of them than the request itself uses, in push and in pull, and stay until they are transferred.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Pins:
    """Pins in ``pool``, a BlockPool of vLLM's, at most ``limit`` blocks at a time. ``ranks`` is who must have said quiet."""

    def __init__(self, pool: Any, limit: int, ranks: int) -> None:
        self.limit = limit
        self.count = 0
        """Blocks pinned now, orphans included."""
        self._pool = pool
        self._ranks = ranks
        self._of: dict[str, list[int]] = {}
        self._windows: dict[str, list[int]] = {}
        self._lost: dict[str, list[int]] = {}  # of windows, and not in their requests' tables any more
        self._orphans: dict[int, list[int]] = {}
        self._heard: dict[int, int] = {}
        self._tokens = itertools.count(1)

    def pin(self, request_id: str, blocks: Iterable[int]) -> bool:
        """Pin all of these blocks for a request; or none, when that would exceed the limit."""
        ids = list(blocks)
        if self.count + len(ids) > self.limit:
            return False
        self._touch(self._of.setdefault(request_id, []), ids)
        return True

    def pin_window(self, request_id: str, blocks: list[int]) -> None:
        """Pin blocks of a request's last window."""
        if blocks:
            self._touch(self._windows.setdefault(request_id, []), blocks)

    def let_go(self, request_id: str, tables: Iterable[Iterable[int]] = ()) -> None:
        """Give a request's pins back: vLLM holds what is in its ``tables``, or nothing was ever written from them.

        Blocks of its window that are not in its tables any more stay until it is ``sent``.
        """
        self._free(self._of.pop(request_id, []))
        window = self._windows.pop(request_id, [])
        if window:
            there = set().union(*tables)
            lost = [block for block in window if block not in there]
            self._free([block for block in window if block in there])
            if lost:
                self._lost[request_id] = lost

    def sent(self, request_id: str) -> None:
        """Note that vLLM may have the blocks of a request back, since nobody reads from them any more."""
        self._free(self._lost.pop(request_id, []))

    def orphan(self, request_id: str) -> int:
        """Keep the blocks of a request that lost them; returns the token to hear ``quiet`` about, 0 for no blocks."""
        blocks = [*self._of.pop(request_id, []), *self._windows.pop(request_id, [])]
        if not blocks:
            return 0
        token = next(self._tokens)
        self._orphans[token] = blocks
        return token

    def quiet(self, heard: Mapping[int, int]) -> None:
        """Note how many ranks more have said that they read from a token's blocks no more."""
        for token, ranks in heard.items():
            self._heard[token] = self._heard.get(token, 0) + ranks
            if self._heard[token] >= self._ranks:
                del self._heard[token]
                self._free(self._orphans.pop(token, []))

    def __bool__(self) -> bool:
        """Tell whether an orphan waits for its ranks: the engine must go on stepping to hear of it."""
        return bool(self._orphans)

    def _touch(self, pinned: list[int], blocks: list[int]) -> None:
        self._pool.touch([self._pool.blocks[i] for i in blocks])
        pinned.extend(blocks)
        self.count += len(blocks)

    def _free(self, blocks: list[int]) -> None:
        self.count -= len(blocks)
        # The last first, as vLLM frees its own: the head of a prefix is evicted last.
        self._pool.free_blocks([self._pool.blocks[i] for i in reversed(blocks)])

"""A block pool of vLLM's kind, as far as connectors see it: references are counted, and what is free may keep what it holds.

A prefix cache is a name on a block: a block that nobody refers to is free and keeps its name until it is given to somebody else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


@dataclass(eq=False, slots=True)
class Block:
    """One block. ``key`` names all that is before its end, itself included; None for a block that is not cached."""

    block_id: int
    ref_cnt: int = 0
    key: Hashable | None = None


class Pool:
    """Free blocks, first in first out; or, as a ``stack``, what was freed last is given away first, the cached ones last.

    ``blocks``, ``touch``, ``free_blocks``, ``get_cached_block`` and the numbers of blocks are vLLM's, for the connector.
    """

    def __init__(self, num_blocks: int, *, stack: bool) -> None:
        self.num_gpu_blocks = num_blocks
        self.stack = stack
        self.free = deque(range(num_blocks))
        self.blocks = [Block(number) for number in range(num_blocks)]
        self._cached: dict[Hashable, Block] = {}

    def take(self, count: int) -> list[int]:
        """Take so many; what was cached in them is forgotten."""
        taken = [self.free.popleft() for _ in range(count)]
        for number in taken:
            block = self.blocks[number]
            block.ref_cnt = 1
            if block.key is not None:
                del self._cached[block.key]
                block.key = None
        return taken

    def give(self, blocks: list[int]) -> None:
        """Take them back, the last one first."""
        self.free_blocks(self.blocks[number] for number in (blocks if self.stack else blocks[::-1]))
        blocks.clear()

    def touch(self, blocks: Iterable[Block]) -> None:
        """Refer to blocks once more."""
        for block in blocks:
            if not block.ref_cnt:
                assert block.key is not None, "a free block was pinned"
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Refer to blocks once less; who is not referred to any more is free."""
        for block in blocks:
            assert block.ref_cnt > 0, "a block was freed twice"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                last = not self.stack or block.key is not None
                (self.free.append if last else self.free.appendleft)(block.block_id)

    def cache(self, number: int, key: Hashable) -> None:
        """Let a block be found by what it holds, unless another is found by that."""
        block = self.blocks[number]
        if block.key is None and key not in self._cached:
            block.key = key
            self._cached[key] = block

    def get_num_free_blocks(self) -> int:
        """Count them."""
        return len(self.free)

    def get_cached_block(self, key: Hashable, groups: list[int]) -> list[Block] | None:
        """Find a block by what it holds, in the only group that there is."""
        assert groups == [0]
        block = self._cached.get(key)
        return None if block is None else [block]

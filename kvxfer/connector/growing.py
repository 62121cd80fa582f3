"""A source's block tables as they grow, step by step: what of them the ranks are told, and what must be pinned.

vLLM tells of new blocks by group. Of a group without a window every block is wanted. Of one with a window vLLM gives back, with
each chunk, what the window has passed, and does not say so in what it tells of a step: its ids are then somebody else's. So only
blocks inside the *prompt's* last window are ever named; vLLM needs them itself until the prompt is computed.

Not for longer, however: it lets go of what the token *after* the prompt does not look back to, a block too early for a decode
engine, which computes the prompt's last token itself. Hence the blocks of windows are pinned until they are transferred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvxfer.layout.positions import NULL_BLOCK
from kvxfer.layout.tables import packed
from kvxfer.transport.commands import LESS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.layout.tables import Tables


class Grown(NamedTuple):
    """Packed tables of a step's new blocks; the new blocks of groups without a window, and those of windows."""

    tables: bytes
    whole: list[int]
    window: list[int]


class Growing:
    """The tables of one request with so many prompt tokens."""

    def __init__(self, tables: Tables, prompt_tokens: int) -> None:
        self._tables = tables
        shortest = prompt_tokens + 1 - max(LESS)  # of the prompts that decode may have
        self._first = [group.first_block(shortest) for group in tables.groups]
        self._lengths = [0] * len(tables.groups)

    def restart(self) -> None:
        """Note that the request has lost its blocks: the next ones are its whole tables."""
        self._lengths = [0] * len(self._lengths)

    def grow(self, blocks: Sequence[list[int]]) -> Grown:
        """Take the new blocks, a list for each group; none at all where vLLM says nothing."""
        if self._tables.plain:
            whole = blocks[0] if blocks else []
            return Grown(packed(whole), whole, [])
        told, begins = [], []
        grown = Grown(b"", [], [])
        for number, group in enumerate(self._tables.groups):
            new = blocks[number] if blocks else []
            begin = max(self._lengths[number], self._first[number])
            wanted = new[begin - self._lengths[number] :]
            self._lengths[number] += len(new)
            told.append(wanted)
            begins.append(begin)
            if group.window is None:
                grown.whole.extend(wanted)
            else:
                grown.window.extend(block for block in wanted if block != NULL_BLOCK)
        return grown._replace(tables=self._tables.pack(told, begins))

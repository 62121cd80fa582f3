"""What the demo and ``misplace.py`` agree on, apart from both, since only an engine can import a connector."""

from __future__ import annotations

from array import array
from typing import Final

MODULE: Final = "kvxfer.bench.misplace"
CONNECTOR: Final = "MisplacingPushConnector"
MISPLACED: Final = "misplaced"
"""Stands in the id of a request whose blocks shall be misplaced."""


def swap_first_and_last(block_ids: array[int]) -> array[int]:
    """The ids with the first and the last in each other's place; fewer than two have no other place and are refused."""
    if len(block_ids) < 2:  # noqa: PLR2004
        raise ValueError(f"nothing can be misplaced among {len(block_ids)} blocks")
    return array(block_ids.typecode, [block_ids[-1], *block_ids[1:-1], block_ids[0]])

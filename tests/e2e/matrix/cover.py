"""Which pairs of engines the matrix runs: a cover in which every two values of two different factors meet in some cell.

The cover is the greedy one over the full product, ties broken by the product's order, so the same factors give the same cells on
every machine. A cell's name says all of it: prefill's and decode's version, the mode, both sizes, the model and the blocks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvxfer.bench.hybrid import HybridRecipe
from kvxfer.bench.model import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "versions": ("0.29.0", "0.32.0", "0.29.0-0.32.0", "0.32.0-0.29.0"),
    "mode": ("push", "pull"),
    "ranks": ("1-1", "1-2", "2-1"),
    "model": ("mha", "gqa", "hybrid"),
    "blocks": ("equal", "unequal"),
}
"""Versions and ranks are prefill's and decode's; one version is both's."""

MODELS: Final[Mapping[str, Recipe]] = {
    "mha": Recipe(name="sensitive-qwen3-mha", kv_heads=8),
    "gqa": Recipe(),
    "hybrid": HybridRecipe(),
}

EQUAL: Final = (32, 32)
UNEQUAL: Final[Mapping[str, tuple[int, int]]] = {"mha": (128, 32), "gqa": (32, 128), "hybrid": (128, 32)}
"""Tokens in a block of prefill's and of decode's. A hybrid's prefill must have multiples of decode's (docs/layout.md)."""

SKIPPED: Final[Mapping[str, str]] = {}
"""Cells that vLLM itself cannot start, and its own error text, which the cell's run asks for."""

UNREACHED: Final[frozenset[str]] = frozenset()
"""Cells that the committed run has not come to: none, or that run was cut short, and the page says so."""


@dataclass(frozen=True, slots=True)
class Cell:
    versions: str
    mode: str
    ranks: str
    model: str
    blocks: str

    @property
    def name(self) -> str:
        return f"{self.versions}_{self.mode}_{self.ranks}_{self.model}_{self.blocks}"

    @property
    def vllm(self) -> tuple[str, str]:
        """vLLM's version on prefill and on decode."""
        first, _, second = self.versions.partition("-")
        return first, second or first

    @property
    def sizes(self) -> tuple[int, int]:
        """Tensor-parallel ranks of prefill and of decode."""
        first, _, second = self.ranks.partition("-")
        return int(first), int(second)

    @property
    def block_sizes(self) -> tuple[int, int]:
        return EQUAL if self.blocks == "equal" else UNEQUAL[self.model]

    @property
    def reference(self) -> str:
        """The engine alone that decode's answers are held against: decode's version, ranks and blocks."""
        version, ranks, block = (each[1] for each in (self.vllm, self.sizes, self.block_sizes))
        return f"{version}_{ranks}_{self.model}_{block}"


def cover(factors: Mapping[str, Sequence[str]] = FACTORS) -> list[Cell]:
    rows = list(itertools.product(*factors.values()))
    left = set().union(*(_meetings(row) for row in rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(_meetings(row) & left))
        left -= _meetings(best)
        chosen.append(Cell(*best))
    return chosen


def _meetings(row: Iterable[str]) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(itertools.combinations(enumerate(row), 2))

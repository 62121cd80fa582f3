"""What the demo holds against what it saw. Pure: rows in, complaints out; no complaint means that it passed.

An answer that equals the reference proves something only if a wrong cache would have changed it, if bytes were really
moved, all of them and no more, and by the backend that is claimed. So each of these is asked for apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BACKEND: Final = "LIBFABRIC"
MIN_DISTINCT: Final = 4
"""Different tokens that each answer of the reference must have: a model that repeats itself proves nothing."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt through one pair of engines. Sizes in bytes, times in seconds."""

    prompt_tokens: int
    reference: Tokens
    answer: Tokens
    bytes_expected: int
    bytes_moved: int
    descriptors: int
    backends: tuple[str, ...]
    outcomes: tuple[str, ...] = ("done",)
    ttft: float | None = None
    tpot: float | None = None

    @property
    def identical(self) -> bool:
        """The answer is there and has the reference's tokens."""
        return bool(self.answer) and self.answer == self.reference


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Four answers to one prompt, and one to a changed one.

    ``placed``: both legs sent by hand, everything in its place. ``misplaced``: the same, but decode registered two
    of its blocks in each other's place. ``early_reference`` and ``early_changed``: the reference engine's answers to
    the longest prompt, as it is and with one early token changed.
    """

    reference: Tokens
    placed: Tokens
    misplaced: Tokens
    early_reference: Tokens
    early_changed: Tokens


@dataclass(slots=True)
class Outcome:
    """All that a run of the demo saw."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    sensitivity: Sensitivity | None = None
    layout_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By mode: bytes of a block by the engine's layout, and by the model's shape."""


def complaints(outcome: Outcome, modes: Sequence[str], prompts: int) -> list[str]:
    """Everything that keeps the run from being a proof, in words; empty when nothing does."""
    found: list[str] = []
    for mode in modes:
        rows = outcome.rows.get(mode, [])
        if len(rows) != prompts:
            found.append(f"{mode}: {len(rows)} of {prompts} prompts were answered")
        for row in rows:
            found += [f"{mode}, prompt of {row.prompt_tokens} tokens: {text}" for text in _of_row(row)]
        by_layout, by_model = outcome.layout_bytes.get(mode, (0, 0))
        if by_layout != by_model or not by_layout:
            found.append(f"{mode}: a block has {by_layout:,} bytes by the layout and {by_model:,} by the model's shape")
    found += _of_sensitivity(outcome.sensitivity)
    references = {row.prompt_tokens: row.reference for rows in outcome.rows.values() for row in rows}
    found += _of_references(references)
    return found


def _of_row(row: Row) -> Iterator[str]:
    if not row.identical:
        place = next((i for i, (a, b) in enumerate(zip(row.reference, row.answer, strict=False)) if a != b), None)
        where = "in length" if place is None else f"from token {place} on"
        yield f"the answer differs from the reference {where}: {list(row.answer)}, not {list(row.reference)}"
    if row.bytes_moved != row.bytes_expected:
        yield f"{row.bytes_moved:,} bytes were moved, and its blocks have {row.bytes_expected:,}"
    if row.backends != (BACKEND,):
        yield f"moved by {' and '.join(row.backends) or 'nothing'}, not by {BACKEND}"
    if row.outcomes != ("done",):
        yield f"its handoff ended as {' and '.join(row.outcomes) or 'nothing'}, not as done"


def _of_sensitivity(seen: Sensitivity | None) -> Iterator[str]:
    if seen is None:
        yield "sensitivity was not checked"
        return
    if not seen.placed or seen.placed != seen.reference:
        yield "sensitivity: the request sent by hand differs from the reference although every block was in its place"
    if not seen.misplaced or seen.misplaced == seen.reference:
        yield "sensitivity: a misplaced block did not change the answer, so that equal answers prove nothing"
    if not seen.early_changed or seen.early_changed == seen.early_reference:
        yield "sensitivity: one changed early token did not change the answer, so that equal answers prove nothing"


def _of_references(references: Mapping[int, Tokens]) -> Iterator[str]:
    for prompt, tokens in references.items():
        if len(set(tokens)) < min(MIN_DISTINCT, len(tokens) or 1):
            yield f"the reference's answer to the prompt of {prompt} tokens has only {len(set(tokens))} different tokens"
    if len(set(references.values())) < len(references):
        yield "the reference gave the same answer to different prompts"

"""The matrix's cover is one, and the committed page says of each of its cells how its last run went."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.e2e.matrix import results
from tests.e2e.matrix.cover import FACTORS, SKIPPED, UNEQUAL, UNREACHED, Cell, cover

DOCS = Path(__file__).parents[2] / "docs"


def values(cell: Cell) -> tuple[str, ...]:
    return tuple(getattr(cell, name) for name in FACTORS)


def test_any_two_values_of_two_factors_meet_in_a_cell() -> None:
    wanted = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(range(len(FACTORS)), 2)
        for a in list(FACTORS.values())[one]
        for b in list(FACTORS.values())[other]
    }
    met = {pair for cell in cover() for pair in itertools.combinations(enumerate(values(cell)), 2)}
    assert met == wanted


def test_the_cover_is_small_and_the_same_every_time() -> None:
    assert cover() == cover()
    assert len(cover()) <= 13, "four versions by three numbers of ranks, and one more"
    assert len({cell.name for cell in cover()}) == len(cover())


def test_what_a_name_stands_for() -> None:
    cell = Cell("0.29.0-0.32.0", "pull", "1-2", "gqa", "unequal")
    assert (cell.vllm, cell.sizes, cell.block_sizes) == (("0.29.0", "0.32.0"), (1, 2), UNEQUAL["gqa"])
    assert cell.reference == f"0.32.0_2_gqa_{UNEQUAL['gqa'][1]}", "decode's version, ranks and blocks"
    assert Cell("0.29.0", "push", "2-1", "mha", "equal").vllm == ("0.29.0", "0.29.0")


def test_the_committed_run_has_every_cell_and_nothing_else() -> None:
    cells = json.loads((DOCS / "matrix.json").read_text())["cells"]
    assert list(cells) == [cell.name for cell in cover()]
    assert {name for name, one in cells.items() if one["verdict"] == "not run"} == UNREACHED
    for cell in cover():
        if cell.name in UNREACHED:
            continue
        one = cells[cell.name]
        assert one["vllm"] == list(cell.vllm)
        assert one["verdict"] == (SKIPPED.get(cell.name) or "identical"), cell.name
        assert {1, 2} < set(one["prompts"])


def test_the_page_is_the_one_of_the_committed_run() -> None:
    assert (DOCS / "matrix.md").read_text() == results.page(json.loads((DOCS / "matrix.json").read_text()))


def test_a_run_that_lacks_a_cell_makes_no_page(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(results, "UNREACHED", frozenset())
    for cell in cover()[1:]:
        results.write(tmp_path, "cells", cell.name, {"verdict": "identical"})
    with pytest.raises(SystemExit, match=cover()[0].name):
        results.gather(tmp_path)
    results.write(tmp_path, "cells", cover()[0].name, {"verdict": "identical"})
    assert list(results.gather(tmp_path)["cells"]) == [cell.name for cell in cover()]
    monkeypatch.setattr(results, "UNREACHED", frozenset({cover()[0].name}))
    with pytest.raises(SystemExit, match="not run: none; UNREACHED has"):
        results.gather(tmp_path)

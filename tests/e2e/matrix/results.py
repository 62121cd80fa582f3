"""What a run of the matrix found, as files of one directory, and the page made of them.

    python -m tests.e2e.matrix.results RUN docs      # docs/matrix.json, docs/matrix.md, and the geometries for the unit tests

A run is a directory: one file a cell, one file a reference. It may be taken up again, for a cell that failed or was not reached:
only what is run again is replaced, and each cell says when and on which commit it ran. ``KVXFER_MATRIX`` names the directory;
without it a run keeps nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.e2e.matrix.cover import FACTORS, SKIPPED, UNREACHED, cover

COMMAND = (
    "KVXFER_MATRIX=.matrix scripts/test.sh --slow --vllm032 tests/e2e/matrix\n"
    "    python -m tests.e2e.matrix.results .matrix docs"
)


def read(run: Path, kind: str, name: str) -> Any | None:
    path = run / kind / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def write(run: Path, kind: str, name: str, found: Any) -> None:
    path = run / kind / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def gather(run: Path) -> dict[str, Any]:
    """All cells of the cover. Raises SystemExit, naming them, where one was not run that is not named as ``UNREACHED``."""
    cells = {cell.name: read(run, "cells", cell.name) for cell in cover()}
    missing = {name for name, found in cells.items() if found is None}
    if missing != UNREACHED:
        raise SystemExit(
            f"not run: {', '.join(sorted(missing)) or 'none'}; UNREACHED has {', '.join(sorted(UNREACHED)) or 'none'}"
        )
    return {"cells": {name: found or {"verdict": "not run"} for name, found in cells.items()}}


def page(found: dict[str, Any]) -> str:
    cells = found["cells"]
    run = [one for one in cells.values() if one["verdict"] != "not run"]
    passed = sum(one["verdict"] == "identical" for one in run)
    days = sorted({one["date"][:10] for one in run})
    lengths = sorted({length for one in run for length in one["prompts"]})
    lines = [
        "# The matrix: vLLM's versions, modes, ranks, models and blocks against each other",
        "",
        (
            "Made by the run itself (`tests/e2e/matrix`); do not edit. Real vLLM pairs on a CPU, float32, greedy. In each cell prompts of "
            f"{', '.join(f'{length:,}' for length in lengths)} tokens go through the router, one by one and then all at once, and decode's tokens "
            "must be those of a single engine of decode's version, ranks and block size (decode's own, asked directly first). Prefill computes at most 512 tokens a step. "
            "Where the ranks differ, each has half of the heads that the other engine's one rank has."
        ),
        "",
        "The cells are a pairwise cover: any two values of two different columns meet in one of them.",
        "",
        *(f"- {name}: {', '.join(values)}" for name, values in FACTORS.items()),
        "",
        (
            f"Last run: {' to '.join(dict.fromkeys((days[0], days[-1])))}; {passed} of {len(cells)} cells passed"
            f"{f', {len(SKIPPED)} skipped with the error text of vLLM' if SKIPPED else ''}"
            f"{f', and the run was cut short before {len(cells) - len(run)} of them' if len(run) < len(cells) else ''}. Start: seconds until all of the pair and the router were up; "
            "run: of the requests, on a machine of two cores with other work on it."
        ),
        "",
        "| prefill | decode | mode | ranks | model | block sizes | answers | handoffs | MB moved | start | run | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cover():
        one = cells[cell.name]
        if one not in run:
            lines.append(
                f"| {' | '.join(cell.vllm)} | {cell.mode} | {cell.sizes[0]} → {cell.sizes[1]} | {cell.model} "
                f"| {cell.block_sizes[0]} → {cell.block_sizes[1]} | **not run** | | | | | |"
            )
            continue
        lines.append(
            f"| {one['vllm'][0]} | {one['vllm'][1]} | {cell.mode} | {cell.sizes[0]} → {cell.sizes[1]} | {cell.model} "
            f"| {cell.block_sizes[0]} → {cell.block_sizes[1]} | {one['answers']} {one['verdict']} | {one['handoffs']} | {one['bytes'] / 1e6:.1f} "
            f"| {one['start_seconds']:.0f} s | {one['run_seconds']:.0f} s | {one['commit']} |"
        )
    software = sorted({one["software"] for one in run})
    lines += [
        "",
        f"With {'; '.join(software)}.",
        "",
        "To run it again:",
        "",
        f"    {COMMAND}",
        "",
        (
            "In the usual run the same fixtures run a small part of it, on 0.29.0: push and pull of one rank (`tests/e2e/test_vllm_pair.py`), "
            "push 1 → 2 and pull 2 → 1 (`test_tensor_parallel.py`), the hybrid in both modes (`test_hybrids.py`), blocks of 32 → 128 (`test_block_sizes.py`)."
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    run, docs = map(Path, sys.argv[1:])
    found = gather(run)
    (docs / "matrix.json").write_text(json.dumps(found, indent=1) + "\n")
    (docs / "matrix.md").write_text(page(found))
    recorded = Path(__file__).parents[2] / "unit/layout/recorded"
    recorded.mkdir(exist_ok=True)
    for path in sorted((run / "geometries").glob("*.json")):
        (recorded / path.name).write_text(path.read_text())


if __name__ == "__main__":
    main()

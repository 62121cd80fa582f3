"""What ``kvxfer demo --multi-turn`` holds against what it saw, what it writes and what it draws."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvxfer.bench.turns import Turn, Turns, plot

PROMPTS = [600, 660, 720]


@pytest.fixture
def run() -> Turns:
    made = Turns(Console(file=io.StringIO()), Path(), "python", turns=3, output_tokens=10)
    made.rows["off"] = [Turn(length, 2.0, 0, identical=True) for length in PROMPTS]
    # Of 600 + 10 tokens all but the last have KV: 19 blocks of 32.
    fetched = [0, 19 * 32, 20 * 32]
    made.rows["on"] = [
        Turn(length, 2.0 / (1 + 3 * (i > 0)), fetched[i], identical=True) for i, length in enumerate(PROMPTS)
    ]
    return made


def test_a_run_that_is_a_proof(run) -> None:
    assert list(run.complaints()) == []
    assert run.gain() == 4.0
    run._show()
    report = run.report([])
    assert report["off"] == {"ttft_ms": [2000.0, 2000.0, 2000.0]}
    assert report["on"] == {"ttft_ms": [2000.0, 500.0, 500.0], "fetched_tokens": [0, 608, 640]}
    assert report["identical"] is True
    assert report["passed"] is True


@pytest.mark.parametrize(
    ("name", "turn", "row", "complaint"),
    [
        ("on", 1, Turn(660, 0.5, 608, identical=False), "on, turn 2: the answer differs"),
        ("off", 2, Turn(720, 2.0, 0, identical=False), "off, turn 3: the answer differs"),
        ("on", 2, Turn(720, 0.5, 608, identical=True), "on, turn 3: 608 tokens were fetched, and decode holds 640"),
        ("on", 0, Turn(600, 2.0, 32, identical=True), "on, turn 1: 32 tokens were fetched, and decode holds 0"),
        ("off", 1, Turn(660, 2.0, 32, identical=True), "off: tokens were fetched"),
    ],
)
def test_a_turn_that_is_wrong(run, name, turn, row, complaint) -> None:
    run.rows[name][turn] = row
    (found,) = run.complaints()
    assert found.startswith(complaint)


def test_no_gain_is_a_complaint(run) -> None:
    run.rows["on"][1:] = [Turn(row.prompt_tokens, 1.5, row.fetched, identical=True) for row in run.rows["on"][1:]]
    (found,) = run.complaints()
    assert "1.33 times lower" in found


def test_a_run_that_was_cut_short_says_so_and_can_be_written(run) -> None:
    del run.rows["on"][2]
    assert "on: 2 of 3 turns were answered" in list(run.complaints())
    report = run.report(["cut short"])
    assert report["identical"] is False
    assert report["gain"] is None


def test_bars_are_as_long_as_their_times() -> None:
    off, on = plot([2.0], [0.5])
    assert off.count("░") == 4 * on.count("█")
    assert "2,000 ms" in off
    assert list(plot([], [])) == []

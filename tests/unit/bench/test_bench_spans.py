"""When a worker computed, as it writes it down and others read it."""

from __future__ import annotations

import os
import time

import pytest

from kvxfer.bench import spans
from kvxfer.bench.spans import Spans


@pytest.fixture
def clock(monkeypatch):
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    return now


def step(made: Spans, clock, begin: int, end: int, *, computes: bool = True) -> None:
    clock[0] = begin
    made.begin()
    if computes:
        made.compute()
    clock[0] = end
    made.end()


def test_steps_with_a_forward_are_kept_and_those_between_two_moments_read(tmp_path, clock) -> None:
    made = Spans(tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == [f"{os.getpid()}.spans"]
    step(made, clock, 10, 15)
    step(made, clock, 20, 21, computes=False)
    step(made, clock, 30, 38)
    made.end()  # without a step, as a hook that is called once more
    step(made, clock, 40, 49)
    assert spans.read(tmp_path / "here", 0, 100) == [(10, 15), (30, 38), (40, 49)]
    assert spans.read(tmp_path / "here", 11, 40) == [(30, 38), (40, 49)]
    assert spans.read(tmp_path / "here", 41, 100) == []


def test_the_latest_steps_stay(tmp_path, clock, monkeypatch) -> None:
    monkeypatch.setattr(spans, "_RING", 4)
    made = Spans(tmp_path)
    for at in range(10):
        step(made, clock, at * 10, at * 10 + 3)
    assert spans.read(tmp_path, 0, 1000) == [(at * 10, at * 10 + 3) for at in range(6, 10)]


def test_where_no_worker_has_written_there_are_none(tmp_path) -> None:
    assert spans.read(tmp_path, 0, 1) == []
    assert spans.read(tmp_path / "missing", 0, 1) == []

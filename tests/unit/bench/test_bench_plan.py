"""The plan bench: its counts are the layouts' own, and it says them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvxfer.bench import plan
from kvxfer.bench.command import bench
from kvxfer.bench.machine import versions
from kvxfer.errors import ConfigError

COUNTS = {
    "block-major contiguous": 1,
    "block-major scattered": 1_024,
    "layer-major contiguous": 64,
    "layer-major scattered": 65_536,
}


def test_counts_bytes_and_memory() -> None:
    results = {one["case"]: one for one in plan.run()}
    assert {case: one["descriptors"] for case, one in results.items()} == COUNTS
    for one in results.values():
        assert one["bytes"] == 16_384 * 64 * 8 * 2 * 128 * 2
        assert 0 < one["peak_bytes"] < 32_000_000
        assert one["cpu_ms"] > 0


def test_no_two_blocks_of_the_scattered_tables_follow_each_other() -> None:
    for (table,) in plan.tables(contiguous=False):
        assert len(set(table.ids.tolist())) == 1_024
        assert not any(b - a == 1 for a, b in zip(table.ids, table.ids[1:], strict=False))


@pytest.mark.parametrize("lengths", ["", "abc", "1024,", "0", "-5", "1024,8k", "1.5"])
def test_lengths_that_are_none_are_refused_by_name(lengths) -> None:
    result = CliRunner().invoke(bench, ["engine", f"--lengths={lengths}"])
    assert result.exit_code == 1
    assert f"--lengths={lengths!r} must be numbers of tokens above 0" in result.output


@pytest.mark.parametrize("python", ["/nowhere/python", "/", "/bin/false"])
def test_a_python_that_is_none_is_refused_by_name(python) -> None:
    with pytest.raises(ConfigError, match=f"^{python} does not tell its packages"):
        versions(python)


def test_it_prints_a_line_a_case_or_json_and_writes_a_file(monkeypatch, tmp_path) -> None:
    row = {"case": "x", "descriptors": 7, "cpu_ms": 0.5, "prepare_cpu_ms": 1.0, "peak_bytes": 3_000_000}
    monkeypatch.setattr(plan, "run", lambda: [row])
    runner = CliRunner()
    assert '"descriptors": 7' in runner.invoke(bench, ["plan"]).stdout
    assert json.loads(runner.invoke(bench, ["plan", "--json"]).stdout) == {"plan": [row]}
    file = tmp_path / "results" / "plan.json"
    assert '"descriptors": 7' in runner.invoke(bench, ["plan", "--json", str(file)]).stdout
    assert json.loads(file.read_text()) == {"plan": [row]}

"""``kvxfer records`` reads addresses and the secret as people give them."""

from __future__ import annotations

import io
import re

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvxfer import console
from kvxfer.transport import command, query
from kvxfer.transport.query import EngineReport, RankReport
from kvxfer.transport.records import HandoffRecord, Times


@pytest.fixture
def asked(monkeypatch):
    asked = []

    def fetch(host, port, **options):
        asked.append((host, port, options["secret"]))
        return EngineReport(
            "e", [], {"reuse_fetched_tokens": 5984, "reuse_declined_threshold": 0, "control_refused": 3}
        )

    monkeypatch.setattr(query, "fetch_records", fetch)
    for name in ("KVXFER_SECRET", "KVXFER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    return asked


def run(*arguments: str):
    app = typer.Typer()
    app.callback()(lambda: None)  # else the only command would need no name
    command.register(app)
    return CliRunner().invoke(app, ["records", *arguments])


@pytest.mark.parametrize(
    ("text", "where"), [("[::1]:5600", ("::1", 5600)), ("h:1", ("h", 1)), ("10.0.0.1:2", ("10.0.0.1", 2))]
)
def test_an_address_is_read(asked, text, where) -> None:
    assert run(text).exit_code == 0
    assert asked == [(*where, None)]


@pytest.mark.parametrize("text", ["::1:5600", "h", "h:0", "[fe80::1%eth0]:5600", "h:x"])
def test_what_is_none_is_refused_before_anybody_is_asked(asked, text) -> None:
    result = run(text)
    assert result.exit_code == 2
    assert "HOST:PORT" in result.output or "IPv6" in result.output
    assert asked == []


def test_a_secret_is_read_from_a_file_and_refused_where_it_cannot_be(asked, tmp_path) -> None:
    (tmp_path / "s").write_text("what the engines share")
    assert run("h:1", "--secret-file", str(tmp_path / "s")).exit_code == 0
    assert asked[0][2] is not None
    result = run("h:1", "--secret-file", str(tmp_path / "none"))
    assert (result.exit_code, len(asked)) == (1, 1)
    assert "cannot be read" in result.output


def test_what_was_taken_back_is_told_below_the_handoffs(asked) -> None:
    result = run("h:1")
    assert "reuse: fetched_tokens 5,984" in result.output
    assert "threshold" not in result.output


def reported(monkeypatch) -> list[str]:
    """Let the engine report two handoffs, and return what must be read of them."""
    record = HandoffRecord(
        "cmpl-0123456789abcdef-0-0a1b2c3d", "r", "source", 12, "push", tokens=131_072, bytes=18_432_000_000, descriptors=1_024,
        outcome="done", times=Times(expected=1.0, registered=1.5, first_post=2.0, last_byte=12.0, released=62.0),
    )  # fmt: skip
    lost = HandoffRecord("cmpl-2-0-0a1b2c3d", "r", "sink", 0, "push", outcome="failed", reason="the source is lost")
    monkeypatch.setattr(
        query,
        "fetch_records",
        lambda *_, **__: EngineReport("prefill-0", [RankReport(0, None, "LIBFABRIC", {}, [record, lost])], {}),
    )
    return [record.handoff, "131,072", "18,432,000,000", "61,000.0", "done", lost.handoff, f"failed: {lost.reason}"]


def test_in_a_pipe_every_line_is_as_long_as_it_must_be(monkeypatch) -> None:
    wanted = reported(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    said = run("h:1").output
    assert [text for text in wanted if text not in said] == []


def test_a_terminal_that_is_too_narrow_folds_and_cuts_nothing(monkeypatch) -> None:
    wanted = reported(monkeypatch)
    shown = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(console, "for_tables", lambda: shown)
    assert run("h:1").exit_code == 0
    rows = [line.split("│") for line in shown.file.getvalue().splitlines() if line.startswith("│")]
    columns = ["".join(row[number].strip() for row in rows) for number in range(1, len(rows[0]) - 1)]
    text = "".join(columns)
    assert "…" not in text
    assert [one for one in wanted if re.sub(r"\s", "", one) not in re.sub(r"\s", "", text)] == []

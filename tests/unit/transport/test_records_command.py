"""``kvxfer records`` reads addresses and the secret as people give them."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from kvxfer.transport import command, query
from kvxfer.transport.query import EngineReport


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

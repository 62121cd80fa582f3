"""Where the secret comes from, and what is said when it cannot be had. It is never shown."""

from __future__ import annotations

import pytest

from kvxfer.errors import ConfigError
from kvxfer.protocol.ids import RankId
from kvxfer.transport.secret import load_secret

WORDS = "a secret of some length"
D = RankId("d", "i", 0)


def file_of(tmp_path, content: bytes, mode: int = 0o600, name: str = "secret"):
    path = tmp_path / name
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def same(one, other) -> bool:
    return one.knock(D, b"n") == other.knock(D, b"n")


def test_without_any_there_is_none() -> None:
    assert load_secret("", {}) is None


def test_a_file_wins_over_the_environments_file_and_both_are_read_without_their_last_white_space(tmp_path) -> None:
    mine = file_of(tmp_path, WORDS.encode() + b" \r\n")
    other = file_of(tmp_path, b"another secret of some length", name="other")
    expected = load_secret("", {"KVXFER_SECRET": WORDS})
    assert same(load_secret(mine, {}), expected)
    assert same(load_secret(mine, {"KVXFER_SECRET_FILE": other}), expected)
    assert same(load_secret(mine, {"KVXFER_SECRET": "something else altogether"}), expected)
    assert not same(load_secret("", {"KVXFER_SECRET_FILE": other}), expected)


def test_two_in_the_environment_contradict_each_other(tmp_path) -> None:
    mine = file_of(tmp_path, WORDS.encode())
    with pytest.raises(ConfigError, match="are both set: unset one"):
        load_secret("", {"KVXFER_SECRET_FILE": mine, "KVXFER_SECRET": WORDS})


@pytest.mark.parametrize("content", [b"", b"4 b?", b"fifteen bytes!!          \n", bytes(4097).replace(b"\0", b"x")])
def test_what_is_too_short_or_too_long_is_refused_without_being_shown(tmp_path, content) -> None:
    for file, environment in ((file_of(tmp_path, content), {}), ("", {"KVXFER_SECRET": content.decode()})):
        with pytest.raises(ConfigError, match="openssl rand -hex 32") as raised:
            load_secret(file, environment)
        assert not content.strip() or content.strip().decode() not in str(raised.value)


def test_a_secret_that_cannot_be_read_ends_the_start(tmp_path) -> None:
    """An engine that was to have one must not run without."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"the secret in {path} cannot be read"):
            load_secret(str(path), {})


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o604, True), (0o640, False), (0o600, False)])
def test_a_file_that_everybody_may_read_is_warned_about(tmp_path, caplog, mode, warned) -> None:
    path = file_of(tmp_path, WORDS.encode(), mode)
    load_secret(path, {})
    assert (f"chmod 600 {path}" in caplog.text) is warned
    assert WORDS not in caplog.text

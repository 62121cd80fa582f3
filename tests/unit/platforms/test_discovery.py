"""Finding the platform for a cache."""

from __future__ import annotations

import pytest

from kvxfer import platform as module
from kvxfer.errors import PlatformError
from kvxfer.platform import platform_for, platforms
from kvxfer_host import HostPlatform


class Entry:
    def __init__(self, name: str, load) -> None:
        self.name, self.value, self.load = name, f"kvxfer_{name}:It", load


def test_the_host_platform_is_installed() -> None:
    assert platforms()["host"] is HostPlatform


def test_memory_that_no_platform_handles_is_named_with_what_is_installed() -> None:
    with pytest.raises(PlatformError, match=r"cache is in 'quantum' memory .* installed: .*host \(cpu\).* Install"):
        platform_for("quantum")


def test_without_any_platform_that_is_said(monkeypatch) -> None:
    monkeypatch.setattr(module.metadata, "entry_points", lambda group: [])
    with pytest.raises(PlatformError, match="installed: none"):
        platform_for("cpu")


def test_a_platform_that_does_not_import_is_named_with_the_cause(monkeypatch) -> None:
    def load():
        raise ImportError("no such runtime")

    monkeypatch.setattr(module.metadata, "entry_points", lambda group: [Entry("neuron", load)])
    with pytest.raises(PlatformError, match=r"platform 'neuron' \(kvxfer_neuron:It\) does not import: no such runtime"):
        platforms()

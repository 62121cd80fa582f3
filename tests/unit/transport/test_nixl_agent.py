"""What ``NixlAgent`` does about NIXL's own behaviour, on an agent whose NIXL is a double with the same calls."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvxfer.errors import TransportError
from kvxfer.transport.nixl import NixlAgent


class Double:
    """NIXL's agent after a peer died: each call that progresses the fabric takes one of its errors, and fails of it."""

    def __init__(self, errors: int) -> None:
        self.errors = errors
        self.notifications = [{b"peer": [b"late"]}]

    def get_plugin_list(self) -> list[str]:
        return ["LIBFABRIC"]

    def create_backend(self, backend: str, options: dict[str, str]) -> None:
        assert (backend, options) == ("LIBFABRIC", {})

    def get_new_notifs(self):
        if self.errors:
            self.errors -= 1
            raise RuntimeError("NIXL_ERR_BACKEND")
        return self.notifications.pop() if self.notifications else {}

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if self.errors:
            self.errors -= 1
            raise RuntimeError("NIXL_ERR_BACKEND")
        return metadata


@pytest.fixture
def agent(monkeypatch):
    """Make a real NixlAgent over the double, by the imports that it makes itself."""

    def make(errors: int) -> NixlAgent:
        api = ModuleType("nixl._api")
        api.nixl_agent = lambda name, config: Double(errors)
        api.nixl_agent_config = lambda **settings: settings
        monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
        monkeypatch.setitem(sys.modules, "nixl._api", api)
        monkeypatch.setattr("kvxfer.transport.nixl.ensure_native_libraries", lambda backend: None)
        return NixlAgent("a")

    return make


@pytest.mark.parametrize("errors", [0, 1, 2, 700])
def test_errors_of_a_dead_peer_are_not_a_new_peers(agent, errors) -> None:
    one = agent(errors)
    assert one.add_peer(b"new") == "new"
    assert one.notifications() == [("peer", b"late")], "what arrived meanwhile must not be lost"


def test_a_broken_connection_is_told_once_for_each_error_and_loses_nothing(agent) -> None:
    one = agent(2)
    for _ in range(2):
        with pytest.raises(TransportError, match="broken connection"):
            one.notifications()
    assert one.notifications() == [("peer", b"late")]

"""What ``NixlAgent`` does about NIXL's own behaviour, on an agent whose NIXL is a double with the same calls."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.transport import nixl, nixl_raw
from kvxfer.transport.agent import Status
from kvxfer.transport.nixl import NixlAgent

ROW = np.zeros((1, 3), dtype=np.uint64)


class Handle:
    """A transfer's handle: NIXL says what became of it once ``state`` is set; an error stays."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.released = False

    def release(self) -> None:
        self.released = True


class Double:
    """NIXL's agent. After a death each call that progresses the fabric takes one of the ``errors``, and fails of it."""

    made: ClassVar[list[Double]] = []

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors = 0
        self.late = 0  # errors that come while a handshake is waited for
        self.notifications: list[dict[bytes, list[bytes]]] = []
        self.peers: list[str] = []
        self.handles: list[Handle] = []
        self.registered: list[object] = []
        Double.made.append(self)

    def get_plugin_list(self) -> list[str]:
        return ["LIBFABRIC"]

    def create_backend(self, backend: str, options: dict[str, str]) -> None:
        assert (backend, options) == ("LIBFABRIC", {})

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return ["DRAM_SEG"]

    def register_memory(self, spans: list, memory: str, backends: list[str]) -> None:
        self.registered.append((spans, memory))

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def _err(self) -> None:
        if self.errors:
            self.errors -= 1
            raise RuntimeError("NIXL_ERR_BACKEND")

    def get_new_notifs(self):
        self._err()
        return self.notifications.pop() if self.notifications else {}

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._err()
        if len(self.peers) == 255:
            raise RuntimeError("agent index 256 exceeds 8-bit wire limit")
        self.peers.append(metadata.decode())
        return metadata

    def make_connection(self, name: str, backends: list[str]) -> None:
        self.errors, self.late = self.errors + self.late, 0
        self._err()

    def remove_remote_agent(self, name: str) -> None:
        assert name in self.peers

    def get_xfer_descs(self, rows, memory: str):
        return rows

    def initialize_xfer(self, operation, local, remote, peer, notification, backends) -> Handle:
        self.handles.append(Handle())
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        self._err()
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        self._err()
        return handle.state


@pytest.fixture
def agent(monkeypatch):
    """A NixlAgent over the double, by the imports that it makes itself."""
    api = ModuleType("nixl._api")
    api.nixl_agent = lambda name, config: Double(name)
    api.nixl_agent_config = lambda **settings: settings
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr("kvxfer.transport.nixl_raw.ensure_native_libraries", lambda backend: None)
    monkeypatch.setattr(Double, "made", [])
    monkeypatch.setattr("kvxfer.transport.nixl._made", {})
    return NixlAgent("a")


def post(agent: NixlAgent, peer: str, operation: str = "WRITE"):
    return agent.post(operation, ROW, ROW, "DRAM", peer, b"")


@pytest.mark.parametrize("errors", [0, 1, 2, 700])
@pytest.mark.parametrize("when", ["errors", "late"])
def test_errors_of_a_dead_peer_are_not_a_new_peers(agent, errors, when) -> None:
    """Whether they are there already, or come while the new peer's handshake is waited for."""
    double = Double.made[0]
    setattr(double, when, errors)
    double.notifications = [{b"peer": [b"late"]}]
    assert agent.add_peer(b"new") == "new"
    assert agent.disturbed() is bool(errors)
    assert agent.notifications() == [("peer", b"late")], "what arrived meanwhile must not be lost"


def test_a_peer_that_cannot_be_connected_is_told_and_forgotten(agent, monkeypatch) -> None:
    monkeypatch.setattr(Double, "make_connection", lambda self, name, backends: 1 / 0)
    with pytest.raises(TransportError, match="could not connect a peer: division by zero"):
        agent.add_peer(b"new")
    with pytest.raises(TransportError, match="new is not connected"):
        post(agent, "new")


def test_a_broken_connection_is_told_once_and_loses_nothing(agent) -> None:
    double = Double.made[0]
    double.errors, double.notifications = 3, [{"peer": [b"one"]}]
    assert agent.notifications() == [("peer", b"one")]
    assert agent.disturbed()
    assert not agent.disturbed()
    assert double.errors == 0


@pytest.mark.parametrize("eaten_by", ["status", "notifications", "add_peer", "post"])
def test_every_transfer_to_the_one_peer_fails_whoever_takes_the_only_error(agent, eaten_by) -> None:
    """NIXL never ends the others: it has told its one error, and waits for completions that do not come."""
    agent.add_peer(b"dead")
    transfers = [post(agent, "dead") for _ in range(3)]
    Double.made[0].errors = 1
    match eaten_by:
        case "status":
            agent.status(transfers[1])
        case "notifications":
            agent.notifications()
        case "add_peer":
            agent.add_peer(b"other")
        case "post":
            post(agent, "dead")
    assert [agent.status(one) for one in transfers] == [Status.FAILED] * 3
    assert agent.disturbed()
    for one in transfers:
        agent.release(one)
    assert not any(handle.released for handle in Double.made[0].handles), "a late completion would write into it"


def test_an_error_does_not_fail_another_peers_transfers(agent) -> None:
    agent.add_peer(b"dead")
    agent.add_peer(b"living")
    doomed, fine = post(agent, "dead"), post(agent, "living")
    Double.made[0].errors = 2
    assert agent.status(fine) is Status.PENDING
    assert agent.status(doomed) is Status.PENDING
    Double.made[0].handles[1].state = "DONE"
    assert agent.status(fine) is Status.DONE
    agent.release(fine)
    assert Double.made[0].handles[1].released
    agent.lost("dead")
    assert agent.status(doomed) is Status.FAILED


def test_a_peer_whose_last_transfer_is_done_is_under_suspicion_too(agent) -> None:
    """Its notification may be what broke, and then the only transfer that is under way is somebody else's."""
    agent.add_peer(b"dead")
    agent.add_peer(b"living")
    done, fine = post(agent, "dead"), post(agent, "living")
    Double.made[0].handles[0].state = "DONE"
    assert agent.status(done) is Status.DONE
    Double.made[0].errors = 1
    assert agent.status(fine) is Status.PENDING


def test_a_doubtful_transfer_ends_in_time(agent, monkeypatch) -> None:
    agent.add_peer(b"one")
    agent.add_peer(b"two")
    transfers = [post(agent, name) for name in ("one", "two")]
    Double.made[0].errors = 1
    agent.notifications()
    monkeypatch.setattr(nixl, "DOUBT", 0.0)
    assert [agent.status(one) for one in transfers] == [Status.FAILED] * 2


def test_what_is_under_way_to_a_process_that_has_ended_has_failed_and_nothing_else(agent) -> None:
    for peer in (b"dead", b"silent"):
        agent.add_peer(peer)
    posted = [post(agent, peer, operation) for peer in ("dead", "silent") for operation in ("READ", "WRITE")]
    agent.lost("dead")
    assert [agent.status(one) for one in posted] == [Status.FAILED] * 2 + [Status.PENDING] * 2
    Double.made[0].handles[2].state = "DONE"
    assert agent.status(posted[2]) is Status.DONE


def test_an_agent_made_after_one_was_closed_has_a_name_of_its_own_in_nixl(agent) -> None:
    """Its peers' NIXL would otherwise take it for the one that they know."""
    agent.close()
    again = NixlAgent("a")
    assert [double.name for double in Double.made] == ["a", "a~2"]
    assert again.name == "a"


def test_a_post_that_fails_is_told_and_disturbs(agent, monkeypatch) -> None:
    agent.add_peer(b"dead")
    monkeypatch.setattr(Double, "transfer", lambda self, handle: 1 / 0)
    with pytest.raises(TransportError, match="could not post a WRITE to dead"):
        post(agent, "dead")
    assert agent.disturbed()


def test_errors_without_end_do_not_hold_the_caller(agent, monkeypatch) -> None:
    monkeypatch.setattr(nixl_raw, "_ERRORS", 50)
    Double.made[0].errors = 1_000
    agent.notifications()
    assert Double.made[0].errors == 950


@pytest.mark.parametrize("kind", ["added", "met"])
def test_any_number_of_peers_in_a_life(agent, kind) -> None:
    """NIXL's LIBFABRIC agent knows 255 peers, dead or alive: later ones meet another agent, the last leaves it closed."""
    agent.register([(4096, 4096, 0)], "DRAM")
    last = None
    for i in range(700):
        name = f"peer{i}"
        told = agent.metadata()
        changed = agent.meet(name)
        assert (agent.metadata() != told) is changed
        if kind == "added":
            agent.add_peer(name.encode())
            transfer = post(agent, name)
        if last is not None:
            agent.remove_peer(last)
        if kind == "added":
            transfer.handle.state = "DONE"
            assert agent.status(transfer) is Status.DONE, "peers of the agent before go on with it"
            agent.release(transfer)
        last = name
    assert [double.name for double in Double.made] == ["a", "a~2", "a~3", "a~4"]
    assert all(double.registered == Double.made[0].registered for double in Double.made)
    assert [raw.name for raw in agent._all] == ["a~4"]
    Double.made[-1].notifications = [{"b~3": [b"x"], "engine~7/i/0~12": [b"y"], "e~1/i/0": [b"z"]}]
    arrived = agent.notifications()
    assert arrived == [("b", b"x"), ("engine~7/i/0", b"y"), ("e~1/i/0", b"z")], "peers keep their names"


def test_a_peer_has_one_name_whichever_of_its_agents_is_met(agent) -> None:
    assert agent.add_peer(b"peer/i/0~4") == "peer/i/0"
    transfer = post(agent, "peer/i/0")
    agent.lost("peer/i/0")
    assert agent.status(transfer) is Status.FAILED
    agent.remove_peer("peer/i/0")
    with pytest.raises(TransportError, match="not connected"):
        post(agent, "peer/i/0")


@pytest.mark.parametrize("asked", ["add_peer", "post"])
def test_a_call_about_a_lost_peer_is_made_to_return(agent, monkeypatch, asked) -> None:
    """Only that call, and only by NIXL's LIBFABRIC backend: the others have time-outs."""
    caught = threading.Event()
    rescued: list[str] = []

    def for_ever(self, *_args):
        assert not caught.is_set(), "it must not be tried again"
        caught.set()
        assert freed.wait(20)
        raise RuntimeError("NIXL_ERR_BACKEND")

    freed = threading.Event()
    monkeypatch.setattr(nixl, "rescue", lambda peer, under_way: rescued.append((peer, under_way)))
    if asked == "post":
        agent.add_peer(b"dead", "dead")
    monkeypatch.setattr(Double, "make_connection" if asked == "add_peer" else "transfer", for_ever)
    told: list[BaseException] = []

    def call() -> None:
        try:
            agent.add_peer(b"dead", "dead") if asked == "add_peer" else post(agent, "dead")
        except TransportError as error:
            told.append(error)

    agent.interrupt("nobody")
    assert not rescued, "nothing is under way"
    thread = threading.Thread(target=call)
    thread.start()
    assert caught.wait(20)
    agent.interrupt("another")
    assert not rescued
    agent.interrupt("dead")
    ((peer, under_way),) = rescued
    assert peer == "dead"
    assert under_way()
    freed.set()
    thread.join(20)
    assert told
    assert not under_way()


def test_no_call_is_begun_about_a_peer_whose_process_has_ended(agent, monkeypatch) -> None:
    """It would never return, and whoever could make it return has done so already."""
    agent.add_peer(b"dead", "dead")
    monkeypatch.setattr(Double, "transfer", lambda self, handle: pytest.fail("it was asked"))
    monkeypatch.setattr(Double, "make_connection", lambda self, *_: pytest.fail("it was asked"))
    agent.interrupt("dead")
    with pytest.raises(TransportError, match="could not post a WRITE to dead: the process of dead has ended"):
        post(agent, "dead")
    with pytest.raises(TransportError, match="the process of dead has ended"):
        agent.add_peer(b"dead", "dead")

"""A call that tries again for as long as it can make a socket is made to return, and nobody else is harmed for long."""

from __future__ import annotations

import resource
import socket
import threading
import time

import pytest

from kvxfer.transport import nixl_rescue
from kvxfer.transport.nixl_rescue import rescue


class Call(threading.Thread):
    """Connects for ever, as libfabric does; ends when that has been impossible ``times`` times in a row of moments."""

    def __init__(self, times: int) -> None:
        super().__init__(daemon=True)
        self.times = times
        self.tries = 0
        self.start()

    def run(self) -> None:
        while self.times:
            self.tries += 1
            try:
                socket.socket().close()
            except OSError:
                self.times -= 1


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(nixl_rescue, "MOMENT", 0.02)
    monkeypatch.setattr(nixl_rescue, "PAUSE", 0.02)


@pytest.mark.parametrize("times", [1, 5_000])
def test_the_call_ends_and_the_limit_is_as_before(times) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    call = Call(times)
    rescue("d rank 0", call.is_alive).join(20)
    call.join(20)
    assert not call.is_alive()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    socket.socket().close()


def test_two_at_once_leave_the_limit_as_it_was() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = [Call(3_000), Call(3_000)]
    for one in [rescue(str(i), call.is_alive) for i, call in enumerate(calls)]:
        one.join(20)
    assert not any(call.is_alive() for call in calls)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


def test_the_rescued_thread_can_open_files_at_once(monkeypatch) -> None:
    """It need not wait until the rescuer has noticed."""
    monkeypatch.setattr(nixl_rescue, "MOMENT", 5.0)
    over = threading.Event()
    opened: list[str] = []

    def call() -> None:
        while not over.is_set():
            try:
                socket.socket().close()
            except OSError:
                over.set()
        nixl_rescue.restore()
        for _ in range(1_000):
            try:
                socket.socket().close()
            except OSError as error:
                opened.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    rescue("d rank 0", lambda: not over.is_set()).join(20)
    thread.join(20)
    assert opened == []


def test_a_call_that_has_returned_is_left_alone() -> None:
    call = Call(0)
    call.join()
    other = Call(1)
    rescue("d rank 0", call.is_alive).join(20)
    assert other.is_alive(), "no moment without files for a call that is over"
    other.times = 0
    other.join()


def test_the_socket_that_is_open_while_one_looks_saves_nobody() -> None:
    """The call holds its socket nearly all the time, so the first look takes that for a file that stays open."""

    class Holding(Call):
        def run(self) -> None:
            while self.times:
                self.tries += 1
                try:
                    with socket.socket():
                        time.sleep(0.001)
                except OSError:
                    self.times -= 1

    call = Holding(1)
    rescue("d rank 0", call.is_alive).join(20)
    assert not call.is_alive()

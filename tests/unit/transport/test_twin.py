"""The twin does what a fabric does, and goes wrong when and as it is told."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.transport.agent import Status
from kvxfer.transport.twin import Faults, TwinAgent, TwinFabric


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """Two agents with a page of memory each, on a clock of the test's."""

    def __init__(self, seed: int = 0, **faults) -> None:
        self.clock = Clock()
        self.fabric = TwinFabric(Faults(**faults), self.clock, seed)
        self.memory = {name: np.zeros(1024, dtype=np.uint8) for name in "ab"}
        self.a, self.b = (TwinAgent(name, self.fabric) for name in "ab")
        for agent in (self.a, self.b):
            agent.register([(self.memory[agent.name].ctypes.data, 1024, 0)], "DRAM")
        assert self.a.add_peer(self.b.metadata()) == "b"
        assert self.b.add_peer(self.a.metadata()) == "a"

    def rows(self, name: str, *pieces: tuple[int, int]) -> np.ndarray:
        base = self.memory[name].ctypes.data
        return np.array([(base + at, length, 0) for at, length in pieces], dtype=np.uint64).reshape(-1, 3)

    def post(self, at: int = 0, length: int = 64, note: bytes = b"n", operation: str = "WRITE"):
        rows = self.rows("a", (at, length)), self.rows("b", (at, length))
        return self.a.post(operation, *rows, "DRAM", "b", note)


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_moves_exactly_the_described_bytes_in_the_described_direction(operation) -> None:
    pair = Pair()
    rng = np.random.default_rng(1)
    for memory in pair.memory.values():
        memory[:] = rng.integers(0, 256, 1024)
    before = {name: memory.copy() for name, memory in pair.memory.items()}
    local, remote = pair.rows("a", (0, 10), (500, 3)), pair.rows("b", (100, 10), (7, 3))
    transfer = pair.a.post(operation, local, remote, "DRAM", "b")
    local[:] = 0  # the rows are the agent's from here on
    assert pair.a.status(transfer) is Status.DONE
    target, origin = ("b", "a") if operation == "WRITE" else ("a", "b")
    expected = before[target].copy()
    places = [((0, 10), (100, 10)), ((500, 3), (7, 3))]
    for (mine, n), (theirs, _) in places:
        to, frm = (theirs, mine) if operation == "WRITE" else (mine, theirs)
        expected[to : to + n] = before[origin][frm : frm + n]
    assert np.array_equal(pair.memory[target], expected)
    assert np.array_equal(pair.memory[origin], before[origin])
    assert pair.b.notifications() == []


def test_a_transfer_takes_its_time_and_reads_its_source_at_its_end() -> None:
    pair = Pair(delay=(2.0, 2.0))
    transfer = pair.post()
    assert pair.fabric.next_event() == 102.0
    pair.clock.now = 101.9
    assert pair.a.status(transfer) is Status.PENDING
    assert pair.b.notifications() == []
    pair.memory["a"][:64] = 7  # overwritten under the transfer
    pair.clock.now = 102.0
    assert pair.a.status(transfer) is Status.DONE
    assert (pair.memory["b"][:64] == 7).all()
    assert pair.b.notifications() == [("a", b"n")]
    assert pair.b.notifications() == []
    assert pair.fabric.next_event() is None


def test_a_notification_never_comes_before_its_data_and_may_be_overtaken() -> None:
    pair = Pair(seed=3, delay=(0.0, 1.0), notification_delay=(0.0, 5.0))
    pair.memory["a"][:] = 1
    for i in range(20):
        pair.post(at=i * 16, length=16, note=bytes([i]))
    seen = []
    for _ in range(700):
        pair.clock.now += 0.01
        for _, note in pair.b.notifications():
            assert (pair.memory["b"][note[0] * 16 : note[0] * 16 + 16] == 1).all()
            seen.append(note[0])
    assert sorted(seen) == list(range(20))
    assert seen != sorted(seen), "nothing was reordered"


@pytest.mark.parametrize(("fault", "copies"), [({"lose_notification": 1.0}, 0), ({"double_notification": 1.0}, 2)])
def test_notifications_are_lost_and_doubled_on_demand_and_the_data_still_comes(fault, copies) -> None:
    pair = Pair(**fault)
    pair.memory["a"][:] = 5
    assert pair.a.status(pair.post()) is Status.DONE
    assert pair.b.notifications() == [("a", b"n")] * copies
    assert (pair.memory["b"][:64] == 5).all()


def test_a_post_fails_on_demand_and_moves_nothing() -> None:
    pair = Pair(fail_post=1.0)
    pair.memory["a"][:] = 5
    with pytest.raises(TransportError, match="the post to b failed"):
        pair.post()
    pair.fabric.progress()
    assert not pair.memory["b"].any()


def test_a_torn_transfer_copies_a_prefix_of_its_descriptors_and_notifies_nobody() -> None:
    copied = set()
    for seed in range(30):
        pair = Pair(seed=seed, fail_transfer=1.0)
        pair.memory["a"][:] = 9
        pieces = [(i * 8, 8) for i in range(4)]
        transfer = pair.a.post("WRITE", pair.rows("a", *pieces), pair.rows("b", *pieces), "DRAM", "b", b"n")
        assert pair.a.status(transfer) is Status.FAILED
        assert pair.b.notifications() == []
        landed = int(pair.memory["b"].sum()) // 9
        assert (pair.memory["b"][:landed] == 9).all()
        copied.add(landed)
    assert copied == {0, 8, 16, 24, 32}


def test_what_a_killed_process_had_posted_may_still_land() -> None:
    pair = Pair(delay=(1.0, 1.0))
    pair.memory["a"][:] = 5
    pair.post()
    pair.fabric.kill("a")
    pair.clock.now += 1.0
    assert pair.b.notifications() == [("a", b"n")]
    assert (pair.memory["b"][:64] == 5).all()


def test_what_is_posted_to_a_killed_process_fails_and_touches_nothing() -> None:
    pair = Pair(delay=(1.0, 1.0))
    pair.memory["a"][:] = 5
    transfer = pair.post()
    pair.b.close()
    pair.clock.now += 1.0
    assert pair.a.status(transfer) is Status.FAILED
    assert pair.a.status(pair.post(operation="READ")) is Status.PENDING
    assert not pair.memory["b"].any()


@pytest.mark.parametrize(("at", "length"), [(1020, 8), (-4, 8), (1024, 1)])
@pytest.mark.parametrize("side", ["a", "b"])
def test_memory_that_is_not_registered_is_protected_on_both_sides(side, at, length) -> None:
    pair = Pair()
    good, bad = pair.rows("a", (0, length)), pair.rows(side, (0, length))
    bad[0, 0] = np.uint64(pair.memory[side].ctypes.data + at)
    rows = (bad, pair.rows("b", (0, length))) if side == "a" else (good, bad)
    with pytest.raises(TransportError, match=f"is outside what {side} has registered"):
        pair.a.post("WRITE", *rows, "DRAM", "b")


def test_a_transfer_in_flight_cannot_be_released_and_a_terminal_one_can() -> None:
    pair = Pair(delay=(1.0, 1.0))
    transfer = pair.post()
    with pytest.raises(TransportError, match="in flight"):
        pair.a.release(transfer)
    pair.clock.now += 1.0
    pair.a.status(transfer)
    pair.a.release(transfer)


def test_strangers_are_not_posted_to() -> None:
    pair = Pair()
    pair.a.remove_peer("b")
    with pytest.raises(TransportError, match="a does not know b"):
        pair.post()
    with pytest.raises(TransportError, match="not a twin's metadata"):
        pair.a.add_peer(b"nonsense")
    with pytest.raises(TransportError, match="host memory, not VRAM"):
        pair.a.register([], "VRAM")


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> list:
        pair = Pair(
            seed=seed, delay=(0.0, 1.0), notification_delay=(0.0, 1.0), lose_notification=0.3, fail_transfer=0.3
        )
        for i in range(20):
            pair.post(note=bytes([i]))
        pair.clock.now += 1.0
        pair.fabric.progress()
        pair.clock.now += 1.0
        return pair.b.notifications()

    assert run(1) == run(1)
    assert run(1) != run(2)

"""The counters of calls: what is counted, what is subtracted, and that a reader in another process sees it."""

import json
import os
import subprocess
import sys
import time

import pytest

from kvxfer.bench import calls
from kvxfer.bench.calls import NOTHING, THREAD, Counters, Reading, Tally, count, read


def spin(seconds):
    """Use processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Connector:
    def work(self, seconds, *, also=0.0):
        spin(seconds + also)
        return "worked"

    def wait(self):
        time.sleep(0.05)

    def outer(self):
        spin(0.002)
        return self.work(0.003)

    def fail(self):
        spin(0.002)
        raise KeyError("as it was")

    def left_alone(self):
        return 1


METHODS = ("work", "wait", "outer", "fail")


@pytest.fixture
def connector(tmp_path):
    one = Connector()
    count(one, Counters(tmp_path, "worker", METHODS), METHODS)
    return one


def test_calls_and_their_processor_time(tmp_path, connector):
    assert connector.work(0.004) == "worked"
    assert connector.work(0.004, also=0.002) == "worked"
    tally = read(tmp_path).tallies["worker", "work"]
    assert tally.calls == 2
    # Never less than what was used; how much more another process of the machine cannot make it: it is this thread's time.
    assert tally.ns + 2 * calls.tolls()[0] + 1e5 >= 10e6


def test_waiting_is_not_counted(tmp_path, connector):
    connector.wait()
    tally = read(tmp_path).tallies["worker", "wait"]
    assert tally.calls == 1
    assert tally.ns < 25e6


def test_a_call_from_within_is_the_callers(tmp_path, connector):
    assert connector.outer() == "worked"
    found = read(tmp_path).since(Reading())
    assert set(found.tallies) == {("worker", "outer")}
    assert found.microseconds() >= 4900
    connector.work(0.001)
    assert read(tmp_path).calls("worker", "work") == 1


def test_a_call_that_fails_is_counted_and_fails_as_before(tmp_path, connector):
    with pytest.raises(KeyError, match="as it was"):
        connector.fail()
    assert read(tmp_path).calls("worker", "fail") == 1
    connector.work(0.001)  # and the next one is not taken for a call from within
    assert read(tmp_path).calls("worker", "work") == 1


def test_nothing_else_is_changed(connector):
    assert "left_alone" not in vars(connector)
    assert "work" not in vars(Connector())


def test_the_counters_own_time_is_subtracted(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "tolls", lambda: (300.0, 700.0))
    counters = Counters(tmp_path, "scheduler", ["a", "b"])
    for _ in range(3):
        counters.add("b", 1000)
    counted = read(tmp_path).since(Reading())
    assert counted.tallies == {("scheduler", "b"): Tally(3, 2100.0)}
    assert calls.headers(tmp_path) == [{"part": "scheduler", "toll_ns": 300.0, "around_ns": 700.0}]


def test_an_empty_call_comes_to_nothing(tmp_path):
    class Empty:
        def call(self):
            return None

    one = Empty()
    count(one, Counters(tmp_path, "worker", ["call"]), ["call"])
    inside, around = calls.tolls()
    assert 0 <= inside <= around
    for _ in range(2000):
        one.call()
    tally = read(tmp_path).tallies["worker", "call"]
    assert tally.calls == 2000
    # Without the subtraction it would be all of the counter's own time.
    assert tally.ns < read_raw(tmp_path)


def read_raw(directory):
    (path,) = directory.glob("*.calls")
    whole = path.read_bytes()
    return int.from_bytes(
        whole[-40:-32], sys.byteorder
    )  # before it the calls, behind it those of nothing, and the thread's


def test_processes_of_one_part_are_summed_and_a_reader_elsewhere_sees_them(tmp_path):
    script = (
        "import sys, pathlib\n"
        "from kvxfer.bench.calls import Counters\n"
        "counters = Counters(pathlib.Path(sys.argv[1]), 'worker', ['a'])\n"
        "counters.add('a', 10**9)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "import os; os._exit(9)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ),
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        alive = read(tmp_path)
        assert alive.calls("worker", "a") == 2
        assert 1.99e6 < alive.microseconds() <= 2e6
    finally:
        for process in processes:
            process.stdin.close()
            process.wait(10)
            process.stdout.close()
    assert read(tmp_path) == alive, "what was counted is there when the process has ended, however it did"


def test_a_difference_leaves_out_what_was_not_called():
    before = Reading({("scheduler", "a"): Tally(2, 500.0), ("worker", "b"): Tally(1, 100.0)})
    after = Reading(
        {("scheduler", "a"): Tally(5, 1700.0), ("worker", "b"): Tally(1, 100.0), ("worker", "c"): Tally(1, 3000.0)}
    )
    between = after.since(before)
    assert between.tallies == {("scheduler", "a"): Tally(3, 1200.0), ("worker", "c"): Tally(1, 3000.0)}
    assert between.microseconds() == 4.2
    assert between.microseconds("scheduler") == 1.2
    assert between.microseconds(but=["c"]) == 1.2
    assert between.calls("worker", "b") == 0


def test_what_a_call_of_nothing_comes_to_is_taken_off_each_call_of_its_part():
    one = Reading(
        {
            ("scheduler", "a"): Tally(2, 5000.0), ("scheduler", NOTHING): Tally(4, 1200.0),
            ("worker", "b"): Tally(10, 1000.0), ("worker", NOTHING): Tally(1, 150.0), ("other", "c"): Tally(1, 70.0),
        }
    )  # fmt: skip
    other = Reading({("scheduler", NOTHING): Tally(4, 2800.0)})
    assert one.settled([one, other]).tallies == {
        ("scheduler", "a"): Tally(2, 4000.0),  # a call of nothing: 500 ns
        ("worker", "b"): Tally(10, 0.0),  # never less than nothing
        ("other", "c"): Tally(1, 70.0),
    }


def test_all_that_a_thread_does_is_counted_beside_and_in_no_sum(tmp_path):
    counters = Counters(tmp_path, "worker", ["a"])
    counters.thread()
    begin = time.thread_time_ns()
    while time.thread_time_ns() - begin < 20_000_000:
        pass
    counters.add("a", 1_000_000)
    counters.thread()
    found = read(tmp_path)
    assert found.threads() >= 20_000
    assert found.microseconds() == pytest.approx(1_000, abs=10)
    found = found.since(Reading())
    settled = found.settled([found])
    assert (settled.threads(), settled.calls("worker", THREAD)) == (found.threads(), 1)


def test_a_process_counts_calls_of_nothing(tmp_path):
    counters = Counters(tmp_path, "worker", ["a"])
    for _ in range(5):
        counters.nothing()
    assert read(tmp_path).calls("worker", NOTHING) == 5


def test_a_file_is_whole_when_it_is_seen(tmp_path, monkeypatch):
    seen = []
    rename = type(tmp_path).rename
    monkeypatch.setattr(type(tmp_path), "rename", lambda self, to: (seen.append(read(tmp_path)), rename(self, to))[1])
    Counters(tmp_path, "worker", ["a"])
    assert seen == [Reading({})]
    header = json.loads(next(tmp_path.glob("*.calls")).read_bytes()[:16384])
    assert header["methods"] == ["a", NOTHING, THREAD]

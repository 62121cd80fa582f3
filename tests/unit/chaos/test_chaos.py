"""The simulation itself: it is the same each time, it does what it claims to do, and finds nothing wrong with the product."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from kvxfer.chaos.command import register
from kvxfer.chaos.coverage import missing
from kvxfer.chaos.run import run, story
from kvxfer.chaos.simulation import Simulation
from kvxfer.chaos.world import DRIFT, Clock, World
from kvxfer.protocol.auth import Secret
from tests.unit.chaos.mutations import MUTATIONS

SEEDS = range(25)


@pytest.fixture(scope="module")
def summary():
    return run(SEEDS)


def test_nothing_is_wrong(summary):
    assert summary.failing == {}


def test_nothing_is_wrong_where_engines_share_a_secret():
    """Handshakes and numbers, too, meet doubled, lost and late messages, broken connections and new processes."""
    results = [Simulation(seed, secret=Secret(b"what the engines share")).run() for seed in range(100, 108)]
    assert [violation for result in results for violation in result.violations] == []
    assert sum(result.moved for result in results) >= sum(result.handoffs for result in results) / 2


def test_much_is_moved_and_much_goes_wrong(summary):
    assert summary.handoffs >= 100 * len(SEEDS)  # some are tried again
    assert summary.moved >= summary.handoffs / 2
    assert summary.faults.keys() >= {
        "abort_decode", "abort_prefill", "break", "cut", "death", "doubled", "doubled_notification", "forced_preemption",
        "late_device", "late_leg", "late_mover", "lost_words", "no_decode_leg", "no_prefill_leg", "pause",
        "preemption", "refused_connection", "repeated_id", "restart", "restart_renamed", "stall", "torn_transfer", "wrong_engine",
    }  # fmt: skip


def test_most_transitions_are_taken(summary):
    """The rest needs more seeds, or several ranks; greeting/… never happens, since a session begins with its answer."""
    assert len(missing(summary.coverage)) <= 10


@pytest.mark.parametrize("seed", [1, 3])
def test_a_seed_is_the_same_each_time(seed):
    first, second = Simulation(seed, 40).run(), Simulation(seed, 40).run()
    told = Simulation(seed, 40, keep=True).run()
    assert first.digest
    assert (first.digest, first.events, first.moved) == (second.digest, second.events, second.moved)
    assert (first.events, first.moved) == (told.events, told.moved)
    assert Simulation(seed + 1, 40).run().digest != first.digest


def first_failing(handoffs=100):
    return next(seed for seed in range(60) if Simulation(seed, handoffs).run().violations)


def test_a_failing_seed_tells_its_story(monkeypatch):
    assert story(1, 20)[1] == []
    MUTATIONS["no_post_fence"](monkeypatch)
    seed = first_failing()
    result, lines = story(seed)
    about = result.violations[0].about
    assert any("wrong_bytes" in line for line in lines)
    assert any(about in line and "Register" in line for line in lines)
    assert story(seed)[1] == lines


@pytest.mark.parametrize("arguments", [["--seeds", "2"], ["--seeds", "2", "--json"], ["--seed", "1"]])
def test_the_command(arguments):
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    done = CliRunner().invoke(app, ["chaos", "--handoffs", "20", *arguments])
    assert done.exit_code == 0, done.output
    if "--json" in arguments:
        told = json.loads(done.output)
        assert told["seeds"] == 2
        assert told["wrong_bytes"] == told["leaked_blocks"] == told["stuck"] == told["double_reports"] == 0
        assert told["failing_seeds"] == []
        assert told["coverage"]["sink"]["registered/complete"] > 0


def test_the_command_fails_when_something_is_wrong(monkeypatch):
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    MUTATIONS["finished_twice"](monkeypatch)
    done = CliRunner().invoke(app, ["chaos", "--seeds", "1"])
    assert done.exit_code == 1
    assert "failing seeds: 0" in done.output
    assert CliRunner().invoke(app, ["chaos", "--seed", "0"]).exit_code == 1


def test_clocks_drift_and_never_run_back():
    world = World(1)
    clocks = [Clock(world) for _ in range(20)]
    before = [clock() for clock in clocks]
    world.run_until(1000.0)
    passed = [clock() - then for clock, then in zip(clocks, before, strict=True)]
    assert all(abs(seconds - 1000.0) <= 1000.0 * DRIFT * 1.001 for seconds in passed)
    assert len(set(passed)) == len(passed)

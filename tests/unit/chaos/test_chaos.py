"""The simulation itself: it is the same each time, it does what it claims to do, and finds nothing wrong with the product."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from kvxfer.chaos.command import register
from kvxfer.chaos.coverage import not_foreseen, seldom_struck, seldom_taken
from kvxfer.chaos.outcomes import kind_of
from kvxfer.chaos.possible import CLOSED, IMPOSSIBLE, MAY_BE_MISSED, OPEN, PASSING, POSSIBLE, REUSE
from kvxfer.chaos.profile import CYCLE, conversing, profile_of, seeds_of
from kvxfer.chaos.run import run, story
from kvxfer.chaos.simulation import Simulation
from kvxfer.chaos.trouble import EVENTS, REUSE_EVENTS, WEIGHTS_OF_REUSE
from kvxfer.chaos.world import DRIFT, Clock, World
from tests.unit.chaos.mutations import MUTATIONS

SEEDS = range(30)


@pytest.fixture(scope="module")
def summary():
    return run(SEEDS)


def test_nothing_is_wrong(summary):
    assert summary.failing == {}


def test_nothing_is_wrong_where_engines_share_a_secret():
    """Handshakes and numbers, too, meet doubled, lost and late messages, new processes, and what somebody says again."""
    results = [Simulation(seed).run() for seed in seeds_of("overheard", 12)[3:]]
    assert [violation for result in results for violation in result.violations] == []
    assert sum(result.faults["replayed"] for result in results) > 1000
    assert sum(result.moved for result in results) >= 400  # of some 1,000: a fault meets about every second one


def test_much_is_moved_and_much_goes_wrong(summary):
    assert summary.handoffs >= 100 * len(SEEDS)  # some are tried again
    assert summary.moved >= summary.handoffs / 2
    assert summary.faults.keys() >= IMPOSSIBLE.keys()


def test_most_transitions_are_taken_and_most_faults_strike_in_most_states(summary):
    """The rest needs more seeds."""
    assert len(seldom_taken(summary.coverage, 1)) <= 20
    pairs = sum(map(len, POSSIBLE.values()))
    assert len(seldom_struck(summary.struck, 1)) < pairs / 3


def test_conversations_are_taken_back_and_refused_for_every_reason(summary):
    assert sum(map(conversing, SEEDS)) >= 4
    for what, least in {
        "reuse_asked": 100, "pinned": 40, "read": 30, "renewed": 5, "expired": 4, "not read": 3,
        "reuse_not_held": 40, "reuse_no_room": 10, "reuse_fetched_tokens": 1500, "reuse_recomputed_tokens": 100,
        "reuse_declined_not_held": 1000, "reuse_declined_no_answer": 500, "reuse_declined_threshold": 100,
    }.items():  # fmt: skip
        assert summary.reuse[what] >= least, f"{what} was hardly met: {summary.reuse}"


def test_a_world_without_conversations_asks_for_none():
    seed = next(seed for seed in SEEDS if not conversing(seed))
    assert not Simulation(seed, 20).run().reuse


def test_nothing_impossible_has_happened(summary):
    assert not_foreseen(summary.struck) == []
    known = set(OPEN + CLOSED + REUSE + PASSING)
    assert all(states.keys() <= known for states in summary.struck.values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_seeds():
    """What the simulation promises: some six minutes on one core."""
    summary = run(range(2000))
    assert summary.failing == {}
    assert summary.handoffs >= 200_000
    assert summary.moved >= summary.handoffs / 2
    assert seldom_taken(summary.coverage) == []
    assert seldom_struck(summary.struck) == []
    assert not_foreseen(summary.struck) == []
    assert summary.reuse["read"] >= 2_000
    assert (
        min(summary.reuse[what] for what in ("renewed", "expired", "not read", "reuse_no_room", "reuse_not_held"))
        >= 200
    )


def test_every_fault_has_its_states():
    assert EVENTS.keys() | REUSE_EVENTS.keys() <= IMPOSSIBLE.keys()
    assert WEIGHTS_OF_REUSE.keys() <= set(REUSE)
    assert all(set(states) <= set(POSSIBLE[fault]) for fault, states in MAY_BE_MISSED.items())
    for fault, states in IMPOSSIBLE.items():
        assert states.keys() <= set(OPEN + REUSE), fault
        assert all(states.values()), fault
        assert POSSIBLE[fault], fault


def test_a_seed_decides_its_kind_of_world():
    assert {profile.name for profile in CYCLE} == {profile_of(seed).name for seed in range(len(CYCLE))}
    for profile in CYCLE:
        seeds = seeds_of(profile.name, 5)
        assert len(set(seeds)) == 5
        assert all(profile_of(seed) is profile for seed in seeds)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("moved", "moved"),
        ("p0-engine' rank 0 is gone: nothing heard from it for 5 s", "an engine rank N is gone: nothing heard from it for N s"),
        ("no answer from somebody at p1:5600 within 3 s", "no answer from an engine at host:port within N s"),
        ("request d163 has this handoff id", "request N has this handoff id"),
        ("the post to d0-engine/31ab00ff/0 failed", "the post to an engine failed"),
        ("never came: {'p0-engine rank 0': [(0, 4)]}", "never came: {…}"),
    ],
)  # fmt: skip
def test_outcomes_are_told_by_kind(reason, kind):
    assert kind_of(reason) == kind


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
        assert told["coverage"]["faults"].keys() == IMPOSSIBLE.keys()
        assert "death: sink/fencing" in told["seldom_struck"]


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


def test_a_clock_may_be_as_wrong_as_one_wants():
    world = World(1)
    clock = Clock(world, -0.08)
    before = clock()
    world.run_until(100.0)
    assert clock() - before == pytest.approx(92.0)

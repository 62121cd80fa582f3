"""Worlds whose fabric does not reach the engines' memory: every kind of trouble, and KV that is copied through mirrors meanwhile."""

from __future__ import annotations

import pytest

from kvxfer.chaos.profile import CYCLE, seeds_of
from kvxfer.chaos.simulation import Simulation
from kvxfer.transport import mirroring

pytestmark = pytest.mark.timeout(400)


def run(seed: int, handoffs: int = 100):
    return Simulation(seed, handoffs, mirrored=True).run()


def test_nothing_is_wrong_in_any_kind_of_world():
    results = [run(seed, 40) for seed in range(len(CYCLE))]
    assert [violation for result in results for violation in result.violations] == []
    assert sum(result.moved for result in results) >= 150  # of 400: a fault meets about every second one


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_four_hundred_seeds():
    results = [run(seed) for seed in range(400)]
    assert [violation for result in results for violation in result.violations] == []


# --- what would be missed ---------------------------------------------------------------------------------------------


def posted_before_it_is_copied_out(patch):
    """A write is posted when its copy has been launched."""
    passed = mirroring.Mirroring._passed
    now = lambda one: isinstance(one.action, mirroring.PostWrite) or passed(one)  # noqa: E731
    patch.setattr(mirroring.Mirroring, "_passed", staticmethod(now))


def granted_before_it_is_copied_out(patch):
    """A reader is told when the copy of what it may read has been launched."""
    passed = mirroring.Mirroring._passed
    now = lambda one: isinstance(one.action, mirroring.Send) or passed(one)  # noqa: E731
    patch.setattr(mirroring.Mirroring, "_passed", staticmethod(now))


def reported_before_it_is_copied_in(patch):
    """A handoff is reported when its copies have been launched."""
    passed = mirroring.Mirroring._passed
    now = lambda one: isinstance(one.action, mirroring.SinkFinished) or passed(one)  # noqa: E731
    patch.setattr(mirroring.Mirroring, "_passed", staticmethod(now))


def failures_do_not_wait_for_copies(patch):
    """A handoff that fails is reported while its copies are under way."""
    hold = mirroring.Mirroring._hold_end

    def end(self, action):
        if action.reason is not None:
            self._arriving.pop(action.handoff, None)
            return False
        return hold(self, action)

    patch.setattr(mirroring.Mirroring, "_hold_end", end)


MUTATIONS = {
    posted_before_it_is_copied_out: "calm",
    granted_before_it_is_copied_out: "slow reads",
    reported_before_it_is_copied_in: "calm",
    failures_do_not_wait_for_copies: "preemptions",
}


@pytest.mark.parametrize(("mutation", "kind"), MUTATIONS.items(), ids=lambda one: getattr(one, "__name__", one))
def test_a_missing_guard_of_mirrors_is_found(mutation, kind, monkeypatch):
    mutation(monkeypatch)
    assert any(run(seed).violations for seed in seeds_of(kind, 200)), mutation.__doc__

"""The fabric under the simulation: what it hides, when it lets a failed transfer's rest land, whom a fault concerns."""

from __future__ import annotations

import pytest

from kvxfer.chaos import concern, legs
from kvxfer.chaos.legs import Handoff, digest
from kvxfer.chaos.pool import Pool
from kvxfer.chaos.profile import CALM
from kvxfer.chaos.simulation import Simulation
from kvxfer.chaos.turns import fresh
from kvxfer.protocol.ids import HandoffId


@pytest.fixture
def sim():
    return Simulation(0, 1, profile=CALM)


def test_hidden_cells_look_as_before_until_their_time_or_a_write_of_the_owner(sim):
    process = sim.slots[0].process
    process.cells[4] = 7
    process.hide(process.base + 16, 8, until=1.0)
    process.cells[4] = process.cells[5] = 9
    assert [process.seen(4), process.seen(5), process.seen(6)] == [7, 0, 0]
    process.hide(process.base + 16, 4, until=2.0)
    sim.world.run_until(1.5)
    assert [process.seen(4), process.seen(5)] == [7, 9], "hidden again, and what was there first is still what is seen"
    sim.world.run_until(2.0)
    assert process.seen(4) == 9


def test_a_stack_gives_away_first_what_was_freed_last():
    for stack, expected in ((True, [1, 0]), (False, [3, 1])):
        pool = Pool(4, stack=stack)
        blocks = pool.take(3)[:2]
        pool.give(blocks)
        assert pool.take(2) == expected


def test_prompts_of_equal_length_differ_by_their_digests():
    assert digest(1024, 8) == digest(1024, 8)
    assert len({digest(1024, 8), digest(1024, 7), digest(1536, 8)}) == 3


@pytest.mark.parametrize("fault", ["longer_prompt", "shorter_prompt", "other_prompt"])
def test_legs_whose_prompts_differ_are_never_moved(fault, monkeypatch):
    """With nothing else wrong every handoff moves; with this, none whose digests are told."""
    monkeypatch.setattr(legs, "LATE_TOO", 0.0)
    seen = 0
    for seed in range(5):
        sim = Simulation(seed, 20, profile=CALM)
        sim.legs.told = True
        sim.trouble.calm = False
        monkeypatch.setitem(sim.trouble._chances, fault, 1.0)
        monkeypatch.setattr(type(sim.trouble), "end", lambda _self: None)
        result = sim.run()
        assert not result.violations
        seen += result.faults[fault]
        assert result.moved <= result.handoffs - result.faults[fault]
        assert all("prompt" in kind or "moved" in kind or "blocks" in kind for kind in result.outcomes)
    assert seen > 50


def test_a_fault_concerns_both_ends_of_a_handoff_and_nobody_else(monkeypatch):
    seen = {}

    def look(sim):
        for slot in sim.living():
            of_process, partners = concern.of_process(sim, slot.host), concern.of_partners(sim, slot.host)
            assert partners <= of_process
            assert concern.own(slot.process) <= of_process
            for other in sim.living():
                if slot.prefills and not other.prefills:
                    pair = concern.of_pair(sim, slot.host, other.host)
                    assert pair <= of_process | concern.of_process(sim, other.host)
                    for state in pair:
                        seen[state] = True

    sim = Simulation(1, 60, profile=CALM)
    for moment in range(200):
        sim.world.at(moment * 0.05, look, sim)
    assert not sim.run().violations
    assert {"source/computing", "source/final", "sink/registered"} <= seen.keys()


def test_a_process_that_has_none_of_a_handoff_has_no_state_of_it(sim):
    handoff = Handoff(HandoffId("h1"), 1024, 4, fresh(1024))
    assert concern.of_handoff(sim, handoff.id, "p0", "d0") == set()
    assert concern.of_attempt(sim.slot("p0").process, sim.slot("d0").process, handoff.id, 1) == set()

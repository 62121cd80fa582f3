"""Does the simulation see what it claims to see? Guards of the product are taken away one at a time, and it must find that.

Here are those that a few seeds find. ``mutations.py`` has more: the rest takes hundreds of seeds, or is a second guard behind
another one.
"""

from __future__ import annotations

import pytest

from kvxfer.chaos.simulation import Simulation
from tests.unit.chaos.mutations import MUTATIONS

SEEDS = 60

FOUND = (
    "no_post_fence",
    "no_pre_fence",
    "preemption_forgets_what_waits",
    "cancel_is_not_acknowledged",
    "cancelled_source_answers_at_once",
    "failed_write_is_thought_gone",
    "failed_read_is_thought_gone",
    "reader_is_gone_while_it_reads",
    "source_keeps_its_generation",
    "two_writes_to_a_position_fly",
    "received_without_a_seal",
    "sealed_when_posted",
    "agents_have_no_incarnation",
    "greeted_anew_means_nothing",
    "posts_without_a_lease",
    "fence_does_not_wait",
    "lease_counts_from_its_receipt",
    "early_registrations_are_forgotten",
    "nothing_is_said_again",
    "lost_peers_are_kept",
    "legs_are_waited_for_for_ever",
    "held_for_as_long_as_decode_queues",
    "finished_twice",
    "failures_are_not_heard",
    "openings_are_not_called_anew",
)


@pytest.mark.parametrize("name", FOUND)
def test_a_missing_guard_is_found(name, monkeypatch):
    MUTATIONS[name](monkeypatch)
    for seed in range(SEEDS):
        if Simulation(seed).run().violations:
            return
    pytest.fail(f"{SEEDS} seeds did not miss this guard: {MUTATIONS[name].__doc__}")

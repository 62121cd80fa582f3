"""Does the simulation see what it claims to see? Guards of the product are taken away one at a time, and it must find that.

Each is looked for in the seeds of the kind of world that was made for it; all are among the first 2,000 seeds.
"""

from __future__ import annotations

import pytest

from kvxfer.chaos.profile import CYCLE, conversing, introduced, parallel, seeds_of
from kvxfer.chaos.simulation import Simulation
from tests.unit.chaos.mutations import BEHIND_ANOTHER, MUTATIONS, NOT_MET

pytestmark = pytest.mark.timeout(400)  # the rarest world is found after half a minute on a quiet machine

FOUND_IN = {
    "calm": ("no_post_fence", "early_registrations_are_forgotten", "finished_twice"),
    "mixed": (
        "no_pre_fence",
        "cancel_is_not_acknowledged",
        "cancelled_source_answers_at_once",
        "failed_write_is_thought_gone",
        "received_without_a_seal",
        "prompts_are_not_compared",
        "greeted_anew_means_nothing",
        "nothing_is_said_again",
        "legs_are_waited_for_for_ever",
        "failures_are_not_heard",
        "openings_are_not_called_anew",
    ),
    "sleepers": ("keys_are_not_revoked",),
    "preemptions": (
        "preemption_forgets_what_waits",
        "sink_takes_any_generation",
        "two_writes_to_a_position_fly",
        "sealed_when_posted",
        "notifications_are_counted",
        "lost_blocks_are_not_pinned",
        "pins_do_not_wait_for_writes",
    ),
    "overheard": ("replays_are_admitted",),
    "usurpers": (
        "fence_does_not_wait",
        "fence_forgets_the_lease",
        "lease_has_no_margin",
        "lost_peers_are_kept",
    ),
    "deaf": (
        "posts_without_a_lease",
        "lease_counts_from_its_receipt",
        "envelopes_for_the_dead_are_opened",
    ),
    "echoes": ("attempts_are_not_told_apart", "held_for_as_long_as_decode_queues"),
    "slow reads": (
        "failed_read_is_thought_gone",
        "reader_is_gone_while_it_reads",
        "read_counts_after_its_lease",
        "grants_before_it_is_held",
    ),
}
FOUND_WHERE_INTRODUCED = {
    "any_end_ends_a_promise": "echoes",
    "promises_end_with_their_sessions": "usurpers",
}
"""Guards of connections that are made before the first handoff: worlds without introductions have none."""
FOUND_WHERE_PARALLEL = {
    "blocks_go_back_after_the_first_sink": "usurpers",
    "finished_after_the_first_of_several_sinks": "calm",
    "a_grant_is_shared_by_all_readers": "slow reads",
    "quiet_by_one_part_counts_for_all": "rebirths",
    "received_when_one_part_is": "mixed",
    "a_pull_ends_with_its_first_read": "slow reads",
    "one_ranks_word_frees_lost_blocks": "preemptions",
}
"""Guards of engines of several ranks."""
FOUND_WHERE_CONVERSING = {
    "retained_blocks_are_not_pinned": "echoes",
    "pins_end_before_their_leases": "rebirths",
    "ranks_grant_for_longer_than_the_pin": "rebirths",
    "the_seed_forgets_the_salt": "echoes",
    "evicted_blocks_are_named": "echoes",
}
"""Guards of conversations that are taken back."""
FOUND_BY = {"attempts_that_are_over_may_begin": 1736}
"""Guards that few seeds miss, and one of these."""
PROFILE = {name: profile for profile, names in FOUND_IN.items() for name in names}


def seeds_below(profile, limit=2000):
    return [seed for seed in seeds_of(profile, limit) if seed < limit]


def test_every_guard_has_its_place():
    early = (
        FOUND_WHERE_INTRODUCED.keys() | FOUND_WHERE_PARALLEL.keys() | FOUND_WHERE_CONVERSING.keys() | FOUND_BY.keys()
    )
    assert PROFILE.keys() | early | BEHIND_ANOTHER.keys() | NOT_MET.keys() == MUTATIONS.keys()
    assert not early & (PROFILE.keys() | BEHIND_ANOTHER.keys() | NOT_MET.keys())
    assert not PROFILE.keys() & (BEHIND_ANOTHER.keys() | NOT_MET.keys())
    assert FOUND_IN.keys() <= {profile.name for profile in CYCLE}
    assert len(seeds_below("deaf")) == 200


@pytest.mark.parametrize("name", PROFILE)
def test_a_missing_guard_is_found(name, monkeypatch):
    MUTATIONS[name](monkeypatch)
    assert_found(name, seeds_below(PROFILE[name]))


@pytest.mark.parametrize("name", FOUND_WHERE_INTRODUCED)
def test_a_missing_guard_of_early_connections_is_found(name, monkeypatch):
    MUTATIONS[name](monkeypatch)
    assert_found(name, [seed for seed in seeds_below(FOUND_WHERE_INTRODUCED[name]) if introduced(seed)])


@pytest.mark.parametrize("name", FOUND_WHERE_PARALLEL)
def test_a_missing_guard_of_engines_of_several_ranks_is_found(name, monkeypatch):
    MUTATIONS[name](monkeypatch)
    assert_found(name, [seed for seed in seeds_below(FOUND_WHERE_PARALLEL[name]) if parallel(seed) != (1, 1)])


@pytest.mark.parametrize("name", FOUND_WHERE_CONVERSING)
def test_a_missing_guard_of_conversations_is_found(name, monkeypatch):
    MUTATIONS[name](monkeypatch)
    assert_found(name, [seed for seed in seeds_below(FOUND_WHERE_CONVERSING[name]) if conversing(seed)])


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_guard_that_is_seldom_wanted_is_missed_by_one_seed(name, monkeypatch):
    assert Simulation(FOUND_BY[name]).run().violations == []
    MUTATIONS[name](monkeypatch)
    assert_found(name, [FOUND_BY[name]])


def assert_found(name, seeds):
    for seed in seeds:
        if Simulation(seed).run().violations:
            return
    pytest.fail(f"2,000 seeds did not miss this guard: {MUTATIONS[name].__doc__}")

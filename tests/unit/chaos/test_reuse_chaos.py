"""Readers never take another conversation's KV, whatever happens when; and each guard of that is missed when it is taken away."""

from __future__ import annotations

from collections import Counter

import pytest

from kvxfer.connector import retained as module
from kvxfer.connector import shaping
from kvxfer.connector.pins import Pins
from kvxfer.protocol.sink import Sink
from tests.unit.chaos.reuse_world import Edge, World

SEEDS = 120


def test_no_wrong_bytes_and_nothing_is_left() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = World(seed)
        assert world.run() == [], f"seed {seed}"
        counts += world.counts
    for what in ("granted", "renewed", "read", "late", "failed", "not held", "lost", "slept", "restarted"):
        assert counts[what] > 20, f"{what} was hardly met: {counts}"


def test_reads_at_the_very_end_of_a_lease() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = Edge(seed)
        assert world.run() == [], f"seed {seed}"
        counts += world.counts
    assert min(counts["read"], counts["late"]) > 200, counts


def no_pin(patch):
    patch.setattr(Pins, "pin", lambda self, name, blocks: True)
    patch.setattr(Pins, "let_go", lambda self, name, tables=(): None)


def pin_ends_before_the_lease(patch):
    grant = module.Retained._grant

    def short(self, *args):
        held = list(grant(self, *args))
        if held:
            lease = self._leases[held[0].handoff]
            lease.until = lease.last = lease.until - 4.0
            self._look_ahead()
        return held

    patch.setattr(module.Retained, "_grant", short)


def reads_have_no_margin(patch):
    made = Sink.__init__
    patch.setattr(Sink, "__init__", lambda self, **settings: made(self, **settings | {"lease_margin": 0.0}))


def late_reads_count(patch):
    done = Sink.read_done
    patch.setattr(Sink, "read_done", lambda self, number, now: done(self, number, 0.0))


def ranks_grant_for_longer_than_the_pin(patch):
    held = module.SourceHeld
    patch.setattr(module, "SourceHeld", lambda a, b, c, until, computing: held(a, b, c, until + 30.0, computing))


def seed_forgets_the_salt(patch):
    patch.setattr(shaping, "seed", lambda *shapes: b"the same for all")


def evicted_blocks_are_named(patch):
    """Answer with blocks that are free, whatever is in them."""
    patch.setattr(
        module.Retained,
        "_find",
        lambda self, ask, first: [b for b in self._pool.blocks[1:] if b.ref_cnt == 0][: len(ask.chain) // 16],
    )


@pytest.mark.parametrize(
    "guard",
    [
        no_pin,
        pin_ends_before_the_lease,
        late_reads_count,
        reads_have_no_margin,
        ranks_grant_for_longer_than_the_pin,
        seed_forgets_the_salt,
        evicted_blocks_are_named,
    ],
)
def test_a_guard_that_is_missing_is_found(guard, monkeypatch) -> None:
    guard(monkeypatch)
    kind = Edge if guard is reads_have_no_margin else World
    for seed in range(SEEDS):
        if any(" took " in one for one in kind(seed).run()):
            return
    raise AssertionError(f"{SEEDS} seeds do not find that {guard.__name__}")

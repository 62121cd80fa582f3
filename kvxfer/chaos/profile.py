"""What kind of world a seed is: decided by the seed's number, so that each kind has its share of any long run.

Most worlds are mixed: everything may go wrong in them, a little. The others are directed: each makes one kind of coincidence
common that a mixed world meets once in thousands of seeds, because a guard of the protocol stands against just that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from kvxfer.protocol.peers import Timing

if TYPE_CHECKING:
    from collections.abc import Mapping

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of world. What is empty or None is drawn from the seed.

    ``events`` are mean seconds between two, ``chances`` probabilities, of kinds that happen here in every seed; ``others`` is
    the probability of each other kind to happen in a seed at all.
    """

    name: str
    others: float = 0.4
    between: float | None = None
    """Mean seconds between two requests."""
    mode: str | None = None
    pull_lease: float | None = None
    stack: bool | None = None
    """Blocks that were freed last are given away first."""
    delay: Range | None = None
    """Of a transfer, in seconds."""
    slow_tail: float = 0.0
    """Probability of a transfer that takes the longest of ``delay``, or nearly."""
    notification_delay: Range | None = None
    reconnect: Range | None = None
    """Seconds until a connection that broke is made anew."""
    timing: Timing = field(default_factory=Timing)
    drift: float | None = None
    """By how much prefill's clocks are too slow, and decode's too fast."""
    renamed: float = 0.4
    """Probability of a life after death under another engine's name."""
    unnoticed: float = 0.2
    """Probability of a prompt that is computed whole some steps before its engine notices."""
    budget: int = 12
    """Tokens in a step."""
    step: Range = (0.001, 0.02)
    """Seconds that a step takes the device."""
    late_device: float | None = None
    late_mover: float | None = None
    storm: float | None = None
    revoke: bool = True
    """Keys are revoked when only time fences a lost source; otherwise the time alone is trusted, and must be enough."""
    sleep: Range | None = None
    """Seconds for which a process that is paused sleeps; what it has not sent yet, it sends when it wakes up."""
    secret: bool = False
    """Engines share a secret; and somebody who has listened says again what he has heard."""
    pinned: float = 0.5
    """Share of prefill's blocks that may be pinned."""
    deaf: float = 0.0
    """Probability of a lag in one direction during which nothing at all comes in the other."""
    sources: tuple[int, int] = (1, 3)
    """Prefill engines."""
    more_blocks: int = 0
    """Blocks that decode engines have beside those that are drawn: so many more handoffs are registered at a time."""
    same_pair: float = 0.0
    """Probability of a repeated id that comes to the same two engines."""
    chances: Mapping[str, float] = field(default_factory=dict)
    events: Mapping[str, float] = field(default_factory=dict)


CALM = Profile("calm", others=0.0)
"""Nothing goes wrong, so nothing may fail."""

MIXED = Profile("mixed")

_ON_THE_FABRIC = {
    "lost_notification": 0.03,
    "doubled_notification": 0.05,
    "failed_post": 0.02,
    "torn_transfer": 0.02,
    "slow_word": 0.03,
}

PREEMPTIONS = Profile(
    "preemptions",
    others=0.25,
    stack=True,
    delay=(0.001, 0.3),
    notification_delay=(0.0, 0.5),
    unnoticed=0.5,
    late_mover=0.1,
    chances={"doubled_notification": 0.3},
    events={"forced_preemption": 0.1, "late_mover": 1.5},
)
"""Blocks are taken away while they are written from, or would be read from, and computed into by others at once."""

USURPERS = Profile(
    "usurpers",
    others=0.2,
    between=0.5,
    mode="push",
    stack=True,
    delay=(0.05, 1.84),
    slow_tail=0.5,
    notification_delay=(0.0, 0.5),
    reconnect=(0.001, 0.05),
    timing=Timing(interval=0.25, timeout=5.0, lease=4.0, margin=0.75),
    drift=0.08,
    budget=4,
    step=(0.05, 0.45),
    storm=1.0,
    revoke=False,
    sources=(1, 2),
    more_blocks=80,
    chances={"late_leg": 0.2, **_ON_THE_FABRIC},
    events={"usurped": 4.0},
)
"""New lives take the addresses of old ones that still run, and write under the leases that they hold; clocks are bad.

The clocks are as bad as the margin of 0.75 s is good for: with 8 %, what may be posted for 3.25 s by a slow clock, and is under
way for 1.84 s, has landed before 4 s and a drain bound of 2 s are over by a fast one. For 4 s by the slow one, it has not.
"""

DEAF = Profile(
    "deaf",
    others=0.15,
    between=0.5,
    mode="push",
    stack=True,
    delay=(0.05, 1.84),
    slow_tail=0.5,
    notification_delay=(0.0, 0.5),
    reconnect=(0.02, 3.0),
    timing=Timing(interval=0.5),
    budget=4,
    step=(0.05, 0.45),
    storm=1.0,
    deaf=0.8,
    revoke=False,
    renamed=0.8,
    sources=(1, 2),
    more_blocks=80,
    chances={"late_leg": 0.2, **_ON_THE_FABRIC},
    events={"lag": 7.0, "death": 8.0},
)
"""Sinks hear nothing of sources that go on hearing them, late, and write for as long as they think they may."""

ECHOES = Profile(
    "echoes",
    others=0.2,
    pull_lease=2.4,
    reconnect=(0.02, 3.0),
    storm=1.0,
    same_pair=0.9,
    chances={"repeated_id": 0.2, "retry_same_id": 0.5, "abort_decode": 0.05, "slow_word": 0.05},
    events={"lag": 3.0, "doubled_break": 0.5, "repeated_id": 2.0},
)
"""Clients use their ids again at once, while words about the last attempt are still under way, or come a second time."""

SLOW_READS = Profile(
    "slow reads",
    others=0.25,
    between=0.45,
    mode="pull",
    pull_lease=2.4,
    stack=True,
    delay=(0.2, 6.0),
    unnoticed=0.5,
    storm=1.0,
    chances={"abort_decode": 0.1},
    events={"death": 7.0, "stall": 5.0, "cut": 7.0, "pause": 7.0, "forced_preemption": 0.3},
)
"""Reads last longer than the leases that they need, and the blocks that they read are computed into as soon as they are free."""

REBIRTHS = Profile(
    "rebirths",
    others=0.2,
    reconnect=(0.02, 3.0),
    renamed=0.7,
    chances={"retry_same_id": 0.4, "late_leg": 0.2},
    same_pair=0.9,
    storm=1.0,
    events={"death": 4.0, "stall": 6.0},
)
"""Processes die and come back under their own name or another, and find at their address what was meant for their last life."""

OVERHEARD = Profile(
    "overheard",
    others=0.3,
    secret=True,
    same_pair=0.9,
    chances={"repeated_id": 0.1, "retry_same_id": 0.3, "abort_decode": 0.03},
    events={"repeated_id": 3.0, "replayed": 0.04},
)
"""Engines share a secret. Somebody without it has listened, and says again what he has heard, to its receiver or to others."""

SLEEPERS = Profile(
    "sleepers",
    others=0.15,
    mode="push",
    stack=True,
    delay=(0.05, 1.8),
    storm=1.0,
    sleep=(10.5, 16.0),
    events={"pause": 9.0},
)
"""Sources fall asleep in the middle of a write, for longer than leases and drains last, and go on with it when they wake up."""

INTRODUCED = 0.25
"""Share of worlds whose engines are introduced to each other, of every kind."""

HEADS = 2
"""KV heads of the model in worlds whose engines have several ranks."""

PARALLEL = ((1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 1))
"""Tensor-parallel ranks of (prefill, decode) engines in such a world. Of four ranks two hold replicas."""
SHARE_PARALLEL = 0.2
"""Share of such worlds, of every kind."""

SHARE_CONVERSING = 0.25
"""Share of worlds, of every kind, whose prompts continue each other, and whose prefill engines take back what decode holds."""
SKEWED = 0.02
"""By how much clocks are wrong in some of these: leases for reading have a margin for just that."""

CYCLE = (CALM, MIXED, PREEMPTIONS, OVERHEARD, USURPERS, DEAF, ECHOES, SLEEPERS, SLOW_READS, REBIRTHS)


def profile_of(seed: int) -> Profile:
    """Return a seed's."""
    return CYCLE[seed % len(CYCLE)]


def introduced(seed: int) -> bool:
    """Tell whether a seed's engines are introduced to each other, and connect before their first handoff."""
    return Random(f"introductions in {seed}").random() < INTRODUCED  # noqa: S311 - a kind of world


def parallel(seed: int) -> tuple[int, int]:
    """Return how many ranks a seed's prefill and decode engines have."""
    draw = Random(f"ranks in {seed}")  # noqa: S311 - a kind of world
    return draw.choice(PARALLEL) if draw.random() < SHARE_PARALLEL else (1, 1)


def conversing(seed: int) -> bool:
    """Tell whether a seed's prompts continue each other."""
    return Random(f"conversations in {seed}").random() < SHARE_CONVERSING  # noqa: S311 - a kind of world


def seeds_of(name: str, count: int) -> list[int]:
    """Return the first seeds whose profile has this name."""
    every = [number for number, profile in enumerate(CYCLE) if profile.name == name]
    return [turn * len(CYCLE) + number for turn in range(count) for number in every][:count]

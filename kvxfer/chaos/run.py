"""Many seeds, added up."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.chaos.coverage import Coverage, counting, not_foreseen, seldom_struck, seldom_taken
from kvxfer.chaos.simulation import CHECKS, Result, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvxfer.chaos.simulation import Violation


@dataclass(slots=True)
class Summary:
    """What became of many seeds. ``seconds`` is this process's time on a processor."""

    seeds: int = 0
    handoffs: int = 0
    moved: int = 0
    events: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=dict)
    struck: Coverage = field(default_factory=dict)
    reuse: Counter[str] = field(default_factory=Counter)
    """What became of conversations, see ``Result``."""
    violations: Counter[str] = field(default_factory=Counter)
    failing: dict[int, Violation] = field(default_factory=dict)
    """The first violation of each failing seed."""

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "seeds": self.seeds,
            "handoffs": self.handoffs,
            "moved": self.moved,
            "faults": dict(sorted(self.faults.items())),
            "reuse": dict(sorted(self.reuse.items())),
            "outcomes": dict(self.outcomes.most_common()),
            "coverage": {**_plain(self.coverage), "faults": _plain(self.struck)},
            "seldom_taken": seldom_taken(self.coverage),
            "seldom_struck": seldom_struck(self.struck),
            "not_foreseen": not_foreseen(self.struck),
            **{check: self.violations[check] for check in CHECKS},
            "events": self.events,
            "seconds": round(self.seconds, 3),
            "failing_seeds": sorted(self.failing),
        }


def _plain(coverage: Coverage) -> dict[str, dict[str, int]]:
    return {name: dict(sorted(counts.items())) for name, counts in coverage.items()}


def run(seeds: Iterable[int], handoffs: int = 100, done: Callable[[Result], None] = lambda _result: None) -> Summary:
    """Run seeds one after the other; ``done`` hears of each."""
    summary = Summary()
    began = time.process_time()
    with counting(summary.coverage):
        for seed in seeds:
            result = Simulation(seed, handoffs).run()
            summary.seeds += 1
            summary.handoffs += result.handoffs
            summary.moved += result.moved
            summary.events += result.events
            summary.faults.update(result.faults)
            summary.outcomes.update(result.outcomes)
            summary.reuse.update(result.reuse)
            for fault, states in result.struck.items():
                summary.struck.setdefault(fault, Counter()).update(states)
            summary.violations.update(violation.check for violation in result.violations)
            if result.violations:
                summary.failing[seed] = result.violations[0]
            done(result)
    summary.seconds = time.process_time() - began
    return summary


def story(seed: int, handoffs: int = 100, *, lines: int = 200) -> tuple[Result, list[str]]:
    """Replay one seed; tell of its first violation's handoff, and of what concerned whole processes while it lived."""
    result = Simulation(seed, handoffs, keep=True).run()
    if not result.violations:
        return result, []
    about = result.violations[0].about
    mine = [entry for entry in result.trace if about and entry.about == about]
    if mine:
        first, last = mine[0].at, max(result.violations[0].at, mine[-1].at)
        told = [e for e in result.trace if e.about == about or (not e.about and first <= e.at <= last)]
    else:
        told = [e for e in result.trace if not e.about and e.at <= result.violations[0].at][-lines:]
    return result, [str(entry) for entry in told[:lines]]

"""What a connector's processes say to the metrics: vLLM carries it, step by step, to the API server.

A worker adds up what handoffs have ended since it was last asked (``Tally``); the scheduler's process says how full the cache is
(``room``). vLLM asks each at every step, so a step with nothing to say costs one comparison, and asks the workers
right after ``get_finished``: a handoff is counted before the request that waited for it goes on.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvxfer.transport.stages import stages, whole

if TYPE_CHECKING:
    from kvxfer.transport.records import HandoffRecord

ROOM: Final = "reclaimable_tokens"
COUNTS: Final = "counts"
SECONDS: Final = "seconds"
SEPARATOR: Final = "/"
"""Between a figure's name and its labels: ``handoffs/sink/push/done``."""

MOST_SECONDS: Final = 4096
"""Durations of one stage kept between two steps. More handoffs are counted, but of these no durations are told."""


@dataclass
class Stats:
    """Figures on their way to the API server, with all that a ``KVConnectorStats`` of any vLLM has (kv_connector/v1/metrics.py).

    Until 0.29 the scheduler takes ``data``; from 0.31 on it calls ``to_dict``, and an engine whose connector has no answer ends.

    ``data``: ``reclaimable_tokens`` (the newest counts), ``counts`` (added up), ``seconds`` (put one behind the other).
    """

    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What is sent."""
        return self.data

    def aggregate(self, other: Stats) -> Stats:
        """Take in a newer one, of this process or another."""
        if ROOM in other.data:
            self.data[ROOM] = other.data[ROOM]
        for key, count in other.data.get(COUNTS, {}).items():
            counts = self.data.setdefault(COUNTS, {})
            counts[key] = counts.get(key, 0) + count
        for key, seconds in other.data.get(SECONDS, {}).items():
            all_of_it = self.data.setdefault(SECONDS, {})
            all_of_it[key] = [*all_of_it.get(key, ()), *seconds]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: how many handoffs ended, how many of them well, and how much was moved."""
        handoffs = {key: count for key, count in self.data.get(COUNTS, {}).items() if key.startswith("handoffs/")}
        done = sum(count for key, count in handoffs.items() if key.endswith("/done"))
        moved = sum(count for key, count in self.data.get(COUNTS, {}).items() if key.startswith("bytes/"))
        return {
            "kvxfer handoffs": sum(handoffs.values()),
            "of them done": done,
            "MB transferred": round(moved / 1e6, 1),
        }

    def reset(self) -> None:
        """Forget it all."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether there is nothing."""
        return not self.data


class Tally:
    """Of one worker: ended handoffs since the last ``take``. ``hear`` is called by the mover, ``take`` by the engine's thread."""

    def __init__(self) -> None:
        self._news: Stats | None = None
        self._lock = threading.Lock()

    def hear(self, record: HandoffRecord) -> None:
        """Add a record that has ended."""
        labels = f"{SEPARATOR}{record.side}{SEPARATOR}{record.mode}"
        moved = record.completed[-1][1] if record.completed else 0
        with self._lock:
            news = self._news or Stats({COUNTS: {}, SECONDS: {}})
            counts, seconds = news.data[COUNTS], news.data[SECONDS]
            for name, count in (
                (f"handoffs{labels}{SEPARATOR}{record.outcome}", 1),
                (f"bytes{labels}", moved),
                (f"descriptors{labels}", record.descriptors),
                (f"tokens{labels}", record.tokens if record.outcome == "done" else 0),
            ):
                if count:
                    counts[name] = counts.get(name, 0) + count
            over = whole(record)
            for stage in (*stages(record), *(() if over is None else (over,))):
                several = seconds.setdefault(f"{stage.name}{labels}", [])
                if len(several) < MOST_SECONDS:
                    several.append(stage.end - stage.begin)
            self._news = news

    def take(self) -> Stats | None:
        """Return what is new, once; None where nothing is, as in nearly every step."""
        if self._news is None:
            return None
        with self._lock:
            news, self._news = self._news, None
        return news

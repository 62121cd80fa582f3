"""How much processor time each of an object's methods takes in the thread that calls it, read from outside meanwhile.

``count`` puts a counter around methods of one object, in the process to be measured: how often each was called, and the calling
thread's own processor time in it (``time.thread_time_ns``: user and system, no waiting, no other thread). The counters lie in
a file that is mapped into memory, so that whoever measures reads them at any moment and the measured process has nothing to
send, to answer or to write at its end. ``read`` reads all files of a directory, and ``Reading.since`` takes the difference.

The counter itself costs something, mostly two system calls. What of that falls inside the measured span is measured in each
process at its start (``toll_ns``) and subtracted, call by call; what a call costs more in all is told beside it
(``around_ns``), for who wants to know how much the engine was slowed down by being measured. That is the toll of a counter at
work without a pause, though, and in an engine that sleeps between its steps everything is slower. So a call of nothing at
all is counted beside the others (``NOTHING``), and ``Reading.settled`` takes what it came to off each of them.

Guarantees: a call from within a counted method is counted with its caller, not twice. One thread at a time may call: the
connector's hooks all have the engine's thread. A reading in the middle of a call may have its time and not yet its number.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

DIRECTORY: Final = "KVXFER_BENCH_CALLS"
"""The environment variable that tells an engine's processes where their files shall be."""

SCHEDULER, WORKER = "scheduler", "worker"
"""The parts: the engine core's process, and a worker's."""
STEP: Final = "build_connector_meta"
"""The scheduler's hook that is called once a step."""
METADATA: Final = "(metadata pickled and read)"
"""Not a hook: what vLLM does with a step's connector metadata."""

NOTHING: Final = "(nothing)"
"""Not a hook: an empty function, counted once a step."""

THREAD: Final = "(the whole thread)"
"""Not a hook either: all processor time of the engine's thread, whoever's it is; in no sum."""

_HEADER: Final = 16384
_SUFFIX: Final = ".calls"
_CELL: Final = struct.Struct("qq")
_BATCHES, _BATCH = 20, 500


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one method: calls, and nanoseconds of processor time without the counter's own."""

    calls: int = 0
    ns: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.calls + other.calls, self.ns + other.ns)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.calls - other.calls, self.ns - other.ns)


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters of a directory at one moment: (part, method) → tally, summed over the processes of a part."""

    tallies: Mapping[tuple[str, str], Tally] = field(default_factory=dict)

    def since(self, earlier: Reading) -> Reading:
        """What was counted since an earlier reading; methods that were not called in between are left out."""
        none = Tally()
        between = {key: one - earlier.tallies.get(key, none) for key, one in self.tallies.items()}
        return Reading({key: one for key, one in between.items() if one.calls})

    def settled(self, among: Iterable[Reading]) -> Reading:
        """Take off each call what a call of nothing came to in ``among``, in the mean of its part; that is left out then."""
        nothing: dict[str, Tally] = {}
        for one in among:
            for (part, method), tally in one.tallies.items():
                if method == NOTHING:
                    nothing[part] = nothing.get(part, Tally()) + tally
        each = {part: tally.ns / tally.calls for part, tally in nothing.items()}
        return Reading(
            {
                (part, method): tally
                if method == THREAD
                else Tally(tally.calls, max(0.0, tally.ns - tally.calls * each.get(part, 0.0)))
                for (part, method), tally in self.tallies.items()
                if method != NOTHING
            }
        )

    def threads(self) -> float:
        """Processor time of the engine's threads, in microseconds."""
        return sum(one.ns / 1e3 for (_, method), one in self.tallies.items() if method == THREAD)

    def calls(self, part: str, method: str) -> int:
        """How often a part's method was called."""
        return self.tallies.get((part, method), Tally()).calls

    def microseconds(self, part: str | None = None, *, but: Iterable[str] = ()) -> float:
        """Processor time of a part, or of all, without the methods named in ``but``."""
        left_out = {*but, THREAD}
        return sum(
            one.ns / 1e3
            for (of, method), one in self.tallies.items()
            if part in (None, of) and method not in left_out
        )  # fmt: skip


class Counters:
    """The file of counters of one process: ``directory/<part>-<pid>.calls``. ``methods`` are all that can be counted."""

    def __init__(self, directory: Path, part: str, methods: Iterable[str]) -> None:
        self._at = {name: number * 2 for number, name in enumerate((*methods, NOTHING, THREAD))}
        self._busy = [False]
        self._thread_at: int | None = None
        self.toll_ns, self.around_ns = tolls()
        header = {"part": part, "methods": list(self._at), "toll_ns": self.toll_ns, "around_ns": self.around_ns}
        text = json.dumps(header).encode()
        assert len(text) < _HEADER, f"{len(self._at)} methods' names do not fit"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{part}-{os.getpid()}{_SUFFIX}"
        scratch = path.with_suffix(".new")
        with scratch.open("w+b") as file:
            file.write(text.ljust(_HEADER))
            file.truncate(_HEADER + _CELL.size * len(self._at))
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        scratch.rename(path)  # whoever reads never sees half a header
        self._cells = memoryview(self._map)[_HEADER:].cast("q")
        self.nothing = self.count(NOTHING, _nothing)
        """To be called once a step."""

    def thread(self) -> None:
        """Count the calling thread's time since the last call. To be called once a step, by the engine's thread."""
        now = time.thread_time_ns()
        if self._thread_at is not None:
            self.add(THREAD, now - self._thread_at)
        self._thread_at = now

    def count(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is counted under that method's name."""
        return _counted(function, self._cells, self._at[method], self._busy)

    def add(self, method: str, nanoseconds: int) -> None:
        """Count something that is no call of its own."""
        at = self._at[method]
        self._cells[at] += 1
        self._cells[at + 1] += nanoseconds


def count(target: object, counters: Counters, methods: Iterable[str]) -> None:
    """Count these methods of one object from now on; its class and its other instances stay as they are."""
    for method in methods:
        setattr(target, method, counters.count(method, getattr(target, method)))


def read(directory: Path) -> Reading:
    """Read all files of a directory as they are now."""
    sums: dict[tuple[str, str], Tally] = {}
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        whole = path.read_bytes()
        header = json.loads(whole[:_HEADER])
        cells = _CELL.iter_unpack(whole[_HEADER:])
        for method, (calls, ns) in zip(header["methods"], cells, strict=True):
            key = (header["part"], method)
            sums[key] = sums.get(key, Tally()) + Tally(calls, ns - calls * header["toll_ns"])
    return Reading(sums)


def headers(directory: Path) -> list[dict[str, Any]]:
    """The files' headers: which part each process is, and what its counters cost (nanoseconds a call)."""
    found = [json.loads(path.read_bytes()[:_HEADER]) for path in sorted(directory.glob(f"*{_SUFFIX}"))]
    return [{name: header[name] for name in ("part", "toll_ns", "around_ns")} for header in found]


def tolls() -> tuple[float, float]:
    """What a counter adds to one call, in nanoseconds: to the time that it counts, and in all.

    The least of some batches, since whatever interrupts a batch is not the counter's. Takes some milliseconds.
    """
    cells = memoryview(bytearray(_CELL.size)).cast("q")
    counted = _counted(_nothing, cells, 0, [False])
    bare, around, inside = [], [], []
    for _ in range(_BATCHES):
        bare.append(_batch(_nothing))
        before = cells[1]
        around.append(_batch(counted))
        inside.append((cells[1] - before) / _BATCH)
    least = min(bare)
    return max(0.0, min(inside) - least), max(0.0, min(around) - least)


def _nothing() -> None: ...


def _batch(function: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    for _ in range(_BATCH):
        function()
    return (time.thread_time_ns() - start) / _BATCH


def _counted(function: Callable[..., Any], cells: memoryview, at: int, busy: list[bool]) -> Callable[..., Any]:
    clock = time.thread_time_ns

    def counted(*args: Any, **kwargs: Any) -> Any:
        if busy[0]:
            return function(*args, **kwargs)
        busy[0] = True
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            cells[at + 1] += clock() - start
            cells[at] += 1
            busy[0] = False

    return counted

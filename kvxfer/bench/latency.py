"""How quickly a mover acts: on a registration that reaches an idle source, and on a transfer that has become terminal.

Two processes of one host over real NIXL: a source that holds a finished prompt and sleeps, and a sink that registers. All
moments come from the handoff records of both, whose clock (CLOCK_MONOTONIC) all processes of a host share:

* *registration*: the sink's registration left → the source's first write was posted. Nothing polls at the source meanwhile.
* *completion*: the source saw its last write terminal → the sink was sure of its data and gave the blocks back.
* *handoff*: the sink's registration left → the sink gave the blocks back: both of the above, and the transfer between them.

How late a completion is *seen* cannot be told from outside NIXL, which reports it only when it is asked. So that figure is
taken over the in-memory twin, whose transfers are due at a known moment: the moment at which the mover saw it, less that.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from kvxfer.bench.lone import LoneRank
from kvxfer.errors import KvxferError
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.nixl import NixlAgent
from kvxfer.transport.query import fetch_records
from kvxfer.transport.twin import Faults, TwinAgent, TwinFabric

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_TOKENS, _BLOCKS = 64, list(range(1, 17))
_SLEEP = 0.03  # between handoffs: long enough for the source to fall asleep


def run(repeats: int = 200, backend: str = "LIBFABRIC") -> dict[str, Any]:
    """Measure; milliseconds, each figure as median and 90th percentile. Raises KvxferError when NIXL does not start."""
    os.environ.setdefault("FI_PROVIDER", "tcp")
    return {"repeats": repeats, "backend": backend, **_over_nixl(repeats, backend), **_over_the_twin(repeats)}


def _over_nixl(repeats: int, backend: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_source, args=(theirs, backend), daemon=True)
    process.start()
    sink = None
    try:
        sink = LoneRank("sink", lambda name: NixlAgent(name, backend), backend=backend, records=repeats + 1)
        if not ours.poll(60.0):
            raise KvxferError("the source's process did not start within 60 s")
        port = ours.recv()
        address = EngineAddress("127.0.0.1", port, "source")
        for i in range(repeats + 1):  # the first one connects
            ours.send(i)
            ours.recv()
            time.sleep(_SLEEP)
            sink.open(HandoffId(f"h{i}"), f"r{i}", address, _BLOCKS, _TOKENS)
            done = sink.wait(f"r{i}")
            if reason := getattr(done, "reason", None):
                raise KvxferError(f"handoff {i} failed: {reason}")
        received = {r.handoff: r.times for r in sink.mover.records.last(repeats + 1)}
        sent = {r.handoff: r.times for r in fetch_records("127.0.0.1", port, last=repeats + 1).records}
    finally:
        ours.close()
        if sink is not None:
            sink.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
    both = [(sent[f"h{i}"], received[f"h{i}"]) for i in range(1, repeats + 1)]
    return {
        "registration_ms": _summary([_gap(d.registered, p.first_post) for p, d in both]),
        "completion_ms": _summary([_gap(p.last_byte, d.released) for p, d in both]),
        "handoff_ms": _summary([_gap(d.registered, d.released) for _, d in both]),
    }


def _source(connection: Connection, backend: str) -> None:
    """The source's process: holds a finished prompt for each number that it is sent, until the pipe is closed."""
    rank = LoneRank("source", lambda name: NixlAgent(name, backend), backend=backend, records=100_000)
    rank.fill(_BLOCKS, 1)
    connection.send(rank.control.port)
    try:
        while True:
            i = connection.recv()
            rank.prefill(HandoffId(f"h{i}"), f"r{i}", _BLOCKS, _TOKENS)
            connection.send(i)
    except EOFError:
        rank.close()


def _over_the_twin(repeats: int) -> dict[str, Any]:
    fabric = TwinFabric(Faults(delay=(0.002, 0.006)), seed=1)
    source = LoneRank("source", lambda name: TwinAgent(name, fabric), records=repeats + 1)
    sink = LoneRank("sink", lambda name: TwinAgent(name, fabric), records=repeats + 1)
    due: list[float] = []
    seen: list[float] = []
    try:
        source.fill(_BLOCKS, 1)
        for i in range(repeats + 1):
            source.prefill(HandoffId(f"h{i}"), f"p{i}", _BLOCKS, _TOKENS)
            sink.open(HandoffId(f"h{i}"), f"d{i}", source.address, _BLOCKS, _TOKENS)
            sink.wait(f"d{i}")
            source.wait(f"p{i}")
            due.append(fabric.last_due)
            seen.append(source.record("source", HandoffId(f"h{i}")).times.last_byte or 0.0)
    finally:
        source.close()
        sink.close()
    return {"seen_ms": _summary([b - a for a, b in zip(due[1:], seen[1:], strict=True)])}


def _gap(start: float | None, end: float | None) -> float:
    assert start is not None
    assert end is not None
    return end - start


def _summary(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return {"median": round(statistics.median(seconds) * 1000, 3), "p90": round(tenths[8] * 1000, 3)}

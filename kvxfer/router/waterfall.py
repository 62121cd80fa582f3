"""Recent requests by stage: what the router saw, and what the engines' handoff records say in between.

The records of an engine are in its own clock. They are laid beside the router's by one anchor each, the moment at which the
leg was sent and the moment at which the engine first heard of the handoff, so a bar may stand a network trip too early; its
length is exact.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError
from kvxfer.router.path import path
from kvxfer.transport.query import fetch_records
from kvxfer.transport.stages import stages as stages_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvxfer.router.call import Trace
    from kvxfer.router.engine import Engine
    from kvxfer.router.openai import Json
    from kvxfer.transport.records import HandoffRecord

_PATIENCE = 2.0
_LAST = 512


class Waterfall:
    """Asks engines for their records, one question at a time however many look at the page."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()

    async def of(self, traces: Sequence[Trace], engines: Sequence[Engine]) -> tuple[list[Json], list[str]]:
        """The requests with their stages, and which engines gave no records and why."""
        missing: list[str] = []
        async with self._asking:
            answers = await asyncio.gather(*(asyncio.to_thread(_records, engine) for engine in engines))
        by_transfer: dict[str, list[HandoffRecord]] = {}
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, str):
                missing.append(f"{engine.name}: {answer}")
                continue
            for record in answer:
                by_transfer.setdefault(record.handoff, []).append(record)
        found = [(trace, _of(trace, by_transfer)) for trace in traces]
        return [
            trace.describe() | {"stages": stages(trace, records), "path": path(trace, records)}
            for trace, records in found
        ], missing


def _records(engine: Engine) -> list[HandoffRecord] | str:
    if not engine.identities:
        return "not known yet"
    try:
        return [
            record
            for one in engine.identities  # several, where one URL stands for data-parallel engines
            for record in fetch_records(one.host, one.port, last=_LAST, timeout=_PATIENCE).records
        ]
    except (KvxferError, OSError, ValueError) as error:
        return str(error)


def _of(trace: Trace, by_transfer: dict[str, list[HandoffRecord]]) -> list[HandoffRecord]:
    wanted = trace.transfer_id
    return [record for name, some in by_transfer.items() if wanted and wanted in name for record in some]


def stages(trace: Trace, records: Iterable[HandoffRecord]) -> list[Json]:
    """Every stage with its start and length in seconds since the request came, and whose figure it is."""
    found: list[Json] = []

    def add(stage: str, begin: float | None, end: float | None, source: str) -> None:
        if begin is not None and end is not None and end >= begin:
            start = round(begin - trace.received, 6)
            found.append({"stage": stage, "start_s": start, "seconds": round(end - begin, 6), "by": source})

    sent = [one for one in (trace.prefill_sent, trace.decode_sent) if one is not None]
    add("router queue", trace.received, min(sent, default=None), "router")
    add("prefill", trace.prefill_sent, trace.prefill_done, "router")
    for record in records:
        anchor = trace.decode_sent if record.side == "sink" else trace.prefill_sent
        if anchor is None or record.times.expected is None:
            continue
        shift = anchor - record.times.expected
        for stage in stages_of(record):
            add(stage.name, stage.begin + shift, stage.end + shift, f"{record.side} rank {record.rank}")
    add("first token", trace.prefill_done or trace.decode_sent, trace.first, "router")
    add("decode", trace.first, trace.done, "router")
    return sorted(found, key=_start)


def _start(stage: dict[str, Any]) -> float:
    return float(stage["start_s"])

"""Sends requests to one arm and keeps time; what the engines recorded and counted of them is asked for afterwards.

Times are this client's own (``client``): TTFT begins when the first leg is sent and ends when decode's first token is here,
for one engine alone when its first token is here. Nothing is asked of an engine while a window is open.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import TYPE_CHECKING, Final, final

import msgspec

from kvxfer.addresses import is_loopback
from kvxfer.bench.client import Client
from kvxfer.bench.handoffs import Pair
from kvxfer.errors import KvxferError
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvxfer.bench.client import Completion
    from kvxfer.bench.engines import Engine
    from kvxfer.bench.pd.arms import Arm
    from kvxfer.bench.pd.points import Planned
    from kvxfer.layout.maps import CacheMap
    from kvxfer.transport.records import HandoffRecord

HITS: Final = "vllm:prefix_cache_hits"
_UPSTREAM: Final = "vllm:nixl_"
_SAMPLE: Final = re.compile(r"^(?P<name>vllm:\w+)(?:\{[^}]*\})?\s+(?P<value>\S+)", re.MULTILINE)
_ENDED, _LOOK = 5.0, 0.05  # seconds for which records may stay open after a window, and between two looks


class Transfer(msgspec.Struct, omit_defaults=True):
    """What kvxfer's records of one handoff say. Times in seconds; those between two hosts cannot be told.

    ``fence_to_report``: from the fence of the last chunk, as prefill's mover saw it, until decode's mover was sure of all of it.
    ``early``: the share of the bytes that had completed before that fence. ``moving``: from the first post to the last byte.
    """

    bytes: int
    descriptors: int
    tokens: int
    outcome: str
    backend: str = ""
    fence_to_report: float | None = None
    early: float | None = None
    moving: float | None = None
    reason: str = ""
    moments: dict[str, float] = {}
    """When prefill's engine had heard of it, computed it (its last fence), when the first transfer was posted and the last was
    over, and when decode's engine knew: moments of the one host's clock."""


class Sample(msgspec.Struct, omit_defaults=True):
    """One request that was measured. Times in seconds. ``error`` says why there are none."""

    number: int
    input: int
    output: int
    at: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    gaps: list[float] = []
    prefill: float | None = None
    """Until prefill's leg had its answer."""
    error: str = ""
    transfer: Transfer | None = None
    stages: dict[str, float] = {}
    """What the TTFT is made of, in order; they add up to it."""


STAGES: Final = {
    "heard": "to prefill",
    "computed": "queued and computed",
    "posted": "until the first post",
    "moved": "moving",
    "reported": "until decode knows",
}
"""The stages that end with each of a transfer's moments; the last one ends with the first token."""
LAST_STAGE: Final = "decode's first token"


def stages(sample: Sample, asked: float) -> dict[str, float]:
    """Return what a TTFT is made of. ``asked``: when the request was sent, by the clock of the transfer's moments.

    A stage that was over before the one before it (a chunk that is written while the next is computed) takes no time of its own.
    Without records there are only prefill's answer and the rest, for one engine alone nothing to tell apart.
    """
    if sample.ttft is None:
        return {}
    if sample.transfer is not None and sample.transfer.moments:
        ends = [(name, sample.transfer.moments.get(moment)) for moment, name in STAGES.items()]
    elif sample.prefill is not None:
        ends = [("until prefill's answer", asked + sample.prefill)]
    else:
        ends = []
    found, begin, first_token = {}, asked, asked + sample.ttft
    for name, end in ends:
        until = min(max(begin if end is None else end, begin), first_token)
        found[name], begin = until - begin, until
    return found | {LAST_STAGE if ends else "queued and computed": first_token - begin}


@final
class Line:
    """An open line to one arm; use it in an ``async with`` block."""

    def __init__(self, arm: Arm, timeout: float) -> None:
        self.arm = arm
        self._pair: Pair | None = None
        self._alone: Client | None = None
        if arm.name.mode is None:
            self._alone = Client(arm.engines[0].url, timeout=timeout, model=arm.model)
        else:
            self._pair = Pair(arm.name.mode, *arm.engines, timeout=timeout, model=arm.model)

    async def __aenter__(self) -> Line:
        await (self._alone or self._pair).__aenter__()  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await (self._alone or self._pair).__aexit__(*exc)  # type: ignore[union-attr]

    async def answer(
        self, prompt: Sequence[int], output: int, name: str | None = None
    ) -> tuple[Completion, float | None]:
        """Send one prompt; return the answer, and how long prefill's leg took. Raises KvxferError."""
        if self._pair is None:
            assert self._alone is not None, "one of the two is there"
            return await self._alone.complete(prompt, output), None
        handoff = await self._pair.hand_over(prompt, output, name=name)
        return handoff.decode, handoff.prefill.seconds

    async def one(self, planned: Planned) -> Sample:
        """Send one request and measure it."""
        (sample,) = await self.measure([planned])
        return sample

    async def measure(self, planned: Sequence[Planned]) -> list[Sample]:
        """Send all requests, each at its time whether or not those before are answered, and measure them."""
        names = [uuid.uuid4().hex for _ in planned]
        began = time.monotonic()  # the clock of the records, too
        samples = await asyncio.gather(*(self._at(began, one, name) for one, name in zip(planned, names, strict=True)))
        found = await asyncio.to_thread(transfers, self.arm, names) if self.arm.name.ours else {}
        for sample, name in zip(samples, names, strict=True):
            sample.transfer = found.get(name)
            sample.stages = stages(sample, began + sample.at)
            if sample.transfer is not None:
                sample.transfer.moments = {}  # of no use to anybody else
        return samples

    async def _at(self, began: float, planned: Planned, name: str) -> Sample:
        await asyncio.sleep(max(0.0, began + planned.at - time.monotonic()))
        asked = time.perf_counter()
        sample = Sample(planned.number, len(planned.prompt), planned.output, at=time.monotonic() - began)
        try:
            answer, sample.prefill = await self.answer(planned.prompt, planned.output, name)
        except KvxferError as error:
            sample.error = str(error)
            return sample
        # Decode's leg of a pull begins when prefill's has ended; a client waits for both.
        sample.ttft = None if answer.ttft is None else answer.started + answer.ttft - asked
        sample.tpot, sample.gaps = answer.tpot, list(answer.gaps)
        if len(answer.token_ids) != planned.output:
            sample.error = f"{len(answer.token_ids)} tokens came, not {planned.output}"
        return sample

    async def counters(self) -> dict[str, float]:
        """Return what the arm's engines have counted so far: prefix hits, and what upstream's connectors count."""
        found: dict[str, float] = {}
        for engine in self.arm.engines:
            async with Client(engine.url, model=self.arm.model) as client:
                text = await client.metrics()
            for name, value in counted(text):
                found[name] = found.get(name, 0.0) + value
        return found


def counted(metrics: str) -> Iterable[tuple[str, float]]:
    """Yield the counters that matter from a ``/metrics`` page: buckets and moments of creation are left out."""
    for sample in _SAMPLE.finditer(metrics):
        name = sample["name"].removesuffix("_total")
        if name == HITS or (name.startswith(_UPSTREAM) and not name.endswith(("_bucket", "_created"))):
            yield name, float(sample["value"])


def transfers(arm: Arm, handoffs: Sequence[str]) -> dict[str, Transfer]:
    """Return what both sides recorded of these handoffs, waiting a little for records that are still open."""
    if not all(engine.control_port for engine in arm.engines):
        return {}
    wanted = set(handoffs)
    deadline = time.monotonic() + _ENDED
    while True:
        sides = [_records(engine, len(wanted)) for engine in arm.engines]
        records = [record for side in sides for record in side if record.handoff in wanted]
        ended = [record for record in records if record.outcome != "open"]
        if len(ended) >= len(arm.engines) * len(wanted) or time.monotonic() > deadline:
            break
        time.sleep(_LOOK)
    grouped: dict[str, list[HandoffRecord]] = {}
    for record in records:
        grouped.setdefault(record.handoff, []).append(record)
    here = arm.one_host and (arm.started_here or is_loopback(arm.engines[0].control_host))
    return {handoff: joined(group, one_host=arm.one_host, here=here) for handoff, group in grouped.items()}


def _records(engine: Engine, count: int) -> list[HandoffRecord]:
    # Twice as many as are wanted: a router or another client may use a running engine, too.
    report = fetch_records(engine.control_host, engine.control_port, last=2 * count + 8)
    return report.records


def joined(records: Sequence[HandoffRecord], *, one_host: bool, here: bool = False) -> Transfer:
    """Put the records of one handoff together: both sides, all ranks. ``here``: they have this process's clock."""
    sources = [record for record in records if record.side == "source"]
    sinks = [record for record in records if record.side == "sink"]
    posters = [record for record in records if record.bytes]
    size = sum(record.bytes for record in posters)
    fences = [record.times.chunks_final[-1] for record in sources if record.times.chunks_final]
    reports = [record.times.released for record in sinks if record.times.released is not None]
    first = [record.times.first_post for record in posters if record.times.first_post is not None]
    last = [record.times.last_byte for record in posters if record.times.last_byte is not None]
    outcomes = sorted({record.outcome for record in records})
    told = Transfer(
        bytes=size,
        descriptors=sum(record.descriptors for record in posters),
        tokens=max((record.tokens for record in sinks), default=0),
        outcome="+".join(outcomes) if sources and sinks else "one side has no record",
        backend="+".join(sorted({record.backend for record in posters})),
        moving=max(last) - min(first) if first and last else None,
        reason="; ".join(sorted({record.reason for record in records if record.outcome != "done"})),
    )
    if one_host and fences and reports:
        told.fence_to_report = max(reports) - max(fences)
    if size and fences and (one_host or all(record.side == "source" for record in posters)):
        told.early = sum(record.completed_by(max(fences)) for record in posters) / size
    if here:
        heard = [record.times.expected for record in sources if record.times.expected is not None]
        ends = {"heard": heard, "computed": fences, "posted": first, "moved": last, "reported": reports}
        # All ranks together: the first that posts, and the last of everything else.
        told.moments = {name: (min if name == "posted" else max)(times) for name, times in ends.items() if times}
    return told


def layout(cache: CacheMap) -> str:
    """Say how a cache lies: ``block-major`` where all layers of a block are one run of memory, else ``layer-major``."""
    planes = [plane for group in cache.groups for plane in group.planes]
    within = all(max(plane.bases) - min(plane.bases) < plane.block_stride for plane in planes)
    several = any(len(plane.bases) > 1 for plane in planes)
    return "block-major" if within and several else "layer-major"


def layouts(arm: Arm) -> list[str]:
    """Return the layouts that kvxfer found at the arm's engines, without doubles; none where it cannot be asked."""
    if not arm.name.ours or not all(engine.control_port for engine in arm.engines):
        return []
    reports = [fetch_records(engine.control_host, engine.control_port, last=0) for engine in arm.engines]
    return sorted({layout(rank.cache) for report in reports for rank in report.ranks})

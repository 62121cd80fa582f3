"""``kvxfer bench stream``: how much of a prompt's KV has moved before prefill has computed the last of it, and how soon the rest.

One pair after another on the same machine, equal but for the connector, gets the same prompts in the same chunks, one at a time;
both legs are sent at once. Of each handoff:

* *early*: the share of its bytes whose transfers had **completed** before the fence of the last chunk, by the source's handoff
  record. Upstream begins when the prompt is computed, so it has none, and no record either.
* *tail*: from the moment at which prefill has computed the last chunk until decode's engine hears that all is there, by the same
  two hooks of either connector (``stream_moments``).
* *fence to report*: the same by kvxfer's own records, without the engines' steps: from the last chunk's fence as the mover
  saw it to the moment at which decode's mover was sure.

Decode's answers are compared, too: each connector must have moved the same KV. A pair in which a handoff fails is brought up
anew and goes on with the handoffs that are left, and that is told: over tcp, upstream's may hang while two agents shake hands.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.bench import stream_moments
from kvxfer.bench.engines import UPSTREAM_PREFIX, make_engine, named_connector, named_pair
from kvxfer.bench.handoffs import Pair
from kvxfer.bench.model import build, prompt_tokens
from kvxfer.bench.process import free_ports, running
from kvxfer.bench.results import report
from kvxfer.bench.stream_report import Sample, as_json, line, summary, verdicts
from kvxfer.errors import KvxferError
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvxfer.bench.engines import Engine, EngineSpec
    from kvxfer.transport.records import HandoffRecord

_MODULE = "kvxfer.bench.stream_timed"
_WARM_UP = 2
_WARM_UPS = 1_000_000  # the number of the first such prompt
_FAILURES = 8  # of one connector
_PATIENCE = 60.0  # seconds for a prompt in many chunks, on a machine that is busy with other things, too
_ENDED, _LOOK = 15.0, 0.02  # seconds for which a record may stay open, and between two looks


@dataclass(frozen=True, slots=True)
class Settings:
    """What is sent: prompts of ``prompt`` tokens, computed ``budget`` tokens a step."""

    repeats: int = 20
    prompt: int = 6000
    budget: int = 512
    answer: int = 8


@dataclass(slots=True)
class Findings:
    """What was found of one connector so far: of each prompt, a sample and decode's answer.

    ``failed``: why pairs were brought up anew.
    """

    samples: list[Sample] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Measurement:
    """One life of a pair: hands over what is left. ``moments``: where its prefill and its decode worker note theirs."""

    pair: Pair
    moments: tuple[Path, Path]
    settings: Settings
    recorded: bool

    async def execute(self, findings: Findings) -> None:
        """Hand the prompts over that are missing in ``findings``. Raises KvxferError when one fails; the others are kept."""
        for number in range(_WARM_UP):
            await self._one(_WARM_UPS + number)
        while len(findings.samples) < self.settings.repeats:
            sample, answer = await self._one(len(findings.samples))
            findings.samples.append(sample)
            findings.answers.append(answer)

    async def _one(self, number: int) -> tuple[Sample, tuple[int, ...]]:
        asked = time.monotonic()
        answer = await self.pair.hand_over(prompt_tokens(self.settings.prompt, number), self.settings.answer)
        return await self._sample(asked), answer.decode.token_ids

    async def _sample(self, asked: float) -> Sample:
        tail, chunks = self._tail(asked)
        if not self.recorded:
            return Sample(tail, chunks)
        source, sink = await asyncio.to_thread(self._records)
        fence, released = source.times.chunks_final[-1], sink.times.released
        assert released is not None, "it has ended"
        return Sample(tail, chunks, source.bytes, source.completed_by(fence), released - fence, source.descriptors)

    def _tail(self, asked: float) -> tuple[float, int]:
        """Return the seconds from the prompt's end to its receipt, and in how many steps it was computed."""
        computed, received = (
            [one.at for one in stream_moments.read(where) if one.at >= asked and one.what == what]
            for where, what in zip(self.moments, (stream_moments.COMPUTED, stream_moments.RECEIVED), strict=True)
        )
        if len(received) != 1 or not computed:
            raise KvxferError(
                f"{self.pair.decode.spec.name} received {len(received)} prompts, and {self.pair.prefill.spec.name} made "
                f"{len(computed)} steps, where one prompt was handed over"
            )
        return received[0] - computed[-1], len(computed)

    def _records(self) -> tuple[HandoffRecord, HandoffRecord]:
        """Return both sides' record of the last handoff, once both have ended it."""
        deadline = time.monotonic() + _ENDED
        while True:
            source, sink = (_last(engine) for engine in (self.pair.prefill, self.pair.decode))
            if source and sink and source.handoff == sink.handoff and source.outcome == sink.outcome == "done":
                return source, sink
            if time.monotonic() > deadline:
                raise KvxferError(f"a handoff did not end well: source {source}, sink {sink}")
            time.sleep(_LOOK)


def _last(engine: Engine) -> HandoffRecord | None:
    records = fetch_records(engine.control_host, engine.control_port, last=1).records
    return records[0] if records else None


def specs_for(connector: str, model: Path, python: str, budget: int) -> tuple[EngineSpec, EngineSpec]:
    """Return a pair with the push connector of that name, timed."""
    if named_connector(connector)[0] != "push":
        raise KvxferError(f"{connector} does not push: only what is written can be written early")
    return named_pair(connector, model, python=python, connector_module=_MODULE, max_num_batched_tokens=budget)


def run(
    connectors: Sequence[str],
    logs: Path,
    python: str,
    settings: Settings,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure each connector; what ``--json`` writes."""
    model = build()
    pairs = {connector: specs_for(connector, model, python, settings.budget) for connector in connectors}
    all_findings: dict[str, Findings] = {}
    for connector, (prefill, decode) in pairs.items():
        findings = all_findings[connector] = Findings()
        while len(findings.samples) < settings.repeats:
            life = len(findings.failed) + 1
            try:
                _live(connector, prefill, decode, logs / f"life{life}", settings, findings)
            except KvxferError as error:
                findings.failed.append(str(error))
                if life > _FAILURES:
                    raise
                say(f"{connector}: its pair is brought up anew: {error}")
        say(line(connector, findings.samples))
    first = all_findings[connectors[0]].answers
    found = {
        name: {
            **summary(one.samples),
            "same_answers": sum(map(tuple.__eq__, one.answers, first)),
            "failed": one.failed,
        }
        for name, one in all_findings.items()
    }
    bounds = as_json(verdicts(found, prompts=len(first)))
    return report("stream", dataclasses.asdict(settings), python, connectors=found, bounds=bounds)


def _live(
    connector: str, prefill: EngineSpec, decode: EngineSpec, logs: Path, settings: Settings, findings: Findings
) -> None:
    """Bring one pair up, measure what is left, and take it down."""
    ports = free_ports(4)
    moments = logs / "moments" / prefill.name, logs / "moments" / decode.name
    first, second = (
        make_engine(
            dataclasses.replace(spec, environment={stream_moments.DIRECTORY: str(where)}), logs, ports[at : at + 2]
        )
        for spec, where, at in ((prefill, moments[0], 0), (decode, moments[1], 2))
    )

    async def measure() -> None:
        async with Pair("push", first, second, timeout=_PATIENCE) as pair:
            recorded = not connector.startswith(UPSTREAM_PREFIX)
            await Measurement(pair, moments, settings, recorded=recorded).execute(findings)

    with running(first.server, second.server):
        asyncio.run(measure())

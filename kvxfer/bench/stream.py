"""``kvxfer bench stream``: how much of a prompt's KV has moved before prefill has computed the last of it, and how soon the rest.

One pair after another on the same machine, equal but for the connector, gets the same prompts in the same chunks, one at a time;
both legs are sent at once. Of each handoff:

* *early*: the share of its bytes whose transfers had **completed** before the fence of the last chunk, by the source's handoff
  record. Upstream begins when the prompt is computed, so it has none, and no record either.
* *tail*: from the moment at which prefill has computed the last chunk until decode's engine hears that all is there, by the same
  two hooks of either connector (``stream_moments``).
* *fence to report*: the same by kvxfer's own records, without the engines' steps: from the last chunk's fence as the mover
  saw it to the moment at which decode's mover was sure.

Decode's answers are compared, too: each connector must have moved the same KV. A connector one of whose handoffs fails is
begun anew, with new engines and all of its handoffs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.bench import stream_moments
from kvxfer.bench.client import Client
from kvxfer.bench.engines import UPSTREAM_PREFIX, make_engine, named_connector, named_pair
from kvxfer.bench.handoffs import Pair
from kvxfer.bench.machine import machine, versions
from kvxfer.bench.model import build, prompt_tokens
from kvxfer.bench.process import free_ports, running
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
_TURNS = 3  # for each connector: a first handoff of upstream's hangs when its handshake takes longer than 5 s
_PATIENCE = 300.0  # seconds for a prompt in many chunks, on a machine that is busy with other things, too
_ENDED, _LOOK = 15.0, 0.02  # seconds for which a record may stay open, and between two looks


@dataclass(frozen=True, slots=True)
class Settings:
    """What is sent: prompts of ``prompt`` tokens, computed ``budget`` tokens a step."""

    repeats: int = 20
    prompt: int = 6000
    budget: int = 512
    answer: int = 8


@dataclass(slots=True)
class Measurement:
    """All handoffs of one pair. ``moments``: where its prefill and its decode worker note theirs."""

    pair: Pair
    moments: tuple[Path, Path]
    settings: Settings
    recorded: bool
    answers: list[tuple[int, ...]] = field(default_factory=list, init=False)

    async def execute(self) -> list[Sample]:
        """Hand all prompts over; those that warm up are left out."""
        return [await self._one(number) for number in range(_WARM_UP + self.settings.repeats)][_WARM_UP:]

    async def _one(self, number: int) -> Sample:
        asked = time.monotonic()
        answer = await self.pair.hand_over(prompt_tokens(self.settings.prompt, number), self.settings.answer)
        self.answers.append(answer.decode.token_ids)
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
    samples: dict[str, list[Sample]] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for connector, (prefill, decode) in pairs.items():
        for turn in range(1, _TURNS + 1):
            try:
                samples[connector], answers[connector] = _measured(
                    connector, prefill, decode, logs / f"turn{turn}", settings
                )
                break
            except KvxferError as error:
                if turn == _TURNS:
                    raise
                say(f"{connector} is begun anew: {error}")
        say(line(connector, samples[connector]))
    first = answers[connectors[0]]
    found = {
        name: {**summary(samples[name]), "same_answers": sum(map(tuple.__eq__, answers[name], first))} for name in pairs
    }
    return {
        "connectors": found,
        "bounds": as_json(verdicts(found, prompts=len(first))),
        "settings": dataclasses.asdict(settings),
        "versions": versions(python),
        "machine": machine(),
    }


def _measured(
    connector: str, prefill: EngineSpec, decode: EngineSpec, logs: Path, settings: Settings
) -> tuple[list[Sample], list[tuple[int, ...]]]:
    ports = free_ports(4)
    moments = logs / "moments" / prefill.name, logs / "moments" / decode.name
    first, second = (
        make_engine(
            dataclasses.replace(spec, environment={stream_moments.DIRECTORY: str(where)}), logs, ports[at : at + 2]
        )
        for spec, where, at in ((prefill, moments[0], 0), (decode, moments[1], 2))
    )

    async def measure() -> tuple[list[Sample], list[tuple[int, ...]]]:
        pair = Pair("push", first, second)
        pair.to_prefill, pair.to_decode = (Client(engine.url, timeout=_PATIENCE) for engine in (first, second))
        async with pair:
            one = Measurement(pair, moments, settings, recorded=not connector.startswith(UPSTREAM_PREFIX))
            return await one.execute(), one.answers

    with running(first.server, second.server):
        return asyncio.run(measure())

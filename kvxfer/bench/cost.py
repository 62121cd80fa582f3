"""``kvxfer bench engine``: what the connector's calls cost the threads of two live engines, kvxfer's and upstream's in one run.

One pair after another on the same machine, equal but for the connector, gets the same requests, one at a time. Every call of the
connector by vLLM is counted with its processor time in the calling thread (``counted``, ``calls``), on decode and on prefill:

* *requests*: ``repeats`` handoffs of one length; their mean is the figure.
* *lengths*: handoffs of a short and of a long prompt. The decode leg follows prefill's answer here, in push too: an
  engine that waits for somebody's computation makes a step every 1 to 1.3 ms, which would measure how long prefill computes.
* *windows*: streams that decode by themselves, while nothing else goes on (``quiet``), while prefill computes prompts that nobody
  wants (``computing``), and while it computes them and hands them over (``handoffs``). Two engines on few cores disturb each
  other by computing alone, so handoffs are held against *computing*: what is slower there is what a counter of processor
  time misses, such as a thread that keeps the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.bench.calls import DIRECTORY, SCHEDULER, STEP, headers, read
from kvxfer.bench.cost_report import as_json, side, spread, verdicts
from kvxfer.bench.engines import make_engine, named_connector, pair_specs
from kvxfer.bench.handoffs import Pair
from kvxfer.bench.machine import machine, versions
from kvxfer.bench.model import build, prompt_tokens
from kvxfer.bench.process import free_ports, running

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from kvxfer.bench.calls import Reading
    from kvxfer.bench.engines import EngineSpec

WINDOWS = ("quiet", "computing", "handoffs")
_MODULE = "kvxfer.bench.counted"
_WARM_UP = 3
_STREAM_PROMPT = 64
_AT_REST, _REST_TIMEOUT = 0.06, 5.0  # seconds without a step, and how long to wait for that


@dataclass(frozen=True, slots=True)
class Settings:
    """What is sent. Lengths in tokens; ``stream_tokens`` are those of each of ``streams`` streams in a window."""

    repeats: int = 50
    prompt: int = 4096
    answer: int = 8
    lengths: tuple[int, ...] = (1024, 8192)
    length_repeats: int = 20
    rounds: int = 3
    streams: int = 2
    stream_tokens: int = 600


@dataclass(slots=True)
class _Window:
    """All windows of a kind: seconds between tokens, and of each prefill."""

    gaps: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens": len(self.gaps), "prompts": len(self.prefills)}
        for name, seconds in (("itl_ms", self.gaps), ("prefill_ms", self.prefills)):
            if seconds:
                found[name] = spread([one * 1e3 for one in seconds], 3)
        return found


class Measurement:
    """All measurements of one pair."""

    def __init__(self, pair: Pair, counters: dict[str, Path], settings: Settings) -> None:
        self._pair = pair
        self._counters = counters
        self._settings = settings
        self._prompts = 0
        self._ending = False

    async def execute(self) -> dict[str, Any]:
        """Measure everything; what ``--json`` has for this connector."""
        settings = self._settings
        for _ in range(_WARM_UP):
            await self._one(settings.prompt)
        whole = [await self._one(settings.prompt) for _ in range(settings.repeats)]
        by_length = {
            str(length): [await self._one(length, follow=True) for _ in range(settings.length_repeats)]
            for length in settings.lengths
        }
        windows = {name: _Window() for name in WINDOWS}
        for _ in range(settings.rounds):
            for name in WINDOWS:
                await self._window(name, windows[name])
        sides = [
            {where: side([one[where] for one in found]) for where in self._counters} for found in by_length.values()
        ]
        return {
            **{where: side([one[where] for one in whole]) for where in self._counters},
            "lengths": dict(zip(by_length, sides, strict=True)),
            "windows": {name: window.report() for name, window in windows.items()},
            "counters": {where: headers(directory) for where, directory in self._counters.items()},
        }

    async def _one(self, length: int, *, follow: bool = False) -> dict[str, Reading]:
        """Hand one prompt over, and return what each engine counted for it."""
        before = await self._at_rest()
        await self._pair.hand_over(self._prompt(length), self._settings.answer, follow=follow)
        after = await self._at_rest()
        return {where: after[where].since(before[where]) for where in before}

    async def _at_rest(self) -> dict[str, Reading]:
        """Wait until neither engine makes steps, and read."""
        deadline = time.monotonic() + _REST_TIMEOUT
        readings = self._read()
        while time.monotonic() < deadline:
            await asyncio.sleep(_AT_REST)
            last, readings = readings, self._read()
            if all(readings[where].calls(SCHEDULER, STEP) == last[where].calls(SCHEDULER, STEP) for where in last):
                break
        return readings

    def _read(self) -> dict[str, Reading]:
        return {where: read(directory) for where, directory in self._counters.items()}

    async def _window(self, name: str, window: _Window) -> None:
        """Stream, with that going on beside; adds to ``window``."""
        settings = self._settings
        beside: dict[str, Callable[[], Awaitable[float]]] = {"computing": self._compute, "handoffs": self._hand_over}
        busy = asyncio.create_task(self._again_and_again(beside[name], window)) if name in beside else None
        streams = [
            self._pair.to_decode.complete(self._prompt(_STREAM_PROMPT), settings.stream_tokens)
            for _ in range(settings.streams)
        ]
        try:
            for one in await asyncio.gather(*streams):
                window.gaps += one.gaps
        finally:
            if busy is not None:
                self._ending = True
                await busy
        await self._at_rest()

    async def _again_and_again(self, action: Callable[[], Awaitable[float]], window: _Window) -> None:
        self._ending = False
        while not self._ending:
            window.prefills.append(await action())

    async def _compute(self) -> float:
        return (await self._pair.compute(self._prompt(self._settings.prompt))).seconds

    async def _hand_over(self) -> float:
        return (await self._pair.hand_over(self._prompt(self._settings.prompt), 1)).prefill.seconds

    def _prompt(self, length: int) -> list[int]:
        """Return a prompt that was not sent before."""
        self._prompts += 1
        return prompt_tokens(length, self._prompts)


def specs_for(connector: str, model: Path, python: str) -> tuple[EngineSpec, EngineSpec]:
    """Return a pair with the connector of that name, counted; upstream's and kvxfer's differ in nothing else."""
    mode, class_name = named_connector(connector)
    prefill, decode = pair_specs(mode, model, python=python, connector_module=_MODULE)
    return (
        dataclasses.replace(prefill, name=f"{connector}-prefill", connector=class_name),
        dataclasses.replace(decode, name=f"{connector}-decode", connector=class_name),
    )


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
    pairs = {connector: specs_for(connector, model, python) for connector in connectors}
    found: dict[str, dict[str, Any]] = {}
    for connector, (prefill, decode) in pairs.items():
        found[connector] = _measured(connector, prefill, decode, logs, settings)
        say(connector)
    return {
        "connectors": found,
        "bounds": as_json(verdicts(found)),
        "settings": dataclasses.asdict(settings),
        "versions": versions(python),
        "machine": machine(),
    }


def _measured(
    connector: str, prefill: EngineSpec, decode: EngineSpec, logs: Path, settings: Settings
) -> dict[str, Any]:
    counters = {where: logs / "calls" / spec.name for where, spec in (("decode", decode), ("prefill", prefill))}
    ports = free_ports(4)
    first, second = (
        make_engine(dataclasses.replace(spec, environment={DIRECTORY: str(counters[where])}), logs, ports[at : at + 2])
        for where, spec, at in (("prefill", prefill, 0), ("decode", decode, 2))
    )

    async def measure() -> dict[str, Any]:
        async with Pair(named_connector(connector)[0], first, second) as pair:
            return await Measurement(pair, counters, settings).execute()

    with running(first.server, second.server):
        return asyncio.run(measure())

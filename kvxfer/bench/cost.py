"""``kvxfer bench engine``: what the connector's calls cost the threads of two live engines, kvxfer's and upstream's in one run.

Pairs that are equal but for the connector get the same requests, one at a time; only one pair is up at any time. All of
them take turns, ``passes`` times over, so that what changes on the machine meanwhile changes for all of them. Every call of
the connector by vLLM is counted with its processor time in the calling thread (``counted``, ``calls``), on decode and on prefill:

* *requests*: ``repeats`` handoffs of one length, sent as their proxies send them, with a short answer; the mean is the figure.
* *served*: such handoffs with an answer as long as in the published comparison: what a step of an engine costs that decodes.
* *lengths*: handoffs of that, a shorter and a longer length, whose decode leg follows prefill's answer, in push too: an
  engine that waits for somebody's computation makes a step every 1 to 1.3 ms, and that would measure how long prefill computes.
* *windows*: streams that decode by themselves, while nothing else goes on (``quiet``), while prefill computes prompts that nobody
  wants (``computing``), and while it computes them and hands them over (``handoffs``). Two engines on few cores disturb each
  other by computing alone, so handoffs are held against *computing*: what is slower there is what a counter of processor
  time misses, such as a thread that keeps the interpreter's lock. The times are the workers' own (``spans``): an API server
  that shares the cores with two engines sends tokens in bursts.

The model has as many layers as asked for and is as thin as can be, so that both engines compute for a short time only: what
a connector does depends on the number of blocks and layers, not on their size. A pair in which a request fails is brought up
anew and goes on with what is left, and that is told; after some failures of upstream's pair its turn is over. Upstream's first
handoff hangs when its handshake takes longer than 5 s, as on a busy machine, and its engines go on stepping for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.bench import spans
from kvxfer.bench.calls import DIRECTORY, SCHEDULER, STEP, headers, read
from kvxfer.bench.cost_report import RECORDING, SIDES, as_json, side, spread, verdicts
from kvxfer.bench.engines import UPSTREAM_PREFIX, make_engine, named_connector, named_pair
from kvxfer.bench.handoffs import Pair
from kvxfer.bench.model import Recipe, build, prompt_tokens
from kvxfer.bench.process import free_ports, running
from kvxfer.bench.results import report
from kvxfer.errors import ConfigError, KvxferError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from kvxfer.bench.calls import Reading
    from kvxfer.bench.engines import EngineSpec

WINDOWS = ("quiet", "computing", "handoffs")
_MODULE = "kvxfer.bench.counted"
_WARM_UP = 3
_STREAM_PROMPT = 64
_AT_REST, _REST_TIMEOUT = 0.06, 1.0  # seconds without a step, and how long to wait for that
_FAILURES = 5  # in a turn


@dataclass(frozen=True, slots=True)
class Settings:
    """What is sent to each connector's pair, over all passes. Lengths in tokens.

    ``served`` handoffs with ``served_answer`` tokens; ``length_repeats`` of each of ``lengths``; ``rounds`` windows of each kind,
    in each of which ``streams`` streams have ``stream_tokens`` tokens each, again and again until ``window_prompts`` prompts were
    computed beside them, where any are.
    """

    repeats: int = 50
    prompt: int = 4096
    answer: int = 8
    served: int = 10
    served_answer: int = 128
    lengths: tuple[int, ...] = (1024, 8192)
    length_repeats: int = 20
    rounds: int = 4
    streams: int = 2
    stream_tokens: int = 400
    window_prompts: int = 6
    passes: int = 2
    layers: int = 4

    def until(self, turn: int) -> Settings:
        """Return how much shall have been done after a pass, counted from 0; after the last one, all of it."""
        shares = {
            name: -(-getattr(self, name) * (turn + 1) // self.passes)
            for name in ("repeats", "served", "length_repeats", "rounds")
        }
        return dataclasses.replace(self, **shares)

    def recipe(self) -> Recipe:
        """Return the model."""
        ones = (1.0,) * self.layers
        return Recipe(
            name="thin-qwen3",
            hidden=64,
            intermediate=128,
            q_heads=2,
            kv_heads=1,
            head_dim=32,
            sharpness=ones,
            attention_gain=ones,
        )


@dataclass(slots=True)
class Window:
    """All windows of a kind: how many, prompts computed in them; nanoseconds between decode's steps, and of prefill's."""

    rounds: int = 0
    prompts: int = 0
    gaps: list[int] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)

    def add(self, decode: Sequence[tuple[int, int]], prefill: Sequence[tuple[int, int]]) -> None:
        """Add the steps that both engines computed in one of them, as (begin, end)."""
        self.rounds += 1
        self.gaps += [after - before for (before, _), (after, _) in itertools.pairwise(decode)]
        self.prefills += [end - begin for begin, end in prefill]

    def report(self) -> dict[str, Any]:
        """What ``--json`` has of it."""
        found: dict[str, Any] = {"tokens": len(self.gaps), "prompts": self.prompts}
        for name, each in (("itl_ms", self.gaps), ("prefill_ms", self.prefills)):
            if each:
                found[name] = spread([one / 1e6 for one in each], 3)
        return found


@dataclass(slots=True)
class Findings:
    """What was read of one connector so far: of each request, what each engine counted for it.

    ``failed``: why pairs were brought up anew.
    """

    failed: list[str] = field(default_factory=list)
    requests: list[Mapping[str, Reading]] = field(default_factory=list)
    served: list[Mapping[str, Reading]] = field(default_factory=list)
    lengths: dict[int, list[Mapping[str, Reading]]] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=lambda: {name: Window() for name in WINDOWS})
    counters: list[dict[str, Any]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """What ``--json`` has of this connector."""
        return {
            **_sides(self.requests),
            "served": _sides(self.served) if self.served else {},
            "lengths": {str(length): _sides(found) for length, found in self.lengths.items() if found},
            "windows": {name: window.report() for name, window in self.windows.items()},
            "failed": self.failed,
            "counters": self.counters,
        }


def _sides(requests: Sequence[Mapping[str, Reading]]) -> dict[str, Any]:
    return {where: side([one[where] for one in requests]) for where in SIDES}


class Measurement:
    """One life of a pair: does what is left of ``settings``, and adds to ``findings``.

    ``seed`` makes its prompts others than those of the lives before.
    """

    def __init__(
        self, pair: Pair, counters: Mapping[str, Path], settings: Settings, findings: Findings, seed: int = 0
    ) -> None:
        self._pair = pair
        self._counters = counters
        self._settings = settings
        self._findings = findings
        self._prompts = seed
        self._ending = False

    async def execute(self) -> None:
        """Measure. Raises KvxferError when a request fails; what was found before that is kept."""
        settings, findings = self._settings, self._findings
        for where, directory in self._counters.items():
            findings.counters += [{"engine": where, **header} for header in headers(directory)]
        for _ in range(_WARM_UP):
            await self._one(settings.prompt, settings.answer)  # and the engines are at rest behind it, or nearly so
        while len(findings.requests) < settings.repeats:
            findings.requests.append(await self._one(settings.prompt, settings.answer))
        while len(findings.served) < settings.served:
            findings.served.append(await self._one(settings.prompt, settings.served_answer))
        for length in sorted({settings.prompt, *settings.lengths}):
            found = findings.lengths.setdefault(length, [])
            while len(found) < settings.length_repeats:
                found.append(await self._one(length, settings.answer, follow=True))
        while (name := min(WINDOWS, key=lambda name: findings.windows[name].rounds)) and (
            findings.windows[name].rounds < settings.rounds
        ):
            await self._window(name, findings.windows[name])

    async def _one(self, length: int, answer: int, *, follow: bool = False) -> dict[str, Reading]:
        """Hand one prompt over, and return what each engine counted for it.

        An engine that goes on stepping when all are answered, as upstream's prefill until it hears that its blocks were read, is
        not waited for for long. Its last steps are counted for the next request then, which the mean does not show.
        """
        before = self._read()
        await self._pair.hand_over(self._prompt(length), answer, follow=follow)
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

    async def _window(self, name: str, window: Window) -> None:
        """Stream, with that going on beside; adds to ``window``."""
        settings = self._settings
        beside: dict[str, Callable[[], Awaitable[object]]] = {"computing": self._compute, "handoffs": self._hand_over}
        begin = time.monotonic_ns()
        enough = window.prompts + settings.window_prompts if name in beside else 0
        busy = asyncio.create_task(self._again_and_again(beside[name], window)) if name in beside else None
        try:
            while True:
                streams = [
                    self._pair.to_decode.complete(self._prompt(_STREAM_PROMPT), settings.stream_tokens)
                    for _ in range(settings.streams)
                ]
                await asyncio.gather(*streams)
                if window.prompts >= enough or (busy is not None and busy.done()):
                    break
            end = time.monotonic_ns()
        finally:
            if busy is not None:
                self._ending = True
                await busy
        window.add(*(spans.read(self._counters[where], begin, end) for where in SIDES))
        await self._at_rest()

    async def _again_and_again(self, action: Callable[[], Awaitable[object]], window: Window) -> None:
        self._ending = False
        while not self._ending:
            await action()
            window.prompts += 1

    async def _compute(self) -> object:
        return await self._pair.compute(self._prompt(self._settings.prompt))

    async def _hand_over(self) -> object:
        return await self._pair.hand_over(self._prompt(self._settings.prompt), 1)

    def _prompt(self, length: int) -> list[int]:
        """Return a prompt that was not sent before."""
        self._prompts += 1
        return prompt_tokens(length, self._prompts)


def specs_for(connector: str, model: Path, python: str) -> tuple[EngineSpec, EngineSpec]:
    """Return a pair with the connector of that name, counted. Raises ConfigError for an option that there is not."""
    name, _, option = connector.partition(":")
    if option not in ("", RECORDING) or (option and name.startswith(UPSTREAM_PREFIX)):
        raise ConfigError(f"connector {connector!r}: behind a colon is {RECORDING!r}, of kvxfer's own connectors")
    return named_pair(name, model, python=python, connector_module=_MODULE, dtype="bfloat16")


def run(
    connectors: Sequence[str],
    logs: Path,
    python: str,
    settings: Settings,
    *,
    say: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure each connector; what ``--json`` writes. ``keep`` is given what is known after each turn and failure."""
    model = build(settings.recipe())
    pairs = {connector: specs_for(connector, model, python) for connector in connectors}
    findings = {connector: Findings() for connector in connectors}
    lives = itertools.count(1)
    for turn in range(settings.passes):
        for connector, (prefill, decode) in pairs.items():
            one = findings[connector]
            for failures in range(_FAILURES + 1):
                life = next(lives)
                say(f"pass {turn + 1} of {settings.passes}: {connector}")
                try:
                    _live(
                        connector,
                        prefill,
                        decode,
                        logs / f"{life}-{connector}",
                        settings.until(turn),
                        one,
                        life * 100_000,
                    )
                    break
                except KvxferError as error:
                    say(f"failed: {error}")
                    one.failed.append(str(error))
                    keep(_result(findings, settings, python))
                    if failures == _FAILURES and not connector.startswith(UPSTREAM_PREFIX):
                        raise
            keep(_result(findings, settings, python))
    return _result(findings, settings, python)


def _result(findings: Mapping[str, Findings], settings: Settings, python: str) -> dict[str, Any]:
    """Report on all connectors that have had a turn."""
    found = {connector: one.report() for connector, one in findings.items() if one.requests}
    return report("engine", dataclasses.asdict(settings), python, connectors=found, bounds=as_json(verdicts(found)))


def _live(
    connector: str,
    prefill: EngineSpec,
    decode: EngineSpec,
    logs: Path,
    settings: Settings,
    findings: Findings,
    seed: int,
) -> None:
    """Bring one pair up, measure what is left to be measured, and take it down."""
    counters = {where: logs / "calls" / where for where in SIDES}
    ports = free_ports(4)
    name, _, records = connector.partition(":")
    first, second = (
        make_engine(
            dataclasses.replace(
                spec,
                environment={DIRECTORY: str(counters[where])},
                connector_config={
                    **spec.connector_config,
                    **({"records_dir": str(logs / "records")} if records else {}),
                },
            ),
            logs,
            ports[at : at + 2],
        )
        for where, spec, at in (("prefill", prefill, 0), ("decode", decode, 2))
    )

    async def measure() -> None:
        async with Pair(named_connector(name)[0], first, second) as pair:
            await Measurement(pair, counters, settings, findings, seed).execute()

    with running(first.server, second.server):
        asyncio.run(measure())

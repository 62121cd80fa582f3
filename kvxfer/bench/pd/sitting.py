"""A sitting: who is up when, whose turn it is, and what is kept.

*Together*: the engines of all arms are up at once, on devices that they share, and the arms take turns request by request
(unloaded) or window by window (loaded), each time another one first. Whatever disturbs the machine disturbs all of them. It takes
memory for all, and engines that use no processor of the device while they are idle.
*In turn*: one arm is up at a time and has its share, ``turns`` times over: for machines too small for the other.

What was measured is kept after each point. A pair of upstream's that does not start, or fails again and again, leaves the
sitting, and that is told; one of ours ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvxfer.bench.pd import points, verify
from kvxfer.bench.pd.arms import ALONE
from kvxfer.bench.pd.window import HITS, Line, Sample, layouts
from kvxfer.bench.process import ServerError
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvxfer.bench.pd.arms import Arm
    from kvxfer.bench.pd.points import Planned, Point

_FAILURES: Final = 4
"""Requests of one arm that may fail one after another."""
_WARM_OUTPUT, _WARM_CROWD = 4, 4
_BETWEEN = 0.02  # seconds between two arms' requests, in which the engines of the first come to rest
_SLACK, _DRAIN = 1.3, 3.0  # how much longer a window takes than its arrivals: by a factor, and in seconds


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sitting does. Times in seconds; ``limit`` is for all of it, engines' start included, None for none."""

    unloaded: Sequence[Point] = ()
    loaded: Sequence[Point] = ()
    load_rounds: int = 1
    load_alone: bool = True
    turns: int = 1
    together: bool = True
    warm_up: int = 2
    seed: int = 0
    vocab: int = 1024
    timeout: float = 120.0
    limit: float | None = None
    verification: verify.Plan | None = None
    expected_layout: str = ""


@dataclass(slots=True)
class Window:
    """What one arm did at one point in one go. ``counted``: what its engines counted meanwhile."""

    turn: int
    samples: list[Sample]
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def prefix_hits(self) -> int:
        """Tokens that a prefix cache had."""
        return round(self.counted.get(HITS, 0.0))


@dataclass(slots=True)
class Findings:
    """All that is known so far. ``windows``: by point, then by arm. ``skipped``: for want of time."""

    windows: dict[str, dict[str, list[Window]]] = field(default_factory=dict)
    layouts: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    answers: dict[str, verify.Answers] = field(default_factory=dict)
    start_seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, point: Point, arm: Arm, window: Window) -> None:
        """Keep what an arm did at a point."""
        if window.samples:
            self.windows.setdefault(point.name, {}).setdefault(arm.label, []).append(window)


@dataclass(slots=True)
class Sitting:
    """Measures arms by settings. ``say`` is told how it goes, ``keep`` is given what is known after each point."""

    arms: Sequence[Arm]
    settings: Settings
    say: Callable[[str], None]
    keep: Callable[[Findings], None]
    findings: Findings = field(default_factory=Findings, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _failures: dict[str, int] = field(default_factory=dict, init=False)

    def execute(self) -> Findings:
        """Run all of it. Raises KvxferError when an engine of ours, or one engine alone, fails."""
        for turn in range(self.settings.turns):
            groups = [list(self.arms)] if self.settings.together else [[arm] for arm in self.arms]
            for group in groups:
                present = [arm for arm in group if arm.label not in self.findings.dropped]
                if present and self._left() > 0:
                    with self._up(present) as ready:
                        asyncio.run(self._measure(turn, ready))
                    self.keep(self.findings)
        return self.findings

    def _left(self) -> float:
        limit = self.settings.limit
        return float("inf") if limit is None else limit - (time.monotonic() - self._began)

    @contextlib.contextmanager
    def _up(self, arms: Sequence[Arm]) -> Iterator[list[Arm]]:
        """Start the engines of all these arms at once, and hand out the arms that came up."""
        servers = [server for arm in arms for server in arm.servers]
        if servers:
            self.say(
                f"starting {len(servers)} engine{'s'[: len(servers) > 1]} of {', '.join(arm.label for arm in arms)}"
            )
        try:
            for server in servers:
                server.start()
            ready = []
            for arm in arms:
                try:
                    self.findings.start_seconds[arm.label] = [server.wait_ready() for server in arm.servers]
                except ServerError as error:
                    self._drop(arm, str(error))
                else:
                    ready.append(arm)
            yield ready
        finally:
            for server in servers:
                server.ask_to_stop()
            for server in servers:
                server.stop()
                server.renew()

    def _drop(self, arm: Arm, reason: str) -> None:
        if arm.name.ours or arm.name.connector == ALONE:
            raise KvxferError(f"{arm.label}: {reason}")
        self.findings.dropped[arm.label] = reason
        self.say(f"{arm.label} leaves the sitting: {reason}")

    async def _measure(self, turn: int, arms: Sequence[Arm]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(Line(arm, self.settings.timeout)) for arm in arms]
            await asyncio.gather(*map(self._warm_up, lines))
            await self._look_at_layouts(lines)
            if self.settings.verification is not None and turn == 0:
                await self._verify(self.settings.verification, self._present(lines))
            for point in self.settings.unloaded:
                await self._unloaded(turn, point, self._present(lines))
            for number in range(turn * self.settings.load_rounds, (turn + 1) * self.settings.load_rounds):
                for point in self.settings.loaded:
                    await self._loaded(turn, number, point, self._present(lines))

    def _present(self, lines: Sequence[Line]) -> list[Line]:
        return [line for line in lines if line.arm.label not in self.findings.dropped]

    async def _warm_up(self, line: Line) -> None:
        """Connect, and let both engines compute each length once or twice, alone and a few at a time; nothing of it is kept."""
        settings = self.settings
        lengths = sorted({point.input for point in (*settings.unloaded, *settings.loaded)}) or [32]
        prompts = [
            points.tokens(length, (settings.seed, points.WARM_UP + 1, number), settings.vocab)
            for length in lengths
            for number in range(settings.warm_up + _WARM_CROWD)
        ]
        serial = [prompt for i, prompt in enumerate(prompts) if i % (settings.warm_up + _WARM_CROWD) < settings.warm_up]
        try:
            for prompt in serial:
                await line.answer(prompt, _WARM_OUTPUT)
            if settings.loaded:
                await asyncio.gather(
                    *(line.answer(prompt, _WARM_OUTPUT) for prompt in prompts[settings.warm_up :][:_WARM_CROWD])
                )
        except KvxferError as error:
            self._drop(line.arm, f"its first requests failed: {error}")

    async def _look_at_layouts(self, lines: Sequence[Line]) -> None:
        for line in lines:
            found = await asyncio.to_thread(layouts, line.arm)
            if found:
                self.findings.layouts[line.arm.label] = found
                self.say(f"{line.arm.label}: caches are {' and '.join(found)}")
                expected = self.settings.expected_layout
                if expected and found != [expected]:
                    raise KvxferError(
                        f"{line.arm.label}: caches are {' and '.join(found)}, not {expected} (--expect-layout)"
                    )

    async def _verify(self, plan: verify.Plan, lines: Sequence[Line]) -> None:
        for line in lines:
            if self._left() <= 0:
                self.findings.skipped.append(f"{line.arm.label}: comparing tokens")
                continue
            self.say(f"{line.arm.label}: comparing tokens, {plan.prompts} prompts one by one and {plan.crowd} at once")
            self.findings.answers[line.arm.label] = await verify.answers(
                line, plan, reference=line.arm.name.connector == ALONE
            )
            self.keep(self.findings)

    async def _unloaded(self, turn: int, point: Point, lines: Sequence[Line]) -> None:
        """Take a turn's share of the requests of a point, the arms one after the other with each of them."""
        settings = self.settings
        share = range(turn * point.requests // settings.turns, (turn + 1) * point.requests // settings.turns)
        before = [await line.counters() for line in lines]
        found: list[list[Sample]] = [[] for _ in lines]
        for number in share:
            if self._left() <= 0:
                self.findings.skipped.append(f"{point.name}: {share.stop - number} requests of each arm")
                break
            planned = points.one(point, number, seed=settings.seed, vocab=settings.vocab)
            for i in _rotated(len(lines), number):
                if lines[i].arm.label not in self.findings.dropped:
                    found[i].append(self._watched(lines[i], await lines[i].one(planned)))
                    await asyncio.sleep(_BETWEEN)
        for line, samples, counters in zip(lines, found, before, strict=True):
            self.findings.add(point, line.arm, Window(turn, samples, await self._since(line, counters)))
        self._done(point, lines)

    async def _loaded(self, turn: int, number: int, point: Point, lines: Sequence[Line]) -> None:
        """Take a window of a point on each arm, one arm after the other."""
        settings = self.settings
        planned: list[Planned] = points.window(point, number, seed=settings.seed, vocab=settings.vocab)
        if self._left() < len(lines) * (planned[-1].at * _SLACK + _DRAIN):
            self.findings.skipped.append(f"{point.name}: window {number + 1} of each arm")
            self.say(f"{point.name}: left out, there is no time")
            return
        lines = [line for line in lines if settings.load_alone or line.arm.name.connector != ALONE]
        for i in _rotated(len(lines), number + [one.name for one in settings.loaded].index(point.name)):
            line = lines[i]
            if line.arm.label in self.findings.dropped:
                continue
            before = await line.counters()
            samples = [self._watched(line, sample) for sample in await line.measure(planned)]
            self.findings.add(point, line.arm, Window(turn, samples, await self._since(line, before)))
            await asyncio.sleep(_BETWEEN)
        self._done(point, lines)

    async def _since(self, line: Line, before: dict[str, float]) -> dict[str, float]:
        if line.arm.label in self.findings.dropped:
            return {}
        return {name: value - before.get(name, 0.0) for name, value in (await line.counters()).items()}

    def _watched(self, line: Line, sample: Sample) -> Sample:
        """Count failures in a row; too many, or an engine that has ended, end the arm's part."""
        label = line.arm.label
        self._failures[label] = self._failures.get(label, 0) + 1 if sample.error else 0
        if sample.error:
            self.say(f"{label}: a request of {sample.input} tokens failed: {sample.error}")
            gone = [server.last_words() for server in line.arm.servers if not server.running()]
            if gone or self._failures[label] >= _FAILURES:
                self._drop(
                    line.arm, "; ".join(gone) or f"{self._failures[label]} requests in a row failed: {sample.error}"
                )
        return sample

    def _done(self, point: Point, lines: Sequence[Line]) -> None:
        for label in (line.arm.label for line in lines):
            windows = self.findings.windows.get(point.name, {}).get(label)
            told = [1e3 * one.ttft for one in windows[-1].samples if one.ttft is not None] if windows else []
            if told:
                median = statistics.median(told)
                self.say(f"{point.name:>12}  {label:<16} {len(told):>3} requests, TTFT median {median:8.1f} ms")
        self.keep(self.findings)


def _rotated(count: int, first: int) -> list[int]:
    return [(first + i) % count for i in range(count)]

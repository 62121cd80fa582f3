"""Early, late and adaptive choice of decode, compared without engines: queues, slots and transfers on a simulated clock.

The policies are the router's own objects (``kvxfer.router.policies``); what stands for the engines is as simple as queues are:

- a prefill engine computes one prompt after another, ``prefill_s`` a token;
- a decode engine has KV for so many tokens; a request that finds no room waits in the order of arrival. One that was chosen early
  holds its room while its prompt is computed;
- registration costs ``register_s``; push writes while prefill computes, so of an early request only the last chunk is left to
  be moved when prefill ends, of a late one everything, ``transfer_s`` a token;
- each step of decode makes one token for each of its streams; its length grows with their number, and a slow engine's is
  longer by a factor.

``docs/policies/timing.md`` says where each cost is from.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from yarl import URL

from kvxfer.router.engine import Engine, Told
from kvxfer.router.policies.admission import admits
from kvxfer.router.policies.asked import Asked
from kvxfer.router.policies.decode import SoonestToken
from kvxfer.router.policies.prefill import LeastWork
from kvxfer.router.policies.timing import Adaptive, Fixed, Timing
from kvxfer.router.settings import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WEIGHT = 0.1
_SHARE = 0.5
_MOST = 1.1


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds."""

    prefill_s: float = 1 / 20_000
    """A token of a prompt."""
    transfer_s: float = 1 / 60_000
    """A token's KV: 8B, 128 KiB a token, one 100 Gb/s rail at 65 %."""
    register_s: float = 0.0022
    """From decode's allocation to a posted transfer and back (``kvxfer bench latency``)."""
    step_s: float = 0.012
    stream_s: float = 0.00015
    """Of a step, for each stream in it."""
    chunk: int = 2048
    """Tokens of a prefill chunk: what an early handoff has left to move when prefill ends."""
    capacity: int = 120_000
    """KV tokens of a decode engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """One of a load."""

    at: float
    prompt: int
    output: int


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way."""

    request: Request
    asked: Asked
    late: bool = False
    context: Any = None
    prefill: Engine | None = None
    decode: Engine | None = None
    prefill_sent: float = 0.0
    prefill_end: float | None = None
    room_at: float | None = None
    first: float | None = None


@dataclass(eq=False, slots=True)
class Decode:
    """A decode engine's cache and queue."""

    engine: Engine
    capacity: int
    slow: float = 1.0
    free: int = 0
    waiting: list[Job] = field(default_factory=list)
    running: int = 0


class Simulation:
    """One run of one load under one timing policy."""

    def __init__(self, timing: Timing, costs: Costs, slow: tuple[float, ...], prefills: int = 2) -> None:
        self._costs = costs
        self._timing = timing
        self._prefill_policy, self._decode_policy = LeastWork(), SoonestToken()
        self._prefills = [Engine(Role.PREFILL, URL(f"http://p{number}:1")) for number in range(prefills)]
        self._busy = dict.fromkeys(self._prefills, 0.0)
        self._decodes = {}
        for number, factor in enumerate(slow):
            engine = Engine(Role.DECODE, URL(f"http://d{number}:1"))
            self._decodes[engine] = Decode(engine, costs.capacity, factor, costs.capacity)
        self._queue: list[Job] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0.0
        self.done: list[Job] = []

    def run(self, load: list[Request]) -> list[float]:
        """The times to first token, in order of arrival's end."""
        for request in load:
            self._at(request.at, lambda request=request: self._arrive(request))  # type: ignore[misc]
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        assert len(self.done) == len(load), "a request was never answered"
        return [job.first - job.request.at for job in self.done if job.first is not None]

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    def _arrive(self, request: Request) -> None:
        job = Job(request, Asked(request.prompt))
        job.late, job.context = self._timing.late(list(self._decodes), job.asked)
        if job.late:
            self._begin_prefill(job)
        else:
            self._admit(job)

    def _admit(self, job: Job | None = None) -> None:
        """As the router's admission: in order, and only where there is room."""
        if job is not None:
            self._queue.append(job)
        while self._queue:
            first = self._queue[0]
            roomy = [one for one in self._decodes if admits(one, first.asked, _SHARE)]
            if not roomy:
                return
            self._queue.pop(0)
            engine = first.decode = self._decode_policy.pick(roomy, first.asked)
            engine.load.requests += 1
            engine.load.waiting_tokens += first.asked.tokens
            if not first.late:
                self._begin_prefill(first)
            decode = self._decodes[engine]
            decode.waiting.append(first)
            self._allocate(decode)

    def _begin_prefill(self, job: Job) -> None:
        engine = job.prefill = self._prefill_policy.pick(self._prefills, job.asked)
        job.prefill_sent = self._now
        engine.load.queued_tokens += job.asked.tokens
        begin = max(self._busy[engine], self._now)
        end = self._busy[engine] = begin + job.asked.tokens * self._costs.prefill_s
        self._at(end, lambda: self._prefilled(job))

    def _prefilled(self, job: Job) -> None:
        assert job.prefill is not None
        job.prefill.load.queued_tokens -= job.asked.tokens
        job.prefill_end = self._now
        if job.late:
            self._admit(job)
        elif job.room_at is not None:
            self._move(job)

    def _allocate(self, decode: Decode) -> None:
        """Give blocks in order of arrival (vLLM's scheduler does so), for the prompt and what will be generated."""
        while decode.waiting and decode.free >= _size(decode.waiting[0]):
            job = decode.waiting.pop(0)
            decode.free -= _size(job)
            job.room_at = self._now
            if job.prefill_end is not None:
                self._move(job)
        self._say(decode)

    def _move(self, job: Job) -> None:
        """Everything is there to be moved: what is left of it, then the first step."""
        assert job.prefill_end is not None
        assert job.room_at is not None
        assert job.decode is not None
        costs, decode = self._costs, self._decodes[job.decode]
        registered = job.room_at + costs.register_s
        overlapped = max(job.prefill_end - registered, 0.0) / costs.prefill_s
        left = max(job.asked.tokens - overlapped, min(costs.chunk, job.asked.tokens))
        ready = max(registered, job.prefill_end) + left * costs.transfer_s
        step = (costs.step_s + costs.stream_s * decode.running) * decode.slow
        self._at(ready + step, lambda: self._first(job))

    def _first(self, job: Job) -> None:
        assert job.decode is not None
        assert job.prefill_end is not None
        engine, decode = job.decode, self._decodes[job.decode]
        job.first = self._now
        load = engine.load
        load.waiting_tokens -= job.asked.tokens
        load.running += 1
        decode.running += 1
        delay = self._now - job.prefill_end
        load.first_token_delay += _WEIGHT * (delay - load.first_token_delay)
        waited = self._now - job.request.at - (job.prefill_end - job.prefill_sent)
        self._timing.observed(job.context, late=job.late, delay=waited)
        step = (self._costs.step_s + self._costs.stream_s * decode.running) * decode.slow
        self._at(self._now + step * job.request.output, lambda: self._finish(job))
        self._admit()

    def _finish(self, job: Job) -> None:
        assert job.decode is not None
        decode = self._decodes[job.decode]
        decode.running -= 1
        decode.free += _size(job)
        job.decode.load.running -= 1
        job.decode.load.requests -= 1
        self.done.append(job)
        self._allocate(decode)
        self._admit()

    def _say(self, decode: Decode) -> None:
        decode.engine.says = Told(capacity=decode.capacity, reclaimable=decode.free)


def _size(job: Job) -> int:
    return job.request.prompt + job.request.output


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load and the decode engines that meet it."""

    name: str
    slow: tuple[float, ...]
    rate: float
    """Requests a second, on average."""
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    burst: int = 1
    """So many come at once."""

    def load(self, count: int, seed: int) -> list[Request]:
        """Requests in order of arrival."""
        return list(self._requests(count, random.Random(seed)))  # noqa: S311 -- a simulation

    def _requests(self, count: int, chance: random.Random) -> Iterator[Request]:
        now = 0.0
        for number in range(count):
            if number % self.burst == 0:
                now += chance.expovariate(self.rate / self.burst)
            yield Request(now, chance.choice(self.prompts), chance.choice(self.outputs))


SCENARIOS = (
    Scenario("even", (1.0, 1.0), 8.0, (2000,), (100, 200)),
    Scenario("bursts", (1.0, 1.0), 8.0, (2000,), (100, 200), burst=24),
    Scenario("one slow decode", (1.0, 3.0), 8.0, (2000,), (100, 200)),
    Scenario("long and short prompts", (1.0, 1.0), 5.0, (200, 200, 200, 16000), (50, 400)),
    Scenario("long and short, one slow", (1.0, 3.0), 5.0, (200, 200, 200, 16000), (50, 400)),
    Scenario("nearly full", (1.0, 1.0), 4.5, (2000, 4000), (400, 800), burst=6),
)
TIMINGS: dict[str, Callable[[], Timing]] = {
    "early": lambda: Fixed(late=False),
    "late": lambda: Fixed(late=True),
    "adaptive": Adaptive,
}


def simulate(costs: Costs, *, count: int = 4000, seeds: int = 3) -> dict[str, Any]:
    """Every scenario under every timing; p50 and p90 of the time to first token, in seconds, over all seeds."""
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        row: dict[str, Any] = {}
        for name, make in TIMINGS.items():
            times: list[float] = []
            for seed in range(seeds):
                times += Simulation(make(), costs, scenario.slow).run(scenario.load(count, seed))
            times.sort()
            row[name] = {"p50": times[len(times) // 2], "p90": times[int(0.9 * len(times))]}
        better = min(row["early"]["p90"], row["late"]["p90"])
        row["adaptive_over_better"] = row["adaptive"]["p90"] / better
        found[scenario.name] = row
    worst = max(row["adaptive_over_better"] for row in found.values())
    return {"scenarios": found, "worst": worst, "holds": worst <= _MOST}

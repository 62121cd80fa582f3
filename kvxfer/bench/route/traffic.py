"""What the router costs a stream: the same load straight to stand-in engines, through the router, and through others' proxies.

Three processes run at a time: the engines, what is between, and the load generator. What is between is judged by its own
processor time as well as by the clock, since on a shared machine the clock measures the others too.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.bench.process import free_ports
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE = 60.0
_SHORT = 5_000
_PARTS = 5
_FLOOD = 0.002
"""Seconds between two tokens of a stream where more is offered than anybody takes."""
_SLICE = 2.0
_ENOUGH = 20
"""Streams of one kind without which a slice of the run says nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked for."""

    streams: int = 500
    seconds: float = 10.0
    tokens: int = 100
    first: float = 0.1
    interval: float = 0.02
    requests: int = 50_000
    """Short ones, over which memory is looked at."""


@dataclass(frozen=True, slots=True)
class Running:
    """A process and how much it has used."""

    process: subprocess.Popen[str]

    @property
    def processor(self) -> float:
        """Seconds of processor time so far, all threads, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def memory(self) -> int:
        """Resident bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise ConfigError(f"process {self.process.pid} has ended")


if TYPE_CHECKING:
    Starter: TypeAlias = Callable[[dict[str, list[int]], int], AbstractContextManager[Running]]


@contextmanager
def engines(load: Load, *, flood: bool = False) -> Iterator[dict[str, list[int]]]:
    """Two prefill and two decode engines; their ports."""
    pace = ["--first", str(load.first), "--interval", str(_FLOOD if flood else load.interval)]
    if flood:
        pace.append("--catch-up")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvxfer.bench.route.engine", *pace],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


@contextmanager
def router(ports: dict[str, list[int]], port: int) -> Iterator[Running]:
    """``kvxfer router`` before those engines."""
    command = [sys.executable, "-m", "kvxfer.cli", "router", "--port", str(port), "--log-level", "error"]
    for role, some in ports.items():
        for one in some:
            command += [f"--{role}", f"http://127.0.0.1:{one}"]

    def ready() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return all(one["healthy"] for one in json.load(answer)["engines"])

    with _between(command, ready) as running:
        yield running


@contextmanager
def bare(ports: dict[str, list[int]], port: int) -> Iterator[Running]:
    """Bytes piped from decode engines, unread: what nobody between can save."""
    command = [sys.executable, "-m", "kvxfer.bench.route.bare", str(port), *map(str, ports["decode"])]

    def ready() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            return bool(answer.status == 200)  # noqa: PLR2004

    with _between(command, ready) as running:
        yield running


@contextmanager
def upstream(script: Path, ports: dict[str, list[int]], port: int) -> Iterator[Running]:
    """One of vLLM's example proxies (examples/disaggregated/disaggregated_serving) before the same engines."""
    command = [sys.executable, str(script), "--model", "stand-in", "--port", str(port)]
    command += ["--prefill", *(f"127.0.0.1:{one}" for one in ports["prefill"])]
    command += ["--decode", *(f"127.0.0.1:{one}" for one in ports["decode"])]
    if "push" in script.name:
        command += ["--prefill-engine-id", "prefill-0", "--prefill-kv-host", "127.0.0.1"]
        command += ["--prefill-side-channel-port", "5600"]

    def ready() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=2) as answer:
            return bool(answer.status == 200)  # noqa: PLR2004

    with _between(command, ready) as running:
        yield running


@contextmanager
def _between(command: list[str], ready: Callable[[], bool]) -> Iterator[Running]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                if ready():
                    break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                said = process.communicate()[1][-2000:]
                raise ConfigError(f"{' '.join(command[:3])} did not come up: {said}")
            time.sleep(0.1)
        yield Running(process)
    finally:
        process.kill()
        process.wait()


def generate(
    ports: Sequence[int], load: Load, *, beside: Sequence[int] = (), requests: int = 0, tokens: int | None = None
) -> dict[str, Any]:
    """Run the load generator; what it counted."""
    command = [sys.executable, "-m", "kvxfer.bench.route.load", *map(str, ports), "--streams", str(load.streams)]
    command += ["--seconds", str(load.seconds), "--tokens", str(tokens or load.tokens), "--requests", str(requests)]
    command += ["--ramp", "0" if requests else "2", "--beside", *map(str, beside)]
    counted: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return counted


def through(running: Running, port: int, load: Load, *, beside: Sequence[int] = ()) -> dict[str, Any]:
    """The load through what runs, with its processor time; where others go ``beside``, what it adds to the first token."""
    before = running.processor
    counted = generate([port], load, beside=beside)
    used = max(running.processor - before, 1 / _TICKS)
    counted |= {"proxy_processor_s": used, "events_per_processor_s": counted["all_events"] / used}
    first, other = counted.pop("first"), counted.pop("beside", None)
    if other is not None:
        counted["added_first_token_ms"] = added(first, other.pop("first"))
        counted["straight"] = other
    return counted


def measure(load: Load, against: Sequence[Path], say: Callable[[str], None]) -> dict[str, Any]:
    """All of it."""
    with engines(load, flood=True) as ports:
        limit = generate(ports["decode"], load)
    del limit["first"]
    say(f"the generator's own limit: {limit['events_per_s']:,.0f} events a second")
    result: dict[str, Any] = {"load": load_of(load), "generator_limit": limit, "upstream": {}}
    result["router"] = one(router, "router", load, load.requests, say)
    result["leavers"] = leavers(load, say)
    result["bare"] = one(bare, "nothing but a pipe", load, _SHORT, say)
    for script in against:
        start = functools.partial(upstream, script)
        result["upstream"][script.name] = one(start, script.name, load, _SHORT, say)
    result["bounds"] = bounds(result)
    return result


def one(start: Starter, name: str, load: Load, requests: int, say: Callable[[str], None]) -> dict[str, Any]:
    """What is between, under each kind of load: tokens at their pace, short requests, and more than it can take."""
    port = free_ports(1)[0]
    with engines(load) as ports, start(ports, port) as running:
        paced = through(running, port, load, beside=ports["decode"])
        p50, p99 = (paced["added_first_token_ms"][share]["median"] for share in ("p50", "p99"))
        say(
            f"{name}: adds {p50:.1f} ms (p50) and {p99:.1f} ms (p99) to the first token; {paced['events_per_s']:,.0f} events a "
            f"second, {paced['events_per_processor_s']:,.0f} a second of its processor time; {paced['failed']} failed"
        )
        few = short(running, port, load, requests, say)
    with engines(load, flood=True) as ports, start(ports, port) as running:
        flooded = through(running, port, load)
    say(
        f"{name}, flooded: {flooded['events_per_s']:,.0f} events a second, {flooded['events_per_processor_s']:,.0f} a second "
        f"of its processor time; {flooded['failed']} failed"
    )
    return {"paced": paced, "short": few, "flooded": flooded}


def leavers(load: Load, say: Callable[[str], None], requests: int = 5_000) -> dict[str, Any]:
    """Requests through the router of which one in ten is broken off: what is left of them, and for how long.

    Under ``straight`` the same with nothing between: how late an engine of this machine notices by itself.
    """
    port = free_ports(1)[0]
    with engines(load) as ports, router(ports, port):
        every = [one for some in ports.values() for one in some]
        found = _leave(port, every, load, requests)
        found["straight"] = _leave(ports["decode"][0], every, load, requests)
    say(
        f"{found['left']} of {requests:,} clients left: {found['whole']:,} others whole, {found['failed']} failed, "
        f"{found['open']} legs left open; the last leg outlived its client by {found['outlived_s']['most']:.3f} s at most "
        f"(p50 {found['outlived_s']['p50']:.3f} s; straight {found['straight']['outlived_s']['most']:.3f} and "
        f"{found['straight']['outlived_s']['p50']:.3f} s)"
    )
    return found


def _leave(port: int, every: Sequence[int], load: Load, requests: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "kvxfer.bench.route.leavers",
        *map(str, (port, *every)),
        "--requests",
        str(requests),
    ]
    command += ["--longest", str(load.first + 12 * load.interval)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    times = found.pop("outlived_s")
    shares = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return found | {"outlived_s": {name: quantile(times, share) for name, share in shares.items()}}


def added(routed: Sequence[Sequence[float]], straight: Sequence[Sequence[float]]) -> dict[str, dict[str, Any]]:
    """How much longer the first token took, by quantile: routed less straight in each slice of the run, and their median.

    The two kinds of streams ran at the same time, so what else the machine did in a slice is in both of its quantiles; and a
    moment of trouble spoils its slice alone. Each of ``routed`` and ``straight``: when it was asked for, and the milliseconds.
    """
    start = min((when for when, _ in (*routed, *straight)), default=0.0)

    def slices(found: Sequence[Sequence[float]]) -> dict[int, list[float]]:
        cut: dict[int, list[float]] = {}
        for when, took in found:
            cut.setdefault(int((when - start) / _SLICE), []).append(took)
        return {number: sorted(some) for number, some in cut.items() if len(some) >= _ENOUGH}

    ours, theirs = slices(routed), slices(straight)
    result: dict[str, dict[str, Any]] = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        each = [
            quantile(ours[number], share) - quantile(theirs[number], share)
            for number in sorted(ours)
            if number in theirs
        ]
        result[name] = {
            "median": statistics.median(each) if each else float("nan"),
            "slices": each,
            "routed": quantile(sorted(took for _, took in routed), share),
            "straight": quantile(sorted(took for _, took in straight), share),
        }
    return result


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of values that are in order; not a number for none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def load_of(load: Load) -> dict[str, float]:
    """The load as JSON."""
    return {name: getattr(load, name) for name in ("streams", "seconds", "tokens", "first", "interval", "requests")}


def short(
    running: Running, port: int, load: Load, requests: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Requests of four tokens in five parts: what a request costs apart from its tokens, and what it leaves in memory."""
    parts: list[dict[str, Any]] = []
    for number in range(_PARTS):
        before = running.processor
        counted = generate([port], load, requests=requests // _PARTS, tokens=4)
        used = max(running.processor - before, 1 / _TICKS)
        parts.append(
            {
                "requests": counted["requests"],
                "failed": counted["failed"],
                "requests_per_s": counted["requests"] / counted["seconds"],
                "requests_per_processor_s": counted["requests"] / used,
                "resident_bytes": running.memory,
            }
        )
        say(
            f"{(number + 1) * counted['requests']:,} short requests: {parts[-1]['resident_bytes'] / 1e6:.1f} MB, "
            f"{parts[-1]['requests_per_processor_s']:,.0f} a second of its processor time"
        )
    return {
        "parts": parts,
        "failed": sum(part["failed"] for part in parts),
        "requests_per_processor_s": statistics.median(part["requests_per_processor_s"] for part in parts),
    }


def bounds(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What must hold, what was measured, and whether it does."""
    ours = result["router"]
    sizes = [part["resident_bytes"] for part in ours["short"]["parts"]]
    found: dict[str, dict[str, Any]] = {
        "added_first_token_ms_p50": {"value": ours["paced"]["added_first_token_ms"]["p50"]["median"], "most": 2.0},
        "added_first_token_ms_p99": {"value": ours["paced"]["added_first_token_ms"]["p99"]["median"], "most": 10.0},
        "events_per_processor_s": {"value": ours["paced"]["events_per_processor_s"], "least": 20_000.0},
        "memory_growth_bytes": {"value": sizes[-1] - sizes[0], "most": 4e6},
        "failed": {"value": sum(ours[kind]["failed"] for kind in ("paced", "short", "flooded")), "most": 0},
        "legs_left_open": {"value": result["leavers"]["open"], "most": 0},
        "leg_outlives_its_client_s": {"value": result["leavers"]["outlived_s"]["most"], "most": 1.0},
        "failed_beside_leavers": {"value": result["leavers"]["failed"], "most": 0},
        "generator_limit_over_flooded": {
            "value": result["generator_limit"]["events_per_s"] / ours["flooded"]["events_per_s"],
            "least": 1.0,
        },
    }
    for name, theirs in result["upstream"].items():
        for kind, rate in (("paced", "events"), ("flooded", "events"), ("short", "requests")):
            key = f"{rate}_per_processor_s"
            found[f"times_{name}_{kind}_{rate}"] = {"value": ours[kind][key] / theirs[kind][key], "least": 3.0}
    for one_bound in found.values():
        value = one_bound["value"]
        one_bound["holds"] = value <= one_bound["most"] if "most" in one_bound else value >= one_bound["least"]
    return found

"""What the router costs a stream: the same load straight to stand-in engines, through the router, and through others' proxies.

Three processes run at a time: the engines, what is between, and the load generator. What is between is judged by its own
processor time as well as by the clock, since on a shared machine the clock measures the others too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE = 60.0
_SHORT = 5_000


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked for."""

    streams: int = 500
    seconds: float = 10.0
    tokens: int = 100
    first: float = 0.1
    interval: float = 0.02
    requests: int = 50_000
    """Of the run that looks at memory."""


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


@contextmanager
def engines(load: Load, interval: float | None = None) -> Iterator[dict[str, list[int]]]:
    """Two prefill and two decode engines; their ports."""
    pace = ["--first", str(load.first), "--interval", str(load.interval if interval is None else interval)]
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


def generate(ports: Sequence[int], load: Load, *, requests: int = 0, tokens: int | None = None) -> dict[str, Any]:
    """Run the load generator; what it counted, with quantiles for the times to first token."""
    command = [sys.executable, "-m", "kvxfer.bench.route.load", *map(str, ports), "--streams", str(load.streams)]
    command += ["--seconds", str(load.seconds), "--tokens", str(tokens or load.tokens), "--requests", str(requests)]
    command += ["--ramp", "0" if requests else "2"]
    counted: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    first = counted.pop("first_ms")
    counted["first_token_ms"] = {name: quantile(first, share) for name, share in (("p50", 0.5), ("p99", 0.99))}
    return counted


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The quantile of values that are in order; None of none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def through(running: Running, port: int, load: Load) -> dict[str, Any]:
    """The load through what runs, with its processor time."""
    before = running.processor
    counted = generate([port], load)
    used = running.processor - before
    # The generator opens its streams for two seconds and counts after that; the proxy works for both.
    share = counted["seconds"] / (counted["seconds"] + 2)
    return counted | {"proxy_processor_s": used, "events_per_processor_s": counted["events"] / (used * share)}


def measure(load: Load, against: Sequence[Path], say: Callable[[str], None]) -> dict[str, Any]:
    """All of it."""
    port = _free_port()
    with engines(load, 0.002) as ports:
        limit = generate(ports["decode"], load)
    say(f"the generator's own limit: {limit['events_per_s']:,.0f} events a second")
    with engines(load) as ports:
        direct = generate(ports["decode"], load)
        _say(say, "straight", direct)
        result: dict[str, Any] = {"load": load_of(load), "generator_limit": limit, "direct": direct}
        with router(ports, port) as running:
            ours = result["router"] = through(running, port, load)
            _say(say, "router", ours)
            result["memory"] = memory(running, port, load, say)
        result["upstream"] = {}
        for script in against:
            with upstream(script, ports, port) as running:
                theirs = result["upstream"][script.name] = through(running, port, load)
                _say(say, script.name, theirs)
                theirs |= short(running, port, load, _SHORT)
                say(f"{script.name}: {theirs['requests_per_s']:,.0f} short requests a second")
    result["bounds"] = bounds(result)
    return result


def load_of(load: Load) -> dict[str, float]:
    """The load as JSON."""
    return {name: getattr(load, name) for name in ("streams", "seconds", "tokens", "first", "interval", "requests")}


def memory(running: Running, port: int, load: Load, say: Callable[[str], None]) -> dict[str, Any]:
    """Resident memory over many short requests, in five parts; the first one warms up."""
    sizes = []
    failed = 0
    each = load.requests // 5
    for part in range(5):
        counted = short(running, port, load, each)
        failed += counted["short_failed"]
        sizes.append(running.memory)
        say(
            f"{(part + 1) * each:,} short requests: {sizes[-1] / 1e6:.1f} MB, {counted['requests_per_s']:,.0f} a second, "
            f"{counted['requests_per_processor_s']:,.0f} a second of its processor time"
        )
    return counted | {"requests": load.requests, "failed": failed, "resident_bytes": sizes}


def short(running: Running, port: int, load: Load, requests: int) -> dict[str, Any]:
    """Requests of four tokens: what a request costs, apart from its tokens."""
    before = running.processor
    counted = generate([port], load, requests=requests, tokens=4)
    return {
        "requests_per_s": counted["requests"] / counted["seconds"],
        "requests_per_processor_s": counted["requests"] / (running.processor - before),
        "short_failed": counted["failed"],
    }


def bounds(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What must hold, what was measured, and whether it does."""
    ours, direct, sizes = result["router"], result["direct"], result["memory"]["resident_bytes"]
    added = {
        name: (ours["first_token_ms"][name] or 0.0) - (direct["first_token_ms"][name] or 0.0) for name in ("p50", "p99")
    }
    found: dict[str, dict[str, Any]] = {
        "added_first_token_ms_p50": {"value": added["p50"], "most": 2.0},
        "added_first_token_ms_p99": {"value": added["p99"], "most": 10.0},
        "events_per_processor_s": {"value": ours["events_per_processor_s"], "least": 20_000.0},
        "memory_growth_bytes": {"value": sizes[-1] - sizes[0], "most": 4e6},
        "failed": {"value": ours["failed"] + result["memory"]["failed"], "most": 0},
    }
    for name, theirs in result["upstream"].items():
        ratio = ours["events_per_processor_s"] / theirs["events_per_processor_s"]
        found[f"times_{name}_events"] = {"value": ratio, "least": 3.0}
        ratio = result["memory"]["requests_per_s"] / theirs["requests_per_s"]
        found[f"times_{name}_requests"] = {"value": ratio, "least": 3.0}
    for one in found.values():
        one["holds"] = one["value"] <= one["most"] if "most" in one else one["value"] >= one["least"]
    return found


def _say(say: Callable[[str], None], name: str, counted: dict[str, Any]) -> None:
    first = counted["first_token_ms"]
    more = ""
    if "events_per_processor_s" in counted:
        more = f", {counted['events_per_processor_s']:,.0f} a second of its processor time"
    p50, p99 = (first[name] if first[name] is not None else float("nan") for name in ("p50", "p99"))
    say(
        f"{name}: first token p50 {p50:.1f} ms, p99 {p99:.1f} ms; {counted['events_per_s']:,.0f} events a second{more}; "
        f"{counted['failed']} failed"
    )


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

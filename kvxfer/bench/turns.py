"""``kvxfer demo --multi-turn``: what taking back a conversation is worth, and that it changes no token.

A prefill engine that forgets (no prefix cache) and a decode engine serve two conversations of the same lengths, turn by turn
in alternation: of one, prefill is told where it was decoded; of the other it is not, and computes the whole history each turn.
Both legs are sent at once, as a router does in push, and TTFT is the client's, from sending to decode's first token.

Every answer is compared with that of one engine alone (float32, greedy), and what was fetched is counted on prefill.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from kvxfer.bench.client import Client, Completion
from kvxfer.bench.engines import EngineSpec, make_engine, pair_specs
from kvxfer.bench.machine import machine, versions
from kvxfer.bench.model import Recipe, build, prompt_tokens
from kvxfer.bench.process import free_ports, running
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from kvxfer.bench.engines import Engine

CONNECTOR: Final = "KvxferBidirectionalConnector"
_SEEDS: Final = {"off": 1_000, "on": 2_000}
_BAR: Final = 48
_LEAST_GAIN: Final = 2.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. ``ttft`` in seconds; ``fetched`` and ``computed`` are prompt tokens of the prefill engine."""

    prompt_tokens: int
    ttft: float
    fetched: int
    identical: bool


@dataclass(slots=True)
class Turns:
    """One run. ``execute`` returns the complaints; ``report`` is what ``--json`` writes."""

    console: Console
    logs: Path
    python: str
    first: int = 6000
    more: int = 100
    turns: int = 6
    output_tokens: int = 16
    block_size: int = 32
    recipe: Recipe = field(default_factory=Recipe)
    rows: dict[str, list[Turn]] = field(default_factory=lambda: {"off": [], "on": []}, init=False)

    def execute(self) -> list[str]:
        """Run all of it. Raises KvxferError when an engine or a request fails."""
        model = build(self.recipe)
        self.console.print(f"model: {model}; engines' logs: {self.logs}")
        conversations = asyncio.run(self._alone(model))
        asyncio.run(self._pair(model, conversations))
        self._show()
        return list(self.complaints())

    async def _alone(self, model: Path) -> dict[str, list[tuple[list[int], tuple[int, ...]]]]:
        """Let one engine alone hold both conversations. Returns each turn's prompt and answer."""
        spec = EngineSpec(name="reference", model=model, block_size=self.block_size, python=self.python)
        engine = make_engine(spec, self.logs)
        self.console.print("reference: starting one engine …")
        found: dict[str, list[tuple[list[int], tuple[int, ...]]]] = {}
        with running(engine.server):
            async with Client(engine.url) as client:
                for name, seed in _SEEDS.items():
                    history: list[int] = []
                    for turn in range(self.turns):
                        history = [*history, *prompt_tokens(self.more if turn else self.first, seed + turn)]
                        answer = await client.complete(history, self.output_tokens)
                        found.setdefault(name, []).append((history, answer.token_ids))
                        history = [*history, *answer.token_ids]
        return found

    async def _pair(self, model: Path, conversations: dict[str, list[tuple[list[int], tuple[int, ...]]]]) -> None:
        prefill, decode = pair_specs("push", model, block_size=self.block_size, python=self.python)
        prefill = dataclasses.replace(
            prefill, connector=CONNECTOR, prefix_caching=False, load_failure_policy="recompute"
        )
        decode = dataclasses.replace(decode, connector=CONNECTOR, prefix_caching=True)
        ports = free_ports(4)
        first, second = make_engine(prefill, self.logs, ports[:2]), make_engine(decode, self.logs, ports[2:])
        self.console.print("starting prefill and decode …")
        with running(first.server, second.server):
            await self._turn(first, second, prompt_tokens(64, 1), back=False)  # the first request of an engine is slow
            for turn in range(self.turns):
                for name, told in conversations.items():
                    before = await asyncio.to_thread(_fetched, first)
                    answer = await self._turn(first, second, told[turn][0], back=name == "on")
                    fetched = await asyncio.to_thread(_fetched, first) - before
                    same = answer.token_ids == told[turn][1]
                    row = Turn(len(told[turn][0]), answer.ttft or float("nan"), fetched, same)
                    self.rows[name].append(row)

    async def _turn(self, prefill: Engine, decode: Engine, prompt: Sequence[int], *, back: bool) -> Completion:
        transfer = f"turn-{uuid.uuid4().hex}"
        source: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        if back:
            source |= _where(decode, "reuse")
        sink = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer}
        sink |= _where(prefill, "remote")
        async with Client(prefill.url) as one, Client(decode.url) as other:
            _, answer = await asyncio.gather(
                one.complete(prompt, 1, stream=False, extra={"kv_transfer_params": source}),
                other.complete(prompt, self.output_tokens, extra={"kv_transfer_params": sink}),
            )
        return answer

    # --- what came of it --------------------------------------------------------------------------------------------

    @property
    def identical(self) -> bool:
        """Every turn was answered as by one engine alone."""
        rows = [row for rows in self.rows.values() for row in rows]
        return len(rows) == 2 * self.turns and all(row.identical for row in rows)

    def gain(self) -> float:
        """Return how many times lower the later turns' TTFT is with it on: the median, off through on."""
        pairs = zip(self.rows["off"][1:], self.rows["on"][1:], strict=True)
        return median(off.ttft / on.ttft for off, on in pairs)

    def complaints(self) -> Iterator[str]:
        """Everything that keeps the run from being a proof, in words."""
        for name, rows in self.rows.items():
            if len(rows) != self.turns:
                yield f"{name}: {len(rows)} of {self.turns} turns were answered"
            for number, row in enumerate(rows, 1):
                if not row.identical:
                    yield f"{name}, turn {number}: the answer differs from that of one engine alone"
        for number, row in enumerate(self.rows["on"], 1):
            known = self.rows["on"][number - 2].prompt_tokens + self.output_tokens - 1 if number > 1 else 0
            wanted = known // self.block_size * self.block_size
            if row.fetched != wanted:
                yield f"on, turn {number}: {row.fetched:,} tokens were fetched, and decode holds {wanted:,}"
        if any(row.fetched for row in self.rows["off"]):
            yield "off: tokens were fetched"
        if len(self.rows["on"]) == self.turns > 1 and self.gain() < _LEAST_GAIN:
            yield f"the later turns' TTFT is {self.gain():.2f} times lower with it on: less than {_LEAST_GAIN:g}"

    def report(self, complaints: Sequence[str]) -> dict[str, Any]:
        """What ``--json`` writes, also of a run that was cut short."""
        whole = len(self.rows["on"]) == self.turns > 1
        return {
            "passed": not complaints,
            "complaints": list(complaints),
            "off": {"ttft_ms": [round(row.ttft * 1e3, 1) for row in self.rows["off"]]},
            "on": {
                "ttft_ms": [round(row.ttft * 1e3, 1) for row in self.rows["on"]],
                "fetched_tokens": [row.fetched for row in self.rows["on"]],
            },
            "identical": self.identical,
            "gain": round(self.gain(), 2) if whole else None,
            "prompt_tokens": [row.prompt_tokens for row in self.rows["on"]],
            "settings": {"block_size": self.block_size, "output_tokens": self.output_tokens, "dtype": "float32"},
            "versions": versions(self.python),
            "machine": machine(),
        }

    def _show(self) -> None:
        table = Table(title="TTFT by turn, in ms", title_justify="left")
        for name in ("turn", "prompt tokens", "off", "on", "fetched", "same tokens"):
            table.add_column(name, justify="right")
        for number, (off, on) in enumerate(zip(self.rows["off"], self.rows["on"], strict=True), 1):
            same = off.identical and on.identical
            table.add_row(
                str(number), f"{on.prompt_tokens:,}", f"{off.ttft * 1e3:,.0f}", f"{on.ttft * 1e3:,.0f}",
                f"{on.fetched:,}", "[green]yes[/green]" if same else "[red]NO[/red]",
            )  # fmt: skip
        self.console.print(table)
        for line in plot([row.ttft for row in self.rows["off"]], [row.ttft for row in self.rows["on"]]):
            self.console.print(line, highlight=False)


def plot(off: Sequence[float], on: Sequence[float]) -> Iterator[str]:
    """Draw two bars for each turn, as long as their times, in seconds."""
    longest = max((*off, *on), default=0.0) or 1.0
    for number, pair in enumerate(zip(off, on, strict=True), 1):
        for name, seconds, mark in zip(("off", "on "), pair, "░█", strict=True):
            bar = mark * max(1, round(seconds / longest * _BAR))
            yield f"{f'turn {number}' if name == 'off' else '':>7} {name} {bar} {seconds * 1e3:,.0f} ms"


def _where(engine: Engine, which: str) -> dict[str, Any]:
    return {
        f"{which}_engine_id": engine.spec.name,
        f"{which}_host": engine.control_host,
        f"{which}_port": engine.control_port,
    }


def _fetched(prefill: Engine) -> int:
    """Return how many tokens the prefill engine has fetched since it started."""
    return fetch_records(prefill.control_host, prefill.control_port, last=1).counters.get("reuse_fetched_tokens", 0)

"""``kvxfer demo``: proof on one machine that what decode answers from moved KV is what one engine alone answers.

1. One engine alone answers every prompt: the reference (float32, greedy).
2. For push, then pull: a prefill engine, a decode engine and the router start together, and answer the same prompts.
3. Push's decode engine also answers one request with two of its blocks misplaced on purpose: that one must differ.

``verdict.py`` says what has to hold. One engine at a time works, so the times are those of an idle pair.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from rich.live import Live
from rich.table import Table

from kvxfer.bench import marks, results, verdict
from kvxfer.bench.client import Client, Completion
from kvxfer.bench.counts import Counters, Moved
from kvxfer.bench.engines import Engine, EngineSpec, Mode, make_engine, make_pair, pair_specs
from kvxfer.bench.model import Recipe, build, prompt_tokens
from kvxfer.bench.process import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

PROMPTS: Final = (2, 31, 32, 33, 127, 128, 129, 300, 1000, 2000, 4000, 6000)
MODES: Final[tuple[Mode, ...]] = ("push", "pull")
_EARLY: Final = 5
_MISPLACED_PROMPT: Final = 300
_SEED: Final = 0


@dataclass(slots=True)
class Demo:
    """One run. ``execute`` returns the complaints; ``report`` is what ``--json`` writes."""

    console: Console
    logs: Path
    python: str
    prompts: Sequence[int] = PROMPTS
    output_tokens: int = 16
    block_size: int = 32
    recipe: Recipe = field(default_factory=Recipe)
    outcome: verdict.Outcome = field(default_factory=verdict.Outcome, init=False)
    starts: dict[str, list[float]] = field(default_factory=dict, init=False)
    _reference: dict[int, Completion] = field(default_factory=dict, init=False)
    _early_changed: verdict.Tokens = field(default=(), init=False)

    def execute(self) -> list[str]:
        """Run all of it. Raises KvxferError when an engine or a request fails."""
        model = build(self.recipe)
        self.console.print(f"model: {model}; engines' logs: {self.logs}")
        asyncio.run(self._reference_alone(model))
        for mode in MODES:
            asyncio.run(self._pair(mode, model))
        return verdict.complaints(self.outcome, MODES, len(self.prompts))

    async def _reference_alone(self, model: Path) -> None:
        spec = EngineSpec(name="reference", model=model, block_size=self.block_size, python=self.python)
        engine = make_engine(spec, self.logs)
        self._say_starting("reference", "one engine")
        with running(engine.server) as seconds:
            self.starts["reference"] = seconds
            with _Progress(self.console, "reference: one engine alone") as progress:
                async with Client(engine.url) as client:
                    await client.complete(prompt_tokens(8, _SEED + 1), 2)  # the first request of an engine is slow
                    for length in self.prompts:
                        answer = await client.complete(prompt_tokens(length, _SEED), self.output_tokens)
                        self._reference[length] = answer
                        progress.add(length, answer, None, None)
                    changed = prompt_tokens(max(self.prompts), _SEED)
                    changed[min(_EARLY, len(changed) - 1)] += 1 if changed[_EARLY] < self.recipe.vocab - 1 else -1
                    self._early_changed = (await client.complete(changed, self.output_tokens)).token_ids

    async def _pair(self, mode: Mode, model: Path) -> None:
        prefill_spec, decode_spec = pair_specs(mode, model, block_size=self.block_size, python=self.python)
        if mode == "push":
            decode_spec = dataclasses.replace(decode_spec, connector=marks.CONNECTOR, connector_module=marks.MODULE)
        prefill, decode, router = make_pair(mode, prefill_spec, decode_spec, self.logs)
        self._say_starting(mode, "prefill, decode and router")
        with running(prefill.server, decode.server, router) as up:
            self.starts[mode] = up
            counters = Counters(prefill, decode)
            layout_bytes = sum(cache.block_bytes for cache in counters.caches)
            self.outcome.layout_bytes[mode] = (layout_bytes, self.recipe.kv_bytes_per_token() * self.block_size)
            rows = self.outcome.rows.setdefault(mode, [])
            with _Progress(self.console, f"{mode}: prefill, decode and router") as progress:
                async with Client(router.url) as client:
                    await client.complete(prompt_tokens(8, _SEED + 1), 2)
                    await asyncio.to_thread(counters.next_moved)
                    for length in self.prompts:
                        answer = await client.complete(prompt_tokens(length, _SEED), self.output_tokens)
                        moved = await asyncio.to_thread(counters.next_moved)
                        rows.append(self._row(length, answer, moved, counters))
                        progress.add(length, answer, moved, identical=rows[-1].identical)
            if mode == "push":
                self.outcome.sensitivity = await self._sensitivity(prefill, decode)
                self.console.print(_sensitivity_text(self.outcome.sensitivity))

    def _row(self, length: int, answer: Completion, moved: Moved, counters: Counters) -> verdict.Row:
        return verdict.Row(
            prompt_tokens=length,
            reference=self._reference[length].token_ids,
            answer=answer.token_ids,
            bytes_expected=sum(cache.bytes_for(0, length - 1) for cache in counters.caches),
            bytes_moved=moved.bytes,
            descriptors=moved.descriptors,
            backends=moved.backends,
            outcomes=moved.outcomes,
            ttft=answer.ttft,
            tpot=answer.tpot,
        )

    async def _sensitivity(self, prefill: Engine, decode: Engine) -> verdict.Sensitivity:
        longest = max(self.prompts)
        reference = self._reference[_MISPLACED_PROMPT].token_ids
        placed = await self._by_hand(prefill, decode, uuid.uuid4().hex)
        misplaced = await self._by_hand(prefill, decode, f"{marks.MISPLACED}-{uuid.uuid4().hex}")
        return verdict.Sensitivity(
            reference, placed, misplaced, self._reference[longest].token_ids, self._early_changed
        )

    async def _by_hand(self, prefill: Engine, decode: Engine, request_id: str) -> verdict.Tokens:
        """Send both legs of a push ourselves, so that the request has the id that we want."""
        prompt = prompt_tokens(_MISPLACED_PROMPT, _SEED)
        source = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": request_id}
        sink = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": prefill.spec.name,
            "remote_host": prefill.control_host,
            "remote_port": prefill.control_port,
            "remote_request_id": request_id,
            "tp_size": 1,
            "transfer_id": request_id,
        }
        headers = {"X-Request-Id": request_id}
        async with Client(prefill.url) as first, Client(decode.url) as second:
            _, answer = await asyncio.gather(
                first.complete(prompt, 1, stream=False, extra={"kv_transfer_params": source}, headers=headers),
                second.complete(prompt, self.output_tokens, extra={"kv_transfer_params": sink}, headers=headers),
            )
        return answer.token_ids

    def _say_starting(self, name: str, what: str) -> None:
        self.console.print(f"{name}: starting {what} (some 30 to 60 s) …")

    def report(self, complaints: Sequence[str]) -> dict[str, Any]:
        """What ``--json`` writes, also of a run that was cut short."""
        seen = self.outcome.sensitivity
        settings = {"block_size": self.block_size, "output_tokens": self.output_tokens, "dtype": "float32"}
        sensitivity = None
        if seen is not None:
            sensitivity = {
                "misplaced_differs": seen.misplaced != seen.reference,
                "placed_identical": seen.placed == seen.reference,
                "early_token_differs": seen.early_changed != seen.early_reference,
                **dataclasses.asdict(seen),
            }
        return results.report(
            "demo",
            settings,
            self.python,
            passed=not complaints,
            complaints=list(complaints),
            modes={mode: _mode_report(rows) for mode, rows in self.outcome.rows.items()},
            sensitivity=sensitivity,
            reference=[
                {"prompt_tokens": length, "ttft": one.ttft, "tpot": one.tpot, "tokens": list(one.token_ids)}
                for length, one in self._reference.items()
            ],
            start_seconds=self.starts,
        )


def _mode_report(rows: Sequence[verdict.Row]) -> dict[str, Any]:
    backends = sorted({backend for row in rows for backend in row.backends})
    return {
        "requests": len(rows),
        "identical": sum(row.identical for row in rows),
        "bytes": sum(row.bytes_moved for row in rows),
        "expected_bytes": sum(row.bytes_expected for row in rows),
        "descriptors": sum(row.descriptors for row in rows),
        "backend": "+".join(backends),
        "rows": [
            {
                "prompt_tokens": row.prompt_tokens,
                "identical": row.identical,
                "bytes": row.bytes_moved,
                "expected_bytes": row.bytes_expected,
                "descriptors": row.descriptors,
                "ttft": row.ttft,
                "tpot": row.tpot,
                "tokens": list(row.answer),
            }
            for row in rows
        ],
    }


def _sensitivity_text(seen: verdict.Sensitivity) -> str:
    same = "[green]same as the reference[/green]" if seen.placed == seen.reference else "[red]differs[/red]"
    other = "[green]differs, as it must[/green]" if seen.misplaced != seen.reference else "[red]is the same[/red]"
    return (
        f"by hand, {_MISPLACED_PROMPT} tokens: every block in its place: {same}; first and last block swapped: {other}"
    )


@final
class _Progress:
    """A table that grows by one row a prompt: live on a terminal, line by line elsewhere."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._table = Table(title=title, title_justify="left")
        for name in ("prompt tokens", "KV moved", "descriptors", "TTFT", "TPOT", "same tokens"):
            self._table.add_column(name, justify="right")
        self._live = Live(self._table, console=console) if console.is_terminal else None
        if self._live is None:
            console.print(title)

    def __enter__(self) -> _Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, length: int, answer: Completion, moved: Moved | None, identical: bool | None) -> None:
        cells = list(_cells(length, answer, moved, identical))
        self._table.add_row(*cells)
        if self._live is None:
            self._console.print("  ".join(f"{cell:>12}" for cell in cells), markup=True)


def _cells(length: int, answer: Completion, moved: Moved | None, identical: bool | None) -> Iterator[str]:
    yield f"{length:,}"
    yield "–" if moved is None else f"{moved.bytes / 1e6:,.2f} MB"
    yield "–" if moved is None else f"{moved.descriptors:,}"
    yield "?" if answer.ttft is None else f"{answer.ttft * 1e3:,.0f} ms"
    yield "?" if answer.tpot is None else f"{answer.tpot * 1e3:,.1f} ms"
    yield "reference" if identical is None else ("[green]yes[/green]" if identical else "[red]NO[/red]")

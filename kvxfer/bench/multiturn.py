"""Conversations through a router or proxy: the time to the first token as prompts grow, and what prefill did for it.

    python -m kvxfer.bench.multiturn OUT.json --leg on --url http://127.0.0.1:8000 --prefill-url http://127.0.0.1:8100

Every turn's prompt is all that was said before, answers included, and some new tokens. All conversations take a turn, then all
take the next, so that what the engines count can be told by turn. Prompts are token ids, which any proxy passes
on; which conversation they belong to is said in the body (``conversation_id``), as routers want to hear it.

Of each turn: tokens that prefill computed and tokens that it took from elsewhere (vLLM's own counters), and how much of the
time went into reading KV: by kvxfer's handoff records at ``--prefill-control``, else by upstream's counter.
"""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvxfer.bench import results
from kvxfer.bench.pd.points import tokens
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvxfer.bench.client import Client

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

LEGS: Final = ("off", "on")
_SOURCES: Final = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*source="(?P<source>\w+)"[^}]*\} (?P<value>\S+)', re.MULTILINE
)
_XFER: Final = re.compile(r"^vllm:nixl_xfer_time_seconds_sum(?:\{[^}]*\})? (?P<value>\S+)", re.MULTILINE)
_MOST_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """What is said: ``first`` tokens, then ``more`` in each turn, answers of ``answer`` tokens."""

    conversations: int = 8
    turns: int = 6
    first: int = 4000
    more: int = 1000
    answer: int = 128
    at_once: int = 1
    seed: int = 0
    vocab: int = 1024


@dataclass(slots=True)
class Counted:
    """What prefill has counted so far: tokens computed, tokens from elsewhere, seconds of reading KV."""

    computed: float = 0.0
    taken_back: float = 0.0
    reading: float = 0.0

    def since(self, before: Counted) -> Counted:
        """Return what was added."""
        return Counted(
            self.computed - before.computed, self.taken_back - before.taken_back, self.reading - before.reading
        )


@dataclass(slots=True)
class Talk:
    """One conversation: all tokens so far."""

    name: str
    history: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Conversations:
    """All conversations, turn by turn. ``control``: host and port of prefill's records, None for upstream."""

    settings: Settings
    router: Client
    prefill: Client
    control: tuple[str, int] | None
    conversation_ids: bool = True

    async def run(self) -> list[dict[str, Any]]:
        """Hold all of them; a turn's figures each. Raises KvxferError when a request fails."""
        settings = self.settings
        talks = [Talk(uuid.uuid4().hex) for _ in range(settings.conversations)]
        await self._turn([Talk(uuid.uuid4().hex)], 1_000_000)  # connects everything; not counted
        found = []
        before = await self.counted()
        for turn in range(settings.turns):
            lengths, ttfts = await self._turn(talks, turn)
            after = await self.counted()
            found.append(self._told(turn, lengths, ttfts, after.since(before)))
            before = after
        return found

    async def _turn(self, talks: list[Talk], turn: int) -> tuple[list[float], list[float]]:
        settings = self.settings
        places = asyncio.Semaphore(settings.at_once)

        async def say(number: int, talk: Talk) -> tuple[float, float]:
            new = settings.more if talk.history else settings.first
            talk.history += tokens(new, (settings.seed, turn, number), settings.vocab)
            length = len(talk.history)
            extra = {"conversation_id": talk.name} if self.conversation_ids else {}
            async with places:
                answer = await self.router.complete(talk.history, settings.answer, extra=extra)
            talk.history += answer.token_ids
            if answer.ttft is None:
                raise KvxferError(f"turn {turn} of a conversation was answered without a token")
            return float(length), answer.ttft

        pairs = await asyncio.gather(*(say(number, talk) for number, talk in enumerate(talks)))
        return [length for length, _ in pairs], [ttft for _, ttft in pairs]

    def _told(self, turn: int, lengths: list[float], ttfts: list[float], counted: Counted) -> dict[str, Any]:
        each = 1e3 / len(ttfts)
        return {
            "turn": turn,
            "prompt_tokens": results.spread(lengths, 0),
            "ttft_ms": results.spread([1e3 * ttft for ttft in ttfts]),
            "tokens_computed": round(counted.computed),
            "tokens_taken_back": round(counted.taken_back),
            "prefill_ms": {
                "recompute and hand-over": round((sum(ttfts) - counted.reading) * each, 3),
                "KV transfer": round(counted.reading * each, 3),
            },
        }

    async def counted(self) -> Counted:
        """Return what prefill has counted so far."""
        text = await self.prefill.metrics()
        by_source: dict[str, float] = {}
        for sample in _SOURCES.finditer(text):
            by_source[sample["source"]] = by_source.get(sample["source"], 0.0) + float(sample["value"])
        reading = sum(float(sample["value"]) for sample in _XFER.finditer(text))
        if self.control is not None:
            reading = await asyncio.to_thread(_reading, *self.control)
        return Counted(by_source.get("local_compute", 0.0), by_source.get("external_kv_transfer", 0.0), reading)


def _reading(host: str, port: int) -> float:
    """Return the seconds that prefill's reads took, from the request's blocks to the last byte, over all its records."""
    records = fetch_records(host, port, last=_MOST_RECORDS).records
    times = [record.times for record in records if record.side == "sink"]
    return sum(one.released - one.allocated for one in times if one.released is not None and one.allocated is not None)


@app.command()
def run(
    out: Annotated[Path, typer.Argument(help="The results file.")],
    *,
    leg: Annotated[str, typer.Option(help="off or on: whether prefill takes back what decode holds; noted.")],
    url: Annotated[str, typer.Option(help="The router's or proxy's URL.")],
    prefill_url: Annotated[str, typer.Option(help="The prefill engine's, for its counters.")],
    prefill_control: Annotated[str, typer.Option(help="HOST:PORT of its records; empty for upstream's.")] = "",
    served_model_name: Annotated[str, typer.Option()] = "kvxfer-bench",
    conversations: Annotated[int, typer.Option(min=1)] = 8,
    turns: Annotated[int, typer.Option(min=1)] = 6,
    first: Annotated[int, typer.Option(help="Tokens of the first prompt.", min=1)] = 4000,
    more: Annotated[int, typer.Option(help="New tokens in each later turn.", min=1)] = 1000,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 128,
    at_once: Annotated[int, typer.Option(help="Conversations that take their turn at once.", min=1)] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    vocab: Annotated[int, typer.Option(help="Token ids are below it.", min=8)] = 1024,
    send_conversation_id: Annotated[bool, typer.Option(help="By which a router knows a conversation.")] = True,
    timeout: Annotated[float, typer.Option(min=1)] = 300.0,
    python: Annotated[str, typer.Option(help="The Python whose packages are noted.")] = sys.executable,
) -> None:
    """Hold conversations, and write a results file of kind ``multiturn``."""
    from kvxfer.bench.client import Client

    settings = Settings(conversations, turns, first, more, answer, at_once, seed, vocab)

    async def hold() -> list[dict[str, Any]]:
        async with (
            Client(url, model=served_model_name, timeout=timeout) as router,
            Client(prefill_url, model=served_model_name, timeout=timeout) as prefill,
        ):
            return await Conversations(settings, router, prefill, _control(prefill_control), send_conversation_id).run()

    try:
        if leg not in LEGS:
            raise ConfigError(f"--leg {leg!r} is neither off nor on")
        found = asyncio.run(hold())
        told = {"leg": leg, "url": url, **{name: getattr(settings, name) for name in settings.__slots__}}
        complaints = amiss(leg, found)
        results.write(out, results.report("multiturn", told, python, points=[], turns=found, complaints=complaints))
    except KvxferError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for turn in found:
        length, ttft = turn["prompt_tokens"]["median"], turn["ttft_ms"]["median"]
        computed, taken_back = turn["tokens_computed"], turn["tokens_taken_back"]
        typer.echo(
            f"turn {turn['turn']}: {length:,.0f} tokens, TTFT median {ttft:,.1f} ms; prefill computed {computed:,} tokens and "
            f"took back {taken_back:,}"
        )

    for complaint in complaints:
        typer.echo(f"- {complaint}", err=True)
    if complaints:
        raise typer.Exit(1)


def amiss(leg: str, turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say whether a leg was not what it is called: engines may have been started otherwise, or a router may not follow."""
    taken_back = sum(turn["tokens_taken_back"] for turn in turns)
    if leg == "on" and len(turns) > 1 and not taken_back:
        return [
            "prefill took nothing back in the leg that is on: were both engines started for it, and does the router follow?"
        ]
    if leg == "off" and taken_back:
        return [
            f"prefill took {taken_back:,} tokens back in the leg that is off: the engines were started for the other one"
        ]
    return []


def _control(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--prefill-control {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    app()

"""A storm over a pair of real engines: crowds, clients that leave, caches too small for them, engines that are killed.

Whatever happens, an answer that comes whole has the tokens of one engine alone. Requests may fail while an engine is dead, and are
asked again when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client, RequestError
from kvxfer.errors import KvxferError
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.bench.process import Server

_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{[^}]*\} (?P<value>\S+)", re.MULTILINE)
_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (?P<value>\S+)", re.MULTILINE)


@dataclass
class Storm:
    """What is sent: prompts of ``shortest`` to ``longest`` tokens, ``at_once`` at a time; answers of ``output`` tokens.

    ``answered``: the answers that came whole, by the seed and length of their prompts. ``left``: clients that left.
    """

    prefill: engines.Engine
    decode: engines.Engine
    router: Server
    longest: int
    shortest: int = 100
    at_once: int = 24
    output: int = 8
    dice: random.Random = field(default_factory=lambda: random.Random(20))
    answered: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    left: int = 0
    failed: list[str] = field(default_factory=list)
    preemptions: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    seeds: int = 0

    async def blow(self, requests: int, *, leaving: float = 0.0, strike: Callable[[], None] | None = None) -> None:
        """Ask ``requests`` prompts until each is answered, or its client has left, as ``leaving`` of them do.

        ``strike``, called in a thread when a quarter of them are answered, kills an engine and starts it again.
        """
        asked = [self._prompt() for _ in range(requests)]
        whole = len(self.answered) + requests // 4
        places, struck = asyncio.Semaphore(self.at_once), asyncio.Event()
        if strike is None:
            struck.set()

        async def one(which: tuple[int, int]) -> None:
            async with places, Client(self.router.url, timeout=60) as client:
                await self._ask(client, which, struck, self.dice.random() < leaving)

        async def fate() -> None:
            while not struck.is_set():
                if len(self.answered) >= whole and strike is not None:
                    await self._note()
                    await asyncio.to_thread(strike)
                    struck.set()
                await asyncio.sleep(0.01)

        await asyncio.gather(fate(), *map(one, asked))
        await self._note()

    async def _ask(self, client: Client, which: tuple[int, int], struck: asyncio.Event, leaves: bool) -> None:
        for _ in range(40):
            asking = asyncio.create_task(client.complete(_tokens(which), self.output))
            if leaves:
                await asyncio.wait({asking}, timeout=self.dice.uniform(0.0, 0.4))
                asking.cancel()
            try:
                self.answered[which] = (await asking).token_ids
            except asyncio.CancelledError:
                self.left += 1
            except RequestError as error:
                self.failed.append(str(error))
                await struck.wait()
                await asyncio.sleep(0.5)  # the router has to see that it is back
                continue
            return
        raise AssertionError(f"never answered: {self.failed[-1]}")

    async def wrong(self) -> list[str]:
        """Ask prefill itself, without a handoff, and return what differs."""
        async with Client(self.prefill.url, timeout=60) as alone:
            places = asyncio.Semaphore(self.at_once)

            async def check(which: tuple[int, int]) -> str | None:
                async with places:
                    right = (await alone.complete(_tokens(which), self.output)).token_ids
                got = self.answered[which]
                return None if got == right else f"prompt {which}: {got} through the pair, {right} alone"

            return [one for one in await asyncio.gather(*map(check, self.answered)) if one is not None]

    async def quiet(self, within: float) -> None:
        """Wait until neither engine holds a block."""
        until = asyncio.get_running_loop().time() + within
        for engine in (self.prefill, self.decode):
            async with Client(engine.url) as client:
                while (usage := _value(_USAGE, await client.metrics())) > 0.0:
                    assert asyncio.get_running_loop().time() < until, (
                        f"{engine.spec.name} holds {usage:.1%} of its cache"
                    )
                    await asyncio.sleep(0.2)

    async def _note(self) -> None:
        """Add up what the engines of now have counted: one that is killed takes its counts along."""
        for engine in (self.prefill, self.decode):
            with contextlib.suppress(KvxferError):
                async with Client(engine.url) as client:
                    self.preemptions[engine.spec.name] = max(
                        self.preemptions.get(engine.spec.name, 0.0), _value(_PREEMPTIONS, await client.metrics())
                    )
                found = await asyncio.to_thread(fetch_records, engine.control_host, engine.control_port, last=1000)
                for record in found.records:
                    self.outcomes[record.outcome] = self.outcomes.get(record.outcome, 0) + 1

    def _prompt(self) -> tuple[int, int]:
        self.seeds += 1
        return self.dice.randint(self.shortest, self.longest), self.seeds


def kill_and_start(engine: engines.Engine) -> None:
    """Kill -9, and the same engine at the same addresses again."""
    engine.server.kill()
    engine.server.renew()
    engine.server.start()
    engine.server.wait_ready()


def _tokens(which: tuple[int, int]) -> list[int]:
    return model.prompt_tokens(*which)


def _value(pattern: re.Pattern[str], metrics: str) -> float:
    return sum(float(found["value"]) for found in pattern.finditer(metrics))


async def storm(one: Storm, *, calm: int, struck: int, quiet_within: float) -> None:
    """Blow, kill decode, kill prefill, and hold every answer against one engine's."""
    began = time.monotonic()

    def over(phase: str) -> str:
        told = (
            f"{len(one.answered)} answers, {one.left} left, {len(one.failed)} failed, {one.preemptions}, {one.outcomes}"
        )
        print(f"{phase} over after {time.monotonic() - began:.0f} s: {told}", flush=True)
        return told

    await one.blow(calm, leaving=0.25)
    over("calm")
    await one.blow(struck, strike=lambda: kill_and_start(one.decode))
    over("decode killed")
    await one.blow(struck, strike=lambda: kill_and_start(one.prefill))
    over("prefill killed")
    await one.quiet(quiet_within)
    wrong = await one.wrong()
    told = over("all compared")
    assert wrong == [], told
    assert one.left >= calm // 8, told
    assert len(one.answered) + one.left == calm + 2 * struck, told
    assert sum(one.preemptions.values()) > 0, f"the caches were not too small: {told}"
    assert one.outcomes.get("done", 0) > 0, told
    assert sum(count for outcome, count in one.outcomes.items() if outcome != "done") > 0, f"nothing was struck: {told}"

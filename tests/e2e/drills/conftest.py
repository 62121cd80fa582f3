"""A pair to be ill-treated: one for all drills of a mode. Its times are short, so that a fault has passed within ``LIMIT``.

Every drill ends with ``drill.whole()``: both engines serve by handoff, with the right tokens, and hold nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvxfer.bench import engines
from kvxfer.bench.client import Client, RequestError
from kvxfer.bench.process import running
from tests.e2e.conftest import PYTHON, Pair, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLUGINS = Path(__file__).parents[2] / "support" / "plugins"

SETTINGS = {
    "heartbeat_interval": 0.5,
    "peer_timeout": 3.0,
    "post_lease": 2.0,
    "drain_bound": 1.0,
    "leg_timeout": 5.0,
    "pull_lease": 3.0,
    "connect_timeout": 3.0,
}
BOUND = SETTINGS["peer_timeout"] + SETTINGS["post_lease"] + SETTINGS["drain_bound"]
"""Seconds after which nothing is left of a dead peer, by the settings."""

LIMIT = 10.0
"""Seconds in which any fault must have passed: the bound, and the rest for a machine that is busy."""


@dataclass
class Drill(Pair):
    """A pair, with means to hurt it. ``since`` is the time of the last fault."""

    pace: Path = Path()
    extra: list[engines.Engine] = field(default_factory=list)
    since: float = 0.0
    seed: int = 1000

    def prompt(self, length: int) -> list[int]:
        """A prompt that no cache knows."""
        self.seed += 1
        return prompt(length, self.seed)

    @contextlib.contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Let each transfer take that long."""
        self.pace.write_text(str(seconds))
        try:
            yield
        finally:
            self.pace.write_text("0")

    def fault(self) -> None:
        """The fault is now."""
        self.since = time.monotonic()

    def kill(self, engine: engines.Engine) -> None:
        self.fault()
        engine.server.kill()

    def in_time(self, what: str) -> None:
        took = time.monotonic() - self.since
        assert took <= LIMIT, f"{what} took {took:.1f} s; {BOUND:g} s by the settings, {LIMIT:g} s at most"

    def restart(self, role: str) -> engines.Engine:
        """The same engine again: same name, same ports, another process."""
        old = getattr(self, role)
        again = engines.make_engine(old.spec, old.server.log.parent, (old.port, old.control_port))
        self.extra.append(again)
        again.server.start()
        again.server.wait_ready()
        setattr(self, role, again)
        return again

    async def until(self, condition: Callable[[], bool], what: str, within: float = 20.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {within:g} s"
            await asyncio.sleep(0.02)

    async def fails(self, request: asyncio.Task) -> None:
        """The request ends in time, and in an error."""
        with pytest.raises(RequestError):
            await asyncio.wait_for(request, LIMIT + 1)
        self.in_time("the request's error")

    async def serves_others(self, engine: engines.Engine) -> None:
        """An unrelated request is served while the fault lasts."""
        async with Client(engine.url, timeout=LIMIT) as client:
            tokens = self.prompt(40)
            assert (await client.complete(tokens, 4)).token_ids
        self.in_time("an unrelated request")

    async def free(self, engine: engines.Engine) -> None:
        """The engine's cache is empty in time."""
        while await self.usage(engine) > 0.0:
            self.in_time(f"the release of {engine.spec.name}'s blocks")
            await asyncio.sleep(0.1)

    async def whole(self) -> None:
        tokens = self.prompt(500)
        reference = await self.reference(tokens, 8)
        deadline = time.monotonic() + 30
        async with Client(self.router.url) as client:
            while True:
                try:
                    answer = await client.complete(tokens, 8)
                    break
                except RequestError as error:  # the router may not have seen yet that an engine is back
                    seen = "healthy" in str(error) or "cannot be reached" in str(error)
                    if not seen or time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(0.5)
        assert answer.token_ids == reference
        assert self.records(self.decode)[-1].outcome == "done"
        await self.all_free(within=LIMIT)


@pytest.fixture(scope="package", params=["push", pytest.param("pull", marks=pytest.mark.slow)])
def drill(request, bench_model, tmp_path_factory) -> Iterator[Drill]:
    logs = tmp_path_factory.mktemp(f"{request.param}-drills")
    pace = logs / "seconds"
    pace.write_text("0")
    path = os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))
    prefill, decode = engines.pair_specs(
        request.param,
        bench_model,
        python=PYTHON,
        prefix_caching=True,
        num_blocks=260,
        max_model_len=4096,
        max_num_batched_tokens=256,
        connector_config=SETTINGS,
        environment={"PYTHONPATH": path, "SLOW_FABRIC": str(pace)},
    )
    first, second, router = engines.make_pair(
        request.param, prefill, decode, logs, router_args=["--check-interval", "1"]
    )
    with running(first.server, second.server, router):
        made = Drill(request.param, first, second, router, pace=pace)
        try:
            yield made
        finally:
            for engine in made.extra:
                engine.server.stop()

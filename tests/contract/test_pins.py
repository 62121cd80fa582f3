"""Blocks stay out of everybody's hands while posted writes read them: vLLM's real scheduler and block pool, preempting.

The fabric looks at what each write carries at the moment at which it copies: at every position it must be the KV of the
request that the write is for, although the request may have lost its blocks long ago.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.connector.pins import Pins
from kvxfer.protocol.messages import unpack_written
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.contract.test_hooks import check, decode_leg, prefill_leg, prompt, run
from tests.support.engine import DIM, HEADS, LAYERS, SimEngine, expected, tag

pytestmark = pytest.mark.contract

BLOCK = 16


class Watching(TwinFabric):
    """Notes every write that carries what is not its own. ``prompts``: transfer id → tokens."""

    def watch(self, prompts: dict[str, list[int]]) -> None:
        self.prompts, self.foreign, self.carried, self.slow = prompts, [], 0, False

    def _finish(self, transfer) -> None:
        if transfer.operation == "WRITE":
            self.look(transfer)
        super()._finish(transfer)

    def look(self, transfer) -> None:
        written = unpack_written(transfer.notification)
        tokens = self.prompts[written.handoff.transfer]
        raw = b"".join(ctypes.string_at(int(address), int(length)) for address, length, _ in transfer.local)
        first = written.start // BLOCK
        cells = np.frombuffer(raw, dtype=np.float32).reshape(LAYERS, -1, HEADS, BLOCK, 2 * DIM)
        self.carried += 1
        for p in range(written.start, written.end):
            want = float(tag(tokens[: p + 1]) % (1 << 20))
            if not (cells[:, p // BLOCK - first, :, p % BLOCK] == want).all():
                self.foreign.append((written, p))
                return


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(model.build())


@pytest.fixture
def engines(tiny):
    made: list[SimEngine] = []

    def make(name: str, fabric: TwinFabric, **options) -> SimEngine:
        made.append(SimEngine(name, fabric, tiny, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def pins(engine: SimEngine) -> Pins:
    return engine.scheduler.connector._scheduler._pins


def crowd(
    engines, fabric: Watching, *, runner: str = "v2", late: float = 0.0, **settings
) -> tuple[SimEngine, SimEngine]:
    """Growing local requests take the blocks of prompts that are being pushed, over a slow fabric."""
    platform = HostPlatform(fence_delay=late)
    settings = {"num_blocks": 26, "budget": 24, "prefix_caching": False, **settings}
    p = engines("p", fabric, runner=runner, platform=platform, **settings)
    d = engines("d", fabric, runner=runner, num_blocks=200)
    for i in range(8):
        p.add(f"local{i}", prompt(12, 100 + i), None, max_tokens=40)
    for _ in range(6):
        p.step()
    prompts = {i: prompt(180 + i, i) for i in range(12)}
    fabric.watch({f"t{i}": tokens for i, tokens in prompts.items()})
    for i, tokens in prompts.items():
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=3)
    return p, d


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("late", [0.0, 0.003], ids=["prompt", "late"])
@pytest.mark.parametrize("limit", [0.5, 1.0], ids=["half", "all"])
def test_every_write_carries_its_own_requests_kv(engines, runner, late, limit) -> None:
    fabric = Watching(Faults(delay=(0.0, 0.05)), seed=5)
    p, d = crowd(engines, fabric, runner=runner, late=late, pin_limit=limit)
    orphans = []
    orphan = pins(p).orphan
    pins(p).orphan = lambda request: orphans.append(orphan(request)) or orphans[-1]
    most = 0

    def over() -> bool:
        nonlocal most
        most = max(most, pins(p).count)
        return not (p.busy or d.busy)

    run(p, d, until=over, timeout=90)
    assert any(orphans), "nothing lost its pinned blocks: the test does not test what it says"
    assert 0 < most <= int(limit * 26)
    assert fabric.foreign == []
    for i in range(12):
        assert d.outputs[f"d{i}"] == expected(fabric.prompts[f"t{i}"], 3)
    check(p, d)
    assert pins(p).count == 0
    assert not pins(p)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
def test_a_prompt_that_loses_its_blocks_to_growing_neighbours_in_mid_write(engines, monkeypatch, pinned) -> None:
    """Not pinned is the check of the check; decode's tokens are right all the same, since such data is never sealed."""

    class Unpinned(Pins):
        def pin(self, request_id, blocks) -> bool:
            self._of.setdefault(request_id, [])
            return True

    if not pinned:
        monkeypatch.setattr("kvxfer.connector.scheduler.Pins", Unpinned)
    fabric = Watching(Faults(delay=(0.2, 0.3)), seed=5)
    p = engines("p", fabric, num_blocks=26, budget=24, prefix_caching=False, pin_limit=1.0)
    d = engines("d", fabric)
    tokens = prompt(300, 1)
    fabric.watch({"t": tokens})
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
    for i in range(6):
        p.add(f"local{i}", prompt(10, 100 + i), None, max_tokens=60)
    p.step()
    source = p.worker._worker._threads.mover.source
    run(p, d, until=lambda: len(source) == 1)  # the registration is there before the first chunk is
    p.add("p", tokens, prefill_leg("t"))
    run(p, d, timeout=60)
    assert fabric.carried
    assert (fabric.foreign == []) is pinned
    assert d.outputs["d"] == expected(tokens, 3)
    for i in range(6):
        assert p.outputs[f"local{i}"] == expected(prompt(10, 100 + i), 60)
    if pinned:
        check(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("late", [0.0, 0.02], ids=["prompt", "late"])
def test_what_cannot_be_pinned_is_written_when_its_request_has_ended(engines, runner, late) -> None:
    fabric = Watching(Faults(delay=(0.0, 0.02)), seed=5)
    p, d = crowd(engines, fabric, runner=runner, late=late, pin_limit=0.2)
    told: dict[str, int] = {}
    post = p.worker._worker._threads.mover.post

    def posting(command) -> None:
        for end in getattr(getattr(command, "step", None), "finished", ()):
            told[end.request_id] = told.get(end.request_id, 0) + (end.withheld is not None)
        post(command)

    p.worker._worker._threads.mover.post = posting
    run(p, d, timeout=90)
    assert sum(told.values()) > 0, "nothing exceeded the limit"
    assert fabric.foreign == []
    for i in range(12):
        assert d.outputs[f"d{i}"] == expected(fabric.prompts[f"t{i}"], 3)
    check(p, d)
    assert pins(p).count == 0


def test_a_prompt_longer_than_all_pins_goes_over(engines) -> None:
    fabric = Watching(Faults(delay=(0.0, 0.01)))
    p, d = engines("p", fabric, pin_limit=0.0), engines("d", fabric)
    tokens = prompt(300, 1)
    fabric.watch({"t": tokens})
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
    p.add("p", tokens, prefill_leg("t"))
    run(p, d)
    assert d.outputs["d"] == expected(tokens, 3)
    assert fabric.carried
    check(p, d)


def test_pull_pins_nothing(engines) -> None:
    p = engines("p", TwinFabric(), mode="pull")
    assert pins(p) is None


def test_an_idle_engine_steps_on_while_an_orphan_waits_and_sleeps_after_it(engines) -> None:
    """The write of a request that lost its blocks and ended is still under way; nothing else is left to do."""
    now = [0.0]
    fabric = Watching(clock=lambda: now[0])  # the write ends when this test lets it
    p, d = engines("p", fabric, budget=64), engines("d", fabric)
    tokens = prompt(200, 2)
    fabric.watch({"t": tokens})
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
    d.step()
    p.add("p", tokens, prefill_leg("t"))
    fabric.faults = Faults(delay=(1.0, 1.0))
    run(p, d, until=lambda: p.worker._worker._threads.mover.transfers.in_flight)
    scheduler = p.scheduler
    scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    p.abort("p")
    assert pins(p)
    assert p.busy

    def at_rest() -> bool:
        now[0] += 10.0  # time goes on: the mover may have posted another write meanwhile
        return not (p.busy or d.busy)

    run(p, d, until=at_rest)
    assert not pins(p)
    assert not p.busy
    assert fabric.foreign == []
    check(p, d)

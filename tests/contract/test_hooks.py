"""vLLM's real scheduler, block pool and runner hooks (V1's and V2's order) against our connectors. No model, no engine process.

The CPU build runs the V1 runner only; V2, the default on CUDA, calls the hooks in another order and from another class. Here
its real ``ActiveKVConnector`` drives them.
"""

from __future__ import annotations

import pickle
import random
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.bench import model
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.support.engine import SimEngine, expected

pytestmark = pytest.mark.contract


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


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(1, 500) for i in range(length)]


def prefill_leg(transfer: str) -> dict:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}


def decode_leg(p: SimEngine, transfer: str) -> dict:
    control = p.ours._scheduler.control
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": p.name,
        "remote_host": "127.0.0.1",
        "remote_port": control.port,
        "tp_size": 1,
        "transfer_id": transfer,
    }


def run(*engines: SimEngine, until=None, timeout: float = 30.0) -> None:
    """Step all engines until none is busy, or a condition holds."""
    deadline = time.monotonic() + timeout
    while any(e.busy for e in engines) if until is None else not until():
        assert time.monotonic() < deadline, [
            (e.name, e.usage, e.scheduler.requests.keys(), e.problems[:3]) for e in engines
        ]
        for engine in engines:
            engine.step()
        time.sleep(0.0005)


def check(*engines: SimEngine) -> None:
    for engine in engines:
        assert engine.problems == []
        assert engine.usage == 0, f"{engine.name} still holds {engine.usage} blocks"


def preempt_prefills(p: SimEngine, d: SimEngine) -> None:
    """Requests that decode locally on the prefill engine grow, and take the blocks of prompts that are being handed over."""
    for i in range(8):
        p.add(f"local{i}", prompt(12, 100 + i), None, max_tokens=40)
    for _ in range(6):
        p.step()
    preempted = []
    schedule = p.scheduler.schedule

    def counting() -> object:
        output = schedule()
        preempted.extend(r for r in output.preempted_req_ids or () if r.startswith("p"))
        return output

    p.scheduler.schedule = counting
    prompts = {i: prompt(180 + i, i) for i in range(12)}
    for i, tokens in prompts.items():
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=3)
    run(p, d, timeout=90)
    assert preempted, "no prefill leg was preempted: the test does not test what it says"
    for i, tokens in prompts.items():
        assert d.outputs[f"d{i}"] == expected(tokens, 3)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("late", [0.0, 0.02], ids=["prompt", "late"])
def test_tokens_are_right_in_both_hook_orders(engines, runner, mode, late) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.005)))
    platform = HostPlatform(fence_delay=late)
    p = engines("p", fabric, mode=mode, runner=runner, platform=platform)
    d = engines("d", fabric, mode=mode, runner=runner, platform=HostPlatform(fence_delay=late))
    for i, length in enumerate((1, 15, 16, 17, 63, 64, 65, 200)):
        tokens = prompt(length, i)
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=5)
        run(p, d)
        assert d.outputs[f"d{i}"] == expected(tokens, 5)
    check(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("order", ["decode first", "prefill first"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_either_leg_may_be_late(engines, runner, order, mode) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, runner=runner, mode=mode), engines("d", fabric, runner=runner, mode=mode)
    tokens = prompt(150, 1)
    if order == "decode first":
        d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
        for _ in range(100):
            d.step()
            time.sleep(0.001)
        p.add("p", tokens, prefill_leg("t"))
    else:
        p.add("p", tokens, prefill_leg("t"))
        for _ in range(100):
            p.step()
            time.sleep(0.001)
        d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
    run(p, d)
    assert d.outputs["d"] == expected(tokens, 3)
    check(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_prefix_hits_on_either_side(engines, runner) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, runner=runner), engines("d", fabric, runner=runner)
    shared = prompt(96, 3)
    for i, tail in enumerate(([], [7] * 3, [9] * 40, [])):
        tokens = shared + tail
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=4)
        run(p, d)
        assert d.outputs[f"d{i}"] == expected(tokens, 4)
    check(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("late", [0.0, 0.003], ids=["prompt", "late"])
def test_a_crowd_in_caches_too_small_for_it(engines, runner, mode, late) -> None:
    """Queues, preemption on decode, blocks that go from hand to hand."""
    fabric = TwinFabric(Faults(delay=(0.0, 0.01), notification_delay=(0.0, 0.005)), seed=3)
    p = engines("p", fabric, mode=mode, runner=runner, num_blocks=30, platform=HostPlatform(fence_delay=late))
    d = engines("d", fabric, mode=mode, runner=runner, num_blocks=24, platform=HostPlatform(fence_delay=late))
    prompts = {i: prompt(1 + (i * 37) % 180, i) for i in range(32)}
    for i, tokens in prompts.items():
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=20)
    run(p, d, timeout=90)
    for i, tokens in prompts.items():
        assert d.outputs[f"d{i}"] == expected(tokens, 20), i
    check(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("late", [0.0, 0.003], ids=["prompt", "late"])
def test_prefill_is_preempted_in_mid_push(engines, runner, mode, late) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.02)), seed=5)
    platform = HostPlatform(fence_delay=late)
    p = engines("p", fabric, mode=mode, runner=runner, num_blocks=26, budget=24, platform=platform)
    d = engines("d", fabric, mode=mode, runner=runner, num_blocks=200)
    preempt_prefills(p, d)
    check(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("when", ["queued", "waiting", "running"])
def test_decode_aborts(engines, runner, when) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, runner=runner), engines("d", fabric, runner=runner)
    tokens = prompt(100, 5)
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=50)
    if when != "queued":
        d.step()
    if when == "running":
        p.add("p", tokens, prefill_leg("t"))
        run(p, d, until=lambda: len(d.outputs["d"]) > 2)
    d.abort("d")
    if when != "running":
        p.add("p", tokens, prefill_leg("t"))
    run(p, d)
    check(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_prefill_aborts(engines, runner, mode, policy) -> None:
    fabric = TwinFabric()
    p = engines("p", fabric, runner=runner, mode=mode)
    d = engines("d", fabric, runner=runner, mode=mode, policy=policy)
    tokens = prompt(200, 6)
    p.add("p", tokens, prefill_leg("t"))
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
    p.step()
    d.step()
    p.abort("p")
    run(p, d)
    if policy == "recompute":
        assert d.outputs["d"] == expected(tokens, 3)
    else:
        assert str(d.finish_reasons["d"]).lower().endswith("error")
    check(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_an_address_where_nobody_listens(engines, policy) -> None:
    fabric = TwinFabric()
    d = engines("d", fabric, policy=policy, connect_timeout=0.5)
    tokens = prompt(100, 7)
    params = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_engine_id": "p",
        "transfer_id": "t",
    }
    d.add("d", tokens, params, max_tokens=3)
    run(d)
    if policy == "recompute":
        assert d.outputs["d"] == expected(tokens, 3)
    else:
        assert str(d.finish_reasons["d"]).lower().endswith("error")
    check(d)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes", "remote_host": "h"},
        {"do_remote_prefill": True, "remote_host": 5, "remote_port": 1},
        {"do_remote_prefill": True, "remote_host": "h", "remote_port": 10**9},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_decode": True, "transfer_id": "x" * 10_000},
        {"do_remote_decode": True, "transfer_id": ["x"]},
        {"do_remote_decode": True, "transfer_id": None, "remote_block_ids": "junk"},
    ],
)
def test_malformed_params_are_computed_locally(engines, params) -> None:
    d = engines("d", TwinFabric())
    tokens = prompt(40, 8)
    d.add("d", tokens, params, max_tokens=2)
    run(d)
    assert d.outputs["d"] == expected(tokens, 2)
    check(d)


@pytest.mark.parametrize("known", [True, False], ids=["a leg", "no leg"])
def test_params_do_not_travel_to_the_workers(engines, known) -> None:
    """A client may make them as large, and nest them as deeply, as it likes; vLLM pickles what the workers get."""
    d = engines("d", TwinFabric())
    params: dict = {}
    for _ in range(2000):
        params = {"a": params}
    params = {"deep": params, "do_remote_decode": known, "transfer_id": "t"}
    d.add("d", prompt(40, 8), params)
    mine = d.scheduler.requests["d"].sampling_params
    d.scheduler.requests["d"].sampling_params.extra_args["another"] = 1
    sent = []
    execute = d._execute
    d._execute = lambda scheduled: (sent.append(pickle.dumps(scheduled.scheduled_new_reqs)), execute(scheduled))[1]
    run(d)
    assert b"another" in sent[0]
    assert mine.extra_args == {"another": 1}
    assert d.outputs["d"] == expected(prompt(40, 8), 1)
    check(d)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("change", ["a token", "two tokens more", "two tokens less", "another token and one more"])
def test_legs_with_different_prompts_exchange_nothing(engines, mode, change) -> None:
    """Else decode would answer from another prompt's KV, and keep it in its prefix cache for everybody."""
    fabric = TwinFabric()
    p, d = engines("p", fabric, mode=mode), engines("d", fabric, mode=mode, policy="recompute")
    tokens = prompt(100, 9)
    other = {
        "a token": [*tokens[:50], 7, *tokens[51:]],
        "two tokens more": [*tokens, 7, 8],
        "two tokens less": tokens[:-2],
        "another token and one more": [*tokens[:50], 7, *tokens[51:], 7],
    }[change]
    p.add("p", tokens, prefill_leg("t"))
    d.add("d", other, decode_leg(p, "t"), max_tokens=3)
    run(p, d)
    assert d.outputs["d"] == expected(other, 3)
    assert next(r for r in p.worker._worker._threads.mover.records.last(9)).bytes == 0
    d.add("again", other, None, max_tokens=3)
    run(d)
    assert d.outputs["again"] == expected(other, 3)
    check(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("length", [2, 3, 32, 33, 34, 100])
def test_a_prompt_that_is_a_token_longer_on_one_side_is_moved(engines, mode, more, length) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, mode=mode), engines("d", fabric, mode=mode, policy="fail")
    longer = prompt(length, 10)
    ours, theirs = (longer, longer[:-1]) if more < 0 else (longer[:-1], longer)
    p.add("p", ours, prefill_leg("t"))
    d.add("d", theirs, decode_leg(p, "t"), max_tokens=3)
    run(p, d)
    assert d.outputs["d"] == expected(theirs, 3)
    if len(theirs) > 1:
        assert d.worker._worker._threads.mover.records.last(1)[0].tokens == len(theirs) - 1
    check(p, d)


def test_a_request_for_the_prompts_log_probabilities_is_computed_on_decode(engines) -> None:
    """vLLM would fill the positions that it did not compute with whatever its memory held."""
    fabric = TwinFabric()
    p, d = engines("p", fabric), engines("d", fabric)
    tokens = prompt(100, 10)
    p.add("p", tokens, prefill_leg("t"))
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=3, prompt_logprobs=1)
    run(p, d)
    assert d.outputs["d"] == expected(tokens, 3)
    assert not d.worker._worker._threads.mover.records.last(9), "nothing may be loaded for such a request"
    check(p, d)


def test_caches_full_of_handoffs_that_wait_for_each_other_come_free(engines) -> None:
    """Prefill holds A and has no room for B; decode has blocks for B alone: the order of the legs differs."""
    fabric = TwinFabric()
    options = {"num_blocks": 24, "leg_timeout": 1.0, "hold_limit": 3.0, "policy": "recompute"}
    p, d = engines("p", fabric, **options), engines("d", fabric, **options)
    prompts = {"A": prompt(300, 1), "B": prompt(300, 2)}
    for name, tokens in prompts.items():
        p.add(f"p{name}", tokens, prefill_leg(name))
    for name, tokens in reversed(prompts.items()):
        d.add(f"d{name}", tokens, decode_leg(p, name), max_tokens=3)
    run(p, d, timeout=40)
    for name, tokens in prompts.items():
        assert d.outputs[f"d{name}"] == expected(tokens, 3)
    check(p, d)


def test_a_second_decode_leg_that_is_given_up_leaves_the_first_alone(engines) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric), engines("d", fabric, num_blocks=12)
    blocker, tokens = prompt(100, 3), prompt(120, 4)
    d.add("blocker", blocker, None, max_tokens=60)
    run(d, until=lambda: len(d.outputs["blocker"]) > 1)
    d.add("d1", tokens, decode_leg(p, "t"), max_tokens=3)
    d.add("d2", tokens, decode_leg(p, "t"), max_tokens=3)
    d.step()
    d.abort("d2")
    time.sleep(0.2)
    p.add("p", tokens, prefill_leg("t"))
    run(p, d)
    assert d.outputs["d1"] == expected(tokens, 3)
    check(p, d)


def test_an_engine_that_is_named_as_its_own_prefill_computes_by_itself(engines) -> None:
    d = engines("d", TwinFabric())
    tokens = prompt(60, 5)
    d.add("d", tokens, decode_leg(d, "t"), max_tokens=3)
    run(d)
    assert d.outputs["d"] == expected(tokens, 3)
    check(d)

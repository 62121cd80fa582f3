"""Asynchronous scheduling: a step is scheduled and launched before the one before it has been heard of. vLLM's real scheduler for it.

vLLM's CPU engine never does so, on accelerators it is the default. What it changes for a connector: a request may be preempted,
or end, while a step that computes for it is still under way and writes into blocks that are somebody else's by then.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.contract.test_hooks import check, decode_leg, engines, preempt_prefills, prefill_leg, prompt, run, tiny  # noqa: F401 - fixtures
from tests.support.engine import expected

pytestmark = pytest.mark.contract

ways = pytest.mark.parametrize(
    ("runner", "mode", "late"), [("v1", "push", 0.0), ("v1", "pull", 0.003), ("v2", "push", 0.003), ("v2", "pull", 0.0)]
)
roles = pytest.mark.parametrize(
    "roles", [("kv_producer", "kv_consumer"), ("kv_both", "kv_both")], ids=["each its role", "both"]
)


@ways
def test_tokens_are_right_with_a_step_under_way(engines, runner, mode, late) -> None:  # noqa: F811
    fabric = TwinFabric(Faults(delay=(0.0, 0.005)))
    make = {"mode": mode, "runner": runner, "ahead": True}
    p = engines("p", fabric, platform=HostPlatform(fence_delay=late), **make)
    d = engines("d", fabric, platform=HostPlatform(fence_delay=late), **make)
    for i, length in enumerate((1, 15, 16, 17, 64, 65, 200)):
        tokens = prompt(length, i)
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=5)
        run(p, d)
        assert d.outputs[f"d{i}"] == expected(tokens, 5)
    check(p, d)


@roles
@ways
def test_blocks_go_from_hand_to_hand_under_steps_that_still_write(engines, runner, mode, late, roles) -> None:  # noqa: F811
    """Decode's cache is too small for the crowd: requests are preempted, and end, with a step under way.

    In an engine that is both, each preempted request would lose its token each time, and nothing would ever end, were delivery asked for.
    """
    fabric = TwinFabric(Faults(delay=(0.0, 0.01), notification_delay=(0.0, 0.005)), seed=3)
    make = {"mode": mode, "runner": runner, "ahead": True}
    p = engines("p", fabric, num_blocks=30, platform=HostPlatform(fence_delay=late), role=roles[0], **make)
    d = engines("d", fabric, num_blocks=24, platform=HostPlatform(fence_delay=late), role=roles[1], **make)
    prompts = {i: prompt(1 + (i * 37) % 180, i) for i in range(32)}
    for i, tokens in prompts.items():
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=20)
    run(p, d, timeout=90)
    for i, tokens in prompts.items():
        assert d.outputs[f"d{i}"] == expected(tokens, 20), i
    check(p, d)


@roles
@ways
def test_prefill_is_preempted_with_a_step_under_way(engines, runner, mode, late, roles) -> None:  # noqa: F811
    """A prompt that loses its blocks with its last token in flight is computed again where vLLM does that, and fails elsewhere."""
    fabric = TwinFabric(Faults(delay=(0.0, 0.02)), seed=5)
    make = {"mode": mode, "runner": runner, "ahead": True}
    p = engines("p", fabric, num_blocks=26, budget=24, platform=HostPlatform(fence_delay=late), role=roles[0], **make)
    d = engines("d", fabric, num_blocks=200, policy="recompute", role=roles[1], **make)
    preempt_prefills(p, d)
    for i in range(8):
        assert p.outputs[f"local{i}"] == expected(prompt(12, 100 + i), 40)
    check(p, d)


@ways
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_aborts_with_a_step_under_way(engines, runner, mode, late, when) -> None:  # noqa: F811
    fabric = TwinFabric(Faults(delay=(0.0, 0.01)))
    make = {"mode": mode, "runner": runner, "ahead": True}
    p = engines("p", fabric, platform=HostPlatform(fence_delay=late), **make)
    d = engines("d", fabric, num_blocks=24, platform=HostPlatform(fence_delay=late), **make)
    tokens, after = prompt(200, 5), prompt(190, 6)
    p.add("p", tokens, prefill_leg("t"))
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=50)
    if when == "running":
        run(p, d, until=lambda: len(d.outputs["d"]) > 2)
    else:
        d.step()
        p.step()
    d.abort("d")
    p.add("p2", after, prefill_leg("t2"))
    d.add("d2", after, decode_leg(p, "t2"), max_tokens=3)
    run(p, d)
    assert d.outputs["d2"] == expected(after, 3)
    check(p, d)

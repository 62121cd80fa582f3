"""What a vLLM lacks is off, is said once at start, and no handoff is the worse for it: vLLM's real scheduler, asked for less."""

from __future__ import annotations

import dataclasses
import logging

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.connector import compat, connectors
from kvxfer.transport.twin import Faults
from tests.contract.test_hooks import check, decode_leg, engines, prefill_leg, prompt, run, tiny  # noqa: F401 - fixtures
from tests.contract.test_pins import Watching, pins
from tests.support.engine import expected

pytestmark = pytest.mark.contract


@pytest.fixture
def lacking(monkeypatch):
    def lack(**features) -> None:
        found = dataclasses.replace(compat.features(), **features)
        monkeypatch.setattr(compat, "features", lambda: found)

    return lack


@pytest.fixture
def logged(monkeypatch, caplog):
    """What kvxfer logs, wherever the plugin sends it."""
    logger = logging.getLogger("kvxfer")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, "kvxfer")
    return caplog


@pytest.mark.parametrize("bound", [True, False], ids=["pool, but no word from the workers", "no pool"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_without_pins_a_prompt_is_written_when_it_is_computed(
    engines,  # noqa: F811
    lacking,
    monkeypatch,
    logged,
    runner,
    bound,
) -> None:
    lacking(pinning=False)
    if not bound:
        monkeypatch.setattr(connectors.KvxferConnector, "bind_gpu_block_pool", lambda _self, _pool: None)
    fabric = Watching(Faults(delay=(0.0, 0.01)))
    p, d = engines("p", fabric, runner=runner), engines("d", fabric, runner=runner)
    said = [line for line in logged.messages if "lets no connector pin" in line]
    assert [line.partition(":")[0] for line in said] == ["engine p", "engine d"], "both can prefill, and say it once"
    assert pins(p) is None
    tokens = prompt(300, 1)
    fabric.watch({"t": tokens})
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
    d.step()
    p.add("p", tokens, prefill_leg("t"))
    while p.scheduler.requests.get("p") is not None and not p.scheduler.requests["p"].is_finished():
        assert fabric.carried == 0, "written while it could be preempted"
        p.step()
    run(p, d)
    assert fabric.carried
    assert fabric.foreign == []
    assert d.outputs["d"] == expected(tokens, 3)
    check(p, d)


def test_without_pins_the_crowd_is_served_all_the_same(engines, lacking) -> None:  # noqa: F811
    lacking(pinning=False)
    fabric = Watching(Faults(delay=(0.0, 0.02)), seed=5)
    p = engines("p", fabric, num_blocks=26, budget=24, prefix_caching=False)
    d = engines("d", fabric, num_blocks=200)
    for i in range(8):
        p.add(f"local{i}", prompt(12, 100 + i), None, max_tokens=40)
    prompts = {i: prompt(180 + i, i) for i in range(8)}
    fabric.watch({f"t{i}": tokens for i, tokens in prompts.items()})
    for i, tokens in prompts.items():
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=3)
    run(p, d, timeout=90)
    assert fabric.foreign == []
    for i, tokens in prompts.items():
        assert d.outputs[f"d{i}"] == expected(tokens, 3)
    check(p, d)


def test_what_is_all_there_is_not_mentioned(engines, logged) -> None:  # noqa: F811
    engines("p", Watching())
    assert logged.messages
    assert [one for one in logged.messages if "this vLLM" in one] == []

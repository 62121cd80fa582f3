"""What a vLLM lets a connector do is found by looking at its base class; what it lacks is said in a line, or refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvxfer.connector import compat
from kvxfer.errors import ConfigError

MORE = {
    "bind_gpu_block_pool",
    "build_connector_worker_meta",
    "has_pending_push_work",
    "requires_kv_delivery",
    "get_transfer_results",
    "register_cross_layers_kv_cache",
}
PATH = "vllm.distributed.kv_transfer.kv_connector.v1"


@pytest.fixture
def vllm(monkeypatch):
    """Make a vLLM with these hooks, besides or instead of those that are needed."""

    def make(*hooks: str, needed=compat.NEEDED, layouts=(), classes=("KVConnectorWorkerMetadata",)) -> None:
        base = ModuleType(f"{PATH}.base")
        base.KVConnectorBase_V1 = type("KVConnectorBase_V1", (), dict.fromkeys((*needed, *hooks), lambda self: None))
        for name in classes:
            setattr(base, name, type(name, (), {}))
        names = PATH.split(".")
        for i in range(len(names)):
            monkeypatch.setitem(sys.modules, ".".join(names[: i + 1]), ModuleType(names[i]))
        sys.modules[PATH].base = base
        monkeypatch.setitem(sys.modules, f"{PATH}.base", base)
        monkeypatch.setitem(sys.modules, "vllm.v1", ModuleType("vllm.v1"))
        named = ModuleType("vllm.v1.kv_cache_layout")
        named.KVCacheLayout = SimpleNamespace(__members__=dict.fromkeys(layouts))
        monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", named if layouts else None)
        compat.features.cache_clear()

    yield make
    compat.features.cache_clear()


def config(role: str = "kv_producer", *, ahead: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role), scheduler_config=SimpleNamespace(async_scheduling=ahead)
    )


def costs(mode: str = "push", **options) -> list[str]:
    return list(compat.features().costs(mode, config(**options)))


def test_where_everything_is_there_nothing_is_said(vllm) -> None:
    vllm(*MORE, layouts=["BLHNC"])
    assert costs(role="kv_producer") == costs(ahead=False) == costs("pull", role="kv_consumer") == []
    assert compat.features() == compat.Features(
        pinning=True, stepping=True, delivery=True, failed_requests=True, block_major="layout"
    )


@pytest.mark.parametrize("hook", ["bind_gpu_block_pool", "build_connector_worker_meta"])
def test_pins_take_the_pool_and_a_word_from_the_workers(vllm, hook) -> None:
    vllm(*MORE - {hook})
    (line,) = costs()
    assert "only when they are computed whole" in line
    assert costs("pull") == costs(role="kv_consumer") == [], "nothing is written from such an engine"


def test_the_workers_word_needs_something_to_carry_it(vllm) -> None:
    vllm(*MORE, classes=())
    assert not compat.features().pinning
    assert compat.base_of("KVConnectorWorkerMetadata") is object


def test_a_class_that_is_there_is_taken(vllm) -> None:
    vllm(*MORE)
    assert compat.base_of("KVConnectorWorkerMetadata").__name__ == "KVConnectorWorkerMetadata"


def test_an_engine_that_does_not_step_for_us_is_said_on_either_side(vllm) -> None:
    vllm(*MORE - {"has_pending_push_work"})
    for line in (*costs(), *costs("pull", role="kv_consumer")):
        assert "waits for the next one" in line
    assert len(costs()) == 1


def test_a_lost_last_token_matters_only_where_steps_overlap_on_prefill(vllm) -> None:
    vllm(*MORE - {"requires_kv_delivery"})
    assert ["--no-async-scheduling" in line for line in costs("pull")] == [True]
    assert costs(ahead=False) == costs(role="kv_consumer") == []


def test_an_engine_that_is_both_goes_without_delivery(vllm) -> None:
    vllm(*MORE)
    assert [("kv_both" in line, "--no-async-scheduling" in line) for line in costs(role="kv_both")] == [(True, True)]
    assert costs(role="kv_both", ahead=False) == []


@pytest.mark.parametrize(
    ("hooks", "layouts", "how"),
    [
        (MORE, ["LBHNC"], "layout"),
        (MORE, [], "cross layers"),
        (MORE - {"register_cross_layers_kv_cache"}, [], ""),
    ],
)
def test_how_a_block_major_cache_is_asked_for(vllm, hooks, layouts, how) -> None:
    vllm(*hooks, layouts=layouts)
    assert compat.features().block_major == how


@pytest.mark.parametrize("hook", compat.NEEDED)
def test_a_vllm_that_would_never_call_us_is_refused(vllm, hook) -> None:
    """Else the engine would start, and handoffs would hang, or lack their fences."""
    vllm(*MORE, needed=set(compat.NEEDED) - {hook})
    with pytest.raises(ConfigError, match=rf"does not call {hook} of a KV connector"):
        compat.features()


def test_it_is_found_out_once(vllm) -> None:
    vllm(*MORE)
    assert compat.features() is compat.features()

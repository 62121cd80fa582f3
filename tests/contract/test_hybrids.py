"""A cache of two groups, full attention and a sliding window, under vLLM's real scheduler, block pool and hooks.

The engines check at every step that each position that a layer attends to is its own; both groups' blocks come from one pool and
lie in the same memory. So a block that vLLM has given back, or that is the null block, shows wherever it is taken for a window's.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from kvxfer.connector import compat
from kvxfer.connector.metadata import RankNews
from kvxfer.connector.pins import Pins
from kvxfer.errors import ConfigError
from kvxfer.transport.twin import Faults, TwinFabric
from kvxfer_host import HostPlatform
from tests.contract.test_hooks import check, decode_leg, preempt_prefills, prefill_leg, prompt, run, tiny  # noqa: F401 - fixture
from tests.support.engine import SimEngine, expected

pytestmark = pytest.mark.contract

BLOCK, WINDOW = 16, 40
AROUND = (*range(88, 106), 200)
"""Prompts of every length modulo a block, longer than the window and than a step's chunk; one of several chunks."""


@pytest.fixture
def engines(tiny):  # noqa: F811 - the fixture
    made: list[SimEngine] = []

    def make(name: str, fabric: TwinFabric, **options) -> SimEngine:
        made.append(SimEngine(name, fabric, tiny, **{"window": WINDOW, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def serve(p: SimEngine, d: SimEngine, name: str, tokens: list[int], count: int = 3) -> None:
    p.add(f"p{name}", tokens, prefill_leg(f"t{name}"))
    d.add(f"d{name}", tokens, decode_leg(p, f"t{name}"), max_tokens=count)
    run(p, d, timeout=90)
    assert d.outputs[f"d{name}"] == expected(tokens, count), name


def clean(*engines: SimEngine) -> None:
    """Nobody holds or pins a block, read foreign KV, or wrote into the null block."""
    check(*engines)
    for engine in engines:
        pins = engine.scheduler.connector._scheduler._pins
        assert pins.count == 0
        assert not pins
        assert not any(bool(cache[0].any()) for cache in engine.caches.values())


def last(engine: SimEngine):
    return engine.worker._worker._threads.mover.records.last(1)[0]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("late", [0.0, 0.003], ids=["prompt", "late"])
def test_prompts_shorter_and_longer_than_the_window(engines, runner, mode, late) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.003)))
    settings = {"mode": mode, "runner": runner, "policy": "fail", "prefix_caching": False}
    p = engines("p", fabric, platform=HostPlatform(fence_delay=late), **settings)
    d = engines("d", fabric, platform=HostPlatform(fence_delay=late), **settings)
    for length in (1, 2, 15, 16, 17, 33, 39, 40, 41, 42, 55, 56, 57, *AROUND):
        serve(p, d, str(length), prompt(length, length), 20)
        if length > 1:
            record = last(d)
            assert (record.outcome, record.tokens) == ("done", length - 1), length
    moved = max(last(p).bytes, last(d).bytes)
    layer = p.worker._worker._threads.mover.cache.groups[0].block_bytes
    assert moved == (13 + 3) * layer, "of the window's group the last 40 positions, not all 200"
    clean(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("window", [16, 17, 31, 32, 33, 48])
def test_windows_of_every_kind(engines, mode, window) -> None:
    fabric = TwinFabric()
    p, d = (engines(name, fabric, mode=mode, window=window, prefix_caching=False) for name in "pd")
    for length in AROUND:
        serve(p, d, str(length), prompt(length, length), 6)
        assert last(d).outcome == "done"
    clean(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_where_the_last_positions_place_would_have_to_be_asked_for_later_the_prompt_is_computed_on_decode(
    engines, mode
) -> None:
    fabric = TwinFabric()
    p, d = (engines(name, fabric, mode=mode, window=34, prefix_caching=False) for name in "pd")
    for length in AROUND:
        before = len(d.worker._worker._threads.mover.records.last(999))
        serve(p, d, str(length), prompt(length, length), 4)
        loaded = len(d.worker._worker._threads.mover.records.last(999)) > before
        assert loaded is (length % BLOCK != 1), length
    clean(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_without_its_pins_a_windows_first_block_is_found_to_be_gone(engines, monkeypatch, mode) -> None:
    """The check of the check: vLLM lets go of it when the prompt ends, at some lengths."""
    monkeypatch.setattr(Pins, "pin_window", lambda self, request_id, blocks: None)
    fabric = TwinFabric(Faults(delay=(0.05, 0.05)))
    p, d = (engines(name, fabric, mode=mode, prefix_caching=False, policy="fail", pin_limit=0.0) for name in "pd")
    for length in AROUND:
        tokens = prompt(length, length)
        p.add(f"p{length}", tokens, prefill_leg(f"t{length}"))
        d.add(f"d{length}", tokens, decode_leg(p, f"t{length}"), max_tokens=2)
        for other in range(2):
            p.add(f"o{other}-{length}", prompt(100, 1000 + length + other), None)
        run(p, d)
    assert d.problems or any(d.outputs[f"d{length}"] != expected(prompt(length, length), 2) for length in AROUND)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_prefix_hits_on_either_side(engines, runner, mode) -> None:
    """Each request asks for what the ones before left in the caches: of windows whole blocks, or wrong tokens later."""
    fabric = TwinFabric()
    p = engines("p", fabric, runner=runner, mode=mode, num_blocks=200)
    d = engines("d", fabric, runner=runner, mode=mode, num_blocks=200)
    base = prompt(300, 3)
    for i, (shared, more) in enumerate(
        [
            (100, 0),
            (100, 3),
            (96, 0),
            (97, 30),
            (110, 0),
            (110, 100),
            (210, 0),
            (160, 9),
            (80, 1),
            (64, 64),
            (300, 0),
            (299, 1),
        ]
    ):
        serve(p, d, str(i), base[:shared] + prompt(more, 50 + i), 20)
    d.add("again", base[:210], None, max_tokens=5)
    run(d)
    assert d.outputs["again"] == expected(base[:210], 5)
    clean(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("late", [0.0, 0.003], ids=["prompt", "late"])
def test_prefill_is_preempted_in_mid_stream(engines, runner, mode, late) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.05)), seed=5)
    platform = HostPlatform(fence_delay=late)
    p = engines(
        "p", fabric, mode=mode, runner=runner, num_blocks=40, budget=24, platform=platform, prefix_caching=False
    )
    d = engines("d", fabric, mode=mode, runner=runner, num_blocks=400)
    preempt_prefills(p, d)
    clean(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_crowd_in_caches_too_small_for_it(engines, runner, mode) -> None:
    fabric = TwinFabric(Faults(delay=(0.0, 0.01), notification_delay=(0.0, 0.005)), seed=3)
    p = engines("p", fabric, mode=mode, runner=runner, num_blocks=44)
    d = engines("d", fabric, mode=mode, runner=runner, num_blocks=40)
    prompts = {i: prompt(1 + (i * 37) % 180, i) for i in range(24)}
    for i, tokens in prompts.items():
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=20)
    run(p, d, timeout=90)
    for i, tokens in prompts.items():
        assert d.outputs[f"d{i}"] == expected(tokens, 20), i
    clean(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_a_prefill_leg_that_goes_on_generating_keeps_the_prompts_window(engines, mode, limit) -> None:
    """Its own window moves on, and vLLM gives the blocks behind it to others, before anybody has read them."""
    fabric = TwinFabric(Faults(delay=(0.02, 0.05)))
    p = engines("p", fabric, mode=mode, prefix_caching=False, pin_limit=limit)
    d = engines("d", fabric, mode=mode, policy="fail")
    for length in (90, 103):
        tokens = prompt(length, length)
        p.add(f"p{length}", tokens, prefill_leg(f"t{length}"), max_tokens=45)
        for i in range(2):
            p.add(f"o{length}{i}", prompt(60, 7 * length + i), None, max_tokens=30)
        d.add(f"d{length}", tokens, decode_leg(p, f"t{length}"), max_tokens=3)
    run(p, d, timeout=90)
    for length in (90, 103):
        assert d.outputs[f"d{length}"] == expected(prompt(length, length), 3)
    clean(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_prompt_that_is_a_token_longer_on_one_side_is_moved(engines, mode, more) -> None:
    fabric = TwinFabric()
    p, d = (engines(name, fabric, mode=mode, policy="fail", prefix_caching=False) for name in "pd")
    for length in AROUND:
        longer = prompt(length, 10)
        ours, theirs = (longer, longer[:-1]) if more < 0 else (longer[:-1], longer)
        p.add(f"p{length}", ours, prefill_leg(f"t{length}"))
        d.add(f"d{length}", theirs, decode_leg(p, f"t{length}"), max_tokens=3)
        run(p, d)
        assert d.outputs[f"d{length}"] == expected(theirs, 3), length
        assert last(d).tokens == len(theirs) - 1
    clean(p, d)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails(engines, runner, mode, policy) -> None:
    """Nothing of it counts, now or in the prefix cache, and the engine goes on."""
    fabric = TwinFabric()
    p = engines("p", fabric, runner=runner, mode=mode)
    d = engines("d", fabric, runner=runner, mode=mode, policy=policy)
    base = prompt(300, 6)
    serve(p, d, "before", base[:100])
    for length in (200, 230):
        tokens = base[:length]
        p.add(f"p{length}", tokens, prefill_leg(f"t{length}"))
        d.add(f"d{length}", tokens, decode_leg(p, f"t{length}"), max_tokens=30)
        p.step()
        d.step()
        p.abort(f"p{length}")
        run(p, d)
        if policy == "recompute":
            assert d.outputs[f"d{length}"] == expected(tokens, 30)
        else:
            assert str(d.finish_reasons[f"d{length}"]).lower().endswith("error")
            assert d.outputs[f"d{length}"] == expected(tokens, 30)[: len(d.outputs[f"d{length}"])]
        clean(p, d)
    serve(p, d, "after", base, 30)
    assert last(d).outcome == "done"
    clean(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_an_abort_that_crosses_a_failed_load(engines, policy) -> None:
    d = engines("d", TwinFabric(), policy=policy, connect_timeout=0.2)
    nowhere = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_engine_id": "p",
        "transfer_id": "t",
    }
    d.add("d", prompt(100, 7), nowhere, max_tokens=3)
    d.step()
    d.abort("d")
    run(d)
    d.add("e", prompt(100, 7), None, max_tokens=3)
    run(d)
    assert d.outputs["e"] == expected(prompt(100, 7), 3)
    clean(d)


def test_a_load_that_failed_on_one_rank_has_failed_when_the_last_one_reports(engines) -> None:
    half = engines("d", TwinFabric()).scheduler.connector._scheduler
    told: list[str] = []
    half._fail_load = told.append
    news = RankNews({1: 1}, {"r"}).aggregate(RankNews({1: 1, 2: 1}))
    assert news == RankNews({1: 2, 2: 1}, {"r"})
    output = SimpleNamespace(
        kv_connector_worker_meta=RankNews({}, {"r"}), finished_recving={"s"}, finished_sending=None
    )
    half.update_connector_output(output)
    assert told == []
    for _ in range(2):
        output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"r"}, finished_sending=None)
        half.update_connector_output(output)
    assert told == ["r"]


@pytest.mark.parametrize("when", ["queued", "waiting", "running"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_decode_aborts(engines, mode, when) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, mode=mode), engines("d", fabric, mode=mode)
    tokens = prompt(200, 5)
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
    clean(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_an_engine_without_the_window_is_refused_with_the_cure(engines, mode) -> None:
    fabric = TwinFabric()
    p, d = engines("p", fabric, mode=mode), engines("d", fabric, mode=mode, window=None, policy="recompute")
    tokens = prompt(100, 9)
    p.add("p", tokens, prefill_leg("t"))
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=3)
    run(p, d)
    assert d.outputs["d"] == expected(tokens, 3)
    assert "--disable-hybrid-kv-cache-manager" in last(d).reason


# --- what is refused at start -------------------------------------------------------------------------------------------


def spec(kind: str, **changes) -> object:
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
    if kind == "MambaSpec":
        shape = {"block_size": BLOCK, "shapes": ((4, 4),), "dtypes": (torch.float32,)}
    return getattr(kv_cache_interface, kind)(**shape | changes)


def groups(*specs: object) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=one, layer_names=[f"layers.{i}"]) for i, one in enumerate(specs)]
    )


def config(**changes) -> SimpleNamespace:
    cascade = changes.pop("cascade", False)
    return SimpleNamespace(
        **{"speculative_config": None, "model_config": SimpleNamespace(disable_cascade_attn=not cascade)} | changes
    )


FULL, SLIDING = spec("FullAttentionSpec"), spec("SlidingWindowSpec", sliding_window=WINDOW)


@pytest.mark.parametrize(
    "cache",
    [
        (FULL,),
        (SLIDING,),
        (FULL, SLIDING),
        (SLIDING, FULL, SLIDING, spec("SlidingWindowSpec", sliding_window=2 * WINDOW)),
        (spec("FullAttentionSpec", sliding_window=WINDOW),),
    ],
)
def test_full_attention_and_sliding_windows_are_taken(cache) -> None:
    compat.check_groups(config(), groups(*cache))


@pytest.mark.parametrize(
    ("cache", "changes", "what", "cure"),
    [
        ((FULL, spec("MambaSpec")), {}, "2 groups, with MambaSpec", "without disaggregation"),
        ((spec("MambaSpec"),), {}, "1 groups, with MambaSpec", "without disaggregation"),
        (
            (FULL, spec("ChunkedLocalAttentionSpec", attention_chunk_size=64)),
            {},
            "with ChunkedLocalAttentionSpec",
            "--disable-hybrid-kv-cache-manager",
        ),
        ((FULL, spec("MLAAttentionSpec")), {}, "with MLAAttentionSpec", "--disable-hybrid-kv-cache-manager"),
        (
            (FULL, spec("SlidingWindowSpec", sliding_window=WINDOW, extra_retained_tokens=2)),
            {},
            "keep more than attention looks back to",
            "--disable-hybrid-kv-cache-manager",
        ),
        ((FULL, SLIDING), {"speculative_config": object()}, "speculative", "--disable-hybrid-kv-cache-manager"),
        ((FULL, SLIDING), {"cascade": True}, "cascade attention", "--disable-hybrid-kv-cache-manager"),
        (
            (FULL, UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": FULL, "b": SLIDING})),
            {},
            "layers have different windows",
            "--disable-hybrid-kv-cache-manager",
        ),
    ],
)
def test_what_is_not_proven_is_refused_with_what_to_set(cache, changes, what, cure) -> None:
    with pytest.raises(ConfigError) as refused:
        compat.check_groups(config(**changes), groups(*cache))
    assert what in str(refused.value)
    assert cure in str(refused.value)


def test_a_vllm_that_cannot_be_told_of_failed_loads_is_refused(monkeypatch) -> None:
    monkeypatch.delattr(base, "KVConnectorTransferResults", raising=False)
    with pytest.raises(
        ConfigError, match=r"install vLLM 0\.31 or later, or start with --disable-hybrid-kv-cache-manager"
    ):
        compat.whole_load_failures()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_with_the_hybrid_manager_off_all_positions_of_all_layers_move(engines, mode) -> None:
    """VLLM notes down the window of some layers in the one group that then keeps everything of all of them."""
    fabric = TwinFabric()
    p, d = (engines(name, fabric, mode=mode, window=None, note=WINDOW) for name in "pd")
    serve(p, d, "", prompt(200, 1), 5)
    assert (last(d).outcome, max(last(p).bytes, last(d).bytes)) == ("done", 13 * last_map(d).block_bytes)
    check(p, d)


def last_map(engine: SimEngine):
    return engine.worker._worker._threads.mover.cache

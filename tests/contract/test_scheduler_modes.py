"""The scheduler's modes, each side's on its own: chunked prefill, prefix caching, both roles in one engine, what else shapes KV
than tokens (LoRA, images, cache salt), and another connector beside ours under vLLM's MultiConnector. vLLM's real scheduler,
block pool, hashes and hooks; the memory is tagged, so KV that is another's shows at the step that reads it.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvxfer.connector.compat import features
from kvxfer.errors import ConfigError
from kvxfer.transport.twin import Faults, TwinFabric
from tests.contract.test_hooks import check, decode_leg, engines, prefill_leg, prompt, run, tiny  # noqa: F401 - fixtures
from tests.support.engine import contents, expected
from tests.support.offloading import OffloadingInSmall

pytestmark = pytest.mark.contract

WHOLE = {"budget": 2048, "vllm": {"enable_chunked_prefill": False}}
CHUNKED = {"budget": 64, "vllm": {"enable_chunked_prefill": True}}

modes = pytest.mark.parametrize("mode", ["push", "pull"])
ways = pytest.mark.parametrize(("mode", "runner"), [("push", "v2"), ("pull", "v1")])
either = pytest.mark.parametrize(("prefill", "decode"), list(itertools.product([True, False], repeat=2)))


@either
@ways
def test_chunked_prefill_on_either_side(engines, mode, runner, prefill, decode) -> None:  # noqa: F811
    fabric = TwinFabric(Faults(delay=(0.0, 0.005)))
    p = engines("p", fabric, mode=mode, runner=runner, **(CHUNKED if prefill else WHOLE))
    d = engines("d", fabric, mode=mode, runner=runner, **(CHUNKED if decode else WHOLE))
    for engine, chunked in ((p, prefill), (d, decode)):
        assert engine.config.scheduler_config.enable_chunked_prefill is chunked
    for i, length in enumerate((1, 16, 17, 300)):
        tokens = prompt(length, i)
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=4)
        d.add(f"local{i}", prompt(40, 50 + i), None, max_tokens=4)
        run(p, d)
        assert d.outputs[f"d{i}"] == expected(tokens, 4)
        assert d.outputs[f"local{i}"] == expected(prompt(40, 50 + i), 4)
    check(p, d)


@either
@ways
def test_prefix_caching_on_either_side(engines, mode, runner, prefill, decode) -> None:  # noqa: F811
    """A second prompt begins as the first one: what decode has cached is not moved again, whatever prefill has."""
    fabric = TwinFabric()
    p = engines("p", fabric, mode=mode, runner=runner, prefix_caching=prefill)
    d = engines("d", fabric, mode=mode, runner=runner, prefix_caching=decode)
    first = prompt(100, 1)
    second = first + prompt(60, 2)
    moved = []
    for i, tokens in enumerate((first, second, second)):
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=4)
        run(p, d)
        assert d.outputs[f"d{i}"] == expected(tokens, 4)
        moved.append(tokens_registered(d, f"d{i}"))
    # Decode's own prefix cache holds whole blocks of what came, and of what it made: six of the first, nine of the second.
    assert moved == ([99, 159 - 96, 0] if decode else [99, 159, 159])
    check(p, d)


def tokens_registered(engine, request_id: str) -> int:
    """How many positions a request's sink registered; 0 where there was no need for one."""
    records = engine.worker._worker._threads.mover.records.last(1000)
    return next((record.tokens for record in records if record.request_id == request_id), 0)


@ways
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_two_engines_of_both_roles_hand_over_both_ways_at_once(engines, mode, runner, ahead) -> None:  # noqa: F811
    fabric = TwinFabric(Faults(delay=(0.0, 0.01)), seed=1)
    make = {"mode": mode, "runner": runner, "role": "kv_both", "ahead": ahead, "num_blocks": 60}
    both = [engines("a", fabric, **make), engines("b", fabric, **make)]
    prompts = {i: prompt(20 + i * 17 % 150, i) for i in range(20)}
    for i, tokens in prompts.items():
        p, d = both if i % 2 else both[::-1]
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=6)
    run(*both, timeout=60)
    for i, tokens in prompts.items():
        assert both[i % 2].outputs[f"d{i}"] == expected(tokens, 6), i
    check(*both)


# --- what else than tokens shapes KV -----------------------------------------------------------------------------------

SHAPES = {
    "plain": {},
    "adapter a": {"lora": "a"},
    "adapter b": {"lora": "b"},
    "an image": {"images": [(20, 40, "hash-1")]},
    "another image": {"images": [(20, 40, "hash-2")]},
    "the image elsewhere": {"images": [(70, 40, "hash-1")]},
    "adapter and image": {"lora": "a", "images": [(20, 40, "hash-1")]},
    "a salt": {"salt": "tenant-1"},
    "another salt": {"salt": "tenant-2"},
}


def shaped(tokens: list[int], shape: dict) -> list[int]:
    return contents(tokens, shape.get("lora"), shape.get("images", ()))


@ways
def test_the_same_tokens_under_another_shape_never_get_anothers_kv(engines, mode, runner) -> None:  # noqa: F811
    """One after the other and all at once, with prefix caches on both sides that would love to share."""
    fabric = TwinFabric()
    p, d = (engines(name, fabric, mode=mode, runner=runner, num_blocks=200) for name in ("p", "d"))
    tokens = prompt(150, 3)
    cached: list[tuple[str | None, list[int]]] = []
    for together in (False, True):
        for name, shape in SHAPES.items():
            key = f"{name}-{together}".replace(" ", "_")
            p.add(f"p{key}", tokens, prefill_leg(key), **shape)
            d.add(f"d{key}", tokens, decode_leg(p, key), max_tokens=4, **shape)
            if not together:
                run(p, d)
                mine = (shape.get("salt"), shaped(tokens, shape))
                assert tokens_registered(d, f"d{key}") == 149 - shared(mine, cached), name
                cached.append(mine)
        run(p, d)
        for name, shape in SHAPES.items():
            key = f"{name}-{together}".replace(" ", "_")
            assert d.outputs[f"d{key}"] == expected(shaped(tokens, shape), 4), name
    check(p, d)


def shared(mine: tuple[str | None, list[int]], cached: list[tuple[str | None, list[int]]]) -> int:
    """How many positions of whole blocks a prefix cache of these has for me: as long as the salt and all contents are alike."""
    most = 0
    for salt, other in cached:
        alike = itertools.takewhile(lambda two: two[0] == two[1], zip(mine[1], other, strict=True))
        most = max(most, sum(1 for _ in alike) // 16 * 16 if salt == mine[0] else 0)
    return most


UNLIKE = [
    *((mode, "plain", name) for mode in ("push", "pull") for name in list(SHAPES)[1:]),
    ("push", "adapter a", "plain"),
    ("push", "adapter a", "adapter b"),
    ("push", "an image", "another image"),
    ("push", "an image", "the image elsewhere"),
    ("push", "an image", "adapter and image"),
    ("pull", "a salt", "another salt"),
]


@pytest.mark.parametrize(("mode", "prefill", "decode"), UNLIKE)
def test_legs_of_unlike_shapes_are_refused_and_decode_computes(engines, mode, prefill, decode) -> None:  # noqa: F811
    fabric = TwinFabric()
    p, d = engines("p", fabric, mode=mode), engines("d", fabric, mode=mode, policy="recompute")
    tokens = prompt(150, 3)
    p.add("p", tokens, prefill_leg("t"), **SHAPES[prefill])
    d.add("d", tokens, decode_leg(p, "t"), max_tokens=4, **SHAPES[decode])
    run(p, d)
    assert d.outputs["d"] == expected(shaped(tokens, SHAPES[decode]), 4)
    (record,) = d.worker._worker._threads.mover.records.last(10)
    assert (record.outcome, record.bytes) == ("failed", 0)
    assert "the two legs' prompts differ" in record.reason
    check(p, d)


# --- another connector beside ours ---------------------------------------------------------------------------------------

BESIDE = {"kv_connector": "OffloadingInSmall", "kv_connector_module_path": "tests.support.offloading"}


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    OffloadingInSmall.kept.clear()
    OffloadingInSmall.loaded.clear()


@pytest.mark.parametrize("where", [("p",), ("d",), ("p", "d")], ids="+".join)
@ways
def test_an_offloading_connector_beside_ours(engines, mode, runner, where) -> None:  # noqa: F811
    """Both hold a finished request's blocks, each till it is done; decode's offloads what ours brought, and puts it back later."""
    fabric = TwinFabric(Faults(delay=(0.0, 0.01)), seed=2)
    p, d = (
        engines(name, fabric, mode=mode, runner=runner, prefix_caching=False, beside=BESIDE if name in where else None)
        for name in ("p", "d")
    )
    prompts = {i: prompt(30 + i * 23 % 170, i) for i in range(10)}
    for i, tokens in prompts.items():
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=5)
    run(p, d, timeout=60)
    for i, tokens in prompts.items():
        assert d.outputs[f"d{i}"] == expected(tokens, 5), i
    check(p, d)
    for engine in (p, d):
        if engine.name in where:
            assert OffloadingInSmall.loaded[engine.name] == 0, "ours is asked first, and prefill had nothing to take"
            for i, tokens in prompts.items():
                engine.add(f"again{i}", tokens, None, max_tokens=5)
            run(engine)
            assert OffloadingInSmall.loaded[engine.name] > len(prompts)
            for i, tokens in prompts.items():
                assert engine.outputs[f"again{i}"] == expected(tokens, 5), i
    check(p, d)


@pytest.mark.parametrize(
    ("role", "engine", "asked"),
    [("kv_producer", "kv_producer", True), ("kv_producer", "kv_both", False), ("kv_both", "kv_both", False)],
)
def test_what_the_scheduler_goes_by_is_the_whole_connectors_role(engines, role, engine, asked) -> None:  # noqa: F811
    """Where blocks are freed late (role both), asking for delivery could keep every request from ending: see ``wants_delivery``."""
    if not features().delivery:
        pytest.skip("this vLLM does not ask for delivery")
    p = engines("p", TwinFabric(), role=role, ahead=True, beside={**BESIDE, "engine": {"kv_role": engine}})
    assert p.scheduler.connector._connectors[1].requires_kv_delivery is False
    assert p.scheduler.requires_kv_delivery is asked
    assert p.scheduler.defer_block_free is (engine == "kv_both")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_what_a_failed_load_does_is_the_whole_connectors_policy(engines, policy) -> None:  # noqa: F811
    """Taking conversations back needs recompute, and what the scheduler does counts, not what our own part was told."""

    def make() -> object:
        beside = {**BESIDE, "engine": {"kv_load_failure_policy": policy}}
        other = "fail" if policy == "recompute" else "recompute"
        return engines(
            "p",
            TwinFabric(),
            block_size=64,
            role="kv_producer",
            policy=other,
            beside=beside,
            bidirectional_kv_xfer=True,
        )

    if policy == "fail":
        with pytest.raises(ConfigError, match="kv_load_failure_policy"):
            make()
    else:
        make()


@modes
def test_prefill_puts_back_what_it_has_offloaded_and_hands_it_over(engines, mode) -> None:  # noqa: F811
    fabric = TwinFabric()
    p = engines("p", fabric, mode=mode, prefix_caching=False, beside=BESIDE)
    d = engines("d", fabric, mode=mode, prefix_caching=False)
    tokens = prompt(150, 4)
    for i in range(2):
        p.add(f"p{i}", tokens, prefill_leg(f"t{i}"))
        d.add(f"d{i}", tokens, decode_leg(p, f"t{i}"), max_tokens=5)
        run(p, d)
        assert d.outputs[f"d{i}"] == expected(tokens, 5)
    assert OffloadingInSmall.loaded["p"] == 149 // 16
    check(p, d)

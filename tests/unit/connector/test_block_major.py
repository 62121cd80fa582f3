"""When a block-major cache is asked for, how, and what is said where there is none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvxfer.connector import block_major
from kvxfer.layout.maps import CacheMap, Group, Plane

LAYERS, HEADS, BLOCK, BLOCKS, ITEM, DIM = 4, 2, 16, 8, 2, 8
CELL = BLOCK * DIM * ITEM


class Backend:
    """An attention backend of vLLM 0.29. ``layouts`` None takes any."""

    def __init__(self, layouts=None, sizes=(16, 32), name="SOME_ATTN") -> None:
        self._layouts, self._sizes, self._name = layouts, sizes, name

    def get_name(self) -> str:
        return self._name

    def supported_kv_cache_layouts(self):
        return None if self._layouts is None else tuple(SimpleNamespace(name=name) for name in self._layouts)

    def get_supported_kernel_block_sizes(self):
        return list(self._sizes)


def multiple_of(base: int) -> SimpleNamespace:
    return SimpleNamespace(base=base)


def config(block_size=16, *, chosen=True, hybrid=False, skips=(), v2=False, **settings):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        cache_config=SimpleNamespace(
            block_size=block_size, user_specified_block_size=chosen, kv_cache_dtype_skip_layers=list(skips)
        ),
        use_v2_model_runner=v2,
    )


@pytest.fixture(params=["new", "old"])
def version(request, monkeypatch) -> str:
    """A vLLM that names layouts (0.29 and later), and one that does not."""
    module = ModuleType("vllm.v1.kv_cache_layout")
    module.KVCacheLayout = SimpleNamespace(__members__={"LBHNC": 0, "BLHNC": 1})
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", module if request.param == "new" else None)
    return request.param


def asked(vllm_config) -> tuple[str | None, bool]:
    return block_major.required_layout(vllm_config), block_major.prefers_cross_layers(vllm_config)


NOT, ASKED = (None, False), {"new": ("BLHNC", False), "old": (None, True)}


@pytest.mark.parametrize(
    ("size", "sizes", "whole"),
    [
        (16, (16, 32), True),
        (64, (16, 32), False),
        (64, (multiple_of(16),), True),
        (24, (16, multiple_of(16)), False),
        (24, (24,), True),
    ],
)
def test_it_is_asked_for_where_a_block_is_one_block_of_the_kernels(version, monkeypatch, size, sizes, whole) -> None:
    backends = [Backend(sizes=(multiple_of(1),)), Backend(sizes=sizes)]
    monkeypatch.setattr(block_major, "_backends", lambda _config: backends)
    assert asked(config(size)) == (ASKED[version] if whole else NOT)
    assert asked(config(size, chosen=False)) == ASKED[version], "vLLM chooses a size that is one"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block_major": False}, "the setting block_major is false"),
        ({"hybrid": True}, "layers of several kinds"),
        ({"skips": ["0"]}, "element types"),
        ({"block_size": 64}, "SOME_ATTN splits blocks of 64 tokens"),
    ],
)
def test_it_is_not_asked_for_where_something_is_in_the_way(version, monkeypatch, change, why) -> None:
    monkeypatch.setattr(block_major, "_backends", lambda _config: [Backend()])
    assert asked(config()) == ASKED[version]
    assert asked(config(**change)) == NOT
    assert why in block_major.obstacle(config(**change))


def test_a_layout_that_some_backend_does_not_take_is_not_asked_for(version, monkeypatch) -> None:
    monkeypatch.setattr(block_major, "_backends", lambda _config: [Backend(), Backend(("LBHNC", "LBNHC"))])
    assert asked(config()) == (NOT if version == "new" else ASKED["old"])
    if version == "new":
        assert block_major.obstacle(config()) == "SOME_ATTN takes LBHNC, LBNHC alone"
    monkeypatch.setattr(block_major, "_backends", lambda _config: [Backend(), Backend(("LBHNC", "BLHNC"))])
    assert asked(config()) == ASKED[version]


@pytest.mark.parametrize("name", ["CPU_MLA", "AMX_MLA"])
def test_a_backend_that_says_any_and_takes_one_run_a_layer_is_not_asked(version, monkeypatch, name) -> None:
    """With blocks of all layers together vLLM's MLA on a CPU ends the engine at the first prompt: it views the cache as flat."""
    monkeypatch.setattr(block_major, "_backends", lambda _config: [Backend(name=name)])
    assert asked(config()) == NOT
    assert block_major.obstacle(config()) == f"{name} takes a layer's cache as one run alone"


def test_a_vllm_that_does_not_answer_keeps_no_engine_from_starting(version, monkeypatch) -> None:
    def raises(_config):
        raise ValueError("no such layer")

    monkeypatch.setattr(block_major, "_backends", raises)
    assert asked(config()) == NOT
    assert "ValueError: no such layer" in block_major.obstacle(config())
    assert version


# --- a cache of all layers, as vLLM up to 0.28 hands it over -----------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 0, 3, 2, 4), (1, 2, 0, 3, 4), (0, 1, 2, 3, 4)], ids=["NHD", "HND", "layers"])
def test_a_cache_of_all_layers_is_taken_apart_into_what_the_layers_see(order) -> None:
    """As 0.26's ``allocate_uniform_kv_caches`` does: the logical shape [layer, block, head, token, content], laid out by ``order``."""
    logical = np.arange(LAYERS * BLOCKS * HEADS * BLOCK * DIM).reshape(LAYERS, BLOCKS, HEADS, BLOCK, DIM)
    handed_over = np.ascontiguousarray(logical.transpose(order)).view(_Permutable)
    backend = SimpleNamespace(
        get_kv_cache_stride_order=lambda *, include_num_layers_dimension: order if include_num_layers_dimension else ()
    )
    tensors = [SimpleNamespace(shared_by=[f"layer.{i}", *(["layer.9"] if i == 2 else [])]) for i in range(LAYERS)]
    layers = block_major.layers_of(handed_over, backend, SimpleNamespace(kv_cache_tensors=tensors))
    assert list(layers) == ["layer.0", "layer.1", "layer.2", "layer.9", "layer.3"]
    for name, number in (("layer.0", 0), ("layer.1", 1), ("layer.2", 2), ("layer.9", 2), ("layer.3", 3)):
        assert np.array_equal(layers[name], logical[number])
        assert np.shares_memory(layers[name], handed_over)


class _Permutable(np.ndarray):
    def permute(self, *axes: int) -> np.ndarray:
        return self.transpose(axes)


# --- what is said ------------------------------------------------------------------------------------------------------


def cache(layout: str) -> CacheMap:
    if layout == "LBHNC":
        layer, block, head = BLOCKS * HEADS * CELL, HEADS * CELL, CELL
    elif layout == "BLHNC":
        layer, block, head = HEADS * CELL, LAYERS * HEADS * CELL, CELL
    else:
        layer, block, head = BLOCKS * HEADS * CELL, CELL, BLOCKS * CELL  # LHBNC
    plane = Plane(
        "kv", "bfloat16", ITEM, tuple(range(LAYERS)), tuple(layer * i for i in range(LAYERS)), (0, 1), HEADS, block, head,
        ((BLOCK, DIM * ITEM),), ((DIM, ITEM),),
    )  # fmt: skip
    return CacheMap((Group(BLOCK, BLOCKS, (plane,)),), ((0, LAYERS * BLOCKS * HEADS * CELL),), "DRAM")


@pytest.mark.parametrize(("layout", "count"), [("BLHNC", 1), ("LBHNC", LAYERS), ("LHBNC", LAYERS * HEADS)])
def test_the_runs_of_a_block_are_counted(layout, count) -> None:
    assert block_major.descriptors_a_block(cache(layout)) == count


def test_an_opaque_cache_is_counted_too() -> None:
    one = cache("LBHNC")
    (plane,) = one.groups[0].planes
    plane = msgspec.structs.replace(plane, tokens=(), item=1, channels=((CELL, 1),), interior="tiles")
    one = msgspec.structs.replace(one, groups=(msgspec.structs.replace(one.groups[0], planes=(plane,)),))
    assert block_major.descriptors_a_block(one) == LAYERS


def test_a_block_major_cache_is_not_worth_a_line(version, monkeypatch, caplog) -> None:
    monkeypatch.setattr(block_major, "_backends", lambda _config: [Backend()])
    with caplog.at_level("INFO", logger="kvxfer.layout"):
        block_major.report(config(), cache("BLHNC"))
    assert not caplog.records
    assert version


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "vLLM chose so: see VLLM_KV_CACHE_LAYOUT"),
        ({"block_major": False}, "the setting block_major is false"),
        ({"v2": True}, {"new": "vLLM chose so", "old": "VLLM_USE_V2_MODEL_RUNNER=0"}),
    ],
)
def test_another_cache_is_said_in_one_line_with_what_it_costs_and_why(
    version, monkeypatch, caplog, change, why
) -> None:
    monkeypatch.setattr(block_major, "_backends", lambda _config: [Backend()])
    with caplog.at_level("INFO", logger="kvxfer.layout"):
        block_major.report(config(**change), cache("LBHNC"))
    (record,) = caplog.records
    assert f"a block is {LAYERS} runs of memory" in record.getMessage()
    assert f"up to {LAYERS} times as many descriptors" in record.getMessage()
    assert (why if isinstance(why, str) else why[version]) in record.getMessage()

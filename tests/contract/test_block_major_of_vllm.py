"""vLLM's own resolution of the layout, asked by our connectors: what it takes, what it drops, what it never starts with."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.kv_cache_layout", reason="no vLLM is installed that has layouts by name")

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import select_common_block_size

from kvxfer.bench import model
from kvxfer.connector import block_major

pytestmark = pytest.mark.contract

ANY = [layout.name for layout in KVCacheLayout]


def config(connector: str = "KvxferPushConnector", block_size: int = 32, **settings):
    return EngineArgs(
        model=str(model.build()),
        dtype="float32",
        block_size=block_size,
        max_model_len=2048,
        kv_transfer_config={
            "kv_connector": connector,
            "kv_connector_module_path": "kvxfer.connector",
            "kv_role": "kv_producer",
            "engine_id": "p",
            "kv_connector_extra_config": settings,
        },
    ).create_engine_config()


def resolved(vllm_config, supported=ANY) -> str:
    """Resolve as the engine core does, from what the workers report."""
    return utils.resolve_kv_cache_layout(vllm_config, [list(supported)]).name


@pytest.fixture
def on_cuda(monkeypatch):
    """The attention that vLLM takes on CUDA, by its own class."""
    monkeypatch.setattr(block_major, "_backends", lambda _config: [FlashAttentionBackend])


@pytest.mark.parametrize("connector", ["KvxferPushConnector", "KvxferPullConnector"])
def test_vllm_takes_our_layout_where_the_attention_takes_any(on_cuda, connector) -> None:
    assert resolved(config(connector)) == "BLHNC"


def test_the_setting_leaves_the_layout_to_vllm(on_cuda) -> None:
    assert resolved(config(block_major=False)) == ANY[0] != "BLHNC"


def test_the_operators_own_choice_wins(on_cuda, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert resolved(config()) == "LBHNC"


def test_what_the_workers_report_wins_over_what_we_think(on_cuda) -> None:
    assert resolved(config(), ["LBHNC"]) == "LBHNC"


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_blocks_that_vllm_would_have_to_split_are_those_that_we_think_of(on_cuda, monkeypatch, block_size) -> None:
    for sizes in ([16, 32], [64], [block_size]):
        monkeypatch.setattr(
            FlashAttentionBackend,
            "get_supported_kernel_block_sizes",
            staticmethod(lambda _spec=None, sizes=sizes: sizes),
        )
        try:
            whole = select_common_block_size(block_size, [FlashAttentionBackend]) == block_size
        except ValueError:
            continue  # nothing starts with it
        assert (block_major.required_layout(config(block_size=block_size)) == "BLHNC") == whole


def test_on_cpu_it_is_not_asked_for_and_the_reason_is_the_backends() -> None:
    one = config()
    assert block_major.required_layout(one) is None
    assert block_major.obstacle(one) == "CPU_ATTN takes LBHNC alone"
    assert resolved(one, ["LBHNC"]) == "LBHNC"

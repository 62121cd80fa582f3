"""The worker's start: rails are pinned before there is an agent, and judged once the cache is registered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvxfer.config import Settings
from kvxfer.connector import worker as module
from kvxfer.connector.worker import WorkerHalf
from kvxfer.errors import RailsError, TransportError
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.protocol.ids import RankId
from kvxfer_host import HostPlatform


class Order:
    """What happened, in order; doubles of the threads and of the rails that write it down."""

    def __init__(self, *, mismatch: bool = False, start_fails: bool = False) -> None:
        self.happened: list[str] = []
        self.given: tuple = ()
        order = self

        class Rails:
            def __init__(self, settings, backend, platform, device) -> None:
                order.given = (settings, backend, platform.name, device)
                order.happened.append("pin")

            def watched(self):
                return self

            def __enter__(self) -> None:
                order.happened.append("listen")

            def __exit__(self, *_) -> None:
                order.happened.append("listened")

            def settle(self) -> None:
                order.happened.append("settle")
                if mismatch:
                    raise RailsError("rails: far away")

        class Threads:
            def __init__(self, *_, **__) -> None:
                self.control = SimpleNamespace(port=1)

            def start(self) -> None:
                order.happened.append("start")
                if start_fails:
                    raise TransportError("no plugin")

            def stop(self) -> None:
                order.happened.append("stop")

        self.Rails, self.Threads = Rails, Threads


class OnHost(HostPlatform):
    offers = ()

    def describe(self, caches, geometry) -> CacheMap:
        return CacheMap((Group(16, 8, ()),), (), "DRAM", 3)


def worker(order: Order, monkeypatch, **settings) -> WorkerHalf:
    monkeypatch.setattr(module, "platform_for", lambda _: OnHost(0))
    monkeypatch.setattr(module.compat, "parallel_ranks", lambda _: (0, 0))
    monkeypatch.setattr(module.compat, "geometry", lambda *_: None)
    monkeypatch.setattr(module, "RankThreads", order.Threads)
    monkeypatch.setattr(module, "WorkerRails", order.Rails)
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(model="m", max_model_len=64),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
    )
    return WorkerHalf(config, None, "push", Settings(**settings), RankId("prefill", "0" * 16, 0))


CACHES = {"layer": SimpleNamespace(device=SimpleNamespace(type="cpu"))}


def test_rails_are_pinned_before_the_threads_start_and_judged_after(monkeypatch) -> None:
    order = Order()
    half = worker(order, monkeypatch, rails=["rdmap85s0"], rails_policy="enforce", backend="UCX")
    half.register_kv_caches(CACHES)
    assert order.happened == ["pin", "listen", "start", "listened", "settle"]
    assert order.given == ((["rdmap85s0"], "enforce"), "UCX", "host", 3)
    assert half.address() is not None


def test_a_refusal_ends_the_threads(monkeypatch) -> None:
    order = Order(mismatch=True)
    half = worker(order, monkeypatch)
    with pytest.raises(RailsError, match="far away"):
        half.register_kv_caches(CACHES)
    assert order.happened[-1] == "stop"
    assert half.address() is None


def test_what_went_wrong_at_the_start_is_told_and_not_judged(monkeypatch) -> None:
    order = Order(start_fails=True)
    with pytest.raises(TransportError, match="no plugin"):
        worker(order, monkeypatch).register_kv_caches(CACHES)
    assert order.happened == ["pin", "listen", "start", "listened"]


@pytest.mark.parametrize(
    ("offers", "unasked", "setting", "size"),
    [
        ((), True, None, None),
        ((("", ""),), False, None, None),
        ((("", ""),), False, 4096, 4096),
        ((("", ""),), True, 0, None),
        ((("", ""),), True, None, 20 * 100),
    ],
)
def test_memory_for_re_packing_is_taken_where_it_is_offered_and_free_or_asked_for(
    monkeypatch, offers, unasked, setting, size
) -> None:
    half = worker(Order(), monkeypatch, staging_bytes=setting)
    half._platform = SimpleNamespace(offers=offers, stages_unasked=unasked, staging=lambda size, device: size)
    cache = SimpleNamespace(block_size=16, num_blocks=8, block_bytes=100, device=0)
    assert half._staging_for(cache) == size


@pytest.mark.parametrize(("blocks", "size"), [(300, 272), (1200, 300), (4096, 544), (100_000, 544)])
def test_the_longest_prompt_can_always_be_re_packed(monkeypatch, blocks, size) -> None:
    """However small the cache: else a request would fail for the default of a setting."""
    half = worker(Order(), monkeypatch)
    half._vllm_config.model_config.max_model_len = 4096
    half._platform = SimpleNamespace(offers=(("", ""),), stages_unasked=True, staging=lambda size, device: size)
    assert half._staging_for(SimpleNamespace(block_size=16, num_blocks=blocks, block_bytes=1, device=0)) == size

"""``kvxfer_reclaimable_tokens`` from vLLM's real block pool to vLLM's own Prometheus plumbing."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, generate_latest

from kvxfer.connector.connectors import KvxferPushConnector
from kvxfer.connector.room import Room, said
from kvxfer.connector.stats import Stats
from tests.support.prom import config, metric_types

pytestmark = pytest.mark.contract


def pool_of(blocks):
    from vllm.v1.core.block_pool import BlockPool

    try:
        return BlockPool(blocks, enable_caching=True, hash_block_size=16)
    except TypeError:
        return BlockPool(blocks, enable_caching=True)


def test_room_follows_the_pool_and_is_silent_while_nothing_changes():
    pool = pool_of(1001)  # one is vLLM's null block
    room = Room(16)
    assert room.news() is None, "without a pool nothing is said"
    room.bind(pool)
    assert said(room.news().data) == 16 * pool.get_num_free_blocks() == 16_000
    assert room.news() is None
    blocks = pool.get_new_blocks(500)
    assert said(room.news().data) == 8_000
    pool.free_blocks(blocks[:1])
    assert room.news() is None, "a little waits"
    pool.free_blocks(blocks[1:])
    assert said(room.news().data) == 16_000


def test_the_schedulers_own_code_sends_the_figure():
    """vLLM's ``make_stats``, of whichever version is installed, on our object: nothing else asks it before a real engine does."""
    from vllm.v1.core.sched.scheduler import Scheduler

    manager = SimpleNamespace(make_prefix_cache_stats=SimpleNamespace, usage=0.0)
    scheduler = MagicMock(log_stats=True, kv_cache_manager=manager, connector_prefix_cache_stats=None)
    scheduler.get_request_counts.return_value = (0, 0)
    scheduler.running = scheduler.waiting = scheduler.skipped_waiting = scheduler.deferred_waiting = ()
    stats = Scheduler.make_stats(scheduler, kv_connector_stats=Stats(data={"reclaimable_tokens": 7}))
    assert said(stats.kv_connector_stats) == 7


def test_a_little_is_said_after_a_while(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvxfer.connector.room.time.monotonic", lambda: now[0])
    pool = pool_of(1001)
    room = Room(16)
    room.bind(pool)
    room.news()
    pool.get_new_blocks(1)
    assert room.news() is None
    now[0] += 1.0
    assert said(room.news().data) == 16 * 999
    room.bind(object())
    assert room.news() is None


def test_the_gauge_is_set_by_what_vllm_hands_over():
    registry = CollectorRegistry()
    metrics = KvxferPushConnector.build_prom_metrics(config(), metric_types(registry), ["engine"], {0: ["0"]})
    assert b"kvxfer_reclaimable_tokens{" not in generate_latest(registry), "what was not said is not shown"
    newest = Stats(data={"reclaimable_tokens": 1}).aggregate(Stats(data={"reclaimable_tokens": 4096}))
    metrics.observe(newest.data, 0)
    metrics.observe({}, 0)
    metrics.observe({"reclaimable_tokens": "x"}, 0)
    text = generate_latest(registry).decode()
    assert 'kvxfer_reclaimable_tokens{engine="0"} 4096.0' in text
    assert KvxferPushConnector.build_kv_connector_stats(newest.data).is_empty(), (
        "vLLM's log has the cache's use already"
    )
    assert newest.aggregate(Stats()) is newest
    newest.reset()
    assert newest.is_empty()

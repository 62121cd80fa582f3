"""Handoffs from a worker's records, through vLLM's own aggregation and plumbing, to Prometheus; and what a step pays for it."""

import dataclasses

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, generate_latest

from kvxfer.connector.connectors import KvxferPushConnector
from kvxfer.connector.stats import MOST_SECONDS, Stats, Tally
from kvxfer.transport.records import HandoffRecord, Times
from tests.support.prom import config, metric_types

pytestmark = pytest.mark.contract


def ended(side="source", mode="push", outcome="done", size=100, seconds=0.5, rank=0):
    times = Times(expected=10.0, registered=10.1, first_post=10.2, last_byte=10.2 + seconds, released=11.0)
    posts = side == ("source" if mode == "push" else "sink")
    record = HandoffRecord("h", "r", side, rank, mode, tokens=7, outcome=outcome, times=times)
    if posts:
        record.posted(size, 3, 10.2)
        record.ended(size, 10.2 + seconds)
    return record


@pytest.fixture
def plumbing():
    registry = CollectorRegistry()
    metrics = KvxferPushConnector.build_prom_metrics(config(), metric_types(registry), ["engine"], {0: ["0"], 1: ["1"]})
    return metrics, lambda: generate_latest(registry).decode()


def test_nothing_is_said_when_nothing_ended_and_each_handoff_once():
    tally = Tally()
    assert tally.take() is None
    tally.hear(ended())
    assert tally.take().data["counts"]["handoffs/source/push/done"] == 1
    assert tally.take() is None


def test_what_ranks_say_adds_up_in_vllms_own_aggregator_and_shows(plumbing):
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    outputs = []
    for rank in range(2):
        tally = Tally()
        tally.hear(ended(rank=rank, size=1000 + rank))
        tally.hear(ended(side="sink", rank=rank, outcome="failed"))
        said = KVConnectorOutput(kv_connector_stats=tally.take())
        fields = {field.name for field in dataclasses.fields(ModelRunnerOutput)}
        optional = {"sampled_token_ids", "pooler_output"} & fields
        needed = {"req_ids": [], "req_id_to_index": {}, **{name: [] for name in optional}}
        outputs.append(ModelRunnerOutput(**needed, kv_connector_output=said))
    together = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_connector_stats
    together = together.aggregate(Stats({"reclaimable_tokens": 64}))
    metrics, shown = plumbing
    metrics.observe(together.data, 1)
    text = shown()
    for line in (
        'kvxfer_handoffs_total{engine="1",mode="push",outcome="done",side="source"} 2.0',
        'kvxfer_handoffs_total{engine="1",mode="push",outcome="failed",side="sink"} 2.0',
        'kvxfer_transferred_bytes_total{engine="1",mode="push",side="source"} 2001.0',
        'kvxfer_descriptors_total{engine="1",mode="push",side="source"} 6.0',
        'kvxfer_handed_over_tokens_total{engine="1",mode="push",side="source"} 14.0',
        'kvxfer_handoff_stage_seconds_count{engine="1",mode="push",side="source",stage="transfer"} 2.0',
        'kvxfer_handoff_stage_seconds_sum{engine="1",mode="push",side="source",stage="handoff"} 2.0',
        'kvxfer_reclaimable_tokens{engine="1"} 64.0',
    ):
        assert line in text, line
    assert 'kvxfer_handed_over_tokens_total{engine="1",mode="push",side="sink"}' not in text, "what failed is not there"


def test_vllm_carries_it_to_another_process():
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    tally = Tally()
    tally.hear(ended())
    data = tally.take().data
    assert MsgpackDecoder(dict).decode(MsgpackEncoder().encode(data)) == data


def test_durations_are_bounded_and_counts_are_not():
    tally = Tally()
    for _ in range(MOST_SECONDS + 10):
        tally.hear(ended())
    news = tally.take().data
    assert news["counts"]["handoffs/source/push/done"] == MOST_SECONDS + 10
    assert len(news["seconds"]["transfer/source/push"]) == MOST_SECONDS


def test_vllms_log_gets_the_handoffs_alone():
    tally = Tally()
    tally.hear(ended(size=2_000_000))
    tally.hear(ended(outcome="failed", size=0))
    said = tally.take().aggregate(Stats({"reclaimable_tokens": 5}))
    logged = KvxferPushConnector.build_kv_connector_stats(said.data)
    assert logged.reduce() == {"kvxfer handoffs": 2, "of them done": 1, "MB transferred": 2.0}
    assert KvxferPushConnector.build_kv_connector_stats({"reclaimable_tokens": 5}).is_empty()
    assert KvxferPushConnector.build_kv_connector_stats().is_empty()
    # vLLM gives it what it has kept and goes on adding to it: what Prometheus gets must not change by that.
    before = dict(said.data["counts"])
    logged.aggregate(Stats({"counts": {"handoffs/source/push/done": 1}}))
    assert said.data["counts"] == before

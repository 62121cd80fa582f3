"""The counted connectors of ``kvxfer bench engine``: every hook that vLLM's base class has is counted, in either role."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvxfer.bench import calls, counted, spans
from kvxfer.bench.calls import METADATA, NOTHING, SCHEDULER, STEP, THREAD, WORKER, Reading
from kvxfer.errors import ConfigError

pytestmark = pytest.mark.contract

CONFIG = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True))


class Connector(KVConnectorBase_V1):
    """The least that vLLM takes."""

    def start_load_kv(self, forward_context, **kwargs):
        return "loaded"

    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 7, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
    def build_connector_meta(self, scheduler_output):
        return {"blocks": [1, 2, 3]}


class HybridConnector(Connector, SupportsHMA):
    def request_finished_all_groups(self, request, block_ids):
        return False, None


class Counted(counted._Counted, Connector):
    pass


class HybridCounted(counted._Counted, HybridConnector):
    pass


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(calls.DIRECTORY, str(tmp_path))
    return tmp_path


def test_a_schedulers_hooks_and_its_metadata(directory):
    connector = Counted(CONFIG, KVConnectorRole.SCHEDULER, None)
    assert connector.get_num_new_matched_tokens(None, 0) == (7, True)
    for _ in range(3):
        assert connector.build_connector_meta(None) == {"blocks": [1, 2, 3]}
    found = calls.read(directory).since(Reading()).tallies
    assert {key: tally.calls for key, tally in found.items()} == {
        (SCHEDULER, "get_num_new_matched_tokens"): 1,
        (SCHEDULER, STEP): 3,
        (SCHEDULER, METADATA): 3,
        (SCHEDULER, NOTHING): 3,
        (SCHEDULER, THREAD): 2,  # from one step to the next
    }


def test_a_workers_hooks(directory):
    connector = Counted(CONFIG, KVConnectorRole.WORKER, None)
    connector.bind_connector_metadata("metadata")
    assert connector.start_load_kv(None) == "loaded"
    assert connector.get_finished(set()) == (None, None)
    found = calls.read(directory).since(Reading()).tallies
    assert {method for _, method in found} == {"bind_connector_metadata", "start_load_kv", "get_finished", NOTHING}
    assert {part for part, _ in found} == {WORKER}


def test_a_workers_forwards_are_written_down_and_steps_without_one_are_not(directory):
    connector = Counted(CONFIG, KVConnectorRole.WORKER, None)
    begin = time.monotonic_ns()
    for forward in (True, False, True):
        connector.bind_connector_metadata("metadata")
        if forward:
            connector.wait_for_save()
        connector.get_finished(set())
    steps = spans.read(directory, begin, time.monotonic_ns())
    assert len(steps) == 2
    assert all(begin <= first <= last for first, last in steps)


@pytest.mark.parametrize(("cls", "hybrid"), [(Counted, False), (HybridCounted, True)])
def test_which_hooks_there_are_is_vllms_to_say(directory, cls, hybrid):
    names = counted.hooks(cls(CONFIG, KVConnectorRole.SCHEDULER, None))
    assert {"request_finished", "take_events", "update_connector_output", "handle_preemptions", STEP} <= set(names)
    assert ("request_finished_all_groups" in names) is hybrid
    assert not {"shutdown", "role", "build_prom_metrics", "requires_kv_delivery"} & set(names), "no hook of a step"


def test_without_a_directory_there_is_nothing_to_count_into(monkeypatch):
    monkeypatch.delenv(calls.DIRECTORY, raising=False)
    with pytest.raises(ConfigError, match="KVXFER_BENCH_CALLS is not set"):
        Counted(CONFIG, KVConnectorRole.SCHEDULER, None)


def test_the_counted_classes_are_the_real_ones():
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

    from kvxfer.connector import connectors

    for name, home in (
        ("KvxferPushConnector", connectors),
        ("KvxferPullConnector", connectors),
        ("NixlPushConnector", nixl),
        ("NixlPullConnector", nixl),
    ):
        assert issubclass(getattr(counted, name), getattr(home, name))

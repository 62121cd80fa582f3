"""What an engine tells a router of itself in ``kvxfer_info``, read by the router's own reader."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvxfer.config import Settings
from kvxfer.connector.metrics import LABELS, Metrics
from kvxfer.router.identity import parse_info

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(("extra", "leg_timeout"), [({}, Settings().leg_timeout), ({"leg_timeout": 7.5}, 7.5)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_router_reads_what_an_engine_tells(extra, leg_timeout, ranks):
    registry = CollectorRegistry()

    def kind(made):
        return lambda **named: made(**named, registry=registry)

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id="p", kv_role="kv_producer", kv_connector_extra_config={"control_port": 5700, **extra}
        ),
        parallel_config=SimpleNamespace(data_parallel_size=ranks, tensor_parallel_size=2, pipeline_parallel_size=1),
    )
    engines = {number: ["m", str(number)] for number in range(ranks)}
    types = {one: kind(one) for one in (Gauge, Counter, Histogram)}
    Metrics(config, types, ["model_name", "engine"], engines, "push")
    found = parse_info(generate_latest(registry).decode(), "127.0.0.1")
    assert [one.engine_id for one in found] == (["p"] if ranks == 1 else ["p_dp0", "p_dp1"])
    for number, one in enumerate(found):
        assert (one.port, one.tp_size, one.mode, one.role) == (5700 + number, 2, "push", "kv_producer")
        assert one.leg_timeout == leg_timeout
    assert "leg_timeout" in LABELS

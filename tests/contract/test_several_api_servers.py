"""Engines with several API servers (``--api-server-count``): each of the processes makes the connector's metrics, one is asked.

prometheus_client then keeps every process's samples in files, and adds them up or shows them all, as each metric says.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

pytestmark = pytest.mark.contract

SERVERS = """
import os
from types import SimpleNamespace
from prometheus_client import Counter, Gauge, Histogram
from kvxfer.connector.connectors import KvxferPushConnector
transfer = SimpleNamespace(engine_id="e", kv_role="kv_both", kv_connector_extra_config={"control_port": 5601})
parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1)
config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
kinds = {kind: kind for kind in (Gauge, Counter, Histogram)}
for _ in range(2):
    child = os.fork()
    if child == 0:
        KvxferPushConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.timeout(300)
def test_an_engine_shows_one_identity_however_many_servers_it_has(tmp_path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}  # read when prometheus_client is imported
    done = subprocess.run([sys.executable, "-c", SERVERS], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert len(list(tmp_path.glob("gauge_*"))) == 2, "both processes have written"
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    text = generate_latest(registry).decode()
    samples = re.findall(r"^kvxfer_info\{(.*)\} 1\.0$", text, re.MULTILINE)
    assert len(samples) == 1, text
    assert 'engine_id="e"' in samples[0]
    assert 'port="5601"' in samples[0]
    assert "pid=" not in samples[0]

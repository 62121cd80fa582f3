"""How vLLM finds the connectors: by name through its plugins, or by module path."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

from kvxfer.connector import plugin

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("name", plugin.CONNECTORS)
def test_both_ways_lead_to_one_class(name: str) -> None:
    plugin.register()
    plugin.register()  # vLLM's plugins may be loaded more than once in a process
    by_name = KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector=name, kv_role="kv_producer"))
    by_path = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector=name, kv_connector_module_path="kvxfer.connector", kv_role="kv_producer")
    )
    assert by_name is by_path
    assert issubclass(by_name, KVConnectorBase_V1)
    kind = name.removeprefix("Kvxfer").removesuffix("Connector").lower()
    assert by_name.mode == {"bidirectional": "push"}.get(kind, kind)
    assert by_name.implied == ({"bidirectional_kv_xfer": True} if kind == "bidirectional" else {})


def test_the_entry_point_is_declared() -> None:
    (entry,) = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "kvxfer"]
    assert entry.load() is plugin.register


def test_what_the_operator_has_set_is_respected(monkeypatch) -> None:
    monkeypatch.setenv("FI_PROVIDER", "efa")
    plugin.register()
    assert os.environ["FI_PROVIDER"] == "efa"


def test_importing_the_package_imports_neither_vllm_nor_nixl() -> None:
    code = "import sys, kvxfer.connector, kvxfer.cli; print(sorted({'vllm', 'nixl', 'torch'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"

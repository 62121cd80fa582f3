"""vLLM's own NIXL connectors, on a machine where LIBFABRIC's libraries have to be found first. For comparisons only.

Loaded by ``kv_connector_module_path``: the libraries are in place before the connector makes its agent.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPushConnector

from kvxfer.transport.native import ensure_native_libraries

ensure_native_libraries("LIBFABRIC")

__all__ = ["NixlPullConnector", "NixlPushConnector"]

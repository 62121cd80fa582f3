"""The push connectors, timed: what ``stream_moments`` says of them. Loaded by engines only, since it needs vLLM."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl

from kvxfer.bench.stream_moments import Timed
from kvxfer.connector import connectors as ours
from kvxfer.transport.native import ensure_native_libraries

ensure_native_libraries("LIBFABRIC")


class KvxferPushConnector(Timed, ours.KvxferPushConnector):
    """Timed."""


class NixlPushConnector(Timed, nixl.NixlPushConnector):  # type: ignore[misc]  # vLLM is not typed where the checks run
    """Timed."""

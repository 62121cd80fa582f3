"""The entry point of ``vllm.general_plugins``: runs once in every process of an engine, before anything else of ours."""

from __future__ import annotations

import logging
import os

CONNECTORS = ("KvxferPushConnector", "KvxferPullConnector", "KvxferBidirectionalConnector")


def register() -> None:
    """Make the connectors known to vLLM by name, and set what the accelerators' runtimes read when they start.

    Calling it again does nothing. Variables that are set already are left alone.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvxfer.platform import platforms

    _log_as_vllm()
    for kind in platforms().values():
        platform = kind()
        if platform.presence().here:
            for name, value in platform.environment().items():
                os.environ.setdefault(name, value)
    for name in CONNECTORS:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001 - register_connector raises on a second call
            KVConnectorFactory.register_connector(name, "kvxfer.connector.connectors", name)


def _log_as_vllm() -> None:
    """Send kvxfer's log lines where vLLM sends its own, unless the operator has configured them."""
    ours, theirs = logging.getLogger("kvxfer"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False

"""vLLM's KV connectors: ``KvxferPushConnector``, ``KvxferPullConnector`` and ``KvxferBidirectionalConnector``.

The names are imported when they are asked for: importing this package must not import vLLM, since vLLM's plugin loader
imports it in every process, early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.connector.connectors import KvxferBidirectionalConnector, KvxferPullConnector, KvxferPushConnector

__all__ = ["KvxferBidirectionalConnector", "KvxferPullConnector", "KvxferPushConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvxfer.connector import connectors

        return getattr(connectors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

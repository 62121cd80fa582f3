"""The connectors, kvxfer's and vLLM's own, each with a counter around every hook that vLLM calls. For comparisons only.

Loaded by ``kv_connector_module_path``: the classes have the same names as what they count, so nothing else about an engine
differs. Which hooks there are is read off vLLM's base class. The scheduler's half counts in the engine core's process, a
worker's half in the worker's, each into its own file (see ``calls``).

What a connector makes the engine's threads do outside its own calls is counted as well, under ``METADATA``: vLLM pickles each
step's connector metadata in the engine core and reads it in every worker. Here both are done once more, in the engine core,
and timed. A worker's half also writes down when each forward began and ended (see ``spans``).
"""

from __future__ import annotations

import inspect
import os
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl

from kvxfer.bench.calls import DIRECTORY, METADATA, SCHEDULER, STEP, WORKER, Counters, count
from kvxfer.bench.spans import Spans
from kvxfer.connector import connectors as ours
from kvxfer.errors import ConfigError
from kvxfer.transport.native import ensure_native_libraries

if TYPE_CHECKING:
    from collections.abc import Callable

ensure_native_libraries("LIBFABRIC")

_WORKERS_STEP = "get_finished"  # called once a step, forward or none
_BEGINS, _COMPUTES = "bind_connector_metadata", "wait_for_save"  # likewise, and once a forward
_NOT_COUNTED = {"shutdown", "register_kv_caches"}  # once in a life, and the counters may outlive the second


def hooks(connector: Any) -> list[str]:
    """Return the public methods of vLLM's base class, static ones and properties left out, that this connector has."""
    bases: tuple[type, ...] = (KVConnectorBase_V1, SupportsHMA)
    names = {
        name
        for base in bases
        if isinstance(connector, base)
        for name in dir(base)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(base, name))
    }
    return sorted(names - _NOT_COUNTED)


class _Counted:
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]  # the connector's
        where = os.environ.get(DIRECTORY)
        if not where:
            raise ConfigError(f"{DIRECTORY} is not set: it names the directory where this process's counters shall be")
        names = hooks(self)
        scheduler = role is KVConnectorRole.SCHEDULER
        self._counters = Counters(Path(where), SCHEDULER if scheduler else WORKER, [*names, METADATA])
        count(self, self._counters, names)
        if scheduler:
            setattr(self, STEP, self._then_pickle(getattr(self, STEP)))
        else:
            self._spans = Spans(Path(where))
            setattr(self, _WORKERS_STEP, self._after_nothing(getattr(self, _WORKERS_STEP)))
            for hook, note in ((_BEGINS, self._spans.begin), (_COMPUTES, self._spans.compute)):
                setattr(self, hook, _noted(note, getattr(self, hook)))

    def _then_pickle(self, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def build_and_pickle(scheduler_output: Any) -> Any:
            self._counters.thread()
            self._counters.nothing()
            metadata = build(scheduler_output)
            start = time.thread_time_ns()
            pickle.loads(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - made here
            self._counters.add(METADATA, time.thread_time_ns() - start)
            return metadata

        return build_and_pickle

    def _after_nothing(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def nothing_and_hook(*args: Any) -> Any:
            self._counters.thread()
            self._counters.nothing()
            found = hook(*args)
            self._spans.end()
            return found

        return nothing_and_hook


def _noted(note: Callable[[], None], hook: Callable[..., Any]) -> Callable[..., Any]:
    def note_and_hook(*args: Any) -> Any:
        note()
        return hook(*args)

    return note_and_hook


class KvxferPushConnector(_Counted, ours.KvxferPushConnector):
    """Counted."""


class KvxferPullConnector(_Counted, ours.KvxferPullConnector):
    """Counted."""


class NixlPushConnector(_Counted, nixl.NixlPushConnector):  # type: ignore[misc]  # vLLM is not typed where the checks run
    """Counted."""


class NixlPullConnector(_Counted, nixl.NixlPullConnector):  # type: ignore[misc]  # likewise
    """Counted."""

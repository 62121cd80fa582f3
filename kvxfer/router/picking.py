"""Who gets the next request: the one question that policies answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engines import Engine
    from kvxfer.router.split import SingleRequest


class Picker(Protocol):
    """Chooses among the engines of one role; at least one of them is healthy, and only a healthy one may be chosen."""

    def pick(self, engines: Sequence[Engine], single: SingleRequest | None) -> Engine:
        """Return the engine for ``single`` (None: something that any engine can answer). Must not block."""
        ...


class RoundRobin:
    """Each healthy engine in turn. The turn stands on the whole list, so an engine's absence shifts nobody else."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, engines: Sequence[Engine], single: SingleRequest | None) -> Engine:  # noqa: ARG002
        """Return the next healthy engine."""
        for step in range(len(engines)):
            engine = engines[(self._next + step) % len(engines)]
            if engine.healthy:
                self._next = (self._next + step + 1) % len(engines)
                return engine
        raise AssertionError("pick() was called without a healthy engine")

"""What policies know of a request, and the interface of those that choose an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engine import Engine


@dataclass(frozen=True, slots=True)
class Asked:
    """One single request as policies see it. Token counts are estimates: nobody has tokenised the prompt yet."""

    tokens: int = 1
    """Tokens of the prompt."""
    held: dict[str, int] = field(default_factory=dict)
    """Tokens of the prompt whose KV an engine (by name) is believed to hold, from the conversation's earlier turns."""

    def missing(self, engine: Engine) -> int:
        """Tokens of the prompt that the engine does not hold; one at least, since vLLM computes the last one anyway."""
        return max(self.tokens - self.held.get(engine.name, 0), 1)


class Picker(Protocol):
    """Chooses an engine of one role."""

    def pick(self, engines: Sequence[Engine], asked: Asked) -> Engine:
        """Return one of ``engines``, which are all usable and at least one. Must not block."""
        ...


class Turns:
    """Whose turn it is among equals: who was chosen longest ago. Engines may come and go."""

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[str, int] = {}

    def of(self, engine: Engine) -> int:
        """The smaller, the longer ago."""
        return self._last.get(engine.name, 0)

    def take(self, engine: Engine) -> Engine:
        """Note that it was chosen."""
        self._count += 1
        self._last[engine.name] = self._count
        if len(self._last) > 4096:  # noqa: PLR2004 -- engines of addresses that are long gone
            self._last = {engine.name: self._count}
        return engine

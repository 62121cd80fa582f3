"""What a mover owes its engine, oldest first: the mover appends, the engine's thread pops from the left."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvxfer.protocol.actions import SinkFinished, SourceFinished, SourceQuiet

if TYPE_CHECKING:
    from collections.abc import Callable

Result = SourceFinished | SinkFinished | SourceQuiet


class Results(deque[Result]):
    """A queue that says when something has come. ``on_new`` is called in the mover's thread."""

    on_new: Callable[[], None] | None = None

    def put(self, result: Result) -> None:
        """Append a result, and say so."""
        self.append(result)
        if self.on_new is not None:
            self.on_new()

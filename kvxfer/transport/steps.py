"""The steps of an engine as the mover sees them: begun, computing, fenced; applied in order.

What a step makes final may be read only when the step's own work has finished on the device; where an earlier step's fence
has not passed, nothing of a later one counts. A preemption, in contrast, counts at once, and takes back what was still
waiting for the same request: its blocks belong to others now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.platform import Fence
    from kvxfer.transport.commands import SinkOpen, SourceFinish, SourceHeld, SourceProgress, Step


@dataclass(slots=True)
class _Pending:
    """One step's source part. ``fence`` is None until the step's work has been launched."""

    finished: list[SourceFinish]
    progress: list[SourceProgress]
    fence: Fence | None


class Steps:
    """Queues what has to wait for fences. Used by one thread."""

    def __init__(self) -> None:
        self._sources: deque[_Pending] = deque()
        self._sinks: deque[tuple[Fence, list[SinkOpen]]] = deque()
        self._held: deque[tuple[Fence | None, SourceHeld]] = deque()

    def begin(self, step: Step, fence: Fence) -> None:
        """Queue a step's parts. ``fence`` covers everything launched before this step."""
        self.end(fence)  # the runner ended the previous step without telling: its work was launched before this fence
        self._held.extend((None if one.computing else fence, one) for one in step.held)
        if step.preempted:
            gone = set(step.preempted)
            for pending in self._sources:
                pending.progress = [one for one in pending.progress if one.request_id not in gone]
        withheld = [one.withheld for one in step.finished if one.withheld is not None]
        if withheld:
            # Computed by earlier steps that told nothing of it, so that nothing in the queue stands for their work.
            self._sources.append(_Pending([], withheld, fence))
        if step.finished or step.progress:
            # A step that only finishes requests launches no work of theirs: it waits for its predecessors alone.
            self._sources.append(_Pending(step.finished, step.progress, None if step.progress else fence))
        if step.opened:
            self._sinks.append((fence, step.opened))

    def end(self, fence: Fence) -> None:
        """Note the fence behind the last begun step's work."""
        if self._sources and self._sources[-1].fence is None:
            self._sources[-1].fence = fence
        if self._held:
            self._held = deque((fence if theirs is None else theirs, one) for theirs, one in self._held)

    def passed_held(self) -> Iterator[SourceHeld]:
        """Take what is held for readers, and nothing launched can write into any more."""
        while self._held and (fence := self._held[0][0]) is not None and fence.done():
            yield self._held.popleft()[1]

    def passed_sources(self) -> Iterator[tuple[list[SourceFinish], list[SourceProgress]]]:
        """Take the steps whose fences, and all earlier ones, have passed. A step's requests finish before it computes."""
        while self._sources:
            pending = self._sources[0]
            if pending.finished:
                # They ended before this step was scheduled: earlier steps, which are gone from the queue, covered them.
                finished, pending.finished = pending.finished, []
                yield finished, []
            if pending.fence is None or not pending.fence.done():
                return
            self._sources.popleft()
            if pending.progress:
                yield [], pending.progress

    def passed_sinks(self) -> Iterator[SinkOpen]:
        """Take the sinks whose blocks no earlier work can touch any more."""
        while self._sinks and self._sinks[0][0].done():
            yield from self._sinks.popleft()[1]

    def recorded(self) -> bool:
        """Tell whether a fence that something waits for has been recorded, so that to look at it is not in vain.

        While a step is being launched there is none for what it computes; ``end`` or the next ``begin`` brings it.
        """
        return bool(
            self._sinks
            or (self._sources and self._sources[0].fence is not None)
            or (self._held and self._held[0][0] is not None)
        )

    def __bool__(self) -> bool:
        """Tell whether anything waits for a fence."""
        return bool(self._sources or self._sinks or self._held)

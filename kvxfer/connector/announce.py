"""What a decode engine's scheduler process tells prefill engines itself, without any step of its own engine.

*Expect* leaves as soon as decode knows of a request, though it may queue for a minute, and is renewed until the worker has
registered: so the prefill side neither gives up nor forgets. *Release* leaves when decode turns out to want nothing: its
prefix cache has it all, or the request was aborted or rejected before it had blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.connector.courier import Courier
from kvxfer.protocol.messages import Expect, Release

if TYPE_CHECKING:
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.transport.commands import EngineAddress
    from kvxfer.transport.control import ControlChannel
    from kvxfer.transport.dialer import Outcome


@dataclass(slots=True)
class _Expected:
    """A handoff that requests of this engine queue for: more than one only when a client repeats an id."""

    address: EngineAddress
    next_at: float
    requests: set[str] = field(default_factory=set)


class Announcer:
    """Runs in the control thread; the three public verbs may be called from any."""

    def __init__(self, control: ControlChannel, ttl: float) -> None:
        self._control = control
        self._ttl = ttl
        self._courier = Courier(control)
        self._expected: dict[HandoffId, _Expected] = {}

    def expect(self, handoff: HandoffId, request_id: str, address: EngineAddress) -> None:
        """Tell prefill, and go on telling, that a decode leg exists."""
        self._control.call(lambda now: self._expect(handoff, request_id, address, now))

    def settle(self, handoff: HandoffId, request_id: str) -> None:
        """Stop telling for this request: the worker's registration speaks for itself now.

        There is no haste: whatever wakes the control thread, it forgets first and renews then.
        """
        self._control.call(lambda _now: self._forget(handoff, request_id), wake=False)

    def release(self, handoff: HandoffId, request_id: str, address: EngineAddress, reason: str) -> None:
        """Tell prefill that nothing is wanted, unless another request here still queues for the same handoff."""
        self._control.call(lambda _now: self._release(handoff, request_id, address, reason))

    # --- in the control thread --------------------------------------------------------------------------------------

    def on_outcome(self, outcome: Outcome) -> None:
        """Send what waited for this engine, or drop it: the worker's own call will fail the request with a reason."""
        self._courier.on_outcome(outcome)

    def on_lost(self, rank: RankId) -> None:
        """Forget an engine's ranks when one is lost: the next message calls it again."""
        self._courier.on_lost(rank)

    def on_round(self, now: float) -> None:
        """Renew what is due."""
        for handoff, one in self._expected.items():
            if one.next_at <= now:
                one.next_at = now + self._ttl / 3
                self._courier.send(one.address, Expect(handoff, self._ttl))

    def _expect(self, handoff: HandoffId, request_id: str, address: EngineAddress, now: float) -> None:
        one = self._expected.setdefault(handoff, _Expected(address, 0.0))
        one.requests.add(request_id)
        one.next_at = now + self._ttl / 3
        self._courier.send(address, Expect(handoff, self._ttl))

    def _forget(self, handoff: HandoffId, request_id: str) -> bool:
        """Return whether no request queues for the handoff any more."""
        one = self._expected.get(handoff)
        if one is not None:
            one.requests.discard(request_id)
            if one.requests:
                return False
            del self._expected[handoff]
        return True

    def _release(self, handoff: HandoffId, request_id: str, address: EngineAddress, reason: str) -> None:
        if self._forget(handoff, request_id):
            self._courier.send(address, Release(handoff, reason))

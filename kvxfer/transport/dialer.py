"""How the ranks of an engine are found and connected, from its control address: ask who is there, greet each rank.

The kv_transfer_params of a request name one address, the engine's; its scheduler process answers there with the directory of
its worker ranks. The sessions are then opened with each rank. Nothing about a handoff is sent before all are open, so when
an address is wrong, or a rank refuses, a request fails at once and nothing can have been written for it.

No sockets here: the switchboard carries out ``ask`` and ``greet``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvxfer.addresses import reachable, shown_at
from kvxfer.protocol.ids import RankId, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.protocol import messages
    from kvxfer.transport.commands import EngineAddress

RETRY = 0.2
"""Seconds between asking an engine whose ranks have not all started."""


class Caller(Protocol):
    """What a dialer needs done."""

    def ask(self, address: EngineAddress) -> None:
        """Send WhoIs to an engine's control address."""

    def greet(self, address: EngineAddress, rank: RankId, host: str, port: int, now: float) -> None:
        """Send Hello to a rank's address."""

    def is_open(self, rank: RankId) -> bool:
        """Tell whether a session with this rank is open."""


@dataclass(slots=True)
class _Call:
    """One engine that is being connected."""

    address: EngineAddress
    deadline: float
    ask_at: float | None = None
    ranks: tuple[RankId, ...] = ()
    open: set[RankId] = field(default_factory=set)
    where: dict[RankId, tuple[str, int]] = field(default_factory=dict)
    greeted: set[RankId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: with all ranks, or with a reason."""

    address: EngineAddress
    ranks: tuple[RankId, ...]
    reason: str | None


class Dialer:
    """The calls under way. Every method returns the calls that ended by it."""

    def __init__(self, wires: Caller, timeout: float) -> None:
        self.timeout = timeout
        self._wires = wires
        self._calls: dict[EngineAddress, _Call] = {}

    def call(self, address: EngineAddress, now: float) -> None:
        """Begin to connect an engine, unless that is under way."""
        if address not in self._calls:
            self._calls[address] = _Call(address, now + self.timeout)
            self._wires.ask(address)

    def directory(
        self, address: EngineAddress, message: messages.Directory, now: float, sender: RankId | None = None
    ) -> Iterator[Outcome]:
        """Handle an engine's answer: greet its ranks, or where that is meant, the ``sender`` of this, its scheduler process."""
        call = self._calls.get(address)
        if call is None or call.ranks:
            return
        if address.engine and message.engine != address.engine:
            yield self._end(
                call,
                f"at {shown_at(address.host, address.port)} lives the engine '{shown(message.engine)}', the request names "
                f"{address.engine!r}: correct remote_engine_id, remote_host and remote_port in kv_transfer_params",
            )
            return
        if not (message.ready and message.ranks):
            call.ask_at = now + RETRY
            return
        if len({rank.rank for rank in message.ranks}) != len(message.ranks):
            yield self._end(call, f"{call.address} names one of its ranks twice: restart it")
            return
        where = {
            RankId(message.engine, rank.incarnation, rank.rank): (reachable(rank.host, address.host), rank.port)
            for rank in message.ranks
        }
        if address.front and sender is not None:
            where = {sender: (address.host, address.port)}
        call.ranks = tuple(where)
        call.open.update(rank for rank in where if self._wires.is_open(rank))
        call.where = {rank: there for rank, there in where.items() if rank not in call.open}
        self._greet(call, now)
        yield from self._check(call)

    def opened(self, rank: RankId) -> Iterator[Outcome]:
        """Note that a session was opened."""
        for call in list(self._calls.values()):
            if rank in call.ranks:
                call.open.add(rank)
                yield from self._check(call)

    def refused(self, address: EngineAddress, reason: str) -> Iterator[Outcome]:
        """Note that a rank, or the engine, refuses us."""
        call = self._calls.get(address)
        if call is not None:
            yield self._end(call, reason)

    def tick(self, now: float) -> Iterator[Outcome]:
        """Give up calls that took too long; ask again where an engine was not ready."""
        for call in list(self._calls.values()):
            if call.deadline <= now:
                yield self._end(call, self._why(call))
            elif call.ask_at is not None and call.ask_at <= now:
                call.ask_at = None
                self._wires.ask(call.address)
            else:
                self._greet(call, now)

    def __iter__(self) -> Iterator[EngineAddress]:
        """Iterate over who is called."""
        return iter(self._calls)

    def __len__(self) -> int:
        """Return the number of calls under way."""
        return len(self._calls)

    def _greet(self, call: _Call, now: float) -> None:
        """Greet the ranks that no call greets yet: one that is greeted twice takes the second for a new beginning.

        An engine can be called by several addresses at once: by its name and without, as a host and as a number.
        """
        for rank, (host, port) in call.where.items():
            if rank not in call.open and all(rank not in other.greeted for other in self._calls.values()):
                call.greeted.add(rank)
                self._wires.greet(call.address, rank, host, port, now)

    def _why(self, call: _Call) -> str:
        if call.ranks:
            missing = ", ".join(str(rank) for rank in call.ranks if rank not in call.open)
            return f"no answer from {missing} within {self.timeout:g} s: check the firewall between the two hosts"
        if call.ask_at is not None:
            return f"{call.address} had not started all its ranks after {self.timeout:g} s"
        return (
            f"no answer from {call.address} within {self.timeout:g} s: check that remote_host and remote_port in "
            "kv_transfer_params are that engine's control_host and control_port, and the firewall"
        )

    def _check(self, call: _Call) -> Iterator[Outcome]:
        if len(call.open) == len(call.ranks):
            yield self._end(call, None)

    def _end(self, call: _Call, reason: str | None) -> Outcome:
        del self._calls[call.address]
        return Outcome(call.address, call.ranks if reason is None else (), reason)

"""Asking running engines for their handoff records, from outside: for the command line, demos and measurements."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from kvxfer.errors import RemoteProtocolError, TransportError
from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages
from kvxfer.protocol.ids import RankId
from kvxfer.transport.records import HandoffRecord

if TYPE_CHECKING:
    from kvxfer.layout.blocks import CacheLayout

_Answer = TypeVar("_Answer", bound=messages.Message)

_WILDCARDS = ("", "0.0.0.0", "::", "*")  # noqa: S104 - compared with, not bound


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker rank says: its layout, its counters since it started, and its last records."""

    rank: int
    layout: CacheLayout
    backend: str
    counters: dict[str, int]
    records: list[HandoffRecord]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What all ranks of an engine say."""

    engine: str
    ranks: list[RankReport]

    @property
    def records(self) -> list[HandoffRecord]:
        """The records of all ranks."""
        return [record for rank in self.ranks for record in rank.records]


def fetch_records(host: str, port: int, *, last: int = 1024, timeout: float = 5.0) -> EngineReport:
    """Ask the engine whose control address is ``host``:``port`` for its last records, rank by rank.

    Raises TransportError when nothing answers within ``timeout`` seconds, or what answers is not an engine of ours.
    """
    deadline = time.monotonic() + timeout
    with zmq.Context() as context:
        directory = _ask(context, host, port, messages.WhoIs(), messages.Directory, deadline)
        while not directory.ready:
            time.sleep(0.1)
            directory = _ask(context, host, port, messages.WhoIs(), messages.Directory, deadline)
        reports = []
        for address in directory.ranks:
            where = host if address.host in _WILDCARDS else address.host
            report = _ask(context, where, address.port, messages.ReportAsk(last), messages.Report, deadline)
            card = RankCard.from_builtins(report.card)
            records = msgspec.convert(report.records, list[HandoffRecord])
            reports.append(RankReport(report.rank, card.layout, card.backend, report.counters, records))
    return EngineReport(directory.engine, reports)


def _ask(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    port: int,
    question: messages.Message,
    answer: type[_Answer],
    deadline: float,
) -> _Answer:
    me = RankId("query", secrets.token_hex(8), -1)
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.setsockopt(zmq.IPV6, int(":" in host))
        try:
            dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise TransportError(f"{host}:{port} is not an address: {error}") from error
        dealer.send(messages.pack(me, "", question))
        left = deadline - time.monotonic()
        if left <= 0 or not dealer.poll(int(left * 1000)):
            raise TransportError(
                f"nothing at {host}:{port} answered in time: is that an engine's control_host and control_port?"
            )
        try:
            _, message = messages.unpack(dealer.recv())
        except RemoteProtocolError as error:
            raise TransportError(f"{host}:{port}: {error}") from error
    if not isinstance(message, answer):
        raise TransportError(f"{host}:{port} answered with {type(message).__name__}, not {answer.__name__}")
    return message

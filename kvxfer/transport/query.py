"""Asking running engines for their handoff records, from outside: for the command line, demos and measurements."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from kvxfer.addresses import endpoint, reachable, shown_at
from kvxfer.errors import RemoteProtocolError, TransportError
from kvxfer.layout.card import RankCard
from kvxfer.protocol import messages
from kvxfer.protocol.fields import MAX_MESSAGE_BYTES
from kvxfer.protocol.ids import RankId
from kvxfer.transport.commands import EngineAddress
from kvxfer.transport.links import CURE, Links
from kvxfer.transport.records import HandoffRecord
from kvxfer.transport.secret import load_secret

if TYPE_CHECKING:
    from kvxfer.layout.maps import CacheMap
    from kvxfer.protocol.auth import Secret

_Answer = TypeVar("_Answer", bound=messages.Message)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker rank says: its layout, its counters since it started, and its last records."""

    rank: int
    cache: CacheMap
    backend: str
    counters: dict[str, int]
    records: list[HandoffRecord]
    now: float = 0.0
    """When it said so, by the clock of the records: the monotonic one of the rank's host."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What all ranks of an engine say. ``counters`` are those of its scheduler process: of reuse, and of the control channel."""

    engine: str
    ranks: list[RankReport]
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def records(self) -> list[HandoffRecord]:
        """The records of all ranks."""
        return [record for rank in self.ranks for record in rank.records]


def fetch_records(
    host: str, port: int, *, last: int = 1024, timeout: float = 5.0, secret: Secret | None = None
) -> EngineReport:
    """Ask the engine whose control address is ``host``:``port`` for its last records, rank by rank.

    Of many, and of long prompts, it tells as many as one message carries, the last ones. ``secret`` is what the engines share;
    without it, what this process's environment says of one (``load_secret``).
    Raises TransportError when nothing answers within ``timeout`` seconds, or what answers is not an engine of ours.
    """
    deadline = time.monotonic() + timeout
    last = min(last, messages.MAX_RECORDS)
    asker = _Asker(secret or load_secret(), deadline)
    with asker.context:
        directory = asker.ask(host, port, messages.WhoIs(), messages.Directory)
        while not directory.ready:
            time.sleep(0.1)
            directory = asker.ask(host, port, messages.WhoIs(), messages.Directory)
        reports = []
        for address in directory.ranks:
            where = reachable(address.host, host), address.port
            report = asker.ask(*where, messages.ReportAsk(last), messages.Report)
            try:
                card = RankCard.from_builtins(report.card)
                records = msgspec.convert(report.records, list[HandoffRecord])
            except (RemoteProtocolError, msgspec.ValidationError) as error:
                raise TransportError(f"what {shown_at(*where)} reports is not understood: {error}") from error
            reports.append(RankReport(report.rank, card.cache, card.backend, report.counters, records, report.now))
        front = asker.ask(host, port, messages.ReportAsk(0), messages.Report)
    return EngineReport(directory.engine, reports, front.counters)


class _Asker:
    """Asks one question on each connection."""

    def __init__(self, secret: Secret | None, deadline: float) -> None:
        self.context = zmq.Context()
        self._me = RankId("query", secrets.token_hex(8), -1)
        self._secret = secret
        self._deadline = deadline

    def ask(self, host: str, port: int, question: messages.Message, answer: type[_Answer]) -> _Answer:
        where = shown_at(host, port)
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.setsockopt(zmq.IPV6, int(":" in host))
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            try:
                dealer.connect(endpoint(host, port))
            except zmq.ZMQError as error:
                raise TransportError(f"{where} is not an address: {error}") from error
            try:
                message = self._exchange(dealer, question, where)
            except RemoteProtocolError as error:
                text = str(error).replace(CURE, "name the engines' own: --secret-file FILE, or KVXFER_SECRET_FILE")
                raise TransportError(f"{where}: {text}") from error
        if not isinstance(message, answer):
            raise TransportError(f"{where} answered with {type(message).__name__}, not {answer.__name__}")
        return message

    def _exchange(self, dealer: zmq.Socket[bytes], question: messages.Message, where: str) -> messages.AnyMessage:
        if self._secret is None:
            dealer.send(messages.pack(self._me, "", question))
            return messages.unpack(self._receive(dealer, where))[1]
        links = Links(self._me, self._secret, lambda _route, packed: dealer.send(packed))
        anybody = EngineAddress("", 0, "")
        dealer.send(links.knock(anybody, None, question))
        while True:
            envelope = messages.open_envelope(self._receive(dealer, where))
            if isinstance(envelope, messages.Refusal):
                raise RemoteProtocolError(envelope.reason)
            message = links.admit(envelope, dealer, time.monotonic(), dialed=True)
            if message is not None:
                return message

    def _receive(self, dealer: zmq.Socket[bytes], where: str) -> bytes:
        left = self._deadline - time.monotonic()
        if left <= 0 or not dealer.poll(int(left * 1000)):
            raise TransportError(
                f"nothing at {where} answered in time: is that an engine's control_host and control_port?"
            )
        return dealer.recv()

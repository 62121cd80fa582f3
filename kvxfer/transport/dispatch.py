"""Which machine of a mover a peer's word is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.protocol.actions import Action
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.sink import Sink
    from kvxfer.protocol.source import Source
    from kvxfer.transport.approaches import Approaches
    from kvxfer.transport.transfers import Transfers


class Dispatch:
    """Of one mover, in its thread."""

    def __init__(self, source: Source, sink: Sink, transfers: Transfers, approaches: Approaches) -> None:
        self._source = source
        self._sink = sink
        self._transfers = transfers
        self._approaches = approaches

    def __call__(self, frm: RankId, message: messages.AnyMessage, now: float) -> Iterator[Action]:
        """Hand a message over. Raises RemoteProtocolError for one that no mover takes."""
        match message:
            case messages.Register():
                yield from self._source.register(frm, message, now, self._transfers.takers(frm))
            case messages.Expect():
                yield from self._source.expect(frm, message, now)
            case messages.Release():
                yield from self._source.release(frm, message, now, self._transfers.takers(frm))
            case messages.Cancel():
                yield from self._source.cancel(frm, message, now, self._transfers.takers(frm))
            case messages.Posted():
                self._sink.posted(frm, message)
            case messages.Seal():
                yield from self._sink.seal(frm, message, now)
            case messages.Grant():
                if self._transfers.lives(frm, message.asked):  # else it is asked for again
                    yield from self._sink.grant(frm, message, now)
            case messages.CancelAck():
                yield from self._sink.cancel_ack(frm, message)
            case messages.Failed():
                yield from self._sink.failed(frm, message)
            case messages.Approach():
                self._approaches.heard(frm, message, now)
            case _:
                raise RemoteProtocolError(f"{frm} sent {type(message).__name__} to a mover")

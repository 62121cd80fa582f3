"""One worker rank's two threads, wired to each other: what arrives on the control channel goes into the mover's mailbox."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.protocol.fields import MAX_MESSAGE_BYTES
from kvxfer.protocol.messages import MAX_CARD_BYTES, MAX_RECORDS, MAX_SMALL_BYTES, AnyMessage, Report
from kvxfer.transport import commands as cmd
from kvxfer.transport.control import ControlChannel
from kvxfer.transport.mover import Mover

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvxfer.layout.card import RankCard
    from kvxfer.layout.repack import Call
    from kvxfer.platform import Fence
    from kvxfer.protocol.auth import Secret
    from kvxfer.protocol.ids import RankId
    from kvxfer.protocol.peers import Timing
    from kvxfer.transport.agent import Agent
    from kvxfer.transport.dialer import Outcome
    from kvxfer.transport.mirroring import HostMirror
    from kvxfer.transport.mover_settings import MoverSettings
    from kvxfer.transport.records import HandoffRecord


class RankThreads:
    """The mover and the control channel of one rank. Raises TransportError when the address cannot be bound.

    ``card`` says everything of the rank but how to reach its agent. ``make_agent`` is called in the mover's thread, ``repack``
    (the platform's, where the card names a staging area) as well. ``mirror``: where the card describes one. ``cpus`` is where
    both threads run (see ``Platform.background_cpus``), ``hear`` are told of records that end (see ``RecordBook``).
    """

    def __init__(
        self,
        me: RankId,
        card: RankCard,
        make_agent: Callable[[], Agent],
        settings: MoverSettings,
        timing: Timing,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        connect_timeout: float = 5.0,
        mover_timeout: float = 30.0,
        cpus: Collection[int] | None = None,
        secret: Secret | None = None,
        repack: Callable[[Call], Fence] | None = None,
        mirror: HostMirror | None = None,
        hear: Sequence[Callable[[HandoffRecord], None]] = (),
    ) -> None:
        self.me = me
        self.control = ControlChannel(me, host, port, self, timing, connect_timeout, cpus, secret)
        self.mover = Mover(
            me,
            card,
            make_agent,
            settings,
            self.control.send,
            self.control.connect,
            cpus,
            renewed=self._renew,
            repack=repack,
            mirror=mirror,
            hear=hear,
        )
        self._mover_timeout = mover_timeout
        self._card = card

    def start(self) -> None:
        """Start both threads. Raises what went wrong."""
        try:
            self.mover.start_and_wait()
        except KvxferError:
            self.control.stop()
            raise
        self._renew(self.mover.transfers.keeper.metadata, anew=False)
        self.control.start()

    def stop(self) -> None:
        """End both threads."""
        self.mover.stop()
        self.control.stop()

    def _renew(self, metadata: bytes, *, anew: bool) -> None:
        """Tell whoever asks from now on how to reach the mover's agent; ``anew``: what peers know is not true any more."""
        self._card = msgspec.structs.replace(self._card, agent=metadata)
        if anew:
            self.control.renew(self._card)
        else:
            self.control.present(self._card)

    # --- the control channel's listener -----------------------------------------------------------------------------

    def on_message(self, frm: RankId, message: AnyMessage) -> None:
        """Hand a peer's message to the mover."""
        self.mover.post(cmd.Inbound(frm, message))

    def on_up(self, rank: RankId, card: RankCard | None) -> None:
        """Tell the mover of a peer's memory; scheduler processes have none."""
        if card is not None:
            self.mover.post(cmd.PeerUp(rank, card))

    def beating(self, now: float) -> bool:
        """Tell whether the mover turns: peers must not wait for one that hangs in the fabric for ever."""
        return self.mover.busy_for(now) < self._mover_timeout

    def on_lost(self, rank: RankId, reason: str, granted_until: float, *, dead: bool) -> None:
        """Tell the mover that a peer is lost."""
        self.mover.post(cmd.PeerLost(rank, reason, granted_until, dead))
        if dead:
            self.mover.transfers.interrupt(rank.agent)

    def on_ended(self, rank: RankId) -> None:
        """Tell the mover that the process of a peer which was lost before has ended."""
        self.mover.post(cmd.PeerEnded(rank))
        self.mover.transfers.interrupt(rank.agent)

    def on_lease(self, rank: RankId, until: float, asked: float) -> None:
        """Tell the mover until when it may post."""
        self.mover.post(cmd.Leased(rank, until, asked))

    def on_outcome(self, outcome: Outcome) -> None:
        """Tell the mover how a call ended."""
        if outcome.reason is None:
            self.mover.post(cmd.Connected(outcome.address, outcome.ranks))
        else:
            self.mover.post(cmd.Unreachable(outcome.address, outcome.reason))

    def on_round(self, now: float) -> None:
        """Nothing is due here."""

    def on_report(self, last: int) -> Report:
        """Answer with the handoff records."""
        records = [msgspec.to_builtins(one) for one in fitting(self.mover.records.last(min(last, MAX_RECORDS)))]
        counters = self.mover.counters | self.control.counters
        return Report(self.me.rank, self._card.to_builtins(), counters, records, time.monotonic())


def fitting(records: Sequence[HandoffRecord]) -> Sequence[HandoffRecord]:
    """Return as many of the last records as one message carries beside a card: long prompts have many moments."""
    left = MAX_MESSAGE_BYTES - MAX_CARD_BYTES - MAX_SMALL_BYTES
    for number, record in enumerate(reversed(records)):
        left -= len(msgspec.msgpack.encode(record))
        if left < 0:
            return records[len(records) - number :]
    return records

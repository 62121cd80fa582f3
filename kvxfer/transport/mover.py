"""The mover: the one thread of a worker process that owns the NIXL agent and the two ends of every handoff.

Everybody else puts commands into its mailbox and takes results out of another; nobody waits for it, and it waits for nobody.
While something is under way (a transfer, an announced write, a fence that has not passed) it looks every ``poll`` seconds, or
three times as often at first, since NIXL's own progress thread is off, and every ``WATCH`` seconds while something might be: each
look takes the interpreter's lock. With nothing under way it sleeps in its mailbox, and a command wakes it at once. So it does
while the engine's thread launches a step, whose fence is yet to be recorded: what a look takes then, the launches lack.

When the agent says that some connection broke, nobody is posted to before having proved to live (``reach``): leases are
suspended, and what proves less is dropped. ``check`` is for what remains.

One order is a matter of correctness. A round first *observes* which transfers are terminal, then handles the *whole* mailbox, and
only then *acts* on what it observed. So, when a preemption was posted before the blocks were given away, no write that may have
read them afterwards is ever taken for valid (``protocol/source.py``).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from kvxfer.errors import LocalProtocolError, RemoteProtocolError, TransportError
from kvxfer.layout.tables import Tables
from kvxfer.protocol import messages
from kvxfer.protocol.actions import (
    Action,
    Note,
    PostRead,
    PostWrite,
    Revoke,
    Send,
    SinkFinished,
    SourceFinished,
    SourceQuiet,
)
from kvxfer.protocol.ids import shown
from kvxfer.protocol.sink import Sink
from kvxfer.protocol.source import Source
from kvxfer.transport import commands as cmd
from kvxfer.transport.approaches import Approaches
from kvxfer.transport.dispatch import Dispatch
from kvxfer.transport.mirroring import Mirroring
from kvxfer.transport.mover_settings import BRISK, COUNTERS, FLUSH, LINGER, TICK, WATCH, MoverSettings, Renewed
from kvxfer.transport.openings import Openings
from kvxfer.transport.reach import NotNowError
from kvxfer.transport.recorder import Recorder
from kvxfer.transport.records import RecordBook
from kvxfer.transport.refusals import Refusals
from kvxfer.transport.results import Results
from kvxfer.transport.staging import Staging, Wanted
from kvxfer.transport.steps import Steps
from kvxfer.transport.threads import Round, run_on
from kvxfer.transport.transfers import InFlight, Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kvxfer.layout.card import RankCard
    from kvxfer.layout.repack import Call
    from kvxfer.platform import Fence
    from kvxfer.protocol.ids import HandoffId, RankId
    from kvxfer.transport.agent import Agent
    from kvxfer.transport.mirroring import HostMirror
    from kvxfer.transport.records import HandoffRecord

logger = logging.getLogger("kvxfer.mover")


class Mover(threading.Thread):
    """Owns ``agent`` (made by ``make_agent`` in this thread) and moves what the two machines want moved.

    ``send`` hands a message to the control thread, ``connect`` asks it for an engine's ranks, ``renewed`` tells it what peers
    must know of the agent from now on, and whether all sessions must begin ``anew``, ``hear`` are told of records that end; all
    return at once.
    """

    def __init__(
        self,
        rank: RankId,
        card: RankCard,
        make_agent: Callable[[], Agent],
        settings: MoverSettings,
        send: Callable[[RankId, messages.Message], None],
        connect: Callable[[cmd.EngineAddress], None],
        cpus: Collection[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        renewed: Renewed = lambda _metadata, *, anew: None,  # noqa: ARG005
        repack: Callable[[Call], Fence] | None = None,
        mirror: HostMirror | None = None,
        hear: Sequence[Callable[[HandoffRecord], None]] = (),
    ) -> None:
        super().__init__(name=f"kvxfer-mover-{rank.rank}", daemon=True)
        self.rank = rank
        self.cache = card.cache
        self.settings = settings
        tables = Tables.of(card.cache)
        self.source = Source(
            tables.step,
            join=tables.join,
            stream=settings.stream and tables.streams,
            leg_timeout=settings.leg_timeout,
            lease=settings.pull_lease,
            hold_limit=settings.hold_limit,
            drain_bound=settings.drain_bound,
            transfer_limit=settings.transfer_limit,
            slice_tokens=settings.slice_tokens,
        )
        self.sink = Sink(
            drain_bound=settings.drain_bound,
            renew_after=settings.pull_lease / 4,
            transfer_limit=settings.transfer_limit,
            revoke=settings.revoke,
        )
        self.records = RecordBook(settings.records, hear)
        self._recorder = Recorder(self.records, rank.rank, settings.mode, card.cache)
        self.results = Results()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.transfers = Transfers(rank, card, make_agent, clock)
        self._approaches = Approaches(rank, self.transfers, send, self.counters, eager=settings.eager)
        self._mirroring = Mirroring(mirror, self.transfers, self.source, self.sink, settings.slice_tokens)
        self._refusals = Refusals(logger)
        self._send = send
        self._renewed = renewed
        self._cpus = cpus
        self._clock = clock
        self._mailbox: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._revoking: float | None = None
        self._steps = Steps()
        self._openings = Openings(connect)
        self._staging = Staging(repack)
        self._dispatch = Dispatch(self.source, self.sink, self.transfers, self._approaches)
        self._next_tick = 0.0
        self._linger_until = self._brisk_until = 0.0
        self._round = Round()

    # --- for other threads ------------------------------------------------------------------------------------------

    def start_and_wait(self, timeout: float = 120.0) -> None:
        """Start, and return when the agent is made and the cache registered. Raises what went wrong."""
        self.start()
        if not self._ready.wait(timeout):
            raise TransportError(f"NIXL did not register the cache within {timeout:g} s; see NIXL_LOG_LEVEL=DEBUG")
        if self._start_error is not None:
            raise self._start_error

    def post(self, command: cmd.Command) -> None:
        """Put a command into the mailbox. Never waits; from any thread."""
        self._mailbox.put(command)

    def check(self) -> None:
        """Raise TransportError if the thread has ended, or is caught in a call: its process must then be restarted."""
        if self._round.worth_a_look():
            self._round.check(str(self.rank), self._clock(), alive=not self._round.over)

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread and close the agent."""
        if self.is_alive():
            self.post(cmd.Stop())
            self.join(timeout)

    # --- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make the agent, then turn rounds until stopped."""
        run_on(self._cpus)
        try:
            self.prepare()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that started us
            self._start_error = error
            return
        finally:
            self._ready.set()
        try:
            while self.turn(self._wait_time()):
                pass
        finally:
            self._round.over = True
            try:
                self.transfers.close_agent()
            except TransportError as error:
                logger.info("%s", error)  # its process is ending

    def prepare(self) -> None:
        """Make the agent and register the cache."""
        self.transfers.keeper.open()

    def busy_for(self, now: float) -> float:
        """Return for how many seconds the round that is under way has lasted; from any thread."""
        return self._round.lasts(now)

    def turn(self, wait: float | None = 0.0) -> bool:
        """Wait for a command (None: as long as it takes), observe, handle the mailbox, act. Returns False when stopped.

        The thread does nothing but this; a simulation calls it, and ``prepare``, instead of starting the thread.
        """
        going_on = self._turn(wait)
        if self._revoking is not None:  # here, where no transfer of the round is referred to any more
            self._guarded(self._revoke, self._clock())
        return going_on

    def _turn(self, wait: float | None) -> bool:
        self._round.since = None
        first = self._take(wait)
        self._round.since = self._clock()
        terminal = self.transfers.observe()
        notifications = self.transfers.listen() if self._progress() else []
        self._ask_for_disturbance()
        if first is not None and not self._handle_all(first):
            return False
        while (command := self._take(0.0)) is not None:
            if not self._handle_all(command):
                return False
        now = self._clock()
        self._guarded(self._act_on_fences, now)
        self._guarded(self._mirroring.act, now, self._run, self._execute)
        self._guarded(self._act_on_staging, now)
        for one, failed in terminal:
            self._guarded(self._act_on_terminal, one, failed, now)
        for frm, packed in notifications:
            self._guarded(self._act_on_notification, frm, packed, now)
        if now >= self._next_tick and (len(self.source) or len(self.sink)):
            self._next_tick = now + TICK
            self._guarded(lambda now: self._run(self.source.tick(now)), now)
            self._guarded(lambda now: self._run(self.sink.tick(now)), now)
        free = self._revoking is None and not (self.transfers.in_flight or self._steps)
        self._guarded(self._approaches.act, now, free)
        return True

    def _progress(self) -> float | None:
        """Return how often to look at the fabric: data arrives or leaves (notifications after it), or may; None for never."""
        lingers = self._linger_until - self._clock()
        if self.sink.arriving() or self.source.serving() or self._approaches.promised() or lingers > LINGER - FLUSH:
            return self._poll()
        return max(WATCH, self.settings.poll) if self.sink.receiving() or lingers > 0 else None

    def _wait_time(self) -> float | None:
        """Seconds to sleep in the mailbox; None for as long as nothing comes."""
        if self._revoking is not None:
            return self.settings.poll if self.transfers.in_flight else TICK
        if self.transfers.in_flight or self._steps.recorded() or self._staging.packing() or self._mirroring.busy():
            return self._poll()
        return self._progress() or (TICK if len(self.source) or len(self.sink) or len(self._approaches) else None)

    def _poll(self) -> float:
        return self.settings.poll / 3 if self._clock() < self._brisk_until else self.settings.poll

    def _take(self, timeout: float | None) -> cmd.Command | None:
        try:
            return self._mailbox.get_nowait() if timeout == 0.0 else self._mailbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def _handle_all(self, command: cmd.Command) -> bool:
        if isinstance(command, cmd.Stop):
            return False
        self._guarded(self._obey, command)
        return True

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """A peer's nonsense, or a defect of ours in one handoff, must not end the thread that serves all the others."""
        try:
            act(*args)
        except RemoteProtocolError as error:
            self.counters["refused_messages"] += 1
            command = args[0]
            peer = str(command.frm) if isinstance(command, cmd.Inbound) else shown(str(command), 600)
            self._refusals.note(peer, "handoff", error, self._clock())
        except Exception:
            logger.exception("defect in the handling of %r", args[0])

    # --- commands ---------------------------------------------------------------------------------------------------

    def _obey(self, command: cmd.Command) -> None:
        now = self._clock()
        match command:
            case cmd.Inbound(frm, message):
                if isinstance(message, messages.Posted):
                    self._brisk_until = now + BRISK
                self._run(self._dispatch(frm, message, now))
            case cmd.StepBegin(step, fence):
                self._begin(step, now)
                self._steps.begin(step, self._mirroring.behind(fence, step.opened))
                self._act_on_fences(now)
            case cmd.StepEnd(fence):
                self._steps.end(fence)
            case cmd.Leased(rank, until, asked):
                if self.transfers.reach.heard(rank, asked):
                    self._run(self.source.leased(rank, until, now))
            case cmd.Connected(address, ranks) if not self.transfers.reach.knows(ranks):
                self._openings.again(address)  # its sessions have ended meanwhile
            case cmd.Connected(address, ranks):
                for handoff in self._openings.connected(address, ranks):
                    self._register(handoff, ranks, now)
            case cmd.Unreachable(address, reason):
                for handoff in self._openings.unreachable(address):
                    self._run(self.sink.unreachable(handoff, reason))
            case cmd.PeerUp(rank, card):
                if self.transfers.up(rank, card):
                    self._renewed(self.transfers.keeper.agent.metadata(), anew=False)
                self._run(self.sink.peer_back(rank, now))
                self._approaches.up(rank, now)
            case cmd.PeerLost(rank, reason, granted_until, dead):
                self._lose(rank, reason, granted_until, now, dead=dead)
            case cmd.PeerEnded(rank):
                self.sink.peer_ended(rank, now)
                self.transfers.ended_process(rank)
            case _:
                raise LocalProtocolError(f"no handler for {command!r}")

    def _begin(self, step: cmd.Step, now: float) -> None:
        for request_id in step.preempted:
            self._run(self.source.preempt(request_id, now, step.tokens.get(request_id, 0)))
        for start in step.started:
            self._recorder.started(start, self.transfers.backend)
            self._run(self.source.start(start.handoff, start.request_id, start.prompt_tokens, now, start.prompt))
        for opened in step.opened:
            if self.sink.state(opened.handoff) is not None or not self._mirroring.lend(opened):
                # Two requests claim one handoff. The second is refused, and nothing of the first is touched.
                first = self.sink.request(opened.handoff) or "before it"
                reason = f"request {first} has this handoff id"
                self.results.put(SinkFinished(opened.handoff, opened.request_id, reason))
                continue
            self._recorder.opened(opened, self.transfers.backend)
            span = (opened.mode or self.settings.mode, opened.start, opened.end, opened.blocks)
            self._run(self.sink.open(opened.handoff, opened.request_id, *span, now, opened.prompt))
            self._openings.open(opened.handoff, opened.source)
        for cancel in step.cancelled:
            self._run(self.sink.cancel(cancel.request_id, cancel.reason))

    def _act_on_fences(self, now: float) -> None:
        if not self._steps:
            return
        for finished, progress in self._steps.passed_sources():
            for end in finished:
                self._run(self.source.finish(end.request_id, now, aborted=end.aborted, held=end.held, token=end.token))
            for one in progress:
                self._run(self.source.progress(one.request_id, one.blocks, one.final, now))
        for held in self._steps.passed_held():
            self._run(self.source.hold(held.handoff, held.tokens, held.blocks, held.until, now))
        for opened in self._steps.passed_sinks():
            if self.sink.request(opened.handoff) != opened.request_id:
                continue  # cancelled or refused meanwhile
            ranks = self._openings.fenced(opened.handoff)
            if ranks is not None:
                self._register(opened.handoff, ranks, now)

    def _register(self, handoff: HandoffId, ranks: tuple[RankId, ...], now: float) -> None:
        """Register a sink with its source's ranks, once it has the slots that it needs to be received, if any."""
        if not self.transfers.reach.knows(ranks):
            self._staging.leave(handoff)  # lost while it waited for slots: they are called anew, or it fails
            return
        try:
            routes, idle = self.transfers.sources(ranks)
            staged = self._staging.take(Wanted(handoff, *self.sink.span(handoff)), routes, ranks)
        except TransportError as error:
            self._run(self.sink.unreachable(handoff, str(error)))
            return
        if staged is not None:  # else ``ready`` names it later
            self._openings.closed(handoff)
            self._mirroring.registered(handoff, self.sink.span(handoff)[2], routes, staged)
            self._run(self.sink.connected(handoff, tuple(routes), now, staged, idle))

    def _act_on_staging(self, now: float) -> None:
        for done in self._staging.packed():
            self._finish(done)
        while (waiting := self._staging.ready()) is not None:
            self._register(*waiting, now)
            if self._staging.ready() == waiting:
                return

    def _lose(self, rank: RankId, reason: str, granted_until: float, now: float, *, dead: bool = False) -> None:
        self._run(self.sink.peer_lost(rank, reason, granted_until, now, dead=dead))
        self._run(self.source.peer_lost(rank, reason, now))
        if not dead and self.sink.wants_back(rank):
            self._openings.call_back(rank)  # if it lives, it can say that nothing is in flight
        self._openings.lost(rank)
        self._approaches.lost(rank)
        lost = self.transfers.ended_process if dead else self.transfers.lost
        lost(rank)

    def _ask_for_disturbance(self) -> None:
        if self.transfers.disturbed():
            self.source.suspend()

    # --- revoking this rank's keys ----------------------------------------------------------------------------------

    def _revoke(self, now: float) -> None:
        """Make another agent, once our own transfers are terminal, or have had the time to be."""
        assert self._revoking is not None
        keeper = self.transfers.keeper
        try:
            if keeper.is_open:
                if self.transfers.in_flight and now - self._revoking < self.settings.drain_bound:
                    return
                self._close_agent(now)
            self._round.since = None  # to register a large cache may take longer than a round may
            keeper.open()
        except Exception as error:  # noqa: BLE001 - until it succeeds, blocks stay where they are, or nothing is posted
            self._refusals.line(f"{self.rank}: its keys could not be revoked, and that is tried again: {error}", now)
            return
        self._revoking = None
        self.counters["revocations"] += 1
        logger.warning("%s: the keys of this rank's memory have been revoked; its peers connect anew", self.rank)
        self._renewed(keeper.metadata, anew=True)

    def _close_agent(self, now: float) -> None:
        """After this nothing lands that anybody has posted: every exposed handoff ends, and every session with it."""
        for side, number in self.transfers.close_agent():
            self._post_failed(side, number, "this rank has revoked its keys", now)
        self._run(self.sink.revoked())
        for rank in self.transfers.reach.peers():
            self._lose(rank, "this rank has revoked its keys", now, now)

    # --- what became of transfers -----------------------------------------------------------------------------------

    def _act_on_terminal(self, one: InFlight, failed: bool, now: float) -> None:
        self.transfers.ended(one)
        self._recorder.terminal(one, now, failed=failed)
        if failed:
            self._post_failed(one.side, one.number, f"NIXL reports an error towards {one.peer}", now)
        elif one.side == "source":
            self._linger_until = now + LINGER
            self._run(self.source.written(one.number, now))
        else:
            self._run(self._mirroring.read(one.number, one.span, None, now))

    def _post_failed(self, side: str, number: int, reason: str, now: float) -> None:
        self.counters["failed_transfers"] += 1
        if side == "source":
            self._run(self.source.write_failed(number, reason, now))
        else:
            self._run(self._mirroring.read(number, None, reason, now))

    def _act_on_notification(self, frm: str, packed: bytes, now: float) -> None:
        written = messages.unpack_written(packed)
        self._recorder.notified(written.handoff, now)
        self._mirroring.written(frm, written)
        self._run(self.sink.written(frm, written))

    # --- actions ----------------------------------------------------------------------------------------------------

    def _run(self, actions: Iterator[Action]) -> None:
        """Execute what a machine wants. All of it is taken first: executing may feed the machine its next event."""
        now = self._clock()
        for action in list(actions):
            if not self._mirroring.holds(action):
                self._execute(action, now)

    def _execute(self, action: Action, now: float) -> None:
        match action:
            case Send(to, message):
                self._send(to, message)
            case PostWrite():
                self._post_transfer(action)
            case PostRead():
                for part in self._mirroring.parts(action):
                    self._post_transfer(part)
            case SourceFinished():
                self._finish(action)
            case SinkFinished():
                if not self._staging.received(action):
                    self._finish(action)
            case SourceQuiet():
                self.results.put(action)
            case Revoke(reason):
                logger.warning("%s revokes the keys of its memory: %s", self.rank, reason)
                self._revoking = now if self._revoking is None else self._revoking
            case Note():
                self._recorder.note(action, now)

    def _finish(self, action: SourceFinished | SinkFinished) -> None:
        self._openings.closed(action.handoff)
        self._recorder.ended(action, self._clock())  # first: whoever sees the engine's answer may look at the record
        self.results.put(action)

    def _post_transfer(self, action: PostWrite | PostRead) -> None:
        now = self._clock()
        side = "source" if isinstance(action, PostWrite) else "sink"
        try:
            self._ask_for_disturbance()
            if self._revoking is not None:
                raise TransportError("this rank is revoking its keys")  # noqa: TRY301
            posted = self.transfers.post(action)
        except Exception as error:  # noqa: BLE001 - whatever it was, the machine must hear that nothing was posted whole
            logger.warning("handoff %s: %s", action.handoff, error)
            if side == "source" and isinstance(error, NotNowError):
                self._run(self.source.unposted(action.transfer, now))
            else:
                self._post_failed(side, action.transfer, str(error), now)
            return
        self.counters["bytes"] += posted.bytes
        self.counters["descriptors"] += posted.descriptors
        self.counters["transfers"] += 1
        self._recorder.posted(action, posted, now)
        self._brisk_until = now + BRISK

"""Guards of the product, each taken away alone. Every entry changes a class for as long as its monkeypatch lives."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from kvxfer.connector import retained, shaping
from kvxfer.connector.pins import Pins
from kvxfer.protocol import peers, sink, source
from kvxfer.protocol.actions import Send, SourceFinished
from kvxfer.protocol.chain import DIGEST
from kvxfer.protocol.ids import RankId
from kvxfer.protocol.intervals import IntervalSet
from kvxfer.protocol.messages import Seal
from kvxfer.protocol.source_data import Pin, SourceHandoff
from kvxfer.protocol.source_delivery import Delivery
from kvxfer.transport import approaches, links, mover, sessions, steps, switchboard

if TYPE_CHECKING:
    from kvxfer.protocol.messages import Register

MUTATIONS = {}


def mutation(act):
    MUTATIONS[act.__name__] = act
    return act


class Passed:
    def done(self) -> bool:
        return True


def wrap(patch, cls, name, make):
    """Replace a method, where it is defined, by ``make(original)``."""
    owner = next(one for one in cls.__mro__ if name in vars(one))
    patch.setattr(owner, name, make(vars(owner)[name]))


# --- fences ----------------------------------------------------------------------------------------------------------------


@mutation
def no_post_fence(patch):
    """What a step computes counts as final when the step has been launched."""
    wrap(patch, steps.Steps, "end", lambda original: lambda self, _fence: original(self, Passed()))


@mutation
def no_pre_fence(patch):
    """Blocks are registered although earlier work may still write there."""

    def make(original):
        def begin(self, step, fence):
            original(self, step, fence)
            if step.opened:
                self._sinks[-1] = (Passed(), step.opened)

        return begin

    wrap(patch, steps.Steps, "begin", make)


@mutation
def preemption_forgets_what_waits(patch):
    """A preemption does not take back the progress that still waits for its fence."""
    wrap(
        patch,
        steps.Steps,
        "begin",
        lambda original: lambda self, step, fence: original(self, msgspec.structs.replace(step, preempted=[]), fence),
    )


@mutation
def acts_before_it_listens(patch):
    """A round acts on what it observed before it handles the mailbox."""

    def turn(self, wait=0.0):
        del wait
        now = self._clock()
        for one, failed in self.transfers.observe():
            self._guarded(self._act_on_terminal, one, failed, now)
        return original(self)

    original = mover.Mover.turn
    patch.setattr(mover.Mover, "turn", turn)


# --- the end of an attempt ---------------------------------------------------------------------------------------------------


@mutation
def cancel_is_not_acknowledged(patch):
    """A cancelled sink closes at once."""

    def make(_original):
        def check(self, one):
            if one.state is sink.State.CANCELLING and one.mode == "push":
                yield from self._fail(one, one.reason or "cancelled")

        return check

    wrap(patch, sink.Sink, "_check_quiet", make)


@mutation
def cancelled_source_answers_at_once(patch):
    """A source acknowledges, and frees, although writes are in flight."""

    def make(original):
        def advance(self, one, now):
            flying = {rank: where.in_flight for rank, where in one.sinks.items() if where.served}
            for rank in flying:
                one.sinks[rank].in_flight = {}
            yield from original(self, one, now)
            for rank, kept in flying.items():
                one.sinks[rank].in_flight = kept

        return advance

    wrap(patch, Delivery, "_advance", make)


@mutation
def failed_write_is_thought_gone(patch):
    """A write that failed is taken for one that can land no more."""

    def make(original):
        def failed(self, transfer, reason, now):
            self.drain_bound, kept = 0.0, self.drain_bound
            yield from original(self, transfer, reason, now)
            self.drain_bound = kept

        return failed

    wrap(patch, source.Source, "write_failed", make)


@mutation
def failed_read_is_thought_gone(patch):
    """A read that failed is taken for one that can land no more."""

    def make(original):
        def failed(self, transfer, reason, now):
            yield from original(self, transfer, reason, now - self.drain_bound)

        return failed

    wrap(patch, sink.Sink, "read_failed", make)


@mutation
def reader_is_gone_while_it_reads(patch):
    """A cancelled pull closes although its read is in flight."""

    def make(original):
        def cancel(self, one, *reason):
            for part in one.parts.values():
                part.reading = None
            yield from original(self, one, *reason)

        return cancel

    wrap(patch, sink.Sink, "_end_pull", make)
    wrap(patch, sink.Sink, "_cancel", make)


# --- generations, attempts, incarnations -----------------------------------------------------------------------------------


@mutation
def sink_takes_any_generation(patch):
    """What was written under any generation counts."""

    def zero(original):
        return lambda self, frm, message, *now: original(
            self, frm, msgspec.structs.replace(message, generation=0), *now
        )

    wrap(patch, sink.Sink, "written", zero)
    wrap(patch, sink.Sink, "seal", zero)


@mutation
def source_keeps_its_generation(patch):
    """A preempted source does not write again what it has written."""

    def make(original):
        def preempt(self, request_id, now, token=0):
            one = self._of(request_id)
            old = [] if one is None else [(where, where.posted, where.written) for where in one.sinks.values()]
            generation = 0 if one is None else one.generation
            actions = list(original(self, request_id, now, token))
            for where, posted, written in old:
                one.generation, where.posted, where.written = generation, posted, written
            yield from actions

        return preempt

    wrap(patch, source.Source, "preempt", make)


@mutation
def two_writes_to_a_position_fly(patch):
    """A position is posted again while its earlier write is in flight."""

    def make(original):
        def post(self, one, where, now):
            flying, where.in_flight = where.in_flight, {}
            yield from original(self, one, where, now)
            where.in_flight = flying | where.in_flight

        return post

    wrap(patch, Delivery, "_post", make)


@mutation
def received_without_a_seal(patch):
    """The sink takes the last generation that it has heard of for the valid one."""

    def make(original):
        def written(self, frm, message):
            _, part = self._part(message.handoff, message.attempt, frm)
            if part is not None:
                part.sealed = message.generation
            yield from original(self, frm, message)

        return written

    wrap(patch, sink.Sink, "written", make)


@mutation
def sealed_when_posted(patch):
    """The source seals when everything has been posted."""

    def seal(self, one, where):
        if one.state is source.State.FINAL and where.posted.covers(where.start, where.end):
            yield Send(where.rank, Seal(one.id, where.attempt, one.generation, one.final))
            yield from self._serve_one(one, where, "done", tell=False)

    patch.setattr(Delivery, "_seal", seal)


@mutation
def attempts_are_not_told_apart(patch):
    """The sink takes what was said of an earlier attempt."""

    def part(self, handoff, attempt, agent):
        del attempt
        one = self._handoffs.get(handoff)
        for rank, part in () if one is None else one.parts.items():
            if rank.agent == agent:
                return one, part
        return None, None

    patch.setattr(sink.Sink, "_part", part)


@mutation
def envelopes_for_the_dead_are_opened(patch):
    """A process acts on what was meant for an earlier life at its address."""

    def open_envelope(packed):
        return msgspec.structs.replace(original(packed), to="")

    original = switchboard.open_envelope
    patch.setattr(switchboard, "open_envelope", open_envelope)


@mutation
def agents_have_no_incarnation(patch):
    """An engine's agent has one name in all its lives."""
    patch.setattr(RankId, "agent", property(lambda self: f"{self.engine}/{self.rank}"))


@mutation
def nobody_is_replaced(patch):
    """A new life does not end the sessions with the old one."""
    patch.setattr(sessions.Sessions, "replaced", lambda _self, _rank: iter(()))


@mutation
def greeted_anew_means_nothing(patch):
    """A peer that has lost its session, and greets again, is taken for one that only says it twice."""
    patch.setattr(sessions.Sessions, "begun_anew", lambda _self, _rank, _sent: iter(()))


@mutation
def stale_means_nothing(patch):
    """A peer that says it has no session is not believed."""
    patch.setattr(sessions.Sessions, "forgotten", lambda _self, _rank: iter(()))


@mutation
def ended_sessions_go_on_speaking(patch):
    """What was said in a session that has ended counts in the one that follows it."""

    class Nothing(OrderedDict):
        def __setitem__(self, rank, at):
            del rank, at

        def move_to_end(self, rank):
            del rank

    wrap(
        patch,
        switchboard.Switchboard,
        "__init__",
        lambda original: lambda self, *args: (original(self, *args), setattr(self, "_ended", Nothing()))[0],
    )


@mutation
def said_again_begins_anew(patch):
    """A registration that is said again is a registration like the first."""
    wrap(
        patch,
        source.Source,
        "register",
        lambda original: (
            lambda self, frm, message, *more: original(self, frm, msgspec.structs.replace(message, again=False), *more)
        ),
    )


# --- leases ----------------------------------------------------------------------------------------------------------------


@mutation
def posts_without_a_lease(patch):
    """The source writes whether or not it may."""

    def make(original):
        def post(self, one, where, now):
            self._may_post_until[where.rank] = math.inf
            yield from original(self, one, where, now)

        return post

    wrap(patch, Delivery, "_post", make)


@mutation
def fence_does_not_wait(patch):
    """The sink thinks that a lost source can write no more."""

    def make(original):
        def lost(self, peer, reason, granted_until, now, *, dead=False):
            del granted_until
            self.drain_bound, kept = 0.0, self.drain_bound
            yield from original(self, peer, reason, now, now, dead=dead)
            self.drain_bound = kept

        return lost

    wrap(patch, sink.Sink, "peer_lost", make)


@mutation
def fence_forgets_the_lease(patch):
    """The sink waits for what has been posted, not for what may still be."""
    wrap(
        patch,
        sink.Sink,
        "peer_lost",
        lambda original: (
            lambda self, peer, reason, _until, now, *, dead=False: original(self, peer, reason, now, now, dead=dead)
        ),
    )


@mutation
def lease_counts_from_its_receipt(patch):
    """The holder counts from when it heard, not from when it asked."""
    wrap(
        patch,
        peers.Peer,
        "hear",
        lambda original: (
            lambda self, sent, echo, lease, now: original(self, sent, now if echo > 0.0 else 0.0, lease, now)
        ),
    )


@mutation
def lease_has_no_margin(patch):
    """The holder takes nothing off."""
    wrap(
        patch,
        peers.Peer,
        "__init__",
        lambda original: lambda self, timing, now: original(self, dataclasses.replace(timing, margin=0.0), now),
    )


@mutation
def attempts_that_are_over_may_begin(patch):
    """A registration begins an attempt that its sink was told is over, if a word said again has overtaken it."""
    patch.setattr(source.Source, "_end_attempt", lambda *_: None)


@mutation
def read_counts_after_its_lease(patch):
    """A pull's read counts whenever it completed."""

    def make(original):
        def done(self, transfer, now):
            one, frm = self._transfers[transfer]
            one.parts[frm].valid_until = math.inf
            yield from original(self, transfer, now)

        return done

    wrap(patch, sink.Sink, "read_done", make)


@mutation
def grants_before_it_is_held(patch):
    """The source grants blocks that a preemption may still take."""

    def make(original):
        def grant(self, one, where, now):
            held, one.held = one.held, True
            yield from original(self, one, where, now)
            one.held = held

        return grant

    wrap(patch, Delivery, "_grant", make)


# --- counting and remembering ----------------------------------------------------------------------------------------------


@mutation
def notifications_are_counted(patch):
    """The sink counts positions instead of keeping them."""

    class Counter(IntervalSet):
        counted = 0

        def add(self, start, end):
            self.counted += end - start

        def covers(self, start, end):
            return self.counted >= end - start

    patch.setattr(sink, "IntervalSet", Counter)


@mutation
def early_registrations_are_forgotten(patch):
    """The source does not park what comes before its own engine has the request."""

    def make(original):
        def register(self, frm, message: Register, *more):
            if message.handoff in self._handoffs:
                yield from original(self, frm, message, *more)

        return register

    wrap(patch, source.Source, "register", make)


@mutation
def nothing_is_said_again(patch):
    """What a broken connection lost stays lost."""
    patch.setattr(sink.Sink, "_renewable", staticmethod(lambda _one: False))


@mutation
def lost_peers_are_kept(patch):
    """A source goes on with a sink that is gone."""
    patch.setattr(source.Source, "peer_lost", lambda _self, _peer, _reason, _now: iter(()))


@mutation
def legs_are_waited_for_for_ever(patch):
    """A source waits for a leg that never comes."""
    patch.setattr(source.Source, "_waits", lambda _self, _one: False)


@mutation
def held_for_as_long_as_decode_queues(patch):
    """Prefill holds what decode has no blocks for, while decode's blocks wait for what prefill has no blocks for."""

    def make(original):
        def init(self, *args, **settings):
            original(self, *args, **{**settings, "hold_limit": math.inf})

        return init

    wrap(patch, Delivery, "__init__", make)


@mutation
def prompts_are_not_compared(patch):
    """The source does not look at the digest of the sink's prompt, only at its length."""

    def make(original):
        def check_span(self, one):
            kept, one.prompt = one.prompt, b""
            yield from original(self, one)
            one.prompt = kept

        return check_span

    wrap(patch, source.Source, "_check_span", make)


@mutation
def ended_handoffs_are_forgotten(patch):
    """A late message of an ended handoff starts it again."""

    def make(original):
        def close(self, one, event):
            original(self, one, event)
            self._ended.clear()

        return close

    wrap(patch, Delivery, "_close", make)


@mutation
def finished_twice(patch):
    """A source reports twice."""

    def make(original):
        def advance(self, one, now):
            for action in original(self, one, now):
                yield action
                if isinstance(action, SourceFinished):
                    yield action

        return advance

    wrap(patch, Delivery, "_advance", make)


@mutation
def failures_are_not_heard(patch):
    """The sink does not hear that its source has failed."""
    patch.setattr(sink.Sink, "failed", lambda _self, _frm, _message: iter(()))


@mutation
def openings_are_not_called_anew(patch):
    """An opening whose engine is lost before it registered waits on."""
    patch.setattr(mover.Openings, "lost", lambda _self, _rank: None)


# --- pins, keys, proofs ------------------------------------------------------------------------------------------------------


@mutation
def lost_blocks_are_not_pinned(patch):
    """The blocks of a preempted request are given away although writes read them."""

    def orphan(self, request_id):
        self.let_go(request_id)
        return 0

    patch.setattr(Pins, "orphan", orphan)


@mutation
def pins_do_not_wait_for_writes(patch):
    """A source says at once that nothing reads from lost blocks."""

    def pin(one, token):
        if token:
            one.pins.append(Pin(token, frozenset()))

    patch.setattr(Delivery, "_pin", staticmethod(pin))


@mutation
def keys_are_not_revoked(patch):
    """The time alone is trusted, although the lost source may only have been asleep."""

    def make(original):
        def init(self, *args, **settings):
            original(self, *args, **{**settings, "revoke": False})

        return init

    wrap(patch, sink.Sink, "__init__", make)


@mutation
def replays_are_admitted(patch):
    """An envelope counts each time it comes."""

    def make(original):
        def admit(self, envelope, route, now, **where):
            for link in [*self._dialed.values(), *self._heard.values()]:
                link.received = 0
            return original(self, envelope, route, now, **where)

        return admit

    wrap(patch, links.Links, "admit", make)


# --- engines of several ranks ----------------------------------------------------------------------------------------------


@mutation
def blocks_go_back_after_the_first_sink(patch):
    """A source finishes although writes to a second sink rank are in flight."""

    def make(original):
        def advance(self, one, now):
            others = list(one.sinks.values())[1:] if one.state is source.State.SERVED else []
            flying = [where.in_flight for where in others]
            for where in others:
                where.in_flight = {}
            yield from original(self, one, now)
            for where, kept in zip(others, flying, strict=True):
                where.in_flight = kept

        return advance

    wrap(patch, Delivery, "_advance", make)


@mutation
def finished_after_the_first_of_several_sinks(patch):
    """A source does not wait for the sink ranks that have not registered."""
    patch.setattr(SourceHandoff, "attended", property(lambda one: bool(one.sinks or one.declined)))


@mutation
def a_grant_is_shared_by_all_readers(patch):
    """The first reader that releases the blocks releases them for all."""

    def make(original):
        def release(self, frm, message, *more):
            one = self._handoffs.get(message.handoff)
            for where in () if one is None else one.sinks.values():
                where.served = where.served or where.mode == "pull"
            if one is not None and frm in one.sinks and one.state is not source.State.SERVED:
                one.sinks[frm].served = False
            yield from original(self, frm, message, *more)

        return release

    wrap(patch, source.Source, "release", make)


@mutation
def a_grant_of_one_rank_is_a_lease_of_all(patch):
    """What one source rank has promised counts for the reads from others."""

    def make(original):
        def grant(self, frm, message, now):
            yield from original(self, frm, message, now)
            one, _ = self._part(message.handoff, message.attempt, frm.agent)
            for part in () if one is None else one.parts.values():
                part.valid_until = max(other.valid_until for other in one.parts.values())

        return grant

    wrap(patch, sink.Sink, "grant", make)


@mutation
def quiet_by_one_part_counts_for_all(patch):
    """A cancelled push ends when the first source rank has acknowledged."""

    def make(original):
        def acknowledged(self, frm, message):
            one, _ = self._part(message.handoff, message.attempt, frm.agent)
            for part in () if one is None or one.state is not sink.State.CANCELLING else one.parts.values():
                part.quiet = True
            yield from original(self, frm, message)

        return acknowledged

    wrap(patch, sink.Sink, "cancel_ack", make)


@mutation
def received_when_one_part_is(patch):
    """A push is complete when what one source rank writes is."""

    def make(original):
        def check(self, one):
            kept = one.parts
            for rank, part in kept.items():
                one.parts = {rank: part}
                yield from original(self, one)
            one.parts = kept

        return check

    wrap(patch, sink.Sink, "_check", make)


@mutation
def a_pull_ends_with_its_first_read(patch):
    """A cancelled pull closes although its read from another rank is in flight."""

    def make(original):
        def read(self, transfer):
            one, part = original(self, transfer)
            for other in one.parts.values():
                other.reading = None
            return one, part

        return read

    wrap(patch, sink.Sink, "_read", make)


@mutation
def one_ranks_word_frees_lost_blocks(patch):
    """Blocks that a preemption took away are given to others when the first rank reads them no more."""

    def make(original):
        def quiet(self, heard):
            original(self, dict.fromkeys(heard, self._ranks))

        return quiet

    wrap(patch, Pins, "quiet", make)


# --- connections before the first handoff ------------------------------------------------------------------------------------


@mutation
def old_answers_count(patch):
    """A peer that answered some time ago is called."""
    patch.setattr(approaches, "FRESH", math.inf)


@mutation
def any_end_ends_a_promise(patch):
    """The end of an earlier question ends what has been promised since."""

    def make(original):
        def heard(self, frm, message, now):
            if message.what == "done":
                self._promised.pop(frm, None)
            original(self, frm, message, now)

        return heard

    wrap(patch, approaches.Approaches, "heard", make)


@mutation
def promises_end_with_their_sessions(patch):
    """Who has lost a session makes no progress for a peer that has not noticed, and calls."""
    wrap(
        patch,
        approaches.Approaches,
        "lost",
        lambda original: lambda self, peer: (original(self, peer), self._promised.pop(peer, None))[0],
    )


# --- conversations -----------------------------------------------------------------------------------------------------------


@mutation
def retained_blocks_are_not_pinned(patch):
    """What a reader was granted is free, and anybody's."""

    class Unpinned(Pins):
        def pin(self, request_id, blocks):
            return True

        def let_go(self, request_id, tables=()):
            pass

    patch.setattr(retained, "Pins", Unpinned)


@mutation
def pins_end_before_their_leases(patch):
    """Blocks are let go of while a reader may still read under its lease."""

    def make(original):
        def grant(self, *args):
            held = list(original(self, *args))
            for one in held:
                lease = self._leases[one.handoff]
                lease.until = lease.last = lease.until - 2.0
                self._look_ahead()
            return held

        return grant

    wrap(patch, retained.Retained, "_grant", make)


@mutation
def ranks_grant_for_longer_than_the_pin(patch):
    """Decode's ranks do not know when the pin ends."""
    held = retained.SourceHeld
    patch.setattr(retained, "SourceHeld", lambda a, b, c, until, computing: held(a, b, c, until + 30.0, computing))


@mutation
def reads_have_no_margin(patch):
    """A read counts until the end of its lease by the reader's clock, however slow that is."""
    wrap(
        patch,
        sink.Sink,
        "__init__",
        lambda original: lambda self, *args, **more: original(self, *args, **{**more, "lease_margin": 0.0}),
    )


@mutation
def the_seed_forgets_the_salt(patch):
    """Equal tokens are taken for the same conversation."""
    patch.setattr(shaping, "seed", lambda *shapes: b"the same for all")


@mutation
def evicted_blocks_are_named(patch):
    """Decode names blocks by what it remembers, whether or not the cache still has them."""
    patch.setattr(
        retained.Retained,
        "_find",
        lambda self, ask, first: [one for one in self._pool.blocks if not one.ref_cnt and one.key is not None][
            : len(ask.chain) // DIGEST
        ],
    )


@mutation
def held_before_it_is_computed(patch):
    """What a step may still write is granted to readers at once."""

    def make(original):
        def begin(self, step, fence):
            original(self, step, fence)
            self._held = type(self._held)((Passed(), one) for _, one in self._held)

        return begin

    wrap(patch, steps.Steps, "begin", make)


BEHIND_ANOTHER = {
    "old_answers_count": (
        "only the answer to the last question counts, and the next question follows about a second later: one of some 1,700 deaf "
        "worlds meets what is left. tests/unit/transport/test_approaches.py attacks it directly"
    ),
    "source_keeps_its_generation": (
        "blocks that a preemption took away are pinned while a write reads them, so what was written before it is the "
        "request's own KV, and as good as what is computed anew"
    ),
    "acts_before_it_listens": (
        "blocks that a preemption took away are pinned while a write reads them, so what is sealed one round too early is the "
        "request's own KV all the same"
    ),
    "agents_have_no_incarnation": (
        "another life's memory has other keys, and attempts are numbered by the sink that registers them: what is written or "
        "said under the shared name fits nothing. Control messages name incarnations, which is looked for by itself"
    ),
    "nobody_is_replaced": (
        "a session with a life that is over hears nothing any more and is lost by silence, five seconds later; until then its "
        "handoffs wait, and the fence waits longer"
    ),
    "stale_means_nothing": (
        "a peer without a session answers nothing but Stale, which is no sign of life: its session is lost by silence"
    ),
    "said_again_begins_anew": (
        "an attempt that is over is remembered by itself, for as long as there is memory for it: then this stands behind that"
    ),
    "ended_handoffs_are_forgotten": (
        "what begins a handoff comes once, and an attempt that is over is remembered by itself. Without this memory, a decode leg that "
        "comes too late is told so after the leg's time-out instead of at once"
    ),
}
"""Guards that nothing depends on, since others stand behind them: these save time. Why no seed can find that they are gone."""

NOT_MET = {
    "reads_have_no_margin": (
        "what a slow clock adds to a lease that is renewed is a tenth of a second, in which a read must land; "
        "tests/unit/protocol/test_sink.py attacks it directly, and a world of its own finds it (test_reuse_chaos.py, ``Edge``)"
    ),
    "held_before_it_is_computed": (
        "a turn comes some time after the answer before it, when what that computed is long done; "
        "tests/unit/transport/test_steps.py attacks it directly"
    ),
    "a_grant_of_one_rank_is_a_lease_of_all": (
        "grants of an engine's ranks are asked for and given together, and one that is asleep frees nothing; "
        "tests/unit/protocol/test_parallel_sink.py attacks it directly"
    ),
    "ended_sessions_go_on_speaking": (
        "found in deaf worlds until lost sources were called back at once; tests/unit/transport/test_switchboard.py attacks it "
        "directly, and a kind of world that meets it again is wanted"
    ),
}
"""Guards that matter and that no kind of world looks for at present, with where they are attacked instead."""

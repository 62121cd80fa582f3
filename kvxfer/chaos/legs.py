"""Clients and their router: the two legs of each handoff, and what goes wrong with them.

Legs are lost, late, doubled; ids are used again, by chance or by a client that tries again; addresses are wrong; the two legs'
prompts differ. Clients go away.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.chaos import concern
from kvxfer.chaos.aims import Aim, Target
from kvxfer.chaos.decode import DecodeEngine
from kvxfer.chaos.engine import Request
from kvxfer.chaos.prefill import PrefillEngine
from kvxfer.chaos.turns import CONTINUED, LAST, Prompt, another_turn, fresh
from kvxfer.protocol.ids import HandoffId
from kvxfer.transport.commands import LESS, EngineAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.chaos.simulation import Simulation, Slot

LONGEST = 36
"""Tokens of the longest prompt."""
PORT = 5600
"""Where every engine's control channel listens."""
ANOTHER = 512
"""Between a handoff's tags and those of another prompt that bears its name."""
KNOWS = 0.8
"""Probability of a request that is sent to engines that live, if there are any."""
OVER = {"prefill": 0.2, "decode": 0.4}
"""Probability of a late leg that comes when the other's patience has ended."""
LATEST = 9.0
"""Seconds after which a late leg has come."""
AIMED = 0.8
"""Probability of a late leg that comes when its handoff is in a certain state."""
LATE_TOO = 0.7
"""Probability of a leg with a wrong address or prompt that is late as well."""
MUCH = 2
"""By how many tokens at least two legs' prompts differ that must not be moved: those that differ by one last token are."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What both legs are about. ``tag`` names its prompt."""

    id: HandoffId
    tag: int
    tokens: int
    prompt: Prompt


def digest(tag: int, tokens: int) -> bytes:
    """Digest a prompt, as an engine does."""
    return hashlib.blake2b(f"{tag} {tokens}".encode(), digest_size=16).digest()


class Legs:
    """What clients send. ``to_come`` is how many legs are under way."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.to_come = 0
        self.told = sim.world.random.random() < 0.8  # noqa: PLR2004 - engines can tell a digest of their prompts
        self.answered: deque[tuple[Handoff, str]] = deque(maxlen=LAST)
        """In a world with conversations: what was answered of late, and by which host."""
        self._handoffs: list[Handoff] = []
        self._pairs: dict[str, tuple[str, str]] = {}  # transfer -> hosts of its last legs
        self._sinks: dict[str, set[str]] = {}
        self._again: set[str] = set()  # ids that were used more than once
        self._numbers = 0

    def sinks_of(self, handoff: HandoffId) -> set[str]:
        """Return the hosts that decode legs of a handoff have been sent to."""
        return self._sinks[handoff.transfer]

    # --- what is sent -----------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A client sends a request."""
        draw = self.sim.world.random
        if self._handoffs and self.sim.trouble.draws("repeated_id"):
            self.repeat(draw.choice(self._handoffs[-8:]))
            return
        self.sim.result.handoffs += 1
        number = len(self._handoffs) + 1
        name, tokens = HandoffId(f"h{number}", draw.choice((0, 0, 1))), draw.randint(1, LONGEST - 6)
        prompt = fresh(number << 10)
        if self.answered and draw.random() < CONTINUED:
            prompt, tokens = another_turn(self.sim.world, *draw.choice(self.answered), number << 10, LONGEST - 6)
        handoff = Handoff(name, number << 10, tokens, prompt)
        self._handoffs.append(handoff)
        self._sinks[handoff.id.transfer] = set()
        self._send(handoff, *self._anybody())

    def repeat(self, handoff: Handoff) -> None:
        """A client uses an id again."""
        self.sim.result.handoffs += 1
        self.sim.struck("repeated_id", self._states(handoff))
        source, sink = self._anybody()
        if self.sim.world.chance(self.sim.profile.same_pair):
            hosts = self._pairs[handoff.id.transfer]
            source, sink = (self.sim.slot(host) for host in hosts)
        self._again.add(handoff.id.transfer)
        self._send(handoff, source, sink)

    def retry(self, sink: Slot, handoff: Handoff) -> None:
        """A client tries again, with the same id, what has failed or what it has just given up."""
        if not self.sim.trouble.draws("retry_same_id"):
            return
        self.sim.result.handoffs += 1
        self.sim.struck("retry_same_id", self._states(handoff))
        self._again.add(handoff.id.transfer)
        source, _ = self._anybody()
        if self.sim.world.chance(self.sim.profile.same_pair):
            source = self.sim.slot(self._pairs[handoff.id.transfer][0])
        self._send(handoff, source, sink)

    def double(self, fault: str, handoff: HandoffId, source: Slot, sink: Slot) -> None:
        """A leg comes twice; here is the second."""
        (one,) = [h for h in self._handoffs if h.id == handoff]
        self._again.add(handoff.transfer)
        self.to_come += 1
        self._leg(fault, one, source, sink)

    def handoff(self, handoff: HandoffId) -> Handoff:
        """Return what a handoff is about."""
        return next(one for one in reversed(self._handoffs) if one.id == handoff)

    def _anybody(self) -> tuple[Slot, Slot]:
        """Pick two engines; a router mostly knows who lives."""
        draw, slots = self.sim.world.random, self.sim.slots
        if self.sim.trouble.over or draw.random() < KNOWS:
            slots = self.sim.living()
        sources, sinks = [s for s in slots if s.prefills], [s for s in slots if not s.prefills]
        return draw.choice(sources or self.sim.prefill_slots), draw.choice(sinks or self.sim.decode_slots)

    def _send(self, handoff: Handoff, source: Slot, sink: Slot) -> None:
        self._pairs[handoff.id.transfer] = source.host, sink.host
        self._sinks[handoff.id.transfer].add(sink.host)
        for side in ("prefill", "decode"):
            self._send_leg(side, handoff, source, sink)
            if self.sim.trouble.draws(f"double_{side}_leg"):
                self._again.add(handoff.id.transfer)
                self._send_leg(side, handoff, source, sink, fault=f"double_{side}_leg")

    def _send_leg(self, side: str, handoff: Handoff, source: Slot, sink: Slot, fault: str = "") -> None:
        world, trouble = self.sim.world, self.sim.trouble
        delay = world.random.uniform(0.0, 0.05)
        wrong = [] if side == "prefill" else [kind for kind in (*ADDRESSES, *PROMPTS) if trouble.draws(kind)]
        if not fault and trouble.draws(f"no_{side}_leg"):
            act: Callable[[], None] = lambda: self._count(f"no_{side}_leg", handoff, source, sink)  # noqa: E731
            self._send_late(f"no_{side}_leg", handoff, act)
            return
        self.to_come += 1
        if trouble.draws("late_leg") or (wrong and world.random.random() < LATE_TOO):
            fault = fault or f"late_{side}_leg"
            self._send_late(f"late_{side}_leg", handoff, lambda: self._leg(fault, handoff, source, sink, wrong))
        else:
            world.after(delay, self._leg, fault or f"{side}_leg", handoff, source, sink, wrong)

    def _send_late(self, fault: str, handoff: Handoff, act: Callable[[], None]) -> None:
        """Let a leg come, or not come, when its handoff is in a certain state, or else some time."""
        world, trouble = self.sim.world, self.sim.trouble
        done: list[bool] = []

        def once(_target: Target | None) -> bool:
            if not done:
                done.append(True)
                act()
            return True

        if world.random.random() < OVER[fault.split("_")[1]]:
            world.after(world.random.uniform(LATEST - 2.0, LATEST), once, None)
            return
        world.after(world.random.uniform(0.3, LATEST), once, None)
        if world.random.random() < AIMED:
            state = trouble.state_for(fault)
            trouble.aims.add(Aim(state, once, handoff=handoff.id))
            if state in ("sink/cancelling", "source/served"):
                trouble.aims.add(Aim("sink/registered", trouble.strikes.abort_decode, handoff=handoff.id))
            elif state == "sink/fencing":
                trouble.aims.add(Aim("sink/registered", trouble.strikes.cut, handoff=handoff.id))

    # --- what comes -------------------------------------------------------------------------------------------------

    def _leg(self, fault: str, handoff: Handoff, source: Slot, sink: Slot, wrong: Sequence[str] = ()) -> None:
        self.to_come -= 1
        prefill = "prefill" in fault
        slot = source if prefill else sink
        if not slot.process.alive:
            return
        if fault not in ("prefill_leg", "decode_leg"):
            self._count(fault, handoff, source, sink)
        request = Request(self._next(prefill), handoff, slot.process.clock(), tokens=handoff.tokens, tag=handoff.tag)
        request.said = handoff.prompt
        if prefill:
            self._name_the_turn_before(request)
        else:
            self._mislead(request, source, sink, wrong)
            request.grow = self.sim.world.random.randint(1, 5)
        if self.told:
            request.prompt = tuple(digest(request.tag, request.tokens - less) for less in LESS)
        what = f"{request.id}: {slot.host} has {request.tokens} tokens to " + (
            "prefill" if prefill else f"decode from {request.address}"
        )
        self.sim.world.note(slot.host, handoff.id.transfer, what)
        slot.process.awake(lambda: self._admit(slot, request))

    def _name_the_turn_before(self, request: Request) -> None:
        """Tell a prefill leg where its conversation was decoded; or somewhere else, or where nobody lives."""
        before = request.handoff.prompt.before
        if not before:
            return
        slot = self.sim.slot(before)
        port, name = PORT, self.sim.world.random.choice((slot.engine_id, ""))
        if self.sim.trouble.draws("wrong_holder"):
            self.sim.struck("wrong_holder")
            slot = self.sim.world.random.choice(self.sim.decode_slots)
            port, name = self.sim.world.random.choice(((PORT, ""), (PORT, "somebody"), (7, "")))
        request.before = EngineAddress(slot.host, port, name, front=True)

    def _mislead(self, request: Request, source: Slot, sink: Slot, wrong: Sequence[str]) -> None:
        """Give a decode leg its source's address and its prompt, right or wrong."""
        draw = self.sim.world.random
        request.address = EngineAddress(source.host, PORT, source.engine_id)
        for fault in wrong:
            if fault == "wrong_engine":
                request.address = EngineAddress(source.host, PORT, "somebody")
            elif fault == "wrong_port":
                request.address = EngineAddress(source.host, 7, source.engine_id)
            elif fault == "longer_prompt":
                request.tokens += draw.randint(MUCH, 5)
            elif fault == "shorter_prompt" and request.tokens > MUCH:
                request.tokens = max(1, request.tokens - draw.randint(MUCH, 5))
            elif fault == "other_prompt" and self.told:
                request.tag = request.handoff.tag + ANOTHER
                request.said = fresh(request.tag)
            else:
                continue
            self._count(fault, request.handoff, source, sink)
        longer = request.handoff.tokens - (request.tokens - 1)  # than what decode wants of it
        same = request.tag == request.handoff.tag and longer in LESS
        # Where digests are not told, a part of a longer prompt is as good as a prompt.
        request.misled = not same and (self.told or longer < 0)

    def _admit(self, slot: Slot, request: Request) -> None:
        engine = slot.engine
        engine.add(request)
        if self.sim.trouble.draws("abort_prefill" if slot.prefills else "abort_decode"):
            delay = self.sim.world.random.choice((0.0, 0.01, 0.1, 1.0, 6.0)) * self.sim.world.random.random()
            self.sim.world.after(delay, engine.process.awake, lambda: self.abort(slot, engine, request))

    def abort(self, slot: Slot, engine: PrefillEngine | DecodeEngine, request: Request) -> None:
        """The client goes away, unless all is over."""
        if request.id not in engine.requests or slot.engine is not engine:
            return
        handoff = request.handoff
        if isinstance(engine, PrefillEngine):
            if request.state in ("waiting", "running"):
                self.sim.struck("abort_prefill", concern.of_prefill(self.sim, slot, request))
                self._count_reader(slot, request)
            elif request.state == "loading" and not request.aborted:
                self._count_reader(slot, request)
        elif not request.aborted:
            source = "" if request.address is None else request.address.host
            self.sim.struck("abort_decode", concern.of_handoff(self.sim, handoff.id, source, slot.host))
        self.sim.world.note(engine.name, handoff.id.transfer, f"aborts {request.id}, which is {request.state}")
        engine.abort(request)
        if isinstance(engine, DecodeEngine):
            self.retry(slot, handoff)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _count_reader(self, slot: Slot, request: Request) -> None:
        """Count that a request goes away for which something is asked or read."""
        if states := concern.of_reader(self.sim, slot, request.id):
            self.sim.struck("abort_reader", states)

    def _count(self, fault: str, handoff: Handoff, source: Slot, sink: Slot) -> None:
        """Count a fault of a leg. What is said of a handoff's only leg is not said of an id that is used again."""
        own = handoff.id.transfer not in self._again or fault.startswith("double")
        states = concern.of_handoff(self.sim, handoff.id, source.host, sink.host) if own else set()
        self.sim.struck(fault, states)

    def _states(self, handoff: Handoff) -> set[str]:
        return concern.of_handoff(self.sim, handoff.id, *self._pairs[handoff.id.transfer])

    def _next(self, prefill: bool) -> str:
        self._numbers += 1
        return f"{'p' if prefill else 'd'}{self._numbers}"


ADDRESSES = ("wrong_engine", "wrong_port")
PROMPTS = ("longer_prompt", "shorter_prompt", "other_prompt")

"""Which decode engine: the one that will produce this request's first token soonest, and has room for it.

An engine without room (its reclaimable KV, less what this router has sent there that waits, is smaller than what this
request needs) comes after every engine with room. Among the others the cost, in tokens, is: what waits there for KV, what of
this prompt the engine does not hold already, ``STEP`` for each stream that runs there (each makes every step a little longer),
and the engine's own measured delay from prefill's end to the first token. ``docs/policies/decode.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.router.policies.asked import Asked, Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.engine import Engine

STEP = 16
"""Tokens of transfer that weigh as much as one more stream in the engine's batch."""
DELAY = 20_000.0
"""Tokens a second by which a measured delay is weighed against tokens: about what one rail of EFA moves of an 8B model's KV."""


def room(engine: Engine) -> int | None:
    """KV tokens that the engine could still give to a new request, as far as is known; None: it does not say."""
    if engine.says.reclaimable is None:
        return None
    return engine.says.reclaimable - engine.load.waiting_tokens


def has_room(engine: Engine, asked: Asked) -> bool:
    """Whether the request's KV fits without taking anybody's."""
    left = room(engine)
    return left is None or left >= asked.missing(engine)


class SoonestToken:
    """Least to do before this request's first token, among those that have room."""

    def __init__(self) -> None:
        self._turns = Turns()

    def pick(self, engines: Sequence[Engine], asked: Asked) -> Engine:
        """Return the engine of least cost."""
        return self._turns.take(
            min(engines, key=lambda one: (not has_room(one, asked), cost(one, asked), self._turns.of(one)))
        )


def cost(engine: Engine, asked: Asked) -> float:
    """What ``SoonestToken`` compares, in tokens."""
    load = engine.load
    waits = load.waiting_tokens + asked.missing(engine) + STEP * load.running
    return waits + DELAY * round(load.first_token_delay, 2)

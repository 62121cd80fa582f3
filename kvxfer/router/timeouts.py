"""Which time-outs must be shorter than which, between a router and its engines: one table, held against what engines tell.

Two processes that wait for the same thing must not give up in the wrong order: whoever gives up first has to be the one that can
still do something about it. An engine tells its ``leg_timeout`` in ``kvxfer_info``. What does not fit is said in the log and
in ``/status``, with what to set; requests are served meanwhile. Where ``--queue-timeout`` is not given it is made to fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.router.settings import Mode, Role, RouterSettings, When, flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvxfer.router.identity import Identity

EARLY_QUEUE = 60.0
"""Seconds that a request waits for room on decode, where nobody holds anything for it meanwhile."""
_SHARE = 2 / 3
_USUAL_LEG_TIMEOUT = 30.0
"""kvxfer's default, for an engine that does not tell its own."""


def may_choose_late(settings: RouterSettings) -> bool:
    """Whether a request can wait for room on decode after its prefill, which then holds blocks for it."""
    return settings.mode is Mode.PULL or settings.decode_when is not When.EARLY


def queue_timeout(settings: RouterSettings, prefills: Iterable[Identity]) -> float:
    """How long a request may wait for room on decode: as set, or what fits the prefill engines that could be holding for it."""
    if settings.queue_timeout is not None:
        return settings.queue_timeout
    if not may_choose_late(settings):
        return EARLY_QUEUE
    told = [_USUAL_LEG_TIMEOUT if one.leg_timeout is None else one.leg_timeout for one in prefills]
    return min(EARLY_QUEUE, _SHARE * min(told, default=_USUAL_LEG_TIMEOUT))


def _always(_settings: RouterSettings, _role: Role) -> bool:
    return True


def _holds_for_the_queue(settings: RouterSettings, role: Role) -> bool:
    return role is Role.PREFILL and may_choose_late(settings)


@dataclass(frozen=True, slots=True)
class Order:
    """A time-out of the router that must be shorter, or longer, than an engine's ``leg_timeout``."""

    name: str
    shorter: bool
    why: str
    matters: Callable[[RouterSettings, Role], bool] = _always

    def advice(self, settings: RouterSettings, role: Role, leg_timeout: float) -> str | None:
        """What is wrong and what to set; None where it fits."""
        value = getattr(settings, self.name)
        if value is None or not self.matters(settings, role):
            return None
        if value < leg_timeout if self.shorter else value > leg_timeout:
            return None
        name = flag(self.name)
        wrong, right = ("not below", "below") if self.shorter else ("not above", "above")
        return (
            f"the router's {name} {value:g} s is {wrong} its leg_timeout {leg_timeout:g} s: {self.why}. Set {name} {right} "
            f"{leg_timeout:g}, or change leg_timeout in the engines' kv_connector_extra_config"
        )


ORDERS = (
    Order(
        "queue_timeout",
        shorter=True,
        why="prefill gives up the blocks of a request that still waits for room on decode",
        matters=_holds_for_the_queue,
    ),
    Order(
        "connect_timeout",
        shorter=True,
        why="an engine gives up its leg while the router still tries to reach the other one's engine",
    ),
    Order(
        "request_timeout",
        shorter=False,
        why="the router ends a leg before the engine can say that the other leg did not come",
    ),
)


def advice(settings: RouterSettings, role: Role, identities: Iterable[Identity]) -> list[str]:
    """Everything that does not fit an engine, each with what to set."""
    told = {one.leg_timeout for one in identities if one.leg_timeout is not None}
    found = (order.advice(settings, role, seconds) for seconds in sorted(told) for order in ORDERS)
    return [one for one in found if one is not None]

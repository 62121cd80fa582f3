"""One engine as this router sees it: who it is, whether it may be used, and how much it has to do.

What is counted here is this router's own share, exact and at once; what the engine itself says (``Told``) is everybody's, and as
old as the last check. Policies read both.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.addresses import shown_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yarl import URL

    from kvxfer.router.identity import Identity
    from kvxfer.router.openai import Json
    from kvxfer.router.settings import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine's metrics said at the last check. None: it does not say."""

    running: int = 0
    waiting: int = 0
    capacity: int | None = None
    """KV tokens that the engine's cache holds."""
    started: str = ""
    """When its process started, as its metrics have it; empty: they do not say."""
    reclaimable: int | None = None
    """KV tokens that a new request could be given: free, or evictable at once."""
    received: int = 0
    not_received: int = 0
    """Of a decode engine, since it started: handoffs that ended well, and that failed."""


@dataclass(slots=True)
class Load:
    """What this router has given to an engine and not got back. All counts are of now, tokens are estimated."""

    requests: int = 0
    queued_tokens: int = 0
    """Prompt tokens of prefill legs that have not been answered."""
    waiting_tokens: int = 0
    """Prompt tokens of decode legs that have not produced a token: their blocks are taken and do nothing."""
    running_tokens: int = 0
    """Prompt tokens of decode legs that have."""
    running: int = 0
    first_token_delay: float = 0.0
    """Seconds from prefill's end to decode's first token, as measured of late (a moving average)."""


class Engine:
    """One vLLM server. ``reason`` says why it is not healthy."""

    def __init__(self, role: Role, url: URL) -> None:
        self.role = role
        self.url = url
        self.name = str(url).rstrip("/")
        """The base URL as the operator wrote it."""
        self.identities: list[Identity] = []
        self.reason: str | None = "not checked yet"
        self.draining = False
        self.probed: Identity | None = None
        self.told: frozenset[Identity] = frozenset()
        """Of a decode engine: the prefill engines to which it has been introduced."""
        self.untold = ""
        """Why it could not be, as it was said last."""
        self.news = asyncio.Event()
        """Of a decode engine: somebody has passed a check since it was introduced to others."""
        self.doubt = asyncio.Event()
        """Something went wrong with it: it is to be checked now."""
        self.load = Load()
        self.says = Told()
        self.advice: list[str] = []
        """What does not fit: this router's settings to the engine's, or the engine to its peers; and what to do."""
        self.failing = 0
        """Handoffs that have failed here since one ended well."""
        self.starts = 0
        """How often it was met anew: under another identity, or as a process that started later."""

    @property
    def healthy(self) -> bool:
        """Whether the last check passed."""
        return self.reason is None

    @property
    def usable(self) -> bool:
        """Whether it may be given a new request."""
        return self.reason is None and not self.draining

    @property
    def start(self) -> str:
        """What tells this life of the engine from its others, in all routers that share a store: what it held before is gone."""
        return self.says.started or (self.identities[0].engine_id if self.identities else "")

    @property
    def identity(self) -> Identity:
        """The engine to name to its peers: the first, where one URL stands for several."""
        assert self.identities
        return self.identities[0]

    def describe(self) -> Json:
        """One entry of ``/health``."""
        known = self.identities[0] if self.identities else None
        return {
            "role": self.role.value,
            "url": self.name,
            "engine_id": known.engine_id if known else None,
            "healthy": self.healthy,
            "draining": self.draining,
            "reason": self.reason,
        }

    def status(self) -> Json:
        """One entry of ``/status``: all that is known."""
        known = self.identities[0] if self.identities else None
        load, says = self.load, self.says
        return self.describe() | {
            "control": f"{known.host}:{known.port}" if known else None,
            "starts": self.starts,
            "requests": load.requests,
            "queued_tokens": load.queued_tokens,
            "waiting_tokens": load.waiting_tokens,
            "running_tokens": load.running_tokens,
            "first_token_delay_s": round(load.first_token_delay, 4),
            "advice": self.advice,
            "engine_running": says.running,
            "engine_waiting": says.waiting,
            "kv_capacity_tokens": says.capacity,
            "kv_reclaimable_tokens": says.reclaimable,
        }

    def failed(self, reason: str) -> None:
        """Take the engine out until a check passes. It may be another process by then, so it is probed anew."""
        if self.reason != reason:
            log.warning("%s engine %s is not used: %s", self.role.value, self.name, reason)
        self.reason = reason
        self.probed = None
        self.told = frozenset()

    def introduced(self, prefills: frozenset[Identity]) -> None:
        """Note that it knows them."""
        self.told, self.untold = prefills, ""

    def not_introduced(self, addresses: Sequence[str], reason: str) -> None:
        """Note that it could not be told of them; it is tried again after the next check, and said once."""
        if self.untold != reason:
            log.warning(
                "decode engine %s could not be introduced to %s, its first request will connect them: %s",
                self.name, ", ".join(addresses), reason,
            )  # fmt: skip
        self.untold = reason

    def advised(self, advice: list[str]) -> None:
        """Note what does not fit it, and say it once."""
        for one in advice:
            if one not in self.advice:
                log.warning("%s engine %s: %s", self.role.value, self.name, one)
        self.advice = advice

    def handoffs_fail(self, says: Told, identity: Identity) -> str | None:
        """Say so if since the last check handoffs have failed here and none has ended well; until one has."""
        before, anew = self.says, self.says.started != says.started
        if anew:
            before, self.failing = Told(), 0
        if says.received > before.received:
            self.failing = 0
        else:
            self.failing += max(0, says.not_received - before.not_received)
        if not self.failing:
            return None
        where = shown_at(identity.host, identity.port)
        return (
            f"handoffs fail here, and none has ended well since: its log says why, and so does kvxfer records {where}"
        )

    def passed(self, identities: list[Identity], says: Told) -> None:
        """Put the engine into use under what it just told."""
        if self.identities != identities or self.says.started != says.started:
            self.starts += 1
        if not self.healthy or self.identities != identities:
            one = identities[0]
            log.info("%s engine %s is %s at %s port %d", self.role.value, self.name, one.engine_id, one.host, one.port)
        self.identities = identities
        self.says = says
        self.reason = None

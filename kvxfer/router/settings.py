"""What a router is told at its start: the engines' HTTP addresses, the mode, and the limits.

Everything else about an engine (its id, its control address, its shape) is learned from the engine itself and so is not
a setting: a value that was typed once is wrong after the next restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from yarl import URL


class Mode(str, Enum):
    """Who moves the KV. It decides the order of the legs: together for push, prefill first for pull."""

    PUSH = "push"
    PULL = "pull"


class Role(str, Enum):
    """What an engine does for this router."""

    PREFILL = "prefill"
    DECODE = "decode"


class Choice(str, Enum):
    """How an engine is chosen among the usable ones."""

    LOAD = "load"
    ROUND_ROBIN = "round-robin"


class When(str, Enum):
    """When the decode engine is chosen; with pull it is always late."""

    EARLY = "early"
    LATE = "late"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """One router. Durations are seconds, sizes are bytes."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    engines_file: str | None = None
    """A JSON file with the keys ``prefill`` and ``decode``, lists of URLs; it is watched."""
    prefill_dns: str | None = None
    """A URL whose host is a name for all prefill engines (a headless service); it is resolved again and again."""
    decode_dns: str | None = None
    dns_interval: float = 5.0
    mode: Mode = Mode.PUSH
    host: str = "127.0.0.1"
    port: int = 8000
    request_timeout: float = 600.0
    connect_timeout: float = 5.0
    check_interval: float = 5.0
    check_timeout: float = 10.0
    max_body_size: int = 32 * 1024 * 1024
    max_singles: int = 1024
    """The most single requests (prompts × n) that one client request may become."""
    concurrent_singles: int = 64
    """How many of those are in flight at one time."""
    max_requests: int = 8192
    """The most client requests at one time; more are refused at once."""
    rate_limit: float = 0.0
    """Client requests a second of one API key, on average; 0: any number."""
    rate_burst: int = 32
    """How many of them may come at once."""
    retries: int = 3
    """How often a request of which nothing has been streamed is tried with other engines."""
    choice: Choice = Choice.LOAD
    decode_when: When = When.EARLY
    skip_prefill_below: int = 0
    """A prompt of which a decode engine lacks fewer tokens than this is not handed over; 0: every prompt is."""
    decode_share: float = 0.5
    """Of a decode engine's cache: how much handoffs may hold there that have not produced a token."""
    queue_limit: int = 1024
    """The most single requests that wait for room on a decode engine."""
    queue_timeout: float | None = None
    """How long they wait; None: what fits the engines' own time-outs (``timeouts``)."""
    conversations: int = 100_000
    """The most turns that are remembered in this process; 0: conversations are not followed."""
    conversation_ttl: float = 480.0
    redis: str | None = None
    """Where conversations are remembered for all replicas, ``redis://host:port/db``."""
    conversation_secret: str | None = None
    """Shared by the replicas, so that they find each other's conversations."""
    trusted_keys: tuple[str, ...] = ()
    """API keys of clients whose ``kv_transfer_params`` reach the engines."""
    admin_key: str | None = None
    stop_delay: float = 0.0
    """Between the first sign that this router stops (``/health`` says 503) and the moment at which it takes no more."""
    stop_timeout: float = 30.0
    """How long a stop waits for the requests in flight."""
    engine_ca: str | None = None
    """A file of certificate authorities for engines with ``https`` URLs; the system's by default."""
    engine_api_key: str | None = None
    """For the router's own probe and model list; a client's requests carry the client's own Authorization."""

    def __post_init__(self) -> None:
        others = self.engines_file or self.admin_key
        for role, urls, name in (
            (Role.PREFILL, self.prefill, self.prefill_dns),
            (Role.DECODE, self.decode, self.decode_dns),
        ):
            if not (urls or name or others):
                raise ConfigError(
                    f"no {role.value} engine: give at least one --{role.value} URL, or --{role.value}-dns, --engines-file or "
                    "an admin key"
                )
            normal = [str(engine_url(url)) for url in urls]
            if len(set(normal)) != len(normal):
                raise ConfigError(f"a {role.value} engine is given twice: {', '.join(normal)}")
            if name is not None:
                engine_url(name)
        self._check_numbers()
        self._check_secrets()

    def _check_numbers(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{flag(field.name)} is {value}; it must be a finite number")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{flag(name)} is {value}; it must be more than 0 seconds")
        for name, least in _AT_LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.decode_share <= 1:
            raise ConfigError(f"--decode-share is {self.decode_share}; it must be more than 0 and at most 1")
        if self.port > _LAST_PORT:
            raise ConfigError(f"--port is {self.port}; it must be at most {_LAST_PORT}")

    def _check_secrets(self) -> None:
        keys = {"KVXFER_TRUSTED_KEYS": self.trusted_keys, "KVXFER_ADMIN_KEY": (self.admin_key,)}
        for name, some in keys.items():
            if any(key is not None and not key.strip() for key in some):
                raise ConfigError(
                    f"{name} has an empty key, which whoever sends none would have; leave it out, or set one"
                )
        if self.redis is None:
            return
        if not self.conversation_secret:
            raise ConfigError(
                "--redis needs KVXFER_CONVERSATION_SECRET, the same for all replicas: what they remember is found under "
                "digests that are keyed with it"
            )
        if not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError("--redis must be a URL like redis://10.0.0.9:6379/0 (or rediss://, unix://)")


def flag(field: str) -> str:
    """A setting as an operator writes it."""
    return "--" + field.replace("_", "-")


_LAST_PORT = 65535
_POSITIVE = (
    "request_timeout",
    "connect_timeout",
    "check_interval",
    "check_timeout",
    "dns_interval",
    "queue_timeout",
    "conversation_ttl",
)
_AT_LEAST = {
    "port": 0,
    "max_body_size": 1,
    "max_singles": 1,
    "concurrent_singles": 1,
    "max_requests": 1,
    "rate_limit": 0,
    "rate_burst": 1,
    "retries": 0,
    "skip_prefill_below": 0,
    "queue_limit": 0,
    "conversations": 0,
    "stop_delay": 0,
    "stop_timeout": 0,
}


def engine_url(text: str) -> URL:
    """Check an engine's base URL; a path in front of /v1 is kept, a trailing slash is not. IPv6 takes brackets."""
    from yarl import URL

    try:
        url = URL(text)
        host, port = url.host, url.port
    except ValueError as error:
        raise ConfigError(
            f"engine URL {text!r}: {error}; write it like http://10.0.0.1:8000 or http://[::1]:8000"
        ) from None
    if url.scheme not in {"http", "https"} or not host or port is None:
        raise ConfigError(f"engine URL {text!r}: write it like http://10.0.0.1:8000 or http://[::1]:8000")
    if url.user is not None or url.password is not None:
        raise ConfigError(
            f"an engine URL of host {url.host} has a user name or a password, which are not used: an engine's API key comes from "
            "the client, and for the router's own checks from KVXFER_ENGINE_API_KEY"
        )
    if url.query_string or url.fragment:
        raise ConfigError(f"engine URL {text!r} has a query or a fragment; only scheme, host, port and a path are used")
    return url.with_path(url.path.rstrip("/") or "/")

"""What a router is told at its start: the engines' HTTP addresses, the mode, and the limits.

Everything else about an engine (its id, its control address, its shape) is learned from the engine itself and so is not
a setting: a value that was typed once is wrong after the next restart.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """One router. Durations are seconds, sizes are bytes."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
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
    engine_api_key: str | None = None
    """For the router's own probe and model list; a client's requests carry the client's own Authorization."""

    def __post_init__(self) -> None:
        for role, urls in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            if not urls:
                raise ConfigError(f"no {role.value} engine: give at least one --{role.value} URL")
            normal = [str(engine_url(url)) for url in urls]
            if len(set(normal)) != len(normal):
                raise ConfigError(f"a {role.value} engine is given twice: {', '.join(normal)}")
        for name in ("request_timeout", "connect_timeout", "check_interval", "check_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than 0 seconds")
        for name in ("max_body_size", "max_singles", "concurrent_singles"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


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
    if url.query_string or url.fragment:
        raise ConfigError(f"engine URL {text!r} has a query or a fragment; only scheme, host, port and a path are used")
    return url.with_path(url.path.rstrip("/") or "/")

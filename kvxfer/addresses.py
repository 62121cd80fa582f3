"""Host names and addresses as people write them, peers advertise them and ZeroMQ wants them. IPv4 and IPv6.

A *wildcard* binds every address of a host and names none: told to a peer, it means "where you reached me". IPv6 literals
stand in brackets where a port follows. A zone id (``fe80::1%eth0``) means something on its own host only, so it is refused:
an engine's address is told to others.
"""

from __future__ import annotations

import ipaddress

MAX_HOST = 255
_PORTS = 1 << 16


class AddressError(ValueError):
    """Not an address that can be used; the text says what to write instead."""


def bare(host: str) -> str:
    """Take the brackets off an IPv6 literal."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_wildcard(host: str) -> bool:
    """Tell whether a host names every address, or none: "", "*", 0.0.0.0, :: however spelled."""
    host = bare(host)
    if host in ("", "*"):
        return True
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Tell whether a host is this host alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare(host)).is_loopback
    except ValueError:
        return False


def reachable(host: str, reached: str) -> str:
    """Where to connect to: ``host``, or where its engine was reached when that names no address."""
    return bare(reached if is_wildcard(host) else host)


def check_host(host: str) -> str:
    """Return a host without brackets. Raises AddressError for what cannot be told to anybody."""
    if "%" in host:
        raise AddressError(
            f"{host[:MAX_HOST]!r} has a zone id, which means something on its own host only: "
            "use a global or unique local IPv6 address"
        )
    if len(host) > MAX_HOST or not host.isprintable() or any(c in host for c in " /@?#"):
        raise AddressError(f"{host[:MAX_HOST]!r} is neither a host name nor an address")
    inner = bare(host)
    if ":" in inner or host != inner:
        try:
            ipaddress.IPv6Address(inner)
        except ValueError:
            raise AddressError(f"{host!r} is not an IPv6 address, and a host alone has no port") from None
    return inner


def endpoint(host: str, port: int | str) -> str:
    """Write an address as ZeroMQ and people do: tcp://host:port, tcp://[::1]:port."""
    host = bare(host)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def shown_at(host: str, port: int) -> str:
    """Write an address for people: host:port, [::1]:port."""
    return endpoint(host, port).removeprefix("tcp://")


def parse(text: str) -> tuple[str, int]:
    """Read HOST:PORT, [IPV6]:PORT. Raises AddressError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isdecimal() and port.isascii() and len(port) < 6 and 0 < int(port) < _PORTS):  # noqa: PLR2004
        raise AddressError(f"{text[:MAX_HOST]!r} is not HOST:PORT, with a port from 1 to 65535")
    if ":" in host and not host.startswith("["):
        raise AddressError(f"{text[:MAX_HOST]!r}: write an IPv6 address in brackets, [{host}]:{port}")
    return check_host(host), int(port)

"""Hosts and ports are read as people write them, and refused where they could not be told to a peer."""

from __future__ import annotations

import pytest

from kvxfer import addresses


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", "::0"])
def test_wildcards(host) -> None:
    assert addresses.is_wildcard(host)
    assert addresses.reachable(host, "[::1]") == "::1"


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "[::1]", "host", "0.0.0.0.example", "127.0.0.1"])
def test_what_is_none(host) -> None:
    assert not addresses.is_wildcard(host)
    assert addresses.reachable(host, "reached") == addresses.bare(host)


@pytest.mark.parametrize(
    ("host", "is_one"), [("localhost", True), ("127.1.2.3", True), ("[::1]", True), ("::1", True), ("10.0.0.1", False), ("h", False)]
)  # fmt: skip
def test_loopback(host, is_one) -> None:
    assert addresses.is_loopback(host) is is_one


def test_literals_stand_in_brackets_where_a_port_follows() -> None:
    assert addresses.endpoint("::1", 5) == addresses.endpoint("[::1]", 5) == "tcp://[::1]:5"
    assert addresses.endpoint("h", "*") == "tcp://h:*"
    assert addresses.shown_at("::1", 5) == "[::1]:5"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("[::1]:5600", ("::1", 5600)),
        ("host.example:1", ("host.example", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_addresses_are_read(text, read) -> None:
    assert addresses.parse(text) == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("::1:5600", r"write an IPv6 address in brackets, \[::1\]:5600"),
        ("[fe80::1%eth0]:5600", "has a zone id"),
        ("[host]:5600", "is not an IPv6 address"),
        ("[::1:5600", "write an IPv6|is not an IPv6"),
        ("[1::2::3]:5600", "is not an IPv6"),
        ("host", "is not HOST:PORT"),
        ("host:0", "is not HOST:PORT"),
        ("host:65536", "is not HOST:PORT"),
        ("host:٣", "is not HOST:PORT"),
        ("host:" + "9" * 5000, "is not HOST:PORT"),
        (":5600", "is not HOST:PORT"),
        ("a b:5600", "is neither a host name"),
        ("tcp://host:5600", "write an IPv6|is neither"),
        ("x" * 256 + ":1", "is neither a host name"),
        ("a\0b:1", "is neither a host name"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(text, said) -> None:
    with pytest.raises(addresses.AddressError, match=said) as raised:
        addresses.parse(text)
    assert len(str(raised.value)) < 1000

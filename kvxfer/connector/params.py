"""The ``kv_transfer_params`` of a request: upstream's keys, so that proxies made for its connectors drive ours unchanged.

They come from outside, so nothing in them is trusted to have any type. What is malformed is refused with a reason, and the
request then runs as if it had none: computed locally, correct, never failed.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from kvxfer.addresses import AddressError, check_host, is_wildcard
from kvxfer.addresses import parse as parse_address
from kvxfer.protocol.ids import MAX_ID_LENGTH, HandoffId, handoff_id
from kvxfer.transport.commands import EngineAddress

MAX_PEERS = 1024
"""Engines that one probe may name."""


@dataclass(frozen=True, slots=True)
class SourceParams:
    """Prefill leg: compute, and hand the KV over.

    A ``probe`` hands nothing over: it only wants the answer's address, and names engines to be connected, ``peers``.
    ``reuse`` is where the conversation was decoded before, so that its KV may still be there.
    """

    handoff: HandoffId
    probe: bool
    peers: tuple[EngineAddress, ...] = ()
    reuse: EngineAddress | None = None


@dataclass(frozen=True, slots=True)
class PlainParams:
    """No leg of a handoff; only that the conversation was decoded at ``reuse`` before."""

    reuse: EngineAddress


@dataclass(frozen=True, slots=True)
class SinkParams:
    """Decode leg: somebody else computes the prompt's KV, at ``source``."""

    handoff: HandoffId
    source: EngineAddress


class ParamsError(ValueError):
    """These kv_transfer_params cannot be used; the text says which key and why."""


def parse(request_id: str, params: object) -> SourceParams | SinkParams | PlainParams | None:
    """Read a request's params; None when it takes no part in a handoff. Raises ParamsError."""
    if params is None:
        return None
    if not isinstance(params, dict):
        raise ParamsError(f"kv_transfer_params is {_kind(params)}, not an object")
    prefill, decode = _flag(params, "do_remote_prefill"), _flag(params, "do_remote_decode")
    if not (prefill or decode):
        before = _address(params, "reuse")
        return None if before is None else PlainParams(structs.replace(before, front=True))
    if prefill and decode:
        raise ParamsError("do_remote_prefill and do_remote_decode are both true: a leg is one or the other")
    transfer = _text(params, "transfer_id")
    if decode:
        probe = _flag(params, "kvxfer_probe")
        handoff = _handoff(request_id, transfer, None)
        before = _address(params, "reuse")
        if before is None:  # upstream's way: the params of decode's answer to the turn before, handed to this one
            with contextlib.suppress(ParamsError):  # which no connector without this has ever read
                before = _address(params, "remote")
        before = None if before is None or probe else structs.replace(before, front=True)
        return SourceParams(handoff, probe, _peers(params) if probe else (), before)
    handoff = _handoff(request_id, transfer, _text(params, "remote_request_id"))
    source = _address(params, "remote")
    if source is None:
        raise ParamsError("remote_host is missing: the prefill engine's control_host")
    return SinkParams(handoff, source)


def _address(params: dict[Any, Any], which: str) -> EngineAddress | None:
    """Read an engine's control address, ``<which>_host``, ``_port`` and ``_engine_id``; None where no host is named."""
    host = _text(params, f"{which}_host")
    if not host:
        return None
    host = _checked(host, which)
    port = params.get(f"{which}_port")
    if isinstance(port, str) and port.isdecimal() and len(port) < 6:  # noqa: PLR2004 - Python refuses to read very long ones
        port = int(port)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:  # noqa: PLR2004
        raise ParamsError(f"{which}_port is {_kind(port)}: it must be that engine's control_port")
    return EngineAddress(host, port, _text(params, f"{which}_engine_id") or "")


@functools.lru_cache(maxsize=256)
def _checked(host: str, which: str) -> str:
    """Check an engine's host. An engine has few peers, and requests for them again and again."""
    try:
        host = check_host(host)
    except AddressError as error:
        raise ParamsError(f"{which}_host: {error}") from None
    if is_wildcard(host):
        raise ParamsError(f"{which}_host is {host}, which names no host: set advertise_host at that engine")
    return host


def _handoff(request_id: str, transfer: str | None, remote_request_id: str | None) -> HandoffId:
    """Name the handoff. A request's own id comes from a header, so it is trusted no more than the params."""
    handoff = handoff_id(request_id, transfer, remote_request_id)
    if not _sendable(handoff.transfer):
        raise ParamsError(
            f"the request id is {_kind(request_id)}: at most {MAX_ID_LENGTH} of Unicode can name a handoff"
        )
    return handoff


def _peers(params: dict[Any, Any]) -> tuple[EngineAddress, ...]:
    peers = params.get("kvxfer_peers")
    if peers is None:
        return ()
    if not isinstance(peers, list) or len(peers) > MAX_PEERS or not all(isinstance(peer, str) for peer in peers):
        raise ParamsError(f"kvxfer_peers is {_kind(peers)}, not a list of at most {MAX_PEERS:,} control addresses")
    try:
        return tuple(EngineAddress(*address, "") for address in map(parse_address, peers))
    except AddressError as error:
        raise ParamsError(f"kvxfer_peers: {error}") from None


def _flag(params: dict[Any, Any], key: str) -> bool:
    value = params.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ParamsError(f"{key} is {_kind(value)}, not true or false")


def _text(params: dict[Any, Any], key: str) -> str | None:
    value = params.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not _sendable(value):
        raise ParamsError(f"{key} is {_kind(value)}, not a string of at most {MAX_ID_LENGTH} Unicode characters")
    return value


def _sendable(text: str) -> bool:
    """Tell whether a message can carry a text: JSON can spell halves of surrogate pairs, UTF-8 cannot."""
    return len(text) <= MAX_ID_LENGTH and (text.isascii() or text.encode(errors="replace").decode() == text)


def _kind(value: object) -> str:
    """Describe a value without repeating what may be large or hostile."""
    if isinstance(value, str):
        return f"a string of {len(value):,} characters"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return "missing" if value is None else f"a {type(value).__name__}"

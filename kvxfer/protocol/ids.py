"""Who takes part in a handoff, and what it is called.

A handoff's name has to be the same on both engines although each gives the request an id of its own, so it is derived from
what a router can set on both legs: ``transfer_id`` in ``kv_transfer_params``, or the ``X-Request-Id`` header, from which vLLM
makes ``cmpl-<header>-<prompt index>-<8 hex>`` and ``chatcmpl-<header>-<8 hex>``, with ``<child>_`` in front when n > 1
(vLLM 0.29: v1/engine/parallel_sampling.py:94, v1/engine/input_processor.py:279). List prompts and n > 1 share one header and
one ``transfer_id``, hence the two indices.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

# Indices of up to nine digits: longer ones are part of somebody's own id, and would not fit into a message.
_INTERNAL = re.compile(
    r"(?:(?P<child>[0-9]{1,9})_)?"
    r"(?:(?P<kind>cmpl|chatcmpl)-)?"
    r"(?P<base>.+?)"
    r"(?:-(?P<random>[0-9a-f]{8}))?",
    re.DOTALL,
)
_PROMPT_INDEX = re.compile(r"(?P<base>.+)-(?P<prompt>[0-9]{1,9})", re.DOTALL)

MAX_ID_LENGTH = 512
"""Longest transfer or request id that is accepted, in characters."""


def shown(text: str, limit: int = 2000) -> str:
    r"""Make a peer's text fit for a log: nothing that could end a line or move a cursor, and no more than ``limit`` characters.

    >>> shown("a\\nWARNING all is well")
    'a\\\\nWARNING all is well'
    """
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)]


class HandoffId(msgspec.Struct, frozen=True, array_like=True):
    """Names one request's KV transfer on both engines."""

    transfer: Name
    prompt: Index = 0
    child: Index = 0

    def __str__(self) -> str:
        """``transfer/prompt/child``; the indices only where one of them is set. Fit for a log, whatever a client made it of."""
        if self.prompt or self.child:
            return f"{shown(self.transfer)}/{self.prompt}/{self.child}"
        return shown(self.transfer)


class RankId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One process of an engine's life: a worker rank, or the scheduler process (rank -1).

    ``incarnation`` is drawn anew at every start, so whatever an earlier life of the same engine sent is recognised as such.
    """

    engine: Name
    incarnation: Name
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 20)]

    @property
    def agent(self) -> str:
        """The name of this rank's NIXL agent: unique over restarts."""
        return f"{self.engine}/{self.incarnation}/{self.rank}"

    def __str__(self) -> str:
        """For messages that people read: the engine and the rank. Fit for a log: a stranger may call itself anything."""
        return f"{shown(self.engine)} rank {self.rank}" if self.rank >= 0 else shown(self.engine)


def split_request_id(request_id: str) -> tuple[str, int, int]:
    """Take vLLM's internal request id apart: ``(base, prompt index, child index)``.

    The base of an id that vLLM did not decorate is the id itself.

    >>> split_request_id("2_cmpl-4f1d-7-0a1b2c3d")
    ('4f1d', 7, 2)
    >>> split_request_id("chatcmpl-4f1d-0a1b2c3d")
    ('4f1d', 0, 0)
    """
    match = _INTERNAL.fullmatch(request_id)
    if match is None:
        return request_id, 0, 0
    base, prompt = match["base"], 0
    if match["kind"] == "cmpl" and (indexed := _PROMPT_INDEX.fullmatch(base)):
        base, prompt = indexed["base"], int(indexed["prompt"])
    return base, prompt, int(match["child"] or 0)


def handoff_id(request_id: str, transfer_id: str | None, remote_request_id: str | None = None) -> HandoffId:
    """Name the handoff of a request, from the engine's own id and what its ``kv_transfer_params`` say.

    ``transfer_id`` wins. Without it a sink uses the base of ``remote_request_id`` (upstream's pull: prefill's internal id;
    upstream's push: the router's uuid), a source the base of its own id: these are equal as both legs carry one header.
    A router's id may itself look decorated; it is recognised by being the header of this leg too, and then left whole.
    """
    base, prompt, child = split_request_id(request_id)
    if transfer_id:
        return HandoffId(transfer_id, prompt, child)
    if remote_request_id and remote_request_id != base:
        remote_base, remote_prompt, remote_child = split_request_id(remote_request_id)
        return HandoffId(remote_base, remote_prompt or prompt, remote_child or child)
    return HandoffId(base, prompt, child)

"""Kinds of outcomes: a reason without what differs from one handoff to the next."""

from __future__ import annotations

import functools
import re

_SUBSTITUTES = (
    (re.compile(r"\{.*\}"), "{…}"),
    (re.compile(r"[\"']?[pd]\d-engine'*[\"']?(/[0-9a-f]{8}/-?\d+)?"), "an engine"),
    (re.compile(r"[\"']?\bsomebody\b[\"']?"), "an engine"),
    (re.compile(r"\bat [pd]\d:\d+"), "at host:port"),
    (re.compile(r"\brequest [pd]\d+"), "request N"),
    (re.compile(r"\d[\d,.]*"), "N"),
)


@functools.lru_cache(4096)
def kind_of(reason: str) -> str:
    """Return a reason with its names, addresses and numbers taken out.

    >>> kind_of("p0-engine' rank 0 is gone: nothing heard from it for 5 s")
    'an engine rank N is gone: nothing heard from it for N s'
    """
    for pattern, substitute in _SUBSTITUTES:
        reason = pattern.sub(substitute, reason)
    return reason

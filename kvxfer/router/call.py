"""One client request on its way through the router: what policies, conversations, metrics and traces know of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.router.policies.asked import Asked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvxfer.router.conversations import Conversation
    from kvxfer.router.engine import Engine
    from kvxfer.router.openai import Json
    from kvxfer.router.policies.timing import Context


@dataclass(slots=True)
class Trace:
    """What became of one single request, as moments of this process's monotonic clock; None: it has not happened."""

    request_id: str
    trace_id: str = ""
    wall: float = field(default_factory=time.time)
    received: float = field(default_factory=time.monotonic)
    tokens: int = 0
    prefill: Engine | None = None
    decode: Engine | None = None
    late: bool = False
    context: Context = (False, 0)
    """What the timing policy wants to hear with the measured delay."""
    skipped: bool = False
    """No prefill leg: too little was missing on the decode engine."""
    reused: bool = False
    """Prefill was told of a decode engine that holds the conversation."""
    attempts: int = 0
    begun: float = 0.0
    """When the last attempt began."""
    prefill_sent: float | None = None
    prefill_done: float | None = None
    decode_sent: float | None = None
    first: float | None = None
    done: float | None = None
    pieces: int = 0
    transfer_id: str = ""
    outcome: str = "open"

    def describe(self) -> Json:
        """For ``/status``: seconds since the request came."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - self.received, 6)

        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "transfer_id": self.transfer_id,
            "received": round(self.wall, 3),
            "prompt_tokens_estimated": self.tokens,
            "prefill": self.prefill.name if self.prefill else None,
            "decode": self.decode.name if self.decode else None,
            "decode_chosen": "late" if self.late else "early",
            "prefill_skipped": self.skipped,
            "reuse": self.reused,
            "attempts": self.attempts,
            "outcome": self.outcome,
            "prefill_sent_s": since(self.prefill_sent),
            "prefill_done_s": since(self.prefill_done),
            "decode_sent_s": since(self.decode_sent),
            "first_token_s": since(self.first),
            "done_s": since(self.done),
        }


@dataclass(slots=True)
class Call:
    """What all single requests of one client request share."""

    headers: Mapping[str, str]
    """The client's, to be passed on to the engines."""
    asked: Asked = field(default_factory=Asked)
    conversation: Conversation | None = None
    client_params: Json = field(default_factory=dict)
    """``kv_transfer_params`` of a trusted client."""

"""A pair of engines driven as upstream's example proxies drive theirs, so that kvxfer's pairs and upstream's get equal requests.

*push*: both legs at once; *pull*: decode's leg carries what prefill's answer returned. In push the decode leg may also
follow prefill's answer (``follow``): then decode waits for the transfer alone, not for the computation before it.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from kvxfer.bench.client import Client
from kvxfer.bench.engines import MODEL_NAME
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.bench.client import Completion
    from kvxfer.bench.engines import Engine, Mode


TIMEOUT: Final = 30.0
"""Seconds until a leg is given up: long for one prompt at a time on any machine, short for a handoff that was lost."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """Both legs' answers."""

    prefill: Completion
    decode: Completion


@final
class Pair:
    """Both engines of a pair and a client of each; use it in an ``async with`` block."""

    def __init__(
        self, mode: Mode, prefill: Engine, decode: Engine, *, timeout: float = TIMEOUT, model: str = MODEL_NAME
    ) -> None:
        self.mode = mode
        self.prefill, self.decode = prefill, decode
        self.to_prefill = Client(prefill.url, timeout=timeout, model=model)
        self.to_decode = Client(decode.url, timeout=timeout, model=model)

    async def __aenter__(self) -> Pair:
        await self.to_prefill.__aenter__()
        await self.to_decode.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.to_decode.__aexit__(*exc)
        await self.to_prefill.__aexit__(*exc)

    async def hand_over(
        self, prompt: Sequence[int], tokens: int, *, follow: bool = False, name: str | None = None
    ) -> Handoff:
        """Prefill a prompt on one engine and decode ``tokens`` tokens on the other; ``name`` becomes the handoff's id."""
        name = name or uuid.uuid4().hex
        first = self._prefill_leg(name, prompt)
        if self.mode == "push" and not follow:
            second = self._decode_leg(name, prompt, tokens, push_params(name, self.prefill))
            legs = asyncio.create_task(first), asyncio.create_task(second)
            await asyncio.wait(legs)  # also where one fails: neither is left to itself
            return Handoff(*await asyncio.gather(*legs))
        prefill = await first
        params = push_params(name, self.prefill) if self.mode == "push" else prefill.kv_transfer_params
        if params is None:
            raise KvxferError(f"{self.prefill.spec.name} answered a prefill leg without kv_transfer_params")
        return Handoff(prefill, await self._decode_leg(name, prompt, tokens, params))

    async def compute(self, prompt: Sequence[int]) -> Completion:
        """Prefill a prompt that nobody else wants."""
        return await self.to_prefill.complete(prompt, 1, stream=False)

    async def _prefill_leg(self, name: str, prompt: Sequence[int]) -> Completion:
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "transfer_id": name,
        }
        return await self.to_prefill.complete(
            prompt, 1, stream=False, extra={"kv_transfer_params": params}, headers={"X-Request-Id": name}
        )

    async def _decode_leg(self, name: str, prompt: Sequence[int], tokens: int, params: Any) -> Completion:
        return await self.to_decode.complete(
            prompt, tokens, extra={"kv_transfer_params": dict(params)}, headers={"X-Request-Id": name}
        )


def push_params(name: str, prefill: Engine) -> dict[str, Any]:
    """Return the params of a decode leg that does not know prefill's answer."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.spec.name,
        "remote_request_id": name,
        "remote_host": prefill.control_host,
        "remote_port": prefill.control_port,
        "tp_size": prefill.spec.tensor_parallel,
        "pp_size": 1,
        "transfer_id": name,
    }

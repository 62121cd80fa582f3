"""What engines and a router that run tell of a point that was measured: the handoffs, and what first tokens waited for."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from kvxfer.addresses import reachable
from kvxfer.bench import results
from kvxfer.bench.counts import combine
from kvxfer.errors import TransportError
from kvxfer.transport.query import fetch_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvxfer.transport.records import HandoffRecord

_INFO = re.compile(r"^kvxfer_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class HandedOver:
    """The handoffs of kvxfer's engines since a moment, by their records: vLLM's warm-up and its first probe are among them."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = addresses
        self._before = {self._key(record) for record in self._records()}

    @classmethod
    async def at(cls, urls: Sequence[str]) -> HandedOver:
        """Find the control addresses behind these URLs; of an engine that is none of kvxfer's there is nothing to tell."""
        from kvxfer.bench.client import Client

        found = []
        for url in urls:
            async with Client(url) as client:
                found += [
                    (reachable(labels["host"], urlsplit(url).hostname or ""), int(labels["port"]))
                    for labels in (dict(_LABEL.findall(one)) for one in _INFO.findall(await client.metrics()))
                ]
        try:
            return await asyncio.to_thread(cls, found)
        except TransportError as error:
            typer.echo(f"the engines' handoff records are left out: {error}", err=True)
            return cls(())

    def since(self, patience: float = 5.0) -> dict[str, Any] | None:
        """Sum them up, waiting a little for what is still open; None where no engine is kvxfer's."""
        if not self._addresses:
            return None
        deadline = time.monotonic() + patience
        while True:
            new = [record for record in self._records() if self._key(record) not in self._before]
            if all(record.outcome != "open" for record in new) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        moved = combine(new)
        return {
            "recorded": len(moved),
            "outcomes": sorted({outcome for one in moved for outcome in one.outcomes}),
            "backends": sorted({backend for one in moved for backend in one.backends}),
            "bytes": sum(one.bytes for one in moved),
            "descriptors": results.spread([one.descriptors for one in moved], 0),
        }

    def _records(self) -> list[HandoffRecord]:
        return [record for host, port in self._addresses for record in fetch_records(host, port, last=1024).records]

    @staticmethod
    def _key(record: HandoffRecord) -> tuple[str, str, int, float | None]:
        return record.handoff, record.side, record.rank, record.times.expected


async def first_tokens(url: str, count: int) -> dict[str, dict[str, float]]:
    """Return what the first token waited for, stage by stage in ms, of the router's last ``count`` requests that ended well.

    Of the one with the median time to the first token, and of the one at the 99th percentile. The router keeps no more than
    its page shows. Nothing where the URL is of another proxy than kvxfer's.
    """
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
            session.get(f"{url}/status/waterfall") as answer,
        ):
            found = (await answer.json())["requests"] if answer.status == 200 else []  # noqa: PLR2004
    except (aiohttp.ClientError, ValueError, KeyError, TypeError, asyncio.TimeoutError):
        return {}
    return chosen([one for one in found if one.get("outcome") == "ok" and one.get("path")][-count:])


def chosen(requests: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Choose the two requests, and return their stages in ms."""
    by_time = sorted(requests, key=lambda one: float(one["first_token_s"]))
    if not by_time:
        return {}
    which = {"median": by_time[(len(by_time) - 1) // 2], "p99": by_time[round(0.99 * (len(by_time) - 1))]}
    return {
        name: {stage["stage"]: round(1e3 * stage["seconds"], 3) for stage in one["path"]} for name, one in which.items()
    }

"""Checks of engines and introductions between them: how what is known of an engine is kept true.

Guarantees: an engine is given work only if its last check passed, i.e. it answered ``/health``, told an identity in
``kvxfer_info`` that fits its role and the mode, and (prefill) answered one probe for that very identity with the same
values. Each decode engine is told of every healthy prefill engine, by the same kind of probe, so that the two are connected
before the first request; and again when either of them comes back. The first check runs at once; an engine that comes up
late, or again as another one, is used from its next check on. A check never blocks a request, and one slow engine never
delays the check of another.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from kvxfer.addresses import shown_at
from kvxfer.router.gauges import read_gauges
from kvxfer.router.identity import Identity, IdentityError, check_probe, check_role, parse_info
from kvxfer.router.openai import read_json
from kvxfer.router.settings import Role, RouterSettings
from kvxfer.router.timeouts import advice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.router.engine import Engine
    from kvxfer.router.openai import Json

log = logging.getLogger(__name__)


class Checker:
    """Asks engines who and how they are."""

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session

    async def check(self, engine: Engine) -> None:
        """Check one engine once; never raises for anything that an engine does."""
        try:
            await self._get(engine, "health")
            metrics = (await self._get(engine, "metrics")).decode(errors="replace")
            identities = parse_info(metrics, engine.url.host or "")
            check_role(identities, engine.role, self._settings.mode)
            if engine.role is Role.PREFILL and engine.probed != identities[0]:
                await self._probe(engine, identities[0])
                engine.probed = identities[0]
            says = read_gauges(metrics)
        except IdentityError as error:
            engine.failed(str(error))
        except asyncio.TimeoutError:
            engine.failed(f"it did not answer its check within {self._settings.check_timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            engine.failed(f"cannot be reached: {error or type(error).__name__}{_hint(error)}")
        except Exception as error:
            log.exception("the check of %s failed in an unforeseen way", engine.name)
            engine.failed(f"its check failed: {error!r}")
        else:
            failing = engine.handoffs_fail(says, identities[0])
            engine.passed(identities, says)
            engine.advised([*advice(self._settings, engine.role, identities), *filter(None, [failing])])

    async def introduce(self, decode: Engine, prefill: Iterable[Engine]) -> None:
        """Tell a healthy decode engine of the healthy prefill engines that are news to it; never raises for what it does."""
        prefills = frozenset(one for engine in prefill if engine.healthy for one in engine.identities)
        decode.told &= prefills  # whoever comes back is news again
        if not decode.healthy or prefills == decode.told:
            return
        addresses = sorted(shown_at(one.host, one.port) for one in prefills - decode.told)
        try:
            for identity in decode.identities:
                await self._send_probe(decode, identity, {"kvxfer_peers": addresses})
        except asyncio.TimeoutError:
            decode.not_introduced(addresses, f"no answer within {self._settings.check_timeout:g} s")
        except Exception as error:  # noqa: BLE001 - its requests will connect it, and its next check says what is wrong
            decode.not_introduced(addresses, str(error) or type(error).__name__)
        else:
            decode.introduced(prefills)

    async def _probe(self, engine: Engine, identity: Identity) -> None:
        check_probe(identity, await self._send_probe(engine, identity, {}), engine.url.host or "")

    async def _send_probe(self, engine: Engine, identity: Identity, more: Json) -> Any:
        """Send a request of one token that hands nothing over; return its answer."""
        try:
            model = read_json(await self._get(engine, "v1/models"))["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise IdentityError(f"its /v1/models names no model ({error!r})") from None
        request_id = f"probe-{uuid.uuid4()}"
        body = {
            "model": model,
            "prompt": [1],
            "max_tokens": 1,
            # kvxfer_probe: the connector answers with its coordinates and holds no block for a decode engine.
            "kv_transfer_params": {"do_remote_decode": True, "transfer_id": request_id, "kvxfer_probe": True, **more},
        }
        headers = {"X-Request-Id": request_id, "Content-Type": "application/json", **rank_header(identity)}
        raw = await self._fetch(engine, "POST", "v1/completions", headers, msgspec.json.encode(body))
        try:
            return read_json(raw)
        except ValueError:
            raise IdentityError("its answer to the probe is not JSON") from None

    async def _get(self, engine: Engine, path: str) -> bytes:
        return await self._fetch(engine, "GET", path, {})

    async def _fetch(
        self, engine: Engine, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> bytes:
        key = self._settings.engine_api_key
        if key is not None:
            headers = headers | {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=self._settings.check_timeout)
        async with self._session.request(
            method, engine.url / path, data=body, headers=headers, timeout=timeout
        ) as response:
            if response.status != 200:  # noqa: PLR2004
                said = (await response.content.read(300)).decode(errors="replace")
                hint = " (set the router's --engine-api-key)" if response.status in {401, 403} else ""
                raise IdentityError(f"{method} /{path} answered {response.status}{hint}: {said}")
            return await response.read()


def rank_header(identity: Identity) -> dict[str, str]:
    """Send a request to the very engine that was named, where one URL stands for several (vLLM's data parallelism)."""
    return {} if identity.dp_rank is None else {"X-data-parallel-rank": str(identity.dp_rank)}


def _hint(error: Exception) -> str:
    """Say what is likely where somebody listens who speaks no HTTP, as an engine's control channel does."""
    connected = isinstance(error, aiohttp.ClientError) and not isinstance(error, aiohttp.ClientConnectorError)
    return "; is it the port of vLLM's HTTP server (--port), and not of kvxfer's control channel?" if connected else ""

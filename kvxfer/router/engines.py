"""The engines of one router: what is known of each, kept true by a periodic check.

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
from kvxfer.router.identity import Identity, IdentityError, check_probe, check_role, parse_info
from kvxfer.router.openai import ApiError, Json
from kvxfer.router.picking import RoundRobin
from kvxfer.router.settings import Role, RouterSettings, engine_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from yarl import URL

    from kvxfer.router.picking import Picker
    from kvxfer.router.split import SingleRequest

log = logging.getLogger(__name__)


class Engine:
    """One vLLM server as this router sees it. ``reason`` says why it is not healthy."""

    def __init__(self, role: Role, url: URL) -> None:
        self.role = role
        self.url = url
        self.identities: list[Identity] = []
        self.reason: str | None = "not checked yet"
        self.probed: Identity | None = None
        self.told: frozenset[Identity] = frozenset()
        """Of a decode engine: the prefill engines to which it has been introduced."""
        self.untold = ""
        """Why it could not be, as it was said last."""
        self.news = asyncio.Event()
        """Of a decode engine: somebody has passed a check since it was introduced to others."""

    @property
    def healthy(self) -> bool:
        """Whether the last check passed."""
        return self.reason is None

    @property
    def name(self) -> str:
        """The base URL as the operator wrote it."""
        return str(self.url).rstrip("/")

    @property
    def identity(self) -> Identity:
        """The engine to name to its peers: the first, where one URL stands for several."""
        assert self.identities
        return self.identities[0]

    def describe(self) -> Json:
        """One entry of ``/health``."""
        known = self.identities[0] if self.identities else None
        return {
            "role": self.role.value,
            "url": self.name,
            "engine_id": known.engine_id if known else None,
            "healthy": self.healthy,
            "reason": self.reason,
        }

    def failed(self, reason: str) -> None:
        """Take the engine out until a check passes. It may be another process by then, so it is probed anew."""
        if self.reason != reason:
            log.warning("%s engine %s is not used: %s", self.role.value, self.name, reason)
        self.reason = reason
        self.probed = None
        self.told = frozenset()

    def introduced(self, prefills: frozenset[Identity]) -> None:
        """Note that it knows them."""
        self.told, self.untold = prefills, ""

    def not_introduced(self, addresses: Sequence[str], reason: str) -> None:
        """Note that it could not be told of them; it is tried again after the next check, and said once."""
        if self.untold != reason:
            log.warning(
                "decode engine %s could not be introduced to %s, its first request will connect them: %s",
                self.name, ", ".join(addresses), reason,
            )  # fmt: skip
        self.untold = reason

    def passed(self, identities: list[Identity]) -> None:
        """Put the engine into use under what it just told."""
        if not self.healthy or self.identities != identities:
            one = identities[0]
            log.info("%s engine %s is %s at %s port %d", self.role.value, self.name, one.engine_id, one.host, one.port)
        self.identities = identities
        self.reason = None


class Engines:
    """All engines, their checks, and the choice among the healthy ones."""

    def __init__(
        self,
        settings: RouterSettings,
        session: aiohttp.ClientSession,
        *,
        prefill: Picker | None = None,
        decode: Picker | None = None,
    ) -> None:
        self._settings = settings
        self._session = session
        self._pickers: dict[Role, Picker] = {Role.PREFILL: prefill or RoundRobin(), Role.DECODE: decode or RoundRobin()}
        self._tasks: list[asyncio.Task[None]] = []
        self.by_role = {
            Role.PREFILL: [Engine(Role.PREFILL, engine_url(url)) for url in settings.prefill],
            Role.DECODE: [Engine(Role.DECODE, engine_url(url)) for url in settings.decode],
        }

    def __iter__(self) -> Iterator[Engine]:
        for role in Role:
            yield from self.by_role[role]

    @property
    def ready(self) -> bool:
        """Whether a request could be served: one healthy engine of each role."""
        return all(any(engine.healthy for engine in self.by_role[role]) for role in Role)

    def pick(self, role: Role, single: SingleRequest | None = None) -> Engine:
        """Choose a healthy engine; raise ``ApiError`` 503 that says why there is none."""
        engines = self.by_role[role]
        if not any(engine.healthy for engine in engines):
            reasons = "; ".join(f"{engine.name}: {engine.reason}" for engine in engines)
            raise ApiError(503, f"no {role.value} engine is healthy ({reasons})")
        return self._pickers[role].pick(engines, single)

    def start(self) -> None:
        """Begin checking, now and then every ``check_interval``."""
        self._tasks = [asyncio.ensure_future(self._watch(engine)) for engine in self]
        self._tasks += [asyncio.ensure_future(self._introduce_all(engine)) for engine in self.by_role[Role.DECODE]]

    async def stop(self) -> None:
        """End the checks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, engine: Engine) -> None:
        while True:
            await self.check(engine)
            if engine.healthy:
                for decode in self.by_role[Role.DECODE]:
                    decode.news.set()
            await asyncio.sleep(self._settings.check_interval)

    async def _introduce_all(self, decode: Engine) -> None:
        while True:
            await decode.news.wait()
            decode.news.clear()
            await self.introduce(decode)

    async def check(self, engine: Engine) -> None:
        """Check one engine once; never raises for anything that an engine does."""
        try:
            await self._get(engine, "health")
            identities = parse_info(
                (await self._get(engine, "metrics")).decode(errors="replace"), engine.url.host or ""
            )
            check_role(identities, engine.role, self._settings.mode)
            if engine.role is Role.PREFILL and engine.probed != identities[0]:
                await self._probe(engine, identities[0])
                engine.probed = identities[0]
        except IdentityError as error:
            engine.failed(str(error))
        except asyncio.TimeoutError:
            engine.failed(f"it did not answer its check within {self._settings.check_timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            engine.failed(f"cannot be reached: {error or type(error).__name__}")
        except Exception as error:
            log.exception("the check of %s failed in an unforeseen way", engine.name)
            engine.failed(f"its check failed: {error!r}")
        else:
            engine.passed(identities)

    async def introduce(self, decode: Engine) -> None:
        """Tell a healthy decode engine of the healthy prefill engines that are news to it; never raises for what it does."""
        prefills = frozenset(
            one for engine in self.by_role[Role.PREFILL] if engine.healthy for one in engine.identities
        )
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
            model = msgspec.json.decode(await self._get(engine, "v1/models"))["data"][0]["id"]
        except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
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
            return msgspec.json.decode(raw)
        except msgspec.DecodeError:
            raise IdentityError("its answer to the probe is not JSON") from None

    async def models(self, engine: Engine, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """An engine's model list for a client, with the client's own headers: status and body as they came."""
        timeout = aiohttp.ClientTimeout(total=self._settings.check_timeout)
        try:
            async with self._session.get(engine.url / "v1/models", headers=headers, timeout=timeout) as response:
                return response.status, await response.read()
        except asyncio.TimeoutError:
            raise ApiError(504, f"{engine.role.value} engine {engine.name}/v1/models: no answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(
                502, f"{engine.role.value} engine {engine.name}/v1/models: {error or type(error).__name__}"
            ) from None

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

"""Where engines are named besides the flags: a watched file, and names that stand for many addresses.

Guarantees: what cannot be read, or makes no sense, changes nothing (an outage of a name server takes no engine away), and is
said once in the log until it changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError
from kvxfer.router.openai import read_json
from kvxfer.router.settings import Role, RouterSettings, engine_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvxfer.router.engines import Engines

log = logging.getLogger(__name__)

_FILE_INTERVAL = 1.0


class Sources:
    """Keeps the engines what the file and the names say."""

    def __init__(self, settings: RouterSettings, engines: Engines) -> None:
        self._settings = settings
        self._engines = engines
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[str, str] = {}
        self._stamp: tuple[int, int, int] | None = None

    async def start(self) -> None:
        """Read everything once, then go on in the background."""
        settings = self._settings
        if settings.engines_file is not None:
            await self._file(settings.engines_file)
            self._tasks.append(asyncio.ensure_future(self._repeat(self._file, settings.engines_file, _FILE_INTERVAL)))
        for role, name in ((Role.PREFILL, settings.prefill_dns), (Role.DECODE, settings.decode_dns)):
            if name is not None:

                async def again(name: str, role: Role = role) -> None:
                    await self._name(role, name)

                await again(name)
                self._tasks.append(asyncio.ensure_future(self._repeat(again, name, settings.dns_interval)))

    async def stop(self) -> None:
        """Watch no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _repeat(self, look: Any, what: str, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            try:
                await look(what)
            except Exception:
                log.exception("looking at %s failed in an unforeseen way", what)

    async def _file(self, path: str) -> None:
        try:
            found = os.stat(path)  # noqa: PTH116 -- a small local file
            stamp = found.st_mtime_ns, found.st_size, found.st_ino
            if stamp == self._stamp:
                return
            urls = read_engines(Path(path).read_bytes())  # noqa: ASYNC240
            self._stamp = stamp
        except (OSError, ConfigError) as error:
            self._say(path, f"{path} is not used: {error}; the engines stay what they were")
            return
        self._say(path, "")
        self._engines.wanted(f"file {path}", urls)

    async def _name(self, role: Role, name: str) -> None:
        url = engine_url(name)
        assert url.host
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._say(name, f"{url.host} cannot be resolved: {error}; the {role.value} engines stay what they were")
            return
        addresses = sorted({str(entry[4][0]) for entry in found})
        if addresses:
            self._say(name, "")
            self._engines.wanted(f"name {url.host}", {role: [str(url.with_host(one)) for one in addresses]})

    def _say(self, about: str, what: str) -> None:
        if self._said.get(about, "") != what and what:
            log.warning("%s", what)
        self._said[about] = what


def read_engines(raw: bytes) -> Mapping[Role, list[str]]:
    """Read an engines file; raise ``ConfigError`` that says what is wrong."""
    try:
        value = read_json(raw)
    except ValueError as error:
        raise ConfigError(f"it is not JSON ({error})") from None
    roles = {role.value: role for role in Role}
    if not isinstance(value, dict) or not set(value) <= set(roles):
        raise ConfigError('it must be an object with the keys "prefill" and "decode", each a list of URLs')
    urls: dict[Role, list[str]] = {}
    for name, role in roles.items():
        some = value.get(name, [])
        if not isinstance(some, list) or not all(isinstance(one, str) for one in some):
            raise ConfigError(f'"{name}" must be a list of URLs')
        urls[role] = [str(engine_url(one)) for one in some]
    return urls

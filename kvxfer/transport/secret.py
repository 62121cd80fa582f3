"""Where a process finds the secret that it shares with its peers. The secret itself is in no setting: settings are logged."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.errors import ConfigError
from kvxfer.protocol.auth import MIN_SECRET_BYTES, Secret

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("kvxfer.control")

MAX_SECRET_BYTES = 4096
_MAKE = "make one with: openssl rand -hex 32"


def load_secret(file: str = "", environment: Mapping[str, str] | None = None) -> Secret | None:
    """Read the secret from ``file``, else the file that KVXFER_SECRET_FILE names, else KVXFER_SECRET; None without any.

    White space at the end does not count. Raises ConfigError where one is asked for and cannot be had: an engine that was to
    have a secret must not run without. A file that everybody may read is warned about (Kubernetes mounts secrets so).
    """
    environment = os.environ if environment is None else environment
    file, value = file or environment.get("KVXFER_SECRET_FILE", ""), environment.get("KVXFER_SECRET")
    if file:
        if value is not None and "KVXFER_SECRET_FILE" in environment:
            raise ConfigError("KVXFER_SECRET_FILE and KVXFER_SECRET are both set: unset one of them")
        return _checked(_read(file), f"the secret in {file}")
    return None if value is None else _checked(value.encode(errors="surrogateescape"), "KVXFER_SECRET")


def _read(file: str) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & stat.S_IROTH:
                logger.warning("the secret in %s can be read by every user of this host: chmod 600 %s", file, file)
            return opened.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the secret in {file} cannot be read: {error.strerror}") from None


def _checked(value: bytes, what: str) -> Secret:
    value = value.rstrip()
    if len(value) < MIN_SECRET_BYTES:
        raise ConfigError(f"{what} has {len(value)} bytes; it needs at least {MIN_SECRET_BYTES}: {_MAKE}")
    if len(value) > MAX_SECRET_BYTES:
        raise ConfigError(f"{what} has more than {MAX_SECRET_BYTES:,} bytes: {_MAKE}")
    return Secret(value)

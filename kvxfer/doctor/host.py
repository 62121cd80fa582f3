"""What the checks look at, and what they find."""

from __future__ import annotations

import functools
import os
import platform
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from kvxfer.errors import NativeLibraryError
from kvxfer.rails.sysfs import read_sysfs
from kvxfer.transport.native import ensure_native_libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvxfer.rails.pci import Machine
    from kvxfer.transport.native import NativeReport

State = Literal["ok", "warning", "problem"]
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. A ``problem`` keeps kvxfer from doing its job on this host; each state but ok comes with a cure."""

    check: str
    state: State
    text: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution; ``text`` is its whole metadata."""

    version: str
    text: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The leading numbers of the version."""
        return numbers(self.version)


class Provider(msgspec.Struct, frozen=True):
    """One endpoint that libfabric offers of those that NIXL asks for, in libfabric's order."""

    provider: str
    domain: str
    fabric: str


@dataclass(frozen=True, slots=True)
class Host:
    """A host as the checks see it. ``memlock`` in bytes, None for no limit; files are read below ``root``."""

    machine: Machine
    package: Callable[[str], Package | None]
    native: Callable[[], NativeReport]
    """Finds and loads what NIXL's LIBFABRIC plugin needs; raises NativeLibraryError."""
    providers: Callable[[str], list[Provider]]
    """Asks the libfabric of this path; raises NativeLibraryError."""
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)
    python: tuple[int, int] = (3, 11)
    kernel: str = ""
    memlock: int | None = None

    def text(self, path: str) -> str:
        """Return a file's text, empty where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def exists(self, pattern: str) -> bool:
        """Whether any file matches a glob below the root."""
        return next(self.root.glob(pattern), None) is not None

    def libfabric(self) -> tuple[str, tuple[int, ...], str] | None:
        """Return path, version and origin of the libfabric that NIXL will have, None where there is none."""
        try:
            libraries = self.native().libraries
        except NativeLibraryError:
            return None
        found = next((library for library in libraries if library.soname.startswith("libfabric.")), None)
        return None if found is None else (found.path, numbers(found.version or ""), found.origin)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.31.24+cu12 → (2, 31, 24)."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


def this_host() -> Host:
    """Return this host, as it is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        machine=read_sysfs(),
        package=_package,
        native=functools.cache(functools.partial(ensure_native_libraries, "LIBFABRIC")),
        providers=functools.cache(ask_providers),
        environment=os.environ,
        python=sys.version_info[:2],
        kernel=platform.release(),
        memlock=None if soft == resource.RLIM_INFINITY else soft,
    )


def _package(name: str) -> Package | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    # Not str(found.metadata): a description that says its lines in a header cannot be written again (nixl 1.4.1, Python 3.12.3).
    return Package(found.version, found.read_text("METADATA") or "")


def ask_providers(libfabric: str) -> list[Provider]:
    """Run providers.py on a libfabric: initialising one may print, hang or crash, so it has a process of its own."""
    script = Path(__file__).with_name("providers.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(script), libfabric],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=list[Provider])
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()[-1:]  # a traceback's last line has the reason
        ended = f"the process that asked it was ended by {_signal(-error.returncode)}" if error.returncode < 0 else ""
        why = "; ".join(filter(None, (*said, ended))) or str(error)
        raise NativeLibraryError(f"{libfabric} did not list its providers: {why}") from error
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise NativeLibraryError(f"{libfabric} did not list its providers: {error}") from error


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Compiles the stand-in for libcuda.so.1 (native_cuda_stub.c) once per user and machine type.

It lands in ``$XDG_CACHE_HOME/kvxfer`` (``~/.cache/kvxfer``), or where that cannot be made in ``kvxfer-<uid>`` of the
temporary directory, under a name that has the hash of its source: another kvxfer or NIXL makes another file, and none
is ever rewritten. What is loaded from there runs in this process, so the directory and the file must belong to this
user and must not be writable by anyone else; otherwise they are refused, not repaired.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from kvxfer.errors import NativeLibraryError

_SOURCE = Path(__file__).with_name("native_cuda_stub.c")
_FLAGS = ("-shared", "-fPIC", "-O1", "-nostdlib", "-Wl,-soname,libcuda.so.1")
_COMPILE_SECONDS = 60


def build_cuda_stub(symbols: Iterable[str]) -> tuple[Path, str]:
    """The stub's file, and in words where it came from. It has ``symbols`` beside those of its source.

    Raises NativeLibraryError where there is no C compiler that works, or no directory that can be trusted.
    """
    source = _SOURCE.read_text()
    more = sorted(symbol for symbol in symbols if f"({symbol})" not in source)
    source += "".join(f"KVXFER_STUB({symbol})\n" for symbol in more)
    digest = hashlib.sha256(" ".join((source, *_FLAGS)).encode()).hexdigest()[:16]
    folder = _cache_folder()
    stub = folder / f"libcuda-stub-{platform.machine()}-{digest}.so"
    if os.path.lexists(stub):
        _refuse_unless_ours(stub, stat.S_ISREG)
        return stub, "kvxfer's stub"
    return stub, f"kvxfer's stub, compiled now with {_compile(source, stub)}"


def _compile(source: str, target: Path) -> str:
    """Compile ``source`` to ``target``, which appears whole or not at all. Returns the compiler that did it."""
    commands = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    found = [command for command in commands if command and shutil.which(command[0])]
    if not found:
        raise NativeLibraryError("there is no C compiler to build a stand-in with ($CC, cc, gcc and clang were tried)")
    reasons = []
    for command in found:
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        os.close(handle)
        try:
            subprocess.run(
                [*command, *_FLAGS, "-o", name, "-x", "c", "-"],
                input=source,
                text=True,
                capture_output=True,
                check=True,
                timeout=_COMPILE_SECONDS,
            )
            Path(name).chmod(0o700)
            Path(name).replace(target)
        except subprocess.CalledProcessError as error:
            reasons.append(f"{shlex.join(command)}: {error.stderr.strip()[-300:] or error}")
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{shlex.join(command)}: {error}")
        else:
            return shlex.join(command)
        finally:
            Path(name).unlink(missing_ok=True)
    raise NativeLibraryError("no C compiler could build a stand-in: " + "; ".join(reasons))


def _cache_folder() -> Path:
    """A directory of mode 0700 that belongs to this user, made where it is missing."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    places = [Path(base) / "kvxfer"] if Path(base).is_absolute() else []
    if not places and "HOME" in os.environ:
        places = [Path(os.environ["HOME"]) / ".cache" / "kvxfer"]
    places.append(Path(tempfile.gettempdir()) / f"kvxfer-{os.getuid()}")
    reasons = []
    for place in places:
        reason = _make(place)
        if reason is None:
            return place
        reasons.append(f"{place}: {reason}")
    raise NativeLibraryError("there is nowhere to keep a stand-in: " + "; ".join(reasons))


def _make(place: Path) -> str | None:
    """Make ``place``. Returns why it cannot be had, or None; raises where it is there and not to be trusted."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        _refuse_unless_ours(place, stat.S_ISDIR)
        with tempfile.TemporaryFile(dir=place):  # a read-only file system refuses here
            return None
    except OSError as error:
        return error.strerror or str(error)


def _refuse_unless_ours(path: Path, kind: Callable[[int], bool]) -> None:
    status = path.lstat()
    if not kind(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeLibraryError(
            f"{path} is not to be trusted: it must be yours (uid {os.getuid()}), no link, and writable by nobody else, "
            f"and it has uid {status.st_uid} and mode {stat.filemode(status.st_mode)}; remove it, or set XDG_CACHE_HOME"
        )

"""Server processes that start together, say why when they fail, and leave nothing behind.

A ``Server`` is one command under ``supervise.py``, with its output in a file. Starting returns at once, so that several
start side by side; ``wait_ready`` polls ``/health``, or another ``ready_path``. When a server dies or is late, the error carries
the tail of its log, since that is where the reason is.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from kvxfer.bench import supervise
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TAIL_LINES: Final = 40
_POLL_SECONDS: Final = 0.1
_FIRST_PORT: Final = 10000
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ServerError(KvxferError):
    """A server process did not start, or ended before it was asked to; the text has the tail of its log."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different TCP ports that are free now. All are held until all are chosen, so none is given twice.

    They are below those that the kernel hands out by itself: a server that takes a minute to start would else find, once in a
    while, that somebody's connection or unnamed listener has had its port meanwhile.
    """
    named = list(range(_FIRST_PORT, _first_ephemeral_port()))
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(named, len(named)):
            one = socket.socket()
            try:
                one.bind((host, port))
            except OSError:
                one.close()
                continue
            stack.callback(one.close)
            found.append(port)
            if len(found) == count:
                break
        while len(found) < count:  # of a host that leaves none to be named
            one = stack.enter_context(socket.socket())
            one.bind((host, 0))
            found.append(int(one.getsockname()[1]))
        return found


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_PORT


@final
@dataclass(slots=True)
class Server:
    """One server process tree. ``start``, ``wait_ready``, then ``stop`` or ``kill``; or use it in a ``with`` block."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    url: str
    ready_seconds: float = 180.0
    grace_seconds: float = 15.0
    ready_path: str = "/health"
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _started: float = field(default=0.0, init=False, repr=False)

    def start(self) -> None:
        """Start the process tree and return without waiting for it."""
        assert self._process is None, f"{self.name} was started before"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:  # a restarted server adds to it
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervise.__file__, str(self.grace_seconds), "--", *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                start_new_session=True,
            )

    def running(self) -> bool:
        """Whether the process tree still lives."""
        return self._process is not None and self._process.poll() is None

    def healthy(self, timeout: float = 1.0) -> bool:
        """Whether ``ready_path`` answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}{self.ready_path}", timeout=timeout) as answer:  # noqa: S310 - our own URL
                return bool(answer.status == 200)  # noqa: PLR2004
        except (OSError, urllib.error.URLError):
            return False

    def wait_ready(self) -> float:
        """Wait for ``ready_path`` and return the seconds since ``start``; ``ServerError`` if it dies or is late."""
        assert self._process is not None, f"{self.name} was not started"
        deadline = self._started + self.ready_seconds
        while True:
            if (code := self._process.poll()) is not None:
                raise ServerError(f"{self.name} ended with status {code} before it was ready; {self._tail()}")
            if self.healthy():
                return time.monotonic() - self._started
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} was not ready within {self.ready_seconds:g} s; {self._tail()}")
            time.sleep(_POLL_SECONDS)

    def last_words(self) -> str:
        """That the server has ended, and the end of its log."""
        return f"{self.name} has ended; {self._tail()}"

    def ask_to_stop(self) -> None:
        """Begin to stop and return at once; ``stop`` waits for the end."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self) -> None:
        """SIGTERM, ``grace_seconds``, then SIGKILL of all that is left. Harmless when it is not running."""
        self.ask_to_stop()
        self._join(self.grace_seconds + 15.0)

    def renew(self) -> None:
        """Make a server that has ended startable again."""
        assert not self.running(), f"{self.name} still runs"
        self._process = None

    def kill(self) -> None:
        """SIGKILL to the whole tree at once, as a power failure would."""
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return self.stop()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"k")
            self._process.stdin.flush()
        self.ask_to_stop()
        return self._join(15.0)

    def pids(self) -> list[int]:
        """Every process of the server now, the supervisor left out; the first is the command itself."""
        return [] if self._process is None else tree(self._process.pid)[1:]

    def titles(self) -> dict[int, str]:
        """A short name for each of the server's processes: vLLM's own title for it, else its program."""
        found: dict[int, str] = {}
        for pid in self.pids():
            title = (command_line(pid).split() or ["?"])[0].rpartition("/")[2]
            found[pid] = title if title not in found.values() else f"{title} {pid}"
        return found

    def named(self, text: str) -> list[int]:
        """The server's processes whose command line contains ``text``; vLLM's are "EngineCore" and "Worker"."""
        return [pid for pid in self.pids() if text in command_line(pid)]

    def signal(self, number: int, pids: Sequence[int] | None = None) -> None:
        """Send a signal to the given processes, or to every process of the server."""
        for pid in self.pids() if pids is None else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _join(self, timeout: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            # The supervisor hangs on a process in uninterruptible sleep: take what can be taken.
            self.signal(signal.SIGKILL, tree(self._process.pid))
            self._process.wait(5.0)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        shown = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
        return f"the end of {self.log}:\n{shown}"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[list[float]]:
    """Start all at once, wait until all are ready, hand out the seconds that each took, and stop all at the end."""
    try:
        for server in servers:
            server.start()
        yield [server.wait_ready() for server in servers]
    except KvxferError as error:
        # A refused request is often only how one hears of an engine's death.
        ended = [server for server in servers if not server.running()]
        if ended and not isinstance(error, ServerError):
            raise ServerError("; ".join([str(error), *(one.last_words() for one in ended)])) from error
        raise
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()


def tree(root: int) -> list[int]:
    """``root`` and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += sorted(children.get(pid, ()))
    return found


def command_line(pid: int) -> str:
    """The process's command line, or its title where it has set one; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system seconds that the processes' living threads have used; processes that are gone count nothing.

    From ``schedstat``, which counts in nanoseconds: ``stat`` counts in ticks of 10 ms, too coarse for what is idle. It is
    used where the kernel has no ``schedstat``.
    """
    return sum(_cpu_of(Path(f"/proc/{pid}")) for pid in pids)


def _cpu_of(process: Path) -> float:
    nanoseconds = 0
    try:
        threads = list((process / "task").iterdir())
    except OSError:
        return 0.0
    for thread in threads:
        with contextlib.suppress(OSError, IndexError, ValueError):
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    if nanoseconds:
        return nanoseconds / 1e9
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                yield int(entry.name), int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])

"""Runs one command so that nothing of it outlives its owner: not a worker, not a grandchild, not after ``kill -9``.

Run as a file, never imported by the command it runs (``python -I -S supervise.py GRACE -- COMMAND…``): the standard
library only, some 8 MB, asleep until something happens. The owner holds the other end of this process's standard input.

- the pipe closes (the owner asked for it, or died in whatever way): SIGTERM to the command, GRACE seconds, then SIGKILL
- one byte ``k`` arrives: SIGKILL at once
- the command ends by itself: what it left behind is killed, and this process exits with its status (128 + signal)

The command gets a process group of its own; a child that leaves it, or is orphaned, comes to this process, which
is its subreaper. PR_SET_PDEATHSIG alone would not do: it reaches only direct children, and fires when the *thread* that
forked ends.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Run the command after ``--`` and return the status to exit with."""
    grace = float(arguments[0])
    command = arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    asked = False

    def note(number: int, _frame: object) -> None:
        nonlocal asked
        asked = asked or number != signal.SIGCHLD

    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for number in (
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGCHLD,
                signal.SIGPIPE,
                signal.SIGXFSZ,
            ):
                signal.signal(number, signal.SIG_DFL)  # Python ignores the last two, and exec would keep that
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.execvp(command[0], command)  # noqa: S606 - the owner's own command
        except OSError as error:
            os.write(2, f"{command[0]}: {error}\n".encode())
        finally:
            os._exit(127)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # here too: whoever comes first

    deadline: float | None = None
    inputs = [0, wake_read]
    while (status := _reap(child)) is None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(inputs, [], [], timeout)
        if wake_read in ready:
            os.read(wake_read, 4096)
        if 0 in ready:
            said = os.read(0, 64)
            if b"k" in said:
                break
            if not said:
                inputs.remove(0)
                asked = True
        if asked and deadline is None:
            deadline = time.monotonic() + grace
            _signal(child, signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            break
    _kill_all(child)
    if status is None:
        return 128 + signal.SIGKILL
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _reap(child: int) -> int | None:
    """Collect every child that has ended; the wait status of ``child`` if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            if pair[0] == child:
                return pair[1]
    return None


def _kill_all(group: int) -> None:
    """Kill the group and every descendant, again and again until no child is left (a killed one orphans others to us)."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        for process in _descendants(os.getpid()):
            _signal(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        more = children.get(queue.pop(), [])
        found += more
        queue += more
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

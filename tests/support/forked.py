"""Ranks in processes of their own that start in a fraction of a second, to be killed and started again many times.

A fork server has imported NIXL and everything else; a new process is a fork of it. Unlike ``PeerProcess`` it takes no
environment of its own. The parent calls a rank's commands (those of ``peer_process.Driver``) over a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from kvxfer.transport.native import ensure_native_libraries
from tests.support.peer_process import Driver

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("FI_PROVIDER", "tcp")
ensure_native_libraries("LIBFABRIC")
import nixl._api  # noqa: E402, F401 - so that the fork server has it


def _serve(pipe: Any, log: str, options: dict[str, Any]) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    driver = Driver(options)
    pipe.send({"ok": driver.port()})
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send({"ok": getattr(driver, call.pop("do"))(**call)})
        except Exception as error:  # noqa: BLE001 - the test reads it
            pipe.send({"error": f"{type(error).__name__}: {error}"})


class ForkedPeer:
    """One rank. Dies with its parent, or by ``kill``."""

    def __init__(self, engine: str, log: Path, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.engine = engine
        self.log = log
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, str(log), {"engine": engine, **options}), daemon=True
        )
        self.process.start()
        theirs.close()
        self.port = self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"{self.engine} died: {self.log.read_text()[-3000:]}") from None
        assert "error" not in answer, answer
        return answer["ok"]

    def __call__(self, verb: str, **arguments: Any) -> Any:
        self._pipe.send({"do": verb, **arguments})
        return self._answer()

    def kill(self) -> None:
        """As a power failure would. Harmless when it is dead."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

"""The parent's side of ``peer_process``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def has_ipv6() -> bool:
    """Tell whether this machine has an IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


class PeerProcess:
    """Starts a rank in a process of its own and calls its commands. ``root``: another tree of kvxfer, which it then runs."""

    def __init__(
        self, engine: str, log: Path, env: dict[str, str] | None = None, root: Path | None = None, **options: Any
    ) -> None:
        env = {**os.environ, "FI_PROVIDER": "tcp", **(env or {})}
        if root is not None:  # before an editable install of this one
            env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "platforms"), env.get("PYTHONPATH", "")])
        self.engine = engine
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.peer_process", json.dumps({"engine": engine, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            cwd=root or ROOT,
            env=env,
        )
        self.port = self._answer()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        assert line, f"{self.engine} died: {self.log.read_text()[-3000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["ok"]

    def send(self, verb: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        self.process.stdin.flush()

    def __call__(self, verb: str, **arguments: Any) -> Any:
        self.send(verb, **arguments)
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.send("quit")
                self.process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                self.kill()

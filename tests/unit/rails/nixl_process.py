"""Run as a script: NIXL itself on machines that are not there, over a libfabric, libcuda and libnrt that only pretend.

Reads cases as JSON lines (environment, name, whether to register) and writes the name before NIXL's log of each to stderr. A case
with a ``worker`` (setting, policy, the device's address, root) is done as a worker does it, and what the worker says is there too.
"""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.rails.pinning import WorkerRails
from kvxfer.rails.policy import VARIABLE
from kvxfer.transport.nixl import NixlAgent


def kept_to(setting, policy: str, device: str, root: str) -> WorkerRails:
    """Pin as the worker of a platform whose device is there."""
    platform = SimpleNamespace(pci_address=lambda _: device, local_rails=lambda _: None)
    return WorkerRails((setting, policy), "LIBFABRIC", platform, 0, root=Path(root))


def main() -> None:
    """Run each case with a new agent; none is destroyed, since nothing that it has opened is real."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    kept = []
    for line in sys.stdin:
        case = json.loads(line)
        os.environ.pop("FAKE_NRT", None)
        os.environ.pop(VARIABLE, None)
        os.environ.update(case["environment"])
        os.write(2, f"== {case['name']}\n".encode())
        try:
            rails = kept_to(*case["worker"]) if case["worker"] else None
            with rails.watched() if rails else contextlib.nullcontext():
                kept.append(agent := NixlAgent(case["name"]))
                if case["register"]:
                    kept.append(memory := np.zeros(1 << 16, dtype=np.uint8))
                    agent.register([(memory.ctypes.data, memory.nbytes, 0)], "VRAM")
            if rails:
                rails.settle()
        except KvxferError as error:
            os.write(2, f"ERROR {error}\n".encode())  # its log is what is wanted
    os._exit(0)


if __name__ == "__main__":
    main()

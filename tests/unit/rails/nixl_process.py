"""Run as a script: NIXL itself on machines that are not there, over a libfabric, libcuda and libnrt that only pretend.

Reads cases as JSON lines (environment, name, whether to register) and writes the name before NIXL's log of each to stderr.
"""

import json
import os
import sys

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.transport.nixl import NixlAgent


def main() -> None:
    """Run each case with a new agent; none is destroyed, since nothing that it has opened is real."""
    kept = []
    for line in sys.stdin:
        case = json.loads(line)
        os.environ.pop("FAKE_NRT", None)
        os.environ.update(case["environment"])
        os.write(2, f"== {case['name']}\n".encode())
        try:
            kept.append(agent := NixlAgent(case["name"]))
            if case["register"]:
                kept.append(memory := np.zeros(1 << 16, dtype=np.uint8))
                agent.register([(memory.ctypes.data, memory.nbytes, 0)], "VRAM")
        except KvxferError:
            pass  # its log is what is wanted
    os._exit(0)


if __name__ == "__main__":
    main()

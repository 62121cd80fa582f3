"""``python -m kvxfer_neuron``: see ``probe``. Exit status 1 if an answer is not what kvxfer needs, 2 without a libnrt."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvxfer.errors import PlatformError
from kvxfer.rails.sysfs import run_neuron_ls
from kvxfer_neuron import nrt, order
from kvxfer_neuron.devices import Devices
from kvxfer_neuron.probe import probe


def main() -> int:
    """Set what an engine has, and ask."""
    for name, value in order.wanted(os.environ).items():
        os.environ[name] = value
    try:
        library = nrt.load(os.environ)
    except PlatformError as error:
        print(f"problem  libnrt     {error}")
        return 2
    good = True
    for answer in probe(library, Devices(Path("/"), os.environ, run_neuron_ls, lambda: library), os.environ):
        print(f"{'ok' if answer.good else 'problem':<8} {answer.step:<10} {answer.text}", flush=True)
        good = good and answer.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

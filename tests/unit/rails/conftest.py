"""Every machine is read both ways: from a fake sysfs tree, and from an hwloc XML."""

from __future__ import annotations

import pytest
from topologies import write_hwloc, write_sysfs

from kvxfer.rails.hwloc import read_hwloc
from kvxfer.rails.sysfs import read_sysfs


@pytest.fixture(params=["sysfs", "hwloc"])
def read(request, tmp_path):
    """Return a function that writes a topology in one of the forms, and reads it."""

    def machine(topology):
        if request.param == "sysfs":
            return read_sysfs(write_sysfs(topology, tmp_path / "root"))
        return read_hwloc(write_hwloc(topology, tmp_path / "machine.xml"))

    return machine

"""What stands in for a Neuron device: a libnrt of ours in C, host tensors that say they are in HBM, hosts made of files."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxfer_host.stream import LateStream

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "rails"))
import topologies as make  # noqa: E402

COMPILER = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler to make libnrt's double with")

READY = {"NEURON_RT_MAP_HBM": "1", "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
"""What kvxfer's plugin has set when a cache is described."""


def compile_library(folder: Path, source: Path = HERE / "fake_libnrt.c", *flags: str) -> Path:
    """Compile a C file to libNAME.so.1, with that soname; returns the library."""
    name = f"{source.stem.removeprefix('fake_')}.so.1"
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run([COMPILER, *options, *flags, "-o", folder / name, source], check=True)
    return folder / name


def in_a_process(program: str, **environment: str) -> str:
    """Run a program in which nothing that pretends was loaded before."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "platforms"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    return done.stdout.strip()


class Libnrt:
    """The double, by its own side. What it is told holds until the next test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.double_adopt.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.library.double_limits.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self.reset()

    def reset(self) -> None:
        self.library.double_reset()

    def init(self) -> None:
        assert self.library.nrt_init(3, b"", b"") == 0

    def force(self, function: str, status: int) -> None:
        self.library.double_force(function.encode(), status)

    def before(self, status: int) -> None:
        self.library.double_before(status)

    def attach(self, device: int, bdf: str) -> None:
        self.library.double_attach(device, bdf.encode())

    def limits(self, size: int = 96 << 30, exports: int = 256) -> None:
        self.library.double_limits(size, exports)

    def host_devices(self, *host: int) -> None:
        self.library.double_host_devices((ctypes.c_int * len(host))(*host), len(host))

    def adopt(self, tensor, device: int = 0) -> None:
        """Let a host tensor's storage be HBM of a device."""
        storage = tensor.untyped_storage()
        self.library.double_adopt(storage.data_ptr(), storage.nbytes(), device)

    def count(self, what: str) -> int:
        return self.library.double_count(what.encode())


@pytest.fixture(scope="session")
def built_libnrt(tmp_path_factory) -> Path:
    return compile_library(tmp_path_factory.mktemp("libnrt"))


@pytest.fixture
def libnrt(built_libnrt):
    double = Libnrt(built_libnrt)
    yield double
    double.reset()


# --- tensors ----------------------------------------------------------------------------------------------------------


class Work:
    """What was launched on a device: it runs in order, and a read waits for all of it."""

    def __init__(self, delay: float = 0.0) -> None:
        self._stream = LateStream(delay)

    def launch(self, work) -> None:
        self._stream.launch(work)

    def finish(self) -> None:
        assert self._stream.fence().wait(30.0)

    def fence(self):
        return self._stream.fence()


class InHbm:
    """A tensor in host memory that says it is on a Neuron device, as do all views of it. ``cpu`` waits, as reading back does."""

    def __init__(self, tensor, work: Work | None = None, index: int | None = 0) -> None:
        self.host = tensor
        self.work = work or Work()
        self.device = SimpleNamespace(type="neuron", index=index)

    def __getattr__(self, name):
        return getattr(self.host, name)

    def __getitem__(self, key):
        return InHbm(self.host[key], self.work, self.device.index)

    def cpu(self):
        self.work.finish()
        return self.host


class NotMapped(InHbm):
    """A tensor of a process in which HBM is not mapped."""

    def data_ptr(self) -> int:
        return 0


def torch_neuron(work: Work):
    """TorchNeuron's torch.neuron: events on one stream. An event that was not recorded has passed."""

    class Event:
        def __init__(self) -> None:
            self._fence = None

        def record(self) -> None:
            self._fence = work.fence()

        def query(self) -> bool:
            return self._fence is None or self._fence.done()

    return SimpleNamespace(Event=Event)


# --- hosts ------------------------------------------------------------------------------------------------------------

CHARACTER_FILES = {"/dev/null": 3, "/dev/zero": 5, "/dev/full": 7, "/dev/random": 8, "/dev/urandom": 9}
"""Device files that everybody may link to, with their minor numbers: a container's renumbered /dev/neuronN."""


def write_host(root: Path, topology=None, *, devices=None, cpus: str = f"0-{(os.cpu_count() or 1) - 1}") -> Path:
    """Write a host. ``devices`` replaces its /dev/neuron*: N → the index on the host, which is the file's minor number."""
    make.write_sysfs(topology or make.trn2("trn2.48xlarge"), root)
    for numa in (0, 1):
        folder = root / f"sys/devices/system/node/node{numa}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    if devices is not None:
        for path in (root / "dev").glob("neuron*"):
            path.unlink()
        minors = {minor: path for path, minor in CHARACTER_FILES.items()}
        for number, index in devices.items():
            if number == index:
                (root / f"dev/neuron{number}").touch()
            else:
                (root / f"dev/neuron{number}").symlink_to(minors[index])
    return root


@pytest.fixture(scope="session")
def trn2_files(tmp_path_factory) -> Path:
    return write_host(tmp_path_factory.mktemp("trn2") / "host")


@pytest.fixture
def trn2_host(trn2_files, tmp_path) -> Path:
    """A trn2.48xlarge whose bus and devices are read, not written: writing them takes a while."""
    root = tmp_path / "host"
    root.mkdir()
    for name in ("sys", "dev"):
        (root / name).symlink_to(trn2_files / name)
    return root


def neuron_ls(addresses: dict[int, str], lnc: int = 2) -> str:
    """What ``neuron-ls -j`` prints of some devices (SDK, tools/neuron-sys-tools/neuron-ls.rst)."""
    cores = 8 // lnc
    return json.dumps(
        [
            {
                "neuron_device": index,
                "bdf": bdf,
                "numa_node": "1",
                "cpu_affinity": "48-95,144-191",
                "connected_to": [],
                "nc_count": cores,
                "logical_neuroncore_config": lnc,
                "memory_size": 103079215104,
                "neuroncore_ids": list(range(index * cores, (index + 1) * cores)),
                "neuron_processes": [],
            }
            for index, bdf in addresses.items()
        ]
    )

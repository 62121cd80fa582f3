"""What stands in for a GPU: host tensors that say they are a GPU's, a torch.cuda whose work is late, and a driver of ours in C."""

from __future__ import annotations

import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from kvxfer_host.stream import LateStream

HERE = Path(__file__).parent
COMPILER = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)


class OnGpu:
    """A tensor in host memory that says it is on a GPU, as do all views of it."""

    def __init__(self, tensor, index: int | None = 0) -> None:
        self.host = tensor
        self.device = _Device(index)

    def __getattr__(self, name):
        return getattr(self.host, name)

    def __getitem__(self, key):
        return self.host[key]


class _Device(SimpleNamespace):
    def __init__(self, index) -> None:
        super().__init__(type="cuda", index=index)

    def __str__(self) -> str:
        return f"cuda:{self.index}"


class FakeCuda:
    """torch.cuda with streams that run late. The current stream is a thread's own; a thread is born on device 0."""

    def __init__(self, delay: float = 0.02) -> None:
        self._default = LateStream(delay)
        self._thread = threading.local()
        self.made = 0
        self.devices_set: list[int] = []
        outer = self

        class Event:
            def __init__(self) -> None:
                outer.made += 1
                self._fence = None

            def record(self) -> None:
                self._fence = outer.stream_now().fence()

            def query(self) -> bool:
                return self._fence.done()

        class Stream:
            def __init__(self) -> None:
                self.late = LateStream(delay)
                self.cuda_stream = id(self)

        self.Event = Event
        self.Stream = Stream

    def stream_now(self) -> LateStream:
        """The calling thread's current stream."""
        return getattr(self._thread, "stream", self._default)

    @contextmanager
    def stream(self, stream):
        before, self._thread.stream = self.stream_now(), stream.late
        try:
            yield
        finally:
            self._thread.stream = before

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, device: int) -> None:
        self.devices_set.append(device)
        self._thread.device = device


def compile_driver(folder: Path) -> Path:
    """Compile fake_libcuda.c; returns the library.

    It has a name of its own: what is loaded as libcuda.so.1 here would be NIXL's in the same process, too.
    """
    library = folder / "libcuda_double.so"
    source = HERE / "fake_libcuda.c"
    subprocess.run([COMPILER, "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    return library

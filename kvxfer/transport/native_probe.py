"""Says what a library is: its path, its version, and whether it has the symbols that are wanted.

Run as a script it answers for each argument from a process of its own. glibc settles a soname with the first library
that was loaded under it, for the life of the process; so a candidate must not be loaded here merely to ask its version,
or a libfabric that is too old would stand in the way of the one that is not. The script forks once per candidate, which
also keeps candidates apart from each other and survives one that crashes in its initialisers. About 20 ms in all.

It must start fast under ``python -I -S``: it imports nothing of kvxfer and little of the standard library.
"""

import ctypes
import os
import signal
import sys

_RTLD_DI_LINKMAP = 2
_SECONDS = 10  # for one candidate; a network file system may be slow, but not for ever


class _LinkMap(ctypes.Structure):
    """The head of glibc's ``struct link_map`` (link.h), which is part of its ABI."""

    _fields_ = (("l_addr", ctypes.c_size_t), ("l_name", ctypes.c_char_p))


def path_of(library: ctypes.CDLL) -> str:
    """The file that ``library`` was loaded from, or its name where the C library does not tell."""
    link_map = ctypes.POINTER(_LinkMap)()
    try:
        dlinfo = ctypes.CDLL(None).dlinfo
    except AttributeError:  # glibc before 2.34 in an interpreter that was not linked with libdl
        return library._name  # noqa: SLF001
    handle = ctypes.c_void_p(library._handle)  # noqa: SLF001
    if dlinfo(handle, _RTLD_DI_LINKMAP, ctypes.byref(link_map)) != 0:
        return library._name  # noqa: SLF001
    return os.fsdecode(link_map.contents.l_name or b"") or library._name  # noqa: SLF001


def version_of(library: ctypes.CDLL, soname: str) -> tuple[int, int] | None:
    """(major, minor) as the library itself says, None where it does not. Initialises no device."""
    stem = soname.partition(".so")[0]
    value = ctypes.c_int(0)
    try:
        if stem == "libfabric":  # FI_VERSION(major, minor) of fabric.h
            packed = library.fi_version()
            return packed >> 16, packed & 0xFFFF
        if stem == "libhwloc":  # HWLOC_API_VERSION of hwloc.h: 0x00MMmmpp
            packed = library.hwloc_get_api_version()
            return packed >> 16, packed >> 8 & 0xFF
        if stem == "libcudart" and library.cudaRuntimeGetVersion(ctypes.byref(value)) == 0:
            return value.value // 1000, value.value % 1000 // 10
        if stem == "libcuda" and library.cuDriverGetVersion(ctypes.byref(value)) == 0 and value.value:
            return value.value // 1000, value.value % 1000 // 10
    except AttributeError:
        pass
    return None


def lacks(library: ctypes.CDLL, symbols: list[str]) -> str | None:
    """Which of ``symbols`` the library does not have, in words."""
    missing = [symbol for symbol in symbols if not hasattr(library, symbol)]
    return f"it lacks {', '.join(missing)}" if missing else None


def _answer(name: str, symbols: list[str], soname: str) -> str:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return f"error\t{error}"
    missing = lacks(library, symbols)
    if missing:
        return f"error\t{path_of(library)}: {missing}"
    version = version_of(library, soname)
    return f"ok\t{path_of(library)}\t{'.'.join(map(str, version)) if version else ''}"


def _main() -> None:
    """Each argument is soname, file or soname to load, and wanted symbols, one a line; one line of answer each."""
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library's initialiser may print
    for argument in sys.argv[1:]:
        soname, name, *symbols = argument.split("\n")
        child = os.fork()
        if child == 0:
            signal.alarm(_SECONDS)
            os.write(out, _answer(name, symbols, soname).replace("\n", " ").encode() + b"\n")
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            os.write(out, f"error\t{name}: loading it ended the process with status {status}\n".encode())


if __name__ == "__main__":
    _main()

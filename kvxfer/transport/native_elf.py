"""Reads what a shared object says of itself: its soname, what it needs, where it looks, what it leaves undefined, versions.

Enough of ELF for 64-bit little-endian objects (x86-64 and aarch64), read from the file, so that a library can be judged
before it is loaded. Everything comes from the dynamic segment but the symbols and their versions, which come from the section
table; an object without one (stripped to the bone) reports none.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_SHT_DYNSYM, _SHT_VERDEF, _SHT_VERNEED = 11, 0x6FFFFFFD, 0x6FFFFFFE
_VER_FLG_WEAK = 2


@dataclass(frozen=True, slots=True)
class SharedObject:
    """What a shared object declares. ``search`` is its RPATH or RUNPATH, with $ORIGIN put in.

    ``versions`` are those of symbols that it has; ``wants``, (soname, version) of those that it must find elsewhere.
    """

    path: Path
    soname: str | None
    needed: tuple[str, ...]
    search: tuple[Path, ...]
    undefined: frozenset[str]
    versions: frozenset[str]
    wants: frozenset[tuple[str, str]]


def read_shared_object(path: Path) -> SharedObject:
    """Read ``path``. Raises OSError if it cannot be read, ValueError if it is no 64-bit little-endian shared object."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
        except (struct.error, IndexError, StopIteration, OverflowError, ValueError) as error:
            raise ValueError(f"{path} is not a sound 64-bit little-endian shared object: {error}") from error


def _read(path: Path, data: mmap.mmap) -> SharedObject:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it does not begin like one")
    program_at, section_at = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", data, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for at in range(program_at, program_at + program_size * program_count, program_size):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, at)
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, size)
    if dynamic is None:
        raise ValueError("it has no dynamic segment")
    entries: list[tuple[int, int]] = list(struct.iter_unpack("<qQ", data[dynamic[0] : sum(dynamic)]))
    table = next(value for tag, value in entries if tag == _DT_STRTAB)
    strings = next(table - address + offset for address, offset, size in loads if address <= table < address + size)

    def text(index: int, base: int = strings) -> str:
        return data[base + index : data.find(b"\0", base + index)].decode()

    def texts(*tags: int) -> tuple[str, ...]:
        return tuple(text(value) for tag, value in entries if tag in tags)

    undefined: set[str] = set()
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, section_at + index * section_size) for index in range(section_count)
    ]
    versions: set[str] = set()
    wants: set[tuple[str, str]] = set()
    for section in sections:
        names = sections[section[6]][4] if section[6] < section_count else 0
        if section[1] == _SHT_VERDEF:
            for at in _chain(data, section[4], section[7], 16):
                (first,) = struct.unpack_from("<I", data, at + 12)
                (name,) = struct.unpack_from("<I", data, at + first)
                versions.add(text(name, names))
        elif section[1] == _SHT_VERNEED:
            for at in _chain(data, section[4], section[7], 12):
                count, soname, first = struct.unpack_from("<HII", data, at + 2)
                for one in _chain(data, at + first, count, 12):
                    _, flags, _, name = struct.unpack_from("<IHHI", data, one)
                    if not flags & _VER_FLG_WEAK:
                        wants.add((text(soname, names), text(name, names)))
        elif section[1] == _SHT_DYNSYM:
            symbols = struct.iter_unpack("<IBBHQQ", data[section[4] : section[4] + section[5]])
            undefined.update(text(symbol[0], names) for symbol in symbols if symbol[3] == 0 and symbol[0])
    origin = str(path.parent.resolve())
    search = [part for value in texts(_DT_RPATH, _DT_RUNPATH) for part in value.split(":") if part]
    return SharedObject(
        path=path,
        soname=next(iter(texts(_DT_SONAME)), None),
        needed=texts(_DT_NEEDED),
        search=tuple(Path(part.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)) for part in search),
        undefined=frozenset(undefined),
        versions=frozenset(versions),
        wants=frozenset(wants),
    )


def _chain(data: mmap.mmap, at: int, count: int, next_at: int) -> Iterator[int]:
    """Iterate over ``count`` records, each of which says at ``next_at`` how far it is to the next."""
    for _ in range(count):
        yield at
        at += int(struct.unpack_from("<I", data, at + next_at)[0])

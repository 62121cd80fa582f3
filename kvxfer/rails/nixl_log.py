"""NIXL's log of one or more processes, read for what it says of rails.

The texts are those of nixl 1.4.1: under src/utils/libfabric, libfabric_rail_manager.cpp (rails created, memory mapped and
registered) and libfabric_topology.cpp (getEfaDevicesForPci, grouping); src/plugins/libfabric/libfabric_backend.cpp (registerMem).
The older forms of 0.9 and 0.10 ("Created data rail", "GPU-PCI") are read too. "Created rail" and "mapped to rail" are DEBUG
lines; the warnings of fallbacks come at every level.

A server's log is many processes' at once. Each line of NIXL's begins with abseil's prefix, which has the id of the *thread*;
vLLM puts the process before it where it can, Ray the process and its host, docker compose and kubectl the container. Lines
are told apart by those, and a line that ran into another is split. Threads of one process cannot be told from processes: an
agent that is created on one thread and registers on another shows as two writers (``judge`` knows). Ray leaves out lines that
are alike; what was left out is counted, since a log without them proves nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.rails.pci import rail_name

if TYPE_CHECKING:
    from collections.abc import Iterable

LEVEL = "NIXL_LOG_LEVEL=DEBUG"

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +(\d+) [\w./-]+:\d+\] ")
_PROCESS = re.compile(r"\bpid=(\d+)(, ip=[^\s,)]+)?\)")
_CONTAINER = re.compile(r"(?:\[(pod/\S+)\]|(\S+) +\|) ")
_LEFT_OUT = re.compile(r"\[repeated (\d{1,9})x across cluster\]")

_ON = r"VRAM memory (\S+) on (?:device PCI|GPU-PCI) (\S*)"
_CREATED = re.compile(r"Created (?:data )?rail (\d{1,9}) \(device=([^,()]+), provider=([^()]+)\)")
_OPENED = re.compile(r"Created (\d{1,9}) rails using provider=([\w;.+-]+)")
_DISCOVERED = re.compile(r"Discovered (\d{1,9}) (efa|EFA|tcp|sockets|cxi) devices")
_MAPPED = re.compile(_ON + r" mapped to rail (\d{1,9}) \(EFA device=([^()]+)\)")
_TOTAL = re.compile(_ON + r" will use (\d{1,9}) rails total")
_QUERIED = re.compile(r"Queried PCI bus ID: (\S*) for (GPU|Neuron device) (-?\d+)")
_ON_RAIL = re.compile(r"Registered memory on rail (\d{1,9}) \(")
_REGISTERED = re.compile(r"Registered memory on (\d{1,9}) rails, mem_type=(\w+)")
_TABLE = re.compile(r"^\s*(?:Accelerator-PCI )?([0-9a-f]{1,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) → \[([^\]]*)\]")
_RUNTIME = re.compile(r"System runtime: (CUDA|NEURON|SYSTEM)")

_FALLBACKS = (
    ("all rails", re.compile(r"not found in accelerator-EFA mapping, returning all devices")),
    ("all rails", re.compile(r"Failed to parse PCI bus ID format: .*returning all devices")),
    ("libnrt", re.compile(r"Could not query EFA device from memory")),
    ("no grouping", re.compile(r"Topology-aware grouping failed")),
    ("no grouping", re.compile(r"Using fallback: all accelerators will use all available EFA devices")),
    ("no grouping", re.compile(r"Could not find hwloc object for PCIe address")),
    ("host memory", re.compile(r"VRAM memory requested but provider does not support FI_HMEM")),
    ("no rail", re.compile(r"not found in rail mapping for (?:device PCI|GPU-PCI)")),
    ("no rail", re.compile(r"No valid rail mapping found for (?:device PCI|GPU-PCI)")),
    ("no rail", re.compile(r"No EFA devices found for PCI")),
)
_ANY = re.compile(
    "Created |mapped to rail|will use |Queried PCI|Registered memory|System runtime|Discovered |→|returning all|Could not |"
    "Topology-aware|Using fallback|VRAM memory|rail mapping|No EFA devices"
)
"""What every pattern has some of: a server's debug log is mostly lines about transfers, and long."""
_VRAM = frozenset({"1", "VRAM_SEG", "VRAM"})  # nixl_types.h: DRAM_SEG is 0, VRAM_SEG 1


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log file; ``number`` from 1."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}"


@dataclass(frozen=True, slots=True)
class Created:
    """A rail that a writer opened."""

    name: str
    provider: str
    line: Line


@dataclass(slots=True)
class Registration:
    """Device memory that was put on rails. ``device`` is the address as NIXL has it: the GPU's, or on Neuron the EFA device's."""

    memory: str
    device: str
    rails: dict[str, Line] = field(default_factory=dict)
    total: int | None = None
    """How many rails NIXL said it would be; None while the log has not come to that line."""

    @property
    def whole(self) -> bool:
        """Whether all of its lines are there."""
        return self.total is not None and self.total == len(self.rails)


@dataclass(slots=True)
class Writer:
    """What one process, or one thread where processes are not told, said of rails."""

    key: str
    runtime: str = ""
    created: dict[int, Created] = field(default_factory=dict)
    counts: list[tuple[str, Line]] = field(default_factory=list)
    """Providers of lines that tell only how many devices or rails there are."""
    registrations: list[Registration] = field(default_factory=list)
    fallbacks: list[tuple[str, Line]] = field(default_factory=list)
    host_rails: set[int] = field(default_factory=set)
    """Rails on which host memory was registered."""
    device_memory: bool = False
    """Device memory was registered, as lines say that come at every level."""
    table: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The rails of each GPU, as NIXL announces its grouping (INFO)."""
    pending: set[int] = field(default_factory=set)

    @property
    def untold(self) -> bool:
        """Whether it opened rails, or registered device memory, without the lines that say which: its log level was too low."""
        return not self.registrations and (self.device_memory or (bool(self.counts) and not self.created))

    @property
    def mapped(self) -> set[str]:
        """Names of the rails that carry some device memory."""
        return {name for registration in self.registrations for name in registration.rails}

    @property
    def used(self) -> set[str]:
        """Names of the rails that carry any memory."""
        return self.mapped | {self.created[rail].name for rail in self.host_rails if rail in self.created}


@dataclass(slots=True)
class NixlLog:
    """All writers of all files, in the order in which they first spoke."""

    writers: dict[str, Writer] = field(default_factory=dict)
    files: int = 0
    nixl_lines: int = 0
    """How many lines with NIXL's prefix were looked at: 0 if there are none."""
    left_out: int = 0
    """How many lines of NIXL's about rails Ray counted and did not write."""

    def read(self, file: str, lines: Iterable[str]) -> None:
        """Take the lines of one file."""
        self.files += 1
        for number, raw in enumerate(lines, 1):
            if _ANY.search(raw) is None and self.nixl_lines:
                continue
            text = _COLOUR.sub("", raw.rstrip("\n"))
            process = _process(text)
            for thread, message in _messages(text):
                self.nixl_lines += thread is not None
                who = process or (f"thread {thread}" if thread else "all")
                key = ": ".join(filter(None, (file, _container(text), who)))
                writer = self.writers.get(key) or Writer(key)
                if _take(writer, message, Line(file, number, message.strip())):
                    self.writers[key] = writer
                    self.left_out += sum(int(times) for times in _LEFT_OUT.findall(message))


def _process(text: str) -> str:
    """Name the process that wrote a line: the last one named before NIXL's own prefix, where others passed the line on."""
    first = _PREFIX.search(text)
    named = list(_PROCESS.finditer(text, 0, first.start() if first else len(text)))
    return f"pid {named[-1][1]}{named[-1][2] or ''}" if named else ""


def _container(text: str) -> str:
    """Name the container that docker compose, or ``kubectl logs --prefix``, put before a line: process ids repeat in others."""
    match = _CONTAINER.match(text)
    return (match[1] or match[2]) if match else ""


def _messages(text: str) -> list[tuple[str | None, str]]:
    """Split a line into NIXL's messages with their threads; a line without NIXL's prefix is one message of nobody."""
    starts = list(_PREFIX.finditer(text))
    if not starts:
        return [(None, text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [(match[1], text[match.end() : end]) for match, end in zip(starts, ends, strict=True)]


def _take(writer: Writer, message: str, line: Line) -> bool:
    """Take one message. Returns whether it said anything of rails."""
    for kind, pattern in _FALLBACKS:
        if pattern.search(message):
            writer.fallbacks.append((kind, line))
            return True
    if match := _CREATED.search(message):
        writer.created[int(match[1])] = Created(rail_name(match[2]), match[3], line)
    elif match := _MAPPED.search(message):
        _registration(writer, match[1], match[2]).rails.setdefault(rail_name(match[4]), line)
    elif match := _TOTAL.search(message):
        _registration(writer, match[1], match[2]).total = int(match[3])
    elif match := _ON_RAIL.search(message):
        writer.pending.add(int(match[1]))
    elif match := _REGISTERED.search(message):
        if match[2] in _VRAM:
            writer.device_memory = True
        else:
            writer.host_rails |= writer.pending
        writer.pending.clear()
    elif match := _OPENED.search(message) or _DISCOVERED.search(message):
        writer.counts.append((match[2].lower(), line))
    elif match := _TABLE.search(message):
        writer.table[match[1]] = tuple(rail_name(name.strip()) for name in match[2].split(",") if name.strip())
    elif match := _RUNTIME.search(message):
        writer.runtime = match[1]
    elif not _QUERIED.search(message):
        return False
    return True


def _registration(writer: Writer, memory: str, device: str) -> Registration:
    """Return the registration that a line belongs to: the last of that memory, unless that one is complete."""
    for registration in reversed(writer.registrations):
        if (registration.memory, registration.device) == (memory, device):
            if registration.total is None:
                return registration
            break
    writer.registrations.append(Registration(memory, device))
    return writer.registrations[-1]

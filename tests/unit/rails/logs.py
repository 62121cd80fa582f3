"""NIXL's debug log, composed in its real format: abseil's prefix, and the texts of nixl 1.4.1 (see kvxfer/rails/nixl_log.py).

nixl-1.4.1-tcp.txt beside this file is a genuine one, of an agent over the tcp provider.
"""

from __future__ import annotations

MANAGER, TOPOLOGY, BACKEND = "libfabric_rail_manager.cpp", "libfabric_topology.cpp", "libfabric_backend.cpp"


class Process:
    """What one thread of one process logs."""

    def __init__(self, thread: int = 4711, prefix: str = "", suffix: str = "-rdm") -> None:
        self.thread = thread
        self.prefix = prefix
        self.suffix = suffix
        self.lines: list[str] = []
        self.rails: dict[str, int] = {}

    def say(self, file: str, line: int, text: str, level: str = "I") -> Process:
        self.lines.append(
            f"{self.prefix}{level}1129 23:29:57.{len(self.lines):06d} {self.thread:>7} {file}:{line}] {text}"
        )
        return self

    def create(self, names: list[str], provider: str = "efa", accelerators: str = "8 NVIDIA GPUs, 8") -> Process:
        self.say(
            TOPOLOGY,
            140,
            f"Discovered {len(names)} EFA devices"
            if provider == "efa"
            else f"Discovered 1 {provider} devices (TCP fallback)",
        )
        self.say(TOPOLOGY, 260, f"Topology: 2 NUMA nodes, {len(names)} NICs, {accelerators} AWS accelerators")
        for index, name in enumerate(names):
            self.rails[name] = index
            self.say(MANAGER, 359, f"Created rail {index} (device={name}{self.suffix}, provider={provider})")
        return self.say(MANAGER, 232, f"Created {len(names)} rails using provider={provider}")

    def queried(self, pci: str, device: int, kind: str = "GPU") -> Process:
        return self.say(BACKEND, 940 if kind == "GPU" else 950, f"Queried PCI bus ID: {pci} for {kind} {device}")

    def map(self, pci: str, names: list[str], memory: str = "0x7f1200000000", total: bool = True) -> Process:
        for name in names:
            self.say(
                MANAGER,
                700,
                f"VRAM memory {memory} on device PCI {pci} mapped to rail {self.rails.get(name, 0)} (EFA device={name}{self.suffix})",
            )
        if total:
            self.say(MANAGER, 719, f"VRAM memory {memory} on device PCI {pci} will use {len(names)} rails total")
            for name in names:
                self.say(
                    MANAGER, 825, f"Registered memory on rail {self.rails.get(name, 0)} (mr=0x56159d286a40, key=12)"
                )
            self.say(MANAGER, 829, f"Registered memory on {len(names)} rails, mem_type=1 device=0")
        return self

    def host_memory(self, names: list[str]) -> Process:
        for name in names:
            self.say(MANAGER, 825, f"Registered memory on rail {self.rails[name]} (mr=0x56159d286a40, key=12)")
        return self.say(MANAGER, 829, f"Registered memory on {len(names)} rails, mem_type=0 device=0")

    def all_devices(self, pci: str) -> Process:
        if pci:
            text = f"PCI bus ID {pci} (normalized to {pci[3:]}) not found in accelerator-EFA mapping, returning all devices"
        else:
            text = "Failed to parse PCI bus ID format: , returning all devices"
        return self.say(TOPOLOGY, 188, text, level="W")

    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)


def interleave(*processes: Process) -> str:
    """One line of each in turn."""
    longest = max(len(process.lines) for process in processes)
    return "".join(
        process.lines[number] + "\n"
        for number in range(longest)
        for process in processes
        if number < len(process.lines)
    )

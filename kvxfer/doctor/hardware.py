"""Checks of the kernel, of drivers and of limits: what registering device memory with EFA needs of the host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvxfer.doctor.host import Finding, numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.doctor.host import Host

_NEURON_LIBRARIES = "opt/aws/neuron/lib"
_DRIVER_VERSION = re.compile(r"\s(\d{3}\.\d+(?:\.\d+)?)\b")
_DRIVERS = (("nixl-cu13", (580, 65)), ("nixl-cu12", (525, 60)))
"""The oldest drivers for CUDA 13's and 12's runtimes (CUDA's release notes, "CUDA Driver")."""
_DMA_BUF = (5, 12)
_EFA_INSTALLER = "run AWS's EFA installer (it builds the efa kernel module), then modprobe efa"


def check_accelerators(host: Host) -> Iterator[Finding]:
    """Say what is on the bus, and what of it is hidden."""
    machine = host.machine
    parts = [
        f"{len(nodes)} {what}" for what, nodes in (("GPUs", machine.gpus), ("Neuron devices", machine.neurons)) if nodes
    ]
    hidden = sum(not node.usable for node in machine.accelerators)
    text = ", ".join(parts) or "no accelerator on the PCI bus: KV in host memory only"
    if machine.accelerators and hidden == len(machine.accelerators):
        cure = "give the container its devices (--gpus, --device /dev/neuronN)"
        yield Finding("accelerators", "problem", f"{text}, none of which has a device file here", cure)
    else:
        yield Finding("accelerators", "ok", text + (f", {hidden} of them without a device file here" if hidden else ""))


def check_kernel(host: Host) -> Iterator[Finding]:
    """Neuron's dma-buf needs Linux 5.15 (aws-neuron-driver 2.24.7)."""
    if host.machine.neurons and numbers(host.kernel) < (5, 15):
        text = f"Linux {host.kernel}: Neuron's driver exports dma-buf only from 5.15 on"
        yield Finding("kernel", "problem", text, "run an image with Linux 5.15 or newer")
    else:
        yield Finding("kernel", "ok", f"Linux {host.kernel}")


def check_efa_driver(host: Host) -> Iterator[Finding]:
    """Every EFA device on the bus has the efa module behind it, and a device file."""
    machine = host.machine
    if not machine.efas:
        return
    version = host.text("sys/module/efa/version")
    if not version and not host.exists("sys/module/efa"):
        yield Finding(
            "efa driver",
            "problem",
            f"{len(machine.efas)} EFA devices, and the efa module is not loaded",
            _EFA_INSTALLER,
        )
    elif len(machine.rails) < len(machine.efas):
        hidden = ", ".join(str(efa.where) for efa in machine.efas if not efa.usable)
        yield Finding(
            "efa driver",
            "problem" if not machine.rails else "warning",
            f"efa {version}: no device file here for {hidden}",
            "give the container /dev/infiniband/uverbs* (the EFA device plugin's vpc.amazonaws.com/efa, or --device)",
        )
    else:
        yield Finding("efa driver", "ok", f"efa {version or '(in-tree)'}, {len(machine.rails)} devices")


def check_nvidia_driver(host: Host) -> Iterator[Finding]:
    """NVIDIA's driver, which must be as new as the CUDA runtime that NIXL's wheel is linked to."""
    if not host.machine.gpus:
        return
    told = host.text("proc/driver/nvidia/version").partition("\n")[0]
    if not told:
        cure = "install NVIDIA's driver, open kernel modules"
        yield Finding("nvidia driver", "problem", "NVIDIA's driver is not loaded", cure)
        return
    match = _DRIVER_VERSION.search(told)
    version = match[1] if match else ""
    oldest, wheel = min(((oldest, wheel) for wheel, oldest in _DRIVERS if host.package(wheel)), default=((), ""))
    if version and numbers(version) < oldest:
        text = f"driver {version} is older than {'.'.join(map(str, oldest))}, which the CUDA runtime of {wheel} needs"
        cure = "update NVIDIA's driver" + (", or install nixl-cu12 in its place" if wheel == "nixl-cu13" else "")
        yield Finding("nvidia driver", "problem", text, cure)
    else:
        yield Finding("nvidia driver", "ok", told)


def check_gpu_direct(host: Host) -> Iterator[Finding]:
    """Check that EFA can reach GPU memory: dma-buf with NVIDIA's open modules, a peer memory module with the others.

    dma-buf needs Linux 5.12 as well (NVIDIA's GPU operator, its page on GPUDirect RDMA).
    """
    driver = host.text("proc/driver/nvidia/version").partition("\n")[0]
    if not host.machine.gpus or not driver:
        return
    peer = [name for name in ("efa_nv_peermem", "nvidia_peermem") if host.exists(f"sys/module/{name}")]
    is_open, is_new = "Open Kernel Module" in driver, numbers(host.kernel) >= _DMA_BUF
    if is_open and is_new:
        yield Finding("gpu direct", "ok", "dma-buf, by NVIDIA's open kernel modules")
    elif peer:
        yield Finding("gpu direct", "ok", f"peer memory, by {', '.join(peer)}")
    elif is_open:
        text = f"Linux {host.kernel} has no dma-buf for GPU memory, which came with 5.12, and no peer memory module is loaded"
        yield Finding(
            "gpu direct", "problem", text, "run an image with Linux 5.12 or newer, or modprobe nvidia_peermem"
        )
    else:
        text = "neither NVIDIA's open kernel modules (dma-buf) nor a peer memory module is loaded"
        yield Finding("gpu direct", "problem", text, "install NVIDIA's open kernel modules, or modprobe nvidia_peermem")


def check_neuron(host: Host) -> Iterator[Finding]:
    """Neuron's driver, and a libnrt.so.1 that NIXL and libfabric find under that name."""
    if not host.machine.neurons:
        return
    version = host.text("sys/module/neuron/version")
    if not host.exists("sys/module/neuron"):
        yield Finding(
            "neuron driver",
            "problem",
            "the neuron module is not loaded",
            "install aws-neuronx-dkms, then modprobe neuron",
        )
    else:
        yield Finding("neuron driver", "ok", f"neuron {version}")
    if not host.exists(f"{_NEURON_LIBRARIES}/libnrt.so.1"):
        text = f"/{_NEURON_LIBRARIES} has no libnrt.so.1: NIXL cannot ask for the EFA device of an address, and takes every rail"
        yield Finding("libnrt", "problem", text, "install aws-neuronx-runtime-lib, of Neuron SDK 2.29 or newer")
        return
    path = host.environment.get("LD_LIBRARY_PATH", "").split(":")
    configured = any(
        _NEURON_LIBRARIES in host.text(str(file.relative_to(host.root)))
        for file in host.root.glob("etc/ld.so.conf.d/*.conf")
    )
    if f"/{_NEURON_LIBRARIES}" in [part.rstrip("/") for part in path] or configured:
        yield Finding("libnrt", "ok", f"/{_NEURON_LIBRARIES}/libnrt.so.1")
    else:
        text = f"the dynamic loader is not told of /{_NEURON_LIBRARIES}, where NIXL and libfabric look for libnrt.so.1 by name"
        yield Finding("libnrt", "problem", text, f"export LD_LIBRARY_PATH=/{_NEURON_LIBRARIES}:$LD_LIBRARY_PATH")


def check_memlock(host: Host) -> Iterator[Finding]:
    """EFA pins what it registers; libfabric's tcp does not."""
    limit = "unlimited" if host.memlock is None else f"{host.memlock // 1024:,} KiB"
    if host.machine.efas and host.memlock is not None:
        cure = "ulimit -l unlimited (limits.conf: memlock; docker: --ulimit memlock=-1)"
        yield Finding(
            "memlock", "problem", f"locked memory is limited to {limit}, and EFA pins what it registers", cure
        )
    else:
        yield Finding("memlock", "ok", f"locked memory: {limit}")


def check_hugepages(host: Host) -> Iterator[Finding]:
    """The efa provider of libfabric takes its own buffers from huge pages of 2 MiB where there are any."""
    if not host.machine.efas:
        return
    told = re.search(r"^HugePages_Free:\s*(\d+)", host.text("proc/meminfo"), re.MULTILINE)
    free = told[1] if told else "0"
    if free == "0" and host.environment.get("FI_EFA_USE_HUGE_PAGE", "1") != "0":
        text = "no huge page is free: each rail's buffers take ordinary pages"
        yield Finding(
            "hugepages",
            "warning",
            text,
            "reserve some (sysctl vm.nr_hugepages; the EFA installer does), or set FI_EFA_USE_HUGE_PAGE=0",
        )
    else:
        yield Finding("hugepages", "ok", f"{free} free")


CHECKS = (
    check_accelerators,
    check_kernel,
    check_efa_driver,
    check_nvidia_driver,
    check_gpu_direct,
    check_neuron,
    check_memlock,
    check_hugepages,
)

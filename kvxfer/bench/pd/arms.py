"""What is compared: a pair under one connector, or one engine alone; started here, or running elsewhere.

An arm's name is a connector of the benches (``push``, ``pull``, ``upstream-push``, ``upstream-pull``) or ``alone``, then whatever
sets it apart: ``push:max_num_batched_tokens=4096``, ``push:stream=false``. Arms of one sitting differ in nothing else: same
model, same arguments of vLLM, same backend.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvxfer.bench.engines import (
    CONNECTORS,
    MODEL_NAME,
    Engine,
    EngineSpec,
    Mode,
    make_engine,
    named_connector,
    named_pair,
)
from kvxfer.bench.process import Server, free_ports
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALONE: Final = "alone"
KVXFER_PREFIX: Final = "kvxfer-"
_BUDGET: Final = "max_num_batched_tokens"
_NOWHERE: Final = Path()


@dataclass(frozen=True, slots=True)
class ArmName:
    """An arm as it is asked for. ``budget``: tokens a step, None for the sitting's; ``settings``: of its connector."""

    text: str
    connector: str
    budget: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether kvxfer's connector moves its KV."""
        return self.connector in CONNECTORS

    @property
    def mode(self) -> Mode | None:
        """Who moves the KV; None for one engine alone."""
        return None if self.connector == ALONE else named_connector(self.connector)[0]


def parse_arms(text: str) -> list[ArmName]:
    """Read comma-separated arms. Raises ConfigError, also where one is given twice."""
    found = [parse_arm(part.strip()) for part in text.split(",") if part.strip()]
    names = [arm.text for arm in found]
    if not found or len(set(names)) < len(names):
        raise ConfigError(f"arms {text!r}: name at least one, and none twice")
    return found


def parse_arm(text: str) -> ArmName:
    """Read one arm: ``CONNECTOR[:KEY=VALUE]…``; values are JSON, or else words. ``kvxfer-push`` is ``push``."""
    connector, *parts = text.removeprefix(KVXFER_PREFIX).split(":")
    if connector != ALONE:
        named_connector(connector)
    settings: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise ConfigError(f"arm {text!r}: {part!r} is not KEY=VALUE")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    budget = settings.pop(_BUDGET, None)
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ConfigError(f"arm {text!r}: {_BUDGET} is a number of tokens above 0, not {budget!r}")
    if connector == ALONE and settings:
        raise ConfigError(
            f"arm {text!r}: one engine alone has no connector that {', '.join(settings)} could be set for"
        )
    return ArmName(":".join([connector, *parts]), connector, budget, settings)


@dataclass(frozen=True, slots=True)
class Build:
    """What all engines of a sitting have in common. ``base``: of ``EngineSpec``, for all of them.

    ``ours`` and ``upstreams`` go into the connectors' extra configuration, ``prefill`` and ``decode`` into one side's
    environment; an engine alone has prefill's.
    """

    model: Path
    base: Mapping[str, Any]
    backend: str = "LIBFABRIC"
    ours: Mapping[str, Any] = field(default_factory=dict)
    upstreams: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, str] = field(default_factory=dict)
    decode: Mapping[str, str] = field(default_factory=dict)
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()

    def specs(self, arm: ArmName) -> tuple[EngineSpec, ...]:
        """Return the arm's engine, or its prefill and its decode engine."""
        base = dict(self.base)
        if arm.budget is not None:
            base[_BUDGET] = arm.budget
        if arm.connector == ALONE:
            prefill, _ = named_pair("push", self.model, **base)  # on prefill's cores, and in its place
            alone = dataclasses.replace(prefill, role="alone", connector=None)
            return (self._placed(alone, arm, self.prefill, self.prefill_args, ALONE),)
        if arm.ours:
            base |= {"connector_config": {"backend": self.backend, **self.ours, **arm.settings}}
        else:
            # vLLM's own class; on a machine where LIBFABRIC's libraries must be found first, through what finds them.
            module = "kvxfer.bench.upstream" if self.backend == "LIBFABRIC" else None
            config = {"backends": [self.backend], **self.upstreams, **arm.settings}
            base |= {"connector_module": module, "connector_config": config}
        prefill, decode = named_pair(arm.connector, self.model, **base)
        return (
            self._placed(prefill, arm, self.prefill, self.prefill_args, "prefill"),
            self._placed(decode, arm, self.decode, self.decode_args, "decode"),
        )

    @staticmethod
    def _placed(
        spec: EngineSpec, arm: ArmName, environment: Mapping[str, str], args: tuple[str, ...], side: str
    ) -> EngineSpec:
        name = re.sub(r"[^\w.-]+", "-", arm.text if side == ALONE else f"{arm.text}-{side}")
        return dataclasses.replace(
            spec, name=name, environment={**spec.environment, **environment}, args=(*spec.args, *args)
        )


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm with its engines: one, or prefill and decode. ``started_here`` engines are this sitting's to start and stop."""

    name: ArmName
    engines: tuple[Engine, ...]
    started_here: bool = True
    model: str = MODEL_NAME

    @property
    def label(self) -> str:
        """How tables name it."""
        return self.name.text

    @property
    def servers(self) -> list[Server]:
        """The processes that this sitting starts and stops."""
        return [engine.server for engine in self.engines] if self.started_here else []

    @property
    def one_host(self) -> bool:
        """Whether both sides' records have the same clock."""
        return len({engine.control_host for engine in self.engines}) == 1


def make_arms(names: Sequence[ArmName], build: Build, logs: Path) -> list[Arm]:
    """Prepare arms that are started here; ports of all of them are chosen together, so that none is given twice."""
    specs = [build.specs(name) for name in names]
    ports = free_ports(2 * sum(map(len, specs)))
    arms = []
    for name, several in zip(names, specs, strict=True):
        engines = []
        for spec in several:
            engines.append(make_engine(spec, logs, ports[:2]))
            del ports[:2]
        arms.append(Arm(name, tuple(engines)))
    return arms


def running_arm(text: str, served_model: str, tensor_parallel: int = 1) -> Arm:
    """Read an arm whose engines run already: ``ARM@PREFILL_URL,DECODE_URL[,ENGINE_ID@HOST:PORT[,HOST:PORT]]``, or ``alone@URL``.

    The third part is prefill's engine id and control address (side channel, for upstream), which push's decode leg must name; the
    fourth is decode's control address, where its handoff records are asked for.
    """
    arm, _, rest = text.partition("@")
    name = parse_arm(arm)
    urls, expected = rest.split(","), (1,) if name.connector == ALONE else (2, 3, 4)
    if len(urls) not in expected or not all(url.startswith("http") for url in urls[:2]):
        raise ConfigError(
            f"--running {text!r} is neither ARM@PREFILL_URL,DECODE_URL[,ENGINE_ID@HOST:PORT[,HOST:PORT]] nor alone@URL"
        )
    if name.mode == "push" and len(urls) < 3:  # noqa: PLR2004
        raise ConfigError(f"--running {text!r}: push needs ENGINE_ID@HOST:PORT of prefill, which decode's leg names")
    where = [_address(part, text) for part in urls[2:]] + [("", "127.0.0.1", 0)] * 2
    engines = []
    for url, (engine_id, host, port), side in zip(urls[:2], where, ("prefill", "decode"), strict=False):
        alone = name.connector == ALONE
        spec = EngineSpec(
            name=engine_id or f"{name.text}-{side}",
            model=_NOWHERE,
            role="alone" if alone else side,  # type: ignore[arg-type]
            connector=None if alone else named_connector(name.connector)[1],
            tensor_parallel=tensor_parallel,
        )
        server = Server(spec.name, (), {}, _NOWHERE, url.rstrip("/"))
        engines.append(Engine(spec, server, 0, port, host))
    return Arm(name, tuple(engines), started_here=False, model=served_model)


def _address(part: str, text: str) -> tuple[str, str, int]:
    engine_id, _, address = part.rpartition("@")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--running {text!r}: {part!r} is not ENGINE_ID@HOST:PORT")
    return engine_id, host.strip("[]"), int(port)

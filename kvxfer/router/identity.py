"""An engine's identity, as the engine itself tells it: the ``kvxfer_info`` gauge, and the answer to one probe.

The gauge is in the engine's ``/metrics``, one sample for each data-parallel engine::

    kvxfer_info{engine="0",engine_id="…",host="…",port="5600",tp_size="1",pp_size="1",role="kv_producer",…} 1.0

The probe's answer comes from the scheduler process and the gauge from the API server: two processes that compute the
same values apart. Where they differ, a push would register with nobody, so the engine must not be used.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import bare, is_loopback, is_wildcard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.router.settings import Mode, Role

_SAMPLE = re.compile(r"^kvxfer_info\{(?P<labels>.*)\}\s+\S+", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_FITTING_ROLES = {"prefill": {"kv_producer", "kv_both"}, "decode": {"kv_consumer", "kv_both"}}


class IdentityError(Exception):
    """An engine did not tell a usable identity; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One engine (one data-parallel rank) as its peers must name it. ``host`` is as reachable as the engine's URL."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    role: str = ""
    mode: str = ""
    wire: str = ""
    advertised: str = ""
    """The host as the engine said it, before ``reachable_host``."""
    leg_timeout: float | None = None
    """Seconds that the engine waits for the other leg of a handoff; None: it does not say."""
    dp_rank: int | None = None
    """Set where one URL stands for several engines: the request must be sent to this one."""


def parse_info(metrics: str, url_host: str) -> list[Identity]:
    """Read every ``kvxfer_info`` sample, in rank order; raise ``IdentityError`` for none, or one that is unusable."""
    found: dict[str, Identity] = {}
    for sample in _SAMPLE.finditer(metrics):
        labels = {name: _ESCAPE.sub(_unescape, value) for name, value in _LABEL.findall(sample["labels"])}
        try:
            one = Identity(
                engine_id=labels["engine_id"],
                host=reachable_host(labels["host"], url_host),
                port=int(labels["port"]),
                tp_size=int(labels["tp_size"]),
                pp_size=int(labels.get("pp_size", "1")),
                role=labels.get("role", ""),
                mode=labels.get("mode", ""),
                wire=labels.get("wire", ""),
                advertised=labels["host"],
                leg_timeout=float(labels["leg_timeout"]) if "leg_timeout" in labels else None,
                dp_rank=int(labels.get("engine", "0")),
            )
            _check_numbers(one)
        except (KeyError, ValueError) as error:
            raise IdentityError(f"its kvxfer_info metric is not understood ({error!r}): {sample[0][:300]}") from None
        found.setdefault(one.engine_id, one)  # several API servers report the same engine
    if not found:
        raise IdentityError(
            "its /metrics has no kvxfer_info: start vLLM with a kvxfer connector (--kv-transfer-config), and without "
            "--disable-log-stats"
        )
    if len(found) == 1:
        return [replace(one, dp_rank=None) for one in found.values()]
    return sorted(found.values(), key=lambda one: one.dp_rank or 0)


def _check_numbers(one: Identity) -> None:
    """Raise ValueError for what would be no port, no size or no time."""
    seconds = one.leg_timeout
    if not 0 < one.port < 65536 or one.tp_size < 1 or one.pp_size < 1:  # noqa: PLR2004
        raise ValueError("its port or its sizes are none")
    if seconds is not None and not 0 < seconds < math.inf:  # so that NaN is caught, too
        raise ValueError(f"leg_timeout {seconds:g}")


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def reachable_host(advertised: str, url_host: str) -> str:
    """The host to connect to: a wildcard, or a loopback of another machine, is replaced by the engine URL's host."""
    if is_wildcard(advertised) or (is_loopback(advertised) and not is_loopback(url_host)):
        return bare(url_host)
    return bare(advertised)


def check_role(identities: Sequence[Identity], role: Role, mode: Mode) -> None:
    """Refuse an engine that was given to the router as something that it is not."""
    for one in identities:
        if one.role and one.role not in _FITTING_ROLES[role.value]:
            raise IdentityError(f"it is given as --{role.value} and says kv_role {one.role}")
        if one.mode in {"push", "pull"} and one.mode != mode.value:
            raise IdentityError(f"its connector does {one.mode} and the router was started with --mode {mode.value}")


def check_probe(identity: Identity, answer: Any, url_host: str) -> None:
    """Hold the probe's answer against the metric; raise ``IdentityError`` naming both values of each difference."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict) or not params.get("remote_engine_id"):
        raise IdentityError(
            "its answer to the probe has no kv_transfer_params.remote_engine_id: its connector did nothing. Check that "
            "kv_role is kv_producer, and the engine's log"
        )
    answered = {
        "engine_id": params["remote_engine_id"],
        "port": _number(params.get("remote_port")),
        "tp_size": _number(params.get("tp_size", identity.tp_size)),
    }
    host = params.get("remote_host")
    # A wildcard or a loopback names no machine, so it contradicts nothing.
    if not isinstance(host, str) or (
        reachable_host(host, url_host) == bare(host) and bare(identity.advertised) == identity.host
    ):
        answered["host"] = bare(host) if isinstance(host, str) else host
    different = [
        f"{name} is {getattr(identity, name)!r} in kvxfer_info and {value!r} in its answer to the probe"
        for name, value in answered.items()
        if value != getattr(identity, name)
    ]
    if different:
        raise IdentityError("; ".join(different) + ": is something else listening, or was it just restarted?")


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value

"""Settings: read once, checked once, said once. docs/settings.md lists them all; a test holds the two together.

They come from vLLM's ``--kv-transfer-config``: ``kv_connector_extra_config`` holds ours. Some of upstream's names are read
too, so that a configuration made for the NIXL connectors works unchanged.
"""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.addresses import AddressError, bare, check_host, is_wildcard, parse
from kvxfer.errors import ConfigError
from kvxfer.protocol.fields import MAX_DURATION
from kvxfer.protocol.peers import Timing
from kvxfer.protocol.source import MAX_TTL

if TYPE_CHECKING:
    from collections.abc import Mapping

UPSTREAM_IGNORED = frozenset(
    {
        "num_threads",
        "enforce_handshake_compat",
        "enable_cross_layers_blocks",
        "kv_lease_duration",
        "push_registration_timeout",
        "engine_ttl",
    }
)
"""Keys of upstream's NIXL connectors that have no meaning here, or not yet; they are accepted, and named in one log line."""


_DURATIONS = (
    "leg_timeout",
    "hold_limit",
    "pull_lease",
    "connect_timeout",
    "drain_bound",
    "transfer_limit",
    "mover_timeout",
    "poll_interval",
    "decoder_kv_blocks_ttl",
    "decoder_kv_idle_ttl",
    "reuse_timeout",
)


LEAST_IDLE = 2.0
"""Seconds that a lease must have left for a load to be begun."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set. Times in seconds."""

    backend: str = "LIBFABRIC"
    """NIXL backend: LIBFABRIC or UCX."""
    backend_options: dict[str, str] = {}
    """Parameters of the backend's own, passed on as they are."""
    rails: str | list[str] = "local"
    """EFA devices that a worker process may open: ``local``, ``all``, or a list of names or PCI addresses."""
    rails_policy: str = "warn"
    """What a worker does when its memory is on other rails than it should be: ``warn`` or ``enforce``."""
    control_host: str = "127.0.0.1"
    """Address that the control channel binds; peers on other hosts need one that they can reach."""
    control_port: int = 5600
    """Port of the engine's control channel; data-parallel rank i listens at control_port + i. Worker ranks take free ports."""
    advertise_host: str = ""
    """Address given to peers instead of control_host, where the two differ (NAT, wildcard binds)."""
    secret_file: str = ""
    """File with the secret that both engines share; empty for KVXFER_SECRET_FILE or KVXFER_SECRET, or none."""
    model_id: str = ""
    """Name that both engines must share instead of the model's path."""
    stream: bool = True
    """Push chunks while prefill still computes; false waits for the whole prompt."""
    block_major: bool = True
    """Ask vLLM for a cache in which all layers of a block are one run of memory."""
    peers: list[str] = []
    """Control addresses, host:port, of engines to be connected before the first request."""
    leg_timeout: float = 30.0
    """How long either side waits for the other leg of a handoff that has not shown itself at all."""
    hold_limit: float = 120.0
    """How long prefill keeps a finished prompt for a decode leg that queues and has no blocks yet."""
    pull_lease: float = 10.0
    """How long prefill keeps blocks for a reader that has asked; renewed while it reads."""
    connect_timeout: float = 5.0
    """How long connecting to an engine may take before the request fails."""
    heartbeat_interval: float = 1.0
    """Between two heartbeats on the control channel."""
    peer_timeout: float = 5.0
    """Silence after which a peer is lost and its handoffs are failed."""
    post_lease: float = 4.0
    """How long one heartbeat allows the peer to post writes into this engine's memory."""
    drain_bound: float = 2.0
    """How long a posted transfer may still land after its process is gone, or after it failed."""
    pin_limit: float = 0.5
    """Share of the KV cache's blocks that may be pinned while they are written from; what exceeds it is written later."""
    staging_bytes: int | None = None
    """Memory in which received blocks wait to be re-packed where prefill's are of another size; 0 turns re-packing off."""
    transfer_limit: float = 120.0
    """How long one posted transfer may take; then it is stopped by revoking the keys of this rank's memory."""
    revoke: bool = True
    """Revoke the keys of this rank's memory before blocks return that a lost peer might still write into."""
    mover_timeout: float = 30.0
    """How long the mover may be busy with one round; then this process stops beating, and its peers think it lost."""
    idle_wait: float = 1.0
    """Longest sleep of an engine core whose requests all wait for their KV; 0 lets it step each millisecond, as vLLM does."""
    poll_interval: float = 0.0003
    """Between two looks at the fabric while something is under way."""
    record_capacity: int = 1024
    """Ended handoffs whose records are kept."""
    records_dir: str = ""
    """Directory to which each worker process appends its ended handoff records, as JSON lines."""
    spans: bool = False
    """Send handoffs as OpenTelemetry spans to where vLLM sends its own."""
    bidirectional_kv_xfer: bool = False
    """Let prefill take back what decode still holds of a conversation."""
    kv_recompute_threshold: int | str = 64
    """Tokens below which prefill computes rather than takes back; ``auto`` for what was measured."""
    decoder_kv_blocks_ttl: float = 480.0
    """How long decode keeps blocks for one reader at most, however often it asks."""
    decoder_kv_idle_ttl: float = 30.0
    """How long decode keeps blocks for a reader of which it hears nothing."""
    reuse_pin_limit: float = 0.25
    """Share of decode's KV cache that may be kept for readers at a time."""
    reuse_timeout: float = 1.0
    """How long prefill waits for decode to say what it holds."""

    @property
    def told_host(self) -> str:
        """The host that others are told: advertise_host, else control_host."""
        return bare(self.advertise_host or self.control_host)

    @property
    def peer_addresses(self) -> list[tuple[str, int]]:
        """The control addresses of ``peers``, as (host, port)."""
        return [parse(text) for text in self.peers]

    @property
    def timing(self) -> Timing:
        """The liveness times."""
        return Timing(self.heartbeat_interval, self.peer_timeout, self.post_lease)


def settings_from(extra: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> tuple[Settings, list[str]]:
    """Read the settings out of ``kv_connector_extra_config``. Returns them and the upstream keys that were ignored.

    Raises ConfigError that names every wrong key and value at once. The control address falls back to upstream's
    environment variables, so that launch scripts for its connectors serve here too.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    ignored: list[str] = []
    problems: list[str] = []
    for key, value in extra.items():
        if key in Settings.__struct_fields__:
            values[key] = value
        elif key == "backends":
            if not isinstance(value, list) or len(value) != 1:
                problems.append(f"backends={value!r} must be a list of one NIXL backend")
            else:
                values.setdefault("backend", value[0])
        elif key in UPSTREAM_IGNORED:
            ignored.append(key)
        else:
            close = difflib.get_close_matches(key, Settings.__struct_fields__, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ", see docs/settings.md"
            problems.append(f"{key!r} is not a setting{hint}")
    _from_environment(values, environment, problems)
    for key in list(values):
        try:  # one by one, so that each wrong type is told
            msgspec.convert({key: values[key]}, Settings, strict=True)
        except msgspec.ValidationError as error:
            problems.append(str(error))
            del values[key]
    settings = msgspec.convert(values, Settings, strict=True)
    problems += _ranges(settings)
    if problems:
        raise ConfigError("kv_connector_extra_config: " + "; ".join(problems))
    return settings, ignored


def _from_environment(values: dict[str, Any], environment: Mapping[str, str], problems: list[str]) -> None:
    host = environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    if host and "control_host" not in values:
        values["control_host"] = host
    port = environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT")
    if port and "control_port" not in values:
        if port.isdecimal():
            values["control_port"] = int(port)
        else:
            problems.append(f"VLLM_NIXL_SIDE_CHANNEL_PORT={port!r} is not a port")


def _ranges(settings: Settings) -> list[str]:
    found = settings.timing.problems()
    if settings.backend not in ("LIBFABRIC", "UCX"):
        found.append(f"backend={settings.backend!r} must be LIBFABRIC or UCX")
    if isinstance(settings.rails, str) and settings.rails not in ("local", "all"):
        found.append(
            f'rails={settings.rails!r} must be "local", "all", or a list of names or PCI addresses of EFA devices'
        )
    elif not settings.rails:
        found.append("rails=[] names no EFA device")
    if settings.rails_policy not in ("warn", "enforce"):
        found.append(f"rails_policy={settings.rails_policy!r} must be warn or enforce")
    if not 0 < settings.control_port < 65536:  # noqa: PLR2004
        found.append(f"control_port={settings.control_port} must be from 1 to 65535")
    for name in ("control_host", "advertise_host"):
        try:
            check_host(getattr(settings, name))
        except AddressError as error:
            found.append(f"{name}: {error}")
    for text in settings.peers:
        try:
            if is_wildcard(parse(text)[0]):
                found.append(f"peers: {text!r} names no host")
        except AddressError as error:
            found.append(f"peers: {error}")
    if not settings.control_host:
        found.append("control_host is empty: name an address of this host, or 0.0.0.0 or :: for all of them")
    if settings.advertise_host and is_wildcard(settings.advertise_host):
        found.append(f"advertise_host={settings.advertise_host!r} names no host that a peer could reach")
    for name in _DURATIONS:
        if not getattr(settings, name) > 0:  # so that NaN is caught, too
            found.append(f"{name}={getattr(settings, name):g} must be above 0")
        elif getattr(settings, name) > (limit := MAX_TTL if name == "leg_timeout" else MAX_DURATION):
            found.append(f"{name}={getattr(settings, name):g} must be {limit:,.0f} seconds at most")
    if 0 < settings.pull_lease <= 1:
        found.append(f"pull_lease={settings.pull_lease:g} must be above 1: the reader takes half a second off it")
    if not 0 <= settings.pin_limit <= 1:
        found.append(f"pin_limit={settings.pin_limit:g} must be from 0 to 1, a share of the KV cache's blocks")
    if settings.staging_bytes is not None and settings.staging_bytes < 0:
        found.append(f"staging_bytes={settings.staging_bytes} must be 0 or more")
    if not 0 <= settings.reuse_pin_limit <= 1:
        found.append(
            f"reuse_pin_limit={settings.reuse_pin_limit:g} must be from 0 to 1, a share of the KV cache's blocks"
        )
    threshold = settings.kv_recompute_threshold
    if threshold != "auto" and not (isinstance(threshold, int) and threshold >= 0):
        found.append(f'kv_recompute_threshold={threshold!r} must be a number of tokens, or "auto"')
    if not settings.decoder_kv_idle_ttl > LEAST_IDLE:
        found.append(
            f"decoder_kv_idle_ttl={settings.decoder_kv_idle_ttl:g} must be above {LEAST_IDLE:g}, or nothing is read in time"
        )
    if not 0 <= settings.idle_wait <= 10:  # noqa: PLR2004 - so that NaN is caught, too
        found.append(f"idle_wait={settings.idle_wait:g} must be from 0 (never sleep) to 10 seconds")
    if settings.record_capacity < 1:
        found.append(f"record_capacity={settings.record_capacity} must be at least 1")
    return found

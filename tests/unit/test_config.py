"""Settings are read once, and everything that is wrong with them is said at once."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvxfer.config import UPSTREAM_IGNORED, Settings, settings_from
from kvxfer.errors import ConfigError


def refused(extra, environment=None) -> str:
    with pytest.raises(ConfigError) as raised:
        settings_from(extra, environment or {})
    return str(raised.value)


def test_the_defaults_are_sound() -> None:
    assert settings_from({}, {}) == (Settings(), [])


def test_every_setting_reaches_its_place() -> None:
    extra = {
        "backend": "UCX",
        "backend_options": {"a": "b"},
        "rails": ["rdmap85s0", "0000:56:00.0"],
        "rails_policy": "enforce",
        "control_host": "::1",
        "control_port": 7000,
        "advertise_host": "host",
        "secret_file": "/run/secrets/kvxfer",
        "model_id": "m",
        "stream": False,
        "block_major": False,
        "peers": ["10.0.0.1:5600"],
        "leg_timeout": 11,
        "hold_limit": 99.0,
        "pull_lease": 12.5,
        "connect_timeout": 3.0,
        "heartbeat_interval": 0.5,
        "peer_timeout": 6.0,
        "post_lease": 3.0,
        "drain_bound": 1.0,
        "pin_limit": 0.25,
        "transfer_limit": 60.0,
        "staging_bytes": 1 << 20,
        "revoke": False,
        "mover_timeout": 15.0,
        "idle_wait": 0.2,
        "poll_interval": 0.001,
        "record_capacity": 5,
        "records_dir": "/var/log/kvxfer",
        "spans": True,
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": "auto",
        "decoder_kv_blocks_ttl": 100.0,
        "decoder_kv_idle_ttl": 10.0,
        "reuse_pin_limit": 0.125,
        "reuse_timeout": 0.5,
    }
    assert set(extra) == set(Settings.__struct_fields__), "a setting is not tested"
    settings, _ = settings_from(extra, {})
    assert msgspec.to_builtins(settings) == extra
    assert (settings.timing.interval, settings.timing.timeout, settings.timing.lease) == (0.5, 6.0, 3.0)


def test_upstreams_keys_are_accepted_and_named() -> None:
    settings, ignored = settings_from(dict.fromkeys(UPSTREAM_IGNORED, 1) | {"backends": ["UCX"]}, {})
    assert settings.backend == "UCX"
    assert set(ignored) == UPSTREAM_IGNORED


def test_our_backend_wins_over_upstreams_in_either_order() -> None:
    for extra in ({"backend": "LIBFABRIC", "backends": ["UCX"]}, {"backends": ["UCX"], "backend": "LIBFABRIC"}):
        assert settings_from(extra, {})[0].backend == "LIBFABRIC"


def test_the_address_falls_back_to_upstreams_environment_and_is_overridden_by_ours() -> None:
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"}
    settings, _ = settings_from({}, environment)
    assert (settings.control_host, settings.control_port) == ("10.0.0.7", 5700)
    settings, _ = settings_from({"control_host": "h", "control_port": 1}, environment)
    assert (settings.control_host, settings.control_port) == ("h", 1)


def test_the_process_environment_is_the_default(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5701")
    assert settings_from({})[0].control_port == 5701


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"leg_timout": 1}, "'leg_timout' is not a setting; did you mean 'leg_timeout'?"),
        ({"zzz": 1}, "'zzz' is not a setting, see docs/settings.md"),
        ({"backends": "UCX"}, "backends='UCX' must be a list of one NIXL backend"),
        ({"backends": ["UCX", "GDS"]}, "must be a list of one NIXL backend"),
        ({"backends": [5]}, "$.backend"),
        ({"backend": "POSIX"}, "backend='POSIX' must be LIBFABRIC or UCX"),
        ({"rails": "near"}, 'rails=\'near\' must be "local", "all", or a list of names or PCI addresses'),
        ({"rails": []}, "rails=[] names no EFA device"),
        ({"rails": 5}, "$.rails"),
        ({"rails_policy": "hope"}, "rails_policy='hope' must be warn or enforce"),
        ({"stream": "yes"}, "$.stream"),
        ({"control_port": 0}, "control_port=0 must be from 1 to 65535"),
        ({"control_port": 65536}, "control_port=65536"),
        ({"control_port": "5600"}, "$.control_port"),
        ({"leg_timeout": 0}, "leg_timeout=0 must be above 0"),
        ({"leg_timeout": float("nan")}, "leg_timeout=nan must be above 0"),
        ({"leg_timeout": 7200.0}, "leg_timeout=7200 must be 3,600 seconds at most"),
        ({"pull_lease": float("nan")}, "pull_lease=nan must be above 0"),
        ({"pull_lease": 2e6}, "pull_lease=2e+06 must be 1,000,000 seconds at most"),
        ({"decoder_kv_idle_ttl": float("inf")}, "decoder_kv_idle_ttl=inf must be 1,000,000 seconds at most"),
        ({"post_lease": 2e6}, "post_lease=2e+06 must be 1,000,000 seconds at most"),
        ({"peer_timeout": float("inf")}, "peer_timeout=inf must be 1,000,000 seconds at most"),
        ({"connect_timeout": -1.0}, "connect_timeout=-1 must be above 0"),
        ({"drain_bound": 0.0}, "drain_bound=0"),
        ({"poll_interval": 0.0}, "poll_interval=0"),
        ({"pull_lease": 0.0}, "pull_lease=0"),
        ({"pull_lease": 0.5}, "pull_lease=0.5 must be above 1"),
        ({"record_capacity": 0}, "record_capacity=0 must be at least 1"),
        ({"kv_recompute_threshold": -1}, "kv_recompute_threshold=-1 must be a number of tokens"),
        ({"kv_recompute_threshold": "some"}, "kv_recompute_threshold='some' must be a number of tokens, or \"auto\""),
        ({"decoder_kv_idle_ttl": 2.0}, "decoder_kv_idle_ttl=2 must be above 2"),
        ({"decoder_kv_blocks_ttl": 0.0}, "decoder_kv_blocks_ttl=0 must be above 0"),
        ({"reuse_timeout": 0.0}, "reuse_timeout=0 must be above 0"),
        ({"reuse_pin_limit": 1.5}, "reuse_pin_limit=1.5 must be from 0 to 1"),
        ({"heartbeat_interval": 0}, "heartbeat_interval=0 must be above 0"),
        ({"heartbeat_interval": 3.0}, "post_lease=4"),
        ({"peer_timeout": 1.0}, "peer_timeout=1"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(extra, text) -> None:
    message = refused(extra)
    assert message.startswith("kv_connector_extra_config: ")
    assert text in message


def test_a_port_in_the_environment_that_is_none_is_named() -> None:
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT='http' is not a port" in refused({}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "http"})


def test_all_problems_of_all_kinds_are_told_at_once() -> None:
    message = refused({"nonsense": 1, "stream": "yes", "backend_options": 5, "leg_timeout": -1, "record_capacity": 0})
    for part in ("'nonsense'", "$.stream", "$.backend_options", "leg_timeout=-1", "record_capacity=0"):
        assert part in message


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        (["10.0.0.1"], "peers: "),
        (["10.0.0.1:x"], "peers: "),
        (["0.0.0.0:5600"], "peers: '0.0.0.0:5600' names no host"),
        (["[::]:5600"], r"peers: '\[::\]:5600' names no host"),
        (["a b:1"], "peers: "),
        ("10.0.0.1:5600", "peers"),
    ],
)
def test_peers_that_cannot_be_reached_are_refused(peers, why) -> None:
    assert re.search(why, refused({"peers": peers}))


def test_peers_are_addresses() -> None:
    settings, _ = settings_from({"peers": ["10.0.0.1:5600", "[fd00::1]:5601"]}, {})
    assert settings.peer_addresses == [("10.0.0.1", 5600), ("fd00::1", 5601)]

import json
import sys
from pathlib import Path

import pytest

from kvxfer.bench.engines import (
    EngineSpec,
    engine_command,
    engine_environment,
    kv_transfer_config,
    make_pair,
    make_router,
    pair_specs,
)
from kvxfer.bench.idle import CHOICES, spec_for
from kvxfer.errors import ConfigError

MODEL = Path("/models/m")


def options(command):
    """The options behind ``-m module``, each with its value, or True where the next word is another option."""
    words = command[3:]
    return {
        word: words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else True
        for i, word in enumerate(words)
        if word.startswith("--")
    }


def test_an_engine_alone_has_no_connector():
    command = engine_command(EngineSpec(name="reference", model=MODEL), 8000, 9000)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert options(command) == {
        "--model": "/models/m", "--served-model-name": "kvxfer-bench", "--host": "127.0.0.1", "--port": "8000",
        "--dtype": "float32", "--enforce-eager": True, "--block-size": "32", "--max-num-batched-tokens": "2048",
        "--tensor-parallel-size": "1", "--seed": "0", "--no-enable-prefix-caching": True,
    }  # fmt: skip


def test_every_setting_of_a_spec_reaches_the_command_line():
    spec = EngineSpec(
        name="x", model=MODEL, python="/other/bin/python", block_size=128, num_blocks=40, prefix_caching=True,
        max_num_batched_tokens=512, max_model_len=4096, tensor_parallel=2, dtype="bfloat16",
        args=("--max-num-seqs", "3"),
    )  # fmt: skip
    command = engine_command(spec, 1, 2)
    assert command[0] == "/other/bin/python"
    expected = {
        "--block-size": "128", "--num-gpu-blocks-override": "40", "--enable-prefix-caching": True,
        "--max-num-batched-tokens": "512", "--max-model-len": "4096", "--tensor-parallel-size": "2",
        "--dtype": "bfloat16", "--max-num-seqs": "3",
    }  # fmt: skip
    assert expected.items() <= options(command).items()
    assert "--no-enable-prefix-caching" not in command


@pytest.mark.parametrize(("mode", "name"), [("push", "KvxferPushConnector"), ("pull", "KvxferPullConnector")])
def test_a_pair_differs_in_role_name_and_ports_only(tmp_path, mode, name):
    prefill, decode, router = make_pair(mode, *pair_specs(mode, MODEL), tmp_path)
    configs = [json.loads(options(engine.server.command)["--kv-transfer-config"]) for engine in (prefill, decode)]
    assert configs == [
        {
            "kv_connector": name,
            "kv_connector_module_path": "kvxfer.connector",
            "kv_role": role,
            "engine_id": f"{mode}-{kind}",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"control_host": "127.0.0.1", "control_port": engine.control_port},
        }
        for engine, role, kind in ((prefill, "kv_producer", "prefill"), (decode, "kv_consumer", "decode"))
    ]
    ports = [prefill.port, prefill.control_port, decode.port, decode.control_port, int(router.url.rpartition(":")[2])]
    assert len(set(ports)) == 5
    assert router.command[:4] == [sys.executable, "-m", "kvxfer.cli", "router"]
    assert options(router.command) == {
        "--mode": mode, "--host": "127.0.0.1", "--port": str(ports[4]), "--prefill": prefill.url, "--decode": decode.url,
    }  # fmt: skip
    assert {server.log.parent for server in (prefill.server, decode.server, router)} == {tmp_path}


def test_a_pairs_router_is_given_as_long_as_its_engines(tmp_path):
    """It is ready once they are: two engines that may take longer than a router of its own would be failed by it."""
    specs = pair_specs("push", MODEL, ready_seconds=900.0)
    assert make_pair("push", *specs, tmp_path)[2].ready_seconds == 900.0
    assert make_pair("push", *pair_specs("push", MODEL, ready_seconds=1.0), tmp_path)[2].ready_seconds >= 300.0


def test_a_router_takes_any_number_of_engines(tmp_path):
    command = make_router(
        "push", ["http://a", "http://b"], ["http://c"], tmp_path, args=("--log-level", "debug")
    ).command
    assert [command[i + 1] for i, word in enumerate(command) if word == "--prefill"] == ["http://a", "http://b"]
    assert command[-2:] == ["--log-level", "debug"]


def test_connector_settings_of_the_spec_win():
    spec = EngineSpec(
        name="d", model=MODEL, role="decode", connector="KvxferPushConnector",
        connector_config={"control_host": "0.0.0.0", "leg_timeout": 3.0}, load_failure_policy="recompute",
    )  # fmt: skip
    config = kv_transfer_config(spec, 7)
    assert config["kv_connector_extra_config"] == {"control_host": "0.0.0.0", "control_port": 7, "leg_timeout": 3.0}
    assert config["kv_load_failure_policy"] == "recompute"


def test_the_environment_is_the_base_plus_what_is_needed_plus_the_specs_own():
    spec = EngineSpec(name="x", model=MODEL, kv_cache_gib=3, environment={"OMP_WAIT_POLICY": "active", "MINE": "1"})
    environment = engine_environment(spec, 9, {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "40"})
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
    assert (environment["OMP_WAIT_POLICY"], environment["MINE"]) == ("active", "1")
    assert not any("NIXL" in name or name.startswith("FI_") for name in environment)


def test_a_number_of_threads_replaces_the_binding():
    environment = engine_environment(EngineSpec(name="x", model=MODEL, threads=1), 9, {})
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")


def test_upstreams_connectors_get_what_they_read():
    spec = spec_for("upstream-pull", MODEL, "python")
    assert kv_transfer_config(spec, 5)["kv_connector"] == "NixlPullConnector"
    assert kv_transfer_config(spec, 5)["kv_connector_extra_config"] == {"backends": ["LIBFABRIC"]}
    environment = engine_environment(spec, 5, {})
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5"
    assert environment["FI_PROVIDER"] == "tcp"
    assert engine_environment(spec, 5, {"FI_PROVIDER": "efa"})["FI_PROVIDER"] == "efa"


@pytest.mark.parametrize("change", [{"role": "decode"}, {"connector": "KvxferPushConnector"}, {"block_size": 16}])
def test_specs_that_cannot_work_are_refused(change):
    with pytest.raises(ConfigError, match="engine x"):
        EngineSpec(name="x", model=MODEL, **change)


def test_idle_knows_its_connectors_and_they_differ_only_in_that():
    assert CHOICES == ("none", "push", "pull", "upstream-push", "upstream-pull")
    commands = []
    for choice in CHOICES:
        words = options(engine_command(spec_for(choice, MODEL, "python"), 1, 2))
        commands.append({key: value for key, value in words.items() if key != "--kv-transfer-config"})
    assert all(command == commands[0] for command in commands)
    with pytest.raises(ConfigError, match="none of none, push"):
        spec_for("upstream-none", MODEL, "python")

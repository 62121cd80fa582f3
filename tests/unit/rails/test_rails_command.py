"""``kvxfer rails`` and scripts/check_rails.sh: what they print, and the exit status that others build on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import topologies as make
from logs import Process, interleave
from typer.testing import CliRunner

from kvxfer import cli

ROOT = Path(__file__).parents[3]
TCP = Path(__file__).with_name("nixl-1.4.1-tcp.txt")
P5EN_RAILS = [f"rdmap{bus}s0" for first in (0x55, 0x6E, 0x87, 0xA0) for bus in range(first, first + 4)]
P5EN_GPUS = [0x59, 0x5A, 0x72, 0x73, 0x8B, 0x8C, 0xA4, 0xA5]


@pytest.fixture(autouse=True, scope="module")
def commands():
    if not cli.app.registered_commands:
        cli._register_commands()


@pytest.fixture(scope="module")
def xml(tmp_path_factory):
    """Return a function that writes a topology as XML once."""
    folder = tmp_path_factory.mktemp("xml")

    def path(name: str) -> str:
        file = folder / f"{name}.48xlarge.xml"
        return str(file if file.exists() else make.write_hwloc(getattr(make, name)(), file))

    return path


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["rails", *arguments])


def script(*arguments: str):
    environment = {**os.environ, "KVXFER_VENV": sys.prefix}
    command = ["bash", str(ROOT / "scripts/check_rails.sh"), *arguments]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)


def server(wrong: dict[int, list[str]] | None = None) -> list[Process]:
    processes = []
    for index, bus in enumerate(P5EN_GPUS):
        rails = (wrong or {}).get(index, P5EN_RAILS[2 * index : 2 * index + 2])
        process = Process(thread=100 + index, prefix=f"(Worker_TP{index} pid={900 + index}) ").create(P5EN_RAILS)
        processes.append(process.map(f"0000:{bus:02x}:00.0", rails))
    return processes


# --- the script -------------------------------------------------------------------------------------------------------


def test_all_local(xml, tmp_path) -> None:
    log = tmp_path / "L"
    log.write_text(interleave(*server()))
    done = script("--topology", xml("p5en"), "--log", str(log))
    assert (done.returncode, done.stderr) == (0, "")
    assert "as expected" in done.stdout
    assert "cuda 0 (0000:59:00.0) → rdmap85s0 (0000:55:00.0), rdmap86s0 (0000:56:00.0)" in done.stdout


def test_one_gpu_on_a_far_rail(xml, tmp_path) -> None:
    log = tmp_path / "L"
    log.write_text(interleave(*server({3: ["rdmap112s0", "rdmap85s0"]})))
    done = script("--topology", xml("p5en"), "--log", str(log), "--json")
    assert done.returncode == 1
    far = json.loads(done.stdout)["violations"][0]
    assert (far["kind"], far["device"]) == ("far rail", "cuda 3 (0000:73:00.0)")
    number = int(far["line"].split(":")[1])
    assert "mapped to rail" in log.read_text().splitlines()[number - 1]
    assert "rdmap85s0-rdm" in log.read_text().splitlines()[number - 1]


def test_log_level_too_low(xml, tmp_path) -> None:
    log = tmp_path / "L"
    log.write_text("I1129 23:29:57.000001    4711 libfabric_topology.cpp:137] Discovered 16 EFA devices\n")
    done = script("--topology", xml("p5en"), "--log", str(log))
    assert done.returncode == 2
    assert "NIXL_LOG_LEVEL=DEBUG" in done.stdout


def test_no_environment_is_not_a_violation(tmp_path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/check_rails.sh")],
        check=False,
        env={**os.environ, "KVXFER_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "setup_env.sh" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_a_terminal_cannot_show_is_no_violation(xml, tmp_path, encoding, options) -> None:
    """Neither the arrows of the tree, nor a path in bytes that are no text."""
    strange = os.fsencode(tmp_path) + b"/\xff.xml"
    Path(os.fsdecode(strange)).write_bytes(Path(xml("p5en")).read_bytes())
    environment = {**os.environ, "KVXFER_VENV": sys.prefix, "PYTHONIOENCODING": encoding}
    command = ["bash", str(ROOT / "scripts/check_rails.sh"), "--topology", strange, *options]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"rdmap85s0" in done.stdout


def test_a_reader_that_leaves_does_not_change_the_status(xml) -> None:
    """Its end of the pipe is closed before anything is printed."""
    read, write = os.pipe()
    os.close(read)
    try:
        command = ["bash", str(ROOT / "scripts/check_rails.sh"), "--topology", xml("p5en")]
        environment = {**os.environ, "KVXFER_VENV": sys.prefix}
        done = subprocess.run(
            command, check=False, env=environment, stdout=write, stderr=subprocess.PIPE, timeout=100, text=True
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_by_a_link_from_elsewhere(xml, tmp_path) -> None:
    link = tmp_path / "check_rails"
    link.symlink_to(ROOT / "scripts/check_rails.sh")
    environment = {**os.environ, "KVXFER_VENV": sys.prefix}
    environment.pop("PYTHONPATH", None)
    command = ["bash", str(link), "--topology", xml("p5en")]
    done = subprocess.run(
        command, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, "as expected" in done.stdout) == (0, True)


def test_a_python_that_kvxfer_does_not_run_on_is_not_a_violation(tmp_path) -> None:
    """It has the packages, and no kvxfer of its: as one that is too old, whose syntax error would end it with status 1."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$2" in *kvxfer*) exit 1;; esac\ncase "$1" in -c) exit 0;; esac\nexit 1\n')
    python.chmod(0o755)
    environment = {**os.environ, "KVXFER_VENV": str(tmp_path)}
    command = ["bash", str(ROOT / "scripts/check_rails.sh")]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "KVXFER_VENV" in done.stderr) == (2, True)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p5en", "p5", "p4d", "p6_b200", "trn1", "trn1n", "trn2", "trn3"])
def test_a_topology_in_order(xml, name) -> None:
    assert run("--topology", xml(name)).exit_code == 0


def test_the_json_of_a_device(xml) -> None:
    result = run("--topology", xml("p5en"), "--instance-type", "p5en.48xlarge", "--json")
    out = json.loads(result.stdout)
    first = out["devices"][0]
    assert {name: first[name] for name in ("kind", "index", "pci", "rails", "source")} == {
        "kind": "cuda",
        "index": 0,
        "pci": "0000:59:00.0",
        "rails": [{"pci": "0000:55:00.0", "name": "rdmap85s0"}, {"pci": "0000:56:00.0", "name": "rdmap86s0"}],
        "source": "pcie-switch",
    }
    assert first["fi_efa_iface"] == "rdmap85s0,rdmap86s0,rdmap87s0,rdmap88s0"
    assert first["nixl"]["rails"] == ["rdmap85s0", "rdmap86s0"]
    assert (len(out["devices"]), out["violations"], out["notes"], out["status"]) == (8, [], [], 0)


def test_a_type_that_is_not_the_machines(xml) -> None:
    out = json.loads(run("--topology", xml("p4d"), "--instance-type", "p5.48xlarge", "--json").stdout)
    assert "p5.48xlarge has 32 EFA devices, here are 4" in out["notes"]


def test_returning_all_devices(xml, tmp_path) -> None:
    log = tmp_path / "L"
    log.write_text(Process().create(P5EN_RAILS).all_devices("0000:59:00.0").map("0000:59:00.0", P5EN_RAILS).text())
    result = run("--topology", xml("p5en"), "--log", str(log))
    assert result.exit_code == 1
    assert "returning all devices" in result.stdout


def test_several_logs_behind_one_option(xml, tmp_path) -> None:
    paths = []
    for index, process in enumerate(server()):
        paths.append(tmp_path / f"{index}.log")
        paths[-1].write_text(process.text())
    assert run("--topology", xml("p5en"), "--log", *map(str, paths)).exit_code == 0
    short = run("--topology", xml("p5en"), "--log", *map(str, paths[1:]))
    assert short.exit_code == 1
    assert "rdmap85s0" in short.stdout


def test_logs_of_one_name_are_not_one_process(xml, tmp_path) -> None:
    """Two hosts' server.log, or two containers': threads and processes are numbered alike in both."""
    paths = []
    for number, gpu in ((1, 0), (2, 2)):
        path = tmp_path / f"host{number}/server.log"
        path.parent.mkdir()
        switch = P5EN_RAILS[2 * gpu : 2 * gpu + 4]
        process = Process().create(switch).map(f"0000:{P5EN_GPUS[gpu]:02x}:00.0", switch[:2])
        path.write_text(process.text())
        paths.append(str(path))
    together = run("--topology", xml("p5en"), "--log", *paths)
    assert (together.exit_code, "2 registrations of device memory, of 2 devices" in together.stdout) == (0, True)
    Path(paths[0]).write_text(Process().create(P5EN_RAILS[:4]).text())
    silent = run("--topology", xml("p5en"), "--log", *paths)
    assert silent.exit_code == 2
    assert f"{paths[0]}: thread 4711 opened rails, and no registration of it" in silent.stdout


def test_a_type_of_the_other_kind_is_refused(xml) -> None:
    for of, other in (("trn2", "p5en.48xlarge"), ("p5en", "trn2.48xlarge")):
        result = run("--topology", xml(of), "--instance-type", other)
        assert result.exit_code == 2
        assert f"--instance-type {other} has" in result.output


def test_a_genuine_tcp_log_with_and_without_asking_for_it(xml) -> None:
    assert run("--topology", xml("p5en"), "--log", str(TCP)).exit_code == 1
    assert run("--topology", xml("p5en"), "--log", str(TCP), "--provider", "tcp").exit_code == 0


def test_this_machine(tmp_path) -> None:
    root = make.write_sysfs(make.trn2("trn2.48xlarge"), tmp_path)
    result = run("--root", str(root), "--json")
    out = json.loads(result.stdout)
    assert result.exit_code == 0
    assert out["instance_type"] == "trn2.48xlarge"
    assert out["nixl"]["runtime"] == "NEURON"
    assert [one["fi_efa_iface"] for one in out["devices"]][:2] == ["rdmap201s0", "rdmap180s0"]


def test_a_machine_without_efa(tmp_path) -> None:
    assert run("--root", str(tmp_path)).exit_code == 1
    assert run("--root", str(tmp_path), "--provider", "tcp").exit_code == 0


def test_what_is_near_nothing_is_shown_too(tmp_path) -> None:
    """An EFA device on a NUMA node without a GPU, a GPU on one without an EFA device, a device that the container hides."""
    hidden = make.switch(0x78, 1, {0x82: (make.EFA, 0), 0x83: (make.EFA, 0)})
    topology = make.Topology([make.switch(0x46, 0, {0x50: (make.GPU, 0)}), hidden])
    next(one for one in topology.devices() if one.at.startswith("0000:83")).hidden = True
    result = run("--root", str(make.write_sysfs(topology, tmp_path)))
    assert result.exit_code == 1
    lines = [line.strip("│├└─ ") for line in result.stdout.splitlines()]
    assert lines[1:3] == [
        "no EFA device near",
        "cuda 0 (0000:50:00.0) → none  (pcie-switch: there is no EFA device on its NUMA node) [NIXL: grouping]",
    ]
    assert lines[3:6] == ["no accelerator near", "rdmap130s0 (0000:82:00.0)", "rdmap131s0 (0000:83:00.0), hidden"]
    assert "no device files here for 0000:83:00.0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--topology", "/nowhere.xml"], "cannot be read"),
        (["--log", "/nowhere.log"], "cannot be read"),
        (["--instance-type", "p9.huge"], "known are trn1.32xlarge"),
        (["--provider", "verbs"], "must be efa or tcp"),
        (["stray.log"], "logs come after --log"),
        (["--topology", "/x.xml", "--watch", "1"], "does not go with --topology"),
        (["--watch", "inf"], "--watch"),
        (["--watch", "nan"], "--watch"),
        (["--watch", "0"], "--watch"),
    ],
)
def test_what_cannot_be_judged(arguments, why) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert why in result.output


def test_a_defect_of_ours_is_not_a_violation(monkeypatch) -> None:
    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr("kvxfer.rails.local.place", fail)
    assert run().exit_code == 2


def test_watching_the_counters(tmp_path, monkeypatch) -> None:
    root = make.write_sysfs(make.trn2("trn2.48xlarge"), tmp_path)

    def count(rail: str, value: int) -> None:
        folder = root / f"sys/class/infiniband/{rail}/ports/1/hw_counters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tx_bytes").write_text(str(value))

    def traffic(seconds: float) -> None:
        assert seconds == 3
        count("rdmap201s0", 1300)
        count("rdmap202s0", 1100)

    count("rdmap201s0", 1000)
    count("rdmap202s0", 1000)
    monkeypatch.setattr("kvxfer.rails.command.time.sleep", traffic)
    result = run("--root", str(root), "--watch", "3", "--json")
    assert result.exit_code == 0
    assert [(one["name"], one["share"], one["tx_bytes"]) for one in json.loads(result.stdout)["traffic"]] == [
        ("rdmap201s0", 0.75, 300),
        ("rdmap202s0", 0.25, 100),
    ]
    monkeypatch.setattr("kvxfer.rails.command.time.sleep", lambda seconds: None)
    quiet = run("--root", str(root), "--watch", "3")
    assert quiet.exit_code == 2
    assert "nothing moved" in quiet.stdout


def test_watching_ends_early_with_what_was_read(tmp_path, monkeypatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    root = make.write_sysfs(make.trn2("trn2.48xlarge"), tmp_path)
    monkeypatch.setattr("kvxfer.rails.command.time.sleep", interrupted)
    result = run("--root", str(root), "--watch", "3600")
    assert (result.exit_code, "no rail has byte counters" in result.stdout) == (2, True)


def test_watching_without_counters(tmp_path, monkeypatch) -> None:
    root = make.write_sysfs(make.trn2("trn2.48xlarge"), tmp_path)
    monkeypatch.setattr("kvxfer.rails.command.time.sleep", lambda seconds: None)
    result = run("--root", str(root), "--watch", "1")
    assert (result.exit_code, "no rail has byte counters" in result.stdout) == (2, True)

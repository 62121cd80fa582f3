"""The worker's own check: what NIXL did against what was predicted for the rails that it was shown."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import topologies as make
from logs import MANAGER, TOPOLOGY, Process

from kvxfer.errors import ConfigError, RailsError
from kvxfer.rails import check as module
from kvxfer.rails.check import Outcome, RailsCheck, captured_stderr
from kvxfer.rails.hwloc import read_hwloc
from kvxfer.rails.pci import Address
from kvxfer.rails.policy import pin

TCP = Path(__file__).with_name("nixl-1.4.1-tcp.txt")


def at(text: str) -> Address:
    return Address.parse(text)


@pytest.fixture
def check(tmp_path):
    """Return a function that pins a process of one device, and makes its check."""

    def made(topology, device: str, setting="local", environment=None) -> RailsCheck:
        machine = read_hwloc(make.write_hwloc(topology, tmp_path / "x.xml"))
        decided = pin(machine, [at(device)], setting, environment or {})
        return RailsCheck(machine, [at(device)], decided.rails)

    return made


SWITCH = ["rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"]


def test_a_gpu_on_its_own_rails(check) -> None:
    process = Process().create(SWITCH).map("0000:5a:00.0", ["rdmap87s0", "rdmap88s0"])
    outcome = check(make.p5en(), "5a:00.0").compare(process.lines)
    assert outcome.result == "match"
    assert "cuda 1 (0000:5a:00.0) on rdmap87s0 (0000:57:00.0), rdmap88s0 (0000:58:00.0)" in outcome.text


@pytest.mark.parametrize("rails", [["rdmap85s0", "rdmap86s0"], ["rdmap87s0"], SWITCH, ["rdmap110s0"], ["rdmap999s0"]])
def test_a_gpu_on_any_other_rails(check, rails) -> None:
    process = Process().create(SWITCH).map("0000:5a:00.0", rails)
    outcome = check(make.p5en(), "5a:00.0").compare(process.lines)
    assert outcome.result == "mismatch"
    for word in ("cuda 1", "0000:5a:00.0", *rails, "rdmap87s0", "rdmap88s0"):
        assert word in outcome.text


def test_memory_of_another_gpu(check) -> None:
    process = Process().create(SWITCH).map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"])
    assert check(make.p5en(), "5a:00.0").compare(process.lines).result == "mismatch"


def test_a_neuron_device_on_its_rail_and_on_its_neighbours(check) -> None:
    right = Process().create(["rdmap201s0"]).map("0000:c9:00.0", ["rdmap201s0"])
    wrong = Process().create(["rdmap201s0", "rdmap202s0"]).map("0000:ca:00.0", ["rdmap202s0"])
    one = check(make.trn2(), "cc:00.0")
    assert one.compare(right.lines).result == "match"
    assert one.compare(wrong.lines).result == "mismatch"


def test_a_neuron_device_that_libnrt_does_not_know(check) -> None:
    rails = [f"rdmap{bus}s0" for bus in (0xC9, 0xCA)]
    process = Process().create(rails).all_devices("").map("", rails)
    outcome = check(make.trn2(), "cc:00.0", "all").compare(process.lines)
    assert outcome.result == "mismatch"
    assert "neuron 0 (0000:cc:00.0)" in outcome.text


def test_a_fallback_onto_the_one_rail_that_is_shown_is_no_mismatch(check) -> None:
    topology = make.trn2("trn2.48xlarge").without("0000:c9:00.0")
    process = Process().create(["rdmap202s0"]).all_devices("0000:c9:00.0")
    process.map("0000:c9:00.0", ["rdmap202s0"])
    assert check(topology, "cc:00.0").compare(process.lines).result == "match"


def test_a_preset_variable_is_what_is_expected(check) -> None:
    environment = {"FI_EFA_IFACE": "rdmap85s0,rdmap86s0"}
    process = Process().create(["rdmap85s0", "rdmap86s0"]).map("0000:59:00.0", ["rdmap85s0"])
    assert check(make.p5en(), "59:00.0", environment=environment).compare(process.lines).result == "match"


def test_tcp_is_a_mismatch(check) -> None:
    assert check(make.p5en(), "59:00.0").compare(TCP.read_text().splitlines()).result == "mismatch"


def test_device_memory_as_host_memory(check) -> None:
    text = "VRAM memory requested but provider does not support FI_HMEM - falling back to system memory registration"
    assert check(make.p5en(), "59:00.0").compare([text]).result == "mismatch"


@pytest.mark.parametrize("rails", [("rdmap85s0-rdm, rdmap86s0-rdm", "match"), ("rdmap85s0-rdm", "mismatch")])
def test_without_debug_the_announced_table_counts(check, rails) -> None:
    process = Process().say(TOPOLOGY, 285, f"Accelerator-PCI 0:59:00.0 → [{rails[0]}]")
    process.say(TOPOLOGY, 285, "Accelerator-PCI 0:5a:00.0 → [rdmap87s0-rdm]")
    process.say(MANAGER, 829, "Registered memory on 2 rails, mem_type=1 device=0")
    assert check(make.p5en(), "59:00.0").compare(process.lines).result == rails[1]


def test_without_debug_the_fallbacks_warning_counts(check) -> None:
    process = Process().all_devices("0000:59:00.0")
    process.say(MANAGER, 829, "Registered memory on 4 rails, mem_type=1 device=0")
    assert check(make.p5en(), "59:00.0").compare(process.lines).result == "mismatch"


def test_a_pin_that_came_too_late_is_told(check) -> None:
    """Where something else had started libfabric, every rail is open, and the memory may be where it should be all the same."""
    every = [f"rdmap{bus}s0" for first in (0x55, 0x6E, 0x87, 0xA0) for bus in range(first, first + 4)]
    process = Process().create(every).map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"])
    outcome = check(make.p5en(), "59:00.0").compare(process.lines)
    assert outcome.result == "match"
    assert "16 rails are open where 4 were to be" in outcome.text
    pinned = Process().create(SWITCH).map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"])
    assert "rails are open" not in check(make.p5en(), "59:00.0").compare(pinned.lines).text


@pytest.mark.parametrize("lines", [[], ["nothing of NIXL's"], Process().create(SWITCH).lines])
def test_untold(check, lines) -> None:
    outcome = check(make.p5en(), "59:00.0").compare(lines)
    assert outcome.result == "untold"
    assert "NIXL_LOG_LEVEL=DEBUG" in outcome.text


LOGGER = logging.getLogger("rails-check-test")


@pytest.mark.parametrize(
    ("result", "policy", "level"),
    [
        ("match", "warn", "INFO"),
        ("match", "enforce", "INFO"),
        ("mismatch", "warn", "WARNING"),
        ("untold", "warn", "INFO"),
        ("untold", "enforce", "WARNING"),
    ],
)
def test_what_is_said(caplog, result, policy, level) -> None:
    with caplog.at_level(logging.DEBUG, logger=LOGGER.name):
        Outcome(result, "rails: the text").settle(policy, LOGGER)
    assert [(record.levelname, record.message) for record in caplog.records] == [(level, "rails: the text")]


def test_enforce_refuses_a_mismatch() -> None:
    with pytest.raises(RailsError, match="rails: the text"):
        Outcome("mismatch", "rails: the text").settle("enforce", LOGGER)


def test_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="warn or enforce"):
        Outcome("match", "").settle("hope", LOGGER)


def test_stderr_is_taken_below_python_and_passed_on(capfd) -> None:
    with captured_stderr() as lines:
        os.write(2, b"native line\n")
        print("python line", file=sys.stderr)
        assert lines == []
    os.write(2, b"after\n")
    assert "native line" in lines
    assert capfd.readouterr().err.splitlines()[-1] == "after"


def test_stderr_is_restored_by_an_error(capfd) -> None:
    with pytest.raises(RuntimeError), captured_stderr() as lines:
        os.write(2, b"before it\n")
        raise RuntimeError
    assert lines == ["before it"]
    assert "before it" in capfd.readouterr().err


def test_what_a_library_says_before_it_ends_the_process_is_not_lost() -> None:
    program = (
        "import os\nfrom kvxfer.rails.check import captured_stderr\n"
        "with captured_stderr():\n    os.write(2, b'FI_EFA_IFACE is empty\\n')\n    os.abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr == "FI_EFA_IFACE is empty\n"


def test_a_process_that_is_started_meanwhile_keeps_a_stderr_that_arrives(monkeypatch, capfd) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    with captured_stderr() as lines:
        os.write(2, b"ours\n")
        child = subprocess.Popen(["sh", "-c", "read line; echo theirs >&2"], stdin=subprocess.PIPE)
    assert lines == ["ours"]
    assert child.stdin is not None
    child.stdin.write(b"go\n")
    child.stdin.close()
    child.wait()
    deadline, seen = time.monotonic() + 30, ""
    while "theirs" not in seen and time.monotonic() < deadline:
        seen += capfd.readouterr().err
        time.sleep(0.01)
    assert "theirs" in seen


def test_without_a_tee_nothing_is_read_and_nothing_is_lost(monkeypatch, capfd) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    with captured_stderr() as lines:
        os.write(2, b"native line\n")
    assert lines == []
    assert capfd.readouterr().err == "native line\n"


@pytest.mark.parametrize("lacking", ["room", "descriptor", "python's stderr"])
def test_where_nothing_can_be_read_along_the_worker_goes_on(monkeypatch, capfd, lacking) -> None:
    """A container with a read-only file system, a daemon whose stderr is closed."""

    def refuse(*arguments):
        raise OSError("no usable temporary directory" if lacking == "room" else "bad file descriptor")

    with monkeypatch.context() as patch:  # undone before pytest's own capture needs these
        if lacking == "room":
            patch.setattr(module.tempfile, "NamedTemporaryFile", refuse)
        elif lacking == "descriptor":
            patch.setattr(module.os, "dup", refuse)
        else:
            patch.setattr(module.sys, "stderr", None)
        with captured_stderr() as lines:
            os.write(2, b"native line\n")
    assert lines == []
    assert capfd.readouterr().err == "native line\n"

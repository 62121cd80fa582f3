"""The prediction, the pin and the judges against NIXL itself: its own code on machines that are not there.

hwloc reads the machine from an XML (HWLOC_XMLFILE), a libfabric of ours lists the EFA devices and opens what it is asked to
(fake_libfabric.c), libcuda and libnrt of ours say where memory is. What NIXL then groups, chooses and logs is its own. What this does
not show is that hardware, driver and libnrt answer so.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import topologies as make

from kvxfer.rails.check import RailsCheck
from kvxfer.rails.hwloc import read_hwloc
from kvxfer.rails.judge import judge_log
from kvxfer.rails.local import attached, place
from kvxfer.rails.nixl_log import NixlLog
from kvxfer.rails.pci import Address
from kvxfer.rails.policy import pin
from kvxfer.rails.predict import predict

HERE = Path(__file__).parent
COMPILER = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
RANDOM = 60


@pytest.fixture(scope="module")
def fakes(tmp_path_factory) -> dict[str, str]:
    """Compile the pretenders; returns the environment that makes NIXL take them."""
    pytest.importorskip("nixl")
    folder = tmp_path_factory.mktemp("fakes")
    from kvxfer.transport import native

    needed = native._find_plugin("LIBFABRIC").needed
    environment = {"LD_LIBRARY_PATH": str(folder), "HWLOC_XML_VERBOSE": "1"}
    for soname in (*needed, "libnrt.so.1"):
        stem = soname.partition(".so")[0]
        source = {
            "libfabric": "fake_libfabric.c",
            "libcuda": "fake_cuda.c",
            "libcudart": "fake_cuda.c",
            "libnrt": "fake_libnrt.c",
        }.get(stem)
        if source is None:
            continue
        command = [COMPILER, "-w", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", folder / soname, HERE / source]
        subprocess.run(command, check=True)
        environment[f"KVXFER_{stem.upper()}"] = str(folder / soname)
    return environment


@pytest.fixture
def nixl(fakes, tmp_path):
    """Return a function that runs cases (topology, rails shown, register, FAKE_ variables) in one process: their logs.

    ``worker`` (setting, policy, device) does each as a worker does it.
    """

    def run(cases, worker=None) -> list[tuple[object, list[str]]]:
        machines, lines = [], []
        for number, (topology, shown, register, more) in enumerate(cases):
            machine = read_hwloc(make.write_hwloc(topology, tmp_path / f"{number}.xml"))
            machines.append(machine)
            rails = machine.rails if shown is None else [rail for rail in machine.rails if rail.rail in shown]
            listed = ",".join(
                f"{rail.rail}-rdm={rail.where.domain}:{rail.where.bus}:{rail.where.device}.{rail.where.function}"
                for rail in rails
            )
            environment = {"HWLOC_XMLFILE": str(tmp_path / f"{number}.xml"), "FAKE_EFA": listed, **more}
            case = {"name": f"case-{number}", "environment": environment, "register": register}
            root = make.write_sysfs(topology, tmp_path / f"root-{number}") if worker else None
            lines.append(json.dumps({**case, "worker": [*worker, str(root)] if worker else None}))
        root = HERE.parents[2]
        level = "DEBUG" if any(register for _, _, register, _ in cases) else "INFO"  # which has the table of GPUs
        paths = f"{root}:{root / 'platforms'}:{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [sys.executable, str(HERE / "nixl_process.py")],
            input="\n".join(lines),
            env={
                **{key: value for key, value in os.environ.items() if not key.startswith("FI_")},
                **fakes,
                "PYTHONPATH": paths,
                "NIXL_LOG_LEVEL": level,
            },
            capture_output=True,
            text=True,
            errors="replace",
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        logs = re.split(r"^== case-\d+\n", done.stderr, flags=re.MULTILINE)[1:]
        assert len(logs) == len(machines), done.stderr[-2000:]
        return list(zip(machines, (log.splitlines() for log in logs), strict=True))

    return run


def read(lines) -> NixlLog:
    log = NixlLog()
    log.read("nixl", lines)
    return log


def hold(machine, shown, lines) -> None:
    """NIXL's own table is the predicted one: the same rails in the same order, and no entry for who gets every rail."""
    table = {Address.parse(at): rails for writer in read(lines).writers.values() for at, rails in writer.table.items()}
    rails = machine.rails if shown is None else [rail for rail in machine.rails if rail.rail in shown]
    prediction = predict(machine, rails, {})
    assert prediction.provider == "efa"
    for gpu in machine.gpus:
        choice = prediction.choices[gpu]
        predicted = tuple(rail.rail for rail in choice.rails) if choice.how == "grouping" else None
        assert table.pop(gpu.where, None) == predicted, str(gpu.where)
    assert table == {}


GROUPED = [
    make.p5en(), make.p5(), make.p4d(), make.p6_b200(), make.virtual_machine(gpus=4, efas=3), make.virtual_machine(gpus=2, efas=5),
    make.p5en().without("0000:58:00.0"), make.p5en().without("0000:55:00.0", "0000:56:00.0", "0000:57:00.0", "0000:58:00.0"),
]  # fmt: skip


def test_the_grouping_of_every_instance_type(nixl) -> None:
    cases = [(topology, None, False, {"FAKE_NO_RAILS": "1"}) for topology in GROUPED]
    for machine, lines in nixl(cases):
        hold(machine, None, lines)
        writer = next(iter(read(lines).writers.values()))
        assert writer.counts[0][0] == "efa"


def test_the_grouping_of_what_each_gpu_is_shown(nixl, tmp_path) -> None:
    """The pin of each GPU, and its own rails alone, which would be too few."""
    cases = []
    for topology in (make.p5en(), make.p4d(), make.p6_b200()):
        machine = read_hwloc(make.write_hwloc(topology, tmp_path / "machine.xml"))
        for one in place(machine):
            pinned = pin(machine, [one.node.where], "local", {}).rails
            shown = [{rail.rail for rail in rails} for rails in (pinned, one.rails)]
            cases += [(topology, names, False, {"FAKE_NO_RAILS": "1"}) for names in shown]
    for (machine, lines), (_, shown, _, _) in zip(nixl(cases), cases, strict=True):
        hold(machine, shown, lines)


def any_topology(seed: int) -> make.Topology:
    """Bridges in bridges, GPUs and EFA devices on any of them."""
    chance = random.Random(seed)
    buses = iter(range(1, 256))

    def bridge(at: str, depth: int) -> make.Bridge:
        first = last = next(buses)
        children = []
        for slot in range(chance.randint(1, 4)):
            at_slot = f"0000:{first:02x}:{slot:02x}.0"
            if depth and chance.random() < 0.4:
                children.append(below := bridge(at_slot, depth - 1))
                last = below.buses[1]
            else:
                children.append(make.device(chance.choice([make.GPU, make.EFA]), at_slot))
        return make.Bridge(at, (first, last), children)

    hosts = [make.root_bus(0, 0, [make.device(make.GPU, "00:1e.0"), make.device(make.EFA, "00:1f.0")])]
    for _ in range(chance.randint(1, 4)):
        root = next(buses)
        below = bridge(f"0000:{root:02x}:00.0", 3)
        hosts.append(make.Host((root, below.buses[1]), chance.randint(0, 1), [below]))
    return make.Topology(hosts)


def test_the_grouping_of_any_tree(nixl) -> None:
    cases = [(any_topology(seed), None, False, {"FAKE_NO_RAILS": "1"}) for seed in range(RANDOM)]
    gpus = 0
    for machine, lines in nixl(cases):
        hold(machine, None, lines)
        gpus += len(machine.gpus)
    assert gpus > RANDOM


def test_a_registration_on_cuda_is_read_and_judged(nixl) -> None:
    switch = {"rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"}
    gpu = Address.parse("59:00.0")
    cases = [
        (make.p5en(), shown, True, {"FAKE_GPU": str(gpu)})
        for shown in (switch, {"rdmap85s0", "rdmap86s0"}, {"rdmap110s0"}, {"rdmap87s0"})
    ]
    pinned, pair, far, neighbour = nixl(cases)

    machine, lines = pinned
    verdict = judge_log(machine, place(machine), read(lines))
    assert (verdict.status, verdict.violations, verdict.reasons) == (0, [], [])
    decided = pin(machine, [gpu], "local", {})
    assert RailsCheck(machine, [gpu], decided.rails).compare(lines).result == "match"

    machine, lines = pair  # its own pair alone: NIXL gives the GPU one, and the other one lies idle
    assert [one.kind for one in judge_log(machine, place(machine), read(lines)).violations] == [
        "missing rail",
        "unused rail",
    ]

    machine, lines = far
    kinds = [one.kind for one in judge_log(machine, place(machine), read(lines)).violations]
    assert kinds == ["fallback", "far rail"]
    assert RailsCheck(machine, [gpu], decided.rails).compare(lines).result == "mismatch"

    machine, lines = neighbour
    assert [one.kind for one in judge_log(machine, place(machine), read(lines)).violations] == ["wrong rail"]


def test_a_registration_on_neuron_is_read_and_judged(nixl) -> None:
    """As libnrt answers by AWS's map; as it does not answer; and as it names a device that the process is not shown."""
    device = Address.parse("cc:00.0")
    both = {"rdmap201s0", "rdmap202s0"}
    answers = {"FAKE_NRT": "0000:c9:00.0"}
    cases = [
        (make.trn2(), {"rdmap201s0"}, True, answers),
        (make.trn2(), both, True, answers),
        (make.trn2(), both, True, {}),
        (make.trn2(), {"rdmap202s0"}, True, answers),
    ]
    pinned, unpinned, silent, absent = nixl(cases)

    machine, lines = pinned
    verdict = judge_log(machine, place(machine), read(lines), devices=[device])
    assert (verdict.status, verdict.violations, verdict.reasons) == (0, [], [])
    decided = pin(machine, [device], "local", {})
    check = RailsCheck(machine, [device], decided.rails)
    assert check.compare(lines).result == "match"

    machine, lines = unpinned
    assert [one.kind for one in judge_log(machine, place(machine), read(lines)).violations] == ["unused rail"]

    machine, lines = silent
    assert [one.kind for one in judge_log(machine, place(machine), read(lines)).violations][:1] == ["fallback"]
    assert check.compare(lines).result == "mismatch"

    machine, lines = absent
    violations = judge_log(machine, place(machine), read(lines)).violations
    assert violations[0].kind == "fallback"
    assert "returning all devices" in violations[0].line

    for (machine, lines), rails in ((pinned, {"rdmap201s0"}), (unpinned, both), (absent, {"rdmap202s0"})):
        shown = [rail for rail in machine.rails if rail.rail in rails]
        placements = place(machine)
        choice = predict(machine, shown, attached(placements)).choices[placements[0].node]
        registrations = [one for writer in read(lines).writers.values() for one in writer.registrations]
        assert [set(one.rails) for one in registrations] == [{rail.rail for rail in choice.rails}]
        assert registrations[0].whole


def said(lines) -> list[str]:
    """What the worker said, and how loud."""
    return [line for line in lines if line.startswith(("INFO rails", "WARNING rails", "ERROR rails"))]


@pytest.mark.parametrize("device", ["0000:59:00.0", "0000:5a:00.0"])
def test_a_worker_pins_itself_and_nixl_does_as_predicted(nixl, device) -> None:
    """NIXL's own split of what a GPU is shown; the whole switch gives each GPU its pair."""
    ((machine, lines),) = nixl([(make.p5en(), None, True, {"FAKE_GPU": device})], worker=("local", "enforce", device))
    pinned, outcome = said(lines)
    assert pinned.startswith("INFO rails: FI_EFA_IFACE=rdmap85s0,rdmap86s0,rdmap87s0,rdmap88s0 (")
    placement = next(one for one in place(machine) if str(one.node.where) == device)
    assert outcome.startswith(f"INFO rails: {placement.name} on {placement.rails[0].rail} ")
    assert outcome.endswith("as expected (grouping)")
    (writer,) = (one for one in read(lines).writers.values() if one.created)
    assert len(writer.created) == 4, "the rails of other switches were opened"
    assert writer.mapped == {rail.rail for rail in placement.rails}


def test_a_worker_on_neuron_opens_one_rail_whatever_libnrt_says(nixl) -> None:
    """Even where libnrt names nothing, or another device, memory can only be on the rail that is shown."""
    answers = [{"FAKE_NRT": "0000:c9:00.0"}, {"FAKE_NRT": "0000:ca:00.0"}, {}]
    cases = [(make.trn2(), None, True, more) for more in answers]
    for _, lines in nixl(cases, worker=("local", "warn", "0000:cc:00.0")):
        pinned, outcome = said(lines)
        assert "FI_EFA_IFACE=rdmap201s0 (" in pinned
        (writer,) = (one for one in read(lines).writers.values() if one.created)
        assert [one.name for one in writer.created.values()] == ["rdmap201s0"]
        assert writer.mapped == {"rdmap201s0"}
        assert outcome.startswith("INFO rails: neuron 0")


def test_a_worker_whose_memory_is_anothers_is_refused(nixl) -> None:
    """A platform that names the wrong device, say: the log has the GPU whose memory it is."""
    ((_, lines),) = nixl(
        [(make.p5en(), None, True, {"FAKE_GPU": "0000:5a:00.0"})], worker=("local", "enforce", "0000:59:00.0")
    )
    assert said(lines)[-1].startswith("ERROR rails: device 0000:5a:00.0 is registered on rdmap87s0, rdmap88s0")

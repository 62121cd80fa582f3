"""A server's log held against the tables: every way of being wrong, and every way of not being able to tell."""

from __future__ import annotations

import functools
import json
import random
import re
import tempfile
from pathlib import Path

import pytest
import topologies as make
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import BACKEND, MANAGER, TOPOLOGY, Process, interleave

from kvxfer.rails.hwloc import read_hwloc
from kvxfer.rails.judge import judge_log
from kvxfer.rails.local import place
from kvxfer.rails.nixl_log import LEVEL, NixlLog
from kvxfer.rails.pci import Address

TCP = Path(__file__).with_name("nixl-1.4.1-tcp.txt")


@pytest.fixture(scope="module")
def p5en(tmp_path_factory):
    return read_hwloc(make.write_hwloc(make.p5en(), tmp_path_factory.mktemp("t") / "p5en.xml"))


@pytest.fixture(scope="module")
def trn2(tmp_path_factory):
    return read_hwloc(make.write_hwloc(make.trn2(), tmp_path_factory.mktemp("t") / "trn2.xml"))


def judge(machine, *texts: str, **options):
    log = NixlLog()
    for number, text in enumerate(texts):
        log.read(f"{number}.log", text.splitlines(keepends=True))
    return judge_log(machine, place(machine), log, **options)


def kinds(verdict) -> list[str]:
    return [one.kind for one in verdict.violations]


def names(machine) -> list[str]:
    return [rail.rail for rail in machine.rails]


def server(machine, skip=()) -> list[Process]:
    """One process a GPU, each with every rail, each registering two regions."""
    processes = []
    for one in place(machine):
        process = Process(thread=4000 + one.index).create(names(machine))
        for region in range(2):
            if one.index not in skip:
                process.queried(str(one.node.where), 0)
                process.map(
                    str(one.node.where), [rail.rail for rail in one.rails], memory=f"0x7f{one.index}{region}0000"
                )
        processes.append(process)
    return processes


# --- as it should be --------------------------------------------------------------------------------------------------


def test_a_server_with_every_gpu_on_its_own_rails(p5en) -> None:
    verdict = judge(p5en, *(process.text() for process in server(p5en)))
    assert (verdict.status, verdict.violations, verdict.reasons) == (0, [], [])


def test_the_same_in_one_interleaved_file(p5en) -> None:
    assert judge(p5en, interleave(*server(p5en))).status == 0


@pytest.mark.parametrize("seed", range(5))
def test_lines_that_ran_into_each_other(p5en, seed) -> None:
    """Two processes' writes may share a line: the newline of one comes late."""
    chance = random.Random(seed)
    text = interleave(*server(p5en))
    joined = "".join(line if chance.random() < 0.8 else line.rstrip("\n") for line in text.splitlines(keepends=True))
    assert judge(p5en, joined).status == 0


@pytest.mark.parametrize(
    "prefix",
    [
        "(Worker_TP0 pid=77) ",
        "2026-11-29T23:29:57Z host vllm[12]: ",
        "\x1b[1;36m(EngineCore_DP0 pid=9)\x1b[0;0m ",
        '{"log":"',
    ],
)
def test_what_loggers_put_before_a_line(p5en, prefix) -> None:
    process = Process(prefix=prefix).create(names(p5en))
    for one in place(p5en):
        process.map(str(one.node.where), [rail.rail for rail in one.rails])
    assert judge(p5en, process.text()).status == 0


@pytest.mark.parametrize(
    "prefix",
    [
        "prefill-{}  | (Worker_TP0 pid=7) ",
        "[pod/decode-{}/vllm] (Worker_TP0 pid=7) ",
        "(EngineCore_DP0 pid=1) (Worker_TP{} pid=1{}) ",
        "(EngineCore_DP0 pid=1) (RayWorkerWrapper pid=7, ip=10.0.0.{}) ",
    ],
)
def test_processes_are_told_apart_by_all_that_is_put_before_a_line(p5en, prefix) -> None:
    """Of two processes on two switches, each kept to its own, one registers nothing; the other does not speak for it."""
    both = [Process(7, prefix.replace("{}", str(n))).create(names(p5en)[4 * n : 4 * n + 4]) for n in range(2)]
    both[0].map("0000:59:00.0", names(p5en)[:2])
    log = NixlLog()
    log.read("L", interleave(*both).splitlines())
    assert len(log.writers) == 2
    verdict = judge(p5en, interleave(*both))
    assert (verdict.status, kinds(verdict)) == (2, [])


def test_lines_without_any_prefix(p5en) -> None:
    process = Process().create(names(p5en))
    for one in place(p5en):
        process.map(str(one.node.where), [rail.rail for rail in one.rails])
    bare = "".join(line.split("] ", 1)[1] + "\n" for line in process.lines)
    assert judge(p5en, bare).status == 0


def test_names_with_and_without_the_endpoint_type(p5en) -> None:
    for suffix in ("", "-rdm", "-dgrm"):
        process = Process(suffix=suffix).create(names(p5en)[:4])
        process.map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"]).map("0000:5a:00.0", ["rdmap87s0", "rdmap88s0"])
        assert judge(p5en, process.text()).status == 0


def test_the_older_texts(p5en) -> None:
    process = Process()
    for index, name in enumerate(names(p5en)[:4]):
        process.say(MANAGER, 1, f"Created data rail {index} (device={name}-rdm, provider=efa)")
    for gpu, pair in (("0000:59:00.0", ("rdmap85s0", "rdmap86s0")), ("0000:5a:00.0", ("rdmap87s0", "rdmap88s0"))):
        for index, name in enumerate(pair):
            process.say(
                MANAGER, 2, f"VRAM memory 0x7f00 on GPU-PCI {gpu} mapped to rail {index} (EFA device={name}-rdm)"
            )
        process.say(MANAGER, 3, f"VRAM memory 0x7f00 on GPU-PCI {gpu} will use 2 rails total")
    assert judge(p5en, process.text()).status == 0


def test_a_gpu_kept_to_its_switch_leaves_its_neighbours_rails_alone(p5en) -> None:
    """rails=local shows four, and NIXL gives two: the other two are open by design."""
    process = Process().create(["rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"])
    assert judge(p5en, process.map("0000:5a:00.0", ["rdmap87s0", "rdmap88s0"]).text()).status == 0


def test_a_gpu_alone_with_one_of_its_rails_shown(p5en) -> None:
    """The operator showed no more: NIXL did what it could."""
    process = Process().create(["rdmap85s0"]).map("0000:59:00.0", ["rdmap85s0"])
    assert judge(p5en, process.text()).status == 0


def test_neuron_workers_pinned_to_one_rail_each(trn2) -> None:
    texts = []
    for one in place(trn2):
        efa = one.rails[0]
        process = Process(thread=9000 + one.index).create([efa.rail])
        process.queried(str(efa.where), 0, "Neuron device").map(str(efa.where), [efa.rail])
        texts.append(process.text())
    assert judge(trn2, *texts).status == 0


def test_agent_and_registration_on_two_threads(p5en) -> None:
    opened = Process(thread=1).create(names(p5en))
    placed = Process(thread=2)
    placed.rails = opened.rails
    for one in place(p5en):
        placed.map(str(one.node.where), [rail.rail for rail in one.rails])
    assert judge(p5en, opened.text() + placed.text()).status == 0


def test_a_pinned_gpu_whose_agent_and_registration_are_on_two_threads(p5en) -> None:
    opened = Process(thread=1).create(["rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"])
    placed = Process(thread=2)
    placed.rails = opened.rails
    placed.map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"])
    assert judge(p5en, interleave(opened, placed)).status == 0


# --- violations -------------------------------------------------------------------------------------------------------


def test_one_gpu_on_a_far_rail_and_its_line(p5en) -> None:
    processes = server(p5en, skip={3})
    processes[3].map("0000:73:00.0", ["rdmap135s0", "rdmap113s0"])
    processes[2].map("0000:72:00.0", ["rdmap112s0"], memory="0xdead")  # so that no rail is unused
    texts = [process.text() for process in processes]
    verdict = judge(p5en, *texts)
    assert verdict.status == 1
    far = next(one for one in verdict.violations if one.kind == "far rail")
    assert far.device == "cuda 3 (0000:73:00.0)"
    assert far.expected == ("rdmap112s0", "rdmap113s0")
    assert far.actual == ("rdmap113s0", "rdmap135s0")
    number = next(
        i for i, line in enumerate(texts[3].splitlines(), 1) if "rdmap135s0-rdm)" in line and "mapped" in line
    )
    assert far.line.startswith(f"3.log:{number}: VRAM memory")
    assert "mapped to rail" in far.line


def test_a_neighbours_rail_of_the_same_switch(p5en) -> None:
    process = Process().create(names(p5en)[:4]).map("0000:59:00.0", ["rdmap85s0", "rdmap87s0"])
    assert kinds(judge(p5en, process.text()))[0] == "wrong rail"


def test_one_of_two_local_rails_is_left_out(p5en) -> None:
    processes = server(p5en, skip={0})
    processes[0].map("0000:59:00.0", ["rdmap85s0"])
    verdict = judge(p5en, *(process.text() for process in processes))
    assert verdict.status == 1
    assert "missing rail" in kinds(verdict)
    assert "unused rail" in kinds(verdict)


def test_a_rail_that_was_created_and_never_mapped(p5en) -> None:
    verdict = judge(p5en, *(process.text() for process in server(p5en, skip=())[:7]))
    assert (verdict.status, set(kinds(verdict))) == (1, {"unused rail"})
    assert verdict.violations[0].actual == ("rdmap162s0", "rdmap163s0")
    assert "Created rail" in verdict.violations[0].line


def test_a_neuron_worker_that_opens_all_rails(trn2) -> None:
    process = Process().create(names(trn2)).map("0000:c9:00.0", ["rdmap201s0"])
    verdict = judge(trn2, process.text())
    assert (verdict.status, kinds(verdict)) == (1, ["unused rail"])
    assert len(verdict.violations[0].actual) == 15
    assert "FI_EFA_IFACE" in str(verdict.violations[0])


def test_returning_all_devices(p5en) -> None:
    process = Process().create(names(p5en))
    process.all_devices("0000:59:00.0").map("0000:59:00.0", names(p5en))
    verdict = judge(p5en, process.text())
    assert (verdict.status, kinds(verdict)) == (1, ["fallback", "far rail"])
    assert "returning all devices" in verdict.violations[0].line


def test_returning_all_devices_shows_at_any_log_level(p5en) -> None:
    verdict = judge(p5en, Process().all_devices("0000:59:00.0").text())
    assert (verdict.status, kinds(verdict)) == (1, ["fallback"])


def test_libnrt_does_not_answer(trn2) -> None:
    process = Process().create(names(trn2))
    process.say(BACKEND, 950, "Could not query EFA device from memory 0x7f1200000000", level="E")
    process.queried("", 0, "Neuron device").all_devices("").map("", names(trn2))
    verdict = judge(trn2, process.text())
    assert (verdict.status, kinds(verdict)) == (1, ["fallback", "fallback"])
    assert "libnrt" in str(verdict.violations[0])


@pytest.mark.parametrize(
    "text",
    [
        "VRAM memory requested but provider does not support FI_HMEM - falling back to system memory registration",
        "Topology-aware grouping failed, using fallback to use all available devices",
        "Using fallback: all accelerators will use all available EFA devices",
        "EFA device rdmap85s0-rdm not found in rail mapping for device PCI 0000:59:00.0",
        "No valid rail mapping found for device PCI 0000:59:00.0 (checked 2 EFA devices)",
        "No EFA devices found for PCI 0000:59:00.0",
        "Could not find hwloc object for PCIe address: 0:55:00.0",
    ],
)
def test_every_warning_of_a_fallback(p5en, text) -> None:
    processes = server(p5en)
    processes[5].say(TOPOLOGY, 1, text, level="W").say(TOPOLOGY, 1, text, level="W")
    verdict = judge(p5en, *(process.text() for process in processes))
    assert (verdict.status, kinds(verdict)) == (1, ["fallback"])
    assert "(2 times)" in verdict.violations[0].text
    assert text in verdict.violations[0].line


def test_an_efa_device_of_no_neuron_device(tmp_path) -> None:
    topology = make.trn2()
    topology.hosts.append(make.switch(0x10, 0, {0x20: (make.EFA, 0)}))
    machine = read_hwloc(make.write_hwloc(topology, tmp_path / "x.xml"))
    process = Process().create(["rdmap32s0"]).map("0000:20:00.0", ["rdmap32s0"])
    assert kinds(judge(machine, process.text())) == ["far rail"]


def test_the_other_devices_rail_shows_only_to_who_knows_the_device(trn2) -> None:
    process = Process().create(["rdmap202s0"]).map("0000:ca:00.0", ["rdmap202s0"])
    assert judge(trn2, process.text()).status == 0
    verdict = judge(trn2, process.text(), devices=[Address.parse("cc:00.0")])
    assert (verdict.status, kinds(verdict)) == (1, ["wrong rail"])


def test_memory_of_a_gpu_that_is_not_the_processs(p5en) -> None:
    process = Process().create(names(p5en)[:4]).map("0000:5a:00.0", ["rdmap87s0", "rdmap88s0"])
    assert kinds(judge(p5en, process.text(), devices=[Address.parse("59:00.0")])) == ["device"]


def test_tcp_in_place_of_efa(p5en) -> None:
    verdict = judge(p5en, Process().create(["eth0"], "tcp").text())
    assert (verdict.status, kinds(verdict)) == (1, ["provider"])


def test_tcp_in_place_of_efa_shows_without_debug(p5en) -> None:
    text = Process().say(TOPOLOGY, 142, "Discovered 1 tcp devices (TCP fallback)").text()
    assert kinds(judge(p5en, text)) == ["provider"]


def test_efa_in_place_of_tcp(p5en) -> None:
    assert kinds(judge(p5en, server(p5en)[0].text(), provider="tcp")) == ["provider"]


def test_a_violation_is_told_once_for_many_regions(p5en) -> None:
    process = Process().create(names(p5en)[:4])
    for region in range(64):
        process.map("0000:59:00.0", ["rdmap87s0", "rdmap88s0"], memory=f"0x7f{region:04x}")
    assert kinds(judge(p5en, process.text())).count("wrong rail") == 1


# --- could not tell ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "INFO 11-29 23:29:57 [core.py:93] Initializing a V1 LLM engine\n",
        Process()
        .say(TOPOLOGY, 137, "Discovered 16 EFA devices")
        .say(MANAGER, 232, "Created 16 rails using provider=efa")
        .text(),
        Process().say("nixl_agent.cpp", 462, "Created backend: LIBFABRIC").text(),
    ],
    ids=["empty", "not nixl's", "info level", "nixl's, but not of rails"],
)
def test_no_rail_lines_names_the_level_to_set(p5en, text) -> None:
    verdict = judge(p5en, text)
    assert (verdict.status, verdict.violations) == (2, [])
    assert "NIXL_LOG_LEVEL=DEBUG" in verdict.reasons[0]


def _at_info(process: Process) -> Process:
    process.lines = [
        line for line in process.lines if not re.search("Created rail |mapped to rail|will use|on rail ", line)
    ]
    return process


@pytest.mark.parametrize("kept", [True, False])
def test_one_process_with_a_lower_log_level_is_not_proven_by_the_others(p5en, kept) -> None:
    """Nor are the others' rails unused for want of its lines."""
    processes = []
    for one in place(p5en):
        shown = [rail.rail for rail in one.switch_rails] if kept else names(p5en)
        process = Process(thread=4000 + one.index).create(shown)
        processes.append(process.map(str(one.node.where), [rail.rail for rail in one.rails]))
    _at_info(processes[5])
    verdict = judge(p5en, interleave(*processes))
    assert (verdict.status, kinds(verdict)) == (2, [])
    assert [reason for reason in verdict.reasons if "thread 4005" in reason and LEVEL in reason]


def test_one_process_that_told_only_how_many_rails_it_opened(p5en) -> None:
    quiet = _at_info(Process(1).create(names(p5en)))
    verdict = judge(p5en, *(process.text() for process in server(p5en)), quiet.text())
    assert (verdict.status, kinds(verdict)) == (2, [])
    assert [reason for reason in verdict.reasons if "thread 1 opened rails" in reason and LEVEL in reason]


def test_a_log_that_ends_between_two_registrations(p5en) -> None:
    """The last process would use the rails that the others opened and left: nobody knows."""
    processes = server(p5en, skip=(7,))
    verdict = judge(p5en, interleave(*processes))
    assert (verdict.status, kinds(verdict)) == (2, [])
    assert [reason for reason in verdict.reasons if "thread 4007 opened rails" in reason]


def test_lines_that_ray_left_out(p5en) -> None:
    """Ray writes one of several lines that differ in numbers alone."""
    text = "".join(process.text() for process in server(p5en))
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if "mapped to rail" in line)
    lines[at] += " [repeated 7x across cluster] (Ray deduplicates logs by default.)"
    verdict = judge(p5en, "\n".join(lines))
    assert verdict.status == 2
    assert [reason for reason in verdict.reasons if "left out 7 lines" in reason and "RAY_DEDUP_LOGS=0" in reason]


def test_numbers_that_no_rail_has(p5en) -> None:
    text = "".join(process.text() for process in server(p5en))
    text += f"I1129 23:29:57.000001    4711 libfabric_rail_manager.cpp:359] Created rail {'9' * 5000} (device=x, provider=efa)\n"
    assert judge(p5en, text).status == 0


def test_lines_in_dockers_own_json(p5en) -> None:
    text = "".join(process.text() for process in server(p5en))
    lines = [json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in text.splitlines()]
    verdict = judge(p5en, "\n".join(lines))
    assert (verdict.status, kinds(verdict)) == (0, [])


def test_registered_without_the_debug_lines(p5en) -> None:
    process = Process().create(names(p5en))
    process.say(MANAGER, 829, "Registered memory on 2 rails, mem_type=1 device=0")
    verdict = judge(p5en, process.text())
    assert verdict.status == 2
    assert any("NIXL_LOG_LEVEL=DEBUG" in reason for reason in verdict.reasons)


def test_cut_off_before_any_registration(p5en) -> None:
    assert judge(p5en, Process().create(names(p5en)).text()).status == 2


def test_cut_off_at_every_line(p5en) -> None:
    """A log of a good server is never judged wrong for being short; whole again, it is as expected."""
    process = Process().create(["rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"])
    process.map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"])
    statuses = [
        judge(p5en, "".join(line + "\n" for line in process.lines[:end])).status
        for end in range(len(process.lines) + 1)
    ]
    assert set(statuses) == {0, 2}
    assert statuses == sorted(statuses, reverse=True)


def test_cut_off_within_a_line(p5en) -> None:
    text = Process().create(["rdmap85s0", "rdmap86s0"]).map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"]).text()
    end = text.index("mapped to rail 1") + 12
    assert judge(p5en, text[:end]).status == 2


def test_a_far_rail_shows_in_a_log_that_is_cut_off(p5en) -> None:
    process = Process().create(names(p5en)).map("0000:59:00.0", ["rdmap163s0"], total=False)
    assert kinds(judge(p5en, process.text())) == ["far rail"]


def test_a_log_that_begins_after_the_rails(p5en) -> None:
    process = Process().map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"])
    verdict = judge(p5en, process.text())
    assert verdict.status == 0
    assert any("begins after" in note for note in verdict.notes)


def test_the_log_of_another_machine(p5en, trn2) -> None:
    text = Process().create(names(p5en)).map("0000:59:00.0", ["rdmap85s0", "rdmap86s0"]).text()
    verdict = judge(trn2, text)
    assert verdict.status != 0
    assert verdict.reasons or verdict.violations
    foreign = Process().create(["rdmap7s0"]).map("0000:07:00.0", ["rdmap7s0"]).text()
    verdict = judge(p5en, foreign)
    assert (verdict.status, verdict.violations) == (2, [])
    assert "this machine's log" in verdict.reasons[0]


def test_host_memory_alone(p5en) -> None:
    process = Process().create(names(p5en)).host_memory(names(p5en))
    verdict = judge(p5en, process.text())
    assert verdict.status == 2
    assert "host memory" in verdict.reasons[0]


# --- a genuine log ----------------------------------------------------------------------------------------------------


def test_a_genuine_log_of_the_tcp_provider(p5en) -> None:
    text = TCP.read_text()
    verdict = judge(p5en, text)
    assert (verdict.status, kinds(verdict)) == (1, ["provider"])
    assert "Created rail 0 (device=eth0, provider=tcp)" in verdict.violations[0].line
    verdict = judge(p5en, text, provider="tcp")
    assert (verdict.status, verdict.reasons) == (0, [])


def test_a_genuine_logs_prefix_is_the_composed_ones() -> None:
    log = NixlLog()
    log.read("x", TCP.read_text().splitlines())
    writer = next(iter(log.writers.values()))
    assert len(log.writers) == 1
    assert writer.runtime == "SYSTEM"
    assert writer.host_rails == {0}
    assert log.nixl_lines > 5


# --- anything at all --------------------------------------------------------------------------------------------------

_FRAGMENTS = [
    "I1129 23:29:57.000001    4711 libfabric_rail_manager.cpp:359] ",
    "(Worker_TP0 pid=77) ",
    "Created rail 0 (device=rdmap85s0-rdm, provider=efa)",
    "Created rail 1 (device=rdmap86s0-rdm, provider=efa)",
    "VRAM memory 0x1 on device PCI 0000:59:00.0 mapped to rail 0 (EFA device=rdmap85s0-rdm)",
    "VRAM memory 0x1 on device PCI 0000:59:00.0 will use 2 rails total",
    "VRAM memory 0x1 on device PCI  mapped to rail 0 (EFA device=rdmap85s0-rdm)",
    "VRAM memory 0x1 on device PCI zz mapped to rail 0 (EFA device=)",
    "Registered memory on 2 rails, mem_type=1 device=0",
    "Registered memory on rail 9 (mr=0, key=0)",
    "Registered memory on 1 rails, mem_type=0 device=0",
    "Accelerator-PCI 0:59:00.0 → [rdmap85s0-rdm, ]",
    "\x1b[1m",
    "\n",
]


@functools.cache
def _machine():
    with tempfile.TemporaryDirectory() as folder:
        return read_hwloc(make.write_hwloc(make.p5en(), Path(folder) / "x.xml"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(_FRAGMENTS), st.text(max_size=5)), max_size=30).map("".join))
def test_no_text_breaks_the_judge_or_proves_what_it_does_not_say(text) -> None:
    log = NixlLog()
    log.read("x", text.splitlines())
    verdict = judge_log(_machine(), place(_machine()), log)
    whole = [one for writer in log.writers.values() for one in writer.registrations if one.whole]
    if verdict.status == 0:
        assert whole, "as expected, and nothing in the log that proves it"

"""A worker that keeps itself to its rails: what it sets, what it respects, what it says, and what it refuses."""

from __future__ import annotations

import logging
import os

import pytest
import topologies as make
from logs import MANAGER, Process

from kvxfer.errors import ConfigError, PlatformError, RailsError
from kvxfer.rails.pinning import WorkerRails, opened_rails
from kvxfer.rails.policy import VARIABLE
from kvxfer.rails.sysfs import read_sysfs

SWITCH = ["rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"]
PAIR = ["rdmap87s0", "rdmap88s0"]
GPU, NEURON = "0000:5a:00.0", "0000:cc:00.0"


class OnDevice:
    """A platform whose only device is at ``address``, and whose answer for it is ``rails``."""

    def __init__(self, address, rails=None) -> None:
        self.address, self.rails, self.asked = address, rails, 0

    def pci_address(self, device: int):
        self.asked += 1
        if isinstance(self.address, Exception):
            raise self.address
        return self.address

    def local_rails(self, device: int):
        if isinstance(self.rails, Exception):
            raise self.rails
        return self.rails


class Worker:
    """A worker on a machine made of files; ``root`` stands for /."""

    def __init__(self, root, caplog) -> None:
        self.root, self.caplog, self.environment = root, caplog, {}
        self.device = OnDevice(None)

    def on(self, topology, device, rails=None) -> Worker:
        make.write_sysfs(topology, self.root)
        self.device = device if isinstance(device, OnDevice) else OnDevice(device, rails)
        return self

    def rails(self, setting="local", policy="warn", backend="LIBFABRIC") -> WorkerRails:
        return WorkerRails((setting, policy), backend, self.device, 0, self.environment, self.root)

    def start(self, nixl: Process, setting="local", policy="warn", opened=()) -> WorkerRails:
        """Everything a worker does: pin, make the agent and register (``nixl`` is what NIXL logs), and settle."""
        rails = self.rails(setting, policy)
        with rails.watched():
            os.write(2, "".join(f"{line}\n" for line in nixl.lines).encode())
            self.open(*opened)
        self.caplog.clear()
        rails.settle()
        return rails

    def open(self, *names: str) -> None:
        """Let the process have the device files of these EFA devices open, and others."""
        descriptors = self.root / "proc/self/fd"
        descriptors.mkdir(parents=True, exist_ok=True)
        targets = ["/dev/null", "socket:[17]", "/dev/infiniband/rdma_cm"]
        for efa in read_sysfs(self.root).efas:
            if efa.rail in names:
                (verbs,) = (self.root / f"sys/bus/pci/devices/{efa.where}/infiniband_verbs").iterdir()
                targets += [f"/dev/infiniband/{verbs.name}"] * 2
        for number, target in enumerate(targets):
            (descriptors / str(number)).unlink(missing_ok=True)
            (descriptors / str(number)).symlink_to(target)

    def said(self) -> list[tuple[str, str]]:
        return [(record.levelname, record.message) for record in self.caplog.records]


@pytest.fixture
def worker(tmp_path, caplog) -> Worker:
    caplog.set_level(logging.INFO, logger="kvxfer.rails")
    return Worker(tmp_path, caplog)


# --- before NIXL's agent exists ---------------------------------------------------------------------------------------


def test_a_gpu_opens_every_rail_of_its_switch_and_says_so_once(worker) -> None:
    worker.on(make.p5en(), GPU).rails()
    assert worker.environment == {VARIABLE: ",".join(SWITCH)}
    ((level, text),) = worker.said()
    assert level == "INFO"
    assert f"{VARIABLE}={','.join(SWITCH)}" in text
    assert f"cuda 1 ({GPU}): 4 EFA and 2 GPU below 46-5c" in text


@pytest.mark.parametrize("topology", [make.p4d(), make.p5(), make.p6_b200(), make.virtual_machine(gpus=4, efas=3)])
def test_on_each_kind_of_machine_every_gpu_keeps_what_nixl_deals_out_to_it(tmp_path, caplog, topology) -> None:
    from kvxfer.rails.local import place
    from kvxfer.rails.policy import expectation

    machine = read_sysfs(make.write_sysfs(topology, tmp_path))
    for one in place(machine):
        environment: dict[str, str] = {}
        device = OnDevice(str(one.node.where))
        shown = WorkerRails(("local", "warn"), "LIBFABRIC", device, 0, environment, tmp_path).pin.rails
        assert environment[VARIABLE] == ",".join(rail.rail for rail in shown)
        nodes = [machine.rail_named(rail.rail) for rail in shown]
        assert set(expectation(machine, [one.node.where], nodes)[one.node.where].rails) == set(one.rails)


def test_a_neuron_device_opens_its_one(worker) -> None:
    worker.on(make.trn2(), NEURON, ["rdmap201s0"]).rails()
    assert worker.environment == {VARIABLE: "rdmap201s0"}


def test_libnrts_answer_wins_over_the_map(worker) -> None:
    """The platform knows it; NIXL will ask the same."""
    worker.on(make.trn2(), NEURON, ["rdmap202s0"]).rails()
    assert worker.environment == {VARIABLE: "rdmap202s0"}


@pytest.mark.parametrize("answer", [None, [], ["rdmap201s0", "rdmap202s0"], ["what"]])
def test_an_answer_that_names_no_single_rail_leaves_the_map(worker, answer) -> None:
    worker.on(make.trn2(), NEURON, answer).rails()
    assert worker.environment == {VARIABLE: "rdmap201s0"}


@pytest.mark.parametrize("preset", ["rdmap85s0", "rdmap110s0,rdmap85s0", "all"])
@pytest.mark.parametrize("setting", ["local", "all", ["rdmap86s0"]])
def test_what_is_set_already_is_respected(worker, setting, preset) -> None:
    worker.on(make.p5en(), GPU).environment = {VARIABLE: preset}
    worker.rails(setting)
    assert worker.environment == {VARIABLE: preset}
    assert f"{VARIABLE}={preset} was set already, and is respected" in worker.said()[-1][1]


def test_a_preset_that_names_no_device_is_told_at_once(worker) -> None:
    worker.on(make.p5en(), GPU).environment = {VARIABLE: "rdmap85s0-rdm"}
    worker.rails()
    ((level, text),) = worker.said()
    assert level == "WARNING"
    assert f"{VARIABLE}=rdmap85s0-rdm names no EFA device" in text
    assert "rdmap85s0, rdmap86s0" in text


@pytest.mark.parametrize(
    ("preset", "lost"),
    [
        ("rdmap87s0, rdmap88s0", "' rdmap88s0'"),
        ("rdmap87s0,rdmap999s0,eth0", "'rdmap999s0', 'eth0'"),
        ("rdmap87s0,rdmap88s0-rdm", "'rdmap88s0-rdm'"),
        ("0000:58:00.0,rdmap87s0", "'0000:58:00.0'"),
    ],
)
def test_a_preset_of_which_some_names_no_device_is_told(worker, preset, lost) -> None:
    """libfabric leaves such a name out without a word, and the worker would run on half of its rails."""
    worker.on(make.p5en(), GPU).environment = {VARIABLE: preset}
    assert [rail.rail for rail in worker.rails().pin.rails] == ["rdmap87s0"]
    (_, (level, text)) = worker.said()
    assert level == "WARNING"
    assert f"{VARIABLE}={preset}: {lost} is no EFA device here" in text


@pytest.mark.parametrize("preset", ["rdmap87s0,", "rdmap87s0,,rdmap88s0", "rdmap87s0,rdmap87s0", "all", "all,x"])
def test_a_preset_that_loses_nothing_is_not_doubted(worker, preset) -> None:
    worker.on(make.p5en(), GPU).environment = {VARIABLE: preset}
    worker.rails()
    assert [level for level, _ in worker.said()] == ["INFO"]


@pytest.mark.parametrize(
    ("topology", "device", "far", "local"),
    [
        (make.p5en(), GPU, "rdmap160s0", "rdmap87s0, rdmap88s0"),
        (make.trn2(), NEURON, "rdmap108s0", "rdmap201s0"),
        (make.trn2(), NEURON, "rdmap202s0", "rdmap201s0"),
    ],
    ids=["another switch", "another Neuron device's", "the neighbour's"],
)
@pytest.mark.parametrize("by", ["the variable", "the setting"])
def test_rails_that_are_all_far_are_respected_and_told(worker, topology, device, far, local, by) -> None:
    """NIXL puts the memory there, as is predicted for what it is shown: no mismatch, and slow."""
    worker.on(topology, device)
    if by == "the variable":
        worker.environment = {VARIABLE: far}
        worker.rails()
    else:
        worker.rails([far])
    assert worker.environment == {VARIABLE: far}
    (_, (level, text)) = worker.said()
    assert level == "WARNING"
    assert f"({device}) is kept to {far}, none of which is local to it: local is {local}" in text


@pytest.mark.parametrize("by", ["the variable", "the setting"])
def test_a_rail_of_a_gpus_own_switch_is_not_far(worker, by) -> None:
    worker.on(make.p5en(), GPU)
    if by == "the variable":
        worker.environment = {VARIABLE: "rdmap85s0,rdmap160s0"}
    worker.rails("local" if by == "the variable" else ["rdmap85s0", "rdmap160s0"])
    assert [level for level, _ in worker.said()] == ["INFO"]


def test_all_opens_all_and_takes_an_empty_variable_away(worker) -> None:
    """libfabric aborts the process over an empty one (prov/efa/src/efa_env.c)."""
    worker.on(make.p5en(), GPU).environment = {VARIABLE: ""}
    assert len(worker.rails("all").pin.rails) == 16
    assert worker.environment == {}


def test_a_list_of_names_and_addresses(worker) -> None:
    worker.on(make.p5en(), GPU).rails(["0000:58:00.0", "rdmap87s0"])
    assert worker.environment == {VARIABLE: "rdmap87s0,rdmap88s0"}


@pytest.mark.parametrize("policy", ["warn", "enforce"])
def test_a_rail_that_is_not_here_is_refused_with_those_that_are(worker, policy) -> None:
    with pytest.raises(ConfigError, match=r"'rdmap1s0' is no EFA device of this machine; it has rdmap85s0"):
        worker.on(make.p5en(), GPU).rails(["rdmap1s0"], policy)


WITHOUT_EFA = make.p5en().without(
    *(f"0000:{first + number:02x}:00.0" for first in (0x55, 0x6E, 0x87, 0xA0) for number in range(4))
)


@pytest.mark.parametrize(
    ("topology", "backend", "environment", "why"),
    [
        (WITHOUT_EFA, "LIBFABRIC", {}, "no EFA device can be opened here"),
        (make.p5en(), "UCX", {}, "the backend is UCX"),
        (make.p5en(), "LIBFABRIC", {"FI_PROVIDER": "tcp"}, "FI_PROVIDER=tcp keeps libfabric from EFA"),
        (make.p5en(), "LIBFABRIC", {"FI_PROVIDER": "^efa"}, "FI_PROVIDER=^efa keeps libfabric from EFA"),
    ],
)
def test_where_rails_are_no_matter_nothing_is_pinned_nor_checked_and_one_line_says_so(
    worker, topology, backend, environment, why
) -> None:
    worker.on(topology, GPU).environment = dict(environment)
    rails = worker.rails("local", "enforce", backend)
    with rails.watched():
        pass
    rails.settle()
    assert worker.environment == environment
    ((level, text),) = worker.said()
    assert (level, f"rails: nothing is pinned: {why}" in text) == ("INFO", True)
    assert worker.device.asked == 0, "a platform that cannot tell must not matter here"


@pytest.mark.parametrize("provider", ["efa", "efa;ofi_rxr", "^tcp"])
def test_providers_that_leave_efa_in(worker, provider) -> None:
    worker.on(make.p5en(), GPU).environment = {"FI_PROVIDER": provider}
    worker.rails()
    assert VARIABLE in worker.environment


def test_host_memory_is_near_to_every_rail(worker) -> None:
    worker.on(make.p5en(), None)
    worker.start(Process().create(SWITCH), policy="enforce")
    assert worker.environment == {}
    assert worker.said() == []


LOST = [OnDevice("0000:01:00.0"), OnDevice("0000:55:00.0"), OnDevice(PlatformError("the driver does not answer"))]


@pytest.mark.parametrize("device", LOST, ids=["not on the bus", "no accelerator", "unknown"])
def test_a_device_that_is_not_found_leaves_every_rail_open_or_is_refused(worker, device) -> None:
    worker.on(make.p5en(), device)
    with pytest.raises(RailsError, match=r"nothing to keep to: .*rails=all; rails_policy=warn lets"):
        worker.rails(policy="enforce")
    rails = worker.rails()
    assert (worker.environment, len(rails.pin.rails)) == ({}, 16)
    assert [level for level, _ in worker.said()] == ["WARNING", "INFO"]
    rails.settle()


@pytest.mark.parametrize("device", LOST, ids=["not on the bus", "no accelerator", "unknown"])
def test_a_device_that_is_not_found_does_not_matter_to_who_names_the_rails(worker, device) -> None:
    worker.on(make.p5en(), device)
    worker.rails(["rdmap85s0"], "enforce").settle()
    assert worker.environment == {VARIABLE: "rdmap85s0"}


def test_a_neuron_device_that_the_platform_has_no_rail_for(worker) -> None:
    worker.on(make.trn2(), NEURON, PlatformError("no EFA device that is known"))
    with pytest.raises(RailsError, match="no EFA device that is known"):
        worker.rails(policy="enforce")


def test_enforce_makes_nixl_tell_unless_the_operator_said_how_much(worker) -> None:
    worker.on(make.p5en(), GPU).rails(policy="enforce")
    assert worker.environment["NIXL_LOG_LEVEL"] == "INFO"
    worker.environment = {"NIXL_LOG_LEVEL": "ERROR"}
    worker.rails(policy="enforce")
    assert worker.environment["NIXL_LOG_LEVEL"] == "ERROR"
    worker.environment = {}
    worker.rails()
    assert "NIXL_LOG_LEVEL" not in worker.environment


# --- after the registration -------------------------------------------------------------------------------------------


def test_a_match_is_one_info_line(worker, capfd) -> None:
    worker.on(make.p5en(), GPU).start(Process().create(SWITCH).map(GPU, PAIR), policy="enforce")
    ((level, text),) = worker.said()
    assert level == "INFO"
    assert f"cuda 1 ({GPU}) on rdmap87s0 (0000:57:00.0), rdmap88s0 (0000:58:00.0), as expected" in text
    assert "mapped to rail" in capfd.readouterr().err, "what was taken is passed on"


FAR = Process().create(SWITCH).map(GPU, ["rdmap85s0", "rdmap86s0"])
EVERYWHERE = Process().create(SWITCH).all_devices(GPU)
EVERYWHERE.say(MANAGER, 829, "Registered memory on 4 rails, mem_type=1 device=0")


@pytest.mark.parametrize("nixl", [FAR, EVERYWHERE], ids=["the neighbour's", "a fallback, without DEBUG"])
def test_a_mismatch_is_one_warning_or_the_end(worker, nixl) -> None:
    worker.on(make.p5en(), GPU).start(nixl)
    assert [level for level, _ in worker.said()] == ["WARNING"]
    with pytest.raises(RailsError, match="rails_policy=warn lets the worker go on"):
        worker.start(nixl, policy="enforce")


@pytest.mark.parametrize(("nixl", "actual"), [(FAR, "rdmap85s0, rdmap86s0"), (EVERYWHERE, "every rail")])
def test_a_mismatch_names_device_expected_and_actual_rails(worker, nixl, actual) -> None:
    with pytest.raises(RailsError) as raised:
        worker.on(make.p5en(), GPU).start(nixl, policy="enforce")
    for word in ("cuda 1", GPU, f"registered on {actual}", "expected rdmap87s0 (0000:57:00.0), rdmap88s0"):
        assert word in str(raised.value)


def test_the_prediction_is_for_the_rails_that_are_shown(worker) -> None:
    """Kept to its own pair, NIXL leaves the GPU one of them: that is what was asked for, and no mismatch."""
    worker.on(make.p5en(), GPU).start(Process().create(PAIR).map(GPU, ["rdmap88s0"]), setting=PAIR, policy="enforce")
    assert [level for level, _ in worker.said()] == ["INFO"]


def test_tcp_in_place_of_efa(worker) -> None:
    with pytest.raises(RailsError, match="NIXL opened tcp, expected EFA devices"):
        worker.on(make.p5en(), GPU).start(Process().create(["eth0"], provider="tcp"), policy="enforce")


SILENT = Process()


def test_open_device_files_show_a_match_where_nixl_is_silent(worker) -> None:
    worker.on(make.trn2(), NEURON, ["rdmap201s0"]).start(SILENT, policy="enforce", opened=["rdmap201s0"])
    ((level, text),) = worker.said()
    assert (level, "on rdmap201s0, as expected" in text) == ("INFO", True)


def test_a_rail_that_is_not_open_carries_nothing(worker) -> None:
    worker.on(make.p5en(), GPU)
    with pytest.raises(RailsError, match=r"expected on rdmap87s0, rdmap88s0; .* has opened rdmap87s0; rails"):
        worker.start(SILENT, policy="enforce", opened=["rdmap87s0"])


def test_open_device_files_alone_do_not_tell_which_of_a_switch_a_gpu_is_on(worker) -> None:
    worker.on(make.p5en(), GPU).start(SILENT, opened=SWITCH)
    ((level, text),) = worker.said()
    assert (level, "NIXL did not log" in text, "EFA devices are open" in text) == ("INFO", True, False)


def test_more_open_devices_than_were_shown_are_told(worker) -> None:
    worker.on(make.trn2(), NEURON, ["rdmap201s0"]).start(SILENT, policy="enforce", opened=["rdmap201s0", "rdmap202s0"])
    ((level, text),) = worker.said()
    assert level == "WARNING", "enforce warns that it enforces nothing"
    assert f"2 EFA devices are open where 1 were to be: libfabric was started before {VARIABLE} was set" in text


def test_without_any_witness_it_is_said_that_nothing_is_known(worker) -> None:
    worker.on(make.p5en(), GPU).start(SILENT)
    ((level, text),) = worker.said()
    assert (level, "NIXL_LOG_LEVEL=DEBUG shows it" in text) == ("INFO", True)


def test_the_open_rails_of_this_very_process(tmp_path, worker) -> None:
    """No EFA device is open here, and descriptors that close meanwhile do no harm."""
    assert opened_rails(read_sysfs(tmp_path / "none")) == set()
    worker.on(make.p5en(), GPU).open("rdmap85s0", "rdmap160s0")
    (tmp_path / "proc/self/fd/99").write_text("no link")
    assert opened_rails(read_sysfs(tmp_path), tmp_path) == {"rdmap85s0", "rdmap160s0"}

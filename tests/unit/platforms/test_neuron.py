"""The Neuron platform passes the suite, with events and by reading back; which rails it names; what it refuses before it is late."""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import pytest

from kvxfer.errors import ConfigError, PlatformError, RailsError
from kvxfer.platform import Geometry, LayerGroup
from kvxfer.rails.pinning import WorkerRails
from kvxfer_neuron import NeuronPlatform
from tests.unit.platforms.neuron_doubles import (
    READY,
    InHbm,
    NotMapped,
    Work,
    built_libnrt,
    compile_library,
    in_a_process,
    libnrt,
    make,
    needs_compiler,
    neuron_ls,
    torch_neuron,
    trn2_files,
    trn2_host,
    write_host,
)

pytest.register_assert_rewrite("tests.unit.platforms.conformance")
from tests.unit.platforms.conformance import PlatformConformance  # noqa: E402

torch = pytest.importorskip("torch")

__all__ = ["built_libnrt", "libnrt", "trn2_files", "trn2_host"]
pytestmark = needs_compiler

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 3, 6, 32, 2, 16
CORE, DEVICE, EFA = "20", 5, "rdmap87s0"  # with LNC 2: device 5, at 58:00.0, whose EFA device is 57:00.0


def geometry(blocks: int = BLOCKS, kind: str = "FullAttentionSpec") -> Geometry:
    layers = tuple((f"layers.{i}.self_attn", i) for i in range(LAYERS))
    group = LayerGroup(layers, BLOCK_SIZE, (2, 3), 8, DIM, kind)
    return Geometry((group,), blocks, "auto", ("CUSTOM",))


class Rig:
    """A platform on a host of files, beside libnrt's double."""

    def __init__(self, root, double) -> None:
        self.root, self.double, self.work = root, double, Work()
        self.environment = {**READY, "NEURON_RT_VISIBLE_CORES": CORE, "KVXFER_LIBNRT": str(double.path)}
        self.ls = ""
        double.init()
        double.attach(DEVICE, "0000:57:00.0")

    def platform(self, **environment: str) -> NeuronPlatform:
        return NeuronPlatform(self.root, {**self.environment, **environment}, lambda: self.ls)

    def caches(self, shape=(2, BLOCKS, HEADS, BLOCK_SIZE, DIM), kind=InHbm):
        """As vllm-neuron allocates them: raw int8 a layer, viewed."""
        made = {}
        for i in range(LAYERS):
            raw = torch.zeros(int(torch.tensor(shape).prod()) * 2, dtype=torch.int8)
            self.double.adopt(raw, DEVICE)
            made[f"layers.{i}.self_attn"] = kind(raw.view(torch.bfloat16).view(shape), self.work)
        return made

    def described(self, **environment: str) -> NeuronPlatform:
        platform = self.platform(**environment)
        platform.describe(self.caches(), geometry())
        return platform


@pytest.fixture
def rig(trn2_host, libnrt):
    return Rig(trn2_host, libnrt)


class TestNeuron(PlatformConformance):
    """libtorch-neuronx-lite: no events."""

    @pytest.fixture(autouse=True)
    def _made(self, rig, monkeypatch) -> None:
        self.rig = rig
        monkeypatch.delattr(torch, "neuron", raising=False)

    def make_platform(self) -> NeuronPlatform:
        return self.rig.platform()

    def make_caches(self):
        return self.rig.caches(), geometry()

    def misshapen(self, caches):
        (wrong, *_) = self.rig.caches((2, BLOCKS + 1, HEADS, BLOCK_SIZE, DIM)).values()
        return {**caches, "layers.1.self_attn": wrong}

    def blocks_of(self, caches):
        return {name: cache.host.transpose(0, 1) for name, cache in caches.items()}

    def copy_memory(self, target, origin, length) -> None:
        ctypes.memmove(target, origin, length)

    def launch(self, platform, seconds):
        platform.describe(*self.make_caches())
        done = threading.Event()
        self.rig.work.launch(lambda: (time.sleep(seconds), done.set()))
        return done.is_set


class TestNeuronWithBlocksFirst(TestNeuron):
    """The view of the same memory that vLLM 0.29's check of shapes accepts."""

    def make_caches(self):
        seen = {name: InHbm(one.host.transpose(0, 1), self.rig.work) for name, one in self.rig.caches().items()}
        return seen, geometry()

    def blocks_of(self, caches):
        return {name: cache.host for name, cache in caches.items()}


class TestTorchNeuron(TestNeuron):
    """TorchNeuron: events."""

    @pytest.fixture(autouse=True)
    def _events(self, _made, monkeypatch) -> None:
        monkeypatch.setattr(torch, "neuron", torch_neuron(self.rig.work), raising=False)


# --- presence ---------------------------------------------------------------------------------------------------------


def test_a_host_with_devices_and_one_without(tmp_path, trn2_host) -> None:
    assert NeuronPlatform(trn2_host, {}).presence().why == "16 Neuron devices: /dev/neuron0 to /dev/neuron15"
    assert NeuronPlatform(trn2_host, {}).presence().here
    plain = NeuronPlatform(tmp_path / "plain", {}).presence()
    assert (plain.here, plain.why) == (False, "there is no /dev/neuron*, and the neuron driver is not loaded")
    (tmp_path / "hidden/sys/module/neuron").mkdir(parents=True)
    hidden = NeuronPlatform(tmp_path / "hidden", {}).presence()
    assert not hidden.here
    assert "give the container its devices" in hidden.why


# --- order and settings -----------------------------------------------------------------------------------------------


def test_what_is_wanted_is_what_is_not_set(rig) -> None:
    assert NeuronPlatform(rig.root, {}).environment() == READY
    assert NeuronPlatform(rig.root, {"NEURON_RT_MAP_HBM": "0"}).environment() == {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    assert rig.platform().environment() == {}


def test_asking_for_the_environment_does_not_load_libnrt(rig) -> None:
    platform = NeuronPlatform(rig.root, {"KVXFER_LIBNRT": "/there/is/none"})
    assert platform.environment() == READY


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"NEURON_RT_MAP_HBM": None}, "NEURON_RT_MAP_HBM is not set: no peer .* Start vLLM with NEURON_RT_MAP_HBM=1"),
        ({"NEURON_RT_MAP_HBM": "0"}, "NEURON_RT_MAP_HBM is '0', which does not turn it on"),
        ({"NEURON_RT_MAP_HBM": "yes"}, "NEURON_RT_MAP_HBM is 'yes', which does not turn it on"),
        ({"FI_EFA_ENABLE_SHM_TRANSFER": None}, "is not set: two engines on one host .* FI_EFA_ENABLE_SHM_TRANSFER=0"),
        ({"FI_HMEM_DISABLE_P2P": "1"}, "FI_HMEM_DISABLE_P2P=1: .* unset it"),
    ],
)
def test_what_was_not_set_in_time_is_refused_with_the_cure(rig, changes, said) -> None:
    for name, value in changes.items():
        rig.environment.pop(name, None)
        if value is not None:
            rig.environment[name] = value
    with pytest.raises(PlatformError, match=said):
        rig.described()


@pytest.mark.parametrize("value", ["1", "2", "true", "True"])
def test_values_that_map_hbm(rig, value) -> None:
    rig.described(NEURON_RT_MAP_HBM=value)


def test_shared_memory_that_was_turned_on_on_purpose_is_warned_of(rig, caplog) -> None:
    rig.described(FI_EFA_ENABLE_SHM_TRANSFER="1")
    assert "FI_EFA_ENABLE_SHM_TRANSFER=1 was set on purpose" in caplog.text


@pytest.mark.parametrize("status", [13, 1])
def test_a_runtime_that_was_not_started_is_refused(rig, status) -> None:
    """By nrt_status.h it says so with 13; by the SDK's text with 1."""
    rig.double.reset()
    rig.double.before(status)
    with pytest.raises(PlatformError, match=r"runtime is not initialised in this process.*before kvxfer is told"):
        rig.described()


def test_a_runtime_that_was_closed_is_refused(rig) -> None:
    rig.double.library.nrt_close()
    with pytest.raises(PlatformError, match="runtime is not initialised"):
        rig.described()


def test_memory_without_an_address_is_refused_with_the_reason(rig) -> None:
    """NEURON_RT_MAP_HBM was set after the first tensor was made: data_ptr() is 0."""
    caches = rig.caches()
    caches["layers.1.self_attn"] = NotMapped(caches["layers.1.self_attn"].host)
    said = r"layers\.1\.self_attn: its cache has no address .* before its first tensor .*\(NEURON_RT_MAP_HBM=1 now, so it was set after"
    with pytest.raises(PlatformError, match=said):
        rig.platform().describe(caches, geometry())


@pytest.mark.parametrize(("version", "warned"), [((2, 4), True), ((2, 5), False)])
def test_a_libfabric_that_was_there_first_is_warned_of(rig, caplog, monkeypatch, version, warned) -> None:
    """Up to 2.4 libfabric offers no Neuron memory when it started before the runtime, and NIXL registers HBM as host memory."""
    monkeypatch.setattr("kvxfer_neuron.platform._early", [])
    monkeypatch.setattr("kvxfer_neuron.order.libfabric_of_process", lambda _proc: version)
    rig.platform().environment()  # the plugin, in a process where libnrt is not loaded yet
    rig.described()
    assert ("libfabric 2.4 was loaded before the Neuron runtime" in caplog.text) is warned


@pytest.mark.parametrize("body", ["unsigned fi_version(void) { return 2 << 16 | 4; }", "int nothing;"])
def test_the_libfabric_of_a_process_is_asked_for_its_version(tmp_path, body) -> None:
    """In a process of its own: a libfabric that pretends would be found by all tests to come."""
    source = tmp_path / "libfabric.c"
    source.write_text(f"{body}\n")
    library = compile_library(tmp_path, source)
    program = (
        "import ctypes; from pathlib import Path; from kvxfer_neuron.order import libfabric_of_process as ask; "
        f"print(ask(Path('/proc')), ask(Path('/none'))); ctypes.CDLL({str(library)!r}); print(ask(Path('/proc')))"
    )
    assert in_a_process(program).splitlines() == ["None None", "(2, 4)" if "fi_version" in body else "None"]


def test_a_libfabric_that_came_after_the_runtime_is_in_order(rig, monkeypatch) -> None:
    monkeypatch.setattr("kvxfer_neuron.platform._early", early := [])
    maps = rig.root / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(
        f"7f02-7f03 r-xp 00000000 00:1f 6   {rig.double.path}\n7f00-7f01 r-xp 00000000 00:1f 5   /libfabric.so.1\n"
    )
    rig.platform().environment()
    assert early == []


def test_memory_that_is_not_on_a_page_is_warned_of(rig, caplog) -> None:
    raw = torch.zeros(4096 * 64, dtype=torch.int8)
    at = (-raw.data_ptr()) % 4096 + 64
    cache = InHbm(
        raw[at : at + 2 * BLOCKS * HEADS * BLOCK_SIZE * DIM * 2]
        .view(torch.bfloat16)
        .view(2, BLOCKS, HEADS, BLOCK_SIZE, DIM)
    )
    cache.untyped_storage = lambda: _Storage(raw.data_ptr() + at, cache.host.nbytes)
    rig.platform().describe(dict.fromkeys([f"layers.{i}.self_attn" for i in range(LAYERS)], cache), geometry())
    assert "1 of the cache's 1 regions do not begin on a page" in caplog.text
    assert "FI_HMEM_NEURON_USE_DMABUF=0" in caplog.text


class _Storage:
    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._size


def test_without_a_libnrt_a_cache_is_refused(rig) -> None:
    rig.environment["KVXFER_LIBNRT"] = "/there/is/none"
    with pytest.raises(PlatformError, match=r"libnrt cannot be loaded .*aws-neuronx-runtime-lib.*LD_LIBRARY_PATH"):
        rig.described()


# --- rails ------------------------------------------------------------------------------------------------------------


def test_libnrt_decides_once_there_is_memory(rig) -> None:
    platform = rig.platform()
    assert platform.local_rails(0) == (EFA,), "AWS's map"
    assert rig.double.count("bdf") == 0
    platform.describe(rig.caches(), geometry())
    assert platform.local_rails(0) == (EFA,)
    assert rig.double.count("bdf") == 1
    assert platform.pci_address(0) == "0000:58:00.0"


def test_libnrt_is_followed_where_it_contradicts_the_map_and_that_is_said(rig, caplog) -> None:
    rig.double.attach(DEVICE, "0000:56:00.0")
    assert rig.described().local_rails(0) == ("rdmap86s0",)
    assert "libnrt attaches EFA device rdmap86s0 (0000:56:00.0)" in caplog.text
    assert "AWS's map has rdmap87s0 (0000:57:00.0)" in caplog.text


@pytest.mark.parametrize("bdf", ["0000:57:00.0", "57:00.0", "0:57:00.0", "00000000:57:00.0"])
def test_addresses_in_whatever_length_libnrt_writes_them(rig, bdf, caplog) -> None:
    rig.double.attach(DEVICE, bdf)
    assert rig.described().local_rails(0) == (EFA,)
    assert ("more than the 13 bytes that NIXL has" in caplog.text) is (len(bdf) > 12)


@pytest.mark.parametrize("status", [1, 2, 3, 13])
def test_where_libnrt_fails_the_map_holds_and_that_is_said(rig, status, caplog) -> None:
    platform = rig.described()
    rig.double.force("nrt_get_attached_efa_bdf", status)
    assert platform.local_rails(0) == (EFA,)
    assert "libnrt does not say which EFA device is attached" in caplog.text
    assert "AWS's map of trn2.48xlarge" in caplog.text


@pytest.mark.parametrize("bdf", ["0000:cc:00.0", "0000:59:00.0", "nonsense"])
def test_an_answer_that_is_no_efa_device_here_is_not_believed(rig, bdf, caplog) -> None:
    rig.double.attach(DEVICE, bdf)
    assert rig.described().local_rails(0) == (EFA,)
    assert bdf in caplog.text


def test_an_efa_device_that_the_container_hides_is_named(tmp_path, libnrt) -> None:
    """NIXL would find it in no list of its own, take every rail, and only log it."""
    topology = make.trn2("trn2.48xlarge")
    for device in topology.devices():
        device.hidden = device.at == "0000:57:00.0"
    rig = Rig(write_host(tmp_path / "host", topology), libnrt)
    platform = rig.described()
    rig.environment["NEURON_RT_VISIBLE_CORES"] = "200"
    with pytest.raises(PlatformError) as raised:
        unknown = rig.platform()
        unknown._address = platform._address
        unknown.local_rails(0)
    assert "libnrt attaches 0000:57:00.0 to this cache, which is no EFA device that can be opened here" in str(
        raised.value
    )
    assert "/dev/infiniband/uverbs*" in str(raised.value)


def test_where_nobody_knows_nothing_is_guessed(rig) -> None:
    del rig.environment["NEURON_RT_VISIBLE_CORES"]
    with pytest.raises(
        PlatformError, match=r"no EFA device that is known: neither NEURON_RT_VISIBLE_CORES .* KVXFER_NEURON_EFA"
    ):
        rig.platform().local_rails(0)


@pytest.mark.parametrize("said", ["rdmap86s0", "0000:56:00.0", "56:00.0", " rdmap86s0 , "])
def test_the_setting_wins(rig, said) -> None:
    assert rig.described(KVXFER_NEURON_EFA=said).local_rails(0) == ("rdmap86s0",)


@pytest.mark.parametrize("said", ["rdmap1s0", "0000:58:00.0", "efa0"])
def test_a_setting_that_names_no_efa_device_is_refused_with_those_that_are_here(rig, said) -> None:
    with pytest.raises(
        ConfigError, match=rf"KVXFER_NEURON_EFA: '{said}' is no EFA device .*rdmap87s0 \(0000:57:00.0\)"
    ):
        rig.platform(KVXFER_NEURON_EFA=said).local_rails(0)


def test_a_host_without_efa(tmp_path, libnrt) -> None:
    rig = Rig(write_host(tmp_path / "host", make.trn2_3xlarge()), libnrt)
    with pytest.raises(PlatformError, match=r"no EFA device can be opened here: NIXL falls back to tcp"):
        rig.platform().local_rails(0)
    assert rig.platform().background_cpus() is None


def test_trn2_3xlarge_has_no_efa_device_attached(tmp_path, libnrt) -> None:
    rig = Rig(write_host(tmp_path / "host", make.trn2_3xlarge(efas=1)), libnrt)
    with pytest.raises(
        PlatformError, match=r"trn2.3xlarge has no EFA device attached to a Neuron device; set KVXFER_NEURON_EFA"
    ):
        rig.platform().local_rails(0)
    assert rig.platform(KVXFER_NEURON_EFA="0000:00:1a.0").local_rails(0) == ("rdmap0s26",)


def test_background_cpus_are_those_beside_the_efa_device(tmp_path, libnrt) -> None:
    root = write_host(tmp_path / "host", cpus="0-1,4,6-7")
    assert Rig(root, libnrt).platform().background_cpus() == {0, 1, 4, 6, 7}
    (root / "sys/devices/system/node/node0/cpulist").unlink()
    assert Rig(root, libnrt).platform().background_cpus() is None


def test_neuron_ls_tells_where_devices_are_that_no_table_has(tmp_path, libnrt) -> None:
    """On trn3 AWS publishes the EFA devices alone."""
    rig = Rig(write_host(tmp_path / "host", make.trn3("trn3.48xlarge")), libnrt)
    with pytest.raises(PlatformError, match=r"at a PCI address that nobody tells.*neuron-ls"):
        rig.platform().pci_address(0)
    rig.ls = neuron_ls({5: "4d:00.0"})
    assert rig.platform().pci_address(0) == "0000:4d:00.0"
    assert rig.platform().local_rails(0) == ("rdmap76s0",), "0000:4c:00.0"


@pytest.mark.parametrize(
    ("attached", "preset", "kept"),
    [
        ("0000:57:00.0", None, "rdmap87s0"),
        ("0000:56:00.0", None, "rdmap86s0"),  # what libnrt names is where NIXL puts it
        ("0000:57:00.0", "rdmap86s0", "rdmap86s0"),  # vllm-neuron's own pin
        ("", None, "rdmap87s0"),  # libnrt does not answer: AWS's map
    ],
)
def test_a_worker_is_kept_to_its_efa_device(rig, attached, preset, kept) -> None:
    rig.double.attach(DEVICE, attached)
    environment = {} if preset is None else {"FI_EFA_IFACE": preset}
    WorkerRails(("local", "warn"), "LIBFABRIC", rig.described(), 0, environment, rig.root)
    assert environment["FI_EFA_IFACE"] == kept


def test_a_worker_whose_device_is_not_known_is_kept_to_nothing_and_that_is_said(rig, caplog) -> None:
    del rig.environment["NEURON_RT_VISIBLE_CORES"]
    environment: dict[str, str] = {}
    WorkerRails(("local", "warn"), "LIBFABRIC", rig.described(), 0, environment, rig.root)
    assert "FI_EFA_IFACE" not in environment
    assert "KVXFER_NEURON_DEVICE" in caplog.text
    with pytest.raises(RailsError, match="KVXFER_NEURON_DEVICE"):
        WorkerRails(("local", "enforce"), "LIBFABRIC", rig.described(), 0, environment, rig.root)


# --- fences -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_events(monkeypatch):
    monkeypatch.delattr(torch, "neuron", raising=False)


def test_before_a_cache_is_described_there_is_nothing_to_wait_for(rig) -> None:
    assert rig.platform().fence().done()


def test_one_read_serves_all_fences_that_wait_and_none_that_came_later(rig, without_events) -> None:
    platform = rig.described()
    gate, reading = threading.Event(), threading.Event()
    rig.work.launch(lambda: (reading.set(), gate.wait(30)))
    early = [platform.fence() for _ in range(50)]
    assert reading.wait(30)
    time.sleep(0.05)
    assert not any(fence.done() for fence in early)
    second = threading.Event()
    rig.work.launch(lambda: second.wait(30))
    late = platform.fence()
    gate.set()
    time.sleep(0.1)
    assert not late.done(), "its read began before it was recorded"
    second.set()
    deadline = time.monotonic() + 30
    while not (late.done() and all(fence.done() for fence in early)):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_read_that_fails_lets_no_fence_pass_and_the_next_one_says_why(rig, without_events, caplog) -> None:
    caches = rig.caches()
    platform = rig.platform()
    platform.describe(caches, geometry())

    def broken():
        raise RuntimeError("NRT_EXEC_HW_ERR_HBM_UE")

    rig.work.finish = broken
    with caplog.at_level(logging.ERROR, "kvxfer.neuron"):
        fence = platform.fence()
        deadline = time.monotonic() + 30
        while "no fence passes any more" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert not fence.done()
    with pytest.raises(
        PlatformError, match=r"reading the KV cache back .*NRT_EXEC_HW_ERR_HBM_UE.*start the engine again"
    ):
        platform.fence()


@pytest.mark.parametrize("said", ["event", "1"])
def test_a_kind_of_fence_that_is_none_is_refused(rig, said) -> None:
    with pytest.raises(ConfigError, match=rf"KVXFER_NEURON_FENCE='{said}' must be auto, events or readback"):
        rig.described(KVXFER_NEURON_FENCE=said)


def test_events_are_refused_where_there_are_none(rig, without_events) -> None:
    with pytest.raises(PlatformError, match=r"no torch\.neuron\.Event"):
        rig.described(KVXFER_NEURON_FENCE="events")


@pytest.mark.parametrize("said", ["auto", "events", "readback"])
def test_the_kind_of_fence_that_is_asked_for_is_recorded(rig, monkeypatch, said) -> None:
    monkeypatch.setattr(torch, "neuron", torch_neuron(rig.work), raising=False)
    fence = rig.described(KVXFER_NEURON_FENCE=said).fence()
    assert type(fence).__name__ == ("ReadFence" if said == "readback" else "EventFence")


def test_no_thread_is_started_before_a_fence_is_asked_for(rig, without_events) -> None:
    def readers():
        return sum(thread.name == "kvxfer-neuron-fence" for thread in threading.enumerate())

    before = readers()
    platform = rig.described()
    assert readers() == before
    platform.fence()
    platform.fence()
    assert readers() == before + 1

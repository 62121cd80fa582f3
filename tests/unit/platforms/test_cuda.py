"""The CUDA platform passes the suite over doubles of torch.cuda, of the driver, and of the machine; and what is its own."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pytest

from kvxfer.errors import PlatformError
from kvxfer.layout.maps import spell
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_cuda import CudaPlatform
from kvxfer_cuda import mirror as mirror_module
from kvxfer_cuda import platform as module
from kvxfer_cuda.driver import OVERRIDE
from tests.unit.platforms.cuda_doubles import COMPILER, FakeCuda, OnGpu, compile_driver
from tests.unit.rails import topologies as make

pytest.register_assert_rewrite("tests.unit.platforms.conformance")
from tests.unit.platforms.conformance import PlatformConformance  # noqa: E402

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

BLOCKS, TOKENS, HEADS, DIM = 6, 16, 2, 8
GPUS = "0000:59:00.0,0000:5A:00.0"  # of p5en.48xlarge; the driver writes capitals


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch, libcuda):
    """Two GPUs, whose work is late."""
    cuda = FakeCuda(delay=0.02)
    monkeypatch.setattr(module, "_torch_cuda", lambda: cuda)
    monkeypatch.setenv(OVERRIDE, str(libcuda))
    monkeypatch.setenv("FAKE_GPUS", GPUS)
    return cuda


def geometry_of(*layers: str, backends=("FLASH_ATTN",), dtype: str = "auto", **more) -> Geometry:
    numbered = tuple((name, number) for number, name in enumerate(layers))
    what = {"heads": tuple(range(HEADS)), "total_heads": HEADS, "head_size": DIM, **more}
    return Geometry((LayerGroup(numbered, TOKENS, **what),), BLOCKS, dtype, backends)


class TestCuda(PlatformConformance):
    """vLLM 0.29's HND (LBHNC): [blocks, heads, tokens, K + V] a layer, each in a storage of its own."""

    @pytest.fixture(autouse=True)
    def _gpu(self, gpu):
        self.cuda = gpu

    def make_platform(self) -> CudaPlatform:
        return CudaPlatform()

    def make_caches(self):
        shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
        caches = {f"model.layers.{i}.attn": OnGpu(torch.zeros(shape, dtype=torch.bfloat16)) for i in range(3)}
        return caches, geometry_of(*caches)

    def misshapen(self, caches):
        wrong = OnGpu(torch.zeros((BLOCKS, HEADS + 1, TOKENS, 2 * DIM), dtype=torch.bfloat16))
        return {**caches, "model.layers.1.attn": wrong}

    def copy_memory(self, target, origin, length) -> None:
        ctypes.memmove(target, origin, length)

    def launch(self, platform, seconds):
        done = threading.Event()
        self.cuda.stream_now().launch(lambda: (time.sleep(seconds), done.set()))
        return done.is_set

    @pytest.fixture(autouse=True)
    def _allocate_on_the_host(self, monkeypatch):
        monkeypatch.setattr(CudaPlatform, "_on", lambda self, device: "cpu")

    @pytest.fixture(autouse=True)
    def _copy_late(self, monkeypatch):
        """The driver's double copies at once; its caller is put onto the stream that is current."""
        launch = mirror_module.launch
        later = lambda *args, **kwargs: self.cuda.stream_now().launch(lambda: launch(*args, **kwargs))  # noqa: E731
        monkeypatch.setattr(mirror_module, "launch", later)


class TestCudaTokenMajor(TestCuda):
    """NHD (LBNHC): a view of [blocks, tokens, heads, K + V]."""

    def make_caches(self):
        shape = (BLOCKS, TOKENS, HEADS, 2 * DIM)
        tensors = [torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        caches = {f"model.layers.{i}.attn": OnGpu(tensor) for i, tensor in enumerate(tensors)}
        return caches, geometry_of(*caches)


class TestCudaBlockMajor(TestCuda):
    """A block of all layers in one piece (BLHNC, "cross-layer blocks")."""

    def make_caches(self):
        whole = torch.zeros((BLOCKS, 3, HEADS, TOKENS, 2 * DIM), dtype=torch.bfloat16)
        caches = {f"model.layers.{i}.attn": OnGpu(whole[:, i]) for i in range(3)}
        return caches, geometry_of(*caches)

    def test_it_is_registered_once_and_a_block_of_all_layers_is_one_run(self) -> None:
        caches, geometry = self.make_caches()
        cache = self.make_platform().describe(caches, geometry)
        assert len(cache.spans) == 1
        assert spell(cache).startswith("k+v of layers 0-2, heads 0-1 as [block][layer][head][token 16][k+v]")


class TestCudaPlanes(TestCuda):
    """Up to 0.25: [blocks, 2, tokens, heads, channels]."""

    def make_caches(self):
        shape = (BLOCKS, 2, TOKENS, HEADS, DIM)
        caches = {f"model.layers.{i}.attn": OnGpu(torch.zeros(shape, dtype=torch.float16)) for i in range(3)}
        return caches, geometry_of(*caches)


class TestCudaLatent(TestCuda):
    """MLA: one latent a token, the same on every rank."""

    def make_caches(self):
        shape = (BLOCKS, TOKENS, 72)
        caches = {f"model.layers.{i}.attn": OnGpu(torch.zeros(shape, dtype=torch.bfloat16)) for i in range(3)}
        more = {"heads": (0,), "total_heads": 1, "head_size": 72, "kind": "MLAAttentionSpec"}
        return caches, geometry_of(*caches, backends=("FLASHMLA",), **more)

    def misshapen(self, caches):
        return {**caches, "model.layers.1.attn": OnGpu(torch.zeros((BLOCKS, TOKENS + 1, 72), dtype=torch.bfloat16))}


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def p5en(tmp_path):
    return make.write_sysfs(make.p5en(), tmp_path)


def test_the_pci_address_is_the_drivers_answer(gpu) -> None:
    assert [CudaPlatform().pci_address(device) for device in (0, 1)] == ["0000:59:00.0", "0000:5a:00.0"]


def test_a_gpus_rails_are_its_share_of_its_switch(p5en, monkeypatch) -> None:
    assert CudaPlatform(p5en).local_rails(0) == ["rdmap85s0", "rdmap86s0"]
    assert CudaPlatform(p5en).local_rails(1) == ["rdmap87s0", "rdmap88s0"]
    monkeypatch.setenv("FAKE_GPUS", "0000:5A:00.0")  # what CUDA_VISIBLE_DEVICES=1 makes of device 0
    assert CudaPlatform(p5en).local_rails(0) == ["rdmap87s0", "rdmap88s0"]


def test_no_rail_is_local_where_there_is_none_or_the_gpu_is_not_on_the_bus(p5en, tmp_path, monkeypatch) -> None:
    assert CudaPlatform(tmp_path / "none").local_rails(0) is None
    monkeypatch.setenv("FAKE_GPUS", "0000:01:00.0")
    assert CudaPlatform(p5en).local_rails(0) is None


def test_presence_goes_by_the_device_files(p5en, tmp_path) -> None:
    assert CudaPlatform(p5en).presence().here
    assert "nvidia0" in CudaPlatform(p5en).presence().why
    absent = CudaPlatform(tmp_path / "none").presence()
    assert (absent.here, "no nvidia0" in absent.why) == (False, True)


def test_shared_memory_is_off_where_there_is_an_efa_device(tmp_path) -> None:
    assert CudaPlatform(tmp_path).environment() == {}
    (tmp_path / "sys/bus/pci/drivers/efa").mkdir(parents=True)
    assert CudaPlatform(tmp_path).environment() == {}, "the driver is loaded, no device is there"
    (tmp_path / "sys/bus/pci/drivers/efa/0000:55:00.0").mkdir()
    assert CudaPlatform(tmp_path).environment() == {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}


def test_background_cpus_are_those_near_the_device_that_may_be_used(tmp_path, monkeypatch) -> None:
    place = tmp_path / "sys/bus/pci/devices/0000:59:00.0"
    place.mkdir(parents=True)
    platform = CudaPlatform(tmp_path)
    caches, geometry = TestCuda().make_caches()
    assert platform.background_cpus() is None, "no cache was described"
    platform.describe(caches, geometry)
    assert platform.background_cpus() is None, "the kernel does not tell"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 9} if pid else {2})
    monkeypatch.setenv("FAKE_CUDA_ERROR", "999")
    assert platform.background_cpus() is None, "nor does the driver, which is said where rails are chosen"
    monkeypatch.delenv("FAKE_CUDA_ERROR")
    for text, expected in (("0-3,8\n", {1, 2}), ("9", {9}), ("4-7", None), ("\n", None), ("what", None)):
        (place / "local_cpulist").write_text(text)
        assert platform.background_cpus() == expected


# --- fences -----------------------------------------------------------------------------------------------------------


def wait_for(fence) -> None:
    deadline = time.monotonic() + 30.0
    while not fence.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_fence_waits_for_the_stream_that_is_current_and_for_no_other(gpu) -> None:
    platform, side, go = CudaPlatform(), gpu.Stream(), threading.Event()
    with gpu.stream(side):
        side.late.launch(go.wait)
        held = platform.fence()
    wait_for(platform.fence())
    assert not held.done()
    go.set()
    wait_for(held)


def test_events_are_used_again_only_after_they_have_passed(gpu) -> None:
    platform = CudaPlatform()
    first, second = platform.fence(), platform.fence()
    assert gpu.made == 2
    wait_for(first)
    wait_for(second)
    for _ in range(5):
        wait_for(platform.fence())
    assert gpu.made == 2


def test_a_fence_that_has_passed_stays_passed_when_its_event_is_recorded_again(gpu) -> None:
    platform = CudaPlatform()
    first = platform.fence()
    wait_for(first)
    later = platform.fence()
    assert gpu.made == 1
    assert first.done()
    assert platform._events.ask(first), "it passed between a thread's look and its question"
    assert not later.done()


def test_a_thread_that_asks_is_put_on_the_fences_device_first(gpu) -> None:
    """It is born on device 0; asking there would make a context on somebody else's GPU."""
    gpu.set_device(1)
    fence = CudaPlatform().fence()
    asked = threading.Thread(target=wait_for, args=(fence,))
    asked.start()
    asked.join()
    assert gpu.devices_set == [1, 1]


def test_many_threads_that_ask_see_a_fence_pass_once_and_for_ever(gpu) -> None:
    platform, wrong = CudaPlatform(), []

    def ask(fences) -> None:
        for fence in fences:
            wait_for(fence)
            wrong.extend(fence for _ in range(20) if not fence.done())

    for _ in range(5):
        fences = [platform.fence() for _ in range(4)]
        threads = [threading.Thread(target=ask, args=(fences,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert gpu.made <= 4


def test_re_packing_does_not_wait_for_what_is_computed_and_its_fence_is_its_own(gpu, monkeypatch) -> None:
    platform, go, ran = CudaPlatform(), threading.Event(), []
    monkeypatch.setattr(module, "repack", lambda call, memory: gpu.stream_now().launch(lambda: ran.append(call)))
    caches, geometry = TestCuda().make_caches()
    platform.describe({key: OnGpu(cache.host, 1) for key, cache in caches.items()}, geometry)
    gpu.stream_now().launch(go.wait)
    fences = [platform.repack(number) for number in range(3)]
    for fence in fences:
        wait_for(fence)
    assert ran == [0, 1, 2]
    assert gpu.devices_set == [1], "the mover's thread is born on device 0"
    go.set()


# --- through host memory ----------------------------------------------------------------------------------------------


def test_copies_wait_for_nothing_that_is_computed_and_are_put_on_the_device_of_the_cache(gpu) -> None:
    memory, go = np.arange(64, dtype=np.uint8), threading.Event()
    mirror = CudaPlatform().mirror([(memory.ctypes.data, 64)], 1)
    gpu.stream_now().launch(go.wait)
    wait_for(mirror.copy(np.array([[memory.ctypes.data, mirror.addresses[0], 64, 1, 0, 0]]), inward=False))
    assert ctypes.string_at(mirror.addresses[0], 64) == memory.tobytes()
    assert gpu.devices_set == [1], "the mover's thread is born on device 0"
    go.set()


def test_spans_keep_their_order_and_distances_in_the_mirror(gpu) -> None:
    mirror = CudaPlatform().mirror([(1 << 20, 5000), (3 << 20, 5000), (2 << 20, 5000)], 0)
    first, third, second = mirror.addresses
    assert (second - first, third - second, mirror.size) == (8192, 8192, 3 * 8192)
    assert first % 4096 == 0


def test_a_mirror_that_cannot_be_pinned_says_how_much_it_is_and_what_to_set(gpu, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_ROOM", "8191")
    with pytest.raises(
        PlatformError, match=r"^8,192 bytes of pinned .* device 1, .*--num-gpu-blocks-override.*cuMemHostAlloc"
    ):
        CudaPlatform().mirror([(1 << 20, 5000)], 1)


@pytest.mark.parametrize("allocations", ["one", "one a layer", "one for two layers"])
def test_rows_of_one_copy_may_lie_in_any_allocations(gpu, monkeypatch, allocations) -> None:
    """The driver takes no copy that reaches from one allocation into another; layers that vLLM allocates one by one are such."""
    size, layers = 1 << 16, 4
    monkeypatch.setenv(
        "FAKE_CUDA_ALLOCATION", str({"one": 4, "one a layer": 1, "one for two layers": 2}[allocations] * size)
    )
    room = np.zeros(2 * layers * size, np.uint8)
    base = -(-room.ctypes.data // (layers * size)) * layers * size  # where an allocation begins, whatever its size
    memory = np.frombuffer((ctypes.c_uint8 * (layers * size)).from_address(base), np.uint8).reshape(layers, size)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape)
    mirror = CudaPlatform().mirror([(base + layer * size, size) for layer in range(layers)], 0)
    copies = np.array([[base + 100, mirror.addresses[0] + 100, 3000, layers, size, size]])
    ctypes.memset(mirror.addresses[0], 0, layers * size)
    wait_for(mirror.copy(copies, inward=False))
    there = [ctypes.string_at(address, size) for address in mirror.addresses]
    assert [one[100:3100] for one in there] == [row[100:3100].tobytes() for row in memory]
    assert not any(any(one[3100:]) or any(one[:100]) for one in there)
    before, memory[:] = memory.copy(), 0
    wait_for(mirror.copy(copies, inward=True))
    assert (memory[:, 100:3100] == before[:, 100:3100]).all()
    assert not memory[:, 3100:].any()
    assert not memory[:, :100].any()


def test_a_copy_that_the_driver_refuses_is_told(gpu, monkeypatch) -> None:
    mirror = CudaPlatform().mirror([(1 << 20, 4096)], 0)
    monkeypatch.setenv("FAKE_CUDA_ERROR", "700")
    with pytest.raises(PlatformError, match="cuMemcpy2DAsync_v2"):  # rows that overlap
        mirror.copy(np.array([[1 << 20, mirror.addresses[0], 64, 2, 32, 32]]), inward=True)


# --- staging ----------------------------------------------------------------------------------------------------------


def test_a_staging_area_that_does_not_fit_names_what_to_change(monkeypatch) -> None:
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(PlatformError, match=r"2,000 bytes .* device 1 .* staging_bytes=0 .*out of memory"):
        CudaPlatform().staging(2000, 1)


def test_staging_is_on_the_device_and_only_where_it_is_asked_for() -> None:
    assert CudaPlatform()._on(3) == "cuda:3"
    assert not CudaPlatform.stages_unasked

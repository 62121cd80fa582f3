"""The CUDA platform on a real GPU: the suite, the driver's addresses, fences that wait for kernels, bytes that NIXL moves.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvxfer.errors import KvxferError, PlatformError
from kvxfer.layout.plan import prepare
from kvxfer.layout.positions import Table
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_cuda import CudaPlatform

torch = pytest.importorskip("torch")
pytest.register_assert_rewrite("tests.unit.platforms.conformance")
from tests.unit.platforms.conformance import PlatformConformance  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")]

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 6, 16, 2, 64, 3
CYCLES = 2_000_000_000  # a second, or a little more


def geometry_of(*layers: str) -> Geometry:
    numbered = tuple((name, number) for number, name in enumerate(layers))
    group = LayerGroup(numbered, TOKENS, heads=tuple(range(HEADS)), total_heads=HEADS, head_size=DIM)
    return Geometry((group,), BLOCKS, "auto", ("FLASH_ATTN",))


def named(tensors) -> dict:
    return {f"model.layers.{number}.self_attn.attn": tensor for number, tensor in enumerate(tensors)}


def head_major() -> dict:
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return named(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS))


def wait_for(fence, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not fence.done():
        assert time.monotonic() < deadline, "the fence never passed"
        time.sleep(0.001)


class TestOnGpu(PlatformConformance):
    """HND: a storage a layer."""

    def make_platform(self) -> CudaPlatform:
        return CudaPlatform()

    def make_caches(self):
        caches = head_major()
        return caches, geometry_of(*caches)

    def misshapen(self, caches):
        name = next(iter(caches))
        return {**caches, name: torch.zeros((BLOCKS, HEADS, TOKENS + 1, 2 * DIM), dtype=torch.bfloat16, device="cuda")}

    def copy_memory(self, target, origin, length) -> None:
        torch.cuda.synchronize()
        assert (
            ctypes.CDLL("libcuda.so.1").cuMemcpy(*map(ctypes.c_void_p, (target, origin)), ctypes.c_size_t(length)) == 0
        )
        torch.cuda.synchronize()

    def launch(self, platform, seconds):
        torch.cuda._sleep(int(seconds * CYCLES))
        done = torch.cuda.Event()
        done.record()
        return done.query


class TestOnGpuTokenMajor(TestOnGpu):
    """NHD."""

    def make_caches(self):
        shape = (BLOCKS, TOKENS, HEADS, 2 * DIM)
        caches = named(torch.zeros(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(LAYERS))
        return caches, geometry_of(*caches)


class TestOnGpuBlockMajor(TestOnGpu):
    """A block of all layers in one piece."""

    def make_caches(self):
        whole = torch.zeros((BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM), dtype=torch.bfloat16, device="cuda")
        caches = named(whole[:, number] for number in range(LAYERS))
        return caches, geometry_of(*caches)


# --- addresses --------------------------------------------------------------------------------------------------------


def address_of(index: int) -> str:
    """Torch's own answer, which comes from the runtime."""
    told = torch.cuda.get_device_properties(index)
    return f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"


def test_every_devices_address_is_that_of_the_runtime() -> None:
    platform = CudaPlatform()
    for index in range(torch.cuda.device_count()):
        assert platform.pci_address(index) == address_of(index)
    with pytest.raises(PlatformError, match="CUDA_ERROR_INVALID_DEVICE"):
        platform.pci_address(torch.cuda.device_count())


def test_device_numbers_are_those_of_a_process_that_sees_some_only() -> None:
    last = torch.cuda.device_count() - 1
    program = "from kvxfer_cuda.driver import pci_address; print(pci_address(0))"
    for shown in (str(last), f"GPU-{torch.cuda.get_device_properties(last).uuid}"):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        expected = sorted(map(address_of, range(last + 1)))[last] if shown.isdecimal() else address_of(last)
        assert done.stdout.strip() == expected


def test_asking_for_an_address_makes_no_context() -> None:
    """A context is hundreds of megabytes, and a process that has one may not fork."""
    program = (
        "import ctypes; from kvxfer_cuda.driver import pci_address; pci_address(0); active, flags = ctypes.c_int(), ctypes.c_uint();"
        "ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)); print(active.value)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


# --- fences -----------------------------------------------------------------------------------------------------------


def test_a_fence_waits_for_a_long_kernel_and_for_what_it_was_to_write() -> None:
    platform, memory = CudaPlatform(), torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES // 2)
    memory.fill_(7)
    began = time.monotonic()
    fence = platform.fence()
    assert not fence.done()
    assert time.monotonic() - began < 0.2, "recording or asking waited for the kernel"
    wait_for(fence)
    side = torch.cuda.Stream()  # joined to nothing: it reads what is there
    with torch.cuda.stream(side):
        assert bool((memory == 7).all())


def test_a_fence_covers_the_stream_that_is_current_and_what_that_waits_for() -> None:
    platform, side = CudaPlatform(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES // 2)
    apart = platform.fence()
    torch.cuda.current_stream().wait_stream(side)
    joined = platform.fence()
    wait_for(apart)
    assert not joined.done()
    wait_for(joined)
    assert side.query()


def test_another_thread_asks_without_touching_the_current_device_of_the_first() -> None:
    platform = CudaPlatform()
    device = torch.cuda.device_count() - 1
    before, seen = torch.cuda.current_device(), []
    with torch.cuda.device(device):
        torch.cuda._sleep(CYCLES // 10)
        fence = platform.fence()
        thread = threading.Thread(target=lambda: (wait_for(fence), seen.append(torch.cuda.current_device())))
        thread.start()
        thread.join()
    assert seen == [device]
    assert torch.cuda.current_device() == before


def test_fences_that_follow_each_other_share_one_event() -> None:
    platform = CudaPlatform()
    torch.cuda.synchronize()
    made = []
    for _ in range(1000):
        fence = platform.fence()
        wait_for(fence)
        made.append(fence)
    assert sum(len(free) for free in platform._events._free.values()) == 1
    assert all(fence.done() for fence in made)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_staging_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlatformError, match="staging_bytes"):
        CudaPlatform().staging(1 << 50, torch.cuda.current_device())


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_nixl_moves_blocks_between_two_caches_by_the_maps(operation) -> None:
    """Over UCX, between two agents of this process: head-major into block-major, other blocks, and nothing else."""
    nixl = pytest.importorskip("kvxfer.transport.nixl")
    ours, theirs = TestOnGpu(), TestOnGpuBlockMajor()
    (caches, geometry), (others, _) = ours.make_caches(), theirs.make_caches()
    for number, tensor in enumerate(caches.values()):
        tensor.copy_(torch.randn(tensor.shape, device="cuda") + number)
    source, sink = CudaPlatform().describe(caches, geometry), CudaPlatform().describe(others, geometry)
    torch.cuda.synchronize()
    try:
        near, far = nixl.NixlAgent("near", "UCX"), nixl.NixlAgent("far", "UCX")
    except KvxferError as error:
        pytest.skip(f"no NIXL with UCX here: {error}")
    try:
        near.register([(at, length, source.device) for at, length in source.spans], "VRAM")
        far.register([(at, length, sink.device) for at, length in sink.spans], "VRAM")
        ids = [Table(np.array(blocks, dtype=np.int32)) for blocks in ([4, 2, 5], [1, 3, 2])]
        plan = prepare(source, sink, useful=0).plan([ids[0]], [ids[1]], 0, 3 * TOKENS)
        one, other = (near, far) if operation == "WRITE" else (far, near)
        one.add_peer(other.metadata(), other.name)
        sides = (plan.source, plan.sink) if operation == "WRITE" else (plan.sink, plan.source)
        transfer = one.post(operation, *sides, "VRAM", other.name)
        deadline = time.monotonic() + 60.0
        while one.status(transfer) is nixl.Status.PENDING:
            assert time.monotonic() < deadline
            other.notifications()
        assert one.status(transfer) is nixl.Status.DONE
        one.release(transfer)
        del transfer
        for mine, its in zip(caches.values(), others.values(), strict=True):
            assert its[[1, 3, 2]].equal(mine[[4, 2, 5]])
            assert not its[[0, 4, 5]].any()
    finally:
        near.close()
        far.close()

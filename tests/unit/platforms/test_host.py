"""The host platform passes the suite, in its plain and in its late mode; and what is its own."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import replace

import pytest

from kvxfer.errors import ConfigError, PlatformError
from kvxfer.layout.maps import spell
from kvxfer.platform import Geometry, LayerGroup
from kvxfer_host import HostPlatform
from kvxfer_host.platform import FENCE_DELAY
from kvxfer_host.stream import LateStream

pytest.register_assert_rewrite("tests.unit.platforms.conformance")
from tests.unit.platforms.conformance import PlatformConformance  # noqa: E402

torch = pytest.importorskip("torch")

BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 32, 2, 16


def geometry_of(*layers: str, backends=("CPU_ATTN",), blocks: int = BLOCKS) -> Geometry:
    numbered = tuple((name, number) for number, name in enumerate(layers))
    group = LayerGroup(numbered, BLOCK_SIZE, heads=tuple(range(HEADS)), total_heads=HEADS, head_size=DIM)
    return Geometry((group,), blocks, "auto", backends)


class TestHost(PlatformConformance):
    def make_platform(self) -> HostPlatform:
        return HostPlatform()

    def make_caches(self):
        """vLLM 0.29's CPU backend: [blocks, heads, tokens, 2 × head size] a layer, each in a storage of its own."""
        shape = (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM)
        caches = {f"model.layers.{i}.attn": torch.zeros(shape, dtype=torch.bfloat16) for i in range(3)}
        return caches, geometry_of(*caches)

    def misshapen(self, caches):
        shape = (BLOCKS + 1, HEADS, BLOCK_SIZE, 2 * DIM)
        return {**caches, "model.layers.1.attn": torch.zeros(shape, dtype=torch.bfloat16)}

    def copy_memory(self, target, origin, length) -> None:
        ctypes.memmove(target, origin, length)


class TestHostAsADevice(TestHost):
    """The test mode in which its memory is moved through a mirror."""

    def make_platform(self) -> HostPlatform:
        return HostPlatform(copy_delay=0.02)


def test_host_memory_needs_no_mirror() -> None:
    assert HostPlatform().mirror([(0, 1 << 50)], 0) is None


class TestHostWithOneStorage(TestHost):
    """All layers are views of one storage, strided so that a block of all layers is one run."""

    def make_caches(self):
        _, geometry = super().make_caches()
        whole = torch.zeros((BLOCKS, 3, HEADS, BLOCK_SIZE, 2 * DIM), dtype=torch.bfloat16)
        return {f"model.layers.{i}.attn": whole[:, i] for i in range(3)}, geometry

    def test_one_storage_is_registered_once(self) -> None:
        caches, geometry = self.make_caches()
        assert len(self.make_platform().describe(caches, geometry).spans) == 1


class TestHostOfStrides(TestHost):
    """Under the instruction set of which strides tell everything, whatever this machine has."""

    @pytest.fixture(autouse=True)
    def _vec(self, monkeypatch):
        cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")


class TestLateHost(TestHost):
    """The test mode: work and fences pass late."""

    def make_platform(self) -> HostPlatform:
        return HostPlatform(fence_delay=0.05)

    def launch(self, platform, seconds):
        done = threading.Event()
        platform.stream.launch(lambda: (time.sleep(seconds), done.set()))
        return done.is_set


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros((BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM)).transpose(1, 2),
        torch.zeros((BLOCKS, HEADS, 2, BLOCK_SIZE))[:, :, 0],
        torch.zeros(BLOCKS * 4),
    ],
    ids=["its block is not one run", "its block is a part of a run", "it has no blocks"],
)
def test_a_block_that_is_not_one_run_of_memory_is_refused_with_its_strides(wrong) -> None:
    with pytest.raises(PlatformError) as raised:
        HostPlatform().describe({"odd": wrong}, geometry_of("odd"))
    assert "layer odd" in str(raised.value)
    assert str(tuple(wrong.stride())) in str(raised.value)


def test_layers_of_different_element_types_under_one_block_table_are_refused() -> None:
    caches, _ = TestHost().make_caches()
    caches["odd"] = torch.zeros((BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM))
    with pytest.raises(PlatformError, match=r"element types \['torch.bfloat16', 'torch.float32'\]"):
        HostPlatform().describe(caches, geometry_of(*caches))


def describe(isa: str, monkeypatch, dtype=torch.bfloat16):
    cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: isa)
    caches = {"model.layers.0.attn": torch.zeros((BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM), dtype=dtype)}
    return HostPlatform().describe(caches, geometry_of(*caches))


@pytest.mark.parametrize(("heads", "size"), [(HEADS * 2, DIM), (HEADS, DIM * 2), (HEADS * 2, DIM // 2)])
def test_layers_of_different_shapes_under_one_block_table_are_refused(heads, size) -> None:
    """A draft model's: described by the first layer's strides, it would be written to where other blocks lie."""
    caches = {
        "model.layers.0.attn": torch.zeros((BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM)),
        "draft_model.layers.0.attn": torch.zeros((BLOCKS, heads, BLOCK_SIZE, 2 * size)),
    }
    with pytest.raises(
        PlatformError, match=r"model\.layers\.0.* and draft_model\.layers\.0.*take a draft model with KV heads"
    ):
        HostPlatform().describe(caches, geometry_of(*caches))


def test_the_kernels_instruction_set_decides_what_is_inside_a_block(monkeypatch) -> None:
    """ "vec" transposes K, which strides can say; what packs tokens into tiles only moves between equal kernels."""
    strided, tiles = describe("vec", monkeypatch), describe("amx", monkeypatch)
    assert [plane.name for plane in strided.groups[0].planes] == ["k", "v"]
    k, v = strided.groups[0].planes
    assert (k.tokens, k.channels) == (((BLOCK_SIZE, 2),), ((DIM, 2 * BLOCK_SIZE),))
    assert (v.tokens, v.channels) == (((BLOCK_SIZE, 2 * DIM),), ((DIM, 2),))
    (plane,) = tiles.groups[0].planes
    assert plane.interior == "host:CPU_ATTN:amx"
    assert "opaque" in spell(tiles)


def test_bytes_are_named_by_what_they_mean(monkeypatch) -> None:
    """vLLM keeps fp8 of either kind as uint8: an engine with the one must not hand over to an engine with the other."""
    caches = {"model.layers.0.attn": torch.zeros((BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM), dtype=torch.uint8)}
    found = {}
    for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
        cache = HostPlatform().describe(caches, replace(geometry_of(*caches), cache_dtype=name))
        (found[name],) = {plane.dtype for plane in cache.groups[0].planes}
    assert found == {"auto": "uint8", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def test_the_instruction_set_is_asked_for_what_the_model_computes_in(monkeypatch) -> None:
    """That is what vLLM asks it for. A cache of bytes does not tell: on a machine with AMX a bfloat16 model packs it into tiles."""
    cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda dtype, *_: "amx" if dtype is torch.bfloat16 else "vec")
    caches = {"model.layers.0.attn": torch.zeros((BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM), dtype=torch.uint8)}
    for model, tag in (("bfloat16", "host:CPU_ATTN:amx"), ("float32", ""), ("", "")):
        geometry = replace(geometry_of(*caches), cache_dtype="fp8", model_dtype=model)
        assert HostPlatform().describe(caches, geometry).groups[0].planes[0].interior == tag


def test_a_block_of_unknown_axes_moves_as_a_whole_between_equals(monkeypatch) -> None:
    caches = {"model.layers.0.attn": torch.zeros((BLOCKS, 3, 5), dtype=torch.bfloat16)}
    (plane,) = HostPlatform().describe(caches, geometry_of(*caches, backends=())).groups[0].planes
    assert plane.interior.startswith("host:no-attention")
    assert plane.interior.endswith(f":{HEADS}of{HEADS}x{DIM}")
    assert (plane.heads, plane.content) == ((0,), 30)


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "61", "1s"])
def test_a_delay_that_is_none_is_refused_with_its_name_and_value(monkeypatch, text) -> None:
    monkeypatch.setenv(FENCE_DELAY, text)
    with pytest.raises(
        ConfigError, match=rf"KVXFER_HOST_FENCE_DELAY='{text}' must be a number of seconds from 0 to 60"
    ):
        HostPlatform()


@pytest.mark.parametrize(("text", "delay"), [(None, None), ("0", None), ("0.25", 0.25), ("60", 60.0)])
def test_the_environment_turns_the_late_mode_on(monkeypatch, text, delay) -> None:
    monkeypatch.delenv(FENCE_DELAY, raising=False)
    if text is not None:
        monkeypatch.setenv(FENCE_DELAY, text)
    stream = HostPlatform().stream
    assert (None if stream is None else stream.delay) == delay


def test_late_work_runs_in_order_and_not_early() -> None:
    stream, ran, start = LateStream(0.05), [], time.monotonic()
    for i in range(5):
        stream.launch(lambda i=i: ran.append((i, time.monotonic())))
    fence = stream.fence()
    assert not fence.done()
    assert fence.wait(10.0)
    assert [i for i, _ in ran] == list(range(5))
    assert ran[0][1] - start >= 0.05


def test_an_efa_device_leaves_libfabrics_provider_alone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("kvxfer_host.platform._EFA_DRIVER", str(tmp_path / "none"))
    assert HostPlatform().environment() == {"FI_PROVIDER": "tcp"}
    monkeypatch.setattr("kvxfer_host.platform._EFA_DRIVER", str(tmp_path))
    assert HostPlatform().environment() == {"FI_PROVIDER": "tcp"}, "the driver is loaded, no device is there"
    (tmp_path / "0000:00:06.0").mkdir()
    assert HostPlatform().environment() == {}

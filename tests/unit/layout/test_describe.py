"""Maps of tensors, against numpy's own idea of where their elements are."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.describe import Content, Heads, Tensor, opaque, sections, strided
from kvxfer.layout.maps import CacheMap, Group
from kvxfer.layout.ranks import Shard
from tests.unit.layout.caches import Rank

KV = [Content("k", 4), Content("v", 4)]
HEADS = Heads((2, 3, 4), 6)


def tensors(shape, order, layers: int = 2) -> tuple[list[Tensor], np.ndarray]:
    """Layers' arrays with the axes of ``shape``, in memory in ``order``; each element is its own address."""
    physical = np.empty([layers, *(shape[axis] for axis in order)], dtype=np.int64)
    logical = physical.transpose(0, *(1 + order.index(axis) for axis in range(len(order))))
    base = 1 << 40
    item = 8
    physical[:] = base + item * np.arange(physical.size).reshape(physical.shape)
    return [Tensor(i * 3, int(one.flat[0]), one.shape, one.strides) for i, one in enumerate(logical)], logical


def addresses(planes, shape) -> np.ndarray:
    """Every element's address by the planes: [plane, layer, block, head, token, channel]."""
    blocks, tokens, channels = shape
    result = []
    for plane in planes:
        cache = CacheMap((Group(tokens, blocks, (plane,)),), (), "DRAM")
        one = Rank(cache, Shard(0, 1), np.empty(0), 0)
        result.append(
            [
                [
                    [
                        [[one.address(plane, layer, b, h, t, c) for c in range(channels)] for t in range(tokens)]
                        for h in range(3)
                    ]
                    for b in range(blocks)
                ]
                for layer in plane.layers
            ]
        )
    return np.array(result)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
def test_vllms_tensors_with_k_and_v_joined(order) -> None:
    described, logical = tensors((5, 3, 6, 8), order)
    planes = strided(described, "BHNC", KV, dtype="float64", item=8, heads=HEADS)
    assert [(p.name, p.layers, p.heads, p.total_heads) for p in planes] == [
        ("k", (0, 3), (2, 3, 4), 6),
        ("v", (0, 3), (2, 3, 4), 6),
    ]
    assert (addresses(planes, (5, 6, 4)) == np.stack([logical[..., :4], logical[..., 4:]])).all()


def test_vllm_neurons_tensors_with_k_and_v_apart() -> None:
    described, logical = tensors((2, 5, 3, 6, 4), (0, 1, 2, 3, 4))
    planes = strided(described, "PBHNC", KV, dtype="float64", item=8, heads=HEADS)
    assert (addresses(planes, (5, 6, 4)) == np.moveaxis(logical, 1, 0)).all()


def test_blocks_split_into_kernel_blocks_and_packed_tokens() -> None:
    described, logical = tensors((5, 2, 3, 3, 8), (0, 1, 2, 3, 4))  # block, kernel block, head, token, channel
    planes = strided(described, "BNHNC", KV, dtype="float64", item=8, heads=HEADS)
    whole = np.moveaxis(logical, 2, 3).reshape(2, 5, 3, 6, 8)
    assert (addresses(planes, (5, 6, 4)) == np.stack([whole[..., :4], whole[..., 4:]])).all()
    described, logical = tensors((5, 3, 3, 4, 2), (0, 1, 2, 3, 4))  # vllm-neuron's packed fp8 K: token pairs innermost
    (plane,) = strided(described, "BHNCN", [Content("k", 4)], dtype="fp8", item=8, heads=HEADS)
    assert (addresses([plane], (5, 6, 4))[0] == np.swapaxes(logical, 4, 5).reshape(2, 5, 3, 6, 4)).all()


def test_axes_that_are_not_there() -> None:
    described, _ = tensors((5, 1, 6, 4), (0, 1, 2, 3))
    (plane,) = strided(described, "B1NC", [Content("latent", 4)], dtype="x", item=8, heads=Heads((0,), 1))
    assert (plane.heads, plane.tokens, plane.channels) == ((0,), ((6, 32),), ((4, 8),))


@pytest.mark.parametrize(
    ("axes", "contents", "heads", "text"),
    [
        ("BHN", KV, HEADS, r"layer 0: shape \(5, 3, 6, 8\) has not the axes BHN"),
        ("BHNC", KV, Heads((2, 3), 6), r"as BHNC does not hold 2 heads of 4 \(k\) \+ 4 \(v\)"),
        ("BHNC", KV[:1], HEADS, r"does not hold 3 heads of 4 \(k\)"),
        ("BBNC", KV, HEADS, "does not hold"),
        ("BHN1", KV, HEADS, "does not hold"),
        ("BHCC", [Content("k", 24), Content("v", 24)], HEADS, "channels in 2 digits cannot be cut into k and others"),
    ],
)
def test_tensors_that_are_not_what_they_should_be_are_refused(axes, contents, heads, text) -> None:
    described, _ = tensors((5, 3, 6, 8), (0, 1, 2, 3))
    with pytest.raises(LayoutMismatchError, match=text):
        strided(described, axes, contents, dtype="x", item=8, heads=heads)


def test_layers_of_different_shape_are_described_apart() -> None:
    described, _ = tensors((5, 3, 6, 8), (0, 1, 2, 3))
    other, _ = tensors((5, 3, 4, 8), (0, 1, 2, 3))
    with pytest.raises(
        LayoutMismatchError, match=r"layer 3: shape \(5, 3, 4, 8\) .* differ from layer 0's \(5, 3, 6, 8\)"
    ):
        strided([described[0], other[1]], "BHNC", KV, dtype="x", item=8, heads=HEADS)


def test_an_indexers_block_begins_with_all_keys_and_ends_with_all_scales() -> None:
    described = [Tensor(layer, 1000 + 4096 * layer, (8, 16, 132), (16 * 132, 132, 1)) for layer in (0, 2)]
    keys, scales = sections(described, 16, [Content("index", 128), Content("index_scale", 4)], dtype="uint8", item=1)
    assert (keys.bases, keys.tokens, keys.channels) == ((1000, 9192), ((16, 128),), ((128, 1),))
    assert (scales.bases, scales.tokens, scales.channels) == ((1000 + 2048, 9192 + 2048), ((16, 4),), ((4, 1),))
    assert keys.block_stride == scales.block_stride == 16 * 132


def test_an_opaque_cell_is_one_run_of_bytes() -> None:
    described, _ = tensors((5, 3, 6, 8), (0, 1, 2, 3))
    (plane,) = opaque(described, "BHNC", name="kv", dtype="x", interior="tiles", item=8, heads=HEADS)
    assert (plane.item, plane.tokens, plane.channels, plane.interior) == (1, (), ((384, 1),), "tiles")
    assert (plane.head_stride, plane.block_stride) == (384, 3 * 384)
    described, _ = tensors((5, 3, 6, 8), (0, 2, 1, 3))
    with pytest.raises(LayoutMismatchError, match="layer 0: a cell of 384 bytes is spread over 1024"):
        opaque(described, "BHNC", name="kv", dtype="x", interior="tiles", item=8, heads=HEADS)

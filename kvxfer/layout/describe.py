"""Cache maps from what a platform reads off its tensors: addresses, shapes, strides.

A tensor is described by a letter for each of its dimensions: ``B`` block, ``H`` head, ``N`` token, ``C`` channel, ``P`` plane
(vllm-neuron's leading 2 for K and V), ``1`` for one that is not there. A letter that comes twice is an axis in two digits, major
first. vLLM from 0.28 on: ``BHNC`` with K and V joined in C, whatever the memory order; where it splits blocks into kernel
blocks, ``BNHNC`` after unflattening. vllm-neuron: ``PBHNC``; its packed fp8 K: ``BHNCN``.

Nothing here knows torch; shapes are elements, strides are *bytes*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvxfer.errors import LayoutMismatchError
from kvxfer.layout.maps import Plane, extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.layout.maps import Digit


class Tensor(NamedTuple):
    """One layer's cache: the model's index of the layer, the address of its first element, its shape, its strides in bytes."""

    layer: int
    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Content(NamedTuple):
    """A plane's name, and how many channels of a token it takes."""

    name: str
    channels: int


class Heads(NamedTuple):
    """The model's heads that the slots of this rank's tensors hold, and how many the model has."""

    held: tuple[int, ...]
    total: int


def strided(
    tensors: Sequence[Tensor], axes: str, contents: Sequence[Content], *, dtype: str, item: int, heads: Heads
) -> tuple[Plane, ...]:
    """Describe the layers' tensors, which differ in nothing but their layer and address.

    Without ``P`` among the axes the contents follow each other in C; with it, content i is at index i of P and fills C. Raises
    LayoutMismatchError when the tensors are of different kinds or do not hold what they should, naming the layer.
    """
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape != first.shape or tensor.strides != first.strides:
            raise LayoutMismatchError(
                f"layer {tensor.layer}: shape {tensor.shape} and strides {tensor.strides} differ from layer {first.layer}'s "
                f"{first.shape} and {first.strides}: describe them apart"
            )
    if len(first.shape) != len(axes) or len(first.strides) != len(axes):
        raise LayoutMismatchError(f"layer {first.layer}: shape {first.shape} has not the axes {axes}")
    digits = {letter: _digits(first, axes, letter) for letter in "BHNCP1"}
    single = {letter: digits[letter][0] if digits[letter] else (1, 0) for letter in "BHP"}
    channels = sum(content.channels for content in contents)
    have = (extent(digits["H"]), extent(digits["1"]), extent(digits["C"]) * single["P"][0])
    if max(len(digits[letter]) for letter in "BHP") > 1 or have != (len(heads.held), 1, channels):
        raise LayoutMismatchError(
            f"layer {first.layer}: shape {first.shape} as {axes} does not hold {len(heads.held)} heads of "
            + " + ".join(f"{content.channels} ({content.name})" for content in contents)
        )
    planes, at = [], 0
    for number, content in enumerate(contents):
        inside = digits["C"]
        if single["P"][0] > 1:
            shift = number * single["P"][1]
        else:
            inside, shift = _part(digits["C"], at, content, first.layer)
        at += content.channels
        planes.append(
            Plane(
                name=content.name,
                dtype=dtype,
                item=item,
                layers=tuple(tensor.layer for tensor in tensors),
                bases=tuple(tensor.base + shift for tensor in tensors),
                heads=heads.held,
                total_heads=heads.total,
                block_stride=single["B"][1],
                head_stride=single["H"][1],
                tokens=digits["N"],
                channels=inside,
            )
        )
    return tuple(planes)


def sections(
    tensors: Sequence[Tensor], block_size: int, contents: Sequence[Content], *, dtype: str, item: int
) -> tuple[Plane, ...]:
    """Describe blocks that hold all tokens' first content, then all tokens' second: tensors of shape (blocks, …), one head.

    DeepSeek's sparse-attention indexer is one, though its tensor's shape says [block, token, keys + scales]: a block begins with
    the keys of all tokens and ends with their scales (vLLM 0.29, v1/attention/ops/rocm_aiter_mla_sparse.py:231).
    """
    planes, at = [], 0
    for content in contents:
        size = content.channels * item
        planes.append(
            Plane(
                name=content.name,
                dtype=dtype,
                item=item,
                layers=tuple(tensor.layer for tensor in tensors),
                bases=tuple(tensor.base + at for tensor in tensors),
                heads=(0,),
                total_heads=1,
                block_stride=tensors[0].strides[0],
                head_stride=0,
                tokens=((block_size, size),),
                channels=((content.channels, item),),
            )
        )
        at += block_size * size
    return tuple(planes)


def opaque(
    tensors: Sequence[Tensor], axes: str, *, name: str, dtype: str, interior: str, item: int, heads: Heads
) -> tuple[Plane, ...]:
    """Describe tensors of which only [block, head, cell] is known: a cell's N and C are one run of bytes, named ``interior``.

    The tag must name everything that shapes a cell: kernel, instruction set, element type, head size.
    """
    (plane,) = strided(tensors, axes, [Content(name, _width(tensors[0], axes))], dtype=dtype, item=item, heads=heads)
    cell = extent(plane.tokens) * plane.content
    if plane.head_span != cell:
        raise LayoutMismatchError(f"layer {plane.layers[0]}: a cell of {cell} bytes is spread over {plane.head_span}")
    return (_opaque(plane, cell, interior),)


def _opaque(plane: Plane, cell: int, interior: str) -> Plane:
    return Plane(
        name=plane.name,
        dtype=plane.dtype,
        item=1,
        layers=plane.layers,
        bases=plane.bases,
        heads=plane.heads,
        total_heads=plane.total_heads,
        block_stride=plane.block_stride,
        head_stride=plane.head_stride,
        tokens=(),
        channels=((cell, 1),),
        interior=interior,
    )


def _digits(tensor: Tensor, axes: str, letter: str) -> tuple[Digit, ...]:
    return tuple(
        (size, stride) for axis, size, stride in zip(axes, tensor.shape, tensor.strides, strict=True) if axis == letter
    )


def _width(tensor: Tensor, axes: str) -> int:
    return extent(_digits(tensor, axes, "C"))


def _part(digits: tuple[Digit, ...], first: int, content: Content, layer: int) -> tuple[tuple[Digit, ...], int]:
    """Take the channels of one content out of an axis: the digits, and where they begin."""
    if content.channels == extent(digits):
        return digits, 0
    if len(digits) != 1:
        raise LayoutMismatchError(
            f"layer {layer}: channels in {len(digits)} digits cannot be cut into {content.name} and others"
        )
    stride = digits[0][1]
    return ((content.channels, stride),), first * stride

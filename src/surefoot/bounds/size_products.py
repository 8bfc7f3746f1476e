r"""What products do to norms.

:math:`\|a \circ b\| \le \|a\|\,\|b\|_\infty`, :math:`\|AB\|_F \le \|A\|_F\|B\|_2`, and in both at
most the product of the norms: the curvature is 1. A convolution is a product of matrices after the extraction
of patches, whose norm is the root of the largest number c of patches that share an entry: :math:`C = \sqrt c`.
Where a factor is a tensor repeated along some dimensions, as scales of a normalisation are, the product is one
of the repeated tensor: its slope in it is the largest norm of a slice of the other factor, and its curvature
still 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.bounds.claims import (
    ONE,
    Claim,
    aligned,
    outward,
    overlap_of,
    result,
    root,
    units,
)  # fmt: skip
from surefoot.bounds.tensor_size import Size, consistent
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.norms import convolution_norm, frobenius_norm, spectral_norm
from surefoot.program.ir import Node

_LARGEST_PATCHES = 2e8  # multiplications that the norm of a matrix of patches may take


def _product(
    node: Node,
    a: Size,
    b: Size,
    norms: tuple[Magnitude, Magnitude],
    bend: Magnitude,
    inner: float,
    **parts: Any,
) -> Claim:
    """A product with slopes in its two factors, and sums of so many products."""
    bound = minimum(a.bound * norms[0], b.bound * norms[1], a.bound * b.bound * bend)
    size = result(node, **{"bound": bound, **parts})
    rounding = units(inner + 1, a.bound * b.bound * bend)
    return Claim({0: norms[0], 1: norms[1]}, size, rounding, {(0, 1): bend}, summands=int(inner))


def _mul(node: Node, arguments: Sequence[Size]) -> Claim:
    """Entry by entry; a factor of another shape is repeated along the dimensions where it has one entry."""
    a, b = arguments
    claims = [_repeated(node, a, b), _repeated(node, b, a)]
    corners = [a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high]
    unclear = any(math.isnan(each) for each in corners)
    low, high = (-math.inf, math.inf) if unclear else (outward(min(corners), -1), outward(max(corners), 1))
    bound = minimum(claims[0][1], claims[1][1])
    slices = []
    for d in range(len(node.shape)):
        one = _slice_of(a, d, node.shape) * b.peak
        other = _slice_of(b, d, node.shape) * a.peak
        slices.append(minimum(one, other))
    slopes = (claims[0][0], claims[1][0])
    repeated = root(math.prod(math.prod(node.shape) / max(each.numel, 1) for each in arguments))
    claim = _product(
        node,
        a,
        b,
        slopes,
        ONE,
        1,
        peak=a.peak * b.peak,
        total=a.bound * b.bound * repeated,
        slices=tuple(slices),
        low=low,
        high=high,
    )
    size = consistent(replace(claim.size, bound=minimum(bound, claim.size.bound)))
    return replace(claim, size=size, rounding=units(2, maximum(size.bound, bound)))


def _slice_of(size: Size, d: int, shape: Sequence[int]) -> Magnitude:
    """The largest slice of a tensor that is repeated to a shape."""
    own, times = aligned(size, shape)[d], math.prod(shape) / max(size.numel, 1)
    if own is not None:
        return size.slices[own] * root(times)
    return size.bound * root(times / max(shape[d], 1))


def _repeated(node: Node, factor: Size, other: Size) -> tuple[Magnitude, Magnitude]:
    """The slope of a product in a factor that may be repeated, and the norm of the product.

    An entry of the factor meets a slice of the other; the norm of such a slice is the slope. It lies in a slice
    along each dimension that the factor has.
    """
    times = math.prod(node.shape) / max(factor.numel, 1)
    slope = minimum(other.peak * root(times), *_whole(other, node.shape))
    for d, own in enumerate(aligned(factor, node.shape)):
        if own is not None and times > 1:
            slope = minimum(slope, _slice_of(other, d, node.shape))
    return slope, factor.bound * slope


def _whole(size: Size, shape: Sequence[int]) -> tuple[Magnitude]:
    """The norm of a tensor that is repeated to a shape."""
    return (size.bound * root(math.prod(shape) / max(size.numel, 1)),)


def _matmul(node: Node, arguments: Sequence[Size]) -> Claim:
    a, b = arguments
    norms = (b.operator, a.operator)
    slices: list[Magnitude] = [a.bound * b.operator] * len(node.shape)
    slices[-2] = a.slices[-2] * b.operator
    slices[-1] = a.operator * b.slices[-1]
    if len(node.shape) == 3:
        slices[0] = minimum(a.slices[0] * minimum(b.operator, b.slices[0]), a.operator * b.slices[0])
        norms = (minimum(b.operator, b.slices[0]), minimum(a.operator, a.slices[0]))
    peak = a.slices[-2] * b.slices[-1]
    return _product(
        node, a, b, norms, ONE, a.shape[-1], peak=peak, slices=tuple(slices), operator=a.operator * b.operator
    )


def _conv(node: Node, arguments: Sequence[Size]) -> Claim:
    x, weight = arguments
    return _convolved(node, x, weight, x.shape)


def _conv_input(node: Node, arguments: Sequence[Size]) -> Claim:
    """A transposed convolution: the transpose of a convolution of tensors of the shape of the result."""
    g, weight = arguments
    return _convolved(node, g, weight, node.shape)


def _convolved(node: Node, x: Size, weight: Size, image: Sequence[int]) -> Claim:
    options = {name: node.options[name] for name in ("stride", "padding", "dilation", "groups")}
    bend = root(_patches(image, weight.shape, node.options))
    norm = weight.bound * bend
    if weight.value is not None and weight.spread.is_finite:
        centre = convolution_norm(weight.value, tuple(image[2:]), **options)
        norm = minimum(norm, Magnitude.of(centre) + bend * weight.spread)
    inner = math.prod(weight.shape[1:])
    forward = node.primitive.name == "conv"
    patches = _patch_slope(x, weight.shape, node.options, bend) if forward else x.bound * bend
    slices = (x.slices[0] * norm,) + (x.bound * norm,) * (len(node.shape) - 1)
    return _product(node, x, weight, (norm, patches), bend, inner, slices=slices)


def _patches(image: Sequence[int], weight: Sequence[int], options: Mapping[str, Any]) -> int:
    """How many patches share an entry of an image, at most."""
    return overlap_of(image[2:], weight[2:], options)


def _patch_slope(x: Size, weight: Sequence[int], options: Mapping[str, Any], bend: Magnitude) -> Magnitude:
    """The norm of the matrix of all patches of images over the domain."""
    if x.value is None or not x.spread.is_finite:
        return x.bound * bend
    return minimum(x.bound * bend, _patch_norm(x.value, weight, options) + bend * x.spread)


def _patch_norm(x: Tensor, weight: Sequence[int], options: Mapping[str, Any]) -> Magnitude:
    """The norm of the matrix of all patches of images, or of all its entries where that is too much work."""
    kernel, rank = weight[2:], len(weight) - 2
    size = math.prod(weight[1:])
    number = x.numel() // x.shape[1] * size // max(1, math.prod(options["stride"]))
    if rank == 2 and options["groups"] == 1 and number * size <= _LARGEST_PATCHES:
        columns = torch.nn.functional.unfold(
            x, tuple(kernel), options["dilation"], options["padding"], options["stride"]
        )
        return Magnitude.of(spectral_norm(columns.transpose(0, 1).reshape(columns.shape[1], -1)))
    ones, image = x.new_ones(1, 1, *kernel), x.new_zeros(1, 1, *x.shape[2:])
    geometry = [options["stride"], options["padding"], options["dilation"], False, [0] * rank, 1]
    out = torch.ops.aten.convolution(image, ones, None, *geometry)
    counts = torch.ops.aten.convolution_backward(
        torch.ones_like(out), image, ones, None, *geometry, [True, False, False]
    )[0]
    return Magnitude.of(frobenius_norm(x * counts.sqrt())) * (1 + 2.0**-50)


def _conv_weight(node: Node, arguments: Sequence[Size]) -> Claim:
    """Costates times patches of images."""
    g, x = arguments
    bend = root(_patches(x.shape, node.shape, node.options))
    norms = (_patch_slope(x, node.shape, node.options, bend), g.bound * bend)
    return _product(node, g, x, norms, bend, g.numel // max(g.shape[1], 1))


PRODUCTS: dict[str, Callable[[Node, Sequence[Size]], Claim]] = {
    "mul": _mul, "matmul": _matmul, "conv": _conv, "conv_input": _conv_input, "conv_weight": _conv_weight,
}  # fmt: skip

r"""The operator norm of convolutions on finite images, and how often their patches overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from surefoot.norms.hermitian import exponent, gamma, times_power, unscale, up
from surefoot.norms.matrix import affordable_norm, batched_spectral_norm, frobenius_norm, wide
from surefoot.norms.symbol import Axis, symbol_norm

Sizes = int | Sequence[int]

_BUDGET = 1.4e10
_DENSE_SHARE = 64


def convolution_norm(
    weight: Tensor,
    input_size: Sizes,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    output_size: Sizes | None = None,
    budget: float = _BUDGET,
) -> float:
    r"""An upper bound of the operator norm of ``x -> conv(x, weight)`` on one sample, zero padding.

    The smallest of these bounds, each computed if the budget allows:

    * the symbol of the convolution, see :mod:`~surefoot.norms.symbol`: sharp up to the effect of the
      boundary (of relative order :math:`(k/n)^2`), or up to a stated factor when the budget allows fewer
      frequencies than the image has;
    * patches: :math:`\sqrt{c}\,\|W_{(A),(B,k)}\|_2`. The convolution extracts patches, multiplies each by
      the matrix :math:`W_{(A),(B,k)}`; an input entry is copied to at most :math:`c` patches
      (:func:`patch_overlap`), so the extraction has norm :math:`\sqrt c`;
    * the adjoint the same way: :math:`\sqrt{c'}\,\|W_{(B),(A,k)}\|_2` with :math:`c'` the largest number of
      taps of one output that meet no padding;
    * the test of Schur: :math:`\|T\|_2^2 \le \|T\|_1\|T\|_\infty`, at most the product of the largest sums
      of :math:`|W|` over :math:`(B,k)` and over :math:`(A,k)`: an input and a tap determine the output;
    * the matrix of the map itself where that is small: sharp.

    Groups are orthogonal blocks: the norm is the largest of theirs. A transposed convolution is the adjoint of
    the convolution from its outputs to its inputs; an adjoint has the same norm.

    Arguments are those of PyTorch, with the spatial size of the input (an integer stands for all dimensions), the
    padding before the first entry, the size of the output where it is not the usual one, and a budget of
    multiplications, by default about one second on one core. The weight is as PyTorch stores it: (A, B/groups,
    kernel...).

    >>> convolution_norm(torch.ones(1, 1, 3), input_size=100, padding=1) < 3.0000001
    True

    Raises:
        ValueError: for sizes that PyTorch would refuse, or weights that are not numbers.
    """
    if weight.ndim < 3:
        raise ValueError(f"a convolution's weight has shape (out, in, kernel...), got {tuple(weight.shape)}")
    axes = _axes(input_size, weight.shape[2:], stride, padding, dilation, output_size)
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"{groups} groups do not divide the {weight.shape[0]} channels of the weight")
    weight = weight.detach()
    for dimension, axis in enumerate(axes):
        live = torch.from_numpy(axis.live_taps()).to(weight.device)
        weight = weight.index_select(2 + dimension, live)
    if weight.numel() == 0:
        return 0.0
    weight = wide(weight)
    top = float(weight.abs().max())
    if math.isnan(top):
        raise ValueError("the weight of the convolution has NaN entries")
    if top in (0.0, math.inf):
        return top
    power = exponent(top)
    weight = times_power(weight, -power).unflatten(0, (groups, -1))  # (groups, A, B, taps...)
    norm = _dense_norm(weight, axes, budget / _DENSE_SHARE)
    if math.isinf(norm):
        norm = symbol_norm(weight, axes, budget)
        # without a symbol the patches may spend everything
        patches = _patch_norm(weight, axes, budget / 8 if norm < math.inf else budget)
        norm = min(norm, patches, _schur_norm(weight))
    return unscale(norm, power)


def patch_overlap(
    input_size: Sizes,
    kernel: Sizes,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    output_size: Sizes | None = None,
) -> int:
    r"""The largest number of patches that contain one input entry, counted exactly.

    A patch contains an entry if it does in every dimension, so the count is a product over the dimensions
    and its maximum is the product of the maxima. With dilation or few patches it is less than
    :math:`\prod\lceil k/s\rceil`. An integer for the input size is one dimension; ``output_size`` is the number of
    patches in each dimension where it is not the usual one (``ceil_mode``).

    >>> patch_overlap((32, 32), 3, stride=2, padding=1)
    4
    >>> patch_overlap((32, 32), 3, stride=2, dilation=2)
    9
    """
    taps = _sizes(kernel, 1 if isinstance(input_size, int) else len(input_size))
    axes = _axes(input_size, taps, stride, padding, dilation, output_size)
    return math.prod(_overlap(axis) for axis in axes)


def _overlap(axis: Axis) -> int:
    """The largest number of outputs that one input meets."""
    return int(np.bincount(axis.positions()[axis.meetings()], minlength=1).max())


def _patch_norm(weight: Tensor, axes: list[Axis], budget: float) -> float:
    """The bound by the patches of the map or of its adjoint, whichever promises more."""
    overlap = math.prod(_overlap(axis) for axis in axes)
    adjoint = math.prod(int(axis.meetings().sum(axis=1).max()) for axis in axes)
    # a matrix of a rows, b columns and independent entries has a norm near √a + √b
    choices = [(overlap, weight.flatten(2)), (adjoint, weight.transpose(1, 2).flatten(2))]
    count, matrices = min(choices, key=lambda c: math.sqrt(c[0]) * sum(map(math.sqrt, c[1].shape[1:])))
    groups, rows, columns = matrices.shape
    if groups == 1:
        norm = affordable_norm(matrices[0], budget)
    elif groups * min(rows, columns) ** 2 * max(rows, columns) <= budget:
        norm = float(batched_spectral_norm(matrices).max())
    else:
        norm = max(frobenius_norm(matrix) for matrix in matrices)
    return up(math.sqrt(count) * norm)


def _schur_norm(weight: Tensor) -> float:
    """The square root of the largest row sum times the largest column sum, per group."""
    absolute = weight.abs().flatten(3)
    rows, columns = absolute.sum((2, 3)).amax(1), absolute.sum((1, 3)).amax(1)
    return up(float((rows * columns).max().sqrt()) * (1 + gamma(absolute[0].numel())), 8)


def _dense_norm(weight: Tensor, axes: list[Axis], budget: float) -> float:
    """The norm of the matrix of the map, one per group; infinite if it costs more than the budget."""
    groups, rows, columns = weight.shape[:3]
    rows *= math.prod(axis.outputs for axis in axes)
    columns *= math.prod(axis.inputs for axis in axes)
    if groups * min(rows, columns) ** 2 * max(rows, columns) > budget:
        return math.inf
    matrix = weight
    for axis in axes:  # each step replaces the first kernel dimension by outputs and inputs at the end
        live, positions = axis.live_taps(), axis.positions()
        meets = np.arange(axis.inputs)[None, None, :] == positions[:, live, None]
        selection = torch.from_numpy(meets.astype(np.float64)).to(weight.device)
        matrix = torch.tensordot(matrix, selection, dims=([3], [1]))  # sums of one weight and zeros: exact
    count = len(axes)
    outputs, inputs = [3 + 2 * i for i in range(count)], [4 + 2 * i for i in range(count)]
    matrix = matrix.permute(0, 1, *outputs, 2, *inputs).reshape(groups, rows, columns)
    return float(batched_spectral_norm(matrix).max())


def _axes(
    input_size: Sizes,
    kernel: Sequence[int],
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    output_size: Sizes | None,
) -> list[Axis]:
    """The dimensions of a convolution or a pooling."""
    parts = [_sizes(value, len(kernel)) for value in (input_size, stride, padding, dilation)]
    counts = [None] * len(kernel) if output_size is None else _sizes(output_size, len(kernel))
    return [_axis(*part) for part in zip(kernel, *parts, counts, strict=True)]


def _axis(k: int, n: int, s: int, before: int, d: int, outputs: int | None) -> Axis:
    """One dimension; as much is padded behind the last entry as before the first, if outputs are not given."""
    if min(n, k, s, d) < 1 or before < 0:
        raise ValueError(
            f"sizes, kernels, strides and dilations are positive and paddings non-negative, got input {n}, "
            f"kernel {k}, stride {s}, padding {before}, dilation {d}"
        )
    outputs = (n + 2 * before - d * (k - 1) - 1) // s + 1 if outputs is None else outputs
    if outputs < 1:
        raise ValueError(f"a kernel of {k} taps, dilation {d}, does not fit into {n} inputs padded by {before}")
    return Axis(n, outputs, k, s, before, d)


def _sizes(value: Sizes, dimensions: int) -> list[int]:
    """One integer for each dimension."""
    sizes = [value] * dimensions if isinstance(value, int) else [int(size) for size in value]
    if len(sizes) == 1:
        sizes = sizes * dimensions
    if len(sizes) != dimensions:
        raise ValueError(f"expected one number or {dimensions}, got {sizes}")
    return sizes

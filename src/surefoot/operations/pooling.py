r"""Averages over patches, and interpolation.

Both are linear and act on each spatial dimension separately: the operator is a Kronecker product of small
matrices, one per dimension, and its norm is the product of theirs: reached. The matrices are found by applying
the operation to unit vectors. For disjoint :math:`k \times k` patches this gives :math:`1/k`; the paper's 1 is
valid but loose. The largest entry grows at most by the product of the largest absolute row sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.magnitude import Magnitude, maximum
from surefoot.norms import spectral_norm
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import affine, spatial
from surefoot.operations.record import Form, operation
from surefoot.operations.sparsity import Sparsity, linear_terms


def _axes(use: Use) -> int:
    """How many dimensions the patches have."""
    return int(use.op.removesuffix("_with_indices").removesuffix("_aa")[-2])


def batched(use: Use) -> list[Slot]:
    """The images, unless there is a single one."""
    slot = "self" if "self" in use.shapes else "input"
    return [slot] if len(use.shapes[slot]) > _axes(use) + 1 else []


def patch_entries(use: Use) -> int:
    """How many pairs of an output and an input entry of its patch there are, padding left out."""
    axes = _axes(use)
    kernel = spatial(use["kernel_size"], axes)
    stride = spatial(use["stride"] or kernel, axes)
    padding, dilation = spatial(use["padding"], axes), spatial(use["dilation"] or 1, axes)
    count = math.prod(use.shape[:-axes])
    for axis, (size, outputs) in enumerate(zip(use.shapes["self"][-axes:], use.shape[-axes:], strict=True)):
        count *= sum(
            0 <= i * stride[axis] - padding[axis] + j * dilation[axis] < size
            for i in range(outputs)
            for j in range(kernel[axis])
        )
    return count


def _adaptive_cost(use: Use) -> Sparsity:
    """The patches are ⌊i·n/k⌋ to ⌈(i + 1)·n/k⌉ of each axis of n entries, i < k."""
    axes = _axes(use)
    count = math.prod(use.shape[:-axes])
    for size, outputs in zip(use.shapes["self"][-axes:], use.shape[-axes:], strict=True):
        count *= sum(-(-(i + 1) * size // outputs) - i * size // outputs for i in range(outputs))
    return Sparsity(terms=linear_terms(use, count, "self"))


def _interpolation_cost(use: Use) -> Sparsity:
    """So many input entries for each output."""
    kind = use.op.rpartition("upsample_")[2][:-2]
    points = {"linear": 2, "bilinear": 4, "trilinear": 8, "bicubic": 16}.get(kind, 1)
    return Sparsity(terms=((use.node.inputs[0], points * use.numel),))


@operation("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", form=Form.LINEAR, rows=batched,
           cost=lambda use: Sparsity(terms=linear_terms(use, patch_entries(use), "self")),
           errata=(15,))  # fmt: skip
def average_pool(call: Call) -> Bounds:
    """The product of the norms of one-dimensional averages.

    The divisor of a patch is the product of those along its sides; one given for the whole patch replaces all of
    them, and what is left are sums.
    """
    x, dims = call["self"], int(call.node.op[-2])
    kernel = spatial(call["kernel_size"], dims)
    stride = spatial(call["stride"] or kernel, dims)
    padding = spatial(call["padding"], dims)
    divisor = call["divisor_override"]
    matrices = [
        _on_units(n, partial(_average, call=call, kernel=k, stride=s, padding=p))
        for n, k, s, p in zip(x.shape[-dims:], kernel, stride, padding, strict=True)
    ]
    return _separable(call, matrices, 1.0 if divisor is None else 1.0 / abs(divisor))


def _average(units: Tensor, call: Call, kernel: int, stride: int, padding: int) -> Tensor:
    """Averages along one side, or sums if the call gives the divisor."""
    return F.avg_pool2d(
        units.unsqueeze(-1),
        (kernel, 1),
        (stride, 1),
        (padding, 0),
        ceil_mode=bool(call["ceil_mode"]),
        count_include_pad=bool(call["count_include_pad"]),
        divisor_override=None if call["divisor_override"] is None else 1,
    ).squeeze(-1)


@operation("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d", form=Form.LINEAR,
           rows=batched, cost=_adaptive_cost, errata=(15,))  # fmt: skip
def adaptive_average_pool(call: Call) -> Bounds:
    """The product of the norms of one-dimensional adaptive averages."""
    x, dims = call["self"], int(call.node.op[-2])
    matrices = [
        _on_units(n, partial(F.adaptive_avg_pool1d, output_size=m))
        for n, m in zip(x.shape[-dims:], call.shape[-dims:], strict=True)
    ]
    return _separable(call, matrices)


@operation("aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d",
           "aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d",
           "aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d",
           "aten.upsample_bicubic2d", "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa",
           form=Form.LINEAR, rows=batched, cost=_interpolation_cost)  # fmt: skip
def interpolation(call: Call) -> Bounds:
    """The product of the norms of one-dimensional interpolations.

    The operation itself is applied to images that are a unit vector along one side and constant along the others,
    which interpolation leaves constant. Their length is 2, or 1 as in the image: PyTorch interpolates images that
    are one entry wide with other weights when it smooths them (``antialias``).
    """
    x, dims = call["input"] if call["input"] is not None else call["self"], _axes(call)
    matrices = []
    for k, n in enumerate(x.shape[-dims:]):
        target = [min(side, 2) for side in x.shape[-dims:]]
        sides = [*target]
        sides[k], target[k] = n, call.shape[-dims + k]
        shape = [n if dim == k else 1 for dim in range(dims)]
        units = torch.eye(n, dtype=torch.float64).reshape(n, 1, *shape).expand(n, 1, *sides).contiguous()
        lines = _interpolate(call, units, target, k).movedim(2 + k, 1).flatten(2)
        matrices.append(lines[:, :, 0].T)
    return _separable(call, matrices)


def _interpolate(call: Call, units: Tensor, target: list[int], dim: int) -> Tensor:
    """The operation on unit vectors along one side, with the scale the call uses for that side."""
    packet = getattr(torch.ops.aten, call.node.op.removeprefix("aten."))
    scales = call["scale_factors"]
    given = scales[dim] if scales else None
    if not scales:
        names = {"d": 0, "h": 1, "w": 2}
        keys = [key for key in ("scales", "scales_d", "scales_h", "scales_w") if call[key] is not None]
        offset = 3 - _axes(call)
        given = next((call[key] for key in keys if key == "scales" or names[key[-1]] - offset == dim), None)
    factors = [1.0 if given is not None else None] * len(target)
    factors[dim] = given
    corners = [] if "nearest" in call.node.op else [bool(call["align_corners"])]
    found: Tensor = packet.default(units, target, *corners, *factors)
    return found


def _on_units(size: int, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """The matrix of a one-dimensional linear operation."""
    return operation(torch.eye(size, dtype=torch.float64).unsqueeze(1))[:, 0].T


def _separable(call: Call, matrices: list[Tensor], factor: float = 1.0) -> Bounds:
    """The bounds of a Kronecker product of matrices, whose entries err by a few units relative to their size n."""
    (x,) = call.slots.values()
    norm = peak = Magnitude.of(factor) * (1 + 2.0**-50)
    for matrix in matrices:
        slack = 1 + (matrix.shape[1] + 16) * 2.0**-50
        norm = norm * Magnitude.of(spectral_norm(matrix)) * slack
        peak = peak * Magnitude.of(float(matrix.abs().sum(dim=1).max())) * slack
    reduction = math.prod(int((matrix != 0).sum(dim=1).max()) for matrix in matrices)
    (slot,) = call.slots
    return affine(call, {slot: norm}, peak=peak * x.peak, reduction=reduction)


_LARGEST_GRID = 2**22  # entries of the matrix of one sample that is formed


@operation("aten.grid_sampler_2d", "aten.grid_sampler_3d", form=Form.LINEAR, fixed=("grid",),
           rows=lambda use: ("input", "grid"))  # fmt: skip
def grid_sample(call: Call) -> Bounds:
    """Images read at the points of a fixed grid: the norm of the matrix of each sample, the same for all channels.

    The matrix is found by applying the operation to unit vectors. Its weights are computed from places in units of
    pixels, and so off by as many units of round-off as an image is wide.
    """
    x, grid = call["input"], call["grid"]
    if not grid.is_constant or not isinstance(grid.value, Tensor):
        raise call.refuse("a grid that varies, or is not known, is not covered: keep it fixed")
    sides, points = x.shape[2:], math.prod(call.shape[2:])
    size = math.prod(sides)
    if size * points > _LARGEST_GRID:
        raise call.refuse(f"a matrix of {size} × {points} would be needed; sample fewer points")
    options = (call["interpolation_mode"], call["padding_mode"], call["align_corners"])
    norm = Magnitude.zero()
    largest = 0.0
    units = torch.eye(size, dtype=torch.float64, device=grid.value.device).reshape(1, size, *sides)
    for sample in grid.value.double():
        matrix = call.node.target(units, sample[None], *options).reshape(size, -1)
        norm = maximum(norm, Magnitude.of(spectral_norm(matrix)))
        largest = max(largest, float(matrix.abs().sum(dim=0).max()))
    slack = 1 + (size + 64) * 2.0**-40
    return affine(call, {"input": norm * slack}, peak=x.peak * (largest * slack), reduction=8 * max(sides))

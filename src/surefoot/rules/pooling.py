r"""Pooling and interpolation.

*Averages and interpolation* are linear and act on each spatial dimension separately: the operator is a
Kronecker product of small matrices, one per dimension, and its norm is the product of theirs. The matrices are
found by applying the operation to unit vectors. For disjoint :math:`k \times k` patches this gives :math:`1/k`;
the paper's 1 is valid but loose.

*Maxima*: with every entry in at most :math:`c` patches, :math:`|\max_P x - \max_P y|^2 \le \sum_{i\in P}(x_i -
y_i)^2`, summed over patches at most :math:`c\|x - y\|^2`: Lipschitz with :math:`\sqrt c`. Where the same entry
stays the maximum of its patch over the whole domain the map is linear there, and the curvature is zero;
otherwise it has a kink.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.calculus.enclosure import Enclosure
from surefoot.magnitude import Magnitude
from surefoot.norms import patch_overlap, spectral_norm
from surefoot.rules.common import affine, root, spatial
from surefoot.rules.registry import Bounds, Call, register_rule


@register_rule("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d")
def average_pool(call: Call) -> Bounds:
    """The product of the norms of one-dimensional averages, each from ``avg_pool1d`` applied to unit vectors.

    The divisor of a patch is the product of those along its sides; one given for the whole patch replaces all
    of them.
    """
    x, dims = call["self"], int(call.node.op[-2])
    kernel = spatial(call["kernel_size"], dims)
    stride = spatial(call["stride"] or kernel, dims)
    padding = spatial(call["padding"], dims)
    divisor = call["divisor_override"]
    padded = bool(call["count_include_pad"]) or divisor is not None
    average = partial(F.avg_pool1d, ceil_mode=bool(call["ceil_mode"]), count_include_pad=padded)
    matrices = [
        _on_units(n, partial(average, kernel_size=k, stride=s, padding=p))
        for n, k, s, p in zip(x.shape[-dims:], kernel, stride, padding, strict=True)
    ]
    factor = 1.0 if divisor is None else math.prod(kernel) / abs(divisor)
    return _separable(call, matrices, x.peak * max(1.0, factor), factor)


@register_rule("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d")
def adaptive_average_pool(call: Call) -> Bounds:
    """The product of the norms of one-dimensional adaptive averages."""
    x, dims = call["self"], int(call.node.op[-2])
    targets = call.shape[-dims:]
    matrices = [
        _on_units(n, partial(F.adaptive_avg_pool1d, output_size=m))
        for n, m in zip(x.shape[-dims:], targets, strict=True)
    ]
    return _separable(call, matrices, x.peak)


@register_rule(
    "aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d",
    "aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d",
    "aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d", "aten.upsample_bicubic2d",
)  # fmt: skip
def interpolation(call: Call) -> Bounds:
    """The product of the norms of one-dimensional interpolations: the operation itself with the other sides of
    length 1.
    """
    x, dims = call["input"] if call["input"] is not None else call["self"], int(call.node.op[-2])
    matrices = []
    for k, n in enumerate(x.shape[-dims:]):
        sides, target = [1] * dims, [1] * dims
        sides[k], target[k] = n, call.shape[-dims + k]
        units = torch.eye(n, dtype=torch.float64).reshape(n, 1, *sides)
        matrices.append(_interpolate(call, units, target, k).reshape(n, -1).T)
    return _separable(call, matrices, None if "bicubic" in call.node.op else x.peak)


def _interpolate(call: Call, units: Tensor, target: list[int], dim: int) -> Tensor:
    """The operation on unit vectors along one side, with the scale the call uses for that side."""
    packet = getattr(torch.ops.aten, call.node.op.removeprefix("aten."))
    scales = call["scale_factors"]
    given = scales[dim] if scales else None
    if given is None and not scales:
        names = {"d": 0, "h": 1, "w": 2}
        keys = [key for key in ("scales", "scales_d", "scales_h", "scales_w") if call[key] is not None]
        offset = 3 - int(call.node.op[-2])
        given = next((call[key] for key in keys if key == "scales" or names[key[-1]] - offset == dim), None)
    factors = [1.0 if given is not None else None] * len(target)
    factors[dim] = given
    corners = [] if "nearest" in call.node.op else [bool(call["align_corners"])]
    return packet.default(units, target, *corners, *factors)


def _on_units(size: int, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """The matrix of a one-dimensional linear operation."""
    return operation(torch.eye(size, dtype=torch.float64).unsqueeze(1))[:, 0].T


def _separable(call: Call, matrices: list[Tensor], peak: Magnitude | None, factor: float = 1.0) -> Bounds:
    norm = Magnitude.of(factor)
    for matrix in matrices:
        norm = norm * Magnitude.of(spectral_norm(matrix)) * (1 + 1e-14)
    reduction = math.prod(int((matrix != 0).sum(dim=1).max()) for matrix in matrices)
    rowwise = len(call.shape) > len(matrices) + 1
    return affine(call, {next(iter(call.slots)): norm}, rowwise=rowwise, peak=peak, reduction=reduction)


@register_rule("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d")
def max_pool(call: Call) -> Bounds:
    """Slope √c; curvature 0 where every maximum keeps its place over the domain, otherwise a kink."""
    x = call["self"]
    dims = int(call.node.op[-2])
    kernel = spatial(call["kernel_size"], dims)
    stride = spatial(call["stride"] or kernel, dims)
    padding, dilation = spatial(call["padding"], dims), spatial(call["dilation"], dims)
    overlap = patch_overlap(x.shape[-dims:], kernel, stride, padding, dilation)
    if call["ceil_mode"]:  # a last, partial patch may be added along every dimension
        overlap = min(math.prod(kernel), math.prod(math.ceil(k / s) for k, s in zip(kernel, stride, strict=True)))
        overlap = max(overlap, 1)
    return _maximum(call, x, root(overlap), _margin(call, x, kernel, stride, padding, dilation))


@register_rule("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def adaptive_max_pool(call: Call) -> Bounds:
    """Patches overlap in at most one entry per side: every entry lies in at most two patches per dimension."""
    x = call["self"]
    dims = int(call.node.op[-2])
    sizes = zip(x.shape[-dims:], spatial(call["output_size"], dims), strict=True)
    overlap = math.prod(_adaptive_overlap(n, m) for n, m in sizes)
    return _maximum(call, x, root(overlap), None)


def _adaptive_overlap(size: int, parts: int) -> int:
    """In how many of the windows [⌊iN/P⌋, ⌈(i+1)N/P⌉) the most covered position lies."""
    counts = [0] * size
    for i in range(parts):
        for j in range(i * size // parts, -(-(i + 1) * size // parts)):
            counts[j] += 1
    return max(counts)


def _maximum(call: Call, x: Enclosure, slope: Magnitude, margin: Tensor | None) -> Bounds:
    slot = next(iter(call.slots))
    kink = margin is None or not bool((margin > 0).all())
    curvature = Magnitude.infinity() if kink else Magnitude.zero()
    reason = (
        "max-pooling has a kink where the largest entry of a patch changes: use average pooling "
        "(surefoot.smooth), or shrink the domain"
    )
    return Bounds(
        jacobian={slot: slope},
        curvature={(slot, slot): curvature},
        offset=Magnitude.zero(),
        peak=x.peak,
        rowwise=len(x.shape) > int(call.node.op[-2]) + 1,
        reason=reason if kink else "",
    )


def _margin(
    call: Call,
    x: Enclosure,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor | None:
    """For each patch, by how much its largest entry stays above the second over the domain (two dimensions
    only).
    """
    radius = x.radius()
    if radius is None or len(kernel) != 2 or not bool(torch.isfinite(radius).all()) or call["ceil_mode"]:
        return None
    floor = x.value.abs().max() * 4 + 4 * radius.max() + 1
    padded = F.pad(x.value, (padding[1], padding[1], padding[0], padding[0]), value=-float(floor))
    patches = F.unfold(padded.flatten(0, -3).unsqueeze(1), kernel, dilation=dilation, stride=stride)
    if patches.shape[1] == 1:
        return torch.ones(1)
    top = patches.topk(2, dim=1).values
    moves = radius.expand(x.value.shape).flatten(0, -3).flatten(1).amax(dim=1)
    return (top[:, 0] - top[:, 1]) - 2 * moves[:, None] * (1 + 1e-12) - 1e-14 * floor

r"""What each primitive does to norms: slopes, curvatures and sizes, one rule per kind.

For :math:`z = f(x_1, …, x_k)` a :class:`Claim` holds, over all arguments that their sizes allow,

.. math:: J_i \ge \|D_if\|, \qquad C_{ij} \ge \|D^2_{ij}f\|

as operators between Euclidean norms, and what follows for the sizes of z.

*Linear.* Copies: a map that reads every entry of its argument at most c times has norm at most :math:`\sqrt c`, and
sums of n entries have norm :math:`\sqrt n`.

*Products.* :math:`\|a \circ b\| \le \|a\|\,\|b\|_\infty`, :math:`\|AB\|_F \le \|A\|_F\|B\|_2`, and in both at most the
product of the norms: the curvature is 1. A convolution is a product of matrices after the extraction of patches,
whose norm is the root of the largest number c of patches that share an entry: :math:`C = \sqrt c`. Where a factor is
a tensor repeated along some dimensions, as scales of a normalisation are, the product is one of the repeated tensor:
its slope in it is the largest norm of a slice of the other factor, and its curvature still 1.

*Scalar functions.* :math:`J = \sup|f'|` and :math:`C = \sup|f''|` over the range of the entries, as
:math:`\|f''(x) \circ v \circ v\| \le \sup|f''|\,\|v\|^2`.

*Soft-max*: J is the largest eigenvalue of the covariance of a choice, at most ½, and C at most
:math:`\sqrt2/(3\sqrt3)`: it is the gradient of log-sum-exp, so :math:`D^2` is the third central moment of
:math:`v_i` with probability :math:`p_i`, whose values are at most :math:`\sqrt2` apart for a unit vector, and
:math:`|E(v - Ev)^3| \le \delta^3/(6\sqrt3)` on an interval of length :math:`\delta`. *Log-sum-exp*: J = 1, C = ½.

*Normalisation* of M numbers, :math:`g(x) = x/\rho_\epsilon` with :math:`\rho_\epsilon^2 = \|x\|^2/M + \epsilon`, after
the mean was subtracted, which is a projection: :math:`J = 1/\rho_\epsilon`, and on the diagonal, where the norm of a
symmetric tensor is reached (Banach), with :math:`t = \langle x, v\rangle`, the second derivative is
:math:`3t/(M\rho_\epsilon^3)(1 - t^2/(M\rho_\epsilon^2))`. So with :math:`\rho^2 = \|x\|^2/M`

.. math:: C = \frac1{\sqrt M}\begin{cases} \kappa/\epsilon,\ \kappa = \tfrac32(\tfrac45)^{5/2} & \rho^2 \le \epsilon/4 \\
    3\rho\epsilon/\rho_\epsilon^5 & \epsilon/4 \le \rho^2 \le \epsilon/2 \\
    (2/\sqrt3)/\rho_\epsilon^2 & \rho^2 \ge \epsilon/2 ,\end{cases}

which does not increase with :math:`\rho`: the smallest :math:`\rho` on the domain decides. A group has norm at most
:math:`\sqrt M` and entries at most :math:`\sqrt{M - 1}`. Its reciprocal deviation :math:`1/\rho_\epsilon` has gradient
:math:`-x/(M\rho_\epsilon^3)`, of norm at most :math:`M^{-1/2}/\rho_\epsilon^2`, and second derivative :math:`(3
xx^\top/(M\rho_\epsilon^2) - I)/(M\rho_\epsilon^3)`, of norm at most :math:`2/(M\rho_\epsilon^3)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.bounds.scalars import bounds, enclose
from surefoot.bounds.tensor_size import Size, consistent, unknown
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.norms import convolution_norm, frobenius_norm, patch_overlap, spectral_norm
from surefoot.norms.hermitian import up
from surefoot.program.ir import Node
from surefoot.program.scalars import Scalar

ONE, HALF, ZERO, INFINITE = Magnitude.of(1.0), Magnitude.of(0.5), Magnitude.zero(), Magnitude.infinity()
_SOFTMAX = Magnitude.of(math.sqrt(2) / (3 * math.sqrt(3))) * (1 + 1e-15)
_KAPPA = 1.5 * 0.8**2.5 * (1 + 1e-15)
_UNIT = 2.0**-53
_LARGEST_PATCHES = 2e8  # multiplications that the norm of a matrix of patches may take
Pair = tuple[int, int]


@dataclass(frozen=True)
class Claim:
    """What a rule claims of one operation; positions are those of its arguments.

    Attributes:
        slopes: J, by position.
        bends: C, by pair of positions in order.
        size: the sizes of the result that follow from those of the arguments; its Lipschitz constants are empty.
        rounding: how far the result may be off as computed in double precision from exact arguments.
        orthogonal: whether arguments reach separate entries of the result.
        summands: how many products are added up in an entry.
    """

    slopes: Mapping[int, Magnitude]
    size: Size
    rounding: Magnitude = ZERO
    bends: Mapping[Pair, Magnitude] = field(default_factory=dict)
    orthogonal: bool = False
    summands: int = 1

    def combined(self, amounts: Sequence[Magnitude], shape: tuple[int, ...] = ()) -> Magnitude:
        """What amounts in the arguments come to in the result: slopes by the chain rule, or distances."""
        parts = [amounts[k] * slope for k, slope in self.slopes.items()]
        if not parts:
            return Magnitude.zero(shape)
        return stack(parts).norm(axis=0) if self.orthogonal else stack(parts).sum(axis=0)


def root(count: float) -> Magnitude:
    """The root of a whole number."""
    return Magnitude.of(count).sqrt()


def _result(node: Node, **parts: object) -> Size:
    """Sizes of a result, unbounded but for those that are given."""
    return consistent(replace(unknown(node.shape, ZERO), **parts))  # type: ignore[arg-type]


def _units(count: float, amount: Magnitude) -> Magnitude:
    """So many rounding errors of an amount, and as many of numbers that underflow."""
    return amount * (count * _UNIT) + Magnitude.of(count) * 1e-300


# Linear maps


def _add(node: Node, arguments: Sequence[Size]) -> Claim:
    total = {
        "bound": stack([each.bound for each in arguments]).sum(),
        "peak": stack([each.peak for each in arguments]).sum(),
        "operator": stack([each.operator for each in arguments]).sum(),
        "slices": tuple(
            stack([each.slices[k] for each in arguments]).sum() for k in range(len(node.shape))
        ),
        "low": _outward(sum(each.low for each in arguments), -1),
        "high": _outward(sum(each.high for each in arguments), 1),
    }
    slopes = dict.fromkeys(range(len(arguments)), ONE)
    rounding = _units(len(arguments), stack([each.bound for each in arguments]).sum())
    return Claim(slopes, _result(node, **total), rounding)


def _outward(number: float, sign: int) -> float:
    return number + sign * (abs(number) * 2.0**-48 + 1e-300) if math.isfinite(number) else sign * math.inf


def _scaled(node: Node, x: Size, factor: Magnitude, low: float, high: float, rounding: float = 1) -> Claim:
    """Every entry times a number whose absolute value is at most a factor."""
    size = _result(
        node,
        bound=x.bound * factor,
        peak=x.peak * factor,
        total=x.total * factor,
        operator=x.operator * factor,
        slices=tuple(each * factor for each in x.slices),
        low=_outward(low, -1),
        high=_outward(high, 1),
    )
    return Claim({0: factor}, size, _units(rounding, size.bound))


def _scale(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), factor = arguments, float(node.options["factor"])
    ends = (x.low * factor, x.high * factor) if factor else (0.0, 0.0)
    return _scaled(node, x, Magnitude.of(abs(factor)), min(ends), max(ends))


def _weigh(node: Node, arguments: Sequence[Size]) -> Claim:
    x, weights = arguments
    claim = _scaled(node, x, weights.peak, -math.inf, math.inf)
    # norms as matrices do not survive weights of single entries
    low = min(x.low * weights.low, x.low * weights.high, x.high * weights.low, x.high * weights.high)
    size = replace(claim.size, operator=claim.size.bound, low=_outward(low, -1) if low == low else -math.inf)
    return replace(claim, size=consistent(size))


def _sum(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), dims = arguments, _dims(node, len(arguments[0].shape))
    count = math.prod(x.shape[d] for d in dims)
    rest = [d for d in range(len(x.shape)) if d not in dims]
    kept = _kept(node, rest, len(x.shape))
    slices = [x.bound * root(count)] * len(node.shape)
    for place, d in kept.items():
        slices[place] = x.slices[d] * root(count)
    size = _result(
        node, bound=x.bound * root(count), total=x.total, peak=minimum(x.peak * count, x.bound * root(count)), slices=tuple(slices),
        low=_outward(x.low * count, -1), high=_outward(x.high * count, 1),
    )  # fmt: skip
    rounding = _units(count + 1, x.bound * root(count)) if count > 1 else ZERO
    return Claim({0: root(count)}, size, rounding, summands=count)


def _dims(node: Node, rank: int) -> tuple[int, ...]:
    return tuple(d % rank for d in node.options["dims"]) if rank else ()


def _kept(node: Node, rest: Sequence[int], rank: int) -> dict[int, int]:
    """The dimension of the argument by that of the result, for those that a reduction keeps."""
    return {d: d for d in rest} if node.options.get("keepdim") and len(node.shape) == rank else dict(enumerate(rest))


def _copied(node: Node, x: Size, times: float, **parts: object) -> Claim:
    """A map to copies of entries and zeros, each entry at most so often."""
    bound = x.bound * root(times)
    low, high = min(x.low, 0.0), max(x.high, 0.0)
    size = _result(node, **{"bound": bound, "peak": x.peak, "low": low, "high": high, **parts})
    return Claim({0: root(times)}, size)


def _expand(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,) = arguments
    times = math.prod(node.shape) / max(x.numel, 1)
    offset = len(node.shape) - len(x.shape)
    slices = []
    for d, count in enumerate(node.shape):
        same = d >= offset and x.shape[d - offset] == count
        inner = x.slices[d - offset] * root(times) if same else x.bound * root(times / max(count, 1))
        slices.append(inner)
    return _copied(node, x, times, slices=tuple(slices), low=x.low, high=x.high)


def _reshape(node: Node, arguments: Sequence[Size]) -> Claim:
    """Slices along a dimension that stays, or is split; joined dimensions lose theirs."""
    (x,) = arguments
    slices = [x.bound] * len(node.shape)
    for d, count in enumerate(node.shape):
        before = math.prod(node.shape[:d])
        for e, other in enumerate(x.shape):
            if math.prod(x.shape[:e]) != before or not count or not other:
                continue
            if count == other or (count > other and count % other == 0):
                slices[d] = minimum(slices[d], x.slices[e])  # the same slices, or parts of them
            elif other % count == 0:
                slices[d] = minimum(slices[d], x.slices[e] * root(other // count))  # several together
        after = math.prod(node.shape[d + 1 :])
        for e, other in enumerate(x.shape):
            if math.prod(x.shape[e + 1 :]) == after and other and (count == other or other % count == 0):
                slices[d] = minimum(slices[d], x.slices[e] * root(other // count))
            elif math.prod(x.shape[e + 1 :]) == after and other and count % other == 0:
                slices[d] = minimum(slices[d], x.slices[e])
    matrix = len(x.shape) > 1 and len(node.shape) > 1 and x.shape[-2:] == node.shape[-2:]
    parts = {"slices": tuple(slices), "total": x.total, "operator": x.operator if matrix else x.bound, "low": x.low, "high": x.high}
    return _copied(node, x, 1, **parts)


def _permute(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), dims = arguments, [d % len(node.shape) for d in node.options["dims"]]
    last = {len(dims) - 1, len(dims) - 2}
    same = len(dims) > 1 and set(dims[-2:]) == last
    slices = tuple(x.slices[d] for d in dims)
    operator = x.operator if same else x.bound
    return _copied(node, x, 1, slices=slices, total=x.total, operator=operator, low=x.low, high=x.high)


def _flip(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,) = arguments
    return _copied(node, x, 1, slices=x.slices, operator=x.operator, low=x.low, high=x.high)


def _part(node: Node, arguments: Sequence[Size]) -> Claim:
    """A part of a tensor, or a tensor among zeros: slices are those of the whole, or zeros."""
    (x,) = arguments
    return _copied(node, x, 1, slices=x.slices, operator=x.operator)


def _cat(node: Node, arguments: Sequence[Size]) -> Claim:
    dim = node.options["dim"] % len(node.shape)
    slices = tuple(
        maximum(*(each.slices[d] for each in arguments))
        if d == dim
        else stack([each.slices[d] for each in arguments]).norm()
        for d in range(len(node.shape))
    )
    size = _result(
        node,
        bound=stack([each.bound for each in arguments]).norm(),
        peak=maximum(*(each.peak for each in arguments)),
        operator=stack([each.operator for each in arguments]).norm(),
        slices=slices,
        low=min(each.low for each in arguments),
        high=max(each.high for each in arguments),
    )
    return Claim(dict.fromkeys(range(len(arguments)), ONE), size, orthogonal=True)


def _gather(node: Node, arguments: Sequence[Size]) -> Claim:
    x, index = arguments
    return _copied(node, x, _most_often(index))


def _scatter(node: Node, arguments: Sequence[Size]) -> Claim:
    """The transpose of a gathering: entries that meet are added."""
    x, index = arguments
    times = _most_often(index)
    claim = _copied(node, x, times, peak=x.peak * times, low=min(x.low * times, 0.0), high=max(x.high * times, 0.0))
    rounding = _units(times, claim.size.bound) if times > 1 else ZERO
    return replace(claim, rounding=rounding, summands=times)


def _rows(node: Node, arguments: Sequence[Size]) -> Claim:
    x, index = arguments
    times, dim = _most_often(index), node.options["dim"]
    slices = tuple(
        each if d == dim else each * root(times) for d, each in enumerate(x.slices)
    )
    return _copied(node, x, times, slices=slices, low=x.low, high=x.high)


def _rows_back(node: Node, arguments: Sequence[Size]) -> Claim:
    return _scatter(node, arguments)


def _most_often(index: Size) -> int:
    """How often an index occurs, at most."""
    if index.value is None or index.value.is_meta:
        return index.numel
    flat = index.value.reshape(-1).long()
    return int(torch.bincount(flat[flat >= 0]).max()) if (flat >= 0).any() else 1


def _unfold(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), options = arguments, node.options
    overlap = _overlap(x.shape[2:], options["kernel"], options)
    slices = (x.slices[0] * root(overlap),) + (x.bound * root(overlap),) * (len(node.shape) - 1)
    return _copied(node, x, overlap, slices=slices)


def _fold(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), options = arguments, node.options
    overlap = _overlap(node.shape[2:], options["kernel"], options)
    claim = _copied(node, x, overlap, peak=x.peak * overlap, low=-math.inf, high=math.inf)
    return replace(claim, rounding=_units(overlap, claim.size.bound), summands=overlap)


def _overlap(spatial: Sequence[int], kernel: Sequence[int], options: Mapping[str, object]) -> int:
    return patch_overlap(
        tuple(spatial), tuple(kernel), options["stride"], options["padding"], options["dilation"]  # type: ignore[arg-type]
    )


def _cumsum(node: Node, arguments: Sequence[Size]) -> Claim:
    """A triangle of n ones has norm below (2n + 1)/π + 1/2 < n: the inverse of 2 sin(π/(4n + 2))."""
    (x,) = arguments
    count = node.shape[node.options["dim"]] if node.shape else 1
    slope = Magnitude.of(0.5 / math.sin(math.pi / (4 * count + 2))) * (1 + 1e-14)
    size = _result(node, bound=x.bound * slope, peak=x.peak * count)
    return Claim({0: slope}, size, _units(count, x.bound * count), summands=count)


# Products


def _product(
    node: Node, a: Size, b: Size, norms: tuple[Magnitude, Magnitude], bend: Magnitude, inner: float, **parts: object
) -> Claim:
    """A product with slopes in its two factors, and sums of so many products."""
    bound = minimum(a.bound * norms[0], b.bound * norms[1], a.bound * b.bound * bend)
    size = _result(node, **{"bound": bound, **parts})
    rounding = _units(inner + 1, a.bound * b.bound * bend)
    return Claim({0: norms[0], 1: norms[1]}, size, rounding, {(0, 1): bend}, summands=int(inner))


def _mul(node: Node, arguments: Sequence[Size]) -> Claim:
    """Entry by entry; a factor of another shape is repeated along the dimensions where it has one entry."""
    a, b = arguments
    claims = [_repeated(node, a, b), _repeated(node, b, a)]
    corners = [a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high]
    unclear = any(math.isnan(each) for each in corners)
    low, high = (-math.inf, math.inf) if unclear else (_outward(min(corners), -1), _outward(max(corners), 1))
    bound = minimum(claims[0][1], claims[1][1])
    slices = []
    for d in range(len(node.shape)):
        one = _slice_of(a, d, node.shape) * b.peak
        other = _slice_of(b, d, node.shape) * a.peak
        slices.append(minimum(one, other))
    slopes = (claims[0][0], claims[1][0])
    repeated = root(math.prod(math.prod(node.shape) / max(each.numel, 1) for each in arguments))
    claim = _product(
        node, a, b, slopes, ONE, 1, peak=a.peak * b.peak, total=a.bound * b.bound * repeated, slices=tuple(slices), low=low, high=high
    )
    size = consistent(replace(claim.size, bound=minimum(bound, claim.size.bound)))
    return replace(claim, size=size, rounding=_units(2, maximum(size.bound, bound)))


def _aligned(size: Size, shape: Sequence[int]) -> list[int | None]:
    """For each dimension of a shape, the one of a tensor that is repeated to it; None where it is repeated."""
    offset = len(shape) - len(size.shape)
    return [
        d - offset if d >= offset and size.shape[d - offset] == count else None for d, count in enumerate(shape)
    ]


def _slice_of(size: Size, d: int, shape: Sequence[int]) -> Magnitude:
    """The largest slice of a tensor that is repeated to a shape."""
    aligned, times = _aligned(size, shape)[d], math.prod(shape) / max(size.numel, 1)
    if aligned is not None:
        return size.slices[aligned] * root(times)
    return size.bound * root(times / max(shape[d], 1))


def _repeated(node: Node, factor: Size, other: Size) -> tuple[Magnitude, Magnitude]:
    """The slope of a product in a factor that may be repeated, and the norm of the product.

    An entry of the factor meets a slice of the other; the norm of such a slice is the slope. It lies in a slice along
    each dimension that the factor has.
    """
    times = math.prod(node.shape) / max(factor.numel, 1)
    slope = minimum(other.peak * root(times), *_whole(other, node.shape))
    for d, own in enumerate(_aligned(factor, node.shape)):
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
    return _convolved(node, *arguments, arguments[0].shape)


def _conv_input(node: Node, arguments: Sequence[Size]) -> Claim:
    """A transposed convolution: the transpose of a convolution of tensors of the shape of the result."""
    return _convolved(node, *arguments, node.shape)


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


def _patches(image: Sequence[int], weight: Sequence[int], options: Mapping[str, object]) -> int:
    """How many patches share an entry of an image, at most."""
    return _overlap(image[2:], weight[2:], options)


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
        columns = torch.nn.functional.unfold(x, kernel, options["dilation"], options["padding"], options["stride"])
        return Magnitude.of(spectral_norm(columns.transpose(0, 1).reshape(columns.shape[1], -1)))
    ones, image = x.new_ones(1, 1, *kernel), x.new_zeros(1, 1, *x.shape[2:])
    geometry = [options["stride"], options["padding"], options["dilation"], False, [0] * rank, 1]
    out = torch.ops.aten.convolution(image, ones, None, *geometry)
    counts = torch.ops.aten.convolution_backward(
        torch.ones_like(out), image, ones, None, *geometry, [True, False, False]
    )[0]
    return Magnitude.of(frobenius_norm(x * counts.sqrt())) * (1 + 2.0**-50)


# Scalar functions of every entry


def _scalar(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), function = arguments, node.options["function"]
    ends = torch.tensor([x.low, x.high], dtype=torch.float64)
    first, second = (Magnitude.of(float(bounds(function, order, *ends))) for order in (1, 2))
    if not second.is_finite and x.value is not None:
        second = _away_from_kinks(function, x)
    low, high = (float(end) for end in enclose(function, 0, *ends))
    is_square = function in (Scalar("square"), Scalar("power", (2.0,)))
    size = _result(node, low=low, high=high, total=x.bound * x.bound if is_square else INFINITE)
    at_zero = float(function(torch.zeros((), dtype=torch.float64)))
    if math.isfinite(at_zero):  # |f(x)| ≤ |f(0)| + sup|f′| |x|, also on the way from 0
        slope = Magnitude.of(float(bounds(function, 1, ends.clamp(max=0)[0], ends.clamp(min=0)[1])))
        offset = Magnitude.of(abs(at_zero)) * (1 + 2.0**-45)
        slices = tuple(each * slope + offset * root(x.slice_count(d)) for d, each in enumerate(x.slices))
        bound = x.bound * slope + offset * root(x.numel)
        size = consistent(replace(size, bound=minimum(size.bound, bound), slices=slices))
    # kernels err by a few units of the larger of argument, result and 1
    rounding = _units(16, x.bound + size.bound + root(x.numel))
    return Claim({0: first}, size, rounding, {(0, 0): second})


def _away_from_kinks(function: Scalar, x: Size) -> Magnitude:
    """The curvature where every entry has a range of its own, so that it may stay on one side of a kink."""
    assert x.value is not None
    move = math.inf if x.move is None else up(float(x.move.peak))
    if not math.isfinite(move) or not x.numel:
        return INFINITE if x.numel else ZERO
    slack = 2.0**-50 * (x.value.abs() + move)
    low, high = x.value - move - slack, x.value + move + slack
    return Magnitude.of(float(bounds(function, 2, low.clamp(min=x.low), high.clamp(max=x.high)).max()))


# Fused primitives


def _covariance(x: Size, mask: Size | None, dim: int) -> Magnitude:
    r"""The norm of :math:`\mathrm{diag}(p) - pp^\top` over the domain, of any fibre: at most ½, at most the largest
    probability q, and at most :math:`2(1 - q)q` if q > ½ (sums of absolute values of rows). Where x moves by at most r,
    odds change by factors up to :math:`e^{\sqrt2r}`, and so do, at most, q and 1 - q.
    """
    if x.value is None or x.move is None or not x.numel or x.shape[dim] < 2:
        return HALF
    fibre = minimum(x.move.bound, *(each for d, each in enumerate(x.move.slices) if d != dim))
    value = x.value if mask is None or mask.value is None else x.value.masked_fill(mask.value == 0, -math.inf)
    largest = value.softmax(dim).amax(dim).nan_to_num(0.0)
    slack = (x.shape[dim] + 64) * 2.0**-51
    factor = math.exp(min(math.sqrt(2) * float(fibre), 700.0)) * (1 + slack)
    most, others = ((each + slack) * factor for each in (largest, 1 - largest))
    certain = torch.where(others < 0.5, 2 * others * (1 - others), 0.5)
    return minimum(HALF, Magnitude.of(float(torch.minimum(certain, most).max())) * (1 + 1e-12))


def _softmax(node: Node, arguments: Sequence[Size]) -> Claim:
    x = arguments[0]  # a mask may follow
    count = node.shape[node.options["dim"]]
    most = math.prod(node.shape) / max(count, 1)
    dim = node.options["dim"] % len(node.shape)
    slices = tuple(
        root(most) if d == dim else root(most / max(n, 1)) for d, n in enumerate(node.shape)
    )
    size = _result(node, bound=root(most), total=Magnitude.of(most) * (1 + 1e-12), peak=ONE, slices=slices, low=0.0, high=1.0 + 1e-12)
    slope = _covariance(x, arguments[1] if len(arguments) > 1 else None, dim) if count > 1 else ZERO
    bend = minimum(_SOFTMAX, slope * math.sqrt(2.0000001)) if count > 1 else ZERO
    rounding = _units(2 * count + 64, root(most)) + _units(8, minimum(x.bound, root(most) * 750.0))
    return Claim({0: slope}, size, rounding, {(0, 0): bend})


def _logsumexp(node: Node, arguments: Sequence[Size]) -> Claim:
    x = arguments[0]  # a mask may follow
    count = x.shape[node.options["dim"]]
    slack = math.log(max(count, 1)) * (1 + 1e-14)
    size = _result(node, low=_outward(x.low, -1), high=_outward(x.high + slack, 1))
    rounding = _units(count + 32, root(size.numel)) + _units(16, size.bound)
    bend = _covariance(x, arguments[1] if len(arguments) > 1 else None, node.options["dim"]) if count > 1 else ZERO
    return Claim({0: ONE}, size, rounding, {(0, 0): bend})


def _normalize(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), dims, eps = arguments, _dims(node, len(arguments[0].shape)), float(node.options["eps"])
    count = math.prod(x.shape[d] for d in dims)
    rho = _least_deviation(x, dims, count)
    shifted = rho * rho + eps
    slope = Magnitude.of(1.0) / (Magnitude.of(shifted * (1 - 1e-12)).sqrt()) if shifted > 0 else INFINITE
    bend = _bend(rho, eps, count) if count > 1 else ZERO
    groups = math.prod(node.shape) / max(count, 1)
    slices = tuple(
        root(count * groups / max(n, 1)) if d not in dims else root(count * groups) for d, n in enumerate(node.shape)
    )
    size = _result(
        node, bound=minimum(root(count * groups), x.bound * slope), peak=root(max(count - 1, 0)), slices=slices
    )
    rounding = _units(4 * count + 64, root(count * groups)) + _scale_error(x, count) * slope
    return Claim({0: slope if count > 1 else ZERO}, size, rounding, {(0, 0): bend})


def _scale_error(x: Size, count: int) -> Magnitude:
    """The error of subtracting a mean: so many rounding errors of the largest partial sums."""
    return _units(2 * count + 8, x.bound)


def _least_deviation(x: Size, dims: Sequence[int], count: int) -> float:
    """The smallest standard deviation of a group on the domain: Lipschitz with constant M^-1/2."""
    if x.value is None or not x.spread.is_finite or not x.numel:
        return 0.0
    value = x.value
    centred = value - value.mean(dim=tuple(dims), keepdim=True)
    rho = float(centred.square().mean(dim=tuple(dims)).sqrt().min())
    top = float(value.abs().max())
    error = (count + 16) * 4 * _UNIT * (rho + top)
    return max(0.0, (rho - error - float(_largest_move(x, dims)) / math.sqrt(count) * (1 + 1e-14)) * (1 - 1e-14))


def _largest_move(x: Size, dims: Sequence[int]) -> Magnitude:
    """How far a group, along these dimensions, may be from the centre."""
    assert x.move is not None
    return minimum(x.spread, *(each for d, each in enumerate(x.move.slices) if d not in dims))


def _bend(rho: float, eps: float, count: int) -> Magnitude:
    shifted = (rho * rho + eps) * (1 - 1e-12)
    if shifted <= 0:
        return INFINITE
    if rho * rho >= eps / 2 * (1 + 1e-9):
        curvature = Magnitude.of(2 / math.sqrt(3) * (1 + 1e-14)) / Magnitude.of(shifted)
    elif rho * rho >= eps / 4 * (1 + 1e-9):
        curvature = Magnitude.of(3 * rho * eps * (1 + 1e-10)) / Magnitude.of(shifted) ** 2.5
    else:
        curvature = Magnitude.of(_KAPPA) / Magnitude.of(eps)
    return curvature / root(count)


def _deviation(node: Node, arguments: Sequence[Size]) -> Claim:
    """One over the deviation of a group, which has curvature as a function of its own: it is not smooth in norms."""
    (x,), dims, eps = arguments, _dims(node, len(arguments[0].shape)), float(node.options["eps"])
    count = math.prod(x.shape[d] for d in dims)
    rho = _least_deviation(x, dims, count)
    top = Magnitude.of(1.0) / Magnitude.of((rho * rho + eps) * (1 - 1e-12)).sqrt() if rho * rho + eps > 0 else INFINITE
    slope = top * top / root(count)
    bend = top * top * top * (2.0 / max(count, 1))
    size = _result(node, peak=top, low=0.0)
    rounding = _units(4 * count + 64, size.bound) + _scale_error(x, count) * slope
    return Claim({0: slope}, size, rounding, {(0, 0): bend})


def _largest(node: Node, arguments: Sequence[Size]) -> Claim:
    """A selection of entries: slope 1, and bent where another entry takes over."""
    size = _result(
        node,
        bound=stack([each.bound for each in arguments]).norm(),
        peak=maximum(*(each.peak for each in arguments)),
        low=min(each.low for each in arguments),
        high=max(each.high for each in arguments),
    )
    slopes = dict.fromkeys(range(len(arguments)), ONE)
    bend = ZERO if _is_settled(node, arguments) else INFINITE
    return Claim(slopes, size, bends={(i, j): bend for i in slopes for j in slopes if i <= j})


def _is_settled(node: Node, arguments: Sequence[Size]) -> bool:
    """Whether the same entries are selected all over the domain: no two change places by moving at most s each."""
    values = [each.value for each in arguments]
    if any(value is None or not value.numel() for value in values):
        return False
    if "dims" in node.options:
        dims, (value,) = node.options["dims"], values
        assert value is not None
        rest = [d for d in range(value.ndim) if d not in dims]
        entries = value.permute(*rest, *dims).reshape(*[value.shape[d] for d in rest], -1)
        if entries.shape[-1] < 2:
            return True
        top = entries.topk(2, dim=-1).values
        gap = top[..., 0] - top[..., 1]
    elif node.primitive.name == "maximum":
        gap = (values[0] - values[1]).abs()  # type: ignore[operator]
    else:
        (value,) = values
        assert value is not None
        gap = value.sort(dim=node.options["dim"]).values.diff(dim=node.options["dim"])
    moves = sum(up(float(each.move.peak)) if each.move else math.inf for each in arguments)
    moves *= 2 if len(arguments) == 1 else 1
    return not gap.numel() or float(gap.min()) > moves * (1 + 1e-9) + 1e-300


# Transposes: costates of the primitives above


def _conv_weight(node: Node, arguments: Sequence[Size]) -> Claim:
    """Costates times patches of images."""
    g, x = arguments
    bend = root(_patches(x.shape, node.shape, node.options))
    norms = (_patch_slope(x, node.shape, node.options, bend), g.bound * bend)
    return _product(node, g, x, norms, bend, g.numel // max(g.shape[1], 1))


def _softmax_back(node: Node, arguments: Sequence[Size]) -> Claim:
    r""":math:`y \circ (g - \langle g, y\rangle)`, fibre by fibre: the covariance of y applied to g. Along y it moves by
    :math:`dy \circ (g - \langle g, y\rangle) - y\langle g, dy\rangle`, where :math:`\|y\| \le 1`.
    """
    (g, y), dim = arguments, node.options["dim"]
    fibre = minimum(g.bound, *(each for d, each in enumerate(g.slices) if d != dim))
    along = minimum(g.peak * 2.0, fibre * math.sqrt(2.0000001)) + fibre
    slices = tuple(g.bound * HALF if d == dim else each * HALF for d, each in enumerate(g.slices))
    size = _result(node, bound=g.bound * HALF, slices=slices)
    rounding = _units(2 * node.shape[dim] + 8, g.bound * 2.0)
    return Claim({0: HALF, 1: minimum(along, fibre * 3.0)}, size, rounding)


def _normalize_back(node: Node, arguments: Sequence[Size]) -> Claim:
    r""":math:`r\,(g - \bar g - z\langle g, z\rangle/M)`, group by group: a symmetric map of norm at most 1, as
    :math:`\|z\|^2 \le M`, times r. Along z it moves by :math:`-r(dz\langle g, z\rangle + z\langle g, dz\rangle)/M`.
    """
    (g, _, r), dims = arguments, node.options["dims"]
    count = math.prod(node.shape[d] for d in dims)
    group = minimum(g.bound, *(each for d, each in enumerate(g.slices) if d not in dims))
    slopes = {0: r.peak, 1: r.peak * group * 2.0 / root(count), 2: group}
    slices = tuple(g.bound * r.peak if d in dims else each * r.peak for d, each in enumerate(g.slices))
    size = _result(node, bound=g.bound * r.peak, slices=slices)
    return Claim(slopes, size, _units(4 * count + 16, g.bound * r.peak * root(count)))


def _selected_like(node: Node, arguments: Sequence[Size]) -> Claim:
    """Entries of the first tensor at places that the order of the second decides: they jump where that changes."""
    c, x = arguments
    low, high = min(c.low, 0.0), max(c.high, 0.0)
    size = _result(node, bound=c.bound, peak=c.peak, low=low, high=high)
    return Claim({0: ONE, 1: ZERO if _is_settled(node, [x]) else INFINITE}, size)


# Differences: how far a result may be from its value at the centre, in all the norms of a size


def moved(node: Node, claim: Claim, arguments: Sequence[Size]) -> Size:
    r"""The size of the difference to the centre, before rounding.

    Linear maps are applied to the differences of their arguments, and :math:`ab - \hat a\hat b = (a - \hat a)b +
    \hat a(b - \hat b)`. What works entry by entry, or fibre by fibre, moves each by its slope times the move there.
    """
    moves = [each if each.move is None else each.move for each in arguments]
    kind, name = node.primitive.kind, node.primitive.name
    if kind == "linear":
        fixed = name in ("weigh", "gather", "scatter", "rows", "rows_back")
        return RULES[name](node, [moves[0], arguments[1]] if fixed else moves).size
    if kind == "product":
        a, b = arguments
        parts = [RULES[name](node, [moves[0], b]).size, RULES[name](node, [a, moves[1]]).size]
        pairs = zip(parts[0].slices, parts[1].slices, strict=True)
        return _result(
            node, bound=parts[0].bound + parts[1].bound, peak=parts[0].peak + parts[1].peak,
            operator=parts[0].operator + parts[1].operator, slices=tuple(x + y for x, y in pairs),
        )  # fmt: skip
    bound = claim.combined([each.bound for each in moves])
    if kind == "scalar":
        slope = claim.slopes[0]
        slices = tuple(each * slope for each in moves[0].slices)
        return _result(node, bound=bound, peak=moves[0].peak * slope, slices=slices)
    same = _same_dimensions(node, arguments[0])
    slices = tuple(
        claim.combined([each.slices[same[d]] for each in moves]) if d in same else bound
        for d in range(len(node.shape))
    )
    return _result(node, bound=bound, peak=moves[0].peak if name == "amax" else bound, slices=slices)


def _same_dimensions(node: Node, x: Size) -> dict[int, int]:
    """The dimensions along which an operation on fibres works slice by slice, with those of its argument."""
    options, rank = node.options, len(x.shape)
    dims = {options["dim"]} if "dim" in options else set(options.get("dims", range(rank)))
    rest = [d for d in range(rank) if d not in dims]
    if len(node.shape) == rank:
        return {d: d for d in rest}
    return dict(enumerate(rest))


# Second derivatives contracted with a costate: bounds of ⟨λ, D²f[a, b]⟩ for ‖a‖ = ‖b‖ = 1


def contracted(node: Node, claim: Claim, arguments: Sequence[Size], costate: Size) -> dict[Pair, Magnitude]:
    r"""The curvatures of an operation times a costate, sharper than the product of the norms.

    Entry by entry, :math:`|\langle\lambda, f'' \circ a \circ b\rangle| \le \max_i|\lambda_if''_i|\,\|a\|\,\|b\|`; for a
    product with a repeated factor, Cauchy's inequality slice by slice; for matrices :math:`\langle\lambda, AB\rangle
    \le \|\lambda\|_2\|A\|_F\|B\|_F`; where fibres or groups are separate, the largest of their norms counts.
    """
    name, rank = node.primitive.name, len(node.shape)
    weight = costate.bound
    if name == "scalar":
        return {(0, 0): _along_entries(node.options["function"], claim, arguments[0], costate)}
    if name == "mul":
        weight = minimum(*(_along_slices(node, factor, costate) for factor in arguments))
    elif name == "matmul":
        weight = minimum(costate.operator, *costate.slices[: rank - 2])
    elif name == "logsumexp":
        weight = costate.peak
    elif name == "softmax":
        weight = minimum(weight, *(each for d, each in enumerate(costate.slices) if d != node.options["dim"]))
    elif name in ("normalize", "rstd"):
        weight = minimum(weight, *(each for d, each in enumerate(costate.slices) if d not in node.options["dims"]))
    return {pair: bend * weight for pair, bend in claim.bends.items()}


def _along_entries(function: Scalar, claim: Claim, x: Size, costate: Size) -> Magnitude:
    whole = claim.bends[0, 0] * costate.peak
    if x.value is None or costate.value is None or not x.numel:
        return whole
    moves = [math.inf if each.move is None else up(float(each.move.peak)) for each in (x, costate)]
    if not all(map(math.isfinite, moves)):
        return whole
    slack = 2.0**-50 * (x.value.abs() + moves[0])
    low, high = x.value - moves[0] - slack, x.value + moves[0] + slack
    bend = bounds(function, 2, low.clamp(min=x.low), high.clamp(max=x.high))
    product = bend * (costate.value.abs() + moves[1])
    product = torch.where(bend == 0, bend, product)  # 0·∞ = 0
    return minimum(whole, Magnitude.of(float(product.max())) * (1 + 2.0**-50))


def _along_slices(node: Node, factor: Size, costate: Size) -> Magnitude:
    """Of a product with a factor that may be repeated."""
    times = math.prod(node.shape) / max(factor.numel, 1)
    weight = costate.peak * root(times)
    if times > 1:
        aligned = [d for d, own in enumerate(_aligned(factor, node.shape)) if own is not None and factor.shape[own] > 1]
        weight = minimum(weight, costate.bound, *(costate.slices[d] for d in aligned))
    return weight


RULES: dict[str, Callable[[Node, Sequence[Size]], Claim]] = {
    "add": _add, "scale": _scale, "weigh": _weigh, "sum": _sum, "expand": _expand, "reshape": _reshape,
    "permute": _permute, "flip": _flip, "slice": _part, "pad": _part, "embed": _part, "cat": _cat, "gather": _gather,
    "scatter": _scatter, "rows": _rows, "rows_back": _rows_back, "unfold": _unfold, "fold": _fold, "cumsum": _cumsum,
    "mul": _mul, "matmul": _matmul, "conv": _conv, "conv_input": _conv_input,
    "scalar": _scalar, "softmax": _softmax, "logsumexp": _logsumexp, "normalize": _normalize, "rstd": _deviation,
    "conv_weight": _conv_weight, "softmax_back": _softmax_back, "normalize_back": _normalize_back,
    "select_like": _selected_like, "pick_like": _selected_like, "sort_like": _selected_like,
    "unsort_like": _selected_like, "amax": _largest, "maximum": _largest, "sort": _largest,
}  # fmt: skip

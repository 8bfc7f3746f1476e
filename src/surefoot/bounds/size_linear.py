r"""What linear primitives do to norms.

Copies: a map that reads every entry of its argument at most c times has norm at most :math:`\sqrt c`,
and sums of n entries have norm :math:`\sqrt n`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from surefoot.bounds.claims import (
    ONE,
    ZERO,
    Claim,
    dims_of,
    outward,
    overlap_of,
    result,
    root,
    units,
)  # fmt: skip
from surefoot.bounds.tensor_size import Size, consistent
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.program.ir import Node


def _add(node: Node, arguments: Sequence[Size]) -> Claim:
    total = {
        "bound": stack([each.bound for each in arguments]).sum(),
        "peak": stack([each.peak for each in arguments]).sum(),
        "operator": stack([each.operator for each in arguments]).sum(),
        "slices": tuple(stack([each.slices[k] for each in arguments]).sum() for k in range(len(node.shape))),
        "low": outward(sum(each.low for each in arguments), -1),
        "high": outward(sum(each.high for each in arguments), 1),
    }
    slopes = dict.fromkeys(range(len(arguments)), ONE)
    rounding = units(len(arguments), stack([each.bound for each in arguments]).sum())
    return Claim(slopes, result(node, **total), rounding)


def _scaled(node: Node, x: Size, factor: Magnitude, low: float, high: float, rounding: float = 1) -> Claim:
    """Every entry times a number whose absolute value is at most a factor."""
    size = result(
        node,
        bound=x.bound * factor,
        peak=x.peak * factor,
        total=x.total * factor,
        operator=x.operator * factor,
        slices=tuple(each * factor for each in x.slices),
        low=outward(low, -1),
        high=outward(high, 1),
    )
    return Claim({0: factor}, size, units(rounding, size.bound))


def _scale(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), factor = arguments, float(node.options["factor"])
    ends = (x.low * factor, x.high * factor) if factor else (0.0, 0.0)
    return _scaled(node, x, Magnitude.of(abs(factor)), min(ends), max(ends))


def _weigh(node: Node, arguments: Sequence[Size]) -> Claim:
    x, weights = arguments
    claim = _scaled(node, x, weights.peak, -math.inf, math.inf)
    # norms as matrices do not survive weights of single entries
    low = min(x.low * weights.low, x.low * weights.high, x.high * weights.low, x.high * weights.high)
    size = replace(claim.size, operator=claim.size.bound, low=outward(low, -1) if low == low else -math.inf)
    return replace(claim, size=consistent(size))


def _sum(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), dims = arguments, dims_of(node, len(arguments[0].shape))
    count = math.prod(x.shape[d] for d in dims)
    rest = [d for d in range(len(x.shape)) if d not in dims]
    kept = _kept(node, rest, len(x.shape))
    slices = [x.bound * root(count)] * len(node.shape)
    for place, d in kept.items():
        slices[place] = x.slices[d] * root(count)
    size = result(
        node, bound=x.bound * root(count), total=x.total, peak=minimum(x.peak * count, x.bound * root(count)),
        slices=tuple(slices), low=outward(x.low * count, -1), high=outward(x.high * count, 1),
    )  # fmt: skip
    rounding = units(count + 1, x.bound * root(count)) if count > 1 else ZERO
    return Claim({0: root(count)}, size, rounding, summands=count)


def _kept(node: Node, rest: Sequence[int], rank: int) -> dict[int, int]:
    """The dimension of the argument by that of the result, for those that a reduction keeps."""
    return (
        {d: d for d in rest} if node.options.get("keepdim") and len(node.shape) == rank else dict(enumerate(rest))
    )


def _copied(node: Node, x: Size, times: float, **parts: Any) -> Claim:
    """A map to copies of entries and zeros, each entry at most so often."""
    bound = x.bound * root(times)
    low, high = min(x.low, 0.0), max(x.high, 0.0)
    size = result(node, **{"bound": bound, "peak": x.peak, "low": low, "high": high, **parts})
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
    parts = {
        "slices": tuple(slices),
        "total": x.total,
        "operator": x.operator if matrix else x.bound,
        "low": x.low,
        "high": x.high,
    }
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
    size = result(
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
    claim = _copied(
        node, x, times, peak=x.peak * times, low=min(x.low * times, 0.0), high=max(x.high * times, 0.0)
    )
    rounding = units(times, claim.size.bound) if times > 1 else ZERO
    return replace(claim, rounding=rounding, summands=times)


def _rows(node: Node, arguments: Sequence[Size]) -> Claim:
    x, index = arguments
    times, dim = _most_often(index), node.options["dim"]
    slices = tuple(each if d == dim else each * root(times) for d, each in enumerate(x.slices))
    return _copied(node, x, times, slices=slices, low=x.low, high=x.high)


def _rows_back(node: Node, arguments: Sequence[Size]) -> Claim:
    return _scatter(node, arguments)


def _most_often(index: Size) -> int:
    """How often an index occurs, at most."""
    if index.value is None or index.value.is_meta:
        return index.numel
    return int(torch.bincount(index.value.reshape(-1)).max()) if index.numel else 1


def _unfold(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), options = arguments, node.options
    overlap = overlap_of(x.shape[2:], options["kernel"], options)
    slices = (x.slices[0] * root(overlap),) + (x.bound * root(overlap),) * (len(node.shape) - 1)
    return _copied(node, x, overlap, slices=slices)


def _fold(node: Node, arguments: Sequence[Size]) -> Claim:
    (x,), options = arguments, node.options
    overlap = overlap_of(node.shape[2:], options["kernel"], options)
    claim = _copied(node, x, overlap, peak=x.peak * overlap, low=-math.inf, high=math.inf)
    return replace(claim, rounding=units(overlap, claim.size.bound), summands=overlap)


def _cumsum(node: Node, arguments: Sequence[Size]) -> Claim:
    """A triangle of n ones has norm below (2n + 1)/π + 1/2 < n: the inverse of 2 sin(π/(4n + 2))."""
    (x,) = arguments
    count = node.shape[node.options["dim"]] if node.shape else 1
    slope = Magnitude.of(0.5 / math.sin(math.pi / (4 * count + 2))) * (1 + 1e-14)
    size = result(node, bound=x.bound * slope, peak=x.peak * count)
    return Claim({0: slope}, size, units(count, x.bound * count), summands=count)


LINEAR: dict[str, Callable[[Node, Sequence[Size]], Claim]] = {
    "add": _add, "scale": _scale, "weigh": _weigh, "sum": _sum, "expand": _expand, "reshape": _reshape,
    "permute": _permute, "flip": _flip, "slice": _part, "pad": _part, "embed": _part, "cat": _cat,
    "gather": _gather, "scatter": _scatter, "rows": _rows, "rows_back": _scatter, "unfold": _unfold,
    "fold": _fold, "cumsum": _cumsum,
}  # fmt: skip

r"""What each primitive does to norms: slopes, curvatures and sizes, one rule per kind.

For :math:`z = f(x_1, …, x_k)` a :class:`Claim` holds, over all arguments that their sizes allow,

.. math:: J_i \ge \|D_if\|, \qquad C_{ij} \ge \|D^2_{ij}f\|

as operators between Euclidean norms, and what follows for the sizes of z.

The rules stand by kind in ``size_linear``, ``size_products`` and ``size_functions``; two more things follow
from them: how far a result may be from its value at the centre, and second derivatives contracted with a
costate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from surefoot.bounds.claims import (
    Claim,
    Pair,
    aligned,
    result,
    root,
)  # fmt: skip
from surefoot.bounds.scalars import bounds
from surefoot.bounds.size_functions import FUNCTIONS
from surefoot.bounds.size_linear import LINEAR
from surefoot.bounds.size_products import PRODUCTS
from surefoot.bounds.tensor_size import Size, unknown
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms.hermitian import up
from surefoot.program.ir import Node
from surefoot.program.scalars import Scalar

RULES = LINEAR | PRODUCTS | FUNCTIONS


def moved(node: Node, claim: Claim, arguments: Sequence[Size]) -> Size:
    r"""The size of the difference to the centre, before rounding.

    Linear maps are applied to the differences of their arguments, and :math:`ab - \hat a\hat b = (a - \hat a)b
    + \hat a(b - \hat b)`. What works entry by entry, or fibre by fibre, moves each by its slope times the move
    there.
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
        return result(
            node, bound=parts[0].bound + parts[1].bound, peak=parts[0].peak + parts[1].peak,
            operator=parts[0].operator + parts[1].operator, slices=tuple(x + y for x, y in pairs),
        )  # fmt: skip
    if not all(slope.is_finite for slope in claim.slopes.values()):  # it may jump where nothing moves
        return unknown(node.shape, Magnitude.zero())
    bound = claim.combined([each.bound for each in moves])
    if kind == "scalar":
        slope = claim.slopes[0]
        slices = tuple(each * slope for each in moves[0].slices)
        return result(node, bound=bound, peak=moves[0].peak * slope, slices=slices)
    same = _same_dimensions(node, arguments[0])
    slices = tuple(
        claim.combined([each.slices[same[d]] for each in moves]) if d in same else bound
        for d in range(len(node.shape))
    )
    return result(node, bound=bound, peak=moves[0].peak if name == "amax" else bound, slices=slices)


def _same_dimensions(node: Node, x: Size) -> dict[int, int]:
    """The dimensions along which an operation on fibres works slice by slice, with those of its argument."""
    options, rank = node.options, len(x.shape)
    dims = {options["dim"]} if "dim" in options else set(options.get("dims", range(rank)))
    rest = [d for d in range(rank) if d not in dims]
    if len(node.shape) == rank:
        return {d: d for d in rest}
    return dict(enumerate(rest))


def contracted(node: Node, claim: Claim, arguments: Sequence[Size], costate: Size) -> dict[Pair, Magnitude]:
    r"""The curvatures of an operation times a costate, sharper than the product of the norms.

    Entry by entry, :math:`|\langle\lambda, f'' \circ a \circ b\rangle| \le
    \max_i|\lambda_if''_i|\,\|a\|\,\|b\|`; for a product with a repeated factor, Cauchy's inequality slice by
    slice; for matrices :math:`\langle\lambda, AB\rangle \le \|\lambda\|_2\|A\|_F\|B\|_F`; where fibres or
    groups are separate, the largest of their norms counts.
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
        own_dims = [
            d for d, own in enumerate(aligned(factor, node.shape)) if own is not None and factor.shape[own] > 1
        ]
        weight = minimum(weight, costate.bound, *(costate.slices[d] for d in own_dims))
    return weight

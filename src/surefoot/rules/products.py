r"""Matrix products and their relatives: fully-connected layers, scale and shift, attention's products.

A bilinear map :math:`\beta` has curvature :math:`\sup\|\beta(x, w)\|/(\|x\|\|w\|)` (Lemma tensnorm) and
Jacobians the operator norms of :math:`\beta(\cdot, w)` and :math:`\beta(x, \cdot)`. Its spread follows from
:math:`\beta(x, w) - \beta(x^*, w^*) = \beta(x - x^*, w^*) + \beta(x^*, w - w^*) + \beta(x - x^*, w - w^*)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.calculus.enclosure import Enclosure, row_norms
from surefoot.graph.structure import Spec
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import batched_spectral_norm
from surefoot.rules.arithmetic import meeting_norm
from surefoot.rules.common import ONE, root
from surefoot.rules.registry import Bounds, Call, register_rule


@register_rule("aten.linear", "aten.addmm")
def fully_connected(call: Call) -> Bounds:
    r""":math:`Z = XW^\top + 1b^\top` with N rows of X: L = 1, Jacobians :math:`\|W\|_2`, :math:`\|X\|_2` and √N.

    :math:`\|XW^\top\|_F \le \|X\|_F\|W\|_F`, reached at rank one; :math:`\|\delta X\,W^\top\|_F \le \|\delta
    X\|_F\|W\|_2` and :math:`\|X\,\delta W^\top\|_F \le \|X\|_2\|\delta W\|_F`; a bias entry is copied to N
    rows.
    """
    if call.node.op == "aten.addmm":
        x, w, bias, slots = call["mat1"], call["mat2"], call["self"], ("mat1", "mat2", "self")
        if abs(float(call["alpha"] or 1)) != 1 or abs(float(call["beta"] or 1)) != 1:
            raise call.refuse("addmm with alpha or beta other than 1 is not covered")
    else:
        x, w, bias, slots = call["input"], call["weight"], call["bias"], ("input", "weight", "bias")
    copies = call.numel // max(1, bias.numel) if isinstance(bias, Enclosure) else 0
    centre = x.centre_matrix_norm()
    partial = Partial(
        norm_w=w.bound if x.is_constant else w.matrix_norm(),  # with x fixed nothing is multiplied by it
        norm_x=minimum(x.bound, centre + x.spread),
        centre_x=centre,
        constant=ONE,
    )
    return biaffine(call, slots, x, w, bias, partial, copies, inner=x.shape[-1])


@dataclass(frozen=True)
class Partial:
    """Constants of a bilinear map: with w fixed, with x fixed (over the domain and at its centre), and its own."""

    norm_w: Magnitude
    norm_x: Magnitude
    centre_x: Magnitude
    constant: Magnitude


def biaffine(
    call: Call,
    slots: tuple[str, str, str],
    x: Enclosure,
    w: Enclosure,
    bias: Any,
    partial: Partial,
    bias_copies: int,
    inner: int,
) -> Bounds:
    """A bilinear map of x and w plus a bias that is copied: the bounds all of them share.

    Args:
        call: the operation.
        slots: the names of x, w and the bias among its arguments.
        x: the data.
        w: the weights.
        bias: the bias, or ``None``.
        partial: the constants of the bilinear map.
        bias_copies: to how many entries one entry of the bias goes.
        inner: how many products are added up for one entry.
    """
    slot_x, slot_w, slot_bias = slots
    jacobian = {slot_x: partial.norm_w, slot_w: partial.norm_x}
    bound = minimum(partial.norm_w * x.bound, partial.norm_x * w.bound, partial.constant * x.bound * w.bound)
    spread = partial.norm_w * x.spread + partial.centre_x * w.spread
    rows = _rows(call, x, w, partial)
    if isinstance(bias, Enclosure):
        copies = root(bias_copies)
        jacobian[slot_bias] = copies
        bound, spread = bound + copies * bias.bound, spread + copies * bias.spread
        if rows is not None:
            rows = rows + bias.spread * root(max(1, bias_copies // max(1, call.shape[0])))
    if x.value is None or w.value is None:
        spread = Magnitude.infinity()
    curvature = {(slot_x, slot_w): partial.constant}
    return Bounds(jacobian, curvature, bound=bound, spread=spread, rows=rows, reduction=inner)


def _rows(call: Call, x: Enclosure, w: Enclosure, partial: Partial) -> Magnitude | None:
    """Row i moves by at most ‖w‖ · (move of row i of x) + ‖row i of x at the centre‖ · (move of w)."""
    if not isinstance(x.value, torch.Tensor) or x.value.dim() < 2 or x.value.shape[:1] != call.shape[:1]:
        return None
    moved = x.row_spread(call.shape[0]) * partial.norm_w
    return moved + row_norms(x.value) * (w.spread * partial.constant)


@register_rule("surefoot.scale_shift")
def scale_shift(call: Call) -> Bounds:
    r""":math:`z = w \circ x + b` with w and b copied along x: a product entry by entry plus copies.

    Curvature 1, Jacobians :math:`\|w\|_\infty`, the root of the largest sum of :math:`x^2` over the entries one
    scale meets, and √c.
    """
    x, w, bias = call["x"], call["weight"], call["bias"]
    jacobian: dict[str, Magnitude] = {"x": ONE}
    curvature = {}
    bound, peak = x.bound, x.peak
    if isinstance(w, Enclosure):
        laid_out = _laid_out(w, x, call["dim"])
        jacobian = {"x": w.peak, "weight": meeting_norm(x, laid_out, call)}
        curvature = {("x", "weight"): ONE}
        bound, peak = minimum(w.peak * x.bound, jacobian["weight"] * w.bound), w.peak * x.peak
    if isinstance(bias, Enclosure):
        copies = root(x.numel // max(1, bias.numel))
        jacobian["bias"] = copies
        bound, peak = bound + copies * bias.bound, peak + bias.peak
    return Bounds(jacobian, curvature, bound=bound, peak=peak, rowwise=call["dim"] > 0)


def _laid_out(w: Enclosure, x: Enclosure, dim: int) -> Enclosure:
    """The scale with its shape written out along x, for counting what it meets."""
    shape = (1,) * dim + w.shape + (1,) * (len(x.shape) - dim - len(w.shape))
    value = w.value.reshape(shape) if isinstance(w.value, torch.Tensor) else None
    assert isinstance(w.spec, Spec)
    return replace(w, spec=Spec(shape, w.spec.dtype), value=value, rows=None)


@register_rule("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot")
def matrix_product(call: Call) -> Bounds:
    r"""Batches of products :math:`A_k B_k`: L = 1, Jacobians the largest :math:`\|B_k\|_2` and :math:`\|A_k\|_2`.

    :math:`\sum_k\|A_kB_k\|_F^2 \le \sum_k\|A_k\|_F^2\|B_k\|_F^2 \le \|A\|^2\|B\|^2`. A factor broadcast over c
    products has its Jacobian taken over the c other factors stacked, at most √c times the largest; for two
    dimensions against many, their stacked norm.
    """
    first, second = _factors(call)
    a, b = call[first], call[second]
    copies_a = _broadcast(call, a, b, mine=0)
    copies_b = _broadcast(call, a, b, mine=1)
    norm_b = minimum(_largest_norm(b, transposed=True) * root(copies_a), b.bound)
    norm_a = minimum(_largest_norm(a) * root(copies_b), a.bound)
    if len(b.shape) == 2 and len(a.shape) > 2:
        norm_a = minimum(norm_a, a.matrix_norm())
    spread = Magnitude.infinity()
    if a.value is not None and b.value is not None:
        spread = norm_b * a.spread + norm_a * b.spread
    batched = len(a.shape) > 2 and len(b.shape) > 2 and a.shape[0] == b.shape[0] == (call.shape or (0,))[0]
    return Bounds(
        jacobian={first: norm_b, second: norm_a},
        curvature={(first, second): ONE},
        bound=minimum(norm_b * a.bound, norm_a * b.bound),
        spread=spread,
        rowwise=batched or (len(b.shape) <= 2 and b.is_constant and len(a.shape) > 1),
        reduction=a.shape[-1],
    )


def _factors(call: Call) -> tuple[str, str]:
    names = {"aten.mm": "mat2", "aten.bmm": "mat2", "aten.mv": "vec", "aten.dot": "tensor"}
    return "self", names.get(call.node.op, "other")


def _broadcast(call: Call, a: Enclosure, b: Enclosure, mine: int) -> int:
    """Over how many products of the batch one matrix of the factor is repeated."""
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    return int(batch // max(1, math.prod((a, b)[mine].shape[:-2])))


def _largest_norm(e: Enclosure, transposed: bool = False) -> Magnitude:
    """The largest spectral norm of the matrices of a batch over the domain."""
    if not isinstance(e.value, torch.Tensor):
        return e.bound
    value = e.value
    if value.dim() == 1:
        value = value.unsqueeze(-1 if transposed else 0)
    at_centre = Magnitude.of(batched_spectral_norm(value).reshape(-1)).max()
    move = e.spread if e.rows is None or value.dim() < 3 else minimum(e.spread, e.rows.max())
    return minimum(e.bound, at_centre + move)


@register_rule("aten.bilinear")
def bilinear(call: Call) -> Bounds:
    r""":math:`z_{nk} = x_n^\top W_k y_n + b_k`: a trilinear form, each partial bounded by the product of the
    other two norms.

    :math:`|x^\top W_k y|^2` summed over n and k is at most :math:`\sum_n\|x_n\|^2\|y_n\|^2\|W\|_F^2`, so with
    row bounds :math:`\|x_n\| \le \xi`, :math:`\|y_n\| \le \eta`: Jacobians :math:`\eta\|W\|, \xi\|W\|,
    \|(\|x_n\|\|y_n\|)_n\|_2`, mixed curvatures the third factor.
    """
    x, y, w, bias = call["input1"], call["input2"], call["weight"], call["bias"]
    count = max(1, x.numel // max(1, x.shape[-1]))
    rows = x.shape[0] if len(x.shape) == 2 else 1
    xi = x.row_norms(rows).max() if rows == count else x.bound
    eta = y.row_norms(rows).max() if rows == count else y.bound
    pair = minimum(xi * y.bound, eta * x.bound)
    jacobian = {"input1": eta * w.bound, "input2": xi * w.bound, "weight": pair}
    bound = pair * w.bound
    if isinstance(bias, Enclosure):
        jacobian["bias"] = root(count)
        bound = bound + root(count) * bias.bound
    curvature = {("input1", "input2"): w.bound, ("input1", "weight"): eta, ("input2", "weight"): xi}
    return Bounds(jacobian, curvature, bound=bound, reduction=x.shape[-1] * y.shape[-1])


@register_rule("aten.einsum")
def einstein_sum(call: Call) -> Bounds:
    r"""Products of two tensors summed over shared indices, as attention writes them.

    Without indices that occur in one factor only and not in the result, this is a batch of matrix products: L = 1
    and Jacobians the largest spectral norms. An index of size n that is summed in one factor alone is a sum before
    the product: √n more.
    """
    operands = call["tensors"]
    terms, result = _indices(call, operands)
    if len(operands) != 2 or any(len(set(term)) != len(term) for term in terms):
        raise call.refuse(
            "einsum is covered for two tensors without repeated indices; use matmul and mul for the rest"
        )
    sizes = {i: n for term, e in zip(terms, operands, strict=True) for i, n in zip(term, e.shape, strict=True)}
    alone = [[i for i in term if i not in result and i not in other] for term, other in (terms, terms[::-1])]
    factors = [root(math.prod(sizes[i] for i in indices)) for indices in alone]
    batch = [i for i in terms[0] if i in terms[1] and i in result]
    inner = [i for i in terms[0] if i in terms[1] and i not in result]
    norms = [
        _largest_norm(_as_batch(e, term, batch, inner, drop)) * factor if not drop else e.bound * factor
        for e, term, drop, factor in zip(operands, terms, alone, factors, strict=True)
    ]
    (a, b), scale = operands, factors[0] * factors[1]
    jacobian = {"tensors.0": norms[1] * factors[0], "tensors.1": norms[0] * factors[1]}
    return Bounds(
        jacobian=jacobian,
        curvature={("tensors.0", "tensors.1"): scale},
        bound=minimum(jacobian["tensors.0"] * a.bound, jacobian["tensors.1"] * b.bound),
        reduction=max(1, math.prod(sizes[i] for i in inner)),
    )


def _indices(call: Call, operands: list[Enclosure]) -> tuple[list[str], str]:
    """The indices of the factors and of the result, with the dots written out."""
    equation = call["equation"].replace(" ", "")
    if "->" not in equation:
        raise call.refuse("write the indices of the result of einsum behind '->'")
    left, result = equation.split("->")
    terms = left.split(",")
    longest = max(
        (len(e.shape) - len(t) + 3 for t, e in zip(terms, operands, strict=True) if "..." in t), default=0
    )
    spare = "".join(chr(ord("A") + k) for k in range(26) if chr(ord("A") + k) not in equation)[:longest]

    def written_out(term: str, rank: int) -> str:
        count = rank - len(term) + 3
        return term.replace("...", spare[longest - count :] if count else "")

    full = [written_out(t, len(e.shape)) if "..." in t else t for t, e in zip(terms, operands, strict=True)]
    return full, result.replace("...", spare)


def _as_batch(e: Enclosure, term: str, batch: list[str], inner: list[str], drop: list[str]) -> Enclosure:
    """A factor as a batch of matrices with the summed indices as rows."""
    if not isinstance(e.value, torch.Tensor) or drop:
        return e
    free = [i for i in term if i not in batch and i not in inner]
    moved = e.value.permute([term.index(i) for i in (*batch, *inner, *free)])
    sizes = [math.prod(e.shape[term.index(i)] for i in group) for group in (batch, inner, free)]
    value = moved.reshape(sizes)
    assert isinstance(e.spec, Spec)
    return replace(e, spec=Spec(tuple(value.shape), e.spec.dtype), value=value, rows=None)

r"""Fully-connected layers, scale and shift, and forms of three tensors.

A bilinear map :math:`\beta` has curvature :math:`\sup\|\beta(x, w)\|/(\|x\|\|w\|)` (Lemma tensnorm) and
Jacobians the operator norms of :math:`\beta(\cdot, w)` and :math:`\beta(x, \cdot)`. Its spread follows from
:math:`\beta(x, w) - \beta(\hat x, \hat w) = \beta(x - \hat x, w) + \beta(\hat x, w - \hat w)`. Contracted with a
costate its second derivative is the bilinear form :math:`\langle\lambda, \beta(\dot x, \dot w)\rangle`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, once, row_norms
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import spectral_norm
from surefoot.norms.matrix import affordable_norm
from surefoot.operations.arithmetic import centre_meeting_norm, errors_added_up, meeting_norm
from surefoot.operations.bilinear import along_segment
from surefoot.operations.call import Bounds, Call, Use
from surefoot.operations.common import ONE, ZERO, affine, aligned, batch, broadcast_copies, root, rows_of
from surefoot.operations.gram import linear_rows, scale_rows
from surefoot.operations.record import Form, GramRows, InSingle, operation
from surefoot.operations.scaled import in_one_pass
from surefoot.operations.sparsity import Sparsity, linear_terms, product, tensors

_AFFORDABLE = 2e9  # multiplications for the norm of a costate
_LARGEST_UNFOLDED = 2**20  # entries of a trilinear form whose unfoldings are looked at


def is_linear(node: Node) -> bool:
    """Whether an operation is a fully-connected layer with slots ``input``, ``weight`` and ``bias``."""
    return node.op == "aten.linear"


def _linear_cost(use: Use) -> Sparsity:
    r""":math:`s_\beta = m \tilde\delta \delta`, outputs times inputs of one output."""
    return product(use, use.numel * use.shapes["weight"][-1], "input", "weight", "bias")


@operation("aten.linear", form=Form.PRODUCT, factors=("input", "weight"), rows=batch("input"), cost=_linear_cost,
           gram=GramRows(("weight", "bias"), linear_rows, lambda use: len(use.shape) > 1),
           taylor=partial(along_segment, data="input", weights="weight", shift="bias"), single=InSingle.MATRIX,
           shifts=("bias",), evenly=True,
           entry_error=lambda call, value: errors_added_up(call, call["weight"].shape[-1] + 1))  # fmt: skip
@operation("aten.addmm", form=Form.PRODUCT, factors=("mat1", "mat2"), rows=batch("mat1"), single=InSingle.MATRIX,
           cost=lambda use: product(use, use.numel * use.shapes["mat1"][-1], "mat1", "mat2", "self"))  # fmt: skip
def fully_connected(call: Call) -> Bounds:
    r""":math:`Z = XW^\top + 1b^\top` with N rows of X: L = 1, Jacobians :math:`\|W\|_2`, :math:`\|X\|_2` and √N.

    :math:`\|XW^\top\|_F \le \|X\|_F\|W\|_F`, reached at rank one; :math:`\|\delta X\,W^\top\|_F \le \|\delta
    X\|_F\|W\|_2` and :math:`\|X\,\delta W^\top\|_F \le \|X\|_2\|\delta W\|_F`; a bias entry is copied to N rows.
    An entry is at most the norm of a row of X times that of a row of W, plus an entry of b. ``addmm`` is
    :math:`\beta b + \alpha XW` with a bias of any shape that broadcasts. Contracted with costates
    :math:`\Lambda`: :math:`\langle\dot W, \Lambda^\top\dot X\rangle \le \|\Lambda\|_2\|\dot W\|_F\|\dot X\|_F`.
    """
    if call.node.op == "aten.addmm":
        x, w, bias, slots = call["mat1"], call["mat2"], call["self"], ("mat1", "mat2", "self")
        alpha, beta = (Magnitude.of(abs(float(call[key]))) for key in ("alpha", "beta"))
    else:
        x, w, bias, slots = call["input"], call["weight"], call["bias"], ("input", "weight", "bias")
        alpha = beta = ONE
    centre = x.centre_matrix_norm() if x.numel else ZERO
    matrix = w.matrix_norm() if w.numel and not x.is_constant else w.bound  # a fixed x is not moved through it
    constants = Partial(
        norm_w=alpha * matrix,
        norm_x=alpha * minimum(x.bound, centre + x.spread),
        centre_x=alpha * centre,
        constant=alpha,
    )
    bounds = biaffine(call, slots, x, w, added(call, bias, beta), constants, inner=x.shape[-1])
    pair = slots[:2]
    return replace(
        bounds,
        peak=_largest_result(x, w, bias) if call.node.op == "aten.linear" else None,
        curvature_along=lambda costate: {pair: alpha * costate_norm(costate)},
        change_along=lambda costate: {pair: alpha * costate.row_spread(call.shape[0])},
    )


def _largest_result(x: Enclosure, w: Enclosure, bias: Any) -> Magnitude:
    """On the entries of a fully-connected layer."""
    width = root(max(1, w.shape[-1]))
    data, weights = (minimum(_longest_row(e, e.numel // max(1, e.shape[-1])), e.peak * width) for e in (x, w))
    return data * weights + (bias.peak if isinstance(bias, Enclosure) else ZERO)


def costate_norm(costate: Enclosure, matrix: Tensor | None = None) -> Magnitude:
    """The spectral norm over the domain of a costate as a matrix: as given, or with rows its last dimension."""
    if not costate.value.numel():
        return ZERO
    return minimum(costate.bound, _affordable(costate.value if matrix is None else matrix) + costate.spread)


@once
def _affordable(value: Tensor) -> Magnitude:
    matrix = value.reshape(-1, value.shape[-1] if value.dim() else 1)
    return Magnitude.of(affordable_norm(matrix, _AFFORDABLE))


@dataclass(frozen=True)
class Partial:
    """Constants of a bilinear map: with w fixed, with x fixed (over the domain and at its centre), and its own."""

    norm_w: Magnitude
    norm_x: Magnitude
    centre_x: Magnitude
    constant: Magnitude


@dataclass(frozen=True)
class Added:
    """A tensor that is added to the result: norm of the copying, over the whole result and over one row."""

    enclosure: Enclosure
    norm: Magnitude
    row: Magnitude


def added(call: Call, bias: Any, factor: Magnitude = ONE, shape: tuple[int, ...] | None = None) -> Added | None:
    """What a bias of that shape (its own, if not given) adds when it is broadcast to the result and scaled."""
    if not isinstance(bias, Enclosure):
        return None
    laid = bias.shape if shape is None else shape
    has_rows = len(laid) == len(call.shape) and laid[:1] == call.shape[:1]
    one_row = (1, *call.shape[1:])
    row = broadcast_copies((1, *laid[1:]) if has_rows else laid, one_row)
    return Added(bias, factor * root(broadcast_copies(laid, call.shape)), factor * root(row))


def biaffine(
    call: Call,
    slots: tuple[str, str, str],
    x: Enclosure,
    w: Enclosure,
    bias: Added | None,
    partial: Partial,
    *,
    inner: int,
) -> Bounds:
    r"""A bilinear map of x and w plus a bias that is copied: the bounds all of them share.

    Row i of the result moves by at most :math:`\|\beta(\cdot, w)\|` times the move of row i of x, plus L times
    the norm of row i of x at the centre times the move of w, plus what the bias adds to one row. Where rows of w
    meet those of x, row i of w is all of it that counts.

    ``slots`` are the names of x, w and the bias; ``inner`` products are added up for one entry.
    """
    slot_x, slot_w, slot_bias = slots
    jacobian = {slot_x: partial.norm_w, slot_w: partial.norm_x}
    bound = minimum(partial.norm_w * x.bound, partial.norm_x * w.bound, partial.constant * x.bound * w.bound)
    spread = partial.norm_w * x.spread + partial.centre_x * w.spread
    rows = None
    if slot_x in rows_of(call) and isinstance(x.value, torch.Tensor) and x.numel:
        count = call.shape[0]
        if slot_w in rows_of(call):
            moved = partial.centre_x * w.row_spread(count)
        else:
            moved = minimum(row_norms(x.value) * partial.constant, partial.centre_x) * w.spread
        rows = x.row_spread(count) * partial.norm_w + moved
    if bias is not None:
        jacobian[slot_bias] = bias.norm
        bound, spread = bound + bias.norm * bias.enclosure.bound, spread + bias.norm * bias.enclosure.spread
        rows = None if rows is None else rows + bias.row * bias.enclosure.spread
    return Bounds(
        jacobian,
        curvature={(slot_x, slot_w): partial.constant},
        bound=bound,
        spread=spread,
        rows=rows,
        reduction=inner,
    )


def _scale_cost(use: Use) -> Sparsity:
    """One multiplication per output, and the shift is a bias."""
    if use["weight"] is None:
        return Sparsity(terms=linear_terms(use, use.numel, "x", "bias"))
    return product(use, use.numel, "x", "weight", "bias", counted=False)


@operation("surefoot.scale_shift", form=Form.PRODUCT, factors=("x", "weight"), cost=_scale_cost,
           rows=lambda use: ("x",) if use["dim"] > 0 else (),
           gram=GramRows(("weight", "bias"), scale_rows, lambda use: use["dim"] > 0),
           taylor=partial(along_segment, data="x", weights="weight", shift="bias"), single=InSingle.PRODUCT,
           shifts=("bias",), evaluate=in_one_pass)  # fmt: skip
def scale_shift(call: Call) -> Bounds:
    r""":math:`z = w \circ x + b` with w and b copied along x: a product entry by entry plus copies.

    Curvature 1, Jacobians :math:`\|w\|_\infty`, the root of the largest sum of :math:`x^2` over the entries one
    scale meets, and √c. From dimension 0 on the scales belong to rows; later they are shared by them. Contracted
    with a costate: :math:`\sum_kw_k\sum_{i \in k}\lambda_ix_i \le \max_k(\sum_{i \in
    k}\lambda_i^2)^{1/2}\|w\|\|x\|`.
    """
    x, w, bias = call["x"], call["weight"], call["bias"]

    def laid(e: Enclosure) -> tuple[int, ...]:
        return (*e.shape, *(1,) * (len(x.shape) - call["dim"] - len(e.shape)))

    shift = added(call, bias, shape=laid(bias)) if bias else None
    above = bias.peak if bias else ZERO
    if not isinstance(w, Enclosure):
        norms = {"x": ONE} | ({} if shift is None else {"bias": shift.norm})
        rows = x.row_spread(call.shape[0]) if "x" in rows_of(call) and x.numel else None
        rows = rows if rows is None or shift is None else rows + shift.row * bias.spread
        return affine(call, norms, rows=rows, peak=x.peak + above)
    scale, met = meeting_norm(w, w.shape, w.shape), meeting_norm(x, laid(w), call.shape)
    constants = Partial(scale, met, centre_meeting_norm(x, laid(w), call.shape), ONE)
    return replace(
        biaffine(call, ("x", "weight", "bias"), x, w, shift, constants, inner=1),
        peak=scale * x.peak + above,
        curvature_along=lambda costate: {("x", "weight"): meeting_norm(costate, laid(w), call.shape)},
    )


def _form_cost(use: Use) -> Sparsity:
    """Outputs times the entries of one of its matrices."""
    count, terms = use.numel * math.prod(use.shapes["weight"][1:]), linear_terms(use, use.numel, "bias")
    return Sparsity(product=count, factors=tensors(use, "input1", "input2", "weight"), terms=terms)


def _form(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The form by two products; PyTorch's kernel has no rule under ``vmap``, and warns of that."""
    values = torch.einsum("...kj,...j->...k", torch.einsum("...i,kij->...kj", input1, weight), input2)
    return values if bias is None else values + bias


@operation("aten.bilinear", form=Form.PRODUCT, factors=("input1", "input2", "weight"), cost=_form_cost,
           rows=lambda use: [s for s in aligned(use) if s.startswith("input") and len(use.shape) > 1],
           evaluate=_form)  # fmt: skip
def bilinear(call: Call) -> Bounds:
    r""":math:`z_{nk} = x_n^\top W_k y_n + b_k`: a form of three tensors.

    With :math:`\omega \ge \|(x, y) \mapsto (x^\top W_ky)_k\|` and rows :math:`\|x_n\| \le \xi`, :math:`\|y_n\|
    \le \eta`: Jacobians :math:`\eta\omega`, :math:`\xi\omega`, the norm of the matrix of the products
    :math:`x_n \otimes y_n`, at most :math:`\|(\|x_n\|\|y_n\|)_n\|_2`; mixed curvatures :math:`\omega, \eta, \xi`,
    each by Cauchy-Schwarz over n. For :math:`\omega` any unfolding of W into a matrix will do, as
    :math:`\|W_{(k),(ij)}(x \otimes y)\| \le \|W_{(k),(ij)}\|_2\|x\|\|y\|`, and alike for the other two. All are
    reached for a form of rank one and equal rows.
    """
    x, y, w, bias = call["input1"], call["input2"], call["weight"], call["bias"]
    count = x.numel // max(1, x.shape[-1])
    xi, eta = _longest_row(x, count), _longest_row(y, count)
    omega = _form_norm(w)
    pair = minimum(xi * y.bound, eta * x.bound)
    jacobian = {"input1": eta * omega, "input2": xi * omega, "weight": pair}
    bound = minimum(pair * omega, pair * w.bound)
    if isinstance(bias, Enclosure):
        jacobian["bias"] = root(count)
        bound = bound + root(count) * bias.bound
    curvature = {("input1", "input2"): omega, ("input1", "weight"): eta, ("input2", "weight"): xi}
    return Bounds(jacobian, curvature, bound=bound, reduction=x.shape[-1] * y.shape[-1])


def _longest_row(e: Enclosure, count: int) -> Magnitude:
    """The largest norm of a row along the last dimension."""
    if not isinstance(e.value, torch.Tensor) or count == 0:
        return e.bound if count else ZERO
    return minimum(e.bound, row_norms(e.value.reshape(count, -1)).max() + e.longest_move(len(e.shape) > 1))


def _form_norm(w: Enclosure) -> Magnitude:
    if not isinstance(w.value, torch.Tensor) or w.numel > _LARGEST_UNFOLDED:
        return w.bound
    unfolded = [w.value.movedim(k, 0).flatten(1) for k in range(3)]
    return minimum(w.bound, Magnitude.of(min(spectral_norm(matrix) for matrix in unfolded)) + w.spread)

r"""Soft-max, its logarithm, and the logarithm of the sum of exponentials.

Let :math:`p` be the soft-max of :math:`x`, and :math:`v` a direction, seen as a random variable under :math:`p`.

* **Jacobian of soft-max** :math:`C = \mathrm{diag}(p) - pp^\top`, the covariance: at most 1/2, as the absolute row
  sums are :math:`2p_i(1 - p_i) \le 1/2` (Gershgorin); reached at two classes with equal probability. At most
  :math:`\max_i p_i`, as :math:`C \preceq \mathrm{diag}(p)`; reached at equal probabilities.
* **Curvature at most** :math:`\sqrt2/(3\sqrt3) \approx 0.2722`. Soft-max is the gradient of log-sum-exp, so its
  second derivative is a symmetric tensor whose norm is reached on the diagonal: the third central moment
  :math:`E(v - Ev)^3` with :math:`\|v\|_2 = 1`. The entries of :math:`v` lie in an interval of length
  :math:`\max_{i,j}|v_i - v_j| \le \sqrt2`. A variable on an interval of length :math:`\delta` has
  :math:`|E(v-Ev)^3| \le \delta^3/(6\sqrt3)`: for a given mean the supremum is the concave envelope of a
  function that is concave and then convex, reached by two points at distance :math:`\delta' \le \delta`, with
  value :math:`\delta'^3 q(1-q)(1-2q) \le \delta'^3/(6\sqrt3)`. Reached for two classes. And
  :math:`|E(v - Ev)^3| \le \max|v - Ev|\,E(v - Ev)^2 \le \sqrt2\,\|C\|`.
* **Third derivative at most** :math:`2\|C\|`: again symmetric, on the diagonal the fourth cumulant :math:`E(v -
  Ev)^4 - 3(E(v - Ev)^2)^2`, which lies between :math:`-2\|C\|^2` and :math:`\max|v - Ev|^2\|C\| \le 2\|C\|`.
* **Log-soft-max.** :math:`I - \mathbf 1p^\top` is an oblique projection, of norm :math:`\|\mathbf 1\|\|p\| \le
  \sqrt{k \max p}` for k > 1 classes; its second derivative is :math:`-\mathbf 1\otimes C`, of norm
  :math:`\sqrt k\,\|C\|`. The slope :math:`\sqrt k` is approached as one class takes all.
* **Log-sum-exp** has gradient p, of norm at most :math:`\sqrt{\max p} \le 1`, and second derivative C.

Fibres (the classes of one position of one sample) are separate, so the norms are the largest over them. When the
argument moves by at most :math:`r`, then :math:`p_i = \hat p_ie^{\delta_i}/\sum_j\hat p_je^{\delta_j}` changes by
a factor between :math:`e^{-\sqrt2r}` and :math:`e^{\sqrt2r}`, as :math:`|\delta_i - \delta_j| \le \sqrt2r`. So a
largest probability of at most :math:`q` over the domain gives :math:`\|C\| \le q`, and one of at least
:math:`1 - \rho > 1/2` gives :math:`\|C\| \le 2\rho(1-\rho)`, the other classes having at most :math:`\rho`
together; and :math:`\rho` grows at most by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, measure, row_norms
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call, Pair, Slot, Use
from surefoot.operations.common import ONE, ZERO, aligned, normalized_dim, normalized_dims, root, unless_along
from surefoot.operations.composed_series import log_softmax_along, log_sum_along, softmax_along
from surefoot.operations.record import Near, declare, operation, record_of
from surefoot.operations.sparsity import Sparsity, every_entry, grouped
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL

Dims = int | tuple[int, ...]
STEEPEST = Magnitude.of(math.sqrt(2) / (3 * math.sqrt(3))) * (1 + 1e-15)  # the curvature of a soft-max
_HALF = Magnitude.of(0.5)
_SKEWNESS = math.sqrt(0.5) * (1 + 1e-15)  # of the third derivative, see :func:`log_sum_exp`
_SLACK = 1e-12  # for probabilities computed in double precision


def probabilities(x: Tensor, dim: int) -> Rounded:
    r"""The soft-max, with its error.

    The difference of an entry and the largest one is off by a relative u, and at most 746 in absolute value where
    its exponential does not underflow; exponentials are within 8 units, their sum has k terms, and the quotient is
    rounded: a relative :math:`\gamma_n` with :math:`n = 746 + 32 + k + 16`, so at most :math:`(k + 4096)2^{-52}`.
    Where it underflows, :math:`2^{-1022}` more.
    """
    return with_errors(torch.softmax(x, dim), x.shape[dim] if x.dim() else 1)


def with_errors(computed: Tensor, classes: int) -> Rounded:
    """A soft-max as computed over so many classes, with its error."""
    return Rounded(computed, computed * ((classes + 4096) * 2.0**-52) + SMALL)


def moderate(x: Tensor, dim: int, computed: Tensor | None = None) -> Rounded:
    r"""The soft-max with an error that grows with :math:`t_i = \max x - x_i`: as in :func:`probabilities`, but a
    relative :math:`(t_i + k + 48)2u`. So in norm it is a few units.
    """
    value = torch.softmax(x, dim) if computed is None else computed
    apart = (x.amax(dim=dim, keepdim=True) - x).clamp(max=800.0) if x.numel() else x
    return Rounded(value, value * ((apart + (x.shape[dim] if x.dim() else 1) + 48) * 2.0**-52) + SMALL)


def _fibres(call: Call) -> tuple[Slot, Enclosure, int]:
    """The scores of a soft-max, masked or not, and the dimension of its fibres."""
    slot = next(iter(call.slots))
    return slot, call.slots[slot], normalized_dim(-1 if call["dim"] is None else call["dim"], len(call.shape))


def _near_softmax(call: Call, move: Tensor) -> Near | None:
    r"""With c the move without its mean under p: :math:`p\circ c + \frac12p\circ(c^2 - \langle p, c^2\rangle)`.

    Let E be the norm of the error of p on a fibre. The Jacobian :math:`\mathrm{diag}(p) - pp^\top` is off by at
    most 4E. For :math:`\|d\| = 1` entries of c are at most 2, and off by E; so :math:`p\circ c^2` is off by 8E,
    :math:`\langle p, c^2\rangle \le 4` by :math:`4\sqrt kE + 4E`, and the second derivative by :math:`(16 +
    4\sqrt k)E`. Sums of k products of numbers of these sizes round by a few units for each class.
    """
    _, x, dim = _fibres(call)
    computed = _probabilities(call, x, dim)
    if computed is None or not computed.numel() or not call.shape:
        return None
    p, classes = moderate(x.value, dim, computed), call.shape[dim]
    centred = move - (p.value * move).sum(dim=dim, keepdim=True)
    squares = centred.square()
    change = p.value * centred + 0.5 * p.value * (squares - (p.value * squares).sum(dim=dim, keepdim=True))
    error = float(torch.linalg.vector_norm(p.error, dim=dim).max()) * (1 + 2.0**-40)
    unit = (classes + 32) * 2.0**-53
    return Near(change, 4 * error + 8 * unit, (16 + 4 * math.sqrt(classes)) * error + 64 * unit)


def _near_sums(p: Rounded, move: Tensor, dims: Dims) -> tuple[Tensor, Tensor, float, float]:
    r"""The change of a logarithm of a sum of exponentials, :math:`\langle p, d\rangle + \frac12\langle p,
    c^2\rangle`, with c the move without its mean; its two terms, and on the errors of its two derivatives.

    As in :func:`_near_softmax`, with E the norm of the error of p: the gradient p is off by E, and the second
    derivative by :math:`(4\sqrt k + 8)E`.
    """
    mean = (p.value * move).sum(dim=dims, keepdim=True)
    bend = 0.5 * (p.value * (move - mean).square()).sum(dim=dims, keepdim=True)
    error = float(torch.linalg.vector_norm(p.error, dim=dims).max()) * (1 + 2.0**-40)
    classes = p.value.numel() // max(1, mean.numel())
    unit = (classes + 32) * 2.0**-53
    return mean, bend, error + 8 * unit, (4 * math.sqrt(classes) + 8) * error + 64 * unit


def _near_log_softmax(call: Call, move: Tensor) -> Near | None:
    """The move less the change of the logarithm of the sum, which counts once for each of the k classes."""
    x, dim = call["self"].value, normalized_dim(call["dim"], len(call.shape))
    if not call.shape or not x.numel():
        return None
    mean, bend, first, second = _near_sums(moderate(x, dim), move, dim)
    many = math.sqrt(call.shape[dim]) * (1 + 2.0**-50)
    return Near(move - mean - bend, many * first, many * second)


def _near_log_sum_exp(call: Call, move: Tensor) -> Near | None:
    x = call["self"].value
    dims = normalized_dims(call["dim"], x.dim())
    if not x.numel() or not x.dim():
        return None
    mean, bend, first, second = _near_sums(_along_dims(x, dims), move, tuple(dims))
    return Near((mean + bend).reshape(call.shape), first, second)


def summed(terms: Rounded, dim: Dims) -> Rounded:
    """The sum along dimensions; n terms in any order are off by γ_n of the sum of their absolute values."""
    value = terms.value.sum(dim=dim, keepdim=True)
    count = max(1, terms.value.numel()) // max(1, value.numel())
    sizes = terms.value.abs().sum(dim=dim, keepdim=True)
    error = terms.error.expand(terms.value.shape).sum(dim=dim, keepdim=True)
    up = 1 + (count + 16) * 2.0**-52
    return Rounded(value, (error + sizes * (count * 2.0**-52)) * up)


def _pull_softmax(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    r"""The Jacobian is symmetric: :math:`p\circ(\lambda - \langle p, \lambda\rangle)` on every fibre. Its error
    is relative to :math:`p\circ|\lambda|`, not to what is left after the subtraction. A mask does not count.
    """
    slot, x, dim = _fibres(call)
    computed = _probabilities(call, x, dim)
    if computed is None:
        return {}
    p, slope = with_errors(computed, call.shape[dim] if call.shape else 1), Rounded.exact(costate)
    mask = {"mask": Rounded.exact(torch.zeros_like(call["mask"].value))} if "mask" in call.varying else {}
    return {slot: p * (slope - summed(p * slope, dim)), **mask}


def _pull_log_softmax(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    r""":math:`\lambda - p\sum\lambda` on every fibre."""
    dim = normalized_dim(call["dim"], len(call.shape))
    slope = Rounded.exact(costate)
    return {"self": slope - probabilities(call["self"].value, dim) * summed(slope, dim)}


def _pull_log_sum_exp(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """p times the entry of the costate."""
    x = call["self"].value
    dims = normalized_dims(call["dim"], x.dim())
    shape = [1 if axis in dims else size for axis, size in enumerate(x.shape)]
    return {"self": _along_dims(x, dims) * costate.reshape(shape)}


def _log_sum_error(call: Call, value: Tensor) -> Magnitude:
    r"""With :math:`z = m + \log S`, m the largest of k entries and :math:`1 \le S = \sum e^{-t_i} \le k`: rounding
    :math:`t_i` changes S by at most :math:`u\sum t_ie^{-t_i} \le ku/2`, exponentials and their sum by a relative
    :math:`(k + 16)u`, the logarithm rounds by :math:`4u\log S` and the sum by :math:`u|z|`. All of it is below
    :math:`(8k + 64)u + 2u|z|`, however small other entries are, as a mask makes them.
    """
    classes = call["self"].numel // max(1, call.numel)
    return root(call.numel) * ((8 * classes + 64) * 2.0**-53) + measure(value)[0] * 2.0**-52


def _along_dims(x: Tensor, dims: list[int]) -> Rounded:
    """The soft-max over several dimensions together, with its error."""
    behind = list(range(-len(dims), 0))
    moved = x.movedim(dims, behind)
    p = torch.softmax(moved.flatten(-len(dims)), -1).reshape(moved.shape).movedim(behind, dims)
    return with_errors(p, math.prod(x.shape[d] for d in dims))


def _push_log_softmax(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded:
    r""":math:`\tau - \langle p, \tau\rangle` on every fibre."""
    dim = normalized_dim(call["dim"], len(call.shape))
    tangent = Rounded.exact(tangents["self"])
    return tangent - summed(probabilities(call["self"].value, dim) * tangent, dim)


def push_by_gradient(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded:
    """Where every group of numbers becomes one: the product of its gradient and the tangent."""
    pullback, x = record_of(call.node).pullback, call["self"].value
    assert pullback is not None
    gradient = pullback(call, torch.ones(call.shape, dtype=torch.float64, device=x.device))["self"]
    dims = tuple(normalized_dims(call["dim"], x.dim()))
    total = summed((gradient * tangents["self"]).expand(x.shape), dims)
    return Rounded(total.value.reshape(call.shape), total.error.reshape(call.shape))


def _cost(use: Use) -> Sparsity:
    """On lines of k entries, k² derivatives a line."""
    length = use.shape[use["dim"] if use["dim"] is not None else -1] if use.shape else 1
    return grouped(use.numel, length, evaluation=2, application=2)


@operation("aten.softmax", "aten._softmax", rows=unless_along(), cost=_cost, errata=(13,), pullback=_pull_softmax,
           symmetric=True, near=_near_softmax, taylor=softmax_along("self"), relative=True)  # fmt: skip
@operation("surefoot.masked_softmax", rows=lambda use: aligned(use) if len(use.shape) > 1 else [], cost=_cost,
           errata=(13,), pullback=_pull_softmax, symmetric=True, near=_near_softmax,
           taylor=softmax_along("scores"), relative=True)  # fmt: skip
def softmax(call: Call) -> Bounds:
    """Slope ‖C‖ and curvature at most √2‖C‖; each fibre has norm at most 1, and no two are farther apart than √2.

    Masked entries are left out of the fibre. A mask that varies but is bounded forbids nothing.
    """
    slot, x, dim = _fibres(call)
    classes = call.shape[dim] if call.shape else 1
    if classes <= 1:
        return Bounds({slot: ZERO, **_no_mask(call)}, bound=root(call.numel), peak=ONE)
    top = _top(x, _probabilities(call, x, dim), dim)
    slope = _covariance(top)
    fibres = call.numel // classes
    rows = None
    if dim != 0 and isinstance(x.value, Tensor):
        rows = minimum(x.row_spread(call.shape[0]) * slope, root(2 * fibres // max(1, call.shape[0])))

    def rows_along(costate: Enclosure) -> dict[Pair, Magnitude]:
        assert top is not None
        norms = _fibre_norms(costate.value, dim) + _fibre_spreads(costate, dim)
        return {(slot, slot): _most(_curvatures(top) * norms, call.shape[0])}

    def change_along(costate: Enclosure) -> dict[Pair, Magnitude]:
        assert top is not None
        third = Magnitude.of(_covariances(top).reshape(-1)) * (2 * (1 + 1e-15))
        moved = minimum(third * _fibre_spreads(x, dim), _curvatures(top) * 2.0)
        moved = moved * _fibre_norms(costate.value, dim) + _curvatures(top) * _fibre_spreads(costate, dim)
        return {(slot, slot): _most(moved, call.shape[0])}

    return Bounds(
        jacobian={slot: slope, **_no_mask(call)},
        curvature={(slot, slot): minimum(STEEPEST, slope * math.sqrt(2) * (1 + 1e-15))},
        bound=root(fibres),
        peak=_largest(top),
        spread=root(2 * fibres),
        rows=rows,
        reduction=classes,
        curvature_along=None if top is None else lambda costate: {(slot, slot): _fibres_along(costate, dim, top)},
        rows_along=None if top is None or dim == 0 else rows_along,
        change_along=None if top is None or dim == 0 else change_along,
    )


def _fibres_along(costate: Enclosure, dim: int, top: tuple[np.ndarray, np.ndarray]) -> Magnitude:
    """The largest product over the fibres of their curvature and the norm of their costate."""
    curvature = _curvatures(top)
    sizes = curvature * (_fibre_norms(costate.value, dim) + costate.longest_move(dim != 0))
    return minimum(sizes.max(), curvature.max() * costate.bound)


def _fibre_norms(value: Tensor, dim: int) -> Magnitude:
    """The norm of every fibre."""
    fibres = value.movedim(dim, -1)
    return row_norms(fibres.reshape(-1, fibres.shape[-1]))


def _curvatures(top: tuple[np.ndarray, np.ndarray]) -> Magnitude:
    """That of the soft-max, of every fibre."""
    curvature = np.minimum(STEEPEST.numpy(), _covariances(top) * (math.sqrt(2) * (1 + 1e-15)))
    return Magnitude.of(curvature.reshape(-1))


def _most(fibres: Magnitude, rows: int) -> Magnitude:
    """The largest of the fibres of each row."""
    return Magnitude(fibres.log2.reshape(rows, -1)).max(axis=1)


def _fibre_spreads(e: Enclosure, dim: int) -> Magnitude:
    """How far every fibre may be from the centre: as far as its row, or its entries together."""
    rows, radius = e.row_spread(len(e.value)), e.entry_radius()
    fibres = e.numel // max(1, e.value.shape[dim] * len(e.value))
    moves = Magnitude(rows.log2.repeat(fibres))
    if radius is None or radius.shape != e.value.shape:
        return moves
    return minimum(moves, _fibre_norms(radius, dim))


def _no_mask(call: Call) -> dict[str, Magnitude]:
    """The slope in a real mask: zero, as only its infinite entries count."""
    if "mask" not in call.slots:
        return {}
    if not call["mask"].is_constant and not call["mask"].peak.is_finite:
        raise call.refuse("a mask that varies over the domain and may be -∞ is not covered; use a fixed mask")
    return {"mask": ZERO}


declare("aten.softmin", rows=unless_along(), cost=_cost)


@operation("aten.log_softmax", "aten._log_softmax", rows=unless_along(), cost=_cost, errata=(13,),
           pullback=_pull_log_softmax, push=_push_log_softmax, near=_near_log_softmax,
           taylor=log_softmax_along)  # fmt: skip
def log_softmax(call: Call) -> Bounds:
    """Slope √(k max p), curvature √k ‖C‖, third derivative √(k/2); at zero every entry is -log k."""
    x, dim = call["self"], normalized_dim(call["dim"], len(call.shape))
    classes = call.shape[dim] if call.shape else 1
    if classes <= 1:
        return Bounds({"self": ZERO}, offset=ZERO, bound=ZERO, peak=ZERO)
    top = _top(x, _probabilities(call, x, dim), dim)
    return Bounds(
        jacobian={"self": root(classes) * _largest(top).sqrt()},
        curvature={("self", "self"): root(classes) * _covariance(top)},
        curvature_change={("self", "self"): root(classes) * _SKEWNESS * x.spread},
        offset=Magnitude.of(math.log(classes)) * root(call.numel),
        reduction=classes,
    )


@operation("aten.logsumexp", rows=unless_along(), errata=(13,), pullback=_pull_log_sum_exp,
           push=push_by_gradient, near=_near_log_sum_exp, taylor=log_sum_along, error=_log_sum_error,
           cost=lambda use: every_entry(math.prod(use.shapes["self"])))  # fmt: skip
def log_sum_exp(call: Call) -> Bounds:
    r"""Slope √(max p), curvature ‖C‖, third derivative 1/√2; at zero every entry is log k.

    The third derivative along a unit vector v is the third central moment of a variable that is :math:`v_i` with
    probability :math:`p_i`. Its values are at most :math:`\sqrt2` apart, so that its variance is at most 1/2, and
    the moment at most :math:`\sqrt2` times that. A symmetric form is largest where its arguments are the same.
    """
    x = call["self"]
    dims = normalized_dims(call["dim"], len(x.shape))
    classes = math.prod(x.shape[d] for d in dims)
    top = None
    if isinstance(x.value, Tensor) and classes > 1 and x.shape:
        moved = x.value.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        top = _top(x, torch.softmax(moved, -1), -1, whole=0 in dims)
    return Bounds(
        jacobian={"self": _largest(top).sqrt()},
        curvature={("self", "self"): _covariance(top) if classes > 1 else ZERO},
        curvature_change={("self", "self"): x.spread * _SKEWNESS},
        offset=Magnitude.of(math.log(max(1, classes))) * root(call.numel),
        reduction=classes,
    )


def _probabilities(call: Call, x: Enclosure, dim: int) -> Tensor | None:
    """The soft-max at the centre, as the operation computes it."""
    if not isinstance(x.value, Tensor):
        return None
    if call.node.op != "surefoot.masked_softmax":
        return torch.softmax(x.value, dim)
    mask = call["mask"]
    if isinstance(mask, Enclosure) and mask.value is None:
        return None
    found: Tensor = call.node.target(x.value, None if mask is None else mask.value, call["causal"])
    return found


def _top(
    x: Enclosure, probabilities: Tensor | None, dim: int, whole: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """For each fibre, what its largest probability, and the others together, stay below over the domain.

    ``None`` if nothing is known. ``whole`` fibres run through the first dimension, where row spreads do not apply.
    """
    if probabilities is None or not probabilities.numel():
        return None
    largest = probabilities.amax(dim=dim)
    move: Tensor | None = x.radius()
    assert move is not None
    if whole or normalized_dim(dim, probabilities.dim()) == 0 or move.dim() == 0:
        move = x.spread.tensor(probabilities)
    else:
        move = move.reshape(-1, *[1] * (largest.dim() - 1))
        radius = x.entry_radius()
        if radius is not None and radius.shape == probabilities.shape:
            move = torch.minimum(move, torch.linalg.vector_norm(radius, dim=dim) * (1 + 2.0**-30))
    # The round-off of a probability grows with it: what is computed as zero may be 10⁻¹² and become anything.
    slack = _SLACK + probabilities.numel() // max(1, largest.numel()) * 2.0**-51  # a sum of so many terms
    factor = (math.sqrt(2) * move).clamp(max=700.0).exp() * (1 + slack)
    bounds = [((p + slack) * factor).clamp(max=1.0).cpu().numpy() for p in (largest, 1 - largest)]
    return bounds[0], bounds[1]


def _covariance(top: tuple[np.ndarray, np.ndarray] | None) -> Magnitude:
    """‖C‖ from the largest probability of each fibre."""
    if top is None:
        return _HALF
    return minimum(_HALF, Magnitude.of(float(_covariances(top).max())))


def _covariances(top: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The same for every fibre."""
    largest, others = top
    certain = np.where(others < 0.5, 2 * others * (1 - others) * (1 + 1e-15), 0.5)
    return np.minimum(certain, largest)


def _largest(top: tuple[np.ndarray, np.ndarray] | None) -> Magnitude:
    """The largest probability of all fibres."""
    return ONE if top is None else minimum(ONE, Magnitude.of(float(top[0].max())))

r"""Normalisations: batch, layer, group, instance and root-mean-square.

All divide groups of :math:`M` numbers by their root-mean-square, most after subtracting their mean:

.. math:: g(x) = x / \rho_\epsilon, \qquad \rho_\epsilon = \sqrt{\rho^2 + \epsilon}, \qquad \rho^2 = \|x\|^2/M .

*Jacobian.* :math:`Dg = (I - xx^\top/(M\rho_\epsilon^2))/\rho_\epsilon` has eigenvalues :math:`1/\rho_\epsilon` and
:math:`\epsilon/\rho_\epsilon^3`, so :math:`\|Dg\| = 1/\rho_\epsilon \le \epsilon^{-1/2}`.

*Curvature.* :math:`D^2g` is the symmetric tensor :math:`3x^{\otimes3}/(M^2\rho_\epsilon^5) - \mathrm{sym}(x
\otimes I)/(M\rho_\epsilon^3)`. The norm of a symmetric tensor is reached on the diagonal (Banach), where with
:math:`t = \langle x, v\rangle \in [0, \|x\|]` it is :math:`3t/(M\rho_\epsilon^3)\,(1 -
t^2/(M\rho_\epsilon^2))`. It grows up to :math:`t^2 = M\rho_\epsilon^2/3`. So

.. math:: \|D^2g\| = \frac{1}{\sqrt M}\begin{cases} 3\rho\epsilon/\rho_\epsilon^5 & \rho^2 \le \epsilon/2\\
    (2/\sqrt3)/\rho_\epsilon^2 & \rho^2 \ge \epsilon/2 \end{cases}

whose maximum, at :math:`\rho^2 = \epsilon/4`, is :math:`\kappa M^{-1/2}\epsilon^{-1}` with :math:`\kappa =
\tfrac32(\tfrac45)^{5/2} \approx 0.8587`; from there on it decreases.

Subtracting the mean is an orthogonal projection, which can only lower either: it leaves both as they are where
there are directions orthogonal to x left, so from three numbers per group on (two without the mean). Groups are
separate, so the Jacobian and the tensor are block diagonal and their norms are the largest over the groups. Each
group has norm below :math:`\sqrt M`, and its largest entry is below :math:`\sqrt{M - 1}` if the entries add up to
zero: then :math:`x_i^2 = (\sum_{j \ne i} x_j)^2 \le (M-1)(\|x\|^2 - x_i^2)`. Contracted with a costate, the blocks
count with the norms of their parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from surefoot.enclosure import Enclosure, row_norms
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import affine, root
from surefoot.operations.record import Form, operation
from surefoot.operations.rows import batch, rows_of
from surefoot.operations.sparsity import Sparsity, grouped, linear_terms

_KAPPA = 1.5 * 0.8**2.5 * (1 + 1e-15)


def _form(node: Node) -> Form:
    """With running statistics affine."""
    return Form.LINEAR if node.arguments["running_mean"] is not None else Form.OTHER


def _batch_rows(use: Use) -> list[Slot]:
    return ["input"] if use["running_mean"] is not None and not use["training"] else []


def _cost(use: Use) -> Sparsity:
    """Groups are channels, over samples and positions or over positions; with fixed statistics it is affine."""
    if use["running_mean"] is not None:
        return Sparsity(terms=linear_terms(use, use.numel, "input"))
    return grouped(
        use.numel, use.numel // use.shape[1] if use.op == "aten.batch_norm" else math.prod(use.shape[2:])
    )


_STATISTICS = ("running_mean", "running_var")


@operation(
    "aten.batch_norm", form=_form, fixed=_STATISTICS, rows=_batch_rows, cost=_cost, epsilon="eps", errata=(3,)
)
@operation("aten.instance_norm", form=_form, fixed=_STATISTICS, rows=batch("input", 3), cost=_cost, epsilon="eps",
           errata=(3,))  # fmt: skip
def batch_or_instance_norm(call: Call) -> Bounds:
    """With running statistics an affine map, x ↦ (x - μ)/√(σ² + ε) per channel, of norm the largest 1/√(σ² + ε);
    otherwise channels are groups, over the whole batch or over each sample.
    """
    x = call["input"]
    if call["running_mean"] is not None:
        return _fixed_statistics(call, x)
    if call.node.op == "aten.batch_norm":
        size = x.numel // x.shape[1]
        return normalise(call, x, lambda t: t.transpose(0, 1).reshape(-1, size), size, centred=True)
    size = math.prod(x.shape[2:])
    return normalise(call, x, lambda t: t.reshape(-1, size), size, centred=True)


def _fixed_statistics(call: Call, x: Enclosure) -> Bounds:
    mean, var, eps = call["running_mean"], call["running_var"], float(call["eps"])
    if mean.value is None or var.value is None:  # on meta only the signs of the statistics are known
        scale = Magnitude.of(eps**-0.5) * (1 + 1e-12)
        return affine(call, {"input": scale}, offset=Magnitude.infinity())
    factors = (var.value.double() + eps).rsqrt()
    per_channel = x.numel // max(1, x.shape[1])
    offset = Magnitude.of((mean.value.double() * factors).norm()) * root(per_channel) * (1 + 1e-9)
    return affine(call, {"input": Magnitude.of(factors.max()) * (1 + 1e-12)}, offset=offset)


@operation("aten.layer_norm", "aten.rms_norm", epsilon="eps", errata=(3,),
           rows=lambda use: ["input"] if len(use["normalized_shape"]) < len(use.shapes["input"]) else [],
           cost=lambda use: grouped(use.numel, math.prod(use["normalized_shape"])))  # fmt: skip
def layer_norm(call: Call) -> Bounds:
    """Groups are the last dimensions of each sample."""
    x = call["input"]
    size = math.prod(call["normalized_shape"])
    return normalise(call, x, lambda t: t.reshape(-1, size), size, centred=call.op == "aten.layer_norm")


@operation("aten.group_norm", rows=batch("input"), epsilon="eps", errata=(3,),
           cost=lambda use: grouped(use.numel, use.numel // (use.shape[0] * use["num_groups"])))  # fmt: skip
def group_norm(call: Call) -> Bounds:
    """Groups are blocks of channels of each sample."""
    x = call["input"]
    size = x.numel // (x.shape[0] * call["num_groups"])
    return normalise(call, x, lambda t: t.reshape(-1, size), size, centred=True)


def normalise(
    call: Call, x: Enclosure, arrange: Callable[[Tensor], Tensor], size: int, *, centred: bool
) -> Bounds:
    """The bounds all normalisations share; sharper where the centre keeps the groups away from zero.

    Args:
        call: the operation.
        x: its argument.
        arrange: lays a tensor of its shape out as a matrix with one group per row.
        size: numbers per group.
        centred: whether the mean is subtracted.

    Where rows of the result are those of the argument, groups lie within rows, in consecutive blocks.
    """
    rowwise = "input" in rows_of(call)
    eps = float(call["eps"])
    if eps <= 0:
        raise call.refuse("a normalisation with eps = 0 has no bounded slope; use a positive eps")
    groups = arrange(x.value) if isinstance(x.value, Tensor) and x.numel else None
    smallest = _smallest_root_mean_square(x, groups, size, centred, rowwise)
    slope, curvature = _slope(smallest, eps), _curvature(smallest, eps, size)
    rows = None
    known = groups is not None

    def along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        norms = row_norms(arrange(costate.value))
        own = rowwise and costate.rows is not None
        move = minimum(costate.spread, costate.rows.max()) if own and costate.rows is not None else costate.spread
        largest = (Magnitude.of(curvature) * (norms + move)).max()
        return {("input", "input"): minimum(largest, costate.bound * float(curvature.max()))}

    if rowwise and known:
        rows = x.row_spread(call.shape[0]) * Magnitude.of(slope.reshape(call.shape[0], -1).max(axis=1))
    return Bounds(
        jacobian={"input": Magnitude.of(float(slope.max()))},
        curvature={("input", "input"): Magnitude.of(float(curvature.max()))},
        offset=Magnitude.zero(),
        bound=root(call.numel),
        peak=root(max(1, size - 1)) if centred else root(size),
        rows=rows,
        reduction=size,
        curvature_along=along if known else None,
    )


def _smallest_root_mean_square(
    x: Enclosure, groups: Tensor | None, size: int, centred: bool, rowwise: bool
) -> np.ndarray:
    """A lower bound of ρ for each group over the domain: its centre minus how far it may move, over √M."""
    if groups is None or not groups.numel():
        return np.zeros(1)
    data = groups - groups.mean(dim=1, keepdim=True) if centred else groups
    centre = data.norm(dim=1).cpu().numpy()
    count = len(centre)
    moved = float(x.spread)
    if rowwise and x.rows is not None and count % len(x.rows) == 0:
        moves = np.minimum(x.rows.numpy().repeat(count // len(x.rows)), moved)
    else:
        moves = np.full(count, moved)
    slack = 1e-12 * groups.abs().amax(dim=1).cpu().numpy() * size
    return np.maximum(0.0, centre * (1 - 1e-12) - moves - slack) / math.sqrt(size) * (1 - 1e-12)


def _slope(rho: np.ndarray, eps: float) -> np.ndarray:
    return 1.0 / np.hypot(rho, math.sqrt(eps)) * (1 + 1e-12)


def _curvature(rho: np.ndarray, eps: float, size: int) -> np.ndarray:
    """The three branches of the supremum over all larger ρ, with σ = ρ/√ε so that nothing overflows."""
    sigma = rho / math.sqrt(eps)
    total = 1 + sigma**2
    near = np.where(sigma <= 0.5, _KAPPA, 3 * np.minimum(sigma, 1.0) / np.minimum(total, 2.0) ** 2.5)
    far = 2 / math.sqrt(3) / total
    return np.where(sigma**2 <= 0.5, near, far) / (eps * math.sqrt(max(1, size))) * (1 + 1e-12)

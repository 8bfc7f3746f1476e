r"""The dense Hessian of an objective of a layered network at its weights, every entry with a proved error.

With :math:`g = \nabla h`, :math:`\Lambda_n = \nabla^2h` of one sample, :math:`\lambda^\omega_t = B_t^\top g`,
:math:`\lambda^x_z = Q_z^\top g` and the notation of :mod:`surefoot.theorems.bending`,

.. math:: D^2F[v, v] = \sum_n\sum_{jk} e_j^\top\Big(B_j^\top\Lambda_nB_k + \sum_{z\ge j,k}
    P_{zj}^\top\mathrm{diag}(\lambda^x_z\circ a_z'')P_{zk}\Big)e_k
    + 2\sum_n\sum_{t>k}(\lambda^\omega_t)^\top\dot W_t\,\mathrm{diag}(a_{t-1}')P_{t-1,k}e_k .

With two layers and nothing behind the second, all but the first term, :math:`\langle g, D^2\psi\rangle`, couples
the weights into and out of one unit only: :func:`lowest_bend` has its smallest eigenvalue at any width.

Other networks of linear layers whose samples do not interact: :func:`separate_hessian` is the second derivative of
:mod:`surefoot.calculus.adjoint.centre`, as computed. How far the exact one may be from it, at the weights and over
a ball, is the variation of the adjoint pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.adjoint.samples import Source, samples
from surefoot.calculus.forward import Pass
from surefoot.norms.hermitian import eigenvalue_bounds, gamma, up
from surefoot.norms.verified import product
from surefoot.objectives import CrossEntropy, Objective, Square
from surefoot.operations.losses.cross_entropy import masses
from surefoot.scalar import Rounded, rounded_derivatives
from surefoot.theorems.layered import Layered

_SUMMED = 64 * 2.0**-53  # of blocks of one pair of parameters that are added up


@dataclass(frozen=True)
class LossDerivatives:
    r"""First and second derivative of a convex loss in the outputs.

    For the log-sum-exp of one sample with probabilities p the second derivative along v is the variance of v under
    p, at most :math:`\frac14(\max v - \min v)^2 \le \frac12\|v\|^2`, and the third along a, b and c is
    :math:`\mathrm E[(a - \bar a)(b - \bar b)(c - \bar c)] \le \max|a - \bar a|\cdot
    (\frac12\|b\|^2)^{1/2}(\frac12\|c\|^2)^{1/2} \le \frac{\sqrt2}2\|a\|\|b\|\|c\|`; the cross-entropy is a sum of
    such terms times the mass of each sample, and linear ones.

    Attributes:
        gradient: samples × outputs.
        hessian: samples × outputs × outputs; samples do not interact.
        smoothness: a bound on the norm of the second derivative, anywhere.
        variation: a Lipschitz constant of it.
    """

    gradient: Rounded
    hessian: Rounded
    smoothness: float
    variation: float


def square_weight(objective: Square, outputs: Tensor) -> float:
    """The number c with h = c/2 ‖ŷ - y‖², up to one rounding of it."""
    probe = objective.hessian_vector_product(outputs.detach().double(), torch.ones_like(outputs).double())
    weight = float(probe.reshape(-1)[0])
    if not bool((probe - weight).abs().max() <= 1e-12 * weight):
        raise NotImplementedError(f"the Hessian of {objective} is not a multiple of the identity")
    return weight


def loss_derivatives(objective: Objective, outputs: Rounded) -> LossDerivatives | None:
    """The derivatives of the square loss and the cross-entropy; ``None`` for others."""
    value, error = outputs.value, outputs.error.expand(outputs.value.shape)
    if isinstance(objective, Square):
        weight = square_weight(objective, value)
        slopes = (outputs - objective.chosen().double().reshape(value.shape)).scaled(weight)
        unit = torch.eye(value.shape[1], dtype=torch.float64).expand(len(value), -1, -1)
        return LossDerivatives(slopes, Rounded(weight * unit, weight * unit * 2.0**-51), up(weight), 0.0)
    if not isinstance(objective, CrossEntropy) or value.dim() != 2:
        return None
    options: dict[str, Any] = dict(objective.options)
    mass = masses(objective.chosen(), value.shape[1], **options)
    mass_error = mass * ((len(value) + 32) * 2.0**-53)
    known = Rounded(mass, mass_error)
    ones = torch.ones(value.shape[1], 1, dtype=torch.float64)
    total = product(known, Rounded.exact(ones))
    exponential: Callable[[Any], Any] = torch.exp
    shifted: Rounded = exponential(Rounded(value, error) - value.amax(1, keepdim=True))
    probability = shifted / product(shifted, Rounded.exact(ones))
    slopes = probability * total - known
    wide = probability.expand(value.shape)
    column = Rounded(wide.value[:, :, None], wide.error[:, :, None])
    row = Rounded(wide.value[:, None, :], wide.error[:, None, :])
    unit = torch.eye(value.shape[1], dtype=torch.float64)
    each = total.expand((len(value), 1))
    factor = Rounded(each.value[:, :, None], each.error[:, :, None])
    most = float(total.bound.max())
    return LossDerivatives(slopes, (column * unit - column * row) * factor, up(most / 2), up(0.7072 * most))


def contract(formula: str, *factors: Rounded) -> Rounded:
    r"""``torch.einsum`` with proved errors.

    With :math:`|A|` the absolute values and :math:`E` the errors, the result is off by at most :math:`C(|A| + E,
    \dots) - C(|A|, \dots)` and the round-off :math:`\gamma C(|A|, \dots)`, :math:`\gamma` that of as many
    additions and factors as occur; both contractions are computed, which costs :math:`\gamma` of them again.
    """
    values = [factor.value for factor in factors]
    sizes: dict[str, int] = {}
    left, right = formula.split("->")
    for letters, value in zip(left.split(","), values, strict=True):
        sizes |= dict(zip(letters, value.shape, strict=True))
    summed = 1
    for letter in sizes.keys() - set(right):
        summed *= sizes[letter]
    absolute = torch.einsum(formula, *(value.abs() for value in values))
    bound = torch.einsum(formula, *(factor.bound.expand(factor.value.shape) for factor in factors))
    error = (bound - absolute).clamp(min=0.0) + 4 * gamma(2 * summed + sum(sizes.values()) + 32) * bound
    return Rounded(torch.einsum(formula, *values), error + 2.0**-1000)


def hessian(layered: Layered, outer: LossDerivatives) -> Rounded:
    """The Hessian, with parameters ordered by layer, unit and input, the bias last."""
    layers, depth = layered.layers, len(layered.layers)
    bends = [second_slopes(layered, k) for k in range(depth)]
    slopes = [state[2].expand(state[2].value.shape) for state in layered.states]
    flows = flows_of(layered, slopes)
    reached = [contract("no,now->nw", outer.gradient, b) for _, b in layered.sensitivities]
    before = [outer.gradient if q is None else contract("no,now->nw", outer.gradient, q)
              for q, _ in layered.sensitivities]  # fmt: skip
    weights = [costate * bend for costate, bend in zip(before, bends, strict=True)]
    parts = [k for k in range(depth) if layers[k].trains]
    features = {k: features_of(layered, k) for k in parts}
    widths = {k: layers[k].weight.shape[0] for k in parts}
    rows = []
    for j in parts:
        row = []
        for k in parts:
            b_j, b_k = layered.sensitivities[j][1], layered.sensitivities[k][1]
            form = contract("noi,nop,npl->nil", b_j, outer.hessian, b_k)
            for z in range(max(j, k), depth):
                form = form + contract("nzi,nz,nzl->nil", flows[z, j], weights[z], flows[z, k])
            block = contract("nil,na,nb->ialb", form, features[j], features[k])
            for first, second, swapped in ((j, k, False), (k, j, True)):
                if first > second and layers[first].trains_weight:
                    moved = _expanded(slopes[first - 1], 2) * flows[first - 1, second]
                    if layers[first].trains_bias:
                        moved = _padded(moved)
                    formula = "ni,nal,nb->lbia" if swapped else "ni,nal,nb->ialb"
                    block = block + contract(formula, reached[first], moved, features[second])
            shape = widths[j] * features[j].value.shape[1], widths[k] * features[k].value.shape[1]
            row.append(Rounded(block.value.reshape(shape), block.error.reshape(shape)))
        rows.append(Rounded(torch.cat([b.value for b in row], 1), torch.cat([b.error for b in row], 1)))
    return Rounded(torch.cat([r.value for r in rows]), torch.cat([r.error for r in rows]))


def lowest_bend(layered: Layered, outer: LossDerivatives) -> float:
    r"""A lower bound of :math:`\lambda_{\min}(\langle g, D^2\psi\rangle)` for two layers; minus infinity for more.

    That of the matrix of a unit is :math:`c - \lambda_{\max}(cI - M_i)`, with c so large that the diagonal is
    positive. Parameters that meet nothing have the eigenvalue zero.
    """
    if len(layered.layers) != 2 or layered.layers[1].function is not None or not layered.layers[0].trains:
        return -math.inf
    through = layered.sensitivities[0][0]
    assert through is not None
    features = features_of(layered, 0)
    bent = contract("no,now->nw", outer.gradient, through) * second_slopes(layered, 0)
    inner = contract("ni,na,nb->iab", bent, features, features)
    size = inner.value.shape[1]
    outputs = outer.gradient.value.shape[1] if layered.layers[1].trains_weight else 0
    value = torch.zeros(len(inner.value), size + outputs, size + outputs, dtype=torch.float64)
    error = torch.zeros_like(value)
    value[:, :size, :size], error[:, :size, :size] = inner.value, inner.error
    if outputs:
        cross = contract("ni,na,no->iao", layered.states[0][2], features, outer.gradient)
        for whole, part in ((value, cross.value), (error, cross.error)):
            whole[:, :size, size:] = part
            whole[:, size:, :size] = part.mT
    wrong = torch.linalg.matrix_norm(error).max()
    most = float(torch.linalg.matrix_norm(value).max()) * 1.01 + 1e-290
    raised = -value
    raised.diagonal(dim1=1, dim2=2).add_(most)
    above = float(eigenvalue_bounds(raised).max()) - most
    return -max(above + float(wrong) * (1 + 1e-9) + 8 * 2.0**-52 * most, 0.0)


def separate_hessian(result: Pass) -> Rounded | None:
    """The Hessian of a scalar function in the order of its variables, as computed, with the round-off of putting
    it together; ``None`` if samples interact.
    """
    try:
        found = samples(result)
    except (RuntimeError, NotImplementedError, OverflowError, IndexError):  # no second derivative, or out of range
        return None
    if found is None:
        return None
    sizes = [math.prod(result.enclosures[name].shape) for name in result.region.variables]
    total = sum(sizes)
    value = torch.zeros(total, total, dtype=torch.float64)
    error = torch.zeros_like(value)
    held = [_held(source, sizes) for source in found.sources]

    def add(first: Tensor, second: Tensor, block: Rounded) -> None:
        rows, columns = first.reshape(-1)[:, None], second.reshape(-1)[None, :]
        part = block.value.reshape(rows.numel(), columns.numel())
        value.index_put_((rows, columns), part, accumulate=True)
        extra = block.error.reshape(part.shape) + _SUMMED * part.abs()
        error.index_put_((rows, columns), extra, accumulate=True)

    for last, (places, inputs) in enumerate(held):
        for other, form in enumerate(found.curvatures(last)):
            there, read = held[other]
            block = contract("nil,na,nb->ialb", *map(Rounded.exact, (form, inputs, read)))
            add(places, there, block)
            if last != other:
                swapped = Rounded(*(part.permute(2, 3, 0, 1) for part in (block.value, block.error)))
                add(there, places, swapped)
    for k, source in enumerate(found.sources):
        if source.reads is None or source.weight is None:
            continue
        places = held[k][0][:, : source.matrix.shape[1]]
        costate = found.slopes[k].detach()
        for other, jacobian in enumerate(found.jacobians(source.reads)):
            there, read = held[other]
            block = contract("ni,nal,nb->ialb", *map(Rounded.exact, (costate, jacobian, read)))
            add(places, there, block)
            add(there, places, Rounded(*(part.permute(2, 3, 0, 1) for part in (block.value, block.error))))
    return Rounded(value, error)


def _held(source: Source, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The places of the parameters of a linear layer among all, units × (inputs, bias), and what they multiply."""
    places, inputs = [], []
    if source.weight is not None:
        start = sum(sizes[: source.weight])
        places.append(torch.arange(start, start + source.matrix.numel()).reshape(source.matrix.shape))
        inputs.append(source.inputs)
    if source.bias is not None:
        start = sum(sizes[: source.bias])
        places.append(torch.arange(start, start + source.width)[:, None])
        inputs.append(torch.ones_like(source.inputs[:, :1]))
    return torch.cat(places, 1), torch.cat(inputs, 1)


def second_slopes(layered: Layered, k: int) -> Rounded:
    """The second derivative of the function of a layer, samples × width."""
    layer, state = layered.layers[k], layered.states[k]
    if layer.function is None:
        return Rounded.exact(torch.zeros_like(state[1].value)).expand(state[1].value.shape)
    before = product(state[0], Rounded.exact(layer.weight.mT))
    if layer.bias is not None:
        before = before + layer.bias
    return rounded_derivatives(layer.function, before, 2)[2] * 2.0


def flows_of(layered: Layered, slopes: list[Rounded]) -> dict[tuple[int, int], Rounded]:
    """The derivatives of what one linear layer gives in what an earlier one gives, samples × width × width."""
    found = {}
    for k, layer in enumerate(layered.layers):
        unit = torch.eye(layer.weight.shape[0], dtype=torch.float64).expand(layered.count, -1, -1)
        found[k, k] = Rounded.exact(unit).expand(unit.shape)
        for z in range(k + 1, len(layered.layers)):
            moved = _expanded(slopes[z - 1], 2) * found[z - 1, k]
            found[z, k] = product(Rounded.exact(layered.layers[z].weight), moved)
    return found


def _expanded(tensor: Rounded, dim: int) -> Rounded:
    return Rounded(tensor.value.unsqueeze(dim), tensor.error.unsqueeze(dim))


def _padded(tensor: Rounded) -> Rounded:
    """A row of zeros for the bias, which multiplies nothing that moves."""
    wide = tensor.expand(tensor.value.shape)
    return Rounded(*(torch.cat([part, torch.zeros_like(part[:, :1])], 1) for part in (wide.value, wide.error)))


def features_of(layered: Layered, k: int) -> Rounded:
    """What the parameters of a layer are multiplied by: its input, and one for the bias."""
    state, layer = layered.states[k][0], layered.layers[k]
    wide = state.expand(state.value.shape)
    parts = [(wide.value, wide.error)] if layer.trains_weight else []
    if layer.trains_bias:
        one = torch.ones(layered.count, 1, dtype=torch.float64)
        parts.append((one, torch.zeros_like(one)))
    return Rounded(*(torch.cat(list(tensors), 1) for tensors in zip(*parts, strict=True)))

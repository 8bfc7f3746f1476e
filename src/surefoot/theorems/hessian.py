r"""The dense Hessian of an objective of a layered network at its weights, every entry with a proved error.

With :math:`g = \nabla h`, :math:`\Lambda_n = \nabla^2h` of one sample, :math:`\lambda^\omega_t = B_t^\top g`,
:math:`\lambda^x_z = Q_z^\top g` and the notation of :mod:`surefoot.theorems.bending`,

.. math:: D^2F[v, v] = \sum_n\sum_{jk} e_j^\top\Big(B_j^\top\Lambda_nB_k + \sum_{z\ge j,k}
    P_{zj}^\top\mathrm{diag}(\lambda^x_z\circ a_z'')P_{zk}\Big)e_k
    + 2\sum_n\sum_{t>k}(\lambda^\omega_t)^\top\dot W_t\,\mathrm{diag}(a_{t-1}')P_{t-1,k}e_k .
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.norms.hermitian import gamma
from surefoot.objectives import CrossEntropy, Objective, Square
from surefoot.operations.losses.cross_entropy import masses
from surefoot.scalar import Rounded, rounded_derivatives
from surefoot.theorems.layered import Layered
from surefoot.theorems.verified import product


@dataclass(frozen=True)
class LossDerivatives:
    """First and second derivative of a loss in the outputs.

    Attributes:
        gradient: samples × outputs.
        hessian: samples × outputs × outputs; samples do not interact.
    """

    gradient: Rounded
    hessian: Rounded


def square_weight(objective: Square, outputs: Tensor) -> float:
    """The number c with h = c/2 ‖ŷ - y‖², up to one rounding of it."""
    probe = objective.hessian_vector_product(outputs.detach().double(), torch.ones_like(outputs).double())
    weight = float(probe.reshape(-1)[0])
    if not bool((probe - weight).abs().max() <= 1e-12 * weight):
        raise NotImplementedError(f"the Hessian of {objective} is not a multiple of the identity")
    return weight


def loss_derivatives(objective: Objective, outputs: Rounded) -> LossDerivatives | None:
    """Of the square loss and the cross-entropy; ``None`` for others."""
    value, error = outputs.value, outputs.error.expand(outputs.value.shape)
    if isinstance(objective, Square):
        weight = square_weight(objective, value)
        slopes = (outputs - objective.chosen().double().reshape(value.shape)).scaled(weight)
        unit = torch.eye(value.shape[1], dtype=torch.float64).expand(len(value), -1, -1)
        return LossDerivatives(slopes, Rounded(weight * unit, weight * unit * 2.0**-51))
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
    return LossDerivatives(slopes, (column * unit - column * row) * factor)


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


def hessian(layered: Layered, objective: Objective) -> tuple[Rounded, list[tuple[int, bool, bool]]] | None:
    """The Hessian, with parameters ordered by layer, unit and input, the bias last; ``None`` if the loss has none.

    Returns:
        the matrix, and for each part of the order the layer, and whether its weight and its bias are in it.
    """
    outer = loss_derivatives(objective, layered.outputs)
    if outer is None:
        return None
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
    whole = Rounded(torch.cat([r.value for r in rows]), torch.cat([r.error for r in rows]))
    return whole, [(k, layers[k].trains_weight, layers[k].trains_bias) for k in parts]


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

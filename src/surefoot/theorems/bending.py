r"""K: how fast the Jacobian of a network's outputs changes on a ball around the weights.

.. math:: K \ge \sup_{u\in B(u_0,\rho)}\ \sup_{\|v\|=1}\|D^2\psi(u)[v, v]\| ,

with the outputs of all samples stacked. *Layered networks* (:mod:`surefoot.theorems.layered`). For a costate c of
norm one over all samples and outputs, with :math:`e_{k,n} = \dot W_kx_{k-1,n} + \dot b_k` what a change of layer
k adds to sample n, and :math:`P_{zk} = \partial\omega_z/\partial\omega_k`,

.. math:: \langle c, D^2\psi[v, v]\rangle = \sum_n\Big(\sum_z\sum_i (Q_z^\top c)_i\,a_z''(\omega_{z,i})
    \big(\textstyle\sum_{k\le z}P_{zk}e_k\big)_i^2 + 2\sum_{t>k} c^\top B_t\dot
    W_t\,\mathrm{diag}(a_{t-1}')P_{t-1,k}e_k\Big)

(differentiate the forward recursion twice). Let :math:`\delta_{z,n,i} \ge \|Q_ze_i\||a_z''|`, :math:`p_{zk,n} \ge
\|P_{zk}\|` and :math:`\tilde X_k` the matrix with the rows :math:`(x_{k-1,n}, 1)`. As
:math:`\sum_n\|c_n\|\mu_n\|\dot V_k\tilde x_{k,n}\| \le \|\mathrm{diag}(\mu)\tilde X_k\dot V_k^\top\|_F \le
\|\mathrm{diag}(\mu)\tilde X_k\|_2\|\dot V_k\|_F`, the terms are at most :math:`\sum_{jk}H_{jk}\|v_j\|\|v_k\|`
with, for :math:`j, k \le z` and for :math:`k < t`,

.. math:: \|\mathrm{diag}(\max_i\delta_{z,n,i}\;p_{zj,n}p_{zk,n}\|\tilde x_{j,n}\|)\tilde X_k\|_2, \qquad
    \|\mathrm{diag}(\|B_{t,n}\|\max|a_{t-1}'|p_{t-1,k,n})\tilde X_k\|_2 .

Where a unit meets only its own row of weights (j = k = z, and k = t - 1) the sum over units is outside: the
square of a row of :math:`\dot V_z` is multiplied by :math:`\sum_nc_n\delta_{z,n,i}\tilde x_n\tilde x_n^\top`, so
the maximum over the units of :math:`(\sum_n\delta_{z,n,i}^2\|\tilde x_n\|^4)^{1/2}` does as well, and likewise
for the others. Then :math:`K \le \|H\|_2`.

*Over the ball* :math:`\omega_k` of a sample moves by at most

.. math:: s_k = \rho\Big(\sum_{j\le k}p_{kj}^2\|\tilde x_j\|^2\Big)^{1/2}, \qquad p_{kk} = 1,\quad
    p_{k+1,j} = (\|W_{k+1}\| + \rho)\sup|a_k'|\,p_{kj},

because along a segment its derivative is :math:`\sum_jP_{kj}\dot V_j\tilde x_j` with :math:`\sum_j\|\dot
V_j\|^2 \le \rho^2`; what it reads moves by :math:`\sup|a_{k-1}'|s_{k-1}`. The suprema are over the interval of
this radius around the value at the weights. With V the variation over the ball and :math:`\mathrm V(a_k') \le
\min(s_k\sup|a_k''|, 2\sup|a_k'|)`,

.. math:: \mathrm V(Q_k) \le \mathrm V(B_{k+1})(\|W_{k+1}\| + \rho) + \|B_{k+1}\|\rho, \qquad
    \mathrm V(B_k) \le \mathrm V(Q_k)\sup|a_k'| + \|Q_k\|\mathrm V(a_k').

*Round-off.* Every bound is a sum of products and roots of non-negative doubles, with fewer than a million
roundings in a row, so a relative 1e-9 covers them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.magnitude import Magnitude
from surefoot.norms import batched_spectral_norm, nonnegative_norm, spectral_norm
from surefoot.scalar import Rounded, sups_on
from surefoot.theorems.layered import Layer, Layered

UP = 1 + 1e-9
_NAMED = 3  # kinks that are named


@dataclass(frozen=True)
class Bending:
    """K on a ball, or why it is infinite."""

    constant: float  # K
    obstacles: tuple[str, ...] = ()  # what makes K infinite, in words


@dataclass(frozen=True)
class _Reach:
    """Suprema over the ball of what belongs to one layer: one row per sample, one column per unit."""

    layer: Layer
    norm: float  # of the weight
    rho: float  # how far the weight may move
    features: Tensor  # the rows x̃ at the weights, as computed
    moved: Tensor  # how far these rows may move, with their errors
    lengths: Tensor  # their norms
    slopes: Tensor  # |a'|
    bends: Tensor  # |a″|
    turn: Tensor  # how far the largest slope of each sample may move


def _derivative(layer: Layer, before: Rounded, order: int, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The supremum of a derivative of the function over the ball, and that of the next one."""
    value = before.value
    if layer.function is None:
        return torch.full_like(value, 2.0 - order), torch.zeros_like(value)
    wrong = before.error.expand(value.shape) * UP + value.abs() * 2.0**-51
    low, high = value - wrong - spread[:, None] * UP, value + wrong + spread[:, None] * UP
    first, second = sups_on(layer.function, (order, order + 1), low, high)
    return first, second


def _reaches(layered: Layered, radius: float) -> Iterator[tuple[_Reach, Tensor]]:
    """The layers over the ball, and how far the outputs of their linear maps may move."""
    steps = torch.zeros(layered.count, dtype=torch.float64)  # how far the input of the layer moves
    paths: list[Tensor] = []  # how fast the output of the present linear map moves with each layer before
    steepest = torch.ones(layered.count, dtype=torch.float64)
    for layer, (reads, _, _), before in zip(layered.layers, layered.states, layered.sums, strict=True):
        rho = radius if layer.trains_weight else 0.0
        norm = (spectral_norm(layer.weight) + rho) * UP
        wrong = torch.linalg.vector_norm(reads.error.expand(reads.value.shape), dim=1)
        features = layer.features(reads.value)
        moved = (steps + wrong) * UP if layer.trains_weight else torch.zeros_like(steps)
        lengths = (torch.linalg.vector_norm(features, dim=1) + moved) * UP
        paths = [*(path * steepest * norm * UP for path in paths), lengths]
        spread = torch.linalg.vector_norm(torch.stack(paths), dim=0) * (radius * UP)
        slopes, bends = _derivative(layer, before, 1, spread)
        if layer.function is not None:
            bends = _derivative(layer, before, 2, spread)[0]
        steepest = slopes.amax(1)
        turn = torch.minimum(bends * spread[:, None] * UP, 2 * slopes).amax(1)
        steps = steepest * spread * UP
        yield _Reach(layer, norm, rho, features, moved, lengths, slopes, bends, turn), spread


def bending(layered: Layered, radius: float) -> Bending:
    """K of a layered network on the ball of this radius around its weights."""
    reaches: list[_Reach] = []
    for k, (reach, spread) in enumerate(_reaches(layered, radius)):
        if not bool(torch.isfinite(spread).all()):
            return Bending(math.inf, ("values over the ball are beyond double precision",))
        if not bool(torch.isfinite(reach.bends).all()):
            return Bending(math.inf, tuple(_kinks(reach, layered.sums[k].value, spread)))
        reaches.append(reach)
    size = len(reaches)
    matrix = torch.zeros(size, size, dtype=torch.float64)  # H

    def add(j: int, k: int, weights: Tensor, units: Tensor | None = None) -> None:
        """A term with a weight for each sample, or, where a unit meets its own row alone, for each unit of it."""
        m = reaches[k]
        amount = spectral_norm(weights[:, None] * m.features) + float((weights * m.moved).norm())
        if units is not None:
            sums = torch.linalg.vector_norm(m.lengths[:, None] * units, dim=0)
            whole = spectral_norm(m.features) + float(m.moved.norm())
            amount = min(amount, float(torch.minimum(sums, units.amax(0) * whole).amax()))
        for row, column in {(j, k), (k, j)}:
            matrix[row, column] += amount * UP

    steep, columns = _outputs(layered, reaches)
    for z, m in enumerate(reaches):
        bent, through = columns[z] * m.bends * UP, _flows(reaches, z)
        for j, k in itertools.combinations_with_replacement(range(z, -1, -1), 2):
            if reaches[j].layer.trains and reaches[k].layer.trains and bool(bent.any()):
                weights = bent.amax(1) * through[j] * through[k] * reaches[j].lengths * UP
                add(j, k, weights, bent * m.lengths[:, None] if j == k == z else None)
        if z and m.layer.trains_weight:
            slopes, through = reaches[z - 1].slopes, _flows(reaches, z - 1)
            for k in (k for k in range(z) if reaches[k].layer.trains):
                weights = steep[z] * slopes.amax(1) * through[k] * UP
                add(z, k, weights, steep[z][:, None] * slopes if k == z - 1 else None)
    constant = float(nonnegative_norm(Magnitude.of(matrix.numpy()))) * UP + 1e-290
    return Bending(constant, () if math.isfinite(constant) else ("K is beyond doubles",))


def _flows(reaches: list[_Reach], last: int) -> list[Tensor]:
    """Bounds on the derivatives of the output of linear map ``last`` in those of earlier ones, by sample."""
    flows = [torch.ones_like(reaches[0].moved)]
    for k in range(last - 1, -1, -1):
        flows.insert(0, flows[0] * reaches[k + 1].norm * reaches[k].slopes.amax(1) * UP)
    return flows


def _outputs(layered: Layered, reaches: list[_Reach]) -> tuple[list[Tensor], list[Tensor]]:
    """For each layer the norm of B, by sample, and the norms of the columns of Q, by sample and unit."""
    steep: list[Tensor] = []
    columns: list[Tensor] = []
    varied = size = torch.zeros(layered.count, dtype=torch.float64)  # of B of the layer after
    for k in range(len(reaches) - 1, -1, -1):
        m, (through, slopes) = reaches[k], layered.sensitivities[k]
        if through is None:
            columns, varied = [torch.ones_like(m.slopes)], m.turn
        else:
            after = reaches[k + 1]
            lengths = torch.linalg.vector_norm(after.layer.weight, dim=0) + after.rho
            at_weights = torch.linalg.vector_norm(through.bound, dim=1)
            columns.insert(0, (at_weights + varied[:, None] * lengths + size[:, None] * after.rho) * UP)
            varied = varied * after.norm + size * after.rho
            varied = (varied * m.slopes.amax(1) + _sample_norms(through) * m.turn) * UP
        size = _sample_norms(slopes)
        steep.insert(0, (size + varied) * UP)
    return steep, columns


def _sample_norms(matrices: Rounded) -> Tensor:
    """Bounds on the norms of the exact matrices, one per sample."""
    error = torch.linalg.vector_norm(matrices.error.expand(matrices.value.shape), dim=(1, 2))
    return (batched_spectral_norm(matrices.value) + error) * UP


def _kinks(m: _Reach, before: Tensor, spread: Tensor) -> Iterator[str]:
    """Sentences about the nearest kinks that units may meet."""
    room = torch.where(torch.isfinite(m.bends), math.inf, before.abs() - spread[:, None])
    for place in room.flatten().argsort()[:_NAMED].tolist():
        n, i = divmod(place, room.shape[1])
        if not math.isfinite(float(m.bends[n, i])):
            moves = f"it reads {float(before[n, i]):.3g} and moves by up to {float(spread[n]):.3g}"
            yield f"unit {i} of '{m.layer.after}' may meet a kink in sample {n}: {moves}"

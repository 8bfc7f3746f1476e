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

*Over the ball* values come from the forward pass of the calculus; with V the variation over the ball, :math:`s_k`
how far :math:`\omega_k` moves and :math:`\mathrm V(a_k') \le \min(s_k\sup|a_k''|, 2\sup|a_k'|)`,

.. math:: \mathrm V(Q_k) \le \mathrm V(B_{k+1})(\|W_{k+1}\| + \rho) + \|B_{k+1}\|\rho, \qquad
    \mathrm V(B_k) \le \mathrm V(Q_k)\sup|a_k'| + \|Q_k\|\mathrm V(a_k').

*How far it moves.* :func:`bending` also bounds :math:`\sup\|D^2\psi(u) - D^2\psi(u_0)\|`. Each term above is a
product; if its factors have norms :math:`f_i` at the weights and move by :math:`d_i`, it moves by at most
:math:`\prod(f_i + d_i) - \prod f_i`, sample by sample, and the sums over samples and units are bounded as before.

*Round-off.* Every bound is a sum of products and roots of non-negative doubles, fewer than a million roundings in
a row, so a relative 1e-9 is more than they lose.

*Other networks*: the smoothness of the outputs by the calculus (:mod:`surefoot.calculus.assemble`), of the batch
or, as :math:`\|D^2\psi[v, v]\|^2 = \sum_n\|D^2\psi_n[v, v]\|^2`, the root of the sum of squares over single
samples. Between two parameters s and t of one sample, :math:`\|\sum_oc_oD^2_{st}\psi_{n,o}\| \le
(\sum_o\|D^2_{st}\psi_{n,o}\|^2)^{1/2}` as well, with the adjoint pass of each output, which knows the costates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.adjoint.bounds import scalar_bounds
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.breakdown import reasons
from surefoot.domains import Ball
from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.norms import batched_spectral_norm, nonnegative_norm, spectral_norm
from surefoot.norms.hermitian import up
from surefoot.scalar import Rounded, sups_on
from surefoot.theorems.layered import Layer, Layered
from surefoot.theorems.samples import Single

_UP = 1 + 1e-9
_FEW = 3  # kinks that are named


@dataclass(frozen=True)
class Bending:
    """K on a ball, or why there is none.

    Attributes:
        radius: of the ball.
        constant: K.
        variation: how far the second derivative may be from that at the weights.
        obstacles: what makes it infinite, in words.
    """

    radius: float
    constant: float
    variation: float = math.inf
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Moving:
    """Numbers by what they are at most: at the weights, by how much they move on the ball, and on the ball."""

    here: Tensor
    move: Tensor
    bound: Tensor

    @staticmethod
    def of(here: Tensor, move: Tensor) -> _Moving:
        """Where nothing better is known about the ball."""
        return _Moving(here, move, (here + move) * _UP)

    def __mul__(self, other: _Moving) -> _Moving:
        here, bound = self.here * other.here * _UP, self.bound * other.bound * _UP
        move = (self.here * other.move + self.move * other.bound) * _UP
        return _Moving(here, torch.minimum(move, here + bound), bound)

    def most(self) -> _Moving:
        """The largest in each sample."""
        return _Moving(self.here.amax(1), self.move.amax(1), self.bound.amax(1))

    def rows(self) -> _Moving:
        """One number per sample as a column."""
        return _Moving(self.here[:, None], self.move[:, None], self.bound[:, None])


def bending(
    analysis: Analysis,
    layered: Layered | None,
    radius: float,
    samples: Sequence[Single] = (),
    weights: Mapping[str, float] | None = None,
) -> Bending:
    """K on the ball of this radius around the weights; of other networks than layered ones by samples, if
    given.

    With weights :math:`L_b \\ge 1` of parameters by path norms are :math:`\\sum_bL_b\\|v_b\\|^2`. The ball is then
    inside of the ordinary one, block b moves by :math:`\\rho/\\sqrt{L_b}` at most, and :math:`H_{jk}` is divided
    by :math:`\\sqrt{L_jL_k}`.
    """
    if layered is not None:
        return _by_layers(layered, radius, None if weights is None else layered.weights(weights))
    whole = _by_calculus(analysis, radius, weights)
    if not samples or not math.isfinite(whole.constant):
        return whole
    each = (_by_calculus(one.network, radius, weights, one.outputs).constant for one in samples)
    parts = up(math.hypot(*each), len(samples))
    return replace(whole, constant=min(whole.constant, parts))


def _by_calculus(
    analysis: Analysis, radius: float, weights: Mapping[str, float] | None, outputs: Sequence[Analysis] = ()
) -> Bending:
    result = analysis.over(Ball(radius))
    summands = terms(result, weighted_curvature(result))
    matrix = assemble(summands, len(result.region.variables))
    if outputs and _paths(outputs[0]) == _paths(analysis):
        each = [scalar_bounds(output.over(Ball(radius))) for output in outputs]
        found = [bounds.matrix for bounds in each if bounds is not None]
        if len(found) == len(each):
            matrix = minimum(matrix, stack(found).norm(axis=0))
    if weights is not None:
        paths = {leaf.name: leaf.path for leaf in analysis.reading.graph.parameters}
        roots = np.array([weights[paths[name]] ** -0.5 for name in result.region.variables])
        matrix = matrix * Magnitude.of(roots[:, None] * roots[None, :])
    constant = float(smoothness(matrix))
    return Bending(radius, constant, obstacles=() if math.isfinite(constant) else tuple(reasons(summands)))


def _paths(analysis: Analysis) -> list[str]:
    return [leaf.path for leaf in analysis.reading.graph.parameters]


@dataclass(frozen=True, eq=False)
class _Reach:
    """A layer over the ball.

    Attributes:
        layer: the layer.
        reads: an enclosure of what it reads.
        before: of what its linear map gives.
        rho: how far its weight may move.
        count: the number of samples.
    """

    layer: Layer
    reads: Enclosure
    before: Enclosure
    rho: float
    count: int

    @cached_property
    def slopes(self) -> _Moving:
        """The slopes, samples × width."""
        return self._moving(1)

    @cached_property
    def bends(self) -> _Moving:
        """The second derivatives."""
        return self._moving(2)

    def _moving(self, order: int) -> _Moving:
        """A derivative moves by at most the next one times the distance, and by at most twice its supremum."""
        value = self.before.value
        if self.layer.function is None:
            return _Moving.of(torch.full_like(value, 2.0 - order), torch.zeros_like(value))
        low, high = self.before.interval()
        distance = _numbers(self.before.row_spread(self.count)) + float(self.before.error)
        largest, next_one = sups_on(self.layer.function, (order, order + 1), low, high)
        error = _numbers(self.before.row_spread(self.count)).clamp(max=float(self.before.error))[:, None]
        here = sups_on(self.layer.function, (order,), value - error, value + error)[0]
        moved = torch.minimum(next_one * distance[:, None] * _UP, 2 * largest)
        return _Moving(torch.minimum(here, largest), moved, largest)

    @cached_property
    def features(self) -> tuple[Tensor, Tensor]:
        """What the parameters are multiplied by at the weights, and by how much each row moves."""
        value = self.reads.value if self.layer.trains_weight else self.reads.value[:, :0]
        moved = (
            _numbers(self.reads.row_spread(self.count)) if self.layer.trains_weight else torch.zeros(self.count)
        )
        ones = [torch.ones(len(value), 1, dtype=torch.float64)] if self.layer.trains_bias else []
        return torch.cat([value, *ones], 1), moved.double()

    @cached_property
    def sizes(self) -> _Moving:
        """The norms of the rows."""
        value, moved = self.features
        return _Moving.of(torch.linalg.vector_norm(value, dim=1) * _UP, moved)

    def weighted(self, weights: _Moving) -> tuple[float, float]:
        """Bounds on the norm of the rows times these weights over the ball, and on how far they move."""
        value, moved = self.features
        rest = float((weights.bound * moved).norm())
        amount, change = (spectral_norm(part[:, None] * value) + rest for part in (weights.bound, weights.move))
        return amount * _UP, change * _UP

    def unitwise(self, weights: _Moving) -> tuple[float, float]:
        """The same, the largest over the units, each with its weights."""
        sizes = self.sizes.rows() * weights
        whole = torch.linalg.vector_norm(sizes.bound, dim=0)
        most = torch.minimum(whole, weights.bound.amax(0) * self.whole).amax()
        return float(most) * _UP, float(torch.linalg.vector_norm(sizes.move, dim=0).amax()) * _UP

    @cached_property
    def whole(self) -> float:
        """A bound on the norm of the rows."""
        one = torch.ones(self.count, dtype=torch.float64)
        return self.weighted(_Moving.of(one, torch.zeros_like(one)))[0]

    @cached_property
    def norm(self) -> float:
        """The norm of the weight over the ball."""
        return (spectral_norm(self.layer.weight) + self.rho) * _UP


def _by_layers(layered: Layered, radius: float, weights: Sequence[float] | None) -> Bending:
    roots = (
        torch.ones(len(layered.layers), dtype=torch.float64)
        if weights is None
        else torch.tensor(weights, dtype=torch.float64).sqrt()
    )
    result = layered.over(radius)
    count = layered.count
    met = [
        _Reach(
            layer,
            result.enclosures[layer.reads],
            result.enclosures[layer.result],
            radius * root if layer.trains_weight else 0.0,
            count,
        )
        for layer, root in zip(layered.layers, roots.tolist(), strict=True)
    ]
    if not all(torch.isfinite(_numbers(m.before.row_spread(count))).all() for m in met):
        return Bending(radius, math.inf, obstacles=("values over the ball are beyond double precision",))
    obstacles = [text for m in met for text in _kinks(m)]
    if obstacles:
        return Bending(radius, math.inf, obstacles=tuple(obstacles[:_FEW]))
    outputs = _outputs(layered, met)
    matrix = torch.zeros(2, len(met), len(met), dtype=torch.float64)  # of bounds, and of how far terms move

    def add(j: int, k: int, weights: _Moving, units: _Moving | None) -> None:
        """A term with weights per sample, and if it is local per sample and unit."""
        found = torch.tensor(met[k].weighted(weights), dtype=torch.float64)
        if units is not None:
            found = torch.minimum(found, torch.tensor(met[k].unitwise(units), dtype=torch.float64))
        for row, column in {(j, k), (k, j)}:
            matrix[:, row, column] += found

    for z, m in enumerate(met):
        through = _through(met, z)
        bent = outputs[z].columns * m.bends
        for j, k in itertools.combinations_with_replacement(range(z, -1, -1), 2):
            if met[j].layer.trains and met[k].layer.trains and bool(bent.bound.any()):
                local = bent * m.sizes.rows() if j == k == z else None
                add(j, k, bent.most() * through[j] * through[k] * met[j].sizes, local)
        if z and m.layer.trains_weight:
            before, through = met[z - 1], _through(met, z - 1)
            for k in range(z):
                if met[k].layer.trains:
                    local = outputs[z].norms.rows() * before.slopes if k == z - 1 else None
                    add(z, k, outputs[z].norms * before.slopes.most() * through[k], local)
    matrix = matrix * roots[:, None] * roots
    constant, variation = (float(nonnegative_norm(Magnitude.of(part.numpy()))) * _UP + 1e-290 for part in matrix)
    return Bending(radius, constant, variation, () if math.isfinite(constant) else ("K is beyond doubles",))


def _through(met: list[_Reach], last: int) -> list[_Moving]:
    """Bounds on the derivatives of what one linear layer gives in what earlier ones give, sample by sample."""
    one = torch.ones(met[0].count, dtype=torch.float64)
    found = [_Moving.of(one, torch.zeros_like(one))]
    for k in range(last - 1, -1, -1):
        weight = _Moving.of(one * (met[k + 1].norm - met[k + 1].rho) * _UP, one * met[k + 1].rho)
        found.insert(0, found[0] * weight * met[k].slopes.most())
    return found


@dataclass(frozen=True)
class _Outputs:
    """How the outputs depend on a layer over the ball: bounds on the norms of B for each sample, and on those of
    the columns of Q, one per unit.
    """

    norms: _Moving
    columns: _Moving


def _outputs(layered: Layered, met: list[_Reach]) -> list[_Outputs]:
    found: list[_Outputs] = []
    varied = size = torch.zeros(layered.count, dtype=torch.float64)  # of B of the layer after
    for k in range(len(met) - 1, -1, -1):
        m, (through, slopes) = met[k], layered.sensitivities[k]
        columns: _Moving
        if through is None:
            one = torch.ones_like(m.before.value)
            columns, varied = _Moving.of(one, torch.zeros_like(one)), m.slopes.most().move
        else:
            after = met[k + 1]
            lengths = torch.linalg.vector_norm(after.layer.weight, dim=0) + after.rho
            here = torch.linalg.vector_norm(through.bound, dim=1) * _UP
            columns = _Moving.of(here, (varied[:, None] * lengths + size[:, None] * after.rho) * _UP)
            varied = varied * after.norm + size * after.rho
            slope = m.slopes.most()
            varied = (varied * slope.bound + _sample_norms(through) * slope.move) * _UP
        size = _sample_norms(slopes)
        found.insert(0, _Outputs(_Moving.of(size, varied), columns))
    return found


def _sample_norms(matrices: Rounded) -> Tensor:
    """Bounds on the norms of the exact matrices, one per sample."""
    error = torch.linalg.vector_norm(matrices.error.expand(matrices.value.shape), dim=(1, 2))
    return (batched_spectral_norm(matrices.value) + error) * _UP


def _kinks(m: _Reach) -> list[str]:
    """The units that may meet a kink, nearest first."""
    bends = m.bends.bound
    if bool(torch.isfinite(bends).all()):
        return []
    spread = _numbers(m.before.row_spread(m.count))[:, None].expand(bends.shape)
    room = torch.where(torch.isfinite(bends), math.inf, m.before.value.abs() - spread)
    texts = []
    for place in room.flatten().argsort()[:_FEW].tolist():
        n, i = divmod(place, bends.shape[1])
        if not math.isfinite(float(bends[n, i])):
            texts.append(
                f"unit {i} of '{m.layer.after}' may meet a kink in sample {n}: it reads "
                f"{float(m.before.value[n, i]):.3g} and moves by up to {float(spread[n, i]):.3g}"
            )
    return texts


def _numbers(magnitude: Magnitude) -> Tensor:
    return torch.as_tensor(magnitude.tensor(torch.zeros((), dtype=torch.float64)), dtype=torch.float64)

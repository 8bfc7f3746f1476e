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

*In several batches.* Everything above is about one sample at a time, except for the norms over samples. A sum of
squares over samples is added up over batches, a maximum is taken over them, and :math:`\|\mathrm{diag}(\mu)\tilde
X_k\|_2` comes from the sum of the Gram matrices of their rows (:func:`~surefoot.norms.norm_of_gram`), which has as
many entries as the square of the width. A batch is read again for each ball, and for each layer whose rows are
needed (:class:`Here`).

*How far it moves.* :func:`bending` also bounds :math:`\sup\|D^2\psi(u) - D^2\psi(u_0)\|`. Each term above is a
product; if its factors have norms :math:`f_i` at the weights and move by :math:`d_i`, it moves by at most
:math:`\prod(f_i + d_i) - \prod f_i`, sample by sample, and the sums over samples and units are bounded as before.

*Round-off.* Every bound is a sum of products and roots of non-negative doubles, with fewer than a million
roundings in a row, so a relative 1e-9 covers them.

*Other networks*: the smoothness of the outputs by the calculus (:mod:`surefoot.calculus.assemble`), either of the
whole batch or, as :math:`\|D^2\psi[v, v]\|^2 = \sum_n\|D^2\psi_n[v, v]\|^2`, as the root of the sum of squares
over single samples; over several batches it is the root of the sum of their squares (:func:`stacked`). Between two
parameters s and t of one sample, :math:`\|\sum_oc_oD^2_{st}\psi_{n,o}\| \le
(\sum_o\|D^2_{st}\psi_{n,o}\|^2)^{1/2}` is a bound as well, with the adjoint pass of each output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.adjoint.bounds import scalar_bounds
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.breakdown import reasons
from surefoot.domains import Ball
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.norms import LARGEST_EXACT, frobenius_norm, nonnegative_norm, norm_of_gram, spectral_norm
from surefoot.norms.hermitian import up
from surefoot.processes import Processes
from surefoot.theorems.layered import Layer, Layered, layer_factors
from surefoot.theorems.reach import FEW, UP, Moving, kinks_near, outputs_of, reaches_of, through_layers
from surefoot.theorems.samples import Single

AT_ONCE = 4  # Gram matrices that are held together


@dataclass(frozen=True)
class Bending:
    """K on a ball, or why it is infinite."""

    radius: float  # the radius of the ball
    constant: float  # K
    variation: float = math.inf  # how far the second derivative may be from that at the weights
    obstacles: tuple[str, ...] = ()  # what makes K infinite, in words


def bending(
    analysis: Analysis, radius: float, samples: Sequence[Single] = (), weights: Mapping[str, float] | None = None
) -> Bending:
    """K of any network on the ball of this radius around the weights, from the batch and from single samples.

    With ``weights`` :math:`L_b \\ge 1` of parameters by path, norms are :math:`\\sum_bL_b\\|v_b\\|^2`. The ball is
    then inside the ordinary one, block b moves by at most :math:`\\rho/\\sqrt{L_b}`, and :math:`H_{jk}` is divided
    by :math:`\\sqrt{L_jL_k}`.
    """
    whole = _by_calculus(analysis, radius, weights)
    if not samples or not math.isfinite(whole.constant):
        return whole
    each = (_by_calculus(one.network, radius, weights, one.outputs).constant for one in samples)
    parts = up(math.hypot(*each), len(samples))
    return replace(whole, constant=min(whole.constant, parts))


def stacked(pieces: Sequence[Bending]) -> Bending:
    """K of the outputs of all batches, stacked, from K of each batch on the same ball."""
    if len(pieces) == 1:
        return pieces[0]
    constant = up(math.hypot(*(piece.constant for piece in pieces)), len(pieces))
    obstacles = dict.fromkeys(what for piece in pieces for what in piece.obstacles)
    return Bending(pieces[0].radius, constant, obstacles=tuple(obstacles))


def _by_calculus(
    analysis: Analysis, radius: float, weights: Mapping[str, float] | None, outputs: Sequence[Analysis] = ()
) -> Bending:
    result = analysis.over(Ball(radius))
    summands = terms(result, weighted_curvature(result))
    matrix = assemble(summands, len(result.region.variables))
    if outputs and _paths(outputs[0]) == _paths(analysis):
        each = [scalar_bounds(output.over(Ball(radius))) for output in outputs]
        matrices = [bounds.matrix for bounds in each if bounds is not None]
        if len(matrices) == len(each):
            matrix = minimum(matrix, stack(matrices).norm(axis=0))
    if weights is not None:
        paths = {leaf.name: leaf.path for leaf in analysis.reading.graph.parameters}
        roots = np.array([weights[paths[name]] ** -0.5 for name in result.region.variables])
        matrix = matrix * Magnitude.of(roots[:, None] * roots[None, :])
    constant = float(smoothness(matrix))
    return Bending(radius, constant, obstacles=() if math.isfinite(constant) else tuple(reasons(summands)))


def _paths(analysis: Analysis) -> list[str]:
    return [leaf.path for leaf in analysis.reading.graph.parameters]


Key = tuple[str, int, int, int]  # a term of H: its kind, the layer that bends, j and k


@dataclass(frozen=True)
class _Units:
    """The rows that a layer reads, times weights for each sample and unit; one number per unit."""

    sizes: Tensor  # roots of the sums of their squares on the ball
    moved: Tensor  # the same for how far they move
    most: Tensor  # the largest weight

    @staticmethod
    def of(weights: Moving, lengths: Moving) -> _Units:
        """The numbers of one batch."""
        rows = lengths.rows() * weights
        sizes, moved = (torch.linalg.vector_norm(part, dim=0) * UP for part in (rows.bound, rows.move))
        return _Units(sizes, moved, weights.bound.amax(0))

    def __add__(self, other: _Units) -> _Units:
        sizes, moved = (torch.hypot(getattr(self, n), getattr(other, n)) for n in ("sizes", "moved"))
        return _Units(sizes, moved, torch.maximum(self.most, other.most))


@dataclass(frozen=True)
class Bent:
    """The numbers of one batch on a ball."""

    count: int  # the number of samples
    is_finite: bool = True  # whether values over the ball are finite
    # kinks that units may meet: the layer, how near it is, the sample and two parts of the sentence about it
    kinks: tuple[tuple[int, float, int, str, str], ...] = ()
    # for each term, the norm of its weights times how far the rows move
    rests: Mapping[Key, float] = field(default_factory=dict)
    units: Mapping[Key, _Units] = field(default_factory=dict)  # terms in which a unit meets its own weights only
    still: tuple[float, ...] = ()  # how far the rows of each layer move, in norm


class Source(Protocol):
    """The batches of a layered network, in this process or in several."""

    def shape(self) -> tuple[Layer, ...]:
        """The layers."""

    def bent(self, radius: float, roots: tuple[float, ...]) -> list[Bent]:
        """The numbers of each batch on a ball in which layer k moves by at most ``roots[k]`` times the radius."""

    def norms(self, k: int, asked: Sequence[tuple[Key | None, str]]) -> list[float]:
        """Bounds on the norms of the rows that a layer reads at the weights, times the samples' weights in a term.

        The weights are those on the last ball (``"bound"``), or how far they move there (``"move"``); without a
        key the rows count as they are.
        """


class Here:
    """The batches of this process; ``read`` gives the network on each of them."""

    def __init__(self, read: Callable[[], Iterable[Layered]]) -> None:
        self._read = read
        self._weights: list[dict[Key, Moving]] = []

    def shape(self) -> tuple[Layer, ...]:
        """The layers."""
        return next(iter(self._read())).layers

    def bent(self, radius: float, roots: tuple[float, ...]) -> list[Bent]:
        """As in :class:`Source`; the samples' weights are kept, a number for each term and sample."""
        both = [_bent(layered, radius, roots) for layered in self._read()]
        self._weights = [weights for _, weights in both]
        return [bent for bent, _ in both]

    def rows(self, k: int, asked: Sequence[tuple[Key | None, str]]) -> Iterator[list[Tensor]]:
        """For each batch the rows that a layer reads, times weights."""
        for layered, weights in zip(self._read(), self._weights, strict=True):
            value = layered.layers[k].features(layered.states[k][0].value)
            none = Moving.of(*(torch.zeros(len(value), dtype=torch.float64),) * 2)
            yield [
                value if key is None else getattr(weights.get(key, none), what)[:, None] * value
                for key, what in asked
            ]

    def norms(self, k: int, asked: Sequence[tuple[Key | None, str]]) -> list[float]:
        """As in :class:`Source`; if there are several batches, by Gram matrices, a few at a time."""
        if len(self._weights) == 1:
            return [spectral_norm(rows) for each in self.rows(k, asked) for rows in each]
        return [
            n for at in range(0, len(asked), AT_ONCE) for n in stacked_norms(self, k, asked[at : at + AT_ONCE])
        ]


def stacked_norms(
    here: Here, k: int, asked: Sequence[tuple[Key | None, str]], processes: Processes | None = None, width: int = 0
) -> list[float]:
    """Bounds on the norms of the rows of all batches; with processes and the width of rows, of all processes."""
    grams = [torch.zeros(width, width, dtype=torch.float64) for _ in asked] if processes is not None else []
    apart, count = [0.0] * len(asked), 0

    def add() -> None:
        nonlocal grams, apart, count
        for each in here.rows(k, asked):
            if each[0].shape[1] > LARGEST_EXACT:
                apart = [math.hypot(size, spectral_norm(rows)) for size, rows in zip(apart, each, strict=True)]
                continue
            apart = [math.hypot(size, frobenius_norm(rows)) for size, rows in zip(apart, each, strict=True)]
            count += len(each[0])
            grams = grams or [torch.zeros(2 * (each[0].shape[1],), dtype=torch.float64) for _ in asked]
            for gram, rows in zip(grams, each, strict=True):
                gram.addmm_(rows.mT, rows)

    if processes is None:
        add()
    else:
        processes.together(add)
        everyone = processes.gathered(lambda: (apart, count))
        apart = [math.hypot(*sizes) for sizes in zip(*(sizes for sizes, _ in everyone), strict=True)]
        count = sum(rows for _, rows in everyone)
        if width <= LARGEST_EXACT:
            processes.add(grams)
    exact = [None] * len(asked) if not count else [norm_of_gram(gram, count) for gram in grams]
    return [size * UP if n is None else min(n, size * UP) for n, size in zip(exact, apart, strict=True)]


def _bent(layered: Layered, radius: float, roots: Sequence[float]) -> tuple[Bent, dict[Key, Moving]]:
    """The numbers of one batch, and the weights of its samples in each term."""
    count = layered.count
    reaches = reaches_of(layered, radius, roots)
    kinks = tuple((k, *kink) for k, m in enumerate(reaches) for kink in kinks_near(m))
    if kinks or len(reaches) < len(layered.layers):
        return Bent(count, is_finite=bool(kinks), kinks=kinks), {}
    outputs = outputs_of(layered, reaches)
    weights: dict[Key, Moving] = {}
    units: dict[Key, _Units] = {}

    def add(kind: str, z: int, j: int, k: int, by_sample: Moving, local: Moving | None) -> None:
        """Add a term with weights per sample and, if it is local, per sample and unit."""
        weights[kind, z, j, k] = by_sample
        if local is not None:
            units[kind, z, j, k] = _Units.of(local, reaches[k].sizes)

    for z, m in enumerate(reaches):
        through = through_layers(reaches, z)
        bent = outputs[z].columns * m.bends
        for j, k in itertools.combinations_with_replacement(range(z, -1, -1), 2):
            if reaches[j].layer.trains and reaches[k].layer.trains and bool(bent.bound.any()):
                local = bent * m.sizes.rows() if j == k == z else None
                add("bend", z, j, k, bent.most() * through[j] * through[k] * reaches[j].sizes, local)
        if z and m.layer.trains_weight:
            before, through = reaches[z - 1], through_layers(reaches, z - 1)
            for k in range(z):
                if reaches[k].layer.trains:
                    local = outputs[z].norms.rows() * before.slopes if k == z - 1 else None
                    add("turn", z, z, k, outputs[z].norms * before.slopes.most() * through[k], local)
    rests = {key: float((weight.bound * reaches[key[3]].features[1]).norm()) for key, weight in weights.items()}
    still = tuple(float(m.features[1].norm()) for m in reaches)
    return Bent(count, True, (), rests, units, still), weights


def layered_bending(source: Source, radius: float, weights: Mapping[str, float] | None = None) -> Bending:
    """K of a layered network; see :func:`bending` for the weights."""
    layers = source.shape()
    factors = None if weights is None else {path: 1 / weight for path, weight in weights.items()}
    roots = tuple(part**0.5 for part in layer_factors(layers, factors))
    pieces = source.bent(radius, roots)
    if not all(piece.is_finite for piece in pieces):
        return Bending(radius, math.inf, obstacles=("values over the ball are beyond double precision",))
    before = itertools.accumulate((piece.count for piece in pieces), initial=0)
    kinks = sorted((k, room, start + n, *sentence) for start, p in zip(before, pieces, strict=False)
                   for k, room, n, *sentence in p.kinks)  # fmt: skip
    if kinks:
        obstacles = (f"{first} in sample {n}: {second}" for _, _, n, first, second in kinks[:FEW])
        return Bending(radius, math.inf, obstacles=tuple(obstacles))
    matrix = torch.zeros(2, len(layers), len(layers), dtype=torch.float64)  # H, and how far its terms move
    for k in range(len(layers)):
        keys = list(dict.fromkeys(key for piece in pieces for key in piece.rests if key[3] == k))
        local = any(key in piece.units for piece in pieces for key in keys)
        asked = [(key, what) for key in keys for what in ("bound", "move")]
        norms = source.norms(k, [*asked, (None, "")] if local else asked) if asked else []
        whole = (norms[-1] + math.hypot(*(piece.still[k] for piece in pieces))) * UP if local else math.inf
        for number, key in enumerate(keys):
            rest = math.hypot(*(piece.rests.get(key, 0.0) for piece in pieces))
            amounts = torch.tensor(norms[2 * number : 2 * number + 2], dtype=torch.float64).add(rest) * UP
            parts = [piece.units[key] for piece in pieces if key in piece.units]
            if parts:
                units = sum(parts[1:], parts[0])
                each = torch.minimum(units.sizes, units.most * whole), units.moved
                amounts = torch.minimum(amounts, torch.stack([part.amax() for part in each]) * UP)
            for row, column in {(key[2], k), (k, key[2])}:
                matrix[:, row, column] += amounts
    scale = torch.tensor(roots, dtype=torch.float64)
    matrix = matrix * scale[:, None] * scale
    constant, variation = (float(nonnegative_norm(Magnitude.of(part.numpy()))) * UP + 1e-290 for part in matrix)
    return Bending(radius, constant, variation, () if math.isfinite(constant) else ("K is beyond doubles",))

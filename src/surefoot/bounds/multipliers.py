r"""Linear maps with operations of bounded slope between them: how much larger a difference may come out.

Differences :math:`\xi` of inputs and what the operations make of them, w, are one vector :math:`v = (\xi, w)`.
Every tensor on the way is linear in it. A group g of entries of w is bounded by the rows :math:`Y_g` of what it is
made of, :math:`\|w_g\| \le \|Y_gv\|`: for a function with slopes in :math:`[c - d, c + d]` the difference of
results is :math:`cy + dw` with :math:`|w| \le |y|` for every entry alone; for an operation of which only a
Lipschitz constant is known the group is the whole result. Then for any :math:`\tau_g \ge 0`

.. math:: M(\tau) = \mathrm{diag}(I, \tau) - \sum_g\tau_gY_g^\top Y_g, \qquad
    \begin{pmatrix} M(\tau) & C^\top \\ C & G\end{pmatrix} \succeq 0 \quad\Longrightarrow\quad
    Cv \in \{G^{1/2}\eta : \|\eta\| \le \|\xi\|\} .

*Proof.* :math:`v^\top M(\tau)v = \|\xi\|^2 + \sum_g\tau_g(\|w_g\|^2 - \|Y_gv\|^2) \le \|\xi\|^2`, and by the Schur
complement :math:`(Cv)^\top G^+(Cv) \le v^\top M(\tau)v`, with Cv in the range of G. With :math:`G = L^2I` this
says :math:`\|Cv\| \le L\|\xi\|`; with :math:`G = FF^\top` what comes out is the input of the next maps, as
:math:`F\eta`.

For networks this is LipSDP-Neuron (M. Fazlyab et al., NeurIPS 2019). Multipliers start layer by layer in closed
form, as in ECLipsE-Fast (Y. Xu and S. Sivaranjani, NeurIPS 2024), and are improved by an interior-point method:
the inequality is linear in :math:`(L^2, \tau)`. None of that has to be trusted: the inequality is verified for the
multipliers that come out (:func:`~surefoot.norms.verified.smallest_eigenvalue`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.norms.hermitian import gamma, up
from surefoot.norms.verified import product, smallest_eigenvalue
from surefoot.scalar import Rounded

_STEPS = 40
_GAP = 1e-3  # of the squared constant, at which the search for multipliers ends
_SLACKS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)  # relative room for the proof


@dataclass(frozen=True)
class Linear:
    """A tensor as a linear function of the first entries of v."""

    value: Tensor  # the matrix as computed, one row per entry of the tensor
    error: Tensor  # a bound on the norm of each column of its error

    def padded(self, width: int) -> Linear:
        """The tensor as a function of more entries, on which it does not depend."""
        more = width - self.value.shape[1]
        return Linear(*(torch.nn.functional.pad(part, (0, more)) for part in (self.value, self.error)))


@dataclass(frozen=True)
class Bounded:
    """The next entries of w: as many as rows, bounded one by one, or ``count`` together by all rows."""

    rows: Linear
    count: int
    together: bool = False


class System:
    """The matrices of the inequality.

    ξ has ``inputs`` entries, the ``groups`` bound the entries of w in order, ``output`` is Cv. With ``improve``,
    the multipliers of the closed form are improved.
    """

    def __init__(self, inputs: int, groups: Sequence[Bounded], output: Linear, improve: bool = True) -> None:
        self.inputs, self.groups = inputs, groups
        self.size = inputs + sum(group.count for group in groups)
        self.output = output.padded(self.size)
        self._row_group, self._entry_group, number = [], [], 0
        device = output.value.device
        for group in groups:
            names = torch.arange(number, number + (1 if group.together else group.count), device=device)
            self._row_group.append(names.expand(len(group.rows.value)) if group.together else names)
            self._entry_group.append(names.expand(group.count) if group.together else names)
            number += len(names)
        self.multipliers = self._closed_form(number)
        if improve and number:
            self.multipliers = self._improved(self.multipliers)

    def gain(self) -> float:
        """An upper bound of ‖Cv‖/‖ξ‖; infinite if there is no proof."""
        spread = self._spread()
        largest = float(torch.linalg.eigvalsh(spread)[-1]) if len(spread) else 0.0
        unit = torch.eye(len(spread), dtype=torch.float64, device=spread.device)
        for slack in _SLACKS:
            squared = largest * (1 + slack) + 2.0**-1000
            if self.proves(Rounded.exact(unit * squared)):
                return up(math.sqrt(squared))
        return math.inf

    def shape(self) -> Tensor | None:
        """A lower triangular matrix F such that Cv is Fη with ‖η‖ ≤ ‖ξ‖; ``None`` if there is no proof."""
        spread = self._spread()
        room = spread.diagonal().sum() / max(len(spread), 1) + 2.0**-1000
        for slack in _SLACKS:
            wider = spread * (1 + slack)
            wider.diagonal().add_(slack * room)
            factor, failed = torch.linalg.cholesky_ex(wider)
            if not int(failed) and self.proves(product(Rounded.exact(factor), Rounded.exact(factor.mT))):
                return factor
        return None

    def proves(self, outer: Rounded) -> bool:
        r"""Whether the inequality holds with these multipliers and this G, round-off included.

        With r the stored roots of the multipliers and :math:`D = \mathrm{fl}(rY)`, of which column i has norm
        :math:`\delta_i` and an error of at most :math:`e_i`, the entries of the Gram matrix are off by at most
        :math:`\delta_ie_j + e_i\delta_j + e_ie_j`. A congruence by powers of two makes the diagonal about one.
        """
        if not self.groups:  # v = ξ: the Schur complement is G − CCᵀ
            side = self.output.value
            gram, move = product(Rounded.exact(side), Rounded.exact(side.mT)), float(self.output.error.norm())
            return smallest_eigenvalue(outer - gram) >= move * (2 * float(side.norm()) + move) * (1 + 1e-6)
        roots = self.multipliers.sqrt()
        inner, errors = self._weighted(roots)
        length = inner.norm(dim=0) * (1 + gamma(len(inner) + 8))
        gram = product(Rounded.exact(inner.mT), Rounded.exact(inner))
        apart = length[:, None] * errors + errors[:, None] * length + errors[:, None] * errors
        exact = Rounded.exact(torch.cat([torch.ones_like(length[: self.inputs]), *self._of_entries(roots)]))
        squares = exact * exact
        diagonal = Rounded(torch.diag(squares.value), torch.diag(squares.error.expand(squares.value.shape)))
        top = diagonal - Rounded(gram.value, (gram.error + apart) * (1 + 2.0**-48))
        side, off = self.output.value, self.output.error.expand(self.output.value.shape)
        value = torch.cat([torch.cat([top.value, side.mT], 1), torch.cat([side, outer.value], 1)])
        error = torch.cat(
            [torch.cat([top.error, off.mT], 1), torch.cat([off, outer.error.expand(outer.value.shape)], 1)]
        )
        size = value.diagonal().clamp_min(2.0**-500)
        if not bool(torch.isfinite(value).all() & torch.isfinite(error).all()):
            return False
        scale = torch.exp2(-torch.round(torch.log2(size) / 2))
        both = scale[:, None] * scale
        return smallest_eigenvalue(Rounded(value * both, error * both * (1 + 2.0**-48) + 2.0**-1000)) >= 0

    def _weighted(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """All rows times the roots of their multipliers, and the errors of the columns."""
        parts, squares = [self.output.value[:0]], torch.zeros_like(self.output.error)
        for group, names in zip(self.groups, self._row_group, strict=True):
            rows, factor = group.rows.padded(self.size), roots[names]
            parts.append(factor[:, None] * rows.value)
            squares = squares + (factor.max() * rows.error).square() if len(factor) else squares
        inner = torch.cat(parts)
        count = gamma(len(inner) + 2 * len(self.groups) + 16)
        return inner, squares.sqrt() * (1 + count) + inner.norm(dim=0) * (1 + count) * 2.0**-52

    def _of_entries(self, per_group: Tensor) -> list[Tensor]:
        return [per_group[names] for names in self._entry_group]

    def _matrix(self, multipliers: Tensor) -> Tensor:
        inner = self._weighted(multipliers.sqrt())[0]
        units = torch.ones(self.inputs, dtype=torch.float64, device=inner.device)
        return torch.diag(torch.cat([units, *self._of_entries(multipliers)])) - inner.mT @ inner

    def _spread(self) -> Tensor:
        """C M⁻¹ Cᵀ, the smallest G, without proof."""
        factor, failed = torch.linalg.cholesky_ex(self._matrix(self.multipliers))
        if int(failed):
            return torch.full((len(self.output.value),) * 2, math.inf, dtype=torch.float64)
        half = torch.linalg.solve_triangular(factor, self.output.value.mT, upper=False)
        return half.mT @ half

    def _closed_form(self, number: int) -> Tensor:
        """One multiplier per operation, in order: half of the largest that those before it allow."""
        device = self.output.value.device
        multipliers = torch.ones(number, dtype=torch.float64, device=device)
        matrix, width = torch.eye(self.inputs, dtype=torch.float64, device=device), self.inputs
        for group, names in zip(self.groups, self._entry_group, strict=True):
            rows = group.rows.padded(width).value
            half = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(matrix)[0], rows.mT, upper=False)
            largest = float(torch.linalg.matrix_norm(half, 2)) ** 2 if half.numel() else 0.0
            share = 0.5 / largest if largest > 0 else 1.0
            multipliers[names] = share
            unit = torch.full((group.count,), share, dtype=torch.float64, device=device)
            matrix, width = (
                torch.block_diag(matrix - share * rows.mT @ rows, torch.diag(unit)),
                width + group.count,
            )
        return multipliers

    def _improved(self, start: Tensor) -> Tensor:
        """Multipliers near those of the least s = L²."""
        largest = float(torch.linalg.eigvalsh(self._spread())[-1])
        if not 0 < largest < math.inf:
            return start
        rows = torch.cat([group.rows.padded(self.size).value for group in self.groups])
        gram = self.output.value.mT @ self.output.value / largest
        path = _Path(self.inputs, rows, gram, torch.cat(self._row_group), torch.cat(self._entry_group))
        return path.followed(start)


@dataclass(frozen=True)
class _Path:
    r"""The least s with :math:`S(s, \tau) = sM(\tau/s) - C^\top C \succeq 0` by an interior-point method.

    S is linear in :math:`x = (s, \tau)`, with :math:`S_0` the unit matrix on the inputs and :math:`S_g =
    \sum_{w\in g}e_we_w^\top - Y_g^\top Y_g`. With dual matrices Z and numbers :math:`\sigma` the method follows

    .. math:: ZS = \mu I, \qquad \sigma_g\tau_g = \mu, \qquad \langle S_0, Z\rangle = 1, \qquad
        \langle S_g, Z\rangle + \sigma_g = 0

    as :math:`\mu` falls (C. Helmberg, F. Rendl, R. Vanderbei and H. Wolkowicz, SIAM J. Optim. 6, 1996). Its matrix
    :math:`\mathrm{tr}(S_gZS_hS^{-1})` is made of products of the entries of Z and of :math:`S^{-1}` between
    entries and rows.
    """

    inputs: int
    rows: Tensor
    gram: Tensor
    of_rows: Tensor
    of_entries: Tensor

    def followed(self, start: Tensor) -> Tensor:
        """The multipliers at the end of the path."""
        x = torch.cat([start.new_ones(1), start]) * 1.5
        slack = self._slack(x) - self.gram
        inverse = _inverse(slack)
        if inverse is None:
            return start
        mu = 1.0 / float(inverse.diagonal()[: self.inputs].sum())
        z, sigma = mu * inverse, mu / x[1:]
        shrink = 0.3
        for _ in range(_STEPS):
            goal = shrink * mu
            system, right = self._matrix(z, inverse), goal * self._pulled(inverse)
            right[0] -= 1.0
            right[1:] += goal / x[1:]
            system[1:, 1:].diagonal().add_(sigma / x[1:])
            scaled = system * x[:, None] * x
            scaled.diagonal().mul_(1 + 1e-13)
            root, failed = torch.linalg.cholesky_ex(scaled)
            if int(failed):
                break
            step = torch.cholesky_solve((right * x)[:, None], root)[:, 0] * x
            moved = self._slack(step)
            turn = z @ moved @ inverse
            z_step = goal * inverse - z - (turn + turn.mT) / 2
            sigma_step = goal / x[1:] - sigma - sigma * step[1:] / x[1:]
            first, second = _longest(slack, moved, x, step), _longest(z, z_step, sigma, sigma_step)
            if min(first, second) < 1e-4:
                break
            x, slack = x + first * step, slack + first * moved
            z, sigma = z + second * z_step, sigma + second * sigma_step
            inverse = _inverse(slack)
            if inverse is None:
                break
            mu = float((z * slack).sum() + sigma @ x[1:]) / (len(z) + len(sigma))
            shrink = 0.1 if min(first, second) > 0.75 else 0.3 if min(first, second) > 0.4 else 0.7
            if mu * (len(z) + len(sigma)) <= _GAP * float(x[0]):
                break
        return x[1:] / x[0]

    def _slack(self, x: Tensor) -> Tensor:
        """The linear part of S."""
        matrix = -self.rows.mT @ (x[1:][self.of_rows][:, None] * self.rows)
        matrix.diagonal()[: self.inputs].add_(x[0])
        matrix.diagonal()[self.inputs :].add_(x[1:][self.of_entries])
        return matrix

    def _pulled(self, matrix: Tensor) -> Tensor:
        """The inner products of a symmetric matrix with S_0 and all S_g."""
        n, of_rows = self.inputs, ((self.rows @ matrix) * self.rows).sum(1)
        return torch.cat([matrix.diagonal()[:n].sum()[None], self._sums(matrix.diagonal()[n:], -of_rows)])

    def _matrix(self, z: Tensor, inverse: Tensor) -> Tensor:
        n = self.inputs
        images, others = self.rows @ z, self.rows @ inverse
        among = (images @ self.rows.mT) * (others @ self.rows.mT)
        both, crossed = z * inverse, images * others
        first = torch.cat([both[:n, :n].sum()[None], self._sums(both[n:, :n].sum(1), -crossed[:, :n].sum(1))])
        crossed = crossed[:, n:]
        rest = self._sums(self._sums(both[n:, n:], -crossed).mT, self._sums(-crossed.mT, among).mT)
        return torch.cat([first[None], torch.cat([first[1:, None], rest], 1)])

    def _sums(self, by_entries: Tensor, by_rows: Tensor) -> Tensor:
        """Sums over the entries and the rows of each group, along the first dimension."""
        count = int(self.of_entries[-1]) + 1
        total = by_rows.new_zeros(count, *by_rows.shape[1:]).index_add_(0, self.of_rows, by_rows)
        return total.index_add_(0, self.of_entries, by_entries)


def _inverse(matrix: Tensor) -> Tensor | None:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return None if int(failed) else torch.cholesky_inverse(factor)


def _longest(matrix: Tensor, turn: Tensor, vector: Tensor, step: Tensor) -> float:
    """A step after which the matrix is positive definite and the vector positive, at most 1."""
    length = min(1.0, 0.95 * float((-step / vector).max().clamp_min(1e-9).reciprocal()))
    while length > 1e-5 and int(torch.linalg.cholesky_ex(matrix + length / 0.95 * turn)[1]):
        length *= 0.8
    return length

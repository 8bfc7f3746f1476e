r"""Convex clustering with given fused edges: a smooth problem in the cluster centres.

Where the edges that are fused stay fused, z takes one value x_a per connected component a, of size m_a, and

.. math:: \min_x\ \tfrac12\sum_am_a\|x_a - \bar y_a\|^2 + \sum_{ab}c_{ab}\|x_a - x_b\|

with :math:`\bar y_a` the mean of the outputs of a component and :math:`c_{ab}` the sum of the weights of the edges
between two. It is smooth where no two joined centres meet, with Hessian

.. math:: \mathrm{diag}(m)
    + B^\top\mathrm{diag}\Big(\frac{c_{ab}}{\|u\|}\big(I - \tfrac{uu^\top}{\|u\|^2}\big)\Big)B,
    \qquad u = x_a - x_b .

By the implicit function theorem the derivative of z at the outputs is :math:`S(\text{Hessian})^{-1}S^\top`, S
copying centres to samples: exact where every fused edge has a dual variable strictly inside its ball.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.clustering.weights import Incidence
from surefoot.linear_solve import Columns, Conjugate, Products

_NEWTON = 30
_CONJUGATE = 2000


class Reduced:
    """The problem in the centres of given components.

    ``labels`` are the component of every sample, ``first`` and ``second`` the samples at the ends of every edge,
    and ``amounts`` its weight c.
    """

    def __init__(self, labels: Tensor, first: Tensor, second: Tensor, amounts: Tensor) -> None:
        self.labels = labels
        self.count = int(labels.max()) + 1
        self.sizes = torch.bincount(labels, minlength=self.count).to(amounts.dtype)
        low, high = torch.minimum(labels[first], labels[second]), torch.maximum(labels[first], labels[second])
        across = low != high
        pairs, place = torch.unique(low[across] * self.count + high[across], return_inverse=True)
        self.amounts = amounts.new_zeros(len(pairs)).index_add_(0, place, amounts[across])
        self.incidence = Incidence(pairs // self.count, pairs % self.count, self.count)

    def total(self, samples: Tensor) -> Tensor:
        """Sᵀ: the sum over every component."""
        return samples.new_zeros((self.count, samples.shape[1])).index_add_(0, self.labels, samples)

    def minimise(self, outputs: Tensor, start: Tensor, budget: int) -> Tensor:
        """The centres by Newton's method, from a guess for every sample.

        The method ends after ``budget`` products with the Hessian.
        """
        total = self.total(outputs)
        centres = self.total(start) / self.sizes[:, None]
        value = self._value(centres, total)
        for _ in range(_NEWTON):
            hessian, slope = self._expanded(centres, total)
            if not bool(torch.isfinite(slope).all()) or budget <= 0:
                break
            step, products = conjugate(hessian, -slope[:, None], self._diagonal(centres), 1e-2, budget)
            step, budget = step[:, 0], budget - products
            length = 1.0
            decrease = float((slope * step).sum())
            while length > 1e-4:
                trial = centres + length * step
                trial_value = self._value(trial, total)
                if trial_value <= value + 1e-4 * length * decrease:
                    break
                length /= 2
            else:
                break
            centres, value = trial, trial_value
            if -decrease <= 1e-30 * max(value, 1e-300):
                break
        return centres

    def solver(self, centres: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that applies the derivative of z in the outputs, to one direction or to several, stacked."""

        def derivative(direction: Tensor) -> Tensor:
            several = direction.reshape(-1, *direction.shape[-2:])
            beside = self.total(several.movedim(0, 1).flatten(1)).unflatten(1, (len(several), -1))
            hessian = self._hessian(self.incidence.differences(centres), len(several))
            change, _ = conjugate(hessian, beside, self._diagonal(centres), 1e-13, _CONJUGATE)
            return change.movedim(1, 0)[:, self.labels].reshape(direction.shape)

        return derivative

    def _value(self, centres: Tensor, total: Tensor) -> float:
        """The objective up to a constant."""
        fit = (centres * (0.5 * self.sizes[:, None] * centres - total)).sum()
        lengths = torch.linalg.vector_norm(self.incidence.differences(centres), dim=1)
        return float(fit + (self.amounts * lengths).sum())

    def _expanded(self, centres: Tensor, total: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        gaps = self.incidence.differences(centres)
        pull = gaps * self._stiffness(gaps)[:, None]
        slope = self.sizes[:, None] * centres - total + self.incidence.sums(pull)
        return self._hessian(gaps), slope

    def _hessian(self, gaps: Tensor, several: int = 1) -> Callable[[Tensor], Tensor]:
        """Products with several vectors at once: centres × vectors × numbers of a centre."""
        unit = torch.nn.functional.normalize(gaps, eps=0.0).nan_to_num()[:, None]
        stiffness = self._stiffness(gaps)[:, None, None]
        scratch, other = gaps.new_empty(2, len(gaps), several, gaps.shape[1])

        def apply(direction: Tensor) -> Tensor:
            self.incidence.differences(direction.flatten(1), out=scratch.flatten(1))
            along = torch.mul(unit, scratch, out=other).sum(dim=2, keepdim=True)
            scratch.addcmul_(unit, along, value=-1.0).mul_(stiffness)
            summed = self.incidence.sums(scratch.flatten(1)).view_as(direction)
            return summed.addcmul_(self.sizes[:, None, None], direction)

        return apply

    def _diagonal(self, centres: Tensor) -> Tensor:
        """The preconditioner: the diagonal of the Hessian without the projections."""
        stiffness = self._stiffness(self.incidence.differences(centres))
        return (self.sizes + self.incidence.degrees(stiffness))[:, None, None]

    def _stiffness(self, gaps: Tensor) -> Tensor:
        """c/‖u‖, and zero where two centres meet, which is a kink."""
        lengths = torch.linalg.vector_norm(gaps, dim=1)
        return torch.where(lengths > 0, self.amounts / lengths, 0.0)


def conjugate(
    apply: Callable[[Tensor], Tensor], target: Tensor, diagonal: Tensor, tolerance: float, limit: int
) -> tuple[Tensor, int]:
    """Solve symmetric positive (semi-)definite systems by preconditioned conjugate gradients, from zero.

    Several right-hand sides, nodes × systems × numbers of a node, share each product. If the matrix is singular,
    the round-off in a target is not in its range and residuals grow after a while, so the point with the smallest
    residual is returned, together with the number of products, at most ``limit``.
    """
    space = Columns()
    run = Conjugate(Products(apply, space), space.zero(target), target, space, lambda rest: rest / diagonal)
    goal, best, smallest = tolerance**2 * run.square, run.x, run.square
    active = run.square > goal
    while bool(active.any()) and run.iterations < limit:
        active &= run.look() > 0
        if not bool(active.any()):
            return best, run.iterations + 1
        run.step(active)
        better = run.square < smallest
        best = run.x if bool(better.all()) else torch.where(better[:, None], run.x, best)
        smallest = torch.minimum(smallest, run.square)
        active &= (run.square > goal) & (run.square <= 1e4 * smallest)
    return best, run.iterations

r"""Spectral clustering: the distance from matrices of rank k (appendix "Spectral clustering").

.. math:: h(\hat y) = s\min_P\tfrac12\mathrm{Tr}\big((I - P)\hat y\hat y^\top\big)
    = \frac s2\sum_{i>k}\sigma_i^2(\hat y),

P over all projections of rank k, a relaxation of k-means. The paper prints the sum over the k smallest
(ERRATA 9), has no ½ and sums: its value is twice that of ``reduction="sum"``.

*Second derivative.* The nearest matrix of rank k is :math:`z = \sum_{i\le k}\sigma_iu_iv_i^\top`. In the bases of
singular vectors, with :math:`H_{ij} = u_i^\top Hv_j`, perturbation theory (Lewis and Sendov, Nonsmooth analysis of
singular values, Set-Valued Analysis 13, 2005) gives for :math:`i, j \le k`: :math:`Dz[H]_{ij} = H_{ij}`, for
:math:`i, j > k`: 0, and for :math:`i \le k < j`

.. math:: Dz[H]_{ij} = \frac{\sigma_i^2H_{ij} + \sigma_i\sigma_jH_{ji}}{\sigma_i^2 - \sigma_j^2}, \qquad
    Dz[H]_{ji} = \frac{\sigma_i\sigma_jH_{ij} + \sigma_i^2H_{ji}}{\sigma_i^2 - \sigma_j^2} .

So :math:`I - Dz` has on the pair (ij, ji) the eigenvalues :math:`\mp\sigma_j/(\sigma_i \mp \sigma_j)`, elsewhere 0
and 1, and

.. math:: \|\nabla^2h\| = s\max\Big(1, \frac{\sigma_{k+1}}{\sigma_k - \sigma_{k+1}}\Big) :

finite wherever the gap is positive, unbounded near ties.

*Accuracy.* Let :math:`\tilde u, \tilde v` be the orthonormal polar factors of the computed singular vectors u, v.
Their distance from u and v is at most :math:`\delta_u = \|u^\top u - I\|_F` and :math:`\delta_v`, because
:math:`|\sigma - 1| \le |\sigma^2 - 1|` for their singular values. So :math:`Y = \tilde u\,\mathrm{diag}(\sigma)\,
\tilde v^\top`, whose singular values and nearest matrix of rank k are known, is within

.. math:: e = \|\hat y - u\,\mathrm{diag}(\sigma)\,v^\top\| + \sigma_1(\delta_u + (1 + \delta_u)\delta_v)

of :math:`\hat y`, apart from the round-off of computing e. No singular value moves by more than e (Weyl), nor does
the distance from matrices of rank k, which for Y is :math:`D = (\sum_{i>k}\sigma_i^2)^{1/2}`. Hence the value
:math:`\frac12d^2`, :math:`d = \|\hat y - z\|`, is off by at most :math:`\frac12(|d - D| + e)(d + D + e)`. The
nearest matrices of the two are at most :math:`\kappa e` apart, :math:`\kappa = (\sigma_k + e)/(\sigma_k -
\sigma_{k+1} - \sqrt2e)`, as the eigenvalues of Dz above are at most :math:`\sigma_k/(\sigma_k - \sigma_{k+1})` on
the way from Y to :math:`\hat y`; z is within e of that of Y, round-off included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.clustering.envelope import UNIT, Accuracy, Envelope, Nearest, Over, Proximity, clustering, zero
from surefoot.clustering.kmeans import lloyd, positive
from surefoot.magnitude import Magnitude, maximum
from surefoot.operations.call import Bounds, Call
from surefoot.operations.common import ONE

_KINK = (
    "the domain may contain outputs with σ_k = σ_{k+1}, where spectral clustering has a kink: shrink it, choose k "
    "at a larger gap, take steps on Spectral.majoriser(outputs), a square loss above it, or use ConvexClustering"
)


@dataclass(frozen=True)
class SpectralResult:
    """Singular values and the clusters of the leading singular vectors.

    Attributes:
        labels: the cluster of every sample: k-means of the rows of the leading left singular vectors.
        vectors: n × k, the leading left singular vectors.
        singular_values: all of them, in decreasing order.
        gap: σ_k − σ_{k+1}.
        tie: whether the gap is zero within round-off: then the gradient is one of several Clarke subgradients.
        status: the result in words.

    >>> sf.clustering.Spectral(1).solve(torch.diag(torch.tensor([3.0, 2.0, 1.0]))).gap
    1.0
    """

    labels: Tensor
    vectors: Tensor
    singular_values: Tensor
    gap: float
    tie: bool
    status: str


class Spectral(Envelope[Any]):
    r"""Spectral clustering of the outputs: :math:`\frac1{2n}\sum_{i>k}\sigma_i^2(\hat y)`.

    The gradient is :math:`\frac1n(\hat y - \sum_{i\le k}\sigma_iu_iv_i^\top)`. Not convex, and not smooth: where
    :math:`\sigma_k = \sigma_{k+1} > 0` there is a kink, and near it the curvature has no bound. At such a tie the
    gradient is a Clarke subgradient, that of the singular vectors the decomposition returned, and second
    derivatives hold the projection onto them fixed; :meth:`solve` says whether there is a tie. The descent lemma
    holds nevertheless, with 1/n (:mod:`~surefoot.clustering.envelope`).

    Args:
        k: number of clusters.
        seed: seed of the k-means that reads labels off singular vectors.
        restarts: number of its runs.
        reduction: ``"mean"`` over the samples or ``"sum"``.

    Raises:
        ObjectiveError: if k or restarts is not a positive whole number.

    >>> float(sf.clustering.Spectral(1)(torch.diag(torch.tensor([3.0, 2.0, 1.0]))))  # (4 + 1) / 6
    0.83333...
    """

    operation = "surefoot.spectral"
    k: int

    def __init__(self, k: int, *, seed: int = 0, restarts: int = 10, reduction: str = "mean") -> None:
        super().__init__(Truncation(positive(k, "k, the number of clusters,")), reduction)
        self.k, self.seed, self.restarts = k, seed, positive(restarts, "restarts")

    def solve(self, outputs: Tensor) -> SpectralResult:
        """Singular values, and labels by k-means of the leading singular vectors.

        Raises:
            ObjectiveError: if the outputs do not fit, or scikit-learn is not installed.
        """
        parts: Factors = super().solve(outputs)
        vectors = parts.u[:, : self.k]
        labels, _ = lloyd(vectors, self.k, self.seed, self.restarts)
        gap, tie = parts.gap, parts.tie
        status = (
            f"σ_{self.k} = σ_{self.k + 1} within round-off: the leading singular vectors, the labels and the "
            "gradient are one choice of several"
            if tie
            else f"the gap σ_{self.k} − σ_{self.k + 1} is {gap:.3g}: the gradient is exact"
        )
        return SpectralResult(labels, vectors, parts.values, gap, tie, status)


@dataclass(frozen=True)
class Factors:
    """A singular value decomposition, :math:`\\hat y = u\\,\\mathrm{diag}(\\text{values})\\,v^\\top`, cut at k."""

    outputs: Tensor
    u: Tensor
    values: Tensor
    v: Tensor
    k: int

    @cached_property
    def point(self) -> Tensor:
        """The kept part."""
        k = self.kept
        return self.outputs if k == len(self.values) else (self.u[:, :k] * self.values[:k]) @ self.v[:, :k].mT

    @property
    def kept(self) -> int:
        """The number of singular vectors that are kept: k, or all."""
        return min(self.k, len(self.values))

    @property
    def next(self) -> float:
        """σ_{k+1}; zero after the last."""
        return float(self.values[self.k]) if self.k < len(self.values) else 0.0

    @property
    def gap(self) -> float:
        """σ_k − σ_{k+1}."""
        last = float(self.values[self.k - 1]) if self.k <= len(self.values) else 0.0
        return last - self.next

    @cached_property
    def error(self) -> float:
        r"""The distance e from the outputs to a matrix whose singular values are exactly these; see the module.

        The last term is the round-off of computing it: products of k numbers are off by :math:`\gamma_k\|A\|_F
        \|B\|_F`, and the norms are at most :math:`\sqrt r` times 1.01 and :math:`\sigma_1`. Infinite if the
        vectors are not nearly orthonormal.
        """
        size, rank = self.u.shape[0] + self.v.shape[0] + 16, len(self.values)
        unit = torch.eye(rank, dtype=self.u.dtype, device=self.u.device)
        defects = sum(float(torch.linalg.matrix_norm(part.mT @ part - unit)) for part in (self.u, self.v))
        residual = float(torch.linalg.matrix_norm(self.outputs - (self.u * self.values) @ self.v.mT))
        lost = 4 * size * rank * UNIT
        if not defects + lost < 0.005:
            return math.inf
        return 1.01 * (residual + float(self.values[0]) * (defects + lost)) + size * rank * 2.0**-1022

    @property
    def accuracy(self) -> Accuracy:
        """Bounds on the errors of the kept part; see the module."""
        if self.kept == len(self.values):
            return Accuracy(0.0, 0.0)
        off = self.error
        left, rest = (
            float(torch.linalg.vector_norm(t)) for t in (self.outputs - self.point, self.values[self.k :])
        )
        value = 0.5 * (abs(left - rest) + off) * (left + rest + off) * (1 + 2.0**-40)
        gap = (self.gap - 1.5 * off) * (1 - 4 * UNIT)  # 1.5 > √2 covers the rounding of the difference
        if not gap > 2 * UNIT * float(self.values[0]):
            return Accuracy(value, None)
        steep = (float(self.values[self.k - 1]) + off) / gap
        return Accuracy(value, (steep + 1) * off * (1 + 2.0**-40))

    @property
    def tie(self) -> bool:
        """Whether something is cut off and the gap is zero within round-off."""
        return self.k < len(self.values) and self.gap <= 2 * self.error

    def derivative(self, direction: Tensor) -> Tensor:
        """The derivative of the kept part along a direction; at ties the projection is held fixed."""
        k = self.kept
        u, v, sigma = self.u, self.v, self.values
        within = u.mT @ direction @ v  # r × r
        first, second = within[..., :k, k:], within[..., k:, :k].mT  # H_ij and H_ji for i ≤ k < j
        a, b = sigma[:k, None], sigma[None, k:]
        square = a * a - b * b
        apart = a - b > 2 * self.error
        square = torch.where(apart, square, 1.0)
        changed = torch.zeros_like(within)
        changed[..., :k, :k] = within[..., :k, :k]
        changed[..., :k, k:] = torch.where(apart, (a * a * first + a * b * second) / square, first)
        changed[..., k:, :k] = torch.where(apart, (a * b * first + a * a * second) / square, 0.0).mT
        left, right = direction @ v[:, :k], u[:, :k].mT @ direction
        outside = (left - u @ within[..., :k]) @ v[:, :k].mT + u[:, :k] @ (right - within[..., :k, :] @ v.mT)
        return u @ changed @ v.mT + outside


class Truncation(Proximity[Factors]):
    """The nearest matrix of rank k, by a singular value decomposition in double precision.

    The eigenvalues of a Gram matrix would give the small singular values with an error of √u σ_1 instead of u σ_1.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def nearest(self, outputs: Tensor) -> Nearest[Factors]:
        """Keep the k largest singular values."""
        u, values, vh = torch.linalg.svd(outputs, full_matrices=False)
        parts = Factors(outputs, u, values, vh.mT, self.k)
        return Nearest(parts.point, 0.0, parts.derivative, lambda: parts.accuracy, parts)


@clustering("surefoot.spectral")
def spectral_bounds(call: Call) -> Bounds:
    r"""Spectral clustering: curvature :math:`s\max(1, \sigma_{k+1}/(\sigma_k - \sigma_{k+1}))`; the slope is s
    times the distance.

    Over outputs within a distance r of the centre,
    :math:`\sum_i(\sigma_i - \sigma_i^*)^2 \le r^2` (Mirsky, Quart. J. Math. 11, 1960), so :math:`\sigma_{k+1} \le
    \sigma_{k+1}^* + r` and the gap shrinks by at most :math:`\sqrt2r`. If it stays positive, h is twice
    continuously differentiable on the ball, and the largest ratio bounds its second derivative there. The
    round-off of the singular values is added to r. Where k is at least the smaller side, h = 0.
    """
    if call["proximity"].k >= min(call["outputs"].shape):
        return zero(call)
    over, curvature = Over(call), Magnitude.infinity()
    if over.nearest is not None and over.outputs.spread.is_finite:
        parts: Factors = over.nearest.result
        reach = float(over.outputs.spread + parts.error)
        gap = (parts.gap - 1.5 * reach) * (1 - 4 * UNIT)  # 1.5 > √2 covers the rounding of the difference
        if gap > 2 * UNIT * float(parts.values[0]):
            curvature = maximum(ONE, (Magnitude.of(parts.next) + reach) / gap)
    return over.half_square(curvature, _KINK)

r"""Convex clustering: a Moreau envelope (section "Unsupervised learning", eq. cvx_clustering).

.. math:: h(\hat y) = s\min_z\ \tfrac12\|z - \hat y\|^2 + \lambda\sum_{(i,j)}w_{ij}\|z_i - z_j\| .

With unit weights on all pairs, :math:`\lambda = 1` and ``reduction="sum"`` this is the paper's objective.

*Convex and smooth.* It is s times the envelope of a convex function, so it is convex with gradient
:math:`s(\hat y - z)`, z the proximal point, and :math:`L = s`: both z and :math:`\hat y - z` are firmly
non-expansive (Moreau, Bull. Soc. Math. France 93, 1965).

*Lipschitz.* By duality :math:`\hat y - z = B^\top\zeta` with :math:`\|\zeta_e\| \le \lambda w_e`, so everywhere

.. math:: \|\hat y - z\| \le \lambda\min\Big(\|(\textstyle\sum_{e\ni i}w_e)_i\|_2,\
    \sqrt{\Lambda\textstyle\sum_ew_e}\Big), \qquad
    \Lambda = \min\big(n\max_ew_e,\ \max_{(i,j)}(\deg_w i + \deg_w j)\big) .

The first bounds every row of :math:`B^\top\zeta` by its weighted degree. For the second
:math:`\|B^\top\zeta\|^2 \le \|B^\top\mathrm{diag}(w)^{1/2}\|^2\sum_e\|\zeta_e\|^2/w_e`, and the matrix is a factor
of the weighted Laplacian, whose largest eigenvalue is at most that of the complete graph with the largest weight,
n times that, and by Cauchy-Schwarz at every node, :math:`\|\sum_{e\ni i}\pm\sqrt{w_e}x_e\|^2 \le \deg_wi\sum_{e\ni
i}\|x_e\|^2`, at most the largest sum of weighted degrees over an edge. With unit weights on all pairs it is
:math:`n\sqrt{(n-1)/2}` (ERRATA 8; the paper's n(n−1)/2 fails for n = 2).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.clustering.envelope import UNIT, Accuracy, Envelope, Nearest, Over, Proximity, clustering
from surefoot.clustering.fusion import ConvexClusteringResult, fuse
from surefoot.clustering.kmeans import positive
from surefoot.clustering.reduced import Reduced
from surefoot.clustering.weights import Edges, all_pairs, explicit, matrix, nearest_neighbours
from surefoot.enclosure import norm
from surefoot.graph.nodes import Spec
from surefoot.magnitude import Magnitude, minimum
from surefoot.objectives.constants import Constants, ObjectiveError, convex_clustering
from surefoot.operations.call import Bounds, Call


class Fused(Proximity[ConvexClusteringResult]):
    """The proximal point of λ times the penalty; the edges are given, searched for, or all pairs."""

    def __init__(
        self,
        edges: Edges | None,
        search: Callable[[Tensor], Edges] | None,
        penalty: float,
        tolerance: float,
        max_iterations: int,
    ) -> None:
        super().__init__()
        self.edges, self._fixed, self._search = edges, edges, search
        self.penalty, self.tolerance, self.max_iterations = penalty, tolerance, max_iterations
        self._dual: Tensor | None = None

    @property
    def all_pairs(self) -> bool:
        """Whether all pairs are joined, however many samples there are."""
        return self._search is None and self._fixed is None

    def bind(self, points: Tensor) -> None:
        """Fix the edges, if they are to be searched for."""
        if self._search is None:
            raise ObjectiveError(
                "the weights are given already: only ConvexClustering('knn') looks for neighbours"
            )
        self.forget()
        self.edges = self._search(points)

    def forget(self) -> None:
        """Drop the last dual variables, and edges that were searched for."""
        super().forget()
        self._dual, self.edges = None, self._fixed

    def nearest(self, outputs: Tensor) -> Nearest[ConvexClusteringResult]:
        """Solve, from the last dual variables."""
        if self.all_pairs and (self.edges is None or self.edges.count != len(outputs)):
            self.edges = all_pairs(len(outputs), outputs.device)
        elif self.edges is None:
            assert self._search is not None
            self.edges = self._search(outputs)
        edges = self.edges = self.edges.to(outputs.device)
        if not len(edges) or self.penalty == 0:  # every sample is its own centroid
            labels = torch.arange(len(outputs), device=outputs.device)
            none = outputs.new_zeros((0, outputs.shape[1]))
            alone = ConvexClusteringResult(
                outputs, labels, none, value=0.0, gap=0.0, gradient_error=0.0, iterations=0, penalty=0.0,
                floor=0.0, tolerance=self.tolerance,
            )  # fmt: skip
            return Nearest(outputs, 0.0, lambda v: v, lambda: Accuracy(0.0, 0.0), alone)
        amounts = self.penalty * edges.weights
        result = fuse(outputs, edges.incidence, amounts, self.tolerance, self.max_iterations, self._dual)
        self._dual = result.dual
        if not result.converged:
            warnings.warn(f"convex clustering: {result.status}", stacklevel=2)
        reduced = Reduced(result.labels, edges.first, edges.second, amounts)
        derivative = reduced.solver(reduced.total(result.centroids) / reduced.sizes[:, None])
        accuracy = Accuracy(result.gap, result.gradient_error)
        return Nearest(result.centroids, result.penalty, derivative, lambda: accuracy, result)

    def steepest(self, count: int) -> Magnitude:
        """The Lipschitz constant of the sum over ``count`` samples, from the weights."""
        if self.all_pairs:
            return (Magnitude.of(count) * Magnitude.of(count * (count - 1) / 2)).sqrt() * self.penalty
        if self.edges is None:
            raise ObjectiveError(
                "the weights are not known before neighbours have been looked for: call "
                "ConvexClustering.bind(points)"
            )
        return slope(self.edges) * self.penalty


def slope(edges: Edges) -> Magnitude:
    """The bound of the module on ‖Bᵀζ‖ for ‖ζ_e‖ ≤ w_e."""
    if not len(edges):
        return Magnitude.zero()
    share = 1 + (len(edges) + 8) * 2.0**-52  # the round-off of a sum of this many positive numbers
    degrees = edges.incidence.degrees(edges.weights) * share
    ends = float((degrees[edges.first] + degrees[edges.second]).max()) * share
    widest = minimum(Magnitude.of(edges.count) * float(edges.weights.max()), ends)
    total = Magnitude.of(float(edges.weights.sum()) * share)
    return minimum(Magnitude.of(degrees).norm(), (widest * total).sqrt())


class ConvexClustering(Envelope[ConvexClusteringResult]):
    r"""Convex clustering of the outputs: convex, differentiable, and solved to a proved accuracy.

    The value is that of a point whose duality gap is at most ``tolerance`` times the value, so it is above the
    minimum by at most that. Each call starts from the dual variables of the last one, which changes the value by
    at most the tolerance. Second derivatives are those of the active set: exact except where an edge is about to
    fuse or to part. A warning says if the tolerance is not reached.

    Args:
        weights: which samples are pulled together: ``None``, all pairs with weight 1; ``"knn"``, nearest
            neighbours with Gaussian weights, found at the first call (or by :meth:`bind`) and kept, so that the
            objective stays one function; a symmetric matrix; a pair (edges, weights) of an E × 2 tensor of sample
            numbers and E numbers; or :class:`~surefoot.clustering.Edges`.
        penalty: λ.
        neighbours: number of neighbours, for ``"knn"``.
        bandwidth: width of the Gaussian, for ``"knn"``; by default the median length of an edge.
        reduction: ``"mean"`` over the samples or ``"sum"``.
        tolerance: largest duality gap, relative to the value.
        max_iterations: largest number of iterations of the solver.

    Raises:
        ObjectiveError: if the weights or a number are not valid.

    >>> two = torch.tensor([[0.0], [10.0]])
    >>> loss = sf.clustering.ConvexClustering(penalty=2.0, reduction="sum")
    >>> loss.solve(two).centroids.flatten().tolist(), round(float(loss(two)), 9)  # each moves by 2
    ([2.0, 8.0], 16.0)
    """

    operation = "surefoot.convex_clustering"

    def __init__(
        self,
        weights: Any = None,
        *,
        penalty: float = 1.0,
        neighbours: int = 10,
        bandwidth: float | None = None,
        reduction: str = "mean",
        tolerance: float = 1e-6,
        max_iterations: int = 20_000,
    ) -> None:
        if not 0 <= float(penalty) < math.inf:
            raise ObjectiveError(f"the penalty is a finite number ≥ 0, got {penalty!r}")
        if not 0 < float(tolerance) < 1:
            raise ObjectiveError(f"the tolerance is a number between 0 and 1, got {tolerance!r}")
        search = partial(nearest_neighbours, neighbours=positive(neighbours, "neighbours"), bandwidth=bandwidth)
        limit = positive(max_iterations, "max_iterations")
        knn = isinstance(weights, str) and weights == "knn"
        fused = Fused(_fixed_edges(weights), search if knn else None, float(penalty), float(tolerance), limit)
        super().__init__(fused, reduction)
        self.penalty, self._plain = float(penalty), weights is None and float(penalty) == 1.0

    def bind(self, points: Tensor) -> ConvexClustering:
        """Find the neighbours among these points, one per sample, instead of among the first outputs."""
        assert isinstance(self.proximity, Fused)
        self.proximity.bind(points)
        return self

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Refuse edges for another number of samples."""
        super().check(outputs, targets)
        assert isinstance(self.proximity, Fused)
        edges = self.proximity.edges
        if edges is not None and not self.proximity.all_pairs and edges.count != outputs.shape[0]:
            raise ObjectiveError(
                f"the weights are for {edges.count} samples, the outputs have {outputs.shape[0]}: give the "
                "weights of this batch, or bind the neighbours of other points"
            )

    def paper_constants(self, outputs: Spec, targets: Tensor | None, radius: float) -> Constants:
        """Appendix "Convex clustering": n(n−1)/2 and 1, for unit weights on all pairs; for a mean, 1/n of both."""
        if not self._plain:
            return super().paper_constants(outputs, targets, radius)
        total = convex_clustering(outputs.shape[0])
        count = outputs.shape[0] if self.reduction == "mean" else 1
        return Constants(total.lipschitz / count, total.smoothness / count, True, True, total.unsound)

    def extra_repr(self) -> str:
        """The penalty."""
        return ", ".join(filter(None, (f"penalty={self.penalty:g}", super().extra_repr())))


def _fixed_edges(weights: Any) -> Edges | None:
    """The edges, if they do not depend on the outputs."""
    if isinstance(weights, Edges):
        return weights
    if isinstance(weights, Tensor):
        return matrix(weights)
    if isinstance(weights, tuple) and len(weights) == 2:
        return explicit(*weights)
    if weights is None or (isinstance(weights, str) and weights == "knn"):
        return None
    raise ObjectiveError(
        f"weights are None, 'knn', a matrix, (edges, weights) or Edges, got {type(weights).__name__}: {weights!r}"
    )


@clustering("surefoot.convex_clustering", convex=True)
def convex_clustering_bounds(call: Call) -> Bounds:
    r"""Convex clustering: curvature s; slope :math:`s\|\hat y - z\|`, at most s times the constant of the weights.

    (See the module.) :math:`\hat y - z` is 1-Lipschitz and zero at zero, so it is at
    most :math:`\sup\|\hat y\|`, and at most its norm at the centre, where the solver is off by what it proves,
    plus the spread. The value is at most :math:`\frac s2\|\hat y\|^2`, by z = 0, and at most the constant of the
    weights times the norm.
    """
    proximity: Fused = call["proximity"]
    over = Over(call)
    outputs, scale, nearest = over.outputs, over.scale, over.nearest
    steepest = proximity.steepest(outputs.shape[0])
    slope = minimum(outputs.bound, steepest)
    value = minimum(outputs.bound**2 / 2, steepest * outputs.bound)
    if nearest is not None and (off := nearest.accuracy().point) is not None:
        here = norm(outputs.value - nearest.point) * (1 + 4 * UNIT) + off
        slope = minimum(slope, here + outputs.spread)
    return Bounds(
        jacobian={"outputs": slope * scale},
        curvature={("outputs", "outputs"): scale},
        bound=value * scale,
        reduction=outputs.numel,
    )

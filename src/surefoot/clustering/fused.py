r"""The inner problem of convex clustering: its solution, and how long its gradient can be.

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

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.clustering.envelope import Nearest, Proximity
from surefoot.clustering.fusion import ConvexClusteringResult, fuse
from surefoot.clustering.reduced import Reduced
from surefoot.clustering.weights import Edges, all_pairs
from surefoot.magnitude import Magnitude, minimum
from surefoot.objectives.constants import ObjectiveError


class Fused(Proximity[ConvexClusteringResult]):
    """The proximal point of λ times the penalty; edges are given, searched for among points, or all pairs."""

    def __init__(
        self,
        edges: Edges | None,
        search: Callable[[Tensor], Edges] | None,
        penalty: float,
        tolerance: float,
        max_iterations: int,
    ) -> None:
        super().__init__()
        self.edges, self._given, self._search = edges, edges, search
        self.penalty, self.tolerance, self.max_iterations = penalty, tolerance, max_iterations
        self._dual: Tensor | None = None

    @property
    def all_pairs(self) -> bool:
        """Whether all pairs are joined, of however many samples there are."""
        return self._search is None and self._given is None

    def bind(self, points: Tensor) -> None:
        """Fix the edges, if they are to be searched for."""
        if self._search is None:
            raise ObjectiveError(
                "the weights are given already: only ConvexClustering('knn') looks for neighbours"
            )
        self.forget()
        self.edges = self._search(points)

    def forget(self) -> None:
        """Drop the last dual variables, and edges that were found."""
        super().forget()
        self._dual, self.edges = None, self._given

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
            alone = ConvexClusteringResult(outputs, labels, none, 0.0, 0.0, 0.0, 0, 0.0, 0.0, self.tolerance)
            return Nearest(outputs, 0.0, lambda v: v, 0.0, 0.0, alone)
        amounts = self.penalty * edges.weights
        result = fuse(outputs, edges.incidence, amounts, self.tolerance, self.max_iterations, self._dual)
        self._dual = result.dual
        if not result.converged:
            warnings.warn(f"convex clustering: {result.status}", stacklevel=2)
        reduced = Reduced(result.labels, edges.first, edges.second, amounts)
        derivative = reduced.solver(reduced.total(result.centroids) / reduced.sizes[:, None])
        return Nearest(result.centroids, result.penalty, derivative, result.gap, result.gradient_error, result)

    def steepest(self, count: int) -> Magnitude:
        """The Lipschitz constant of the sum for so many samples, from the weights."""
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
    share = 1 + (len(edges) + 8) * 2.0**-52  # of adding up at most so many positive numbers
    degrees = edges.incidence.degrees(edges.weights) * share
    ends = float((degrees[edges.first] + degrees[edges.second]).max()) * share
    widest = minimum(Magnitude.of(edges.count) * float(edges.weights.max()), ends)
    total = Magnitude.of(float(edges.weights.sum()) * share)
    return minimum(Magnitude.of(degrees).norm(), (widest * total).sqrt())

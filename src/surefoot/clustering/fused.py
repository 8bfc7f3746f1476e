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
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.clustering.envelope import Nearest, Proximity
from surefoot.clustering.fusion import Fusion, fuse
from surefoot.clustering.reduced import Reduced
from surefoot.clustering.weights import Edges, all_pairs
from surefoot.magnitude import Magnitude, minimum
from surefoot.objectives.constants import ObjectiveError


@dataclass(frozen=True)
class ConvexClusteringResult:
    r"""The proximal point, with a proof of how good it is.

    Attributes:
        centroids: z, one per sample; equal within a cluster.
        labels: the clusters: connected components of the edges whose ends are fused.
        dual: ζ, an edge per row, :math:`\|\zeta_e\| \le \lambda w_e`.
        value: of the sum, :math:`\frac12\|z - \hat y\|^2 + \lambda\sum w\|z_i - z_j\|`; the minimum is between
            ``value - gap`` and ``value``.
        gap: the duality gap, round-off added.
        gradient_error: a bound on the distance from :math:`\hat y - z` to the exact gradient of the sum:
            :math:`\sqrt{2\,\text{gap}}`, or less.
        iterations: of the accelerated ascent.
        converged: whether the gap is within the tolerance, or above it by round-off alone.
        status: the same in words.
    """

    centroids: Tensor
    labels: Tensor
    dual: Tensor
    value: float
    gap: float
    gradient_error: float
    iterations: int
    converged: bool
    status: str


class Fused(Proximity):
    """The proximal point of the penalty.

    Args:
        edges: given, or ``None`` for all pairs or a search.
        search: finds edges among points, or ``None``.
        penalty: λ.
        tolerance: on the gap, relative.
        max_iterations: of the solver.
    """

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
        """Fix the edges.

        Raises:
            ObjectiveError: if they are not searched for.
        """
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

    def nearest(self, outputs: Tensor) -> Nearest:
        """Solve, from the last dual variables."""
        if self.all_pairs:
            if self.edges is None or self.edges.count != len(outputs):
                self.edges = all_pairs(len(outputs), outputs.device)
        elif self.edges is None:
            assert self._search is not None
            self.edges = self._search(outputs)
        edges = self.edges = self.edges.to(outputs.device)
        if not len(edges) or self.penalty == 0:
            return self._alone(outputs)
        amounts = self.penalty * edges.weights
        found = fuse(
            outputs,
            edges.incidence,
            amounts,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            start=self._dual,
        )
        self._dual = found.dual
        result = self._result(found)
        if not result.converged:
            warnings.warn(f"convex clustering: {result.status}", stacklevel=2)
        reduced = Reduced(found.labels, edges.first, edges.second, amounts)
        centres = reduced.total(found.centroids) / reduced.sizes[:, None]
        derivative = reduced.solver(centres)
        return Nearest(found.centroids, found.penalty, derivative, found.gap, found.gradient_error, result)

    def _result(self, found: Fusion) -> ConvexClusteringResult:
        relative = found.gap / found.value if found.value > 0 else 0.0
        clusters = int(found.labels.max()) + 1
        how = f"{found.iterations} iterations" + (", finished by Newton's method" if found.polished else "")
        status = f"{clusters} clusters; relative duality gap {relative:.1e} after {how}"
        converged = found.done(self.tolerance)
        if not converged:
            status += f", above the tolerance of {self.tolerance:g}: raise max_iterations or the tolerance"
        elif found.gap > self.tolerance * found.value:
            status += f", above the tolerance of {self.tolerance:g} by round-off alone"
        return ConvexClusteringResult(
            found.centroids,
            found.labels,
            found.dual,
            found.value,
            found.gap,
            found.gradient_error,
            found.iterations,
            converged,
            status,
        )

    def _alone(self, outputs: Tensor) -> Nearest:
        """Without edges every sample is its own centroid."""
        none = outputs.new_zeros((0, outputs.shape[1]))
        labels = torch.arange(len(outputs), device=outputs.device)
        result = ConvexClusteringResult(
            outputs, labels, none, 0.0, 0.0, 0.0, 0, True, "nothing pulls the samples together"
        )
        return Nearest(outputs, 0.0, lambda v: v, 0.0, 0.0, result)

    def steepest(self, count: int) -> Magnitude:
        """The Lipschitz constant of the sum for so many samples, from the weights.

        Raises:
            ObjectiveError: if neighbours have not been looked for yet.
        """
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

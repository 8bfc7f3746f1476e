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
:math:`n\sqrt{(n-1)/2}` (ERRATA 8; the paper's n(n−1)/2 fails for n = 2). At zero z is zero, so it is at most
:math:`\|\hat y\|`, too.

*The solver* is not trusted. With :math:`c_e = \lambda w_e`,

.. math:: P(z) = \tfrac12\|z - \hat y\|^2 + \sum_ec_e\|(Bz)_e\|, \qquad
    D(\zeta) = \langle\zeta, B\hat y\rangle - \tfrac12\|B^\top\zeta\|^2 \quad\text{for } \|\zeta_e\| \le c_e,

and with :math:`r = z - (\hat y - B^\top\zeta)` the gap is a sum of terms that are not negative:

.. math:: P(z) - D(\zeta) = \sum_e\big(c_e\|(Bz)_e\| - \langle\zeta_e, (Bz)_e\rangle\big) + \tfrac12\|r\|^2 .

:math:`D(\zeta) \le \min P \le P(z)`, so the value is off by at most the gap; P is 1-strongly convex, so the
gradient :math:`\hat y - z` is off by at most :math:`\sqrt{2\,\text{gap}}`.

*Ascent.* :math:`\|B^\top\zeta\|^2 = \sum_i\|\sum_{e\ni i}\pm\zeta_e\|^2 \le \sum_id_i\sum_{e\ni i}\|\zeta_e\|^2
= \sum_e(d_i + d_j)\|\zeta_e\|^2` with the degrees d, so steps of :math:`1/(d_i + d_j)` on edge (i, j) ascend,
and the projection onto balls is edge by edge. Accelerated (Beck and Teboulle, SIAM J. Imaging Sci. 2, 2009) with
restarts where the last step points against the momentum (O'Donoghue and Candès, Found. Comput. Math. 15, 2015).
An edge is guessed to be fused if its ball contains :math:`\zeta_e + \tau_e(Bz)_e`; the means over the components
of these edges are another z, and the one of smaller gap is the solution.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.clustering.edges import Edges, all_pairs, explicit, matrix, nearest_neighbours
from surefoot.clustering.objective import Clustering, positive
from surefoot.errors import ObjectiveError
from surefoot.objectives.loss import Shaped

_CHECK = 25  # iterations between checks of the gap
_UNIT = 2.0**-52


@dataclass(frozen=True)
class ConvexClusteringResult:
    r"""The proximal point, with a proof of how good it is.

    Attributes:
        centroids: z, one per sample; equal within a cluster.
        labels: the clusters: connected components of the edges whose ends are fused.
        dual: ζ, an edge per row, :math:`\|\zeta_e\| \le \lambda w_e`.
        value: the sum :math:`\frac12\|z - \hat y\|^2 + \lambda\sum w\|z_i - z_j\|`; the minimum is between
            ``value - gap`` and ``value``.
        gap: the duality gap, including round-off.
        gradient_error: a bound on the distance from :math:`\hat y - z` to the exact gradient of the sum.
        iterations: number of iterations.
        penalty: :math:`\lambda\sum w\|z_i - z_j\|`.
        converged: whether the gap is within the tolerance, or as small as round-off lets it be.

    >>> result = sf.clustering.ConvexClustering(penalty=2.0).solve(torch.tensor([[0.0], [10.0]]))
    >>> result.labels.tolist(), result.converged
    ([0, 1], True)
    """

    centroids: Tensor
    labels: Tensor
    dual: Tensor
    value: float
    gap: float
    gradient_error: float
    iterations: int
    penalty: float
    converged: bool

    @property
    def status(self) -> str:
        relative = self.gap / self.value if self.value > 0 else 0.0
        text = (
            f"{int(self.labels.max()) + 1} clusters; relative duality gap {relative:.1e} after {self.iterations}"
        )
        return f"{text} iterations" + (
            "" if self.converged else ", above the tolerance: raise max_iterations or it"
        )


def fuse(
    outputs: Tensor, edges: Edges, amounts: Tensor, tolerance: float, limit: int, start: Tensor | None = None
) -> ConvexClusteringResult:
    """The proximal point at these outputs, from dual variables if there are some."""
    centre = outputs.mean(dim=0)  # moving all outputs together does not change the problem, but lessens round-off
    y, far = outputs - centre, float(torch.linalg.vector_norm(outputs))
    degrees = edges.degrees(torch.ones_like(amounts))
    inverse = (degrees[edges.first] + degrees[edges.second])[:, None]

    def projected(dual: Tensor) -> Tensor:
        return dual * (amounts / torch.linalg.vector_norm(dual, dim=1)).clamp_(max=1.0)[:, None]

    def ended(iteration: int) -> ConvexClusteringResult:
        point = y - edges.sums(dual)
        reach = torch.linalg.vector_norm(dual + edges.differences(point) / inverse, dim=1)
        labels = edges.components(reach <= amounts * (1 + 1e-12))
        sizes = torch.bincount(labels)[:, None]
        means = (point.new_zeros(len(sizes), y.shape[1]).index_add_(0, labels, point) / sizes)[labels]
        results = [_weighed(y, z, dual, edges, amounts, far, labels, iteration, tolerance) for z in (means, point)]
        return min(results, key=lambda result: result.gap)

    dual = y.new_zeros((len(edges), y.shape[1]))
    if (
        start is not None and start.shape == dual.shape and bool(y.any())
    ):  # if all outputs are equal, zero is exact
        dual = projected(start)
    point, momentum, result = dual, 1.0, ended(0)
    for iteration in range(1, limit + 1):
        if result.converged:
            break
        following = projected(point + edges.differences(y - edges.sums(point)) / inverse)
        move = following - dual
        if float(((point - following) * move * inverse).sum()) > 0:
            momentum = 1.0
        after = 0.5 + math.sqrt(0.25 + momentum * momentum)
        dual, point, momentum = following, following + move * ((momentum - 1) / after), after
        if iteration % _CHECK == 0 or iteration == limit:
            result = ended(iteration)
    return ConvexClusteringResult(**{**result.__dict__, "centroids": result.centroids + centre})


def _weighed(
    y: Tensor,
    z: Tensor,
    dual: Tensor,
    edges: Edges,
    amounts: Tensor,
    far: float,
    labels: Tensor,
    iteration: int,
    tolerance: float,
) -> ConvexClusteringResult:
    """Value and gap of a pair, including the round-off of the gap.

    A dual variable is outside its ball by at most a relative (d + 4)u, and stands for the variable shrunk by
    that. A term of the gap is off by (2d + 8)u of :math:`c_e\\|(Bz)_e\\|`, a sum of E terms by E + 1 units of
    its terms; r is off by (b + d + 16)u of the norms of its parts, b the largest number of edges at a node; and
    moving the outputs to their mean and back costs 8u of their norm ``far`` and 2u of that of z.
    """
    gaps = edges.differences(z)
    lengths = torch.linalg.vector_norm(gaps, dim=1)
    pulls = amounts * lengths
    terms = (pulls - (gaps * dual).sum(dim=1)).clamp_min(0.0)
    sums = edges.sums(dual)
    penalty, apart = float(pulls.sum()), z - y
    value = 0.5 * float(apart.square().sum()) + penalty
    sizes = torch.linalg.vector_norm(z, dim=1)
    differ = amounts * (lengths > 0)  # equal numbers have a difference without round-off
    ends = float((differ * (sizes[edges.first] + sizes[edges.second])).sum())
    share = 8 * (z.shape[1] + math.log2(z.numel() + len(edges) + 2) + 24)
    norm_y, norm_z = float(torch.linalg.vector_norm(y)), float(torch.linalg.vector_norm(z))
    floor = _UNIT * (share * (penalty + value) + 4 * ends + 4 * float(torch.linalg.vector_norm(sums)) * norm_y)
    moved = _UNIT * (4 * far + norm_z)
    floor += moved * (float(torch.linalg.vector_norm(apart)) + moved)
    busiest = float(edges.degrees(torch.ones_like(amounts)).max())
    weight = float(torch.linalg.vector_norm(edges.degrees(torch.linalg.vector_norm(dual, dim=1))))
    slack = (busiest + z.shape[1] + 16) * _UNIT * (weight + norm_y + norm_z)
    rest = float(torch.linalg.vector_norm(apart + sums)) * (1 + 1e-9) + slack
    gap = float(terms.sum()) + 0.5 * rest * rest + floor
    return ConvexClusteringResult(
        z, labels, dual, value, gap, gradient_error=math.sqrt(2 * gap) + moved, iterations=iteration,
        penalty=penalty, converged=gap <= max(tolerance * value, 1.5 * floor),
    )  # fmt: skip


class ConvexClustering(Clustering):
    r"""Convex clustering of the outputs: convex, differentiable, and solved to a proved accuracy.

    The value is that of a point whose duality gap is at most ``tolerance`` times the value, so it is above the
    minimum by at most that. Each call starts from the dual variables of the last one, which changes the value by
    at most the tolerance. A warning says if the tolerance is not reached.

    Args:
        weights: which samples are pulled together: ``None``, all pairs with weight 1; ``"knn"``, nearest
            neighbours with Gaussian weights, searched for at the first call (or by :meth:`bind`), so that the
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

    convex = smooth = True

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
        super().__init__(reduction)
        if not 0 <= float(penalty) < math.inf:
            raise ObjectiveError(f"the penalty is a finite number ≥ 0, got {penalty!r}")
        if not 0 < float(tolerance) < 1:
            raise ObjectiveError(f"the tolerance is a number between 0 and 1, got {tolerance!r}")
        self.penalty, self.tolerance = float(penalty), float(tolerance)
        self.max_iterations = positive(max_iterations, "max_iterations")
        self._search: Callable[[Tensor], Edges] | None = None
        if isinstance(weights, str) and weights == "knn":
            count = positive(neighbours, "neighbours")
            self._search = partial(nearest_neighbours, neighbours=count, bandwidth=bandwidth)
        self._all_pairs = weights is None
        self.edges = _edges(weights)
        self._dual: Tensor | None = None

    def bind(self, points: Tensor) -> ConvexClustering:
        """Find the neighbours among these points, one per sample, instead of among the first outputs."""
        if self._search is None:
            raise ObjectiveError("the weights are fixed: only ConvexClustering('knn') looks for neighbours")
        self.edges, self._dual = self._search(points), None
        return self

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        super().check(outputs, targets)
        if self.edges is not None and not self._all_pairs and self.edges.count != outputs.shape[0]:
            raise ObjectiveError(
                f"the weights are for {self.edges.count} samples, the outputs have {outputs.shape[0]}: give the "
                "weights of this batch, or bind the neighbours of other points"
            )

    def solve(self, outputs: Tensor) -> ConvexClusteringResult:
        """The clusters of these outputs."""
        point = self.doubled(outputs)
        if self._all_pairs and (self.edges is None or self.edges.count != len(point)):
            self.edges = all_pairs(len(point), point.device)
        elif self.edges is None:
            assert self._search is not None
            self.edges = self._search(point)
        edges = self.edges = self.edges.to(point.device)
        if not len(edges) or self.penalty == 0:  # every sample is its own centroid
            labels, none = torch.arange(len(point), device=point.device), point.new_zeros((0, point.shape[1]))
            return ConvexClusteringResult(point, labels, none, 0.0, 0.0, 0.0, 0, 0.0, True)
        result = fuse(point, edges, self.penalty * edges.weights, self.tolerance, self.max_iterations, self._dual)
        self._dual = result.dual
        if not result.converged:
            warnings.warn(f"convex clustering: {result.status}", stacklevel=2)
        return result

    def nearest(self, outputs: Tensor) -> tuple[Tensor, float]:
        result = self.solve(outputs)
        return result.centroids, result.penalty

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        scale, count = super().suprema(shape, targets, 1.0)[0], shape[0]
        if self._all_pairs:
            steepest = count * math.sqrt((count - 1) / 2)
        elif self.edges is None:
            raise ObjectiveError(
                "the weights are unknown until ConvexClustering.bind(points) looks for neighbours"
            )
        elif not len(self.edges):
            steepest = 0.0
        else:
            edges, share = self.edges, 1 + (len(self.edges) + 8) * 2.0**-50  # the round-off of sums
            degrees = edges.degrees(edges.weights)
            ends = float((degrees[edges.first] + degrees[edges.second]).max())
            widest = min(count * float(edges.weights.max()), ends)
            root = math.sqrt(widest * float(edges.weights.sum()))
            steepest = min(float(torch.linalg.vector_norm(degrees)), root) * share
        return scale * min(radius, self.penalty * steepest), scale

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (f"penalty={self.penalty:g}", super().extra_repr())))


def _edges(weights: Any) -> Edges | None:
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

r"""Distances of the outputs from simple points: what clusterings share, k-means and spectral clustering.

With the outputs stacked into an n × d matrix :math:`\hat y` and :math:`s = 1/n` (a mean over the samples, as all
losses here) or :math:`s = 1` (the sum),

.. math:: h(\hat y) = s\,\min_z\ \tfrac12\|\hat y - z\|^2 + \Omega(z) .

* k-means: z has at most k different rows, :math:`\Omega = 0` there;
* spectral clustering: z has rank at most k (Eckart and Young, Psychometrika 1, 1936);
* convex clustering: :math:`\Omega(z) = \lambda\sum w_{ij}\|z_i - z_j\|`.

The paper sums, and has no ½ in the first two: its values are twice those of ``reduction="sum"``. With z a
minimiser at :math:`\hat y`:

* *gradient* (Danskin): :math:`s(\hat y - z)` wherever h is differentiable, a Clarke subgradient where the
  minimiser is not unique;
* *descent lemma*: with z fixed, the right-hand side is above h everywhere and equal to it at :math:`\hat y`, so
  :math:`h(\hat y + v) \le h(\hat y) + \langle s(\hat y - z), v\rangle + \frac s2\|v\|^2`, kinks or not: they all
  point upwards. So :math:`h(\psi(u))` is below the square loss with targets z, the *majoriser*, which is smooth:
  a step that is proved to decrease it by some amount decreases h by at least as much, even if the clusters
  change. If z is not quite the minimiser, then up to the gap by which it is not
  (:class:`~surefoot.clustering.ConvexClustering` proves it);
* *Lipschitz*: without a penalty h is :math:`\frac s2` times the squared distance from a set that contains zero,
  and a distance is at most the norm, so :math:`\|\nabla h\| \le s\|\hat y\|`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surefoot.errors import ObjectiveError
from surefoot.loading import optional
from surefoot.objectives import Objective, Square
from surefoot.objectives.loss import Shaped, shape_of

PACKAGES = "scikit-learn scipy"


class Clustering(Objective):
    """A clustering objective: a subclass has the nearest simple point and its penalty.

    Args:
        reduction: ``"mean"`` over the samples, or ``"sum"``.

    Raises:
        ObjectiveError: if the reduction is neither.

    >>> isinstance(sf.clustering.KMeans(2), sf.clustering.Clustering)
    True
    """

    takes_targets = False
    nonnegative = True
    smooth = False
    k: int | None = None  # the number of clusters, where it is an option

    def __init__(self, reduction: str) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ObjectiveError(f"the reduction is 'mean' or 'sum', got {reduction!r}")
        self.reduction = reduction

    def nearest(self, outputs: Tensor) -> tuple[Tensor, float]:
        """The simple point z nearest to these outputs, n × d in double precision, and its penalty Ω(z)."""
        raise NotImplementedError

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        name = type(self).__name__
        if len(outputs.shape) != 2 or not math.prod(outputs.shape) or not outputs.dtype.is_floating_point:
            raise ObjectiveError(
                f"{name} reads real outputs (samples × dimensions), got {shape_of(outputs)} of {outputs.dtype}; "
                "flatten each sample"
            )
        if self.k is not None and self.k > outputs.shape[0]:
            raise ObjectiveError(
                f"{self.k} clusters need at least {self.k} samples, got {outputs.shape[0]}: lower k, or take more "
                "samples"
            )

    def doubled(self, outputs: Tensor) -> Tensor:
        """The outputs in double precision; refuses those that cannot be clustered."""
        self.check(outputs, None)
        if type(outputs) not in (Tensor, torch.nn.Parameter) or outputs.device.type == "meta":
            raise ObjectiveError(
                f"{type(self).__name__} searches for clusters and cannot be read as a graph: certify its "
                "majoriser, surefoot.certify(model, x, objective.majoriser(model(x)))"
            )
        point = outputs.detach().to(torch.float64)
        if not bool(torch.isfinite(point.square().sum())):
            raise ObjectiveError(
                "the outputs have entries that are not finite, or too large to square, and cannot be clustered: "
                "look for a step that was too long, or an input that is not finite"
            )
        return point

    def bound_to(self, targets: Any) -> Self:
        """Itself, as there are no targets; refuses targets."""
        if targets is not None:
            raise ObjectiveError(f"{type(self).__name__} compares outputs with each other: it has no targets")
        return self

    def forward(self, outputs: Tensor, targets: Any = None) -> Tensor:
        self.bound_to(targets)
        point = self.doubled(outputs)
        nearest, penalty = self.nearest(point)
        value: Tensor = _Value.apply(outputs, point - nearest, penalty, self.scale(outputs))
        return value

    def scale(self, outputs: Shaped) -> float:
        """s."""
        return 1.0 / outputs.shape[0] if self.reduction == "mean" else 1.0

    def majoriser(self, outputs: Tensor) -> Square:
        r"""The square loss with the nearest point as targets, :math:`\frac s2\|\hat y - z\|^2`.

        Up to the constant :math:`s\,\Omega(z)` it is above h everywhere and equal to h at these outputs.
        """
        nearest, _ = self.nearest(self.doubled(outputs))
        return Square(nearest.to(outputs.dtype), reduction=self.reduction)

    def hessian_vector_product(self, outputs: Tensor, direction: Tensor, targets: Any = None) -> Tensor:
        raise ObjectiveError(f"{type(self).__name__} has kinks: take second-order steps on its majoriser(outputs)")

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        scale = self.scale(torch.empty(tuple(shape), device="meta"))
        return scale * radius, math.inf

    def extra_repr(self) -> str:
        clusters = [] if self.k is None else [f"k={self.k}"]
        return ", ".join(clusters + ([] if self.reduction == "mean" else [f"reduction={self.reduction!r}"]))


class _Value(torch.autograd.Function):
    """The value from the difference ŷ - z; its derivative is that of Danskin's theorem."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, difference: Tensor, penalty: float, scale: float) -> Tensor:
        ctx.save_for_backward((scale * difference).to(outputs.dtype))
        return (scale * (0.5 * difference.square().sum() + penalty)).to(outputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.saved_tensors[0], None, None, None


@dataclass(frozen=True)
class KMeansResult:
    """The best assignment that the runs reached, and its centres.

    Attributes:
        labels: the cluster of every sample.
        centres: k × d, the mean of every cluster; zero for a cluster without samples.
        inertia: the sum of squared distances from the centres, as scikit-learn counts it: twice the objective.
        iterations: number of iterations of Lloyd's method in the best run.

    >>> sf.clustering.KMeans(2).solve(torch.tensor([[0.0], [1.0], [10.0], [12.0]])).inertia
    2.5
    """

    labels: Tensor
    centres: Tensor
    inertia: float
    iterations: int


class KMeans(Clustering):
    r"""k-means of the outputs, :math:`\frac1{2n}\sum_i\|\hat y_i - c_{a(i)}\|^2` at its best assignment a
    (appendix "K-means clustering"):

    .. math:: h(\hat y) = s\min_P\tfrac12\mathrm{Tr}\big((I - P)\hat y\hat y^\top\big),

    P over the projections onto vectors that are constant on the clusters of an assignment. Not convex, and not
    smooth: where two assignments are equally good there is a kink (for k > 1); for k = 1, :math:`L = s`.

    The problem is hard, and the assignment is the best of several runs of Lloyd's method from k-means++
    (scikit-learn): the value is never below the minimum, and may be above it. With a fixed seed it depends on the
    outputs alone. With ``warm_start`` a call begins where the last one ended, which suits training.

    Args:
        k: number of clusters.
        seed: seed of the starts.
        restarts: number of runs.
        reduction: ``"mean"`` over the samples or ``"sum"``.
        warm_start: whether to begin where the last call ended.

    Raises:
        ObjectiveError: if k or restarts is not a positive whole number.

    >>> points = torch.tensor([[0.0], [1.0], [10.0], [12.0]])
    >>> float(sf.clustering.KMeans(2)(points))  # (¼ + ¼ + 1 + 1) / 8
    0.3125
    """

    k: int

    def __init__(
        self, k: int, *, seed: int = 0, restarts: int = 10, reduction: str = "mean", warm_start: bool = False
    ) -> None:
        super().__init__(reduction)
        self.k, self.seed = positive(k, "k, the number of clusters,"), seed
        self.restarts, self.warm_start = positive(restarts, "restarts"), warm_start
        self.convex = self.smooth = self.k == 1
        self._centres: Tensor | None = None

    def solve(self, outputs: Tensor) -> KMeansResult:
        """The clusters of these outputs."""
        point = self.doubled(outputs)
        start = self._centres if self.warm_start else None
        if start is not None and start.shape != (self.k, point.shape[1]):
            start = None
        labels, iterations = lloyd(point, self.k, self.seed, self.restarts, start)
        sizes = torch.bincount(labels, minlength=self.k).clamp_min(1)
        centres = point.new_zeros(self.k, point.shape[1]).index_add_(0, labels, point) / sizes[:, None]
        self._centres = centres
        return KMeansResult(labels, centres, float((point - centres[labels]).square().sum()), iterations)

    def nearest(self, outputs: Tensor) -> tuple[Tensor, float]:
        result = self.solve(outputs)
        return result.centres[result.labels], 0.0

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        scale = super().suprema(shape, targets, 1.0)[0]
        if self.k >= shape[0]:  # every sample is its own centre
            return 0.0, 0.0
        return scale * radius, scale if self.k == 1 else math.inf


@dataclass(frozen=True)
class SpectralResult:
    """Singular values and the clusters of the leading singular vectors.

    Attributes:
        labels: the cluster of every sample: k-means of the rows of the leading left singular vectors. vectors: n
        × k, the leading left singular vectors. singular_values: all of them, in decreasing order. gap: σ_k −
        σ_{k+1}. curvature: s max(1, σ_{k+1} / gap), the norm of the second derivative; infinite where the gap is
        zero within round-off: then the gradient is one of several Clarke subgradients.

    >>> sf.clustering.Spectral(1).solve(torch.diag(torch.tensor([3.0, 2.0, 1.0]))).gap
    1.0
    """

    labels: Tensor
    vectors: Tensor
    singular_values: Tensor
    gap: float
    curvature: float


class Spectral(Clustering):
    r"""Spectral clustering of the outputs (appendix "Spectral clustering"), a relaxation of k-means:

    .. math:: h(\hat y) = s\min_P\tfrac12\mathrm{Tr}\big((I - P)\hat y\hat y^\top\big)
        = \frac s2\sum_{i>k}\sigma_i^2(\hat y),

    P over all projections of rank k. (The paper prints the sum over the k smallest; ERRATA 9.) The gradient is
    :math:`s(\hat y - \sum_{i\le k}\sigma_iu_iv_i^\top)`. Not convex, and not smooth: where
    :math:`\sigma_k = \sigma_{k+1} > 0` there is a kink.

    *Second derivative.* In the bases of singular vectors, with :math:`H_{ij} = u_i^\top Hv_j`, perturbation theory
    (Lewis and Sendov, Nonsmooth analysis of singular values, Set-Valued Analysis 13, 2005) gives
    :math:`Dz[H]_{ij} = H_{ij}` for :math:`i, j \le k`, 0 for :math:`i, j > k`, and for :math:`i \le k < j`

    .. math:: Dz[H]_{ij} = \frac{\sigma_i^2H_{ij} + \sigma_i\sigma_jH_{ji}}{\sigma_i^2 - \sigma_j^2}, \qquad
        Dz[H]_{ji} = \frac{\sigma_i\sigma_jH_{ij} + \sigma_i^2H_{ji}}{\sigma_i^2 - \sigma_j^2} .

    So :math:`I - Dz` has on the pair (ij, ji) the eigenvalues :math:`\mp\sigma_j/(\sigma_i \mp \sigma_j)`,
    elsewhere 0 and 1, and :math:`\|\nabla^2h\| = s\max(1, \sigma_{k+1}/(\sigma_k - \sigma_{k+1}))`: unbounded
    near ties.

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

    k: int

    def __init__(self, k: int, *, seed: int = 0, restarts: int = 10, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.k, self.seed = positive(k, "k, the number of clusters,"), seed
        self.restarts = positive(restarts, "restarts")

    def nearest(self, outputs: Tensor) -> tuple[Tensor, float]:
        # The eigenvalues of a Gram matrix would give the small singular values with an error of √u σ_1, not u σ_1.
        u, values, vh = torch.linalg.svd(outputs, full_matrices=False)
        k = min(self.k, len(values))
        return (outputs if k == len(values) else (u[:, :k] * values[:k]) @ vh[:k]), 0.0

    def solve(self, outputs: Tensor) -> SpectralResult:
        """Singular values, and labels by k-means of the leading singular vectors."""
        point = self.doubled(outputs)
        u, values, _ = torch.linalg.svd(point, full_matrices=False)
        largest, last = float(values[0]), float(values[min(self.k, len(values)) - 1])
        cut = float(values[self.k]) if self.k < len(values) else 0.0
        gap = last - cut
        tie = cut > 0 and gap <= sum(point.shape) * 2.0**-50 * largest
        curvature = math.inf if tie else 0.0 if self.k >= len(values) else max(1.0, cut / gap if gap else 0.0)
        labels, _ = lloyd(u[:, : self.k], self.k, self.seed, self.restarts)
        return SpectralResult(labels, u[:, : self.k], values, gap, curvature * self.scale(point))

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        return (0.0, 0.0) if self.k >= min(shape) else super().suprema(shape, targets, radius)


def lloyd(points: Tensor, k: int, seed: int, restarts: int, start: Tensor | None = None) -> tuple[Tensor, int]:
    """Labels by scikit-learn's k-means, run until no label changes, and how many iterations the best run took."""
    library = optional("sklearn.cluster", PACKAGES, "k-means", ObjectiveError)
    exceptions = optional("sklearn.exceptions", PACKAGES, "k-means", ObjectiveError)
    solver = library.KMeans(
        n_clusters=k,
        init="k-means++" if start is None else start.cpu().numpy(),
        n_init=restarts if start is None else 1,
        max_iter=1000,
        tol=0.0,
        random_state=seed,
    )
    with warnings.catch_warnings():
        # fewer distinct points than clusters: the value is zero
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        solver.fit(points.detach().cpu().numpy())
    return torch.as_tensor(solver.labels_, dtype=torch.long, device=points.device), int(solver.n_iter_)


def positive(number: Any, name: str) -> int:
    """A positive whole number; refuses anything else."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ObjectiveError(f"{name} is a whole number of at least 1, got {number!r}")
    return number

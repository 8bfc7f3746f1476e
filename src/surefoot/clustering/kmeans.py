r"""k-means: the distance from outputs in k places (appendix "K-means clustering").

.. math:: h(\hat y) = s\min_{a, c}\tfrac12\sum_i\|\hat y_i - c_{a(i)}\|^2
    = s\min_P\tfrac12\mathrm{Tr}\big((I - P)\hat y\hat y^\top\big),

P over the projections onto vectors that are constant on the clusters of an assignment. The paper has no ½ and
sums: its value is twice that of ``reduction="sum"``.

*What is proved.* Constants are those of h, the minimum over all assignments. The best assignment is hard to find,
and nothing proves that Lloyd's method has found it: values (of :func:`surefoot.evaluate`, and the decreases that
optimizers promise) are those of the assignment that was found, and h is at most that.

*Accuracy.* A mean z of :math:`n_c` numbers is off by :math:`(n_c + 1)u` times the mean of their absolute values,
so by Cauchy-Schwarz all of z is within :math:`\epsilon = 2(n + 2)u\|\hat y\|` of :math:`P\hat y`. As z is constant
on the clusters, :math:`\|\hat y - z\|^2 = \|\hat y - P\hat y\|^2 + \|P\hat y - z\|^2`, and the value is off by
:math:`\frac12\epsilon^2`. For k = 1 there is one assignment, and z is within :math:`\epsilon` of the solution.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.clustering.envelope import UNIT, Accuracy, Envelope, Nearest, Over, Proximity, clustering, zero
from surefoot.loading import optional
from surefoot.magnitude import Magnitude
from surefoot.objectives.constants import ObjectiveError
from surefoot.operations.call import Bounds, Call
from surefoot.operations.common import ONE

PACKAGES = "scikit-learn scipy"

_KINK = (
    "k-means has a kink where two assignments are equally good: take steps on KMeans.majoriser(outputs), a square "
    "loss above it, or use ConvexClustering"
)


@dataclass(frozen=True)
class KMeansResult:
    """The best assignment that the runs reached, and its centres.

    Attributes:
        labels: the cluster of every sample.
        centres: k × d, the mean of every cluster; zero for a cluster without samples.
        inertia: the sum of squared distances from the centres, as scikit-learn counts it: twice the objective.
        iterations: number of iterations of Lloyd's method in the best run.
        status: how the assignment was found, and what is known about it.

    >>> sf.clustering.KMeans(2).solve(torch.tensor([[0.0], [1.0], [10.0], [12.0]])).inertia
    2.5
    """

    labels: Tensor
    centres: Tensor
    inertia: float
    iterations: int
    status: str


class KMeans(Envelope[KMeansResult]):
    r"""k-means of the outputs: :math:`\frac1{2n}\sum_i\|\hat y_i - c_{a(i)}\|^2`, at its best.

    The gradient holds the assignment: :math:`\frac1n(\hat y_i - \text{mean of its cluster})`. Not convex, and not
    smooth: where two assignments are equally good there is a kink (for k > 1), of which the gradient is a Clarke
    subgradient. The descent lemma holds nevertheless, with 1/n (:mod:`~surefoot.clustering.envelope`).

    The problem is hard, and the assignment is the best of several runs of Lloyd's method from k-means++
    (scikit-learn): the value is never below the minimum, and may be above it. With a fixed seed it depends on the
    outputs alone. With ``warm_start`` it also depends on earlier calls: the first call takes the best of all runs,
    every later one makes a single run from the centres of the last, which suits training, until :meth:`forget`.

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

    operation = "surefoot.kmeans"
    k: int

    def __init__(
        self, k: int, *, seed: int = 0, restarts: int = 10, reduction: str = "mean", warm_start: bool = False
    ) -> None:
        count = positive(k, "k, the number of clusters,")
        super().__init__(Partition(count, seed, positive(restarts, "restarts"), warm_start), reduction)
        self.k = count
        self.convex = self.smooth = count == 1


class Partition(Proximity[KMeansResult]):
    """The nearest matrix with at most k different rows, as far as Lloyd's method finds it."""

    def __init__(self, k: int, seed: int, restarts: int, warm_start: bool) -> None:
        super().__init__()
        self.k, self.seed, self.restarts, self.warm_start = k, seed, restarts, warm_start
        self._centres: Tensor | None = None

    def nearest(self, outputs: Tensor) -> Nearest[KMeansResult]:
        """Run Lloyd's method from several starts, or from the last centres."""
        warm = self._centres if self.warm_start else None
        if warm is not None and warm.shape != (self.k, outputs.shape[1]):
            warm = None
        labels, iterations = lloyd(outputs, self.k, self.seed, self.restarts, warm)
        sizes = torch.bincount(labels, minlength=self.k).clamp_min(1)

        def means(values: Tensor) -> Tensor:
            """The mean of the rows of every cluster, for one matrix or several."""
            total = values.new_zeros(*values.shape[:-2], self.k, values.shape[-1])
            return total.index_add_(-2, labels, values) / sizes[:, None]

        centres = means(outputs)
        point = centres[labels]
        self._centres = centres if self.warm_start else None
        started = "the last centres" if warm is not None else f"{self.restarts} starts of k-means++"
        result = KMeansResult(
            labels,
            centres,
            float((outputs - point).square().sum()),
            iterations,
            f"Lloyd's method from {started}: no reassignment of one sample to a nearer centre is left; "
            "nothing is known about other assignments",
        )
        off = float(torch.linalg.vector_norm(outputs)) * (len(outputs) + 2) * UNIT
        accuracy = Accuracy(off * off + 2.0**-1022, off + 2.0**-1022 if self.k == 1 else None)
        return Nearest(point, 0.0, lambda v: means(v)[..., labels, :], lambda: accuracy, result)

    def forget(self) -> None:
        """Drop the last centres."""
        super().forget()
        self._centres = None


def lloyd(points: Tensor, k: int, seed: int, restarts: int, start: Tensor | None = None) -> tuple[Tensor, int]:
    """Labels by scikit-learn's k-means, run until no label changes, and how many iterations the best run took."""
    library = optional("sklearn.cluster", PACKAGES, "k-means", ObjectiveError)
    exceptions = optional("sklearn.exceptions", PACKAGES, "k-means", ObjectiveError)
    values = points.detach().cpu().numpy()
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
        solver.fit(values)
    return torch.as_tensor(solver.labels_, dtype=torch.long, device=points.device), int(solver.n_iter_)


def positive(number: Any, name: str) -> int:
    """A positive whole number; refuses anything else."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ObjectiveError(f"{name} is a whole number of at least 1, got {number!r}")
    return number


@clustering("surefoot.kmeans")
def kmeans_bounds(call: Call) -> Bounds:
    r"""k-means: the slope is the distance times s.

    The curvature is that of one assignment, s, for k = 1 (:math:`h = \frac s2\|(I - \frac1n11^\top)\hat y\|^2`),
    zero for k = n (h = 0), and otherwise infinite: which assignment is the best cannot be followed over a domain.
    """
    k: int = call["proximity"].k
    if k >= call["outputs"].shape[0]:
        return zero(call)
    return Over(call).half_square(ONE if k == 1 else Magnitude.infinity(), _KINK)

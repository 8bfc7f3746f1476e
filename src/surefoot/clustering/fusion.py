r"""The solver of convex clustering: accelerated dual ascent, finished by Newton's method on the clusters.

With :math:`c_e = \lambda w_e` and B the differences along edges, primal and dual are

.. math:: P(z) = \tfrac12\|z - \hat y\|^2 + \sum_ec_e\|(Bz)_e\|, \qquad
    D(\zeta) = \langle\zeta, B\hat y\rangle - \tfrac12\|B^\top\zeta\|^2 \quad\text{for } \|\zeta_e\| \le c_e,

and with :math:`r = z - (\hat y - B^\top\zeta)` the gap is a sum of terms that are not negative:

.. math:: P(z) - D(\zeta) = \sum_e\big(c_e\|(Bz)_e\| - \langle\zeta_e, (Bz)_e\rangle\big) + \tfrac12\|r\|^2 .

*A gap proves accuracy.* :math:`D(\zeta) \le \min P \le P(z)`, so the value is off by at most the gap; P is
1-strongly convex, so :math:`\frac12\|z - z^*\|^2 \le P(z) - \min P` and the gradient :math:`\hat y - z` is off by
at most :math:`\sqrt{2\,\text{gap}}`. If moreover :math:`\zeta_e = c_e(Bz)_e/\|(Bz)_e\|` wherever :math:`(Bz)_e \ne
0`, then z is the exact solution for the outputs :math:`z + B^\top\zeta = \hat y + r`, and as solutions move no
more than outputs do, z and the gradient are off by at most :math:`\|r\|`.

*Round-off* (:meth:`_Ascent._weighed`). A dual variable is outside its ball by at most a relative (d + 4)u, and
stands for the variable shrunk by that. A term of the gap is off by (2d + 8)u of :math:`c_e\|(Bz)_e\|`, the sum of
E terms by :math:`\log_2E + 1` more; r is off by (b + d + 16)u of the norms of its parts, b the largest number of
edges at a node, with sums of norms in place of norms of sums; and moving the outputs to their mean and back costs
8u of their norm and 2u of that of z.

*Ascent.* :math:`\|B^\top\zeta\|^2 = \sum_i\|\sum_{e\ni i}\pm\zeta_e\|^2 \le \sum_id_i\sum_{e\ni i}\|\zeta_e\|^2 =
\sum_e(d_i + d_j)\|\zeta_e\|^2` with the degrees d, so steps of :math:`1/(d_i + d_j)` on edge (i, j) ascend, and
the projection onto balls is edge by edge. Accelerated (Beck and Teboulle, SIAM J. Imaging Sci. 2, 2009) with
restarts where the last step points against the momentum (O'Donoghue and Candès, Found. Comput. Math. 15, 2015).

*Finish.* An edge is guessed to be fused if its ball contains :math:`\zeta_e + \tau_e(Bz)_e`. With these edges
fused, the centres of the components come from Newton's method (:mod:`~surefoot.clustering.reduced`), the dual
variables of edges between components from their directions, and those inside are corrected so that
:math:`B^\top\zeta = \hat y - z`, by a flow through the edges with room. The gap of the pair shows whether the
guess was right; a pair whose gap is not smaller is dropped. Attempts become rarer by powers of two, and none costs
more than the ascent before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.clustering.reduced import Reduced, conjugate
from surefoot.clustering.weights import Incidence, components

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
        gradient_error: a bound on the distance from :math:`\hat y - z` to the exact gradient of the sum:
            :math:`\sqrt{2\,\text{gap}}`, or less.
        iterations: number of iterations of the accelerated ascent.
        penalty: :math:`\lambda\sum w\|z_i - z_j\|`.
        floor: the part of the gap that is round-off.
        tolerance: the required gap, relative to the value.
        polished: whether Newton's method finished it.

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
    floor: float
    tolerance: float
    polished: bool = False

    @property
    def converged(self) -> bool:
        """Whether the gap is within the tolerance, or as small as round-off lets it be."""
        return self.gap <= max(self.tolerance * self.value, 1.5 * self.floor)

    @property
    def status(self) -> str:
        """The result in words."""
        if not len(self.dual):
            return "nothing pulls the samples together"
        relative = self.gap / self.value if self.value > 0 else 0.0
        how = f"{self.iterations} iterations" + (", finished by Newton's method" if self.polished else "")
        status = f"{int(self.labels.max()) + 1} clusters; relative duality gap {relative:.1e} after {how}"
        if not self.converged:
            return f"{status}, above the tolerance of {self.tolerance:g}: raise max_iterations or the tolerance"
        above = self.gap > self.tolerance * self.value
        return f"{status}, above the tolerance of {self.tolerance:g} by round-off alone" if above else status


def fuse(
    outputs: Tensor,
    incidence: Incidence,
    amounts: Tensor,
    tolerance: float,
    max_iterations: int,
    start: Tensor | None = None,
) -> ConvexClusteringResult:
    """Solve to a gap of ``tolerance`` times the value, or as far as ``max_iterations`` iterations lead.

    The outputs are n × d in double precision, the amounts c > 0, one per edge; ``start`` are dual variables to
    begin with.
    """
    centre = outputs.mean(dim=0)  # moving all outputs together does not change the problem, but lessens round-off
    shifted, far = outputs - centre, float(torch.linalg.vector_norm(outputs))
    start = start if bool(shifted.any()) else None  # if all outputs are equal, zero is the exact solution
    result = _Ascent(shifted, incidence, amounts, start, far, tolerance).run(max_iterations)
    return replace(result, centroids=result.centroids + centre)


def _total(numbers: Tensor) -> float:
    """The sum of n numbers that are not negative, by halves: its relative error is at most (log₂n + 1)u."""
    flat = numbers.reshape(-1)
    while len(flat) > 1:
        half = len(flat) // 2
        flat = torch.cat([flat[:half] + flat[half : 2 * half], flat[2 * half :]])
    return float(flat.sum())


class _Ascent:
    """The state of the ascent, in buffers that are overwritten.

    The mean of the outputs has been subtracted; ``far`` is their norm before, for the round-off of the
    subtraction.
    """

    def __init__(
        self,
        outputs: Tensor,
        incidence: Incidence,
        amounts: Tensor,
        start: Tensor | None,
        far: float,
        tolerance: float,
    ) -> None:
        self.outputs, self.incidence, self.amounts, self.tolerance = outputs, incidence, amounts, tolerance
        self.moved = 4 * _UNIT * far
        degrees = incidence.degrees(torch.ones_like(amounts))
        self.inverse = degrees[incidence.first] + degrees[incidence.second]
        self.steps = (1.0 / self.inverse)[:, None]
        self.busiest = float(degrees.max())
        shape = (len(incidence), outputs.shape[1])
        self.dual = outputs.new_zeros(shape)
        if start is not None and start.shape == shape:
            self.dual.copy_(start)
        self.lengths = outputs.new_empty(len(incidence))
        self._project(self.dual)
        self.point = self.dual.clone()
        self.next, self.move = torch.empty_like(self.dual), torch.empty_like(self.dual)
        self.nodes = torch.empty_like(outputs)

    def run(self, limit: int) -> ConvexClusteringResult:
        """Iterate; check the gap now and then, and try to finish ever less often."""
        best = self._present(0)
        momentum, attempt = 1.0, 2 * _CHECK
        for iteration in range(1, limit + 1):
            if best.converged:
                break
            momentum = self._step(momentum)
            if iteration % _CHECK and iteration != limit:
                continue
            best = self._present(iteration)
            if iteration >= attempt and not best.converged:
                attempt = 2 * iteration
                better = self._finished(best)
                if better.converged:
                    return better
        return self._finished(best)

    def _step(self, momentum: float) -> float:
        """One projected step from the extrapolated point; returns the next momentum."""
        self._primal(self.point)
        torch.mul(self.incidence.differences(self.nodes, out=self.next), self.steps, out=self.next)
        self._project(self.next.add_(self.point))
        torch.sub(self.next, self.dual, out=self.move)
        against = self.dual  # the old dual is not needed any more: its buffer becomes scratch, then the next one
        torch.sub(self.point, self.next, out=self.point).mul_(self.move)
        turned = float(torch.mv(self.point.mT, self.inverse).sum()) > 0
        momentum = 1.0 if turned else momentum
        following = 0.5 + math.sqrt(0.25 + momentum * momentum)
        torch.add(self.next, self.move, alpha=(momentum - 1) / following, out=self.point)
        self.dual, self.next = self.next, against
        return following

    def _project(self, dual: Tensor) -> Tensor:
        torch.linalg.vector_norm(dual, dim=1, out=self.lengths)
        shrink = (self.amounts / self.lengths).clamp_(max=1.0)  # 0/0 cannot occur: amounts are positive
        return dual.mul_(shrink[:, None])

    def _primal(self, dual: Tensor) -> Tensor:
        self.incidence.sums(dual, out=self.nodes)
        return torch.sub(self.outputs, self.nodes, out=self.nodes)

    def _present(self, iteration: int) -> ConvexClusteringResult:
        """The present pair, before its components are looked for."""
        return self._weighed(self._primal(self.dual).clone(), self.dual, iteration)

    def _finished(self, present: ConvexClusteringResult) -> ConvexClusteringResult:
        """Newton's method on the components that the present point suggests, with a dual point to match."""
        budget = max(_CHECK, present.iterations // 2)
        gaps = self.incidence.differences(present.centroids)
        reach = torch.linalg.vector_norm(present.dual + self.steps * gaps, dim=1)
        fused = reach <= self.amounts * (1 + 1e-12)
        first, second = self.incidence.first, self.incidence.second
        labels = components(first[fused], second[fused], self.incidence.count)
        reduced = Reduced(labels, first, second, self.amounts)
        centroids = reduced.minimise(self.outputs, present.centroids, budget)[labels]
        gaps = self.incidence.differences(centroids)
        lengths = torch.linalg.vector_norm(gaps, dim=1)
        across = labels[first] != labels[second]
        pull = gaps * (self.amounts / lengths)[:, None]
        dual = torch.where((across & (lengths > 0))[:, None], pull, present.dual)
        dual = self._corrected(dual, centroids, ~across, budget)
        polished = self._weighed(centroids, dual, present.iterations, labels, polished=True)
        nearer = polished.gradient_error < present.gradient_error and polished.converged
        if nearer or polished.gap < present.gap:
            return polished
        return replace(present, dual=present.dual.clone(), labels=labels)

    def _corrected(self, dual: Tensor, centroids: Tensor, inside: Tensor, budget: int) -> Tensor:
        """Dual variables with the right sums at the nodes, changed on inside edges in proportion to their room."""
        missing = self.outputs - centroids - self.incidence.sums(dual)
        room = (self.amounts - torch.linalg.vector_norm(dual, dim=1)).clamp_min(0.0) * inside
        diagonal = self.incidence.degrees(room)[:, None, None]
        diagonal = torch.where(diagonal > 0, diagonal, 1.0)
        scratch = torch.empty_like(dual)

        def laplacian(values: Tensor) -> Tensor:
            gaps = self.incidence.differences(values[:, 0], out=scratch)
            return self.incidence.sums(gaps.mul_(room[:, None]))[:, None]

        potential, _ = conjugate(laplacian, missing[:, None], diagonal, 1e-12, budget)
        flow = self.incidence.differences(potential[:, 0]).mul_(room[:, None])
        return self._project(dual + flow)

    def _weighed(
        self, centroids: Tensor, dual: Tensor, iteration: int, labels: Tensor | None = None, polished: bool = False
    ) -> ConvexClusteringResult:
        """Value and gap of a pair, including the round-off of the gap."""
        gaps = self.incidence.differences(centroids, out=self.move)
        lengths = torch.linalg.vector_norm(gaps, dim=1)
        pulls = self.amounts * lengths
        terms = (pulls - torch.mul(gaps, dual, out=self.next).sum(dim=1)).clamp_min(0.0)
        sums = self.incidence.sums(dual)
        rest = centroids - self.outputs + sums
        penalty = _total(pulls)
        value = 0.5 * _total((centroids - self.outputs).square()) + penalty
        sizes = torch.linalg.vector_norm(centroids, dim=1)
        apart = self.amounts * (lengths > 0)  # equal numbers have a difference without round-off
        ends = float((apart * (sizes[self.incidence.first] + sizes[self.incidence.second])).sum())
        share = 8 * (centroids.shape[1] + math.log2(len(self.incidence) + 2) + 8)
        outward = float(torch.linalg.vector_norm(sums)) * float(torch.linalg.vector_norm(self.outputs))
        round_off = _UNIT * (share * (penalty + value) + 4 * ends + 4 * outward)
        moved = self.moved + _UNIT * float(torch.linalg.vector_norm(centroids))
        round_off += moved * (float(torch.linalg.vector_norm(self.outputs - centroids)) + moved)
        weights = self.incidence.degrees(torch.linalg.vector_norm(dual, dim=1))
        sizes = sum(float(torch.linalg.vector_norm(part)) for part in (weights, self.outputs, centroids))
        slack = (self.busiest + centroids.shape[1] + 16) * _UNIT * sizes
        left = float(torch.linalg.vector_norm(rest)) * (1 + 1e-9) + slack
        gap = _total(terms) + 0.5 * left * left + round_off
        labels = torch.arange(len(centroids), device=centroids.device) if labels is None else labels
        off = math.sqrt(2 * gap)
        off = (min(off, left) if polished else off) + moved
        return ConvexClusteringResult(
            centroids, labels, dual, value, gap, gradient_error=off, iterations=iteration, penalty=penalty,
            floor=round_off, tolerance=self.tolerance, polished=polished,
        )  # fmt: skip

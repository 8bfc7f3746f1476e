r"""Strongly convex neighbourhoods: bounds of the Hessian on balls, and whether the theorem applies there.

:math:`F = h\circ\psi + R` with a convex loss h and a ridge R with weights between :math:`\lambda` and
:math:`\Lambda`, so :math:`\nabla^2F = D\psi^\top\nabla^2h\,D\psi + \langle\nabla h, D^2\psi\rangle + \nabla^2R`.
On :math:`B(u_0, \rho)` let :math:`D^2\psi` be at most K, so that :math:`\|D\psi - J\| \le \tau = K\rho`, and
:math:`\|D\psi\| \le S = \|J\| + \tau`; let :math:`\nabla^2h` be at most C and have the Lipschitz constant c, and
:math:`g = \nabla h` at the weights, which moves by at most :math:`CS\rho`. With :math:`P_0` a bound on
:math:`\langle g, D^2\psi\rangle` on the ball (that of the adjoint pass of this scalar function, or
:math:`\|g\|K`) and :math:`V_0` on how far it moves there, the three parts of the Hessian

* move by at most :math:`C(S + \|J\|)\tau + cS\rho\|J\|^2` (as :math:`D^\top\nabla^2h\,D - J^\top\nabla^2h_0J =
  D^\top\nabla^2h\,D - J^\top\nabla^2h\,J + J^\top(\nabla^2h - \nabla^2h_0)J`), by :math:`V_0 + CS\rho K`, and not
  at all; the sum of these is V;
* are between 0 and :math:`CS^2`, between :math:`\pm P`, :math:`P = P_0 + CS\rho K`, and between
  :math:`\lambda` and :math:`\Lambda`.

So on the ball :math:`\lambda_{\min}(\nabla^2F)` is at least

1. :math:`\lambda_{\min}(\nabla^2F(u_0)) - V`, where the Hessian is written out; V may be how far it moves by
   :class:`~surefoot.theorems.hessian.Written` instead, and is for networks that are not one layer after the other;
2. :math:`\lambda_{\min}(J^\top\nabla^2h_0J + \nabla^2R)`, minus how far the first part moves, minus P, for other
   networks whose Jacobian is written out;
3. :math:`\lambda - P`, at any size; for two layers P may be what the second part is at the weights
   (:func:`~surefoot.theorems.hessian.lowest_bend`) plus how far it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from surefoot.calculus.adjoint.bounds import scalar_bounds
from surefoot.calculus.analysis import Analysis
from surefoot.domains import Ball
from surefoot.norms import frobenius_norm, nonnegative_norm
from surefoot.norms.hermitian import up
from surefoot.norms.verified import largest_eigenvalue, norm_of, product, smallest_eigenvalue, solution
from surefoot.scalar import Rounded
from surefoot.theorems.hessian import LossDerivatives, Written, loss_derivatives, lowest_bend
from surefoot.theorems.linear import Rows, along
from surefoot.theorems.problem import Problem, refused
from surefoot.theorems.record import Convergence, Hypothesis
from surefoot.theorems.statements import StronglyConvex

DENSE = 5000  # parameters of a matrix that is written out
_FACTORS = (1.02, 1.2, 1.6, 2.5)
_CONVEX = "strongly convex neighbourhood"
_GLOBAL = (
    "The network is affine in what is trained, so that the objective is convex in it: the minimum is the least "
    "over all values of these parameters, with the others as they are."
)


@dataclass(frozen=True)
class _Curvature:
    """Bounds of the Hessian on a ball: from below, from above, and how far it is from that at the weights."""

    low: float
    high: float
    variation: float


@dataclass(frozen=True)
class _Way:
    """One of the three bounds.

    Attributes:
        start: at the weights.
        meaning: of that number.
        lost: what is lost on a ball, in words.
        on: the bounds on a ball.
        newton: bounds on the length η and the decrease δ of the Newton step at the weights.
    """

    start: float
    meaning: str
    lost: str
    on: Callable[[float], _Curvature]
    newton: tuple[float, float] = (math.inf, math.inf)


class _Parts:
    """The three parts of the Hessian."""

    def __init__(self, problem: Problem, outer: LossDerivatives) -> None:
        self.problem, self.outer = problem, outer
        named, ridge = problem.whole.reading.graph.parameters, problem.regularizer
        weights = [0.0 if ridge is None else ridge.weight_of(leaf.path) for leaf in named if leaf.trainable]
        self.least, self.most = min(weights), max(weights)
        gradient = outer.gradient.expand(outer.gradient.value.shape)
        self.wrong = frobenius_norm(gradient.error)
        self.slope = up(frobenius_norm(gradient.value) + self.wrong)

    @cached_property
    def norm(self) -> float:
        """An upper bound on the norm of J."""
        return up(math.sqrt(largest_eigenvalue(self.problem.gram)))

    @cached_property
    def _weighted(self) -> Analysis:
        network = self.problem.network
        outputs = network.centre[network.reading.graph.outputs[0]]
        return along(network, self.outer.gradient.value.detach().reshape(outputs.shape))

    def bent(self, radius: float) -> tuple[float, float]:
        """:math:`P_0` and :math:`V_0`."""
        bend = self.problem.bending(radius)
        most, moved = self.slope * bend.constant, self.slope * min(bend.variation, 2 * bend.constant)
        found = scalar_bounds(self._weighted.over(Ball(radius)))
        if found is not None:
            extra = self.wrong * bend.constant
            most = min(most, float(nonnegative_norm(found.matrix)) + extra)
            moved = min(moved, _variation(self._weighted, radius) + 2 * extra)
        return up(most), up(min(moved, 2 * most))

    def on(self, radius: float) -> tuple[float, float, float, float]:
        """:math:`S`, P, and how far the first and the second part move."""
        bend = self.problem.bending(radius).constant
        turned = up(bend * radius)
        steep = up(self.norm + turned)
        moved = up(self.outer.smoothness * steep * radius * bend, 8)
        most, change = self.bent(radius) if math.isfinite(bend) else (math.inf, math.inf)
        first = self.outer.smoothness * (steep + self.norm) * turned
        first += self.outer.variation * steep * radius * self.norm**2
        return steep, up(most + moved), up(first, 16), up(change + moved)

    @cached_property
    def _bent(self) -> float:
        """How negative the second part is at the weights, where that is known exactly."""
        return -lowest_bend(self.problem.layered, self.outer) if self.problem.layered else math.inf

    def ridge(self) -> _Way:
        """:math:`\\lambda - P`."""
        meaning, lost = "the weight of the ridge", "how negative the rest of the Hessian may be"
        return self._way(self.least, meaning, lost, lambda bent, _, second: min(bent, up(self._bent + second)))

    def gauss_newton(self, rows: Rows) -> _Way:
        """:math:`J^\\top\\nabla^2h_0J + \\nabla^2R`, written out."""
        matrix = _gauss_newton(self.problem, rows, self.outer)
        lowest = smallest_eigenvalue(matrix)
        meaning, lost = "the smallest eigenvalue of the Gauss-Newton matrix", "how far the Hessian is from it"
        way = self._way(lowest, meaning, lost, lambda bent, first, _: up(first + bent))
        if self.problem.affine is None:
            return way
        step = self._newton(list(rows.slopes), matrix.value, norm_of(matrix.error), lowest)
        return replace(way, meaning="the smallest eigenvalue of the Hessian", newton=step)

    def _newton(self, paths: list[str], matrix: Tensor, apart: float, lowest: float) -> tuple[float, float]:
        """What the Newton step says, the Hessian being within a distance of a matrix in this order."""
        slopes = self.problem.slopes
        gradient = torch.cat([slopes[path][0].reshape(-1) for path in paths])
        return solution(matrix, apart, gradient, up(math.hypot(*(slopes[path][1] for path in paths))), lowest)

    def _way(self, start: float, meaning: str, lost: str, loss: Callable[[float, float, float], float]) -> _Way:
        """With what is lost by P and how far the first and the second part move."""

        def on(radius: float) -> _Curvature:
            steep, bent, first, second = self.on(radius)
            high = up(self.outer.smoothness * steep**2 + bent + self.most, 8)
            return _Curvature(_less(start, loss(bent, first, second)), high, up(first + second))

        return _Way(start, meaning, lost, on)

    def dense(self) -> _Way | None:
        """The Hessian, written out; ``None`` if an operation has no second derivative with a proved error."""
        problem, ridge = self.problem, self.problem.regularizer
        written = Written.of(problem.whole)
        if written is None:
            return None
        diagonal = [0.0 if ridge is None else ridge.weight_of(path) for path in written.order]
        matrix = Rounded.exact(written.value) + torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        lowest = smallest_eigenvalue(matrix)
        highest = largest_eigenvalue(matrix) if lowest > 0 else math.inf
        wrong = written.apart(0.0)

        def on(radius: float) -> _Curvature:
            moved = written.apart(radius)
            if problem.layered is not None:
                moved = min(moved, up(sum(self.on(radius)[2:]) + wrong))
            return _Curvature(_less(lowest, moved), up(highest + moved), up(moved + wrong))

        start = _less(lowest, wrong)
        paths = list(dict.fromkeys(written.order))
        step = self._newton(paths, matrix.value, up(wrong + norm_of(matrix.error)), start)
        return _Way(start, "the smallest eigenvalue of the Hessian", "how far the Hessian moves", on, step)


def _less(value: float, loss: float) -> float:
    """A difference, rounded down."""
    left = value - loss
    return math.nextafter(left - abs(left) * 2.0**-50, -math.inf) if math.isfinite(left) else -math.inf


def _ways(problem: Problem, outer: LossDerivatives) -> Iterator[_Way]:
    parts = _Parts(problem, outer)
    if problem.affine is not None:
        yield parts.gauss_newton(problem.affine.rows)
    if problem.parameters <= DENSE:
        dense = parts.dense()
        if dense is not None:
            yield dense
        elif isinstance(problem.jacobian, Rows):
            yield parts.gauss_newton(problem.jacobian)
    if parts.least > 0:
        yield parts.ridge()


def strongly_convex(problem: Problem, method: str) -> Convergence:
    """Whether the weights are in the neighbourhood of a strict minimum."""
    newton = method == "newton"
    outer = loss_derivatives(problem.objective, problem.predictions)
    if outer is None:
        name = type(problem.objective).__name__
        return refused(
            problem, method, _CONVEX, f"The Hessian of {name} is not verified: use Square or CrossEntropy."
        )
    slope = problem.gradient()[1]
    tried: list[Convergence] = []
    for way in _ways(problem, outer):
        verdict = _tried(method, way, slope, newton)
        if verdict.proved:
            return verdict if problem.affine is None else replace(verdict, advice=(_GLOBAL,))
        tried.append(verdict)
    if not tried:
        return refused(
            problem, method, _CONVEX,
            f"The Hessian has {problem.parameters} rows; up to {DENSE} are written out and verified, and beyond "
            "that a ridge on all parameters is needed.",
        )  # fmt: skip
    return replace(min(tried, key=lambda verdict: verdict.missing), nothing=problem.nothing())


def _tried(method: str, way: _Way, slope: float, newton: bool) -> Convergence:
    """The theorem by one of the bounds."""
    lowest = way.on(0.0).low

    def at(radius: float) -> StronglyConvex:
        found = way.on(radius)
        return StronglyConvex(
            found.low, found.high, found.variation, slope, radius, newton, way.start, *way.newton
        )

    least = 2 * min(slope / lowest, way.newton[0]) if lowest > 0 else math.inf
    if not 0 < least < math.inf:
        least = 1e-300 if lowest > 0 and slope == 0 else math.inf
    if not math.isfinite(least):
        level = f", its eigenvalues are proved to be above {lowest:.3g} only" if lowest > -math.inf else ""
        why = (
            f"The Hessian is not proved to be positive definite{level}: go on until the weights are near a strict "
            "minimum, or add a ridge."
        )
        return Convergence(
            method, _CONVEX, False,
            (Hypothesis("m₀", way.meaning, way.start, "> 0", way.start > 0, True),
             Hypothesis("‖∇F‖", "the gradient", slope)),
            math.inf, (why,),
        )  # fmt: skip
    first = min(2 * slope / way.start, least) if way.start > 0 else least
    candidates = [at(radius * factor) for radius in dict.fromkeys((first, least)) for factor in _FACTORS if radius]
    good = [statement for statement in candidates if statement.holds]
    best = good[0] if good else min(candidates, key=_lacking)
    missing = 1.0 if good else _least_factor(lambda r: _lacking_at(at(r)), least)
    advice = []
    if not good and math.isfinite(missing):
        advice.append(
            f"A gradient {missing:.3g} times smaller at the same Hessian is enough: go on for some steps."
        )
    return Convergence(
        method,
        _CONVEX,
        bool(good),
        (
            Hypothesis("‖∇F‖", "the gradient", slope),
            Hypothesis("m₀", way.meaning, way.start, "> 0", True, True),
            Hypothesis("m", f"m₀ minus {way.lost} within {best.radius:.4g}", best.convexity,
                       "> 2V" if newton else "> 0", best.convexity > (2 * best.variation if newton else 0), True),
            Hypothesis("V", "how far the Hessian is there from that at the weights", best.variation),
            Hypothesis("2d", "twice the distance to the minimum", 2 * best.distance, f"≤ {best.radius:.4g}",
                       2 * best.distance <= best.radius),
        ),
        missing,
        tuple(advice),
        (),
        best,
    )  # fmt: skip


def _lacking(statement: StronglyConvex) -> float:
    return 2 * statement.distance / statement.radius


def _lacking_at(statement: StronglyConvex) -> float:
    """The factor by which a smaller gradient is sure to be enough, by the bounds on this ball."""
    if not statement.convexity > 0 or (statement.newton and not statement.rate < 1):
        return math.inf
    return _lacking(statement)


def _least_factor(factor: Callable[[float], float], start: float) -> float:
    """The least of a function that falls and then grows, searched from a radius downwards."""
    best, radius, fallen = math.inf, start, 0
    for _ in range(24):
        here = factor(radius)
        fallen = fallen + 1 if here >= best and math.isfinite(best) else 0
        best = min(best, here)
        if fallen == 2:
            break
        radius /= 2.0 if math.isfinite(here) and here < 16 else 4.0
    return best


def _variation(analysis: Analysis, radius: float) -> float:
    """How far the Hessian of a scalar function moves on a ball, by the adjoint pass, with what it loses to
    round-off at the weights; infinite if it is not known.
    """
    total = 0.0
    for rho in (radius, 0.0):
        found = scalar_bounds(analysis.over(Ball(rho)))
        if found is None or found.variation is None:
            return math.inf
        total = up(total + float(nonnegative_norm(found.variation)))
    return total


def _gauss_newton(problem: Problem, rows: Rows, outer: LossDerivatives) -> Rounded:
    r"""The matrix with its errors. J is known up to e in the Frobenius norm, which moves the product by at most
    :math:`Ce(2\|J\|_F + e)`.
    """
    jacobian = torch.cat(list(rows.slopes.values()), 1)
    count, width = outer.hessian.value.shape[:2]
    apart = math.sqrt(sum(float(error.square().sum()) for error in rows.errors.values())) * (1 + 1e-9)
    exact = Rounded.exact(jacobian.reshape(count, width, -1))
    inner = product(outer.hessian.expand(outer.hessian.value.shape), exact)
    whole = product(Rounded.exact(jacobian.mT.contiguous()), inner.rearranged(lambda t: t.flatten(0, 1)))
    ridge = problem.regularizer
    parts = [
        torch.full((slopes.shape[1],), 0.0 if ridge is None else ridge.weight_of(path), dtype=torch.float64)
        for path, slopes in rows.slopes.items()
    ]
    matrix = whole + torch.diag(torch.cat(parts))
    wrong = up(outer.smoothness * apart * (2 * frobenius_norm(jacobian) + apart), 8)
    return Rounded(matrix.value, matrix.error + torch.diag(torch.full((len(matrix.value),), wrong)))

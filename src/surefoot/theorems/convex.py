r"""Strongly convex neighbourhoods: bounds on the Hessian over balls, and whether the theorem applies there.

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

For data in several batches, :math:`P_0` and :math:`V_0` are norms of sums over batches of matrices of bounds, and
how far a written Hessian moves is a sum over batches (:mod:`surefoot.theorems.piece`).

So on the ball :math:`\lambda_{\min}(\nabla^2F)` is at least

1. :math:`\lambda_{\min}(\nabla^2F(u_0)) - V`, where the Hessian is written out. V may also be the bound of
   :class:`~surefoot.theorems.hessian.Written`, and always is for networks that are not layer after layer;
2. :math:`\lambda_{\min}(J^\top\nabla^2h_0J + \nabla^2R)`, minus how far the first part moves, minus P, for other
   networks whose Jacobian is written out;
3. :math:`\lambda - P`, at any size; for two layers P may be the second part at the weights
   (:func:`~surefoot.theorems.hessian.lowest_bend`) plus how far it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from surefoot.magnitude import stack
from surefoot.norms import nonnegative_norm
from surefoot.norms.hermitian import up
from surefoot.norms.verified import largest_eigenvalue, norm_of, smallest_eigenvalue, solution
from surefoot.scalar import Rounded
from surefoot.theorems.hessian import lowest_bend
from surefoot.theorems.problem import Problem, refused
from surefoot.theorems.record import Convergence, Hypothesis
from surefoot.theorems.statements import StronglyConvex

DENSE = 5000  # parameters of a matrix that is written out
_FACTORS = (1.02, 1.2, 1.6, 2.5)
_AHEAD = range(1, 6)  # halvings of a radius that are looked at together
_CONVEX = "strongly convex neighbourhood"
_GLOBAL = (
    "The network is affine in what is trained, so that the objective is convex in it: the minimum is the least "
    "over all values of these parameters, with the others as they are."
)


@dataclass(frozen=True)
class _Curvature:
    """Bounds on the Hessian over a ball."""

    low: float  # a lower bound on its eigenvalues
    high: float  # an upper bound on them
    variation: float  # a bound on its distance from the Hessian at the weights


@dataclass(frozen=True)
class _Way:
    """One of the three lower bounds on the Hessian."""

    start: float  # the lower bound at the weights
    meaning: str  # what that number is, in words
    lost: str  # what is subtracted from it on a ball, in words
    # the bounds on a ball of this radius; the second argument are radii that may follow, to be computed together
    on: Callable[[float, Sequence[float]], _Curvature]
    # bounds on the length η and the decrease δ of the Newton step at the weights
    newton: tuple[float, float] = (math.inf, math.inf)


class _Parts:
    """The three parts of the Hessian."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.pieces, ridge = problem, problem.pieces, problem.regularizer
        self.pieces.share()
        weights = {path: 0.0 if ridge is None else ridge.weight_of(path) for path in self.pieces.order}
        self.least, self.most = min(weights.values()), max(weights.values())
        self.diagonal = torch.cat(
            [torch.full((n,), weights[path], dtype=torch.float64) for path, n in self.pieces.order.items()]
        )
        slopes = self.pieces.each("slopes")
        self.is_known = all(one is not None for one in slopes)
        sizes, errors, smooth, changes = zip(*slopes, strict=True) if self.is_known else ((0.0,),) * 4
        self.wrong = up(math.hypot(*errors), len(slopes))
        self.slope = up(up(math.hypot(*sizes), len(slopes)) + self.wrong)
        self.smoothness, self.change = max(smooth), max(changes)

    @cached_property
    def norm(self) -> float:
        """An upper bound on the norm of J, from the smaller of :math:`J^\\top J` and :math:`JJ^\\top`."""
        if not self.problem.parameters < self.problem.outputs or self.problem.parameters > DENSE:
            return up(math.sqrt(largest_eigenvalue(self.problem.gram)))
        summed = self.pieces.summed("normal", False)
        assert summed is not None
        matrix, error = summed
        raised = Rounded.exact(matrix) + torch.diag(torch.full_like(matrix[0], error))
        return up(math.sqrt(largest_eigenvalue(raised)))

    def bent(self, radius: float) -> tuple[float, float]:
        """:math:`P_0` and :math:`V_0`."""
        bend = self.problem.bending(radius)
        most, moved = self.slope * bend.constant, self.slope * min(bend.variation, 2 * bend.constant)
        by_adjoint = self._by_adjoint(radius)
        if by_adjoint is not None and self._at_weights is not None:
            extra = self.wrong * bend.constant
            most = min(most, by_adjoint[0] + extra)
            moved = min(moved, up(by_adjoint[1] + self._at_weights[1]) + 2 * extra)
        return up(most), up(min(moved, 2 * most))

    def _by_adjoint(self, radius: float) -> list[float] | None:
        """:math:`P_0` and :math:`V_0` of the gradient and the weights as computed; ``None`` if there are none."""
        each = self.pieces.each("bent", radius)
        if any(one is None for one in each):
            return None
        return [float(nonnegative_norm(stack(list(part)).sum(axis=0))) for part in zip(*each, strict=True)]

    @cached_property
    def _at_weights(self) -> list[float] | None:
        """The same on the ball of radius zero, where only round-off moves."""
        return self._by_adjoint(0.0)

    def on(self, radius: float) -> tuple[float, float, float, float]:
        """S, P, and how far the first and the second part move."""
        bend = self.problem.bending(radius).constant
        turned = up(bend * radius)
        steep = up(self.norm + turned)
        moved = up(self.smoothness * steep * radius * bend, 8)
        most, change = self.bent(radius) if math.isfinite(bend) else (math.inf, math.inf)
        first = self.smoothness * (steep + self.norm) * turned
        first += self.change * steep * radius * self.norm**2
        return steep, up(most + moved), up(first, 16), up(change + moved)

    @cached_property
    def _negative(self) -> float:
        """How negative the second part is at the weights; infinite unless the network has two layers."""
        units = self.pieces.summed("units") if self.pieces.is_layered else None
        return math.inf if units is None else -lowest_bend(*units)

    def ridge(self) -> _Way:
        """:math:`\\lambda - P`."""
        meaning, lost = "the weight of the ridge", "how negative the rest of the Hessian may be"
        return self._way(self.least, meaning, lost, lambda bent, _, second: min(bent, up(self._negative + second)))

    def gauss_newton(self) -> _Way:
        """:math:`J^\\top\\nabla^2h_0J + \\nabla^2R`, written out."""
        summed = self.pieces.summed("normal", True)
        assert summed is not None
        value, wrong = summed
        matrix = Rounded.exact(value) + torch.diag(self.diagonal.to(value))
        lowest = _less(smallest_eigenvalue(matrix), wrong)
        meaning, lost = "the smallest eigenvalue of the Gauss-Newton matrix", "how far the Hessian is from it"
        way = self._way(lowest, meaning, lost, lambda bent, first, _: up(first + bent))
        if self.pieces.affine is None:
            return way
        return replace(
            way, meaning="the smallest eigenvalue of the Hessian", newton=self._newton(matrix, wrong, lowest)
        )

    def _newton(self, matrix: Rounded, wrong: float, lowest: float) -> tuple[float, float]:
        """Bounds on length and decrease of the Newton step, for a Hessian within ``wrong`` of the matrix."""
        slopes = [self.problem.slopes[path] for path in self.pieces.order]
        gradient = torch.cat([slope.reshape(-1) for slope, _ in slopes]).to(matrix.value)
        error = up(math.hypot(*(error for _, error in slopes)), len(slopes))
        return solution(matrix.value, up(wrong + norm_of(matrix.error)), gradient, error, lowest)

    def _way(self, start: float, meaning: str, lost: str, loss: Callable[[float, float, float], float]) -> _Way:
        """The way whose loss on a ball is a function of P and of how far the first and the second part move."""

        def on(radius: float, _: Sequence[float] = ()) -> _Curvature:
            steep, bent, first, second = self.on(radius)
            high = up(self.smoothness * steep**2 + bent + self.most, 8)
            return _Curvature(_less(start, loss(bent, first, second)), high, up(first + second))

        return _Way(start, meaning, lost, on)

    def dense(self) -> _Way | None:
        """The Hessian, written out; ``None`` if an operation has no second derivative with a proved error."""
        summed = self.pieces.summed("hessian")
        if summed is None:
            return None
        value, wrong = summed
        matrix = Rounded.exact(value) + torch.diag(self.diagonal.to(value))
        lowest = smallest_eigenvalue(matrix)
        highest = largest_eigenvalue(matrix) if lowest > 0 else math.inf
        apart = {0.0: wrong}  # by radius, how far the Hessian may be from the matrix

        def on(radius: float, next_ones: Sequence[float] = ()) -> _Curvature:
            if radius not in apart:
                radii = list(dict.fromkeys([radius, *next_ones] if self.pieces.are_several else [radius]))
                for rho, *parts in zip(radii, *self.pieces.each("apart", radii), strict=True):
                    apart[rho] = up(sum(parts) + wrong, len(parts))
            moved = apart[radius]
            if self.pieces.is_layered:
                moved = min(moved, up(sum(self.on(radius)[2:]) + wrong))
            return _Curvature(_less(lowest, moved), up(highest + moved), up(moved + wrong))

        start, meaning = _less(lowest, wrong), "the smallest eigenvalue of the Hessian"
        return _Way(start, meaning, "how far the Hessian moves", on, self._newton(matrix, wrong, start))


def _less(value: float, loss: float) -> float:
    """A difference, rounded down."""
    left = value - loss
    return math.nextafter(left - abs(left) * 2.0**-50, -math.inf) if math.isfinite(left) else -math.inf


def _ways(problem: Problem, parts: _Parts) -> Iterator[_Way]:
    """The bounds that this problem has."""
    if problem.pieces.affine is not None:
        yield parts.gauss_newton()
    if problem.parameters <= DENSE:
        yield parts.dense() or parts.gauss_newton()
    if parts.least > 0:
        yield parts.ridge()


def strongly_convex(problem: Problem, method: str) -> Convergence:
    """Whether the weights are proved to be in the neighbourhood of a strict minimum."""
    newton = method == "newton"
    parts = _Parts(problem)
    if not parts.is_known:
        name = type(problem.objective).__name__
        why = f"The Hessian of {name} is not verified: use Square, or CrossEntropy with one class for each sample."
        return refused(problem, method, _CONVEX, why)
    slope = problem.gradient()[1]
    tried: list[Convergence] = []
    for way in _ways(problem, parts):
        verdict = _tried(method, way, slope, newton)
        if verdict.proved:
            return verdict if problem.pieces.affine is None else replace(verdict, advice=(_GLOBAL,))
        tried.append(verdict)
    if not tried:
        return refused(
            problem, method, _CONVEX,
            f"The Hessian has {problem.parameters} rows; up to {DENSE} are written out and verified, and beyond "
            "that a ridge on all parameters is needed.",
        )  # fmt: skip
    return replace(min(tried, key=lambda verdict: verdict.missing), nothing=problem.nothing())


def _tried(method: str, way: _Way, slope: float, newton: bool) -> Convergence:
    """The verdict by one of the bounds."""
    lowest = way.on(0.0, ()).low

    def at(radius: float, next_ones: Sequence[float] = ()) -> StronglyConvex:
        hessian = way.on(radius, next_ones)
        return StronglyConvex(
            hessian.low, hessian.high, hessian.variation, slope, radius, newton, way.start, *way.newton
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
        hypotheses = (
            Hypothesis("m₀", way.meaning, way.start, "> 0", way.start > 0, lower=True),
            Hypothesis("‖∇F‖", "the gradient", slope),
        )
        return Convergence(method, _CONVEX, False, hypotheses, missing=math.inf, advice=(why,))
    first = min(2 * slope / way.start, least) if way.start > 0 else least
    radii = [radius * factor for radius in dict.fromkeys((first, least)) for factor in _FACTORS if radius]
    candidates = [at(radius, radii) for radius in radii]
    good = [statement for statement in candidates if statement.holds]
    best = good[0] if good else min(candidates, key=_lacking)
    missing = 1.0 if good else _least_factor(lambda r: _lacking_at(at(r, [r / 2**k for k in _AHEAD])), least)
    advice = f"A gradient {missing:.3g} times smaller at the same Hessian is enough: go on for some steps."
    within, reach = f"m₀ minus {way.lost} within {best.radius:.4g}", 2 * best.distance
    needs, threshold = ("> 2V", 2 * best.variation) if newton else ("> 0", 0.0)
    return Convergence(
        method=method,
        theorem=_CONVEX,
        proved=bool(good),
        hypotheses=(
            Hypothesis("‖∇F‖", "the gradient", slope),
            Hypothesis("m₀", way.meaning, way.start, "> 0", holds=True, lower=True),
            Hypothesis("m", within, best.convexity, needs, holds=best.convexity > threshold, lower=True),
            Hypothesis("V", "how far the Hessian is there from that at the weights", best.variation),
            Hypothesis(
                "2d", "twice the distance to the minimum", reach, f"≤ {best.radius:.4g}", reach <= best.radius
            ),
        ),
        missing=missing,
        advice=(advice,) if not good and math.isfinite(missing) else (),
        statement=best,
    )


def _lacking(statement: StronglyConvex) -> float:
    return 2 * statement.distance / statement.radius


def _lacking_at(statement: StronglyConvex) -> float:
    """The factor by which a smaller gradient is sure to be enough, by the bounds on this ball."""
    if not statement.convexity > 0 or (statement.newton and not statement.rate < 1):
        return math.inf
    return _lacking(statement)


def _least_factor(factor: Callable[[float], float], start: float) -> float:
    """The least value of a function that falls and then grows, searched for from a radius downwards."""
    best, radius, worse = math.inf, start, 0
    for _ in range(24):
        here = factor(radius)
        worse = worse + 1 if here >= best and math.isfinite(best) else 0
        best = min(best, here)
        if worse == 2:
            break
        radius /= 2.0 if math.isfinite(here) and here < 16 else 4.0
    return best

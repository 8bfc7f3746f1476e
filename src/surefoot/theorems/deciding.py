r"""``surefoot.convergence``: which theorem applies from the present weights, on which ball.

The radius is searched. For interpolation a ball of radius :math:`2\eta \ge t^*` is always large enough; a smaller
one has a smaller K. Where it fails, the factor that is missing is proved to be enough: if the residual were f
times smaller, at the same Jacobian, then :math:`f \ge 2\eta/\rho` would put the needed ball into that of radius
:math:`\rho`, and :math:`f \ge 2K(\rho)\eta/\sigma` would make h at most ½.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.bounds import scalar_bounds
from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.leaves import ordinary_device
from surefoot.certificate.proving import certify_proved
from surefoot.domains import Ball
from surefoot.guarantees import GuaranteeError
from surefoot.norms import frobenius_norm, nonnegative_norm
from surefoot.norms.rounding import up
from surefoot.objectives import Objective, Ridge, Square
from surefoot.scalar import Rounded
from surefoot.theorems.bending import Bending, bending
from surefoot.theorems.hessian import hessian, square_weight
from surefoot.theorems.layered import Layered, read_layers
from surefoot.theorems.linear import Linearised, linearise
from surefoot.theorems.record import METHODS, Convergence, Hypothesis, most
from surefoot.theorems.statements import GradientDescent, Interpolation, NothingHere, StronglyConvex
from surefoot.theorems.verified import largest_eigenvalue, smallest_eigenvalue

Method = Literal["gauss_newton", "gradient", "newton"]
_ROWS = 3000  # outputs of networks that are not layered, one adjoint pass each
_DENSE = 3000  # parameters of a Hessian that is written out
_EXCLUDED = 50_000  # parameters up to which a refusal also says how far away stationary points are
_PARTS = (1.0, 0.5, 0.25, 0.1)
_KANTOROVICH = "Newton-Kantorovich theorem, underdetermined"
_GRADIENT = "Polyak-Łojasiewicz inequality on a ball"
_CONVEX = "strongly convex neighbourhood"


def convergence(
    model: nn.Module,
    x: Any,
    objective: nn.Module,
    regularizer: Ridge | None = None,
    method: Method = "gauss_newton",
) -> Convergence:
    """Whether a method is proved to converge from the present weights, to what and how fast.

    Args:
        model: the network; it is not changed.
        x: a batch, all the data of the objective.
        objective: a loss bound to its targets.
        regularizer: added to it.
        method: ``"gauss_newton"`` (square loss: to an exact solution), ``"gradient"`` (to zero loss, or to a
            strict local minimum), ``"newton"`` (to a strict local minimum).

    Returns:
        The verdict with its theorem, the verified numbers, and what is missing where it is not proved.

    Raises:
        GuaranteeError: if no theorem is about this method and objective.
        CaptureError: if the model cannot be read.
        UnsupportedOperation: if an operation has no rule.
    """
    if method not in METHODS:
        raise GuaranteeError(f"the method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if not isinstance(objective, Objective) or not objective.takes_targets:
        raise GuaranteeError(
            "convergence is proved for losses of surefoot that are bound to targets, such as surefoot.Square(y), "
            f"got {objective!r}"
        )
    objective.chosen()  # refuses a loss without targets
    with ordinary_device():
        problem = _Problem(model, x, objective, regularizer)
        interpolates = isinstance(objective, Square) and regularizer is None
        if method == "gauss_newton":
            if not interpolates:
                raise GuaranteeError(
                    "the theorem about Gauss-Newton is about exact solutions: surefoot.Square without a "
                    "regulariser. For other objectives use method='newton' or method='gradient'"
                )
            return _interpolation(problem)
        if method == "gradient" and interpolates:
            first = _gradient(problem)
            if first.proved or problem.layered is None or problem.parameters > _DENSE:
                return first
            second = _strongly_convex(problem, method)
            return second if second.proved or second.missing < first.missing else first
        return _strongly_convex(problem, method)


class _Problem:
    """What was asked, and what is computed once."""

    def __init__(self, model: nn.Module, x: Any, objective: Objective, regularizer: Ridge | None) -> None:
        self.model, self.x, self.objective, self.regularizer = model, x, objective, regularizer
        self.whole = Analysis.of(model, x, objective)
        self.whole.require_values()
        self.network = Analysis.of(model, x)
        self.layered: Layered | None = read_layers(self.network)
        graph = self.network.reading.graph
        self.parameters = sum(graph.numel(leaf.name) for leaf in graph.parameters if leaf.trainable)
        self.outputs = graph.numel(graph.outputs[0])
        self._met: dict[float, Bending] = {}

    def weight(self) -> float:
        """The objective is this times half of the squared residual; rounded up."""
        assert isinstance(self.objective, Square)
        outputs = self.network.centre[self.network.reading.graph.outputs[0]]
        return up(square_weight(self.objective, outputs))

    def linearised(self) -> Linearised:
        """The network at its weights."""
        if self.layered is None and self.outputs > _ROWS:
            raise GuaranteeError(
                f"the Jacobian has {self.outputs} rows, and only those of linear layers and element-wise "
                f"functions are computed together: take at most {_ROWS} outputs"
            )
        return linearise(self.network, self.layered, self.objective.chosen())

    def bending(self, radius: float) -> Bending:
        """K on a ball."""
        if radius not in self._met:
            self._met[radius] = bending(self.network, self.layered, radius)
        return self._met[radius]

    def gradient(self) -> tuple[float, float]:
        """Lower and upper bound of the norm of the gradient at the weights."""
        found = proved_gradient(self.whole)
        named = dict(self.model.named_parameters())
        parts, errors = [], []
        for leaf in self.whole.reading.graph.parameters:
            if leaf.path not in found.slopes:
                continue
            slope, error = found.slopes[leaf.path], found.errors[leaf.path]
            if self.regularizer is not None:
                ridge = self.regularizer.weight_of(leaf.path) * named[leaf.path].detach().double()
                slope = slope + ridge
                error += 2.0**-51 * (frobenius_norm(ridge) + frobenius_norm(slope))
            parts.append(frobenius_norm(slope))
            errors.append(error)
        size, error = math.hypot(*parts), up(math.hypot(*errors))
        return max(size * (1 - 1e-9) - error, 0.0), up(size * (1 + 1e-12) + error)

    def nothing(self) -> NothingHere | None:
        """The largest ball of those tried without a stationary point."""
        if self.parameters > _EXCLUDED:
            return None
        certificate = certify_proved(self.model, self.x, objective=self.objective)
        if not isinstance(certificate.radius, float) or not certificate.smoothness.is_finite:
            return None
        extra = 0.0 if self.regularizer is None else float(self.regularizer.smoothness)
        slope, smooth = self.gradient()[0], up(float(certificate.smoothness) + extra)
        radius = min(certificate.radius, slope / smooth * (1 - 1e-9)) if smooth else 0.0
        return NothingHere(slope, smooth, radius)


def _interpolation(problem: _Problem) -> Convergence:
    if problem.outputs > problem.parameters:
        return _refused(
            problem, "gauss_newton", _KANTOROVICH,
            f"There are {problem.outputs} equations and {problem.parameters} parameters, so that the Jacobian is "
            "not onto: use a larger network, fewer samples, or method='newton'.",
        )  # fmt: skip
    linear, weight = problem.linearised(), problem.weight()
    if not linear.sigma > 0:
        return _refused(problem, "gauss_newton", _KANTOROVICH, _DEPENDENT)

    def at(radius: float) -> Interpolation:
        return Interpolation(
            linear.sigma, linear.least, problem.bending(radius).constant, radius, linear.length, weight
        )

    best = at(2 * linear.least)
    for part in (1.5, 1.2):
        if not best.holds and math.isfinite(best.bending):
            smaller = at(part * linear.least)
            best = smaller if smaller.holds else best
    obstacles = problem.bending(best.radius).obstacles
    missing, advice = 1.0, []
    if not best.holds:
        missing = _least_factor(lambda r: _enough(at(r)), 2 * linear.least)
        if math.isfinite(missing):
            advice.append(
                f"h = {most(best.h)}, needs ½: a residual {missing:.3g} times smaller at the same Jacobian is "
                "enough; or a larger σ (more units, fewer samples), or a smaller K."
            )
    return Convergence(
        "gauss_newton",
        _KANTOROVICH,
        best.holds,
        (
            Hypothesis("‖r‖", "the residual", linear.length),
            Hypothesis("σ", "the smallest singular value of the Jacobian", linear.sigma, "> 0", True, True),
            Hypothesis("η", "the length of the first step", linear.least),
            Hypothesis("K", f"the Lipschitz constant of the Jacobian within {best.radius:.4g}", best.bending),
            Hypothesis("h", "Kη/σ", best.h, "≤ ½", best.h <= 0.5),
            Hypothesis("t*", "the distance to a solution", best.distance, f"≤ {best.radius:.4g}",
                       best.distance <= best.radius),
        ),
        missing,
        tuple(advice),
        obstacles,
        best,
        None if best.holds else problem.nothing(),
        up(weight / 2 * linear.length**2),
    )  # fmt: skip


_DEPENDENT = (
    "The smallest singular value of the Jacobian is zero up to round-off: two samples may be equal, or the "
    "network may be too small to fit any targets nearby."
)


def _enough(statement: Interpolation) -> float:
    """The factor by which a smaller residual is sure to be enough, by K on this ball."""
    if not math.isfinite(statement.bending):
        return math.inf
    return max(2 * statement.eta / statement.radius, 2 * statement.h)


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


def _gradient(problem: _Problem) -> Convergence:
    if problem.outputs > problem.parameters:
        return _refused(
            problem, "gradient", _GRADIENT,
            f"There are {problem.outputs} equations and {problem.parameters} parameters, so that the Jacobian is "
            "not onto.",
        )  # fmt: skip
    linear, weight = problem.linearised(), problem.weight()
    if not linear.sigma > 0:
        return _refused(problem, "gradient", _GRADIENT, _DEPENDENT)
    sigma, length = linear.sigma, linear.length
    widest = sigma / (2 * max(problem.bending(0.0).constant, 1e-300))
    radii = [widest / 2**k for k in range(6)] + [length / sigma * k for k in (1.1, 1.5, 2.2, 3.0)]
    tried = [
        GradientDescent(sigma, linear.norm, problem.bending(radius).constant, radius, length, weight, part)
        for radius in radii
        if 0 < radius < math.inf
        for part in _PARTS
    ]
    good = [statement for statement in tried if statement.holds]
    best = min(good, key=lambda s: s.rate) if good else min(tried, key=lambda s: s.factor)
    missing = 1.0 if good else best.factor
    advice = []
    if not good and math.isfinite(missing):
        advice.append(
            f"A residual {missing:.3g} times smaller at the same Jacobian is enough, or a larger σ or a smaller K."
        )
    needed = best.factor * best.radius
    return Convergence(
        "gradient",
        _GRADIENT,
        bool(good),
        (
            Hypothesis("‖r‖", "the residual", length),
            Hypothesis("σ", "the smallest singular value of the Jacobian", sigma, "> 0", True, True),
            Hypothesis("‖J‖", "the norm of the Jacobian", linear.norm),
            Hypothesis("K", f"the Lipschitz constant of the Jacobian within {best.radius:.4g}", best.bending),
            Hypothesis("path", "the length of the path", needed, f"< {best.radius:.4g}", best.holds),
        ),
        missing,
        tuple(advice),
        problem.bending(best.radius).obstacles,
        best,
        None if good else problem.nothing(),
        up(weight / 2 * length**2),
    )  # fmt: skip


def _strongly_convex(problem: _Problem, method: Method) -> Convergence:
    newton = method == "newton"
    if problem.layered is None:
        return _refused(
            problem, method, _CONVEX,
            "The Hessian is verified for networks of linear layers and element-wise functions: this is "
            "another one.",
        )  # fmt: skip
    if problem.parameters > _DENSE:
        return _refused(
            problem, method, _CONVEX,
            f"The Hessian has {problem.parameters} rows; up to {_DENSE} are written out and verified.",
        )  # fmt: skip
    dense = hessian(problem.layered, problem.objective)
    if dense is None:
        name = type(problem.objective).__name__
        return _refused(
            problem, method, _CONVEX, f"The Hessian of {name} is not verified: use Square or CrossEntropy."
        )
    matrix = _with_ridge(problem, dense[0])
    lowest, (_, slope) = smallest_eigenvalue(matrix), problem.gradient()
    rounding = _variation(problem, 0.0)
    if not lowest > 0 or not math.isfinite(rounding):
        why = (
            f"The Hessian is not positive definite, its eigenvalues are proved to be above {lowest:.3g} only: go "
            "on until the weights are near a strict minimum, or add a ridge."
            if math.isfinite(rounding)
            else "How far the Hessian moves is bounded for layers of at most 128 units that are smooth within "
            "reach."
        )
        return _refused(
            problem, method, _CONVEX, why,
            (Hypothesis("m₀", "the smallest eigenvalue of the Hessian", lowest, "> 0", lowest > 0, True),
             Hypothesis("‖∇F‖", "the gradient", slope)),
        )  # fmt: skip
    highest = largest_eigenvalue(matrix)

    def at(radius: float) -> StronglyConvex:
        variation = up(_variation(problem, radius) + rounding)
        return StronglyConvex(lowest, highest, variation, slope, radius, newton)

    least = max(2 * slope / lowest, 1e-300)
    tried = [at(least * factor) for factor in (1.02, 1.2, 1.6, 2.5)]
    good = [statement for statement in tried if statement.holds]
    best = good[0] if good else min(tried, key=_lacking)
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
            Hypothesis("m₀", "the smallest eigenvalue of the Hessian", lowest, "> 0", True, True),
            Hypothesis("V", f"how far the Hessian moves within {best.radius:.4g}", best.variation),
            Hypothesis("m", "m₀ - V", best.convexity, "> 2V" if newton else "> 0",
                       best.convexity > (2 * best.variation if newton else 0), True),
            Hypothesis("2‖∇F‖/m", "twice the distance to the minimum", 2 * best.distance, f"≤ {best.radius:.4g}",
                       2 * best.distance <= best.radius),
        ),
        missing,
        tuple(advice),
        (),
        best,
        None if good else problem.nothing(),
        None,
    )  # fmt: skip


def _lacking(statement: StronglyConvex) -> float:
    return 2 * statement.distance / statement.radius


def _lacking_at(statement: StronglyConvex) -> float:
    """The factor by which a smaller gradient is sure to be enough, by V on this ball."""
    if not statement.convexity > 0 or (statement.newton and not statement.rate < 1):
        return math.inf
    return _lacking(statement)


def _variation(problem: _Problem, radius: float) -> float:
    """V on a ball; infinite if it is not known."""
    found = scalar_bounds(problem.whole.over(Ball(radius)))
    if found is None or found.variation is None:
        return math.inf
    return float(nonnegative_norm(found.variation))


def _with_ridge(problem: _Problem, matrix: Rounded) -> Rounded:
    """The Hessian of the objective and the regulariser; the latter is diagonal, one number per parameter
    tensor.
    """
    if problem.regularizer is None:
        return matrix
    assert problem.layered is not None
    graph = problem.network.reading.prepared
    paths = {leaf.name: leaf.path for leaf in graph.parameters}
    added = []
    for layer in problem.layered.layers:
        names = [part.name for part in graph.by_name[layer.result].args]
        outputs, inputs = layer.weight.shape
        own: list[float] = []
        if layer.trains_weight:
            own += [problem.regularizer.weight_of(paths[names[1]])] * inputs
        if layer.trains_bias:
            own += [problem.regularizer.weight_of(paths[names[2]])]
        added += own * outputs
    diagonal: Tensor = torch.diag(torch.tensor(added, dtype=torch.float64))
    total = matrix + diagonal
    return Rounded(total.value, total.error)


def _refused(
    problem: _Problem, method: Method, theorem: str, why: str, hypotheses: tuple[Hypothesis, ...] = ()
) -> Convergence:
    """Not proved, and no factor says what is missing."""
    return Convergence(method, theorem, False, hypotheses, math.inf, (why,), nothing=problem.nothing())

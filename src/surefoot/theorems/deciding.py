r"""``surefoot.convergence``: which theorem applies from the present weights, on which ball.

The radius is searched: :math:`\omega` is computed on balls up to :math:`2\eta`, which contains the solution, or
up to :math:`1/\omega(0)`, beyond which nothing can be proved. What is missing is proved to be enough: the largest
first step that the theorem covers does not depend on the residual, and a residual f times smaller, at the same
Jacobian, has a first step f times shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
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
from surefoot.norms.hermitian import up
from surefoot.norms.verified import largest_eigenvalue, smallest_eigenvalue
from surefoot.objectives import Objective, Ridge, Square
from surefoot.scalar import Rounded
from surefoot.theorems.bending import Bending, bending
from surefoot.theorems.hessian import hessian, square_weight
from surefoot.theorems.layered import Layered, read_layers
from surefoot.theorems.linear import Linearised, linearise
from surefoot.theorems.record import METHODS, Convergence, Hypothesis, most
from surefoot.theorems.relative import relative_bending
from surefoot.theorems.samples import single_samples
from surefoot.theorems.statements import GradientDescent, Interpolation, NothingHere, Profile, StronglyConvex

Method = Literal["gauss_newton", "gradient", "newton"]
_ROWS = 3000  # outputs of networks that are not layered, one adjoint pass each
_DENSE = 3000  # parameters of a Hessian that is written out
_SMALL = 200  # rows from which relative constants are only computed if at most
_GAIN = 100.0  # this factor is missing
_EXCLUDED = 20_000  # parameters up to which a refusal also says how far away stationary points are
_PARTS = (1.0, 0.5, 0.25, 0.1)
_FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
_KANTOROVICH = "Newton-Kantorovich theorem, underdetermined"
_GRADIENT = "Polyak-Łojasiewicz inequality on a ball"
_CONVEX = "strongly convex neighbourhood"


def convergence(
    model: nn.Module,
    x: Any,
    objective: nn.Module,
    regularizer: Ridge | None = None,
    method: Method = "gauss_newton",
    effort: Literal["low", "high"] = "high",
) -> Convergence:
    """Whether a method is proved to converge from the present weights, to what and how fast.

    Args:
        model: the network; it is not changed.
        x: a batch, all the data of the objective.
        objective: a loss bound to its targets.
        regularizer: added to it.
        method: ``"gauss_newton"`` (square loss: to an exact solution), ``"gradient"`` (to zero loss, or to a
            strict local minimum), ``"newton"`` (to a strict local minimum).
        effort: ``"low"`` for a quick look with coarser constants.

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
        problem = _Problem(model, x, objective, regularizer, effort)
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

    def __init__(
        self, model: nn.Module, x: Any, objective: Objective, regularizer: Ridge | None, effort: str
    ) -> None:
        self.thorough = effort == "high"
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

    @cached_property
    def linearised(self) -> Linearised:
        """The network at its weights."""
        if self.layered is None and self.outputs > _ROWS:
            raise GuaranteeError(
                f"the Jacobian has {self.outputs} rows, and only those of linear layers and element-wise "
                f"functions are computed together: take at most {_ROWS} outputs"
            )
        return linearise(self.network, self.layered, self.objective.chosen())

    @cached_property
    def samples(self) -> tuple[Analysis, ...]:
        """The network on single samples, where its layers are not read."""
        return single_samples(self.network) if self.layered is None else ()

    def bending(self, radius: float) -> Bending:
        """K on a ball."""
        if radius not in self._met:
            self._met[radius] = bending(self.network, self.layered, radius, self.samples)
        return self._met[radius]

    def obstacles(self, radius: float) -> tuple[str, ...]:
        """What makes K infinite on a ball."""
        return self.bending(radius).obstacles if math.isfinite(radius) else ()

    @cached_property
    def relative(self) -> float:
        """:math:`\\omega` at the weights."""
        return relative_bending(self.layered) if self.layered is not None and self.thorough else math.inf

    def profile(
        self, radius: float, enough: Callable[[Profile], bool], hopeless: Callable[[Profile], bool]
    ) -> Profile:
        r""":math:`\omega` on balls up to a radius, by K/σ if that is enough, otherwise by itself at the weights.

        Beyond :math:`1/\omega(0)` nothing can be proved, so the balls end there. The second is expensive for large
        Jacobians, and left out where it is hopeless.
        """
        sigma = self.linearised.sigma
        centre = self.bending(0.0).constant / sigma
        found = Profile(())
        for sharp in (False, True):
            if sharp and (hopeless(found) or not self.relative < centre):
                break
            centre = self.relative if sharp else centre
            end = min(radius, 1 / max(centre, 1e-290))
            end = next(
                (end / 4**k for k in range(30) if math.isfinite(self.bending(end / 4**k / 32).constant)), 0.0
            )
            found = Profile.of(
                (part * end, self._omega(part * end, centre if sharp else math.inf)) for part in _FRACTIONS
            )
            if enough(found):
                break
        return found

    def _omega(self, radius: float, centre: float) -> float:
        """:math:`\\omega` on a ball: at the weights and how far it moves, or K/σ."""
        met, sigma = self.bending(radius), self.linearised.sigma
        return up(min(met.constant / sigma, centre + up(met.variation / sigma)))

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
        if self.parameters > _EXCLUDED or not self.thorough:
            return None
        certificate = certify_proved(self.model, self.x, objective=self.objective)
        if not isinstance(certificate.radius, float) or not certificate.smoothness.is_finite:
            return None
        extra = 0.0 if self.regularizer is None else float(self.regularizer.smoothness)
        slope, smooth = self.gradient()[0], up(float(certificate.smoothness) + extra)
        radius = min(certificate.radius, slope / smooth * (1 - 1e-9)) if smooth else 0.0
        return NothingHere(slope, smooth, radius)


def _interpolation(problem: _Problem) -> Convergence:
    refused = _not_onto(
        problem, "gauss_newton", _KANTOROVICH, ": use a larger network, fewer samples, or method='newton'"
    )
    if refused is not None:
        return refused
    linear, weight = problem.linearised, problem.weight()
    profile = problem.profile(
        2 * linear.least,
        lambda found: found.room()[0] >= linear.least,
        lambda found: linear.outputs > _SMALL and found.room()[0] * _GAIN < linear.least,
    )
    best = Interpolation(linear.least, profile, linear.norm, linear.length, weight)
    omega = profile.steps[-1][1] if profile.steps else math.inf
    missing = 1.0 if best.holds else 2 * best.h  # beyond ½ it is the first step over what is covered
    advice = []
    if not best.holds and math.isfinite(missing):
        advice.append(
            f"h = {most(best.h)}, needs ½: a residual {missing:.3g} times smaller at the same Jacobian is "
            "enough; or a better conditioned Jacobian (more units, fewer samples)."
        )
    return Convergence(
        "gauss_newton",
        _KANTOROVICH,
        best.holds,
        (
            Hypothesis("‖r‖", "the residual", linear.length),
            Hypothesis("σ", "the smallest singular value of the Jacobian", linear.sigma, "> 0", True, True),
            Hypothesis("η", "the length of the first step", linear.least),
            Hypothesis(
                "ω", f"how fast the Jacobian changes within {profile.radius:.4g}, relative to itself", omega
            ),
            Hypothesis("h", "the first step over twice the longest that is covered", best.h, "≤ ½", best.holds),
            Hypothesis("t*", "the distance to a solution", best.distance),
        ),
        missing,
        tuple(advice),
        () if best.holds else problem.obstacles(2 * linear.least),
        best,
        None if best.holds else problem.nothing(),
        up(weight / 2 * linear.length**2),
    )


def _not_onto(problem: _Problem, method: Method, theorem: str, advice: str = "") -> Convergence | None:
    """The refusal where the Jacobian is not proved to be onto."""
    if problem.outputs > problem.parameters:
        why = (
            f"There are {problem.outputs} equations and {problem.parameters} parameters, so that the Jacobian is "
            f"not onto{advice}."
        )
    elif not problem.linearised.sigma > 0:
        why = (
            "The smallest singular value of the Jacobian is zero up to round-off: two samples may be equal, or "
            "the network may be too small to fit any targets nearby."
        )
    else:
        return None
    return _refused(problem, method, theorem, why)


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
    refused = _not_onto(problem, "gradient", _GRADIENT)
    if refused is not None:
        return refused
    linear, weight = problem.linearised, problem.weight()
    sigma, length = linear.sigma, linear.length

    def at(profile: Profile) -> list[GradientDescent]:
        return [
            GradientDescent(
                sigma, linear.norm, profile, problem.bending(radius).constant, radius, length, weight, part
            )
            for radius, _ in profile.steps
            for part in _PARTS
        ]

    profile = problem.profile(
        math.inf,
        lambda found: any(statement.holds for statement in at(found)),
        lambda found: (
            linear.outputs > _SMALL
            and min((statement.factor for statement in at(found)), default=math.inf) > _GAIN
        ),
    )
    tried = at(profile)
    if not tried:
        return _refused(problem, "gradient", _GRADIENT, " ".join(problem.obstacles(1e-9 * length / sigma)))
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
        () if good else problem.obstacles(needed),
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
    return matrix + diagonal


def _refused(
    problem: _Problem, method: Method, theorem: str, why: str, hypotheses: tuple[Hypothesis, ...] = ()
) -> Convergence:
    """Not proved, and no factor says what is missing."""
    return Convergence(method, theorem, False, hypotheses, math.inf, (why,), nothing=problem.nothing())

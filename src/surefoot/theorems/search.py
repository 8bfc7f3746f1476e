r"""One search over balls: which theorem holds on which ball around the weights, or what is missing.

A theorem is asked on balls of several radii. Its ``factor`` on a ball is what is needed over what is there: a
residual, or a gradient, that many times smaller at the same derivatives is enough. So the least factor over the
balls is what is missing, and of the balls on which the theorem holds the one with the best promise is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from surefoot.certificate.proving import certify_proved
from surefoot.domains import Ball
from surefoot.norms.hermitian import up
from surefoot.objectives import Square
from surefoot.theorems.curvature import DENSE, Bound, Regularised, square_weight
from surefoot.theorems.gradient_descent import GradientDescent, SquareOnBall
from surefoot.theorems.heavy_ball import HeavyBall
from surefoot.theorems.interpolation import Interpolation
from surefoot.theorems.network import Network
from surefoot.theorems.record import Convergence, Hypothesis, most
from surefoot.theorems.strongly_convex import NothingHere, StronglyConvex

_BALLS = 4  # on which stationary points are excluded
_EXCLUDED = 20_000  # parameters up to which a refusal also says how far away stationary points are
_PARTS = (1.0, 0.5, 0.25, 0.1)  # of the step size 1/L
_MOMENTA = (0.1, 0.5, 0.9)
_FRACTIONS = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, *(4.0**-k for k in range(3, 12)))
_WIDER = (1.02, 1.2, 1.6, 2.5)
_KANTOROVICH = "Newton-Kantorovich theorem, underdetermined"
_CONVEX = "strongly convex neighbourhood"
_GLOBAL = (
    "The network is affine in what is trained, so that the objective is convex in it: the minimum is the least "
    "over all values of these parameters, with the others as they are."
)

Statement = TypeVar("Statement", Interpolation, SquareOnBall)


def _best(
    radii: Iterable[float], on: Callable[[float], Iterable[Statement]], promise: Callable[[Statement], float]
) -> Statement | None:
    """Of the statements that hold the one with the least promise; if none holds, the one with the least factor.

    Radii fall. Once the factor has grown three times in a row, smaller balls are not tried.
    """
    good: list[Statement] = []
    best: Statement | None = None
    worse = 0
    for radius in radii:
        statements = [one for one in on(radius) if math.isfinite(one.factor)]
        good += [one for one in statements if one.holds]
        nearest = min(statements, key=lambda one: one.factor, default=None)
        if nearest is not None:
            better = best is None or nearest.factor < best.factor
            best, worse = (nearest, 0) if better else (best, worse + (not nearest.holds))
        if worse == 3:
            break
    return min(good, key=promise) if good else best


def interpolation(network: Network) -> Convergence:
    """Whether Gauss-Newton is proved to converge to an exact solution."""
    why = _not_onto(network, ": use a larger network, fewer samples, or method='newton'")
    if why:
        return refused("gauss_newton", _KANTOROVICH, why, nothing(network))
    weight = _weight(network)

    def on(radius: float) -> list[Interpolation]:
        bend = network.bending(radius).constant
        numbers = network.least, network.sigma, bend, radius, network.norm, network.length, weight
        return [Interpolation(*numbers)]

    end = 2 * network.least or 1e-300
    best = _best((end * part for part in (1.0, 0.75, 0.625, *_FRACTIONS[2:])), on, lambda one: one.distance)
    if best is None:
        return refused("gauss_newton", _KANTOROVICH, " ".join(network.bending(end).obstacles), nothing(network))
    missing = best.factor
    advice = (
        f"h = {most(best.h)}, needs ½: a residual {missing:.3g} times smaller at the same Jacobian is enough; or "
        "a better conditioned Jacobian (more units, fewer samples)."
    )
    bent = f"the Lipschitz constant of the Jacobian within {best.radius:.4g}"
    return Convergence(
        method="gauss_newton",
        theorem=_KANTOROVICH,
        proved=best.holds,
        hypotheses=(
            Hypothesis("‖r‖", "the residual", network.length),
            Hypothesis("σ", "the smallest singular value of the Jacobian", network.sigma, "> 0", True, lower=True),
            Hypothesis("η", "the length of the first step", network.least),
            Hypothesis("K", bent, best.bending),
            Hypothesis("h", "Kη/σ", best.h, "≤ ½", best.h <= 0.5),
            Hypothesis("t*", "the distance to a solution", best.distance, f"≤ {best.radius:.4g}", best.holds),
        ),
        missing=missing,
        advice=() if best.holds else (advice,),
        obstacles=() if best.holds else network.bending(end).obstacles,
        statement=best,
        nothing=None if best.holds else nothing(network),
        loss=up(weight / 2 * network.length**2),
    )


def descent(network: Network, method: str) -> Convergence:
    """Whether gradient steps, plain or with momentum, are proved to converge to zero loss."""
    theorem, why = SquareOnBall.theorem, _not_onto(network)
    if why:
        return refused(method, theorem, why, nothing(network))
    weight, sigma, length = _weight(network), network.sigma, network.length

    def on(radius: float) -> Iterator[SquareOnBall]:
        numbers = sigma, network.norm, network.bending(radius).constant, radius, length, weight
        if method == "gradient":
            yield from (GradientDescent(*numbers, part) for part in _PARTS)
        else:
            yield from (HeavyBall(*numbers, beta, part) for beta in _MOMENTA for part in _PARTS[:2])

    # beyond σ/K the Jacobian may not be onto; within 2‖r‖/σ the path does not fit
    end = min(sigma / max(network.bending(0.0).constant, 1e-290), 1e6 * length / sigma + 1e-300)
    needed = length / sigma
    radii = {end * part for part in _FRACTIONS} | {needed * part for part in (1.1, 1.4, 2.1, 3.0, 5.0)}
    best = _best(sorted(radii - {0.0}, reverse=True), on, lambda one: one.rate)
    if best is None:
        return refused(method, theorem, " ".join(network.bending(min(radii)).obstacles), nothing(network))
    missing = 1.0 if best.holds else best.factor
    advice = (
        f"A residual {'about ' if isinstance(best, HeavyBall) else ''}{missing:.3g} times smaller at the same "
        "Jacobian is enough, or a larger σ or a smaller K."
    )
    path = best.factor * best.radius
    return Convergence(
        method=method,
        theorem=theorem,
        proved=best.holds,
        hypotheses=(
            Hypothesis("‖r‖", "the residual", length),
            Hypothesis("σ", "the smallest singular value of the Jacobian", sigma, "> 0", True, lower=True),
            Hypothesis("‖J‖", "the norm of the Jacobian", network.norm),
            Hypothesis("K", f"the Lipschitz constant of the Jacobian within {best.radius:.4g}", best.bending),
            Hypothesis("path", "the length of the path", path, f"< {best.radius:.4g}", best.holds),
        ),
        missing=missing,
        advice=(advice,) if not best.holds and math.isfinite(missing) else (),
        obstacles=() if best.holds else network.bending(end).obstacles,
        statement=best,
        nothing=None if best.holds else nothing(network),
        loss=up(weight / 2 * length**2),
    )


def strongly_convex(problem: Regularised, method: str) -> Convergence:
    """Whether the weights are proved to be in the neighbourhood of a strict minimum."""
    network = problem.network
    if problem.loss is None:
        name = type(network.objective).__name__
        why = f"The Hessian of {name} is not verified: use Square, or CrossEntropy with one class for each sample."
        return refused(method, _CONVEX, why)
    tried: list[Convergence] = []
    for bound in problem.bounds():
        verdict = _strict(method, bound, problem.gradient()[1])
        if verdict.proved:
            return verdict if not network.is_affine else replace(verdict, advice=(_GLOBAL,))
        tried.append(verdict)
    excluded = nothing(network, problem)
    if not tried:
        why = (
            f"The Hessian has {network.parameters} rows; up to {DENSE} are written out and verified, if all "
            "operations have second derivatives with proved errors; otherwise a ridge on all parameters is needed."
        )
        return refused(method, _CONVEX, why, excluded)
    return replace(min(tried, key=lambda verdict: verdict.missing), nothing=excluded)


def _strict(method: str, bound: Bound, slope: float) -> Convergence:
    """The verdict by one of the lower bounds on the Hessian."""
    lowest, newton = bound.on(0.0).low, method == "newton"

    def on(radius: float) -> StronglyConvex:
        hessian = bound.on(radius)
        numbers = hessian.low, hessian.high, hessian.variation, slope, radius, newton
        return StronglyConvex(*numbers, bound.start, *bound.newton)

    least = 2 * min(slope / lowest, bound.newton[0]) if lowest > 0 else math.inf
    least = max(least, 1e-300)
    if not math.isfinite(least):
        level = f", its eigenvalues are proved to be above {lowest:.3g} only" if lowest > -math.inf else ""
        why = (
            f"The Hessian is not proved to be positive definite{level}: go on until the weights are near a strict "
            "minimum, or add a ridge."
        )
        hypotheses = (
            Hypothesis("m₀", bound.meaning, bound.start, "> 0", bound.start > 0, lower=True),
            Hypothesis("‖∇F‖", "the gradient", slope),
        )
        return Convergence(method, _CONVEX, False, hypotheses, math.inf, (why,))
    candidates = [on(least * factor) for factor in _WIDER]
    good = [one for one in candidates if one.holds]
    best = good[0] if good else min(candidates, key=lambda one: one.factor)
    if not good:  # a smaller gradient moves less far
        candidates += [on(least * 4.0**-k) for k in range(1, 12)]
    missing = 1.0 if good else min(one.factor for one in candidates)
    needs, threshold = ("> 2V", 2 * best.variation) if newton else ("> 0", 0.0)
    reach = 2 * best.distance
    return Convergence(
        method=method,
        theorem=_CONVEX,
        proved=bool(good),
        hypotheses=(
            Hypothesis("‖∇F‖", "the gradient", slope),
            Hypothesis("m₀", bound.meaning, bound.start, "> 0", True, lower=True),
            Hypothesis("m", f"m₀ minus what is lost within {best.radius:.4g}", best.convexity, needs,
                       best.convexity > threshold, lower=True),
            Hypothesis("V", "how far the Hessian is there from that at the weights", best.variation),
            Hypothesis("2d", "twice the distance to the minimum", reach, f"≤ {best.radius:.4g}",
                       reach <= best.radius),
        ),
        missing=missing,
        advice=(f"A gradient {missing:.3g} times smaller at the same Hessian is enough: go on for some steps.",)
        if not good and math.isfinite(missing) else (),
        statement=best,
    )  # fmt: skip


def nothing(network: Network, problem: Regularised | None = None) -> NothingHere | None:
    """The largest ball that a certificate proves to hold no stationary point; ``None`` if it is not tried."""
    if network.parameters > _EXCLUDED:
        return None
    problem = problem or Regularised(network, None)
    extra = 0.0 if problem.regularizer is None else float(problem.regularizer.smoothness)
    slope, domain, best = problem.gradient()[0], None, None
    for _ in range(_BALLS):  # the first is that of the longest step; the radius is where r = g/L(r)
        certificate = certify_proved(network.model, network.x, objective=network.objective, domain=domain)
        if not isinstance(certificate.radius, float) or not certificate.smoothness.is_finite:
            break
        smooth = up(float(certificate.smoothness) + extra)
        meets = slope / smooth * (1 - 1e-9) if smooth else 0.0
        radius = min(certificate.radius, meets)
        if best is None or radius > best.radius:
            best = NothingHere(slope, smooth, radius)
        if not 0 < meets < 0.99 * certificate.radius:
            break
        domain = Ball(math.sqrt(meets * certificate.radius))
    return best


def refused(method: str, theorem: str, why: str, excluded: NothingHere | None = None) -> Convergence:
    """A verdict that nothing is proved, for a reason that no factor measures."""
    return Convergence(method, theorem, False, (), math.inf, (why,), nothing=excluded)


def _weight(network: Network) -> float:
    """The number c for which the objective is c times half of the squared residual, rounded up."""
    assert isinstance(network.objective, Square)
    return up(square_weight(network.objective, network.outputs.value.reshape(network.shape)))


def _not_onto(network: Network, advice: str = "") -> str:
    """Why the Jacobian is not proved to be onto; empty if it is."""
    equations = network.outputs.value.numel()
    if equations > network.parameters:
        return (
            f"There are {equations} equations and {network.parameters} parameters, so that the Jacobian is not "
            f"onto{advice}."
        )
    if not network.sigma > 0:
        return (
            "The smallest singular value of the Jacobian is zero up to round-off: two samples may be equal, or "
            "the network may be too small to fit any targets nearby."
        )
    return ""

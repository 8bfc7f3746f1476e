"""Which theorem about a linear rate applies, and on which ball.

The theorems are about gradient steps (plain, with momentum, on random batches) and damped Gauss-Newton steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from surefoot.norms.hermitian import up
from surefoot.theorems.balls import Profile
from surefoot.theorems.gradient_steps import GradientDescent, SquareOnBall
from surefoot.theorems.majorised import DampedGaussNewton
from surefoot.theorems.momentum import FastHeavyBall, HeavyBall, with_momentum
from surefoot.theorems.problem import Problem, not_onto, refused
from surefoot.theorems.record import Convergence, Hypothesis
from surefoot.theorems.stochastic import StochasticDescent, in_batches

_PARTS = (1.0, 0.5, 0.25, 0.1)
_SMALLER = tuple(4.0**-k for k in range(1, 9))
_GRADIENT = SquareOnBall.theorem

OnBall = GradientDescent | HeavyBall | FastHeavyBall | StochasticDescent | DampedGaussNewton
Theorems = Callable[[SquareOnBall], Iterable[OnBall]]


def plain(ball: SquareOnBall) -> Iterable[OnBall]:
    """The theorem about gradient descent, with several step sizes."""
    return (GradientDescent(*ball.numbers, part) for part in _PARTS)


@dataclass(frozen=True)
class Chosen:
    """A method with its options."""

    method: str
    momentum: float | None  # ``None`` to try several
    batch_size: int  # the size of random batches
    confidence: float  # the probability that random batches have to reach


def theorems_of(problem: Problem, chosen: Chosen) -> Theorems | None:
    """The theorems about a method; ``None`` if batches cannot be drawn."""
    method = chosen.method
    if method == "momentum":
        return lambda ball: with_momentum(ball, chosen.momentum)
    if method == "gradient":
        return plain
    if method == "damped":
        return lambda ball: [DampedGaussNewton(*ball.numbers)]
    samples = problem.pieces.count
    if samples is None:
        return None
    steepest = problem.linearised.steepest(samples)
    return lambda ball: in_batches(ball, samples, chosen.batch_size, steepest, chosen.confidence)


def descent(problem: Problem, chosen: Chosen) -> Convergence:
    """The verdict of the theorem with the best rate among those that hold; if none holds, what is missing."""
    method, why = chosen.method, not_onto(problem)
    if why:
        return refused(problem, method, _GRADIENT, why)
    theorems = theorems_of(problem, chosen)
    if theorems is None:
        return refused(
            problem, method, _GRADIENT,
            "Samples are not the rows of one input that are treated separately, so no batch can be drawn of them.",
        )  # fmt: skip
    linear, weight = problem.linearised, problem.weight()
    sigma, length = linear.sigma, linear.length

    def at(profile: Profile) -> list[OnBall]:
        radii = [(radius, radius) for radius, _ in profile.steps]
        if radii:  # K on the smallest of them holds on smaller ones
            radii += [(radii[0][0] * part, radii[0][0]) for part in _SMALLER]
        balls = (
            SquareOnBall(sigma, linear.norm, profile, problem.bending(larger).constant, radius, length, weight)
            for radius, larger in radii
        )
        return [statement for ball in balls for statement in theorems(ball)]

    def lacking(profile: Profile) -> float:
        return min((1.0 if s.holds else max(s.factor, 1.1) for s in at(profile)), default=math.inf)

    statements = at(problem.profile(math.inf, lacking))
    if not statements:
        return refused(problem, method, _GRADIENT, " ".join(problem.obstacles(1e-9 * length / sigma)))
    good = [statement for statement in statements if statement.holds]
    best = min(good, key=lambda s: s.rate) if good else min(statements, key=lambda s: s.factor)
    missing = 1.0 if good else best.factor
    advice = (
        f"A residual {'about ' if isinstance(best, HeavyBall) else ''}{missing:.3g} times smaller at the same "
        "Jacobian is enough, or a larger σ or a smaller K."
    )
    return Convergence(
        method=method,
        theorem=best.theorem,
        proved=bool(good),
        hypotheses=(
            Hypothesis("‖r‖", "the residual", length),
            Hypothesis("σ", "the smallest singular value of the Jacobian", sigma, "> 0", holds=True, lower=True),
            Hypothesis("‖J‖", "the norm of the Jacobian", linear.norm),
            Hypothesis("K", f"the Lipschitz constant of the Jacobian within {best.radius:.4g}", best.bending),
            *([Hypothesis("κ", "the damping", best.kappa)] if isinstance(best, DampedGaussNewton) else []),
            *_requirements(best),
        ),
        missing=missing,
        advice=(advice,) if not good and math.isfinite(missing) else (),
        obstacles=() if good else problem.obstacles(min(best.factor, 1e300) * best.radius),
        statement=best,
        nothing=None if good else problem.nothing(),
        loss=up(weight / 2 * length**2),
        weights=problem.weights,
    )


def _requirements(best: OnBall) -> Iterable[Hypothesis]:
    """The requirements of the theorem."""
    if isinstance(best, StochasticDescent):
        yield Hypothesis("v", "the variance of a gradient, over the loss", best.variance)
        allowed = f"≤ {(1 - best.confidence) / 2:.4g}"
        yield Hypothesis("δ", "the probability to leave the ball", best.risk, allowed, best.holds)
        return
    needed = best.factor * best.radius
    yield Hypothesis("path", "the length of the path", needed, f"< {best.radius:.4g}", best.holds)

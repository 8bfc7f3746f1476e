"""Newton steps by conjugate gradients on Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surefoot.chain.batched import Batched
from surefoot.graph.checks import differentiable_attention
from surefoot.linear_solve import Parts, conjugate_gradients, lowest_ritz
from surefoot.oracles.problem import (
    OracleError,
    Problem,
    Step,
    check_kappa,
    check_tolerance,
    refused,
    solved_status,
)

_MOST_DOUBLINGS = 200
_MOST_ITERATIONS = 2000
_LOOKS, _DOUBT = 24, 0.01  # steps of the method of Lanczos, and the probability with which they may mislead
_WHERE = "along a direction that was met"
Vector = list[Tensor]


def solve_conjugate(
    problem: Problem,
    kappa: float,
    double: bool = True,
    tolerance: float | None = None,
    most: int | None = None,
    checked: bool = True,
) -> Step:
    r"""The Newton step by the conjugate-gradient method, in the precision of the parameters.

    A direction :math:`d` with :math:`d^\top(\nabla^2F + \kappa I)d \le 0` shows that the model is unbounded below;
    then kappa is doubled and the method starts again. Conjugate gradients may miss negative curvature along
    directions that the gradient does not reach, as at a saddle. So the method of Lanczos looks for it from a
    random start (:func:`surefoot.linear_solve.lowest_ritz`), and the status says what is excluded with which
    confidence; ``dynamic`` misses none. A Hessian-vector product counts as two calls of the oracle, a push-forward
    and a pull-back.

    Args:
        problem: the objective around a point.
        kappa: the weight of the proximal term, positive.
        double: whether kappa is doubled until no such direction is met.
        tolerance: on the relative residual; by default 1e-10 in double precision, 1e-5 in single.
        most: how many iterations are made at most for one kappa.
        checked: whether negative curvature is looked for.
    """
    kappa = check_kappa(kappa)
    single = any(value.dtype != torch.float64 for value in problem.parameters.values())
    tolerance = check_tolerance(tolerance, torch.float32 if single else torch.float64, 1e-5, 1e-10)
    space = Parts(problem.dot)
    with differentiable_attention():
        gradient, product = _second_order(problem)
        scale = math.sqrt(space.dot(gradient, gradient))
        if not math.isfinite(scale):
            raise OracleError("the gradient is not finite at this point")
        most = min(most or _MOST_ITERATIONS, 10 * problem.size)
        doubled, iterations, looks = 0, 0, 0
        while True:

            def curve(v: Vector, kappa: float = kappa) -> Vector:
                return space.plus(product(v), v, kappa)

            found = conjugate_gradients(curve, [-g for g in gradient], space=space, tolerance=tolerance, most=most)
            iterations += found.iterations
            if not found.finite:
                raise OracleError("second derivatives are not finite at this point")
            if found.direction is None:
                low, high, count = _extremes(problem, curve) if checked and problem.size else (1.0, 1.0, 0)
                looks += count
                if low > 0:
                    break
            if not double or doubled == _MOST_DOUBLINGS:
                return refused(problem, "newton", kappa, doubled, _WHERE, None, iterations)
            kappa, doubled = 2 * kappa, doubled + 1
        curved = curve(found.x)
    left = space.plus(curved, gradient, 1.0)
    residual = math.sqrt(space.dot(left, left)) / scale if scale else 0.0
    solved = residual <= 10 * tolerance
    how = f"{iterations} iterations of conjugate gradients" if iterations != 1 else "one conjugate gradient"
    status = solved_status("newton", kappa, doubled, _WHERE, how)
    if looks:
        least = _excluded(high - low, problem.size)
        status += f"; no curvature below {-least:.1e} with a confidence of {1 - _DOUBT:.0%}"
    if not solved:
        status = f"stopped after {iterations} iterations with a relative residual of {residual:.1e}"
    return Step(
        direction=dict(zip(problem.parameters, found.x, strict=True)),
        kappa=kappa,
        model_decrease=max(0.0, -space.dot(gradient, found.x) - 0.5 * space.dot(found.x, curved)),
        status=status,
        solved=solved,
        calls=problem.autodiff.calls,
        iterations=iterations + looks,
        residual=residual,
        doubled=doubled,
    )


def _extremes(problem: Problem, curve: Callable[[Vector], Vector]) -> tuple[float, float, int]:
    """The extreme Ritz values from a random start, other numbers in each part of it."""
    start = [
        torch.randn(part.shape, generator=torch.Generator().manual_seed(2 * number)).to(part)
        for number, part in enumerate(problem.parameters.values())
    ]
    return lowest_ritz(curve, start, space=Parts(problem.dot), most=min(_LOOKS, problem.size))


def _excluded(width: float, size: int) -> float:
    """How far below zero an eigenvalue may be, at most with the doubt allowed: ε times the width of the spectrum.

    The width is that of the Ritz values over 1 − 2ε, as both ends may be missed by ε of it.
    """
    epsilon = (math.log(2 * 1.648 * math.sqrt(size) / _DOUBT) / (2 * _LOOKS - 1)) ** 2
    return 0.0 if size <= _LOOKS else epsilon * width / max(1 - 2 * epsilon, 1e-3)


def _second_order(problem: Problem) -> tuple[Vector, Callable[[Vector], Vector]]:
    """∇F(u), and v ↦ ∇²F(u)v."""
    chain, autodiff = problem.chain, problem.autodiff
    weights = [problem.weight(path) for path in problem.parameters]
    if isinstance(autodiff, Batched):

        def of_all(v: Vector) -> Vector:
            along = dict(zip(problem.parameters, v, strict=True))
            curved = problem.curve(autodiff.pushforward(along))
            bent = autodiff.bent(along, problem.slope, curved)
            return [bent[path] + w * a for path, a, w in zip(problem.parameters, v, weights, strict=True)]

        return [problem.gradient[path] for path in problem.parameters], of_all
    with torch.enable_grad():
        leaves = {path: value.detach().requires_grad_() for path, value in problem.parameters.items()}
        (output,) = chain.graph.run({**problem.point, **leaves}, [x.detach() for x in chain.inputs])
        variables = list(leaves.values())
        found: Sequence[Tensor | None] = [None] * len(variables)
        if output.requires_grad:
            loss = problem.objective(output)
            found = torch.autograd.grad(loss, variables, create_graph=True, allow_unused=True)
    problem.autodiff.calls += 1
    curved = [slope for slope in found if slope is not None and slope.requires_grad]
    places = [k for k, slope in enumerate(found) if slope is not None and slope.requires_grad]

    def product(v: Vector) -> Vector:
        problem.autodiff.calls += 2
        second: Sequence[Tensor | None] = [None] * len(variables)
        if curved:
            along = [v[k] for k in places]
            second = torch.autograd.grad(curved, variables, along, retain_graph=True, allow_unused=True)
        return [w * a if b is None else b + w * a for a, b, w in zip(v, second, weights, strict=True)]

    slopes = [
        torch.zeros_like(u) if slope is None else slope.detach() for u, slope in zip(variables, found, strict=True)
    ]
    return [slope + w * u.detach() for slope, w, u in zip(slopes, weights, variables, strict=True)], product

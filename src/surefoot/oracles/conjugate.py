"""Newton steps by conjugate gradients on Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.oracles.problem import OracleError, Problem, check_kappa
from surefoot.oracles.status import refused, solved_status
from surefoot.oracles.step import Step

_MOST_DOUBLINGS = 200
_MOST_ITERATIONS = 2000
Vector = list[Tensor]


def solve_conjugate(problem: Problem, kappa: float, double: bool = True, tolerance: float | None = None) -> Step:
    r"""The Newton step by the conjugate-gradient method, in the precision of the parameters.

    A direction :math:`d` with :math:`d^\top(\nabla^2F + \kappa I)d \le 0` shows that the model is unbounded below;
    then kappa is doubled and the method starts again. It may miss negative curvature along directions that the
    gradient does not reach; ``dynamic`` misses none. A Hessian-vector product counts as two calls of the oracle, a
    push-forward and a pull-back.

    Args:
        problem: the objective around a point.
        kappa: the weight of the proximal term, positive.
        double: whether kappa is doubled until no such direction is met.
        tolerance: on the relative residual; by default 1e-10 in double precision, 1e-5 in single.
    """
    kappa = check_kappa(kappa)
    single = any(value.dtype != torch.float64 for value in problem.parameters.values())
    tolerance = tolerance if tolerance is not None else 1e-5 if single else 1e-10
    if not 0 < tolerance < 1:
        raise OracleError(f"the tolerance is between 0 and 1, got {tolerance!r}")
    with torch.inference_mode(False), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        gradient, product = _second_order(problem)
        doubled, iterations = 0, 0
        while True:
            found, used = _minimise(lambda v: _plus(product(v), v, kappa), gradient, tolerance)  # noqa: B023
            iterations += used
            if found is not None:
                break
            if not double or doubled == _MOST_DOUBLINGS:
                return refused(
                    problem, "newton", kappa, doubled, "along a direction that was met", None, iterations
                )
            kappa, doubled = 2 * kappa, doubled + 1
        curved = _plus(product(found), found, kappa)
    scale = math.sqrt(_dot(gradient, gradient))
    left = [a + b for a, b in zip(curved, gradient, strict=True)]
    residual = math.sqrt(_dot(left, left)) / scale if scale else 0.0
    solved = residual <= 10 * tolerance
    how = f"{iterations} iterations of conjugate gradients" if iterations != 1 else "one conjugate gradient"
    status = solved_status("newton", kappa, doubled, "along a direction that was met", how)
    return Step(
        direction=dict(zip(problem.parameters, found, strict=True)),
        kappa=kappa,
        model_decrease=max(0.0, -_dot(gradient, found) - 0.5 * _dot(found, curved)),
        status=status
        if solved
        else f"stopped after {iterations} iterations with a relative residual of {residual:.1e}",
        solved=solved,
        calls=problem.autodiff.calls,
        iterations=iterations,
        residual=residual,
        doubled=doubled,
    )


def _second_order(problem: Problem) -> tuple[Vector, Callable[[Vector], Vector]]:
    """∇F(u), and v ↦ ∇²F(u)v."""
    chain = problem.chain
    weights = [problem.weight(path) for path in problem.parameters]
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


def _minimise(
    product: Callable[[Vector], Vector], gradient: Vector, tolerance: float
) -> tuple[Vector | None, int]:
    """The minimiser of ½⟨v, Av⟩ + ⟨g, v⟩ and the number of iterations; ``None`` if A is not positive definite."""
    v = [torch.zeros_like(g) for g in gradient]
    residual = [-g for g in gradient]
    direction = residual
    squared = first = _dot(residual, residual)
    if not math.isfinite(first):
        raise OracleError("the gradient is not finite at this point")
    most = min(_MOST_ITERATIONS, 10 * sum(g.numel() for g in gradient))
    for k in range(most):
        if squared <= tolerance**2 * first:
            return v, k
        image = product(direction)
        curvature = _dot(direction, image)
        if not math.isfinite(curvature):
            raise OracleError("second derivatives are not finite at this point")
        if curvature <= 0:
            return None, k + 1
        step = squared / curvature
        v, residual = _plus(v, direction, step), _plus(residual, image, -step)
        squared, last = _dot(residual, residual), squared
        direction = _plus(residual, direction, squared / last)
    return v, most


def _plus(a: Vector, b: Vector, factor: float) -> Vector:
    return [x + factor * y for x, y in zip(a, b, strict=True)]


def _dot(a: Vector, b: Vector) -> float:
    return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))

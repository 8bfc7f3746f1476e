"""Newton steps by conjugate gradients on Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.chain.batched import Batched
from surefoot.linear_solve import Flat, conjugate_gradients, inner, lowest_ritz, norm
from surefoot.oracles.problem import (
    OracleError,
    Problem,
    Step,
    check_kappa,
    check_tolerance,
    refused,
    solved_status,
)
from surefoot.program.checks import differentiable_attention

_MOST_DOUBLINGS = 200
_MOST_ITERATIONS = 2000
_LOOKS, _DOUBT = 24, 0.01  # steps of the method of Lanczos, and the probability with which they may mislead
_WHERE = "along a direction that was met"


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
    if not problem.parameters:
        return Step({}, kappa, 0.0, solved_status("newton", kappa, 0, _WHERE, "no iteration"))
    doubled, iterations, looks, low, high = 0, 0, 0, 1.0, 1.0
    with differentiable_attention():
        gradient, product = _second_order(problem)
        scale = norm(gradient)
        if not math.isfinite(scale):
            raise OracleError("the gradient is not finite at this point")
        most = min(most or _MOST_ITERATIONS, 10 * problem.size)
        while True:

            def curve(v: Tensor, kappa: float = kappa) -> Tensor:
                return product(v).add_(v, alpha=kappa)

            solution = conjugate_gradients(curve, -gradient, space=Flat(), tolerance=tolerance, most=most)
            iterations += solution.iterations
            if not solution.finite:
                raise OracleError("second derivatives are not finite at this point")
            if solution.direction is None:
                if checked and problem.size:
                    start = torch.randn(problem.size, generator=torch.Generator().manual_seed(0)).to(gradient)
                    count = min(_LOOKS, problem.size)
                    low, high, count = lowest_ritz(curve, start, space=Flat(), most=count)
                    looks += count
                if low > 0:
                    break
            if not double or doubled == _MOST_DOUBLINGS:
                return refused(problem, "newton", kappa, _WHERE, iterations=iterations, doubled=doubled)
            kappa, doubled = 2 * kappa, doubled + 1
        curved = curve(solution.x)
    residual = norm(curved + gradient) / scale if scale else 0.0
    how = f"{iterations} iterations of conjugate gradients" if iterations != 1 else "one conjugate gradient"
    status = solved_status("newton", kappa, doubled, _WHERE, how)
    if looks:
        least = _excluded(high - low, problem.size)
        status += f"; no curvature below {-least:.1e} with a confidence of {1 - _DOUBT:.0%}"
    if residual > 10 * tolerance:
        status = f"stopped after {iterations} iterations with a relative residual of {residual:.1e}"
    return Step(
        direction=problem.split(solution.x),
        kappa=kappa,
        model_decrease=max(0.0, -inner(gradient, solution.x) - 0.5 * inner(solution.x, curved)),
        status=status,
        solved=residual <= 10 * tolerance,
        calls=problem.autodiff.calls,
        iterations=iterations + looks,
        residual=residual,
        doubled=doubled,
    )


def _excluded(width: float, size: int) -> float:
    """How far below zero an eigenvalue may be, at most with the doubt allowed: ε times the width of the spectrum.

    The width is that of the Ritz values over 1 − 2ε, as both ends may be missed by ε of it.
    """
    epsilon = (math.log(2 * 1.648 * math.sqrt(size) / _DOUBT) / (2 * _LOOKS - 1)) ** 2
    return 0.0 if size <= _LOOKS else epsilon * width / max(1 - 2 * epsilon, 1e-3)


def _second_order(problem: Problem) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """∇F(u), and v ↦ ∇²F(u)v."""
    chain, autodiff, ridge = problem.chain, problem.autodiff, problem.metric(0.0)
    if isinstance(autodiff, Batched):

        def of_all(v: Tensor) -> Tensor:
            along = problem.split(v)
            curved = problem.curve(autodiff.pushforward(along))
            return problem.join(autodiff.bent(along, problem.slope, curved)).addcmul_(ridge, v)

        return problem.join(problem.gradient), of_all
    with torch.enable_grad():
        leaves = {path: value.detach().requires_grad_() for path, value in problem.parameters.items()}
        (output,) = chain.graph.run({**problem.point, **leaves}, [x.detach() for x in chain.inputs])
        slopes: dict[str, Tensor] = {}
        if output.requires_grad:
            found = torch.autograd.grad(
                problem.objective(output), list(leaves.values()), create_graph=True, allow_unused=True
            )
            slopes = {path: slope for path, slope in zip(leaves, found, strict=True) if slope is not None}
    autodiff.calls += 1
    curved = [path for path, slope in slopes.items() if slope.requires_grad]

    def product(v: Tensor) -> Tensor:
        autodiff.calls += 2
        along = problem.split(v)
        second = torch.autograd.grad(
            [slopes[path] for path in curved], list(leaves.values()), [along[path] for path in curved],
            retain_graph=True, materialize_grads=True, allow_unused=True,
        ) if curved else [torch.zeros_like(leaf) for leaf in leaves.values()]  # fmt: skip
        return problem.join(dict(zip(leaves, second, strict=True))).addcmul_(ridge, v)

    gradient = problem.join({path: slope.detach() for path, slope in slopes.items()})
    return gradient.addcmul_(ridge, problem.join({path: leaf.detach() for path, leaf in leaves.items()})), product

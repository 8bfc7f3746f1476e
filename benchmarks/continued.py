"""Runs continued in 200-bit arithmetic: what came out over what a theorem promised, which is never above one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import flint
import torch
from flint import arb, arb_mat
from torch import Tensor, nn

from surefoot.theorems import Convergence, Interpolation, StronglyConvex

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from judges.exact import stored, truth
from theorems.small_networks import BITS, Exact, distance, middle

_STEPS = 3
_MOST = 250_000  # entries of a Jacobian of 200-bit numbers, and of matrices of that many rows
_TINY = arb(2) ** -150  # what 200 bits lose


def largest_quotient(
    model: nn.Module, x: Tensor, y: Tensor, verdict: Convergence, whole: Callable[[], Tensor]
) -> float:
    """Distances, residuals and values of the next steps over the bounds on them; not a number if it is too large.

    Args:
        model: the network, from whose weights convergence is proved.
        x: the samples, which do not interact.
        y: the targets.
        verdict: what was proved.
        whole: the objective with its regulariser.
    """
    parameters = sum(p.numel() for p in model.parameters())
    if isinstance(verdict.statement, Interpolation) and y.numel() * parameters > 8 * _MOST:
        return float("nan")
    with flint.ctx.workprec(BITS):
        if isinstance(verdict.statement, Interpolation):
            found = _interpolation(model, x, y, verdict.statement)
        elif isinstance(verdict.statement, StronglyConvex):
            found = _strict_minimum(Exact(model, whole), verdict, verdict.statement)
        else:
            found = _gradient_steps(Exact(model, whole), verdict)
        return max(float((actual / (promise + _TINY)).upper()) for actual, promise in found)


def _interpolation(model: nn.Module, x: Tensor, y: Tensor, statement: Interpolation) -> Iterator[tuple[arb, arb]]:
    """Gauss-Newton; the row of an output needs its sample alone."""
    rows = [Exact(model, partial(lambda n: model(x[n : n + 1]), n)) for n in range(len(x))]
    wanted, units = list(stored(y).reshape(-1)), torch.eye(y[0].numel()).tolist()

    def outputs(u: list[arb]) -> list[arb]:
        return [value for row in rows for value in row.values(u)]

    run = [rows[0].start()]
    for _ in range(_STEPS + 2):
        u = run[-1]
        jacobian = arb_mat([row.gradient(u, unit) for row in rows for unit in units])
        residual = arb_mat([[value - t] for value, t in zip(outputs(u), wanted, strict=True)])
        step = jacobian.transpose() * (jacobian * jacobian.transpose()).solve(residual)
        run.append(middle([a - step[k, 0] for k, a in enumerate(u)]))
    for k, u in enumerate(run[: _STEPS + 1]):
        far, left = map(arb, statement.after(k))
        yield distance(u, run[-1]), far
        if k:
            yield distance(outputs(u), wanted), left


def _gradient_steps(exact: Exact, verdict: Convergence) -> Iterator[tuple[arb, arb]]:
    start = u = exact.start()
    (first,) = exact.values(u)
    assert verdict.step_size is not None
    assert verdict.rate is not None
    assert verdict.radius is not None
    for k in range(1, _STEPS + 1):
        u = middle([a - arb(verdict.step_size) * g for a, g in zip(u, exact.gradient(u), strict=True)])
        yield exact.values(u)[0].upper(), first * arb(verdict.rate) ** k
        yield distance(u, start), arb(verdict.radius)


def _strict_minimum(exact: Exact, verdict: Convergence, statement: StronglyConvex) -> Iterator[tuple[arb, arb]]:
    """The limit by Newton steps. Their equations are solved by refinement: a Hessian in double precision takes
    ten digits off what is left, and products with the Hessian in 200 bits say what is.
    """
    start = exact.start()
    rough = torch.linalg.inv(_hessian(exact))

    def newton(u: list[arb]) -> list[arb]:
        left, moved = exact.gradient(u), list(u)
        for _ in range(5):
            scale = max((abs(g) for g in left), key=float) + _TINY
            part = rough @ torch.tensor([float(g / scale) for g in left], dtype=torch.float64)
            bent = exact_product(exact, u, part)
            left = middle([g - scale * b for g, b in zip(left, bent, strict=True)])
            moved = [m - scale * arb(p) for m, p in zip(moved, part.tolist(), strict=True)]
        return middle(moved)

    limit = start
    for _ in range(4):
        limit = newton(limit)
    away = distance(start, limit)
    yield away, arb(statement.distance)
    yield (exact.values(start)[0] - exact.values(limit)[0]).upper(), arb(statement.gap)
    if verdict.method == "newton":
        moved = newton(start)
    else:
        slope = exact.gradient(start)
        moved = middle([a - arb(statement.step_size) * g for a, g in zip(start, slope, strict=True)])
    yield distance(moved, limit), away * arb(statement.rate)


def exact_product(exact: Exact, u: list[arb], direction: Tensor) -> list[arb]:
    """The Hessian times a direction of doubles."""
    parts = direction.split([p.numel() for p in exact.parameters])
    moves = {p: part.reshape(p.shape) for p, part in zip(exact.parameters, parts, strict=True)}
    return truth(exact.function, exact.model, exact._point(u), direction=moves).bent


def _hessian(exact: Exact) -> Tensor:
    """In double precision, by automatic differentiation."""
    slopes = torch.autograd.grad(exact.function(), exact.parameters, create_graph=True)
    flat = torch.cat([slope.reshape(-1) for slope in slopes])
    rows = [torch.autograd.grad(s, exact.parameters, retain_graph=True) for s in flat]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])

"""Geodesic acceleration against dense second derivatives, and trust regions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import surefoot as sf
from judges.steps import DenseModel, flat
from surefoot.optim import GaussNewton, Newton
from surefoot.optim.trust_region import next_radius, on_ball
from surefoot.oracles.problem import Problem, Step
from surefoot.oracles.steps import Solver, accelerated, gauss_newton_solver

F64 = torch.float64


def _problem(hidden: nn.Module, ridge: sf.objectives.Ridge | None = None) -> tuple[Problem, DenseModel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), hidden, nn.Linear(5, 4)).double()
    x, objective = torch.randn(7, 3, dtype=F64), sf.CrossEntropy(torch.randint(0, 4, (7,)))
    return Problem(sf.Chain(model, x), objective, None, ridge), DenseModel(model, x, objective, ridge)


def _expected(judge: DenseModel, v: torch.Tensor, kappa: float) -> torch.Tensor:
    """The acceleration from its definition: the exact second derivative of the output, and a dense solve."""
    derive = torch.autograd.functional.jacobian
    zero = torch.zeros((), dtype=F64)
    c = derive(lambda t: derive(lambda s: judge.output(judge.point + s * v), t, create_graph=True), zero)
    jacobian = derive(lambda u: judge.output(u).flatten(), judge.point)
    output = judge.output(judge.point).detach()
    H = torch.autograd.functional.hessian(lambda y: judge.objective(y.reshape(output.shape)), output.flatten())
    matrix = judge.gauss_newton + kappa * torch.eye(len(v), dtype=F64)
    return -torch.linalg.solve(matrix, jacobian.T @ H @ c.flatten())


@pytest.mark.parametrize("method", ["primal_gram", "dual_gram"])
@pytest.mark.parametrize("tolerance", [1e-12, 1e-3])
def test_the_acceleration_is_that_of_dense_matrices(method: str, tolerance: float) -> None:
    """The output of two linear layers is quadratic in the parameters, so the quotient of differences is exact."""
    for ridge in (None, sf.objectives.Ridge(0.3)):
        problem, judge = _problem(nn.Identity(), ridge)
        solver = gauss_newton_solver(problem, method, tolerance)  # type: ignore[arg-type]
        assert solver.correct is not None
        for kappa in (1.0, 10.0):
            step = accelerated(problem, solver.solve(kappa, tolerance, None), solver.correct)
            assert step.bend is not None
            v = flat(step.direction)
            expected = 0.5 * _expected(judge, v, kappa)
            assert float((flat(step.bend) - expected).norm()) <= max(tolerance, 1e-9) * float(v.norm())


def test_where_the_output_is_not_quadratic_the_quotient_is_close() -> None:
    problem, judge = _problem(nn.Tanh())
    solver = gauss_newton_solver(problem, "primal_gram", 1e-12)
    assert solver.correct is not None
    step = accelerated(problem, solver.solve(0.5, 1e-12, None), solver.correct)
    assert step.bend is not None
    expected = 0.5 * _expected(judge, flat(step.direction), 0.5)
    assert float((flat(step.bend) - expected).norm()) < 0.3 * float(expected.norm())


def test_a_long_acceleration_is_left_out() -> None:
    problem, _ = _problem(nn.Tanh())
    solver: Solver = gauss_newton_solver(problem, "primal_gram", 1e-12)
    step = solver.solve(1.0, 1e-12, None)
    assert accelerated(problem, step, lambda v, c: 1e3 * v).bend is None
    assert accelerated(problem, step, lambda v, c: torch.nan * v).bend is None


def test_bent_steps_leave_a_valley_faster() -> None:
    """A physics-informed network in small: at the same number of steps the loss is lower by far."""
    x = torch.linspace(-1, 1, 40, dtype=F64)[:, None]
    ends = {}
    for acceleration in (False, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)).double()
        optimizer = GaussNewton(model, sf.Square(), acceleration=acceleration)
        losses = [optimizer.step(x, torch.sin(7 * x)) for _ in range(40)]
        assert all(after < before for before, after in pairwise(losses))
        ends[acceleration] = losses[-1]
    assert ends[None] < 0.5 * ends[False], ends


def test_what_cannot_be_bent_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="primal_gram"):
        GaussNewton(model, sf.Square(), method="dual", acceleration=True)
    with pytest.raises(ValueError, match="certified"):
        GaussNewton(model, sf.Square(), damping="certified", acceleration=True)


@pytest.mark.parametrize("radius", [1e-3, 0.05, 0.7])
def test_a_step_on_a_ball_minimises_the_model_there(radius: float) -> None:
    problem, judge = _problem(nn.Tanh())
    solver = gauss_newton_solver(problem, "primal_gram", 1e-12)
    step, length = on_ball(lambda kappa: solver.solve(kappa, 1e-12, None), 1.0, radius, 1e-12)
    assert 0.8 * radius <= length <= 1.2 * radius
    v = flat(step.direction)
    assert length == pytest.approx(float(v.norm()))

    def model(w: torch.Tensor) -> float:
        return float(judge.gradient @ w + 0.5 * w @ judge.gauss_newton @ w)

    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        w = v + 0.3 * length * torch.randn(len(v), dtype=F64, generator=generator)
        assert model(v) <= model(w * min(1.0, length / float(w.norm()))) + 1e-15


def test_a_ball_that_is_too_large_is_not_reached() -> None:
    def solve(kappa: float) -> Step:
        return Step({"u": torch.full((1,), 1 / (1 + kappa), dtype=F64)}, kappa, 1.0, "")

    step, length = on_ball(solve, 1.0, 5.0, 1e-12)
    assert length == pytest.approx(1.0, rel=1e-2)
    assert step.kappa < 1e-3
    assert next_radius(5.0, length, 0.9) == 5.0
    assert next_radius(1.0, 1.0, 0.9) == 2.0
    assert next_radius(1.0, 1.0, 0.1) == 0.25


@pytest.mark.parametrize("kind", [GaussNewton, Newton])
def test_trust_regions_descend_and_resume(kind: type[GaussNewton | Newton]) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 4, dtype=F64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = kind(model, sf.CrossEntropy(), damping="trust_region")
    losses = [optimizer.step(x, y) for _ in range(10)]
    assert all(after < before for before, after in pairwise(losses))
    assert losses[-1] < 0.2 * losses[0]
    other = kind(model, sf.CrossEntropy(), damping="trust_region")
    other.load_state_dict(optimizer.state_dict())
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer.step(x, y)
    ahead = flat(dict(model.named_parameters()))
    model.load_state_dict(weights)
    other.step(x, y)
    assert torch.allclose(ahead, flat(dict(model.named_parameters())), rtol=1e-9)

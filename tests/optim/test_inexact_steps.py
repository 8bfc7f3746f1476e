"""Steps solved as exactly as it pays: the forcing sequence, and what it does to convergence and to work."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import nn

import surefoot as sf
from judges.steps import DenseModel, flat
from surefoot.optim import GaussNewton, Newton
from surefoot.optim.forcing import Forcing
from surefoot.oracles.gauss_newton import Primal
from surefoot.oracles.problem import Problem

F64 = torch.float64


def _fitted() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network near the one that made the targets: the residual is zero at the minimum."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x = torch.randn(60, 3, dtype=F64)
    y = teacher(x).detach()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return student, x, y


def test_the_tolerance_follows_the_decrease_of_the_gradient() -> None:
    forcing = Forcing()
    forcing.at("a", 4.0)
    assert forcing.tolerance(1e-12) == 0.1
    forcing.at("a", 0.04)
    assert forcing.tolerance(1e-12) == 0.5 * 0.01
    assert forcing.tolerance(1e-2) == 1e-2
    forcing.at("b", 1e-9)  # other data say nothing
    assert forcing.tolerance(1e-12) == 0.1
    other = Forcing()
    other.load(forcing.state())
    forcing.at("b", 1e-11)
    other.at("b", 1e-11)
    assert other.tolerance(1e-12) == forcing.tolerance(1e-12) < 0.1


def test_the_cap_grows_where_the_model_is_right_and_falls_where_it_is_wrong() -> None:
    forcing = Forcing()
    first = forcing.most
    forcing.learn(first - 1, 1.0)
    assert forcing.most == first
    for _ in range(30):
        forcing.learn(forcing.most, 0.9)
    assert forcing.most == first + 30
    forcing.learn(3, -1.0)
    assert first <= forcing.most < first + 30


def test_convergence_is_superlinear() -> None:
    """The ratio of neighbouring gradients tends to zero, as the theorem of the documentation says."""
    for kind in (GaussNewton, Newton):
        model, x, y = _fitted()
        optimizer = kind(model, sf.Square(), method="auto", kappa=1e-3)
        for _ in range(14):
            optimizer.step(x, y)
        sizes = [record.gradient_norm for record in optimizer.history]
        reached = [size for size in sizes if size > 1e-13 * sizes[0]]
        ratios = [b / a for a, b in pairwise(reached)]
        assert min(sizes) < 1e-10 * sizes[0], (kind, sizes)
        assert min(ratios[-2:]) < 0.05, (kind, ratios)


def test_an_inexact_step_lowers_the_model_as_much_as_it_says() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, y = torch.randn(30, 6, dtype=F64), torch.randint(0, 4, (30,))
    objective = sf.CrossEntropy(y)
    judge = DenseModel(model, x, objective)
    best = None
    for most in (1, 2, 4, 8):
        step = Primal(Problem(sf.Chain(model, x), objective)).solve(1e-3, 1e-2, most)
        assert step.iterations <= most
        assert abs(step.residual - judge.residual(step, "gauss_newton")) < 1e-9
        assert step.solved == (step.residual <= 1e-2)
        decrease = judge.decrease(step, "gauss_newton")
        assert abs(step.model_decrease - decrease) < 1e-9 * decrease
        assert best is None or decrease > best  # each iteration lowers the model
        best = decrease


def test_another_kappa_starts_where_the_last_one_ended() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, objective = torch.randn(30, 6, dtype=F64), sf.CrossEntropy(torch.randint(0, 4, (30,)))
    solver = Primal(Problem(sf.Chain(model, x), objective))
    judge = DenseModel(model, x, objective)
    for kappa, tolerance in ((1e-2, 1e-10), (2e-2, 1e-10), (2e-2, 1e-9)):
        step = solver.solve(kappa, tolerance)
        assert step.solved
        assert judge.error(step, "gauss_newton") < 1e-7
    assert step.iterations == 0


def test_a_step_costs_few_calls() -> None:
    """At a tenth, a step on many samples needs a handful of products, however many outputs there are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10))
    x, y = torch.randn(800, 20), torch.randint(0, 10, (800,))
    optimizer = GaussNewton(model, sf.CrossEntropy())
    losses = [optimizer.step(x, y) for _ in range(6)]
    assert all(after < before for before, after in pairwise(losses))
    problem = Problem(sf.Chain(model, x), sf.CrossEntropy(y))
    step = optimizer.solver(problem, optimizer.history[-1].data)(optimizer.kappa)
    assert step.calls <= 2 * optimizer._forcing.most + 1
    assert flat(step.direction).isfinite().all()

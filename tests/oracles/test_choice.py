"""The method that is chosen: by predicted cost, with its reason, and with the right result."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import surefoot as sf
from judges.layered import MODELS, build, objectives
from judges.steps import DenseModel
from surefoot.oracles import steps
from surefoot.oracles.choice import Choice, choose_gauss_newton, choose_newton
from surefoot.oracles.losses import columns_of, factor_of
from surefoot.oracles.problem import Problem

F64 = torch.float64


def _problem(model: nn.Module, x: torch.Tensor, classes: int) -> Problem:
    y = torch.zeros(len(x), dtype=torch.long)
    y[-1] = classes - 1
    return Problem(sf.Chain(model, x), sf.CrossEntropy(y))


def _chosen(problem: Problem, tolerance: float, most: int | None = None) -> Choice:
    return choose_gauss_newton(problem, columns_of(problem), tolerance, most)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_chosen_solves_the_model_and_says_why(name: str) -> None:
    model, x = build(name)
    objective = objectives(x.shape[0])["labels"]
    step = sf.oracles.gauss_newton(sf.Chain(model, x), objective, 0.1)
    assert step.solved
    assert DenseModel(model, x, objective).error(step, "gauss_newton") < 1e-8
    assert "chosen at about" in step.status


def test_the_choice_follows_the_sizes() -> None:
    """Many rows and few parameters, few rows and many parameters, many of both, samples that meet."""
    torch.manual_seed(0)
    few = _problem(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(2000, 4), 2)
    assert _chosen(few, 1e-6).method == "primal_gram"
    wide = _problem(nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 10)), torch.randn(8, 784), 10)
    assert _chosen(wide, 1e-6).method == "dual_gram"
    both = _problem(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)), torch.randn(3000, 64), 10)
    assert _chosen(both, 0.1, 10).method == "primal"
    met = nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 2))
    assert _chosen(_problem(met, torch.randn(500, 4), 2), 1e-6).method in ("primal", "dual")
    assert choose_newton(both, 1e-5).method == "cg"


def test_what_would_not_fit_is_not_chosen() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1000))
    costs = _chosen(_problem(model, torch.randn(128, 64), 1000), 1e-6).costs
    assert costs["dual_gram"] == costs["primal_gram"] == math.inf


def test_a_vocabulary_needs_no_square_of_it() -> None:
    """The factor of cross-entropy has as many numbers as the outputs; its products are those of the Hessian."""
    torch.manual_seed(0)
    outputs = torch.randn(4, 6, dtype=F64)
    problem = Problem(
        sf.Chain(nn.Linear(3, 6).double(), torch.randn(4, 3, dtype=F64)), sf.CrossEntropy([0, 5, 2, 2])
    )
    factor = factor_of(problem, F64)
    assert factor.blocks is None
    assert factor.unit is not None
    assert factor.unit.shape == (4, 6)
    assert torch.allclose(factor.curved(outputs), problem.curve(outputs), rtol=1e-12)
    columns = torch.stack([factor.column(j, F64, outputs.device) for j in range(5)], dim=2)
    z = torch.randn(4, 5, dtype=F64)
    assert torch.allclose(torch.bmm(columns, z[:, :, None])[:, :, 0], factor.forth(z), rtol=1e-12)
    assert torch.allclose(torch.bmm(outputs[:, None], columns)[:, 0], factor.back(outputs), rtol=1e-12)
    together = factor.all_columns(F64, outputs.device)
    assert torch.allclose(together.permute(1, 2, 0), columns, rtol=1e-12, atol=1e-15)
    assert factor.slope is not None
    assert torch.allclose(factor.forth(factor.slope), problem.slope, rtol=1e-10)


def test_a_factor_that_follows_iterations_counts_twice_and_so_do_small_operations() -> None:
    """Few parameters beside many rows of the dual; an iteration on the parameters of a small layer is overhead."""
    torch.manual_seed(0)
    small = _problem(nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 10)), torch.randn(32, 20), 10)
    assert _chosen(small, 1e-6).method == "primal_gram"
    linear = _problem(nn.Linear(30, 50), torch.randn(16, 30), 50)
    assert _chosen(linear, 1e-6).method == "dual_gram"


def test_the_choice_of_a_newton_step_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("perceptron")
    chain, objective, made = sf.Chain(model, x), objectives(x.shape[0])["labels"], []
    monkeypatch.setattr(steps, "choose_newton", lambda *asked: made.append(asked) or choose_newton(*asked))
    first = sf.oracles.newton(chain, objective, 1.0)
    sf.oracles.gauss_newton(chain, objective, 1.0)
    second = sf.oracles.newton(chain, objective, 1.0)
    assert len(made) == 1
    assert first.status == second.status
    sf.oracles.newton(chain, objective, 1.0, tolerance=1e-3)
    assert len(made) == 2

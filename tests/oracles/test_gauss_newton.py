"""The Gauss-Newton oracles against the model written out: dense Jacobian, dense curvature, dense solve."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from judges.layered import F64, MODELS, build, objectives
from judges.steps import DenseModel, saturated
from surefoot.objectives import Ridge
from surefoot.oracles import gauss_newton
from surefoot.oracles.gauss_newton import Dual
from surefoot.oracles.gram import Gram
from surefoot.oracles.problem import Problem

METHODS = ("dual", "dual_gram", "primal", "primal_gram", "dynamic")


@pytest.mark.parametrize("side", ["parameters", "dual"])
def test_rows_serve_every_kappa_and_every_weight(side: Any) -> None:
    model, x = build("convolution")
    chain, objective = sf.Chain(model, x), objectives(4)["labels"]
    for ridge in (None, Ridge(0.2), Ridge({"0": 0.3, "7": 0.1})):
        problem = Problem(chain, objective, None, ridge)
        system = Gram(problem, side)
        for kappa in (1.0, 1e-3, 0.1, 10.0):
            before = problem.autodiff.calls
            step = system.solve(kappa, 1e-12)
            assert problem.autodiff.calls == before
            assert DenseModel(model, x, objective, ridge).error(step, "gauss_newton") < 1e-8


@pytest.mark.parametrize("name", MODELS)
def test_directions_are_those_of_the_dense_model(name: str) -> None:
    model, x = build(name)
    chain = sf.Chain(model, x)
    regularizers = {
        "none": None,
        "ridge": Ridge(0.2),
        "layers": Ridge({next(iter(chain.graph.blocks)): 0.5}),
    }
    cases = [("labels", "none", 0.1), ("labels", "layers", 1e-3), ("soft", "ridge", 0.1), ("square", "none", 1e-2)]
    cases += [("square", "layers", 0.1)]
    for loss, kind, kappa in cases:
        objective, ridge = objectives(x.shape[0])[loss], regularizers[kind]
        judge = DenseModel(model, x, objective, ridge)
        for method in METHODS:
            step = gauss_newton(chain, objective, kappa=kappa, method=method, regularizer=ridge)
            where = f"{name}, {loss}, {kind}, {method}: {step.status}"
            assert judge.error(step, "gauss_newton") < 1e-8, where
            assert judge.residual(step, "gauss_newton") < 1e-9, where
            assert step.solved or (method == "dual" and step.residual is None), where  # no call left to measure it
            assert step.model_decrease == pytest.approx(judge.decrease(step, "gauss_newton"), rel=1e-7), where
            if method == "dual":
                assert step.calls <= 2 * x.shape[0] * 3 + 1, where
            assert step.direction.keys() == chain.parameters.keys()


def test_calls_are_counted() -> None:
    model, x = build("perceptron")
    for objective in objectives(5).values():
        for ridge in (None, Ridge(0.1)):
            problem = Problem(sf.Chain(model, x), objective, None, ridge)
            step = Dual(problem).solve(1e-3, 1e-12)
            assert step.calls == problem.autodiff.calls <= 2 * 15 + 1
            assert step.iterations <= 15


def test_a_small_problem_ends_within_the_calls_however_small_kappa_is() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(1, 3, dtype=F64)
    for kappa in (1e-8, 1.0, 1e8):
        for ridge in (None, Ridge(0.5)):
            objective = sf.Square(torch.ones(1, 1, dtype=F64))
            step = gauss_newton(sf.Chain(model, x), objective, kappa=kappa, method="dual", regularizer=ridge)
            judge = DenseModel(model, x, objective, ridge)
            assert step.calls <= 3
            assert judge.error(step, "gauss_newton") < 1e-7


@pytest.mark.parametrize("method", METHODS)
def test_linear_least_squares_are_solved_in_one_step(method: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 3, dtype=F64), torch.randn(20, 2, dtype=F64)
    model = nn.Linear(3, 2).double()
    step = gauss_newton(sf.Chain(model, x), sf.Square(y), kappa=1e-10, method=method, tolerance=1e-9)
    design = torch.cat([x, torch.ones(20, 1, dtype=F64)], dim=1)
    best = torch.linalg.lstsq(design, y).solution
    found = torch.cat(
        [
            model.weight.detach() + step.direction["weight"],
            (model.bias.detach() + step.direction["bias"])[:, None],
        ],
        dim=1,
    )
    assert torch.allclose(found, best.T, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["dual", "dual_gram"])
@pytest.mark.parametrize("kappa", [0.1, 1e-3])
def test_single_precision_reaches_its_tolerance(method: Any, kappa: float) -> None:
    """The judge is in double precision, at the very parameters of the model in single precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 10))
    x, y = torch.randn(40, 8), torch.randint(0, 10, (40,))
    step = gauss_newton(sf.Chain(model, x), sf.CrossEntropy(y), kappa=kappa, method=method)
    judge = DenseModel(copy.deepcopy(model).double(), x.double(), sf.CrossEntropy(y))
    assert step.solved, step.status
    assert step.residual <= 1e-6
    assert judge.residual(step, "gauss_newton") < 3e-6
    assert {value.dtype for value in step.direction.values()} == {torch.float32}


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("kappa", [0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("size", [1.0, 60.0, 300.0])
def test_the_residual_in_single_precision_is_the_true_one(size: float, kappa: float, in_pieces: bool) -> None:
    """A saturated soft-max hides most of it in single precision; the judge is dense and in double."""
    (model, x, y), ridge = saturated(size), Ridge(1e-4)
    judge = DenseModel(copy.deepcopy(model).double(), x.double(), sf.CrossEntropy(y), ridge)
    for method in ("primal", "dual") if in_pieces else METHODS:
        chain = sf.Chain(model, [(x[:3], y[:3]), (x[3:], y[3:])] if in_pieces else x)
        objective = sf.CrossEntropy() if in_pieces else sf.CrossEntropy(y)
        for tolerance in (0.1, 1e-6):
            step = gauss_newton(chain, objective, kappa, method, regularizer=ridge, tolerance=tolerance)  # type: ignore[arg-type]
            true = judge.residual(step, "gauss_newton")
            assert step.residual == pytest.approx(true, rel=1e-2, abs=1e-10), method
            assert step.solved == (step.residual <= tolerance), step.status
            assert step.status.startswith("not solved") <= (not step.solved)


@pytest.mark.parametrize("kappa", [1.0, 1e-2, 1e-5])
@pytest.mark.parametrize("steps", [0, 40, 400])
def test_a_loose_residual_is_measured_where_round_off_may_have_a_share(steps: int, kappa: float) -> None:
    """At a minimum, gradients of samples cancel: in single precision the sum is round-off."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(50, 6)
    y = torch.randint(0, 3, (50,))
    descent = torch.optim.LBFGS(model.parameters(), max_iter=steps, tolerance_grad=0, tolerance_change=0)

    def closure() -> torch.Tensor:
        descent.zero_grad()
        loss = sf.CrossEntropy(y)(model(x)) + 5e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    descent.step(closure)
    ridge, wide = Ridge(1e-2), copy.deepcopy(model).double()
    judge = DenseModel(wide, x.double(), sf.CrossEntropy(y), ridge)
    chain, objective = sf.Chain(model, x), sf.CrossEntropy(y)
    methods: tuple[Any, ...] = ("primal", "dual_gram")
    for method in methods:
        step = gauss_newton(chain, objective, kappa, method, regularizer=ridge, tolerance=0.1)
        true = judge.residual(step, "gauss_newton")
        assert step.residual == pytest.approx(true, abs=1e-3, rel=1e-3), step.status
        assert step.model_decrease == pytest.approx(judge.decrease(step, "gauss_newton"), rel=1e-2, abs=1e-20)
        assert step.solved == (step.residual <= 0.1)


@pytest.mark.parametrize("name", ["perceptron", "convolution", "one-sample"])
def test_the_residual_is_that_of_the_direction(name: str) -> None:
    """Whether the tolerance is met early, never, or all calls are spent."""
    model, x = build(name)
    chain = sf.Chain(model, x)
    for loss, ridge, kappa in (("labels", None, 0.1), ("square", Ridge(0.2), 1e-3), ("square", None, 1e-6)):
        objective = objectives(x.shape[0])[loss]
        judge = DenseModel(model, x, objective, ridge)
        for method in METHODS:
            for tolerance in (0.3, 1e-3, 1e-14):
                given: Any = {"method": method, "regularizer": ridge, "tolerance": tolerance}
                step = gauss_newton(chain, objective, kappa, **given)
                true = judge.residual(step, "gauss_newton")
                if step.residual is None:
                    assert "no call was left to measure" in step.status
                    assert true < 1e-8
                else:
                    assert abs(true - step.residual) <= 1e-3 * true + 1e-10, (loss, method, tolerance)
                    assert step.solved == (step.residual <= tolerance) or method == "dynamic"


def test_calls_of_dynamic_programming_are_the_passes_through_the_chain() -> None:
    """A pull-back for the gradient, a push-forward for the roll-out, both to measure it; the same to refine."""
    model, x = build("perceptron")
    chain, objective = sf.Chain(model, x), objectives(5)["labels"]
    for step in (gauss_newton(chain, objective, method="dynamic"), sf.oracles.newton(chain, objective, 5.0)):
        assert step.calls == 4 + 3 * step.iterations


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("method", ["auto", "dual", "dual_gram", "primal", "primal_gram"])
def test_a_layer_without_entries_is_no_obstacle(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 0), nn.Tanh(), nn.Linear(0, 2)).double()
    x, objective = torch.randn(4, 3, dtype=F64), sf.CrossEntropy(torch.tensor([0, 0, 0, 1]))
    step = gauss_newton(sf.Chain(model, x), objective, kappa=0.1, method=method)
    slope, curvature = 0.25, 0.25  # of the difference of the two intercepts: mean of p − t, and p(1 − p)
    expected = slope / (0.1 + 2 * curvature)
    assert step.direction["2.bias"].tolist() == pytest.approx([expected, -expected], rel=1e-10)
    assert step.direction["0.weight"].shape == (0, 3)

"""What Gauss-Newton oracles are asked besides plain networks: other losses, degenerate points, bad input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.layered import F64, build, objectives
from judges.steps import DenseModel
from surefoot.objectives import Objective, Ridge
from surefoot.oracles import OracleError, gauss_newton

METHODS = ("dual", "dual_gram", "dynamic")


class Huber(Objective):
    """A convex loss of the package's user; its curvature is found by itself."""

    operation = "test.huber"
    function = staticmethod(
        lambda outputs, targets: (outputs - targets).square().add(1).sqrt().sum() / len(outputs)
    )

    def check(self, outputs: Any, targets: Any) -> None:
        pass


class Valley(Huber):
    function = staticmethod(
        lambda outputs, targets: (outputs - targets).square().sub(1).square().sum() / len(outputs)
    )


class Coupled(Huber):
    function = staticmethod(lambda outputs, targets: (outputs - targets).mean(0).square().sum())


def test_any_convex_loss_of_the_rows() -> None:
    model, x = build("perceptron")
    target = torch.randn(5, 3, dtype=F64)
    judge = DenseModel(model, x, Huber(target))
    for method in METHODS:
        step = gauss_newton(sf.Chain(model, x), Huber(target), method=method)
        assert judge.error(step, "gauss_newton") < 1e-8
        with pytest.raises(OracleError, match="not convex at this output"):
            gauss_newton(sf.Chain(model, x), Valley(model(x).detach()), method=method)


LABELS = torch.tensor([0, 1, 2, 0, 2])
VALUES = torch.linspace(-2, 2, 15, dtype=F64).reshape(5, 3)
OPTIONS: dict[str, Callable[[], Objective]] = {
    "weighted": lambda: sf.CrossEntropy(LABELS, weight=[0.5, 2.0, 1.0]),
    "smoothed": lambda: sf.CrossEntropy(LABELS, label_smoothing=0.2, reduction="sum"),
    "ignored": lambda: sf.CrossEntropy(LABELS, ignore_index=2, scale=3.0),
    "soft and weighted": lambda: sf.CrossEntropy(VALUES.softmax(1), weight=[0.5, 2.0, 0.0]),
    "entries": lambda: sf.Square(VALUES, reduction="entries"),
    "sum": lambda: sf.Square(VALUES, reduction="sum", scale=0.1),
    "huber": lambda: sf.objectives.Huber(VALUES, 0.5),
    "binary": lambda: sf.objectives.BinaryCrossEntropy((VALUES > 0).double(), pos_weight=3.0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_with_options(name: str) -> None:
    """Weights, scales and reductions are part of the curvature."""
    model, x = build("perceptron")
    chain, objective = sf.Chain(model, x), OPTIONS[name]()
    judge = DenseModel(model, x, objective, Ridge(0.1))
    for method in METHODS:
        step = gauss_newton(chain, objective, 0.1, method=method, regularizer=Ridge(0.1))  # type: ignore[arg-type]
        assert judge.error(step, "gauss_newton") < 1e-8, (method, step.status)
    kappa = 0.1 - min(judge.lowest("newton"), 0.0)
    step = sf.oracles.newton(chain, objective, kappa, regularizer=Ridge(0.1))
    assert judge.error(step, "newton") < 1e-8


def test_a_loss_that_couples_rows() -> None:
    """The dual solvers refuse it, dynamic programming solves it."""
    model, x = build("perceptron")
    chain, objective = sf.Chain(model, x), Coupled(torch.randn(5, 3, dtype=F64))
    for method in ("dual", "dual_gram"):
        with pytest.raises(OracleError, match="not a sum over the rows"):
            gauss_newton(chain, objective, method=method)  # type: ignore[arg-type]
    judge = DenseModel(model, x, objective)
    assert judge.error(gauss_newton(chain, objective, method="dynamic"), "gauss_newton") < 1e-8
    kappa = 0.1 - min(judge.lowest("newton"), 0.0)
    assert judge.error(sf.oracles.newton(chain, objective, kappa), "newton") < 1e-8


def test_a_loss_that_says_it_is_not_convex_is_refused() -> None:
    class Flagged(Huber):
        convex = False

    model, x = build("perceptron")
    for method in (*METHODS, "dynamic"):
        with pytest.raises(OracleError, match="Flagged is not convex"):
            gauss_newton(sf.Chain(model, x), Flagged(torch.zeros(5, 3)), method=method)  # type: ignore[arg-type]


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_no_output_depends_on(method: Any) -> None:
    torch.manual_seed(0)
    model, x = Idle().double(), torch.randn(5, 4, dtype=F64)
    chain, objective = sf.Chain(model, x), objectives(5)["labels"]
    plain = gauss_newton(chain, objective, kappa=0.1, method=method)
    assert not plain.direction["idle.weight"].any()
    ridge = gauss_newton(chain, objective, kappa=0.1, method=method, regularizer=Ridge(0.4))
    expected = -0.4 * model.idle.weight.detach() / 0.5
    assert torch.allclose(ridge.direction["idle.weight"], expected, rtol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_saturated_outputs_and_stationary_points(method: Any) -> None:
    """Probabilities that underflow, so that the curvature is zero; then a gradient that is zero."""
    model = nn.Linear(2, 2).double()
    x = torch.tensor([[1e4, 0.0], [0.0, 1e4]], dtype=F64)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2) * 10)
        model.bias.zero_()
    wrong = sf.CrossEntropy(torch.tensor([1, 0]))
    judge = DenseModel(model, x, wrong)
    step = gauss_newton(sf.Chain(model, x), wrong, kappa=0.1, method=method)
    assert judge.error(step, "gauss_newton") < 1e-8
    right = gauss_newton(sf.Chain(model, x), sf.CrossEntropy(torch.tensor([0, 1])), kappa=0.1, method=method)
    assert all(not value.any() for value in right.direction.values())
    assert (right.solved, right.model_decrease, right.residual) == (True, 0.0, 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_bad_input_is_refused_and_nothing_is_touched(method: Any) -> None:
    model, x = build("perceptron")
    y = objectives(5)["labels"]
    before = copy.deepcopy(model.state_dict())
    chain = sf.Chain(model, x)
    for kappa in (0.0, -1.0, float("nan"), None):
        with pytest.raises(OracleError, match="kappa is a positive number"):
            gauss_newton(chain, y, kappa=kappa, method=method)  # type: ignore[arg-type]
    spoiled = x.clone()
    later = sf.Chain(model, spoiled)
    spoiled[0, 0] = float("nan")
    with pytest.raises(OracleError, match="input has entries that are not finite"):
        gauss_newton(later, y, method=method)
    large = {path: value.detach() * 1e200 for path, value in model.named_parameters()}
    with pytest.raises(OracleError, match="the objective is"):
        gauss_newton(chain, sf.Square(torch.zeros(5, 3, dtype=F64)), method=method, params=large)
    half = nn.Linear(4, 3).bfloat16()
    with pytest.raises(OracleError, match="single or double precision"):
        gauss_newton(sf.Chain(half, x.bfloat16()), y, method=method)
    with pytest.raises(OracleError, match="CrossEntropy compares"):
        gauss_newton(chain, sf.CrossEntropy(torch.zeros(4).long()), method=method)
    with pytest.raises(OracleError, match="has shape"):
        gauss_newton(chain, y, method=method, params={k: v.new_zeros(1) for k, v in chain.parameters.items()})
    with pytest.raises(OracleError, match="no value was given"):
        gauss_newton(chain, y, method=method, params={})
    with pytest.raises(OracleError, match="tolerance"):
        gauss_newton(chain, y, method=method, tolerance=0.0)
    with pytest.raises(OracleError, match="Ridge"):
        gauss_newton(chain, y, method=method, regularizer=0.1)  # type: ignore[arg-type]
    with pytest.raises(OracleError, match="asks for gradients"):
        gauss_newton(sf.Chain(nn.Tanh(), torch.ones(5, 3)), y, method=method)
    with pytest.raises(OracleError, match="such as surefoot"):
        gauss_newton(chain, nn.MSELoss(), method=method)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


def test_unknown_methods_are_refused() -> None:
    model, x = build("perceptron")
    with pytest.raises(OracleError, match="'dual_gram'"):
        gauss_newton(sf.Chain(model, x), objectives(5)["labels"], method="exact")  # type: ignore[arg-type]


class Mixed(nn.Module):
    """A convolution and linear layers, some of them in another precision than the outputs."""

    def __init__(self, first: torch.dtype, last: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 4), nn.Tanh()).to(first)
        self.last = nn.Linear(4, 3).to(last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(self.first[0].weight.dtype)).to(self.last.weight.dtype))


@pytest.mark.parametrize("method", ["dual_gram", "primal_gram", "primal", "dual"])
@pytest.mark.parametrize(("first", "last"), [(torch.float32, F64), (F64, torch.float32)])
def test_parameters_of_two_precisions(first: torch.dtype, last: torch.dtype, method: Any) -> None:
    torch.manual_seed(0)
    model, x, objective = Mixed(first, last), torch.randn(6, 1, 3), sf.CrossEntropy([0, 1, 2, 2, 1, 0])
    step = gauss_newton(sf.Chain(model, x), objective, 0.1, method=method, tolerance=1e-5)
    assert step.solved
    assert {path: value.dtype for path, value in step.direction.items()} == {
        path: value.dtype for path, value in model.named_parameters()
    }
    assert DenseModel(copy.deepcopy(model).to(F64), x.to(F64), objective).error(step, "gauss_newton") < 1e-5

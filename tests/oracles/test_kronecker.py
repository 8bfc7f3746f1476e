"""The preconditioner by Kronecker factors: exact where it covers the matrix, positive definite everywhere."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from benchmarks.timing import peak
from torch import Tensor, nn

import surefoot as sf
from judges.steps import DenseModel, flat
from surefoot.optim import GaussNewton
from surefoot.optim.preconditioning import Preconditioning
from surefoot.oracles import kronecker
from surefoot.oracles.choice import Sizes
from surefoot.oracles.kronecker import Kronecker
from surefoot.oracles.primal import Primal
from surefoot.oracles.problem import ParameterSpace, Problem, Step

F64 = torch.float64
Ridge = sf.objectives.Ridge


def _dense(problem: Problem, kappa: float) -> Tensor:
    """The approximate inverse as a matrix, column by column."""
    space, inverse = ParameterSpace(problem), Kronecker(problem)
    units = torch.eye(sum(value.numel() for value in problem.parameters.values()), dtype=F64)
    return torch.stack([space.join(inverse.inverse(kappa, space.split(unit))) for unit in units], dim=1)


class _OneRow(nn.Module):
    """A convolution that has one place, then nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(1)


@pytest.mark.parametrize("ridge", [None, Ridge(0.2), Ridge({"weight": 0.5, "bias": 0.1})])
@pytest.mark.parametrize("samples", [3, 40])
def test_it_is_the_inverse_where_slopes_do_not_depend_on_the_sample(ridge: Ridge | None, samples: int) -> None:
    """One output of a linear layer and the square loss: every sample has the same slope up to its sign."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 1).double(), torch.randn(samples, 6, dtype=F64)
    objective = sf.Square(torch.randn(samples, 1, dtype=F64))
    judge = DenseModel(model, x, objective, ridge)
    problem = Problem(sf.Chain(model, x), objective, None, ridge)
    for kappa in (1e-3, 2.0):
        expected = torch.linalg.inv(judge.gauss_newton + kappa * torch.eye(7, dtype=F64))
        assert torch.allclose(_dense(problem, kappa), expected, rtol=1e-8, atol=1e-10)
        step = Primal(problem, preconditioner=Kronecker(problem)).solve(kappa, 1e-8)
        assert step.iterations == 1
        assert "Kronecker" in step.status
        assert judge.error(step, "gauss_newton") < 1e-8


def test_it_is_the_inverse_for_a_convolution_on_one_patch() -> None:
    torch.manual_seed(0)
    model, x = _OneRow().double(), torch.randn(5, 2, 3, 3, dtype=F64)
    objective = sf.Square(torch.randn(5, 1, dtype=F64))
    judge = DenseModel(model, x, objective)
    expected = torch.linalg.inv(judge.gauss_newton + 0.1 * torch.eye(19, dtype=F64))
    assert torch.allclose(_dense(Problem(sf.Chain(model, x), objective), 0.1), expected, rtol=1e-8, atol=1e-10)


MODELS = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(),
                                         nn.Linear(12, 3)),
    "groups and norms": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1, groups=2), nn.GroupNorm(2, 4),
                                              nn.Flatten(), nn.Linear(16, 3, bias=False)),
    "tied": lambda: nn.Sequential(nn.Flatten(), *[nn.Linear(16, 16)] * 2, nn.Tanh(), nn.Linear(16, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_it_is_symmetric_positive_definite_and_the_solution_is_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), torch.randn(9, 1, 4, 4, dtype=F64)
    objective = sf.CrossEntropy(torch.randint(0, 3, (9,)))
    problem = Problem(sf.Chain(model, x), objective)
    matrix = _dense(problem, 1e-2)
    assert torch.allclose(matrix, matrix.T, rtol=1e-9, atol=1e-9)
    values = torch.linalg.eigvalsh(matrix)
    assert values[0] > 0
    assert values[-1] <= 100 * (1 + 1e-9)  # M⁻¹ is above it
    step = Primal(problem, preconditioner=Kronecker(problem)).solve(1e-2, 1e-10)
    assert step.solved
    assert DenseModel(model, x, objective).error(step, "gauss_newton") < 1e-6


def test_a_loose_tolerance_with_little_damping_takes_fewer_iterations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5)).double()
    x, objective = torch.randn(200, 10, dtype=F64), sf.CrossEntropy(torch.randint(0, 5, (200,)))
    problem = Problem(sf.Chain(model, x), objective)
    plain = Primal(problem).solve(1e-4, 0.1)
    preconditioned = Primal(problem, preconditioner=Kronecker(problem)).solve(1e-4, 0.1)
    assert plain.solved
    assert preconditioned.solved
    assert preconditioned.iterations <= plain.iterations / 2


def test_the_optimizer_tries_it_where_the_cap_was_met_and_keeps_what_is_faster() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 4)
    )
    x, y = torch.randn(1000, 4, 8, 8), torch.zeros(1000, dtype=torch.long)
    problem = Problem(sf.Chain(model, x), sf.CrossEntropy(y))
    choice = Preconditioning()

    def step(residual: float, solved: bool) -> Step:
        return Step({}, 1.0, 1.0, "", solved=solved, iterations=6, residual=residual)

    assert choice.factors(problem) is None
    choice.learn(step(0.01, True), 6)
    assert choice.factors(problem) is None  # the cap was not in the way
    choice.learn(step(0.9, False), 6)
    first = choice.factors(problem)
    assert first is not None
    choice.learn(step(0.1, True), 6)
    assert choice.factors(problem) is first  # it was faster, and is kept
    choice.learn(step(0.99, False), 6)
    assert choice.factors(problem) is None  # it was slower
    assert any(choice.factors(problem) is not None for _ in range(20))  # it is tried again
    assert Preconditioning(False).factors(problem) is None


def test_the_cost_of_large_factors_is_foreseen() -> None:
    """Eigenvectors of a wide layer on few samples cost more than conjugate gradients."""
    wide = Sizes(sf.Chain(nn.Linear(2000, 500), torch.randn(700, 2000)), 700, 500)
    long = Sizes(sf.Chain(nn.Linear(20, 30), torch.randn(9000, 20)), 9000, 30)
    assert wide.kronecker[0] > 5 * wide.gradient
    assert long.kronecker[0] < 4 * long.gradient


def test_preconditioned_steps_descend() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)
    )
    x, y = torch.randn(300, 1, 8, 8), torch.randint(0, 4, (300,))
    optimizer = GaussNewton(model, sf.CrossEntropy(), method="primal", preconditioner=True)
    losses = [optimizer.step(x, y) for _ in range(5)]
    assert all(after < before for before, after in pairwise(losses))
    assert flat(dict(model.named_parameters())).isfinite().all()


PATCHES = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 8, 5, padding=2), nn.AvgPool2d(8))
LAYERS = {
    "convolutions": (nn.Sequential(PATCHES, nn.Flatten()), (50, 1, 8, 8)),
    "sequences": (nn.Sequential(nn.Conv1d(2, 3, 2, stride=2, bias=False), nn.Flatten()), (40, 2, 6)),
    "several rows of a sample": (nn.Sequential(nn.Linear(3, 4), nn.Flatten()), (30, 5, 3)),
    "fewer rows than inputs": (nn.Linear(60, 4), (12, 60)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_factors_from_a_few_samples_at_a_time_are_those_from_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, shape = LAYERS[name]
    model, x = copy.deepcopy(model).double(), torch.randn(shape, dtype=F64)
    objective = sf.Square(torch.randn_like(model(x)))
    problem = Problem(sf.Chain(model, x), objective)
    parts = {path: torch.randn_like(value) for path, value in problem.parameters.items()}
    found = []
    for numbers in (1, 700, 10**9):
        monkeypatch.setattr(kronecker, "_PIECE", numbers)
        found.append(flat(Kronecker(problem).inverse(0.1, parts)))
    assert torch.allclose(found[0], found[2], rtol=1e-9, atol=1e-12)
    assert torch.allclose(found[1], found[2], rtol=1e-9, atol=1e-12)


def test_patches_are_never_held_all_at_once() -> None:
    """They are 25 times as large as what the second layer reads, which a gradient holds."""
    torch.manual_seed(0)
    model, x, objective = LAYERS["convolutions"][0], torch.randn(1000, 1, 8, 8), sf.Square(torch.zeros(1000, 8))
    problem = Problem(sf.Chain(model, x), objective)
    gradient = peak(lambda: torch.autograd.grad(objective(model(x)), list(model.parameters())))
    assert peak(lambda: Kronecker(problem)) < 2 * gradient


def test_factors_do_not_hold_the_passes_of_their_point() -> None:
    """They are kept for some steps."""
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    problem = Problem(sf.Chain(model, x), sf.Square(torch.zeros(5, 2)))
    factors, held = Kronecker(problem), weakref.ref(problem)
    del problem
    gc.collect()
    assert held() is None
    assert factors.inverse(1.0, dict(model.named_parameters())).keys() == {"weight", "bias"}

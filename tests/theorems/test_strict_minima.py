"""Strict minima of networks that are not one layer after the other, and of those too large for a dense Hessian."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import flint
import pytest
import torch
from flint import arb, arb_mat
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.analysis import Analysis
from surefoot.norms.verified import smallest_eigenvalue, solution
from surefoot.scalar import Rounded
from surefoot.theorems import Convergence, StronglyConvex, convex
from surefoot.theorems.affine import Affine
from surefoot.theorems.hessian import Written, loss_derivatives, lowest_bend, unit_bends
from surefoot.theorems.layered import read_layers
from theorems.small_networks import BITS, Exact, data, distance, middle, perceptron

_HAIR = arb(1 + 2.0**-40)


class Residual(nn.Module):
    """Two layers around which the state goes as well, with the same weights if they are tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second = self.first if tied else nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x + torch.tanh(self.first(x))
        result: Tensor = self.last(h + torch.tanh(self.second(h)))
        return result


def small_convolution(pools: bool = False) -> nn.Sequential:
    layers = [
        nn.Conv2d(1, 2, 2),
        nn.Tanh(),
        *[nn.MaxPool2d(2)] * pools,
        nn.Flatten(),
        nn.Linear(2 if pools else 8, 2),
    ]
    return nn.Sequential(*layers)


def flat(model: nn.Module, value: object, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient and the Hessian in all parameters, by automatic differentiation."""
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
    u = nn.utils.parameters_to_vector(model.parameters()).detach()

    def function(v: Tensor) -> Tensor:
        parts = v.split([shape.numel() for shape in shapes])
        given = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return value(torch.func.functional_call(model, given, (x,)), v)  # type: ignore[operator,no-any-return]

    v = u.clone().requires_grad_()
    return torch.autograd.grad(function(v), v)[0], torch.autograd.functional.hessian(function, u)


def minimised(model: nn.Module, x: Tensor, objective: nn.Module, ridge: float, steps: int = 15) -> None:
    """Newton steps in double precision, with the absolute values of the eigenvalues."""
    for _ in range(steps):
        slope, hessian = flat(model, lambda out, v: objective(out) + ridge / 2 * v.square().sum(), x)
        values, vectors = torch.linalg.eigh(hessian)
        step = vectors @ ((vectors.mT @ slope) / values.abs().clamp(min=1e-3))
        u = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(u - step * min(1.0, 0.5 / (float(step.norm()) + 1e-300)), model.parameters())


def check(verdict: Convergence, model: nn.Module, x: Tensor, objective: nn.Module, ridge: float) -> None:
    """The limit is where it is said to be, and a step contracts as much as it is said to."""
    assert verdict.proved, str(verdict)
    statement = verdict.statement
    assert isinstance(statement, StronglyConvex)

    def whole() -> Tensor:
        return objective(model(x)) + ridge / 2 * sum((p * p).sum() for p in model.parameters())

    exact = Exact(model, whole)
    with flint.ctx.workprec(BITS):
        run = [exact.start()]
        for _ in range(2):
            step = exact.hessian(run[-1]).solve(arb_mat([[g] for g in exact.gradient(run[-1])]))
            run.append(middle([a - step[k, 0] for k, a in enumerate(run[-1])]))
        start, moved, limit = run
        assert distance(start, limit) <= arb(statement.distance)
        assert exact.values(start)[0] - exact.values(limit)[0] <= arb(statement.gap) * _HAIR + arb(2) ** -150
        if verdict.method == "gradient":
            slope = exact.gradient(start)
            moved = middle([a - arb(statement.step_size) * g for a, g in zip(start, slope, strict=True)])
        assert distance(moved, limit) <= distance(start, limit) * arb(statement.rate) * _HAIR + arb(2) ** -70


def test_a_residual_network_has_its_minimum_where_it_is_said_to_be() -> None:
    torch.manual_seed(0)
    model = Residual().double()
    x, y = data(3, 2, 2)
    objective = sf.CrossEntropy(y.argmax(1))
    minimised(model, x, objective, 0.2)
    assert read_layers(Analysis.of(model, x)) is None
    verdict = sf.convergence(model, x, objective, sf.Ridge(0.2), method="newton")
    check(verdict, model, x, objective, 0.2)


@pytest.mark.parametrize(("method", "ridge"), [("newton", 1e-2), ("gradient", 3.0)])
def test_a_convolution_with_a_ridge(method: str, ridge: float) -> None:
    torch.manual_seed(0)
    model = small_convolution().double()
    x, y = torch.randn(3, 1, 3, 3, dtype=torch.float64), data(3, 2, 2)[1]
    objective = sf.CrossEntropy(y.argmax(1))
    minimised(model, x, objective, ridge, 40)
    check(sf.convergence(model, x, objective, sf.Ridge(ridge), method=method), model, x, objective, ridge)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["newton", "gradient"])
def test_without_a_dense_hessian_the_ridge_is_enough(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convex, "DENSE", 0)  # as if the network were too large
    model = perceptron(2, 4, 2)
    x, y = data(4, 2, 2)
    objective = sf.Square(0.3 * y)
    minimised(model, x, objective, 0.3)
    verdict = sf.convergence(model, x, objective, sf.Ridge(0.3), method=method)  # type: ignore[arg-type]
    assert "the weight of the ridge" in str(verdict)
    check(verdict, model, x, objective, 0.3)
    assert not sf.convergence(model, x, objective, method="newton").proved


def test_a_large_network_with_a_ridge_is_proved() -> None:
    model = perceptron(4, 1200, 2)
    x, _ = data(5, 4, 2)
    ridge = 0.5
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    zeros = torch.zeros(5, 2, dtype=torch.float64)
    verdict = sf.convergence(model, x, sf.Square(zeros), sf.Ridge(ridge), method="newton")
    assert sum(p.numel() for p in model.parameters()) > convex.DENSE
    assert verdict.proved, str(verdict)
    bare = sf.convergence(model, x, sf.Square(zeros + 1), sf.Ridge(1e-3), method="newton")
    assert not bare.proved


@pytest.mark.parametrize("name", ["residual", "tied", "convolution", "max-pooling"])
def test_the_hessian_of_other_networks_is_that_of_automatic_differentiation(name: str) -> None:
    torch.manual_seed(1)
    model = Residual(name == "tied") if name in ("residual", "tied") else small_convolution(name == "max-pooling")
    model, shape = model.double(), (6, 2) if isinstance(model, Residual) else (6, 1, 3, 3)
    x, objective = torch.randn(shape, dtype=torch.float64), sf.CrossEntropy(torch.arange(6) % 2)
    analysis = Analysis.of(model, x, objective)
    found = Written.of(analysis)
    assert found is not None
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    starts = {name: sum(list(sizes.values())[:k]) for k, name in enumerate(sizes)}
    paths = [leaf.path for leaves in analysis.variables().values() for leaf in leaves]
    order = [starts[path] + k for path in paths for k in range(sizes[path])]
    _, exact = flat(model, lambda out, v: objective(out), x)
    assert torch.allclose(found.value, exact[order][:, order], rtol=1e-12, atol=1e-14)
    assert found.apart(0.0) < 1e-9
    u = nn.utils.parameters_to_vector(model.parameters()).detach()
    for radius in (1e-4, 0.1):
        direction = torch.randn(len(u), dtype=torch.float64)
        nn.utils.vector_to_parameters(u + radius / direction.norm() * direction, model.parameters())
        _, there = flat(model, lambda out, v: objective(out), x)
        moved = float(torch.linalg.matrix_norm(there[order][:, order] - found.value, 2))
        assert moved <= found.apart(radius)
        assert found.apart(radius) < math.inf or (name, radius) == ("max-pooling", 0.1)


def test_the_bend_of_two_layers_is_not_below_its_bound() -> None:
    model = perceptron(3, 7, 2)
    x, y = data(5, 3, 2)
    layered = read_layers(Analysis.of(model, x))
    assert layered is not None
    outer = loss_derivatives(sf.Square(y), layered.outputs)
    assert outer is not None
    _, exact = flat(model, lambda out, v: (out * outer.gradient.value).sum(), x)
    lowest = float(torch.linalg.eigvalsh(exact)[0])
    units = unit_bends(layered, outer.gradient)
    assert units is not None
    bound = lowest_bend(*units)
    assert bound <= lowest
    assert bound == pytest.approx(lowest, rel=1e-6)


def test_the_third_derivative_of_the_cross_entropy_is_within_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([0, 2, 1])
    objective = sf.CrossEntropy(targets)
    model = nn.Linear(3, 3).double()
    layered = read_layers(Analysis.of(model, torch.zeros(3, 3, dtype=torch.float64)))
    assert layered is not None
    outer = loss_derivatives(objective, layered.outputs)
    assert outer is not None
    largest = 0.0
    for _ in range(200):
        near, far = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator) * 2
        far = near + 0.1 * far
        both = [torch.autograd.functional.hessian(objective, z).reshape(9, 9) for z in (near, far)]
        assert float(torch.linalg.matrix_norm(both[0], 2)) <= outer.smoothness
        change = float(torch.linalg.matrix_norm(both[0] - both[1], 2)) / float((near - far).norm())
        largest = max(largest, change)
    assert 0.1 * outer.variation <= largest <= outer.variation


class Beam(nn.Module):
    """The negative second derivative of a tanh network with a hidden layer, and its value at some points."""

    def __init__(self, width: int, residual: Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, width), nn.Linear(width, 1)
        self.register_buffer("residual", residual)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        slope = (1 - z * z) * self.first.weight.squeeze(1)
        bent = -2 * z * slope * self.first.weight.squeeze(1)
        jet = nn.functional.linear(torch.stack([z, bent], 1), self.last.weight)
        jet = torch.cat([jet[:, :1] + self.last.bias, jet[:, 1:]], 1).squeeze(2)
        return (self.residual * jet).sum(1, keepdim=True)


def beam(width: int = 3, points: int = 7) -> tuple[Beam, Tensor, Tensor]:
    """-u'' = sin with u = 0 at both ends; the hidden layer is fixed, and the network affine in what is left."""
    torch.manual_seed(0)
    x = torch.linspace(0, math.pi, points, dtype=torch.float64).unsqueeze(1)
    inside = torch.ones(points, dtype=torch.float64)
    inside[[0, -1]] = 0.0
    model = Beam(width, torch.stack([10 * (1 - inside), -inside], 1)).double()
    model.first.requires_grad_(False)
    return model, x, torch.sin(x) * inside.unsqueeze(1)


@pytest.mark.parametrize("method", ["newton", "gradient"])
@pytest.mark.parametrize("solved", [False, True])
def test_the_best_output_layer_of_a_physics_informed_network(method: str, solved: bool) -> None:
    model, x, y = beam()
    if solved:
        trainable = [model.last.weight, model.last.bias]
        columns = []
        with torch.no_grad():
            for p in trainable:
                p.zero_()
            for p in trainable:
                for k in range(p.numel()):
                    p.reshape(-1)[k] = 1.0
                    columns.append(model(x))
                    p.reshape(-1)[k] = 0.0
            best = torch.linalg.lstsq(torch.cat(columns, 1), y).solution
        nn.utils.vector_to_parameters(best.reshape(-1), trainable)
    assert read_layers(Analysis.of(model, x)) is None
    verdict = sf.convergence(model, x, sf.Square(y), method=method)  # type: ignore[arg-type]
    check(verdict, model, x, sf.Square(y), 0.0)
    assert isinstance(verdict.statement, StronglyConvex)
    assert verdict.statement.variation == 0
    assert "convex" in verdict.advice[0]
    if solved:
        assert verdict.statement.gap < 1e-12


def test_the_jacobian_of_an_affine_network_is_that_of_automatic_differentiation() -> None:
    model, x, _ = beam(5, 20)
    affine = Affine.of(Analysis.of(model, x))
    assert affine is not None
    (weight, bias) = torch.autograd.functional.jacobian(
        lambda w, b: torch.func.functional_call(model, {"last.weight": w, "last.bias": b}, (x,)).reshape(-1),
        (model.last.weight.detach(), model.last.bias.detach()),
    )
    torch.testing.assert_close(affine.rows.slopes["last.weight"], weight.reshape(20, -1))
    torch.testing.assert_close(affine.rows.slopes["last.bias"], bias.reshape(20, -1))
    model.first.requires_grad_(True)
    assert Affine.of(Analysis.of(model, x)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_solution_is_not_longer_than_is_said(seed: int) -> None:
    torch.manual_seed(seed)
    factor = torch.randn(6, 6, dtype=torch.float64) * 10.0 ** -torch.arange(6.0, dtype=torch.float64)
    matrix, right = factor.mT @ factor, torch.randn(6, dtype=torch.float64) * 10.0 ** -torch.arange(6)
    matrix = matrix.tril() + matrix.tril(-1).mT
    lowest = smallest_eigenvalue(Rounded.exact(matrix))
    assert lowest > 0
    length, form = solution(matrix, 0.0, right, 0.0, lowest)
    with flint.ctx.workprec(BITS):
        column = arb_mat([[arb(b)] for b in right.tolist()])
        exact = arb_mat([[arb(a) for a in row] for row in matrix.tolist()]).solve(column)
        size = sum((exact[k, 0] * exact[k, 0] for k in range(6)), arb(0)).sqrt()
        assert size <= arb(length) <= size * arb(1.01)
        assert (column.transpose() * exact)[0, 0] <= arb(form)
    moved = solution(matrix, 1e-3 * lowest, right, 1e-3, 0.9 * lowest)
    other = matrix + 1e-3 * lowest * torch.eye(6, dtype=torch.float64)
    shifted = right + 1e-3 * torch.nn.functional.normalize(torch.randn(6, dtype=torch.float64), dim=0)
    assert float(torch.linalg.solve(other, shifted).norm()) <= moved[0]


def test_the_rate_is_that_of_the_step_size_as_it_is_rounded() -> None:
    generator = random.Random(0)
    for _ in range(200):
        convexity = generator.uniform(0.1, 1.0)
        smoothness = convexity * generator.uniform(1.0, 5.0)
        theorem = StronglyConvex(convexity, smoothness, variation=0.0, gradient=0.0, radius=1.0, newton=False)
        assert Fraction(theorem.rate) >= 1 - Fraction(theorem.step_size) * Fraction(convexity)

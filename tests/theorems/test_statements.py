"""The theorems as functions of numbers, against short references; the numbers, against dense matrices."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from flint import arb, ctx
from torch import nn

import surefoot as sf
from surefoot.calculus.analysis import Analysis
from surefoot.theorems import GradientDescent, HeavyBall, Interpolation, NothingHere, StronglyConvex
from surefoot.theorems.curvature import Regularised, loss_derivatives
from surefoot.theorems.layered import read_layers
from surefoot.theorems.network import Network
from theorems.problems import CLASSES, IMAGES, Residual, X, Y, beam, convolution, flat, perceptron


@pytest.mark.parametrize("h", [0.0, 1e-9, 0.3, 0.4, 0.5])
def test_kantorovich(h: float) -> None:
    """Newton's iterates for ½ht² - t + 1 in 300 bits; h = ½ gives t* = 2η, beyond there is none."""
    statement = Interpolation(1.0, 2.0, 2 * h, radius=2.001, norm=3.0, residual=5.0, weight=1.0)
    assert statement.holds
    assert statement.h == pytest.approx(h, abs=1e-300)
    with ctx.workprec(300):
        t, root = arb(0), 2 / (1 + (1 - 2 * arb(h)).sqrt())
        for k in range(6):
            left, residual = statement.after(k)
            value = arb(h) / 2 * t * t - t + 1
            assert arb(left) >= (root - t).lower()
            assert left <= float(root - t) * (1 + 1e-12) + 1e-15
            assert residual == pytest.approx(3.0 * abs(float(value)), rel=1e-9, abs=1e-60)
            t = t + value / (1 - arb(h) * t)
    assert not Interpolation(1.0, 2.0, 1.01, 4.0, 3.0, 5.0, 1.0).holds
    assert not Interpolation(1.0, 2.0, 0.8, 1.3, 3.0, 5.0, 1.0).holds  # t* = 1.38 is outside
    assert Interpolation(1.0, 2.0, 1.02, 4.0, 3.0, 5.0, 1.0).factor == pytest.approx(1.02)
    assert Interpolation(1.0, 0.0, 0.5, 4.0, 3.0, 5.0, 1.0).h == math.inf


def test_gradient_steps() -> None:
    """Numbers by hand: σ_ρ = 1 - 0.1, S = 2.1, L = 3(4.41 + 0.2(0.1 + 1.05)), μ = 3·0.81, radius 0.1/(½·0.9)."""
    plain = GradientDescent(1.0, 2.0, bending=0.2, radius=0.5, residual=0.1, weight=3.0)
    smooth, pull = 3 * (2.1**2 + 0.2 * (0.1 + 2.1 * 0.5)), 3 * 0.9**2
    assert plain.smoothness == pytest.approx(smooth)
    assert plain.factor == pytest.approx(0.1 / (0.5 * 0.9) / 0.5)
    assert plain.step_size == pytest.approx(1 / smooth)
    assert plain.rate == pytest.approx(1 - pull / smooth)
    assert plain.loss == pytest.approx(0.015)
    half = GradientDescent(1.0, 2.0, 0.2, 0.5, 0.1, 3.0, part=0.5)
    assert half.factor == pytest.approx(0.1 / (0.75 * 0.9) / 0.5)
    assert half.rate == pytest.approx(1 - 0.75 * pull / smooth)
    assert not GradientDescent(1.0, 2.0, 2.0, 0.5, 0.1, 3.0).is_onto
    ball = HeavyBall(1.0, 2.0, 0.2, 0.5, 0.1, 3.0, 1e-6, 1.0)  # little momentum is gradient descent
    assert plain.factor <= ball.factor <= 1.2 * plain.factor
    assert plain.rate <= ball.rate <= 1 - 0.9 * (1 - plain.rate)


def test_the_heavy_ball_on_quadratics() -> None:
    """F = (L₁x² + L₂y²)/2 from the worst of some starts: every step below the proved rate, inside the ball."""
    statement = HeavyBall(1.0, 2.0, bending=0.0, radius=20.0, residual=1.0, weight=1.0, momentum=0.5, part=1.0)
    assert statement.holds
    for angle in (0.0, 0.5, 1.0, 1.5):
        u, move = torch.tensor([math.cos(angle), math.sin(angle) / 2]).double(), torch.zeros(2).double()
        scale, start = torch.tensor([1.0, 4.0]).double(), u.clone()
        first = float((scale * u * u).sum() / 2)
        for k in range(1, 60):
            move = statement.momentum * move - statement.step_size * scale * u
            u = u + move
            assert float((scale * u * u).sum() / 2) <= statement.rate**k * first * (1 + 1e-12)
            assert (u - start).norm() <= statement.radius * statement.factor
    assert statement.rate < 1


@pytest.mark.parametrize(("beta", "part"), [(0.3, 0.5), (0.9, 1.0), (0.97, 1.9)])
def test_the_heavy_ball_by_its_formulas(beta: float, part: float) -> None:
    """Radius and rate as the theorem states them, in floating point, at the best of the same places."""
    ball = HeavyBall(1.0, 2.0, 0.2, 0.5, 0.1, 3.0, momentum=beta, part=part)
    alpha, smooth, pull = ball.step_size, ball.smoothness, 3 * 0.9**2
    assert alpha == pytest.approx(part * (1 - beta) / smooth)
    b = beta / (2 * alpha)
    c = 1 / alpha - b - smooth / 2
    needed, rates = [], []
    for k in range(1, 32):
        a = b + k / 32 * (c - b)
        t = beta + alpha * math.sqrt(2 * pull * a)
        n = min((c - a) / (1 + t / 2), 2 * (a - b) / t)
        needed.append(2 * math.sqrt(0.015) / (n * alpha * math.sqrt(2 * pull)))
        scale = k / 32 * (c - b) / (1 + beta) ** 2
        last = (b + scale * (1 + beta) * beta) / (c - scale * (1 + beta))
        if c > scale * (1 + beta):
            rates.append(max(1 - 2 * scale * pull * alpha**2, last))
    assert ball.factor == pytest.approx(min(needed) / 0.5)
    assert 1 - ball.rate == pytest.approx(1 - min(rates), rel=1e-6)


def test_the_change_of_a_product_of_three_numbers_is_that_of_the_formula() -> None:
    """ψ = abc·x at a = b = c = 0: each of the six mixed terms is at most ρ|x|, so K = 2ρ|x|."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).double()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    x = torch.tensor([[3.0]], dtype=torch.float64)
    network = Network(model, x, sf.Square(torch.zeros(1, 1).double()))
    assert network.bending(0.5).constant == pytest.approx(2 * 0.5 * 3.0, rel=1e-6)
    assert network.bending(0.0).constant < 1e-12


def test_strict_minima() -> None:
    numbers = {"variation": 0.1, "gradient": 0.2, "radius": 1.0}
    newton = StronglyConvex(1.0, 4.0, **numbers, newton=True)
    assert newton.holds
    assert newton.rate == pytest.approx(0.2)
    assert newton.distance == pytest.approx(0.2)
    assert newton.gap == pytest.approx(0.02)
    sharper = StronglyConvex(1.0, 4.0, **numbers, newton=True, start=1.1, step=0.01, decrease=0.002)
    assert sharper.distance == pytest.approx(0.01 / (1 - 0.1 / 1.1))
    assert sharper.gap == pytest.approx(0.001 / (1 - 0.1 / 1.1))
    assert StronglyConvex(1.0, 4.0, **numbers, newton=False).rate == pytest.approx(0.75)
    assert not StronglyConvex(1.0, 4.0, 0.6, 0.2, 1.0, newton=True).holds  # 2V > m
    assert not StronglyConvex(1.0, 4.0, 0.1, 0.6, 1.0, newton=False).holds  # 2g/m > ρ
    assert NothingHere(1.0, 2.0, 0.499).holds
    assert not NothingHere(1.0, 2.0, 0.5).holds
    generator = random.Random(0)
    for _ in range(200):
        convexity = generator.uniform(0.1, 1.0)
        smoothness = convexity * generator.uniform(1.0, 5.0)
        theorem = StronglyConvex(convexity, smoothness, variation=0.0, gradient=0.0, radius=1.0, newton=False)
        assert Fraction(theorem.rate) >= 1 - Fraction(theorem.step_size) * Fraction(convexity)


def affine() -> tuple[nn.Module, Any, Any]:
    return beam(5, 20)


NETWORKS: dict[str, Any] = {
    "layered": lambda: (perceptron(2, 5, 4, 2), X, Y),
    "with a function behind": lambda: (nn.Sequential(*perceptron(2, 5, 2), nn.Sigmoid()), X, Y),
    "ReLU": lambda: (perceptron(2, 7, 2, activation=nn.ReLU), X, Y),
    "convolution": lambda: (convolution(), IMAGES, Y[:3]),
    "max-pooling": lambda: (convolution(pools=True), IMAGES, Y[:3]),
    "tied": lambda: (Residual(tied=True).double(), X, Y),
    "affine": affine,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_numbers_of_the_linearised_network(name: str) -> None:
    """Jacobian, singular values and the first step, against automatic differentiation."""
    torch.manual_seed(1)
    model, x, y = NETWORKS[name]()
    network = Network(model, x, sf.Square(y))
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(out, trained, retain_graph=True) for out in model(x).reshape(-1)]
    named = {path: k for k, (path, p) in enumerate((n, p) for n, p in model.named_parameters() if p.requires_grad)}
    dense = torch.stack([torch.cat([row[named[path]].reshape(-1) for path in network.order]) for row in rows])
    apart = (network.jacobian.value - dense).abs()
    assert bool((apart <= network.jacobian.error + 1e-13 * dense.abs().max()).all())
    assert float(network.jacobian.error.max()) < 1e-9
    values = torch.linalg.svdvals(dense)
    assert float(values[0]) <= network.norm * (1 + 1e-12) <= float(values[0]) * (1 + 1e-6)
    assert (network.outputs.value.reshape(-1) - model(x).reshape(-1)).abs().max() <= 1e-12
    if len(dense) < dense.shape[1] and values[-1] > 1e-3 * values[0]:
        assert network.sigma <= float(values[-1]) * (1 + 1e-12)
        assert network.sigma >= float(values[-1]) * (1 - 1e-4)
        least = (torch.linalg.pinv(dense) @ network.residual[0]).norm()
        assert least <= network.least * (1 + 1e-12) <= least * (1 + 1e-6)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("radius", [0.0, 0.01, 0.3])
def test_the_jacobian_changes_no_faster_than_is_said(name: str, radius: float) -> None:
    """Second differences of the outputs along directions, ascended, at points of the ball."""
    torch.manual_seed(1)
    model, x, y = NETWORKS[name]()
    bend = Network(model, x, sf.Square(y)).bending(radius).constant
    parameters = [p for p in model.parameters() if p.requires_grad]
    u = nn.utils.parameters_to_vector(parameters).detach()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    shapes = [p.shape for p in parameters]

    def outputs(v: torch.Tensor) -> torch.Tensor:
        parts = [p.reshape(s) for p, s in zip(v.split([s.numel() for s in shapes]), shapes, strict=True)]
        return torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,)).reshape(-1)

    if name == "tied":
        return  # functional_call does not follow modules that stand twice
    largest = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        there = u + radius * nn.functional.normalize(
            torch.randn(u.shape, dtype=u.dtype, generator=generator), dim=0
        )
        second = torch.func.hessian(outputs)(there)  # outputs × parameters × parameters
        v = torch.randn(u.shape, dtype=u.dtype, generator=generator)
        for _ in range(30):
            v = nn.functional.normalize(v, dim=0)
            bent = torch.einsum("kij,i,j->k", second, v, v)
            v = torch.einsum("kij,k,j->i", second, bent, v) if bent.norm() > 0 else v
        largest = max(largest, float(bent.norm()))
        assert bent.norm() <= bend * (1 + 1e-9)
    if radius == 0 and name in ("layered", "ReLU", "convolution"):
        assert bend <= 6 * largest


@pytest.mark.parametrize("loss", ["square", "cross-entropy"])
@pytest.mark.parametrize("name", NETWORKS)
def test_hessians_are_between_their_bounds(name: str, loss: str) -> None:
    torch.manual_seed(1)
    model, x, y = NETWORKS[name]()
    if loss == "cross-entropy" and y.shape[1] == 1:
        return
    if name == "tied":
        return
    objective = sf.Square(y) if loss == "square" else sf.CrossEntropy(CLASSES[: len(x)])
    problem = Regularised(Network(model, x, objective), sf.Ridge(0.3))
    trained = [p for p in model.parameters() if p.requires_grad]

    def function(out: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return objective(out) + 0.15 * v.square().sum()

    slope, centre = flat(model, function, x)
    assert problem.gradient()[0] <= slope.norm() * (1 + 1e-12)
    assert slope.norm() <= problem.gradient()[1] * (1 + 1e-12)
    assert problem.gradient()[1] <= slope.norm() * (1 + 1e-6)
    u = nn.utils.parameters_to_vector(trained).detach()
    ways = list(problem.bounds())
    assert len(ways) == 2
    for bound in ways:
        low, high = torch.linalg.eigvalsh(centre)[[0, -1]].tolist()
        assert bound.start <= (low if bound is ways[0] else 0.3) + 1e-12
        if bound is ways[0] and bound.start > 0:
            least = torch.linalg.solve(centre, slope)
            assert float(least.norm()) <= bound.newton[0] <= float(least.norm()) * (1 + 1e-4)
            assert float(least @ slope) <= bound.newton[1] * (1 + 1e-9)
        for radius in (0.0, 1e-3, 0.1):
            on = bound.on(radius)
            move = torch.randn(u.shape, dtype=u.dtype, generator=torch.Generator().manual_seed(3))
            nn.utils.vector_to_parameters(u + radius * nn.functional.normalize(move, dim=0), trained)
            there = flat(model, function, x)[1]
            nn.utils.vector_to_parameters(u, trained)
            low, high = torch.linalg.eigvalsh(there)[[0, -1]].tolist()
            assert on.low <= low + 1e-12
            assert high <= on.high + 1e-12
            assert torch.linalg.matrix_norm(there - centre, 2) <= on.variation + 1e-12


def test_the_third_derivative_of_the_cross_entropy_is_within_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    objective = sf.CrossEntropy(torch.tensor([0, 2, 1]))
    layered = read_layers(Analysis.of(nn.Linear(3, 3).double(), torch.zeros(3, 3, dtype=torch.float64)))
    outer = loss_derivatives(objective, layered.outputs)
    largest = 0.0
    for _ in range(200):
        close, far = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator) * 2
        far = close + 0.1 * far
        both = [torch.autograd.functional.hessian(objective, z).reshape(9, 9) for z in (close, far)]
        assert float(torch.linalg.matrix_norm(both[0], 2)) <= outer.smoothness
        change = float(torch.linalg.matrix_norm(both[0] - both[1], 2)) / float((close - far).norm())
        largest = max(largest, change)
    assert 0.1 * outer.variation <= largest <= outer.variation

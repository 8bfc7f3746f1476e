"""K, how far the second derivative moves, and ω, attacked by ascent inside the ball."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.analysis import Analysis
from surefoot.theorems.bending import Bending, Here, bending, layered_bending
from surefoot.theorems.layered import read_layers
from surefoot.theorems.linear import jacobian_rows
from surefoot.theorems.relative import relative_bending
from surefoot.theorems.samples import outputs_of_samples, single_samples
from theorems.small_networks import data, perceptron

CASES = [
    pytest.param((3, 6, 1), nn.Tanh, 4, id="two layers"),
    pytest.param((3, 5, 2), nn.GELU, 3, id="two outputs"),
    pytest.param((3, 5, 4, 1), nn.Softplus, 4, id="three layers"),
    pytest.param((2, 4, 4, 3, 2), nn.Tanh, 3, id="four layers"),
    pytest.param((3, 6, 1), nn.SiLU, 5, id="silu"),
    pytest.param((3, 5, 2, 2), nn.Identity, 3, id="a function of the outputs"),
]


def network(sizes: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    """A perceptron; with identities between, functions after the first and the last layer."""
    if activation is not nn.Identity:
        return perceptron(*sizes, activation=activation)
    model = perceptron(*sizes[:-1], activation=nn.Tanh)
    return nn.Sequential(*model, nn.Softplus())


def of_layers(analysis: Analysis, radius: float) -> Bending:
    layered = read_layers(analysis)
    assert layered is not None
    return layered_bending(Here(lambda: [layered]), radius)


def flat_outputs(model: nn.Module, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def function(u: Tensor) -> Tensor:
        parts = [part.reshape(shape) for part, shape in zip(u.split(sizes), shapes, strict=True)]
        return torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,)).reshape(-1)

    return function, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def largest_second(
    function: Callable[[Tensor], Tensor], u: Tensor, weigh: Callable[[Tensor], Tensor], starts: int = 3
) -> float:
    """‖weigh D²ψ(u)[v, v]‖ over unit v, by alternating ascent."""
    tensor = torch.autograd.functional.hessian
    hessians = torch.stack([tensor(lambda w, i=i: function(w)[i], u) for i in range(len(function(u)))])  # type: ignore[misc]
    weighed = weigh(hessians.flatten(1)).reshape(-1, len(u), len(u))
    best = 0.0
    for seed in range(starts):
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(len(u), dtype=torch.float64, generator=generator)
        for _ in range(60):
            costate = torch.einsum("oij,i,j->o", weighed, v, v)
            values, vectors = torch.linalg.eigh(torch.einsum("oij,o->ij", weighed, costate / costate.norm()))
            v = vectors[:, int(values.abs().argmax())]
            best = max(best, float(torch.einsum("oij,i,j->o", weighed, v, v).norm()))
    return best


@pytest.mark.parametrize(("sizes", "activation", "count"), CASES)
@pytest.mark.parametrize("radius", [1e-3, 0.3])
def test_no_point_of_the_ball_bends_more(
    sizes: tuple[int, ...], activation: type[nn.Module], count: int, radius: float
) -> None:
    model = network(sizes, activation)
    x, _ = data(count, sizes[0], sizes[-1])
    analysis = Analysis.of(model, x)
    bound, general = of_layers(analysis, radius), bending(analysis, radius)
    function, centre = flat_outputs(model, x)

    def second(u: Tensor) -> Tensor:
        hessian = torch.autograd.functional.hessian
        return torch.stack([hessian(lambda w, i=i: function(w)[i], u) for i in range(len(function(u)))])  # type: ignore[misc]

    here = second(centre)
    generator = torch.Generator().manual_seed(0)
    for k in range(4):
        step = torch.randn(len(centre), dtype=torch.float64, generator=generator)
        u = centre + step / step.norm() * radius * (k > 0)
        attained = largest_second(function, u, lambda h: h)
        assert attained <= bound.constant * (1 + 1e-9)
        assert attained <= general.constant * (1 + 1e-9)
        moved = second(u) - here
        for costate in torch.randn(5, len(moved), dtype=torch.float64, generator=generator):
            mixed = torch.einsum("oij,o->ij", moved, costate / costate.norm())
            assert float(torch.linalg.matrix_norm(mixed, 2)) <= bound.variation * (1 + 1e-9)


@pytest.mark.parametrize(("sizes", "activation", "count"), CASES[:3])
def test_at_a_small_radius_it_is_within_five_times_the_truth(
    sizes: tuple[int, ...], activation: type[nn.Module], count: int
) -> None:
    model = network(sizes, activation)
    x, _ = data(count, sizes[0], sizes[-1])
    analysis = Analysis.of(model, x)
    function, centre = flat_outputs(model, x)
    assert of_layers(analysis, 1e-3).constant <= 5 * largest_second(function, centre, lambda h: h)


@pytest.mark.parametrize(("sizes", "activation", "count"), CASES)
def test_relative_to_the_jacobian_nothing_bends_more(
    sizes: tuple[int, ...], activation: type[nn.Module], count: int
) -> None:
    model = network(sizes, activation)
    x, _ = data(count, sizes[0], sizes[-1])
    layered = read_layers(Analysis.of(model, x))
    assert layered is not None
    function, centre = flat_outputs(model, x)
    inverse = torch.linalg.pinv(torch.autograd.functional.jacobian(function, centre))
    attained = largest_second(function, centre, lambda h: inverse @ h)
    bound = relative_bending(layered)
    assert attained <= bound * (1 + 1e-9)
    assert bound <= 15 * attained


def test_frozen_parameters_do_not_count() -> None:
    model = perceptron(3, 6, 1)
    x, _ = data(4, 3, 1)
    whole = of_layers(Analysis.of(model, x), 0.1).constant
    model[0].requires_grad_(False)
    analysis = Analysis.of(model, x)
    assert bending(analysis, 0.1).constant <= 1e-12 < whole


@pytest.mark.parametrize("other", ["batch norm", "tied", "residual", "computed inputs"])
def test_other_networks_are_not_read_as_layers(other: str) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if other == "computed inputs":
                result: Tensor = self.first(torch.sin(x))
                return result
            y = torch.tanh(self.first(x))
            return x + y if other == "residual" else torch.tanh(self.first(y))

    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) if other == "batch norm" else Residual()
    x, _ = data(4, 3, 3)
    assert read_layers(Analysis.of(model.double(), x)) is None


def test_a_kink_within_reach_is_named() -> None:
    model = perceptron(3, 6, 1, activation=nn.ReLU)
    x, _ = data(4, 3, 1)
    analysis = Analysis.of(model, x)
    near, far = (of_layers(analysis, radius) for radius in (1e-9, 10.0))
    assert math.isfinite(near.constant)
    assert not near.obstacles
    assert math.isinf(far.constant)
    assert "unit" in far.obstacles[0]
    assert "'1'" in far.obstacles[0]


def convolution(normalise: type[nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [] if normalise is None else [normalise(3)]
    return nn.Sequential(nn.Conv2d(1, 3, 3), *middle, nn.Tanh(), nn.Flatten(), nn.Linear(12, 1)).double()


def test_single_samples_bound_the_batch() -> None:
    model, x = convolution(), torch.randn(6, 1, 4, 4, dtype=torch.float64)
    analysis = Analysis.of(model, x)
    parts = single_samples(analysis)
    assert len(parts) == 6
    function, centre = flat_outputs(model, x)
    attained = largest_second(function, centre, lambda h: h)
    whole = bending(analysis, 1e-3).constant
    assert attained <= bending(analysis, 1e-3, parts).constant * (1 + 1e-9) < 0.7 * whole
    assert bending(analysis, 1e-3, parts).constant <= 10 * attained


def test_samples_that_interact_are_not_taken_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convolution()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) * float(len(x))
            return result

    x = torch.randn(6, 1, 4, 4, dtype=torch.float64)
    assert not single_samples(Analysis.of(convolution(nn.BatchNorm2d), x))
    assert not single_samples(Analysis.of(Scaled(), x))


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(lambda x: x[:, : len(x)].sum(1, keepdim=True), id="slice"),
        pytest.param(lambda x: x[:, len(x)].unsqueeze(1), id="index"),
        pytest.param(lambda x: x[:, len(x) : len(x) + 1], id="window"),
        pytest.param(lambda x: x.roll(len(x), 1)[:, :1], id="roll"),
    ],
)
def test_samples_are_not_taken_apart_if_the_batch_size_says_what_is_read(
    chosen: Callable[[Tensor], Tensor],
) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = perceptron(1, 6, 1), nn.Linear(1, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(chosen(x)) + self.outer(chosen(x))
            return result

    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 9, dtype=torch.float64)
    analysis = Analysis.of(model, x)
    assert not single_samples(analysis)
    rows = jacobian_rows(analysis, outputs_of_samples(analysis)).part(0, 4).flat()[0]
    function, centre = flat_outputs(model, x)
    torch.testing.assert_close(rows, torch.autograd.functional.jacobian(function, centre))
    y = torch.zeros(4, 1, dtype=torch.float64)
    verdict = sf.convergence(model, x, sf.Square(y), method="stochastic", batch_size=2)
    assert not verdict.proved
    assert "no batch can be drawn" in verdict.advice[0]

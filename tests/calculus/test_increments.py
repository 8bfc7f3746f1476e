"""The Lipschitz constant in the input: above all Jacobians that ascent finds, and below the product of norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.analysis import Analysis

ACTIVATIONS = [
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish,
    nn.Softsign, nn.Mish, nn.SELU, nn.PReLU, nn.Tanhshrink, nn.LogSigmoid,
]  # fmt: skip


class Residual(nn.Module):
    """Convolutions, fixed statistics, a sum of two ways, averages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(3), nn.Linear(12, 4)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)
            self.norm.weight.normal_()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.last((x - torch.tanh(self.second(x)) / 2.0).flatten(1))


class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + 3 * k, 3) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.nn.functional.silu(1.0 - layer(x))], dim=1)
        return x[:, 2:]


class Distinct(nn.Module):
    """Another factor for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("factors", torch.tensor([[0.1], [3.0], [1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x * self.factors)))


class Mixing(nn.Module):
    """Samples meet in the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(4, 5),
            nn.BatchNorm1d(5, track_running_stats=False),
            nn.Linear(5, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def mlp(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), activation(), nn.Linear(7, 6), activation(), nn.Linear(6, 3))


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 3, 3), nn.GELU(), nn.MaxPool1d(2), nn.Flatten(), nn.LayerNorm(9), nn.Linear(9, 4),
        nn.PReLU(4), nn.Linear(4, 2),
    )  # fmt: skip


def steepest(model: nn.Module, x: Tensor, radius: float, steps: int = 8) -> float:
    """The largest norm of a Jacobian that ascent finds in the ball around a batch, or near the origin if far."""

    def norm(move: Tensor) -> Tensor:
        there = x + move * min(1.0, radius / max(float(move.detach().norm()), 1e-300))
        jacobian = torch.func.jacrev(model)(there)
        return torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2)

    best, generator = 0.0, torch.Generator().manual_seed(0)
    for start in (1e-3, 1.0):
        move = start * radius * torch.randn(x.shape, dtype=x.dtype, generator=generator) / math.sqrt(x.numel())
        for _ in range(steps):
            move = move.detach().requires_grad_()
            value = norm(move)
            best = max(best, float(value.detach()))
            (slope,) = torch.autograd.grad(value, move)
            move = move + 0.1 * radius * slope / max(float(slope.norm()), 1e-30)
    return best


def in_input(model: nn.Module, x: Tensor, radius: float) -> tuple[float, float]:
    """The certified constant, and the product of norms."""
    domain = sf.Ball(radius)
    certificate = sf.certify(model, x, wrt="input", domain=domain)
    result = Analysis.of(model, x).over(domain, "input")
    return float(certificate.lipschitz), float(result.enclosures[result.outputs[0]].lipschitz.norm())


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_activations(activation: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = mlp(activation).double(), data(2, 4)
    for radius in (0.1, 10.0):
        certified, product = in_input(model, x, radius)
        assert steepest(model, x, radius) <= certified <= 0.97 * product


@pytest.mark.parametrize(
    ("build", "shape", "gain"),
    [(Residual, (2, 1, 4, 4), 0.9), (Dense, (3, 4), 0.9), (Distinct, (3, 4), 1.0), (Mixing, (4, 4), 1.0),
     (pooled, (2, 1, 8), 1.0)],
)  # fmt: skip
@pytest.mark.parametrize("radius", [0.0, 0.3, 100.0])
def test_networks(build: Callable[[], nn.Module], shape: tuple[int, ...], gain: float, radius: float) -> None:
    torch.manual_seed(3)
    model, x = build().double(), data(*shape)
    model = model if build is Mixing else model.eval()
    certified, product = in_input(model, x, radius)
    assert steepest(model, x, radius) <= certified * (1 + 1e-9)
    assert certified <= gain * product * (1 + 1e-12)


@pytest.mark.parametrize("build", [lambda: mlp(nn.Tanh), lambda: mlp(nn.ReLU), Residual, Dense])
def test_at_one_sample_it_is_the_norm_of_the_jacobian(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(2)
    model, x = build().double().eval(), data(1, 1, 4, 4) if build is Residual else data(1, 4)
    certified, _ = in_input(model, x, 0.0)
    truth = steepest(model, x, 0.0, steps=1)
    assert truth <= certified <= truth * (1 + 1e-6)


def test_samples_share_one_constant() -> None:
    torch.manual_seed(0)
    model = mlp(nn.ReLU)
    alone, together = (in_input(model, torch.zeros(count, 4), 1e6)[0] for count in (1, 5))
    assert alone == pytest.approx(together, rel=1e-3)


def test_a_network_without_samples() -> None:
    torch.manual_seed(0)
    model = mlp(nn.Tanh)
    vector, batch = (in_input(model, torch.zeros(*shape, 4), 5.0)[0] for shape in ((), (1,)))
    assert vector == pytest.approx(batch, rel=1e-3)


def test_a_large_network_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = (5, 12, 12, 12, 12, 3)
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    model, x = nn.Sequential(*parts).double(), data(1, 5)
    whole, product = in_input(model, x, 50.0)
    for most in (30, 13):
        monkeypatch.setattr("surefoot.calculus.increments._IMPROVED", most)
        pieces, _ = in_input(model, x, 50.0)
        assert whole * (1 - 1e-3) <= pieces < 0.8 * product
    monkeypatch.setattr("surefoot.calculus.increments._LARGEST", 11)
    assert 0.999 * product <= in_input(model, x, 50.0)[0] <= product


def test_an_objective_in_the_input() -> None:
    torch.manual_seed(0)
    model, x, y = mlp(nn.Tanh).double(), data(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = sf.CrossEntropy(y)
    certificate = sf.certify(model, x, objective=loss, wrt="input", domain=sf.Ball(0.2))
    assert steepest(nn.Sequential(model, loss), x, 0.2) <= float(certificate.lipschitz)


def test_nothing_is_read_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = mlp(nn.Tanh), torch.zeros(2, 4)
    certificate = sf.certify(model, x, wrt="input", domain=sf.ProductBall(1.0))
    assert not certificate.lipschitz.is_finite


class Quotient(nn.Module):
    """A fixed vector over what varies: the slope in the fixed one is another number."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset
        self.register_buffer("above", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.above / (x + self.offset)


@pytest.mark.parametrize("offset", [0.5, 3.0, 100.0])
def test_quotients_have_the_slope_of_what_varies(offset: float) -> None:
    model, x = Quotient(offset), torch.full((1, 3), -0.25, dtype=torch.float64)
    for radius in (0.0, 0.1):
        certified, product = in_input(model, x, radius)
        assert steepest(model, x, radius) <= certified <= product * (1 + 1e-9)


def test_a_difference_of_zero_stays_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1.0)
    certified, _ = in_input(model, data(2, 3), 0.5)
    assert certified == 0.0

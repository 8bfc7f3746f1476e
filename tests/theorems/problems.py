"""Networks with their data, at weights from which convergence is proved or not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import surefoot as sf

D = torch.float64


def perceptron(*sizes: int, activation: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Linear layers with a function between them, in double precision."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1]).double()


def data(count: int, inputs: int, outputs: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, inputs, dtype=D, generator=generator),
        torch.randn(count, outputs, dtype=D, generator=generator),
    )


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
    x = torch.linspace(0, math.pi, points, dtype=D).unsqueeze(1)
    inside = torch.ones(points, dtype=D)
    inside[[0, -1]] = 0.0
    model = Beam(width, torch.stack([10 * (1 - inside), -inside], 1)).double()
    model.first.requires_grad_(False)
    return model, x, torch.sin(x) * inside.unsqueeze(1)


def convolution(outputs: int = 2, pools: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(2 if pools else 8, outputs)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), *[nn.MaxPool2d(2)] * pools, nn.Flatten(), head).double()


def flat(model: nn.Module, value: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient and the Hessian in all trained parameters, by automatic differentiation."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def function(v: Tensor) -> Tensor:
        parts = v.split([p.numel() for p in trained.values()])
        named = {name: part.reshape(p.shape) for (name, p), part in zip(trained.items(), parts, strict=True)}
        return value(torch.func.functional_call(model, named, (x,)), v)

    v = nn.utils.parameters_to_vector(trained.values()).detach().requires_grad_()
    return torch.autograd.grad(function(v), v)[0], torch.autograd.functional.hessian(function, v.detach())


def minimised(model: nn.Module, x: Tensor, objective: nn.Module, ridge: float, steps: int = 40) -> None:
    """Newton steps in double precision, with the absolute values of the eigenvalues."""
    for _ in range(steps):
        slope, hessian = flat(model, lambda out, v: objective(out) + ridge / 2 * v.square().sum(), x)
        values, vectors = torch.linalg.eigh(hessian)
        step = vectors @ ((vectors.mT @ slope) / values.abs().clamp(min=1e-3))
        u = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(u - step * min(1.0, 0.5 / (float(step.norm()) + 1e-300)), model.parameters())


@dataclass(frozen=True)
class Problem:
    """A question about convergence."""

    model: nn.Module
    x: Tensor
    objective: nn.Module
    ridge: float = 0.0
    method: str = "gauss_newton"

    def verdict(self) -> sf.Convergence:
        regularizer = sf.Ridge(self.ridge) if self.ridge else None
        return sf.convergence(self.model, self.x, self.objective, regularizer, method=self.method)

    def loss(self) -> Tensor:
        """The objective as a function of the present weights."""
        ridge = self.ridge / 2 * sum((p * p).sum() for p in self.model.parameters())
        return self.objective(self.model(self.x)) + ridge


def near(model: nn.Module, x: Tensor, away: float, method: str = "gauss_newton") -> Problem:
    """Targets near the outputs, at this distance in the largest entry."""
    outputs = model(x).detach()
    move = data(1, 1, outputs.numel(), 3)[1].reshape(outputs.shape)
    return Problem(model, x, sf.Square(outputs + away * move / move.abs().max()), 0.0, method)


def strict(model: nn.Module, x: Tensor, objective: nn.Module, ridge: float, method: str, away: float) -> Problem:
    """Weights near a strict minimum."""
    minimised(model, x, objective, ridge)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(away * torch.randn(p.shape, dtype=D, generator=generator))
    return Problem(model, x, objective, ridge, method)


def zeros(*sizes: int) -> nn.Sequential:
    model = perceptron(*sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


X, Y = data(6, 2, 2)
IMAGES = torch.randn(3, 1, 3, 3, dtype=D, generator=torch.Generator().manual_seed(5))
CLASSES = torch.tensor([0, 1, 1, 0, 1, 0])

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "Gauss-Newton, tanh": lambda: near(perceptron(2, 40, 1), X[:3], 0.01),
    "Gauss-Newton, three layers": lambda: near(perceptron(4, 30, 30, 1), data(5, 4, 1)[0], 1e-4),
    "Gauss-Newton, ReLU": lambda: near(perceptron(2, 40, 1, activation=nn.ReLU), X[:3], 1e-5),
    "Gauss-Newton, soft-plus": lambda: near(perceptron(8, 64, 2, activation=nn.Softplus), data(6, 8, 1)[0], 1e-3),
    "Gauss-Newton, convolution": lambda: near(convolution(1), IMAGES, 1e-5),
    "Gauss-Newton, residual": lambda: near(Residual().double(), X[:3], 1e-6),
    "Gauss-Newton, affine": lambda: near(nn.Linear(6, 1).double(), data(3, 6, 1)[0], 1.0),
    "Gauss-Newton, far": lambda: near(perceptron(2, 8, 1), X[:4], 3.0),
    "gradient, tanh": lambda: near(perceptron(2, 40, 1), X[:3], 1e-3, "gradient"),
    "gradient, convolution": lambda: near(convolution(1), IMAGES, 1e-6, "gradient"),
    "gradient, far": lambda: near(perceptron(2, 8, 1), X[:4], 3.0, "gradient"),
    "momentum, tanh": lambda: near(perceptron(2, 40, 1), X[:3], 1e-3, "momentum"),
    "Newton, cross-entropy": lambda: strict(perceptron(2, 3, 2), X, sf.CrossEntropy(CLASSES), 0.1, "newton", 1e-8),
    "gradient, square and ridge": lambda: strict(perceptron(2, 3, 2), X, sf.Square(Y), 0.1, "gradient", 1e-8),
    "Newton, residual": lambda: strict(Residual().double(), X, sf.CrossEntropy(CLASSES), 0.2, "newton", 1e-9),
    "Newton, convolution": lambda: strict(
        convolution(), IMAGES, sf.CrossEntropy(CLASSES[:3]), 0.1, "newton", 1e-8
    ),
    "Newton, large": lambda: Problem(zeros(4, 1200, 2), data(5, 4, 2)[0], sf.Square(0 * Y[:5]), 0.5, "newton"),
    "Newton, affine": lambda: Problem(*beam()[:2], sf.Square(beam()[2]), 0.0, "newton"),
    "Newton, far": lambda: Problem(perceptron(2, 4, 1), X[:5], sf.Square(Y[:5, :1]), 0.1, "newton"),
}

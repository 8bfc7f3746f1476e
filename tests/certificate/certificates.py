"""Certificates to look at, small ones and constructed ones."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.certificate import Row
from surefoot.magnitude import Magnitude

LABELS = torch.tensor([0, 1, 2, 0, 1])


def perceptron(activation: type[nn.Module] = nn.Softplus) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)).double(), torch.randn(5, 4).double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Nested(nn.Module):
    """Modules within modules, an operation of a module with parts, operations of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.stages(self.stem(x)) * 2.0)


@functools.cache
def certificate(name: str) -> sf.Certificate:
    """One of several, made once."""
    model, x = perceptron()
    match name:
        case "network":
            return sf.certify(model, x, domain=sf.Ball(0.1))
        case "objective":
            return sf.certify(model, x, objective=sf.CrossEntropy(LABELS), domain=sf.Ball(0.1))
        case "square":
            return sf.certify(model, x, objective=sf.Square(torch.zeros(5, 3).double()), domain=sf.Ball(0.1))
        case "segment":
            return sf.certify(model, x, objective=sf.CrossEntropy(LABELS), domain=sf.Segment(None, 0.5))
        case "kinked":
            return sf.certify(perceptron(nn.ReLU)[0], x)
        case "paper":
            return sf.certify(model, x, constants="paper")
        case "input":
            return sf.certify(model, x, wrt="input", domain=sf.Ball(0.1))
        case "nested":
            torch.manual_seed(0)
            return sf.certify(Nested().double(), x, domain=sf.Ball(0.1))
        case "flat":
            return sf.certify(nn.Linear(4, 3).double(), x, domain=sf.Ball(0.1))
        case "deep":
            deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
            return sf.certify(deep, torch.ones(1, 2), domain=sf.ProductBall(1e20))
    raise KeyError(name)


NAMES = ("network", "objective", "square", "segment", "kinked", "paper", "input", "nested", "flat", "deep")


def row(module: str, operation: str = "linear", share: float = 0.0, **values: object) -> Row:
    one = Magnitude.of(1.0)
    return Row(module, operation, (2, 3), one, one, one, share, **values)  # type: ignore[arg-type]


def constructed(*rows: Row, smoothness: float = 1.0, **values: object) -> sf.Certificate:
    one = Magnitude.of(1.0)
    whole = Magnitude.of(smoothness)
    return sf.Certificate(one, one, whole, {}, Magnitude.zero((0, 0)), make_rows=lambda: rows, **values)  # type: ignore[arg-type]

"""A dozen small models of every kind, for properties that all of them have."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

Sample = tuple[nn.Module, Tensor]


class Halves(nn.Module):
    """Pieces of a split tensor that are used at different depths."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = torch.split(x, [2, 2, 1], dim=1)
        return self.right(torch.tanh(self.left(a))) * c + b


class Sum(nn.Module):
    """The sum of what several modules make of the same input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return sum((branch(x) for branch in self.branches[1:]), self.branches[0](x))


class Side(nn.Module):
    """The results of several modules side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def perceptron(activation: Callable[[], nn.Module] = nn.Softplus) -> Sample:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, 2)), _x(3, 3)


def residual() -> Sample:
    block = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))
    return nn.Sequential(Sum(nn.Identity(), block), nn.LayerNorm(4, eps=1e-1), nn.Linear(4, 2)), _x(2, 4)


def dense() -> Sample:
    return nn.Sequential(Side(nn.Identity(), nn.Linear(2, 3)), nn.SiLU(), nn.Linear(5, 2)), _x(2, 2)


def convolutional() -> Sample:
    layers = (
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.Softplus(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(3, 2),
    )
    return nn.Sequential(*layers), _x(2, 2, 4, 4)


def transposed() -> Sample:
    return nn.Sequential(nn.ConvTranspose1d(2, 2, 3, stride=2, groups=2), nn.Sigmoid(), nn.Conv1d(2, 1, 2)), _x(
        2, 2, 3
    )


def batch_normalised() -> Sample:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=1e-1), nn.Tanh(), nn.Linear(4, 2)), _x(4, 3)


def group_normalised() -> Sample:
    layers = (nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4, eps=1e-1), nn.GELU(), nn.Conv1d(4, 1, 2))
    return nn.Sequential(*layers), _x(2, 2, 4)


def transformer() -> Sample:
    layer = nn.TransformerEncoderLayer(
        4, 2, 5, dropout=0.0, activation="gelu", batch_first=True, layer_norm_eps=1e-1
    )
    return layer, _x(1, 3, 4)


def classifier() -> Sample:
    return nn.Sequential(nn.Linear(3, 4), nn.Mish(), nn.Linear(4, 3), nn.LogSoftmax(-1)), _x(2, 3)


def language() -> Sample:
    torch.manual_seed(3)
    ids = torch.randint(0, 6, (2, 3))
    return nn.Sequential(nn.Embedding(6, 4), nn.RMSNorm(4, eps=1e-1), nn.Linear(4, 6)), ids


def kinked() -> Sample:
    return perceptron(nn.ReLU)


MODELS: dict[str, Callable[[], Sample]] = {
    make.__name__: make
    for make in (
        perceptron,
        residual,
        dense,
        convolutional,
        transposed,
        batch_normalised,
        group_normalised,
        transformer,
        classifier,
        language,
        kinked,
    )
}


@functools.cache
def make(name: str) -> Sample:
    """One of the models, always the same object, so that it is captured once: do not change it."""
    torch.manual_seed(0)
    return MODELS[name]()


def fresh(name: str) -> Sample:
    """A copy of one of the models, to be changed."""
    return copy.deepcopy(make(name))


def _x(*shape: int) -> Tensor:
    return torch.randn(shape)

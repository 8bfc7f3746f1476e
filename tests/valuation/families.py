"""Networks for the exact judge in which values are hard to enclose: kinks, ties, pooling, attention, depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from attack.exact_families import FAMILIES as ATTACKED
from attack.exact_subject import Material, Subject
from attack.exact_trees import Expression
from judges.exact_functions import at_least
from judges.exact_numbers import exactly, total, value_of
from judges.exact_rules import RULES, Array, filled

OWN: dict[str, Callable[[int], Subject]] = {}


def family(build: Callable[[Material], Subject]) -> Callable[[Material], Subject]:
    """Register under the name of the function."""
    OWN[build.__name__] = lambda seed: build(Material(seed))
    return build


def _loss(m: Material, shape: torch.Size) -> tuple[Any, Tensor]:
    if m.chance(0.5) and shape[1] > 1:
        return sf.CrossEntropy(), m.classes(shape[0], shape[1])
    return sf.Square(), m.normal(*shape)


def _subject(name: str, m: Material, model: nn.Module, x: Tensor) -> Subject:
    with torch.no_grad():
        shape = model(x).shape
    return Subject(name, model, x, *_loss(m, shape))


@family
def kinks(m: Material) -> Subject:
    """Rectifiers whose arguments are often exactly zero, or a few units away from it."""
    act = m.one_of(nn.ReLU(), nn.LeakyReLU(0.2), nn.Hardtanh(), nn.ReLU6())
    layers = nn.Linear(2, 3), act, nn.Linear(3, 2, bias=False), nn.ReLU(), nn.Linear(2, 2)
    model = m.weights(nn.Sequential(*layers))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_((layer.weight * 2).round() / 2)
        model[0].bias.copy_((model[0].bias * 2).round() / 2 + m.one_of(0.0, 1e-16, -1e-15, 1e-9))
    x = (m.normal(3, 2) * 2).round() / 2
    return _subject(type(act).__name__, m, model, x)


class Slopes(nn.Module):
    """The slope of a network with one hidden layer in its first input, squares written as products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        return self.second((1 - z * z) * self.first.weight[:, 0])


@family
def squares(m: Material) -> Subject:
    """Derivatives carried along by hand, at weights and inputs of many sizes."""
    x = m.normal(4, 2) * m.one_of(1.0, 1e-6, 30.0)
    return _subject("slope", m, m.weights(Slopes()), x)


@family
def pooling(m: Material) -> Subject:
    """Largest and mean entries of windows, with ties."""
    pool = m.one_of(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2, 1), nn.AdaptiveAvgPool2d(1))
    conv = nn.Conv2d(1, 2, 2)
    model = m.weights(nn.Sequential(conv, nn.ReLU(), pool, nn.Flatten()))
    x = m.normal(2, 1, 4, 4)
    if m.chance(0.5):
        x = x.round()
        with torch.no_grad():
            conv.weight.copy_(conv.weight.round())
            conv.bias.zero_()
    with torch.no_grad():
        width = model(x).shape[1]
    model.append(m.weights(nn.Linear(width, 2)))
    return _subject(type(pool).__name__, m, model, x)


class Attention(nn.Module):
    """One head over few tokens, with a residual and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed, self.last = nn.LayerNorm(2), nn.Linear(2, 6), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2**0.5, dim=-1)
        return self.last((x + weights @ v).mean(dim=1))


@family
def attention(m: Material) -> Subject:
    """Two tokens, two numbers each."""
    return _subject("", m, m.weights(Attention(), m.one_of(1.0, 3.0)), m.normal(2, 2, 2, scale=m.one_of(1.0, 1e3)))


@family
def depth(m: Material) -> Subject:
    """Many narrow layers."""
    act = m.one_of(torch.tanh, F.gelu, F.relu, F.softplus, F.elu)
    layers: list[nn.Module] = []
    for _ in range(m.whole(4, 8)):
        layers += [nn.Linear(2, 2), Expression(act)]
    return _subject(act.__name__, m, m.weights(nn.Sequential(*layers, nn.Linear(2, 2))), m.normal(2, 2))


@family
def batch_statistics(m: Material) -> Subject:
    """Batch normalisation while training, with rows that nearly agree."""
    scale = m.one_of(1.0, 1e-3, 1e-8, 1e6)
    layers = nn.Linear(1, 2), nn.BatchNorm1d(2, eps=m.one_of(1e-5, 1e-12)), nn.Tanh(), nn.Linear(2, 2)
    x = m.one_of(0.0, 1.0, 1e4) + m.normal(4, 1, scale=scale)
    return _subject(f"{scale:g}", m, m.weights(nn.Sequential(*layers)), x)


FAMILIES = {**ATTACKED, **OWN}


def _windows(x: Array, kernel: list[int], stride: list[int], reduce: Callable[[list[Any]], Any]) -> Array:
    height, width = (kernel * 2)[:2]
    down, right = ((stride or kernel) * 2)[:2]
    rows, columns = (x.shape[2] - height) // down + 1, (x.shape[3] - width) // right + 1
    shape = (*x.shape[:2], rows, columns)
    cut = [
        x[n, c, i * down : i * down + height, j * right : j * right + width].reshape(-1).tolist()
        for n, c, i, j in np.ndindex(*shape)
    ]
    return filled(shape, iter([reduce(window) for window in cut]))


def _largest(window: list[Any]) -> Any:
    top = window[0]
    for entry in window[1:]:
        same = value_of(entry).overlaps(value_of(top)) and value_of(entry).is_exact() and value_of(top).is_exact()
        top = top if same else entry if at_least(value_of(entry) - value_of(top), 0) else top
    return top


def _mean(window: list[Any]) -> Any:
    return total(window) / exactly(len(window))


def _max_pool(x: Array, kernel: list[int], stride: Any = (), *_: Any) -> tuple[Array, None]:
    return _windows(x, [*kernel], [*stride], _largest), None


RULES.setdefault("max_pool2d_with_indices", _max_pool)
RULES.setdefault("avg_pool2d", lambda x, kernel, stride=(), *_: _windows(x, [*kernel], [*stride], _mean))
RULES.setdefault("_adaptive_avg_pool2d", lambda x, size: _windows(x, [*x.shape[2:]], [], _mean))

"""Losses of outputs with given targets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rules.case import Case, Fixed, operation
from rules.tensors import real
from surefoot.objectives.losses import cross_entropy, square


def _square(outputs: torch.Tensor) -> Case:
    return operation(square, outputs, Fixed(real(*outputs.shape)), op="surefoot.square")


def _labels(outputs: torch.Tensor) -> Case:
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    return operation(cross_entropy, outputs, labels, op="surefoot.cross_entropy")


def _distributions(outputs: torch.Tensor) -> Case:
    targets = torch.softmax(real(*outputs.shape), dim=1)
    return operation(cross_entropy, outputs, Fixed(targets), op="surefoot.cross_entropy")


def _equal(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


CASES: dict[str, list[Callable[[], Case]]] = {
    "surefoot.square": [lambda: _square(real(3, 2)), lambda: _square(real(2, 2, 2))],
    "surefoot.cross_entropy": [
        lambda: _labels(real(3, 4)),
        lambda: _labels(3 * real(2, 3)),
        lambda: _distributions(real(3, 3)),
        lambda: _labels(_equal(2, 2)),  # two classes of probability 1/2: curvature 1/2
        lambda: _labels(_equal(1, 5)),  # equal probabilities: curvature 1/5
        lambda: _labels(_equal(1, 1)),
    ],
}

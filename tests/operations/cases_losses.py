"""Losses of outputs with given targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from operations.case import Case, Fixed, operation
from operations.tensors import real
from surefoot.objectives import further, losses
from surefoot.objectives.cross_entropy import cross_entropy


def _square(outputs: Tensor, **options: Any) -> Case:
    return operation(losses.square, outputs, Fixed(real(*outputs.shape)), op="surefoot.square", **options)


def _labels(outputs: Tensor, **options: Any) -> Case:
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    return operation(cross_entropy, outputs, labels, op="surefoot.cross_entropy", **options)


def _distributions(outputs: Tensor, **options: Any) -> Case:
    targets = torch.softmax(real(*outputs.shape), dim=1)
    return operation(cross_entropy, outputs, Fixed(targets), op="surefoot.cross_entropy", **options)


def _ignored(outputs: Tensor, **options: Any) -> Case:
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    return operation(
        cross_entropy,
        outputs,
        labels.where(labels != 1, -100),
        op="surefoot.cross_entropy",
        ignore_index=-100,
        **options,
    )


def _binary(outputs: Tensor, **options: Any) -> Case:
    targets = Fixed(torch.sigmoid(2 * real(*outputs.shape)))
    return operation(losses.binary_cross_entropy, outputs, targets, op="surefoot.binary_cross_entropy", **options)


def _differences(function: Callable[..., Tensor], op: str, outputs: Tensor, **options: Any) -> Case:
    return operation(function, outputs, Fixed(real(*outputs.shape)), op=f"surefoot.{op}", **options)


def _positive(function: Callable[..., Tensor], op: str, outputs: Tensor, **options: Any) -> Case:
    return operation(function, outputs, Fixed(3 * real(*outputs.shape).abs()), op=f"surefoot.{op}", **options)


def _likelihood(outputs: Tensor, **options: Any) -> Case:
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    op = "surefoot.negative_log_likelihood"
    return operation(further.negative_log_likelihood, outputs, labels, op=op, **options)


def _margin(outputs: Tensor, **options: Any) -> Case:
    targets = Fixed(torch.sign(real(*outputs.shape)))
    return operation(further.soft_margin, outputs, targets, op="surefoot.soft_margin", **options)


def _equal(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


WEIGHTS = (0.3, 2.0, 0.0, 1.0)

CASES: dict[str, list[Callable[[], Case]]] = {
    "surefoot.square": [
        lambda: _square(real(3, 2)),
        lambda: _square(real(2, 2, 2)),
        lambda: _square(real(3, 2), reduction="entries", scale=2.0),
        lambda: _square(real(3, 2), reduction="sum"),
    ],
    "surefoot.cross_entropy": [
        lambda: _labels(real(3, 4)),
        lambda: _labels(3 * real(2, 3)),
        lambda: _distributions(real(3, 3)),
        lambda: _labels(_equal(2, 2)),  # two classes of probability 1/2: curvature 1/2
        lambda: _labels(_equal(1, 5)),  # equal probabilities: curvature 1/5
        lambda: _labels(_equal(1, 1)),
        lambda: _labels(_equal(2, 2), weight=(1.0, 3.0)),  # masses 1/4 and 3/4: curvature 3/8
        lambda: _labels(real(4, 4), weight=WEIGHTS, label_smoothing=0.2),
        lambda: _labels(real(4, 4), weight=WEIGHTS, reduction="sum", scale=0.7),
        lambda: _distributions(real(2, 4), weight=WEIGHTS, label_smoothing=0.1),
        lambda: _ignored(real(4, 3), label_smoothing=0.3),
        lambda: _ignored(real(4, 4), weight=WEIGHTS),
    ],
    "surefoot.binary_cross_entropy": [
        lambda: _binary(real(3, 2)),
        lambda: _binary(5 * real(2, 3)),
        lambda: _binary(_equal(2, 2)),  # curvature 1/4 of each entry
        lambda: _binary(real(3, 2), weight=((0.5, 2.0),), pos_weight=(3.0, 0.2)),
        lambda: _binary(real(2, 3), weight=((0.0,), (1.0,)), reduction="entries"),
        lambda: _binary(real(2, 3), reduction="row", scale=3.0),
    ],
    "surefoot.huber": [
        lambda: _differences(losses.huber, "huber", real(3, 2)),
        lambda: _differences(losses.huber, "huber", 3 * real(2, 3), delta=0.7),
        lambda: _differences(losses.huber, "huber", real(2, 2), delta=100.0, reduction="entries"),
    ],
    "surefoot.absolute": [lambda: _differences(further.absolute, "absolute", 5 * real(3, 2))],
    "surefoot.soft_margin": [lambda: _margin(real(3, 2)), lambda: _margin(4 * real(2, 3), reduction="entries")],
    "surefoot.poisson": [
        lambda: _positive(further.poisson, "poisson", real(3, 2)),
        lambda: _positive(further.poisson, "poisson", real(3, 2), full=True, reduction="sum"),
    ],
    "surefoot.divergence": [
        lambda: _positive(further.divergence, "divergence", real(3, 2)),
        lambda: _differences(further.divergence, "divergence", real(3, 2), log_target=True, reduction="entries"),
    ],
    "surefoot.negative_log_likelihood": [
        lambda: _likelihood(real(3, 4)),
        lambda: _likelihood(real(4, 4), weight=WEIGHTS),
        lambda: _likelihood(real(3, 4), reduction="sum", scale=0.5),
    ],
}

"""Losses of outputs with given targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from operations.case import Case, Fixed, operation
from operations.tensors import real
from surefoot.operations.record import records


def _case(name: str, outputs: Tensor, targets: Any, **options: Any) -> Case:
    op = f"surefoot.{name}"
    facts = records()[op].loss
    assert facts is not None
    return operation(facts.function, outputs, targets, op=op, **options)


def _labels(outputs: Tensor, name: str = "cross_entropy", **options: Any) -> Case:
    return _case(name, outputs, torch.arange(len(outputs)) % outputs.shape[1], **options)


def _distributions(outputs: Tensor, **options: Any) -> Case:
    return _case("cross_entropy", outputs, Fixed(torch.softmax(real(*outputs.shape), dim=1)), **options)


def _ignored(outputs: Tensor, **options: Any) -> Case:
    labels = torch.arange(len(outputs)) % outputs.shape[1]
    return _case("cross_entropy", outputs, labels.where(labels != 1, -100), ignore_index=-100, **options)


def _binary(outputs: Tensor, **options: Any) -> Case:
    return _case("binary_cross_entropy", outputs, Fixed(torch.sigmoid(2 * real(*outputs.shape))), **options)


def _differences(name: str, outputs: Tensor, **options: Any) -> Case:
    return _case(name, outputs, Fixed(real(*outputs.shape)), **options)


def _positive(name: str, outputs: Tensor, **options: Any) -> Case:
    return _case(name, outputs, Fixed(3 * real(*outputs.shape).abs()), **options)


def _margin(outputs: Tensor, **options: Any) -> Case:
    return _case("soft_margin", outputs, Fixed(torch.sign(real(*outputs.shape))), **options)


def _equal(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


WEIGHTS = (0.3, 2.0, 0.0, 1.0)

CASES: dict[str, list[Callable[[], Case]]] = {
    "surefoot.square": [
        lambda: _differences("square", real(3, 2)),
        lambda: _differences("square", real(2, 2, 2)),
        lambda: _differences("square", real(3, 2), reduction="entries", scale=2.0),
        lambda: _differences("square", real(3, 2), reduction="sum"),
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
        lambda: _differences("huber", real(3, 2)),
        lambda: _differences("huber", 3 * real(2, 3), delta=0.7),
        lambda: _differences("huber", real(2, 2), delta=100.0, reduction="entries"),
    ],
    "surefoot.absolute": [lambda: _differences("absolute", 5 * real(3, 2))],
    "surefoot.soft_margin": [lambda: _margin(real(3, 2)), lambda: _margin(4 * real(2, 3), reduction="entries")],
    "surefoot.poisson": [
        lambda: _positive("poisson", real(3, 2)),
        lambda: _positive("poisson", real(3, 2), full=True, reduction="sum"),
    ],
    "surefoot.divergence": [
        lambda: _positive("divergence", real(3, 2)),
        lambda: _differences("divergence", real(3, 2), log_target=True, reduction="entries"),
    ],
    "surefoot.returned": [
        lambda: operation(records()["surefoot.returned"].loss.function, real(1, 1), op="surefoot.returned")
    ],
    "surefoot.negative_log_likelihood": [
        lambda: _labels(real(3, 4), "negative_log_likelihood"),
        lambda: _labels(real(4, 4), "negative_log_likelihood", weight=WEIGHTS),
        lambda: _labels(real(3, 4), "negative_log_likelihood", reduction="sum", scale=0.5),
    ],
}

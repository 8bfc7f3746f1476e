"""Losses with every option, and targets that fit six samples of three outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot import objectives as o

SHAPE = (6, 3)


def real(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 2, 1, 2, 2, 0])
SOFT = torch.softmax(real(1), dim=1)
SIGNS = torch.sign(real(2))
COUNTS = (3 * real(3)).abs().round()
WEIGHT = (0.2, 0.0, 3.0)

LOSSES: dict[str, o.Objective] = {
    "square": o.Square(real(4)),
    "square, entries": o.Square(real(4), reduction="entries", scale=2.0),
    "square, sum": o.Square(real(4), reduction="sum"),
    "labels": o.CrossEntropy(LABELS),
    "one-hot": o.CrossEntropy(torch.eye(3, dtype=torch.float64)[LABELS]),
    "soft labels": o.CrossEntropy(SOFT),
    "weighted labels": o.CrossEntropy(LABELS, weight=WEIGHT),
    "smoothed labels": o.CrossEntropy(LABELS, label_smoothing=0.3),
    "all at once": o.CrossEntropy(LABELS, weight=WEIGHT, label_smoothing=0.2, ignore_index=2, scale=1.7),
    "weighted sum": o.CrossEntropy(SOFT, weight=WEIGHT, label_smoothing=0.2, reduction="sum"),
    "binary": o.BinaryCrossEntropy((SIGNS + 1) / 2),
    "binary, weighted": o.BinaryCrossEntropy(SOFT, weight=WEIGHT, pos_weight=(0.5, 4.0, 0.0), reduction="entries"),
    "huber": o.Huber(real(5)),
    "huber, narrow": o.Huber(real(5), delta=0.3, reduction="sum"),
    "margin": o.SoftMargin(SIGNS),
    "poisson": o.Poisson(COUNTS, full=True),
}

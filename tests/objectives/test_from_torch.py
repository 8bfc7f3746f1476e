"""Losses of torch.nn as objectives: the same values for every option, or a refusal with words."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from objectives.zoo import COUNTS, LABELS, SIGNS, SOFT, real
from surefoot.objectives import Objective, ObjectiveError, from_torch

WEIGHT = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
REDUCTIONS = ("mean", "sum")
IGNORED = torch.tensor([0, -100, 1, 2, 2, 0])


def cases() -> list[tuple[nn.Module, Tensor]]:
    found: list[tuple[nn.Module, Tensor]] = []
    for reduction in REDUCTIONS:
        for weight, smoothing, y in itertools.product((None, WEIGHT), (0.0, 0.2), (LABELS, IGNORED, SOFT)):
            loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, reduction=reduction)
            found.append((loss, y))
        found.append((nn.CrossEntropyLoss(ignore_index=2, reduction=reduction), LABELS))
        found.append((nn.MSELoss(reduction=reduction), real(1)))
        rows = torch.rand(6, 1, dtype=torch.float64)
        for weight, positive in itertools.product((None, WEIGHT, rows), (None, WEIGHT)):
            found.append((nn.BCEWithLogitsLoss(weight, pos_weight=positive, reduction=reduction), SOFT))
        found += [(nn.HuberLoss(reduction=reduction, delta=delta), real(1)) for delta in (1.0, 0.3)]
        found += [(nn.SmoothL1Loss(reduction=reduction, beta=beta), real(1)) for beta in (1.0, 0.3)]
        found.append((nn.SoftMarginLoss(reduction=reduction), SIGNS))
        found += [
            (nn.MultiLabelSoftMarginLoss(weight, reduction=reduction), (SIGNS + 1) / 2)
            for weight in (None, WEIGHT)
        ]
        found += [(nn.PoissonNLLLoss(full=full, reduction=reduction), COUNTS) for full in (False, True)]
    return found


@pytest.mark.parametrize(
    ("loss", "y"), cases(), ids=lambda case: repr(case) if isinstance(case, nn.Module) else ""
)
def test_values_and_gradients_are_those_of_torch(loss, y):
    objective = from_torch(loss, y)
    assert isinstance(objective, Objective)
    for size in (3.0, 30.0):
        outputs = (size * real(7)).requires_grad_()
        expected = loss(outputs, y)
        assert torch.allclose(objective(outputs), expected, rtol=1e-13, atol=1e-14)
        assert torch.allclose(from_torch(loss)(outputs, y), expected, rtol=1e-13, atol=1e-14)
        (gradient,) = torch.autograd.grad(expected, outputs)
        assert torch.allclose(objective.gradient(outputs), gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("loss", "smoothness"),
    [
        (nn.CrossEntropyLoss(), 0.5 / 6),
        (nn.MSELoss(), 2 / 18),
        (nn.MSELoss(reduction="sum"), 2.0),
        (nn.HuberLoss(delta=0.3), 1 / 18),
        (nn.SmoothL1Loss(beta=0.5), 2 / 18),
        (nn.BCEWithLogitsLoss(), 0.25 / 18),
        (nn.SoftMarginLoss(), 0.25 / 18),
    ],
)
def test_their_smoothness(loss, smoothness):
    integer = isinstance(loss, nn.CrossEntropyLoss)
    y = LABELS if integer else SIGNS.clamp(min=0.0)
    found = from_torch(loss, SIGNS if isinstance(loss, nn.SoftMarginLoss) else y).constants((6, 3))
    assert float(found.smoothness) == pytest.approx(smoothness, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.MSELoss(reduction="none"), "no single number"),
        (nn.BCELoss(), "BCEWithLogitsLoss"),
        (nn.GaussianNLLLoss(), "variance"),
        (nn.MultiMarginLoss(), "kinks"),
        (nn.CTCLoss(), "CTCLoss is not covered"),
        (nn.L1Loss(), "kinks"),
        (nn.SmoothL1Loss(beta=0.0), "kinks"),
        (nn.KLDivLoss(), "return scores"),
        (nn.PoissonNLLLoss(log_input=False), "positive outputs"),
        (nn.CrossEntropyLoss(label_smoothing=1.0), "label smoothing"),
        (nn.Tanh(), "Tanh is not covered"),
        (type("Mine", (nn.MSELoss,), {})(), "Mine is not covered"),
    ],
)
def test_what_has_no_constants_is_refused(loss, words):
    with pytest.raises(ObjectiveError, match=words):
        from_torch(loss)

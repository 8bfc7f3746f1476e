r"""Supervised losses, as means over the samples.

The paper sums them or averages them as it goes (appendix "Supervised objectives"); here every loss is
:math:`h(\hat y) = \frac1n\sum_{i=1}^n h_i(\hat y_i)` with the samples along the first dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.graph.nodes import Spec
from surefoot.objectives.base import Objective, ObjectiveError


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the samples of half the squared distance."""
    return 0.5 * (outputs - targets.to(outputs.dtype)).square().sum() / outputs.shape[0]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the samples of log Σ exp ŷ − ⟨y, ŷ⟩; targets are class numbers or distributions."""
    if not targets.is_floating_point():
        return F.cross_entropy(outputs, targets.long())
    return F.cross_entropy(outputs, targets.to(outputs.dtype))


class Square(Objective):
    r""":math:`h(\hat y) = \frac{1}{2n}\sum_i\|\hat y_i - y_i\|^2`.

    >>> float(Square()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    12.5
    """

    operation = "surefoot.square"
    function = staticmethod(square)

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Targets have the shape of the outputs."""
        assert targets is not None
        if outputs.shape != targets.shape or not outputs.shape:
            raise ObjectiveError(
                f"Square compares outputs and targets of one shape, got {_shape(outputs)} and {_shape(targets)}"
            )


class CrossEntropy(Objective):
    r""":math:`h(\hat y) = \frac1n\sum_i\big(\log\sum_k e^{\hat y_{ik}} - \hat y_{i,y_i}\big)`, the logistic loss.

    Targets are class numbers (n), or distributions over the classes (n × k), one-hot or soft.

    >>> round(float(CrossEntropy()(torch.zeros(2, 10), torch.tensor([3, 7]))), 6)
    2.302585
    """

    operation = "surefoot.cross_entropy"
    function = staticmethod(cross_entropy)

    def __init__(self, targets: object = None) -> None:
        super().__init__(targets)
        if self.targets is None or not self.targets.is_floating_point():
            return
        sums = self.targets.detach().double().sum(dim=-1)
        if bool((self.targets < 0).any()) or not bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-5).all()):
            raise ObjectiveError(
                "real targets of CrossEntropy are distributions: not negative, each row adding up to one; class "
                "numbers are integers (y.long())"
            )

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Outputs are n × k; targets n class numbers or n × k numbers."""
        assert targets is not None
        wanted = outputs.shape[:1] if not targets.dtype.is_floating_point else outputs.shape
        if len(outputs.shape) != 2 or targets.shape != wanted:
            raise ObjectiveError(
                "CrossEntropy compares outputs (samples × classes) with class numbers (samples) or distributions "
                f"(samples × classes), got {_shape(outputs)} and {_shape(targets)}"
            )


def _shape(spec: Spec) -> str:
    return "×".join(map(str, spec.shape)) or "a number"

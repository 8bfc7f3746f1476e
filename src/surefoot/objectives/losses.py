r"""Losses of the differences of outputs and targets, and the logistic loss of the entries.

Each is a mean over the samples of sums over the entries of a sample. (Losses of torch.nn are means over all
entries: ``reduction="entries"``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.graph.nodes import Spec
from surefoot.objectives.constants import Constants, ObjectiveError
from surefoot.objectives.loss import Loss, Numbers, as_tensor, divisor, frozen_numbers, shape_of
from surefoot.objectives.separable import Form, SeparableLoss
from surefoot.scalar import ScalarFunction

_x = ScalarFunction.variable()
_HUBER = ScalarFunction.piecewise([-1.0, 1.0], [-0.5 - _x, 0.5 * _x**2.0, _x - 0.5])


def square(outputs: Tensor, targets: Tensor, *, reduction: str = "mean", scale: float = 1.0) -> Tensor:
    """Half the squared distance."""
    distance = (outputs - targets.to(outputs.dtype)).square().sum()
    return 0.5 * scale * distance / divisor(outputs.shape, reduction)


class Square(Loss):
    r""":math:`h(\hat y) = \frac{1}{2n}\sum_i\|\hat y_i - y_i\|^2`.

    >>> float(Square()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    12.5
    """

    operation = "surefoot.square"
    quadratic = True
    function = staticmethod(square)

    def paper_constants(self, outputs: Spec, targets: Tensor | None, radius: float) -> Constants:
        """Appendix "Square loss", as a mean (ERRATA 12)."""
        if not self.is_plain:
            return super().paper_constants(outputs, targets, radius)
        from surefoot.enclosure import row_norms
        from surefoot.magnitude import Magnitude
        from surefoot.objectives import printed

        labels = [Magnitude.infinity()] * outputs.shape[0]
        if targets is not None and targets.device.type != "meta":
            labels = list(row_norms(targets.double()))
        total = printed.supervised([printed.square_loss(radius, label) for label in labels])
        return Constants(total.lipschitz, total.smoothness, True, True, total.unsound)


def binary_cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: Numbers | None = None,
    pos_weight: Numbers | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
) -> Tensor:
    """The logistic losses of the entries, each of two classes of its own."""
    total = F.binary_cross_entropy_with_logits(
        outputs,
        targets.to(outputs.dtype),
        weight=None if weight is None else as_tensor(weight, outputs),
        pos_weight=None if pos_weight is None else as_tensor(pos_weight, outputs),
        reduction="sum",
    )
    return scale * total / divisor(outputs.shape, reduction)


class BinaryCrossEntropy(SeparableLoss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}w_{ij}\big((1 - y_{ij})\hat y_{ij} + (1 + (c_{ij} - 1)y_{ij})
    \log(1 + e^{-\hat y_{ij}})\big)`, outputs being logits.

    Args:
        targets: of the shape of the outputs, between 0 and 1; bound to the loss, or ``None``.
        weight: w ≥ 0, broadcast to the outputs.
        pos_weight: c ≥ 0, the weight of positive targets, likewise.
        reduction: see :class:`~surefoot.objectives.loss.Loss`.
        scale: a positive factor.

    Raises:
        ObjectiveError: if an option or the targets are not allowed.

    >>> round(float(BinaryCrossEntropy()(torch.zeros(5, 2), torch.ones(5, 2))), 6)
    1.386294
    """

    operation = "surefoot.binary_cross_entropy"
    function = staticmethod(binary_cross_entropy)
    own_options = (("weight", None), ("pos_weight", None))

    def __init__(
        self,
        targets: Any = None,
        *,
        weight: Any = None,
        pos_weight: Any = None,
        reduction: str = "mean",
        scale: float = 1.0,
    ) -> None:
        self.weight = frozen_numbers(weight, "the weight of BinaryCrossEntropy")
        self.pos_weight = frozen_numbers(pos_weight, "the pos_weight of BinaryCrossEntropy")
        super().__init__(targets, reduction=reduction, scale=scale)

    def check_values(self, targets: Tensor) -> None:
        """Between 0 and 1."""
        if not bool(((targets >= 0) & (targets <= 1)).all()):
            raise ObjectiveError("the targets of BinaryCrossEntropy are numbers between 0 and 1")

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Weights broadcast to the outputs."""
        super().check(outputs, targets)
        for name, numbers in (("weight", self.weight), ("pos_weight", self.pos_weight)):
            shape = () if numbers is None else tuple(torch.tensor(numbers).shape)
            if len(shape) > len(outputs.shape) or any(
                own not in (1, size) for own, size in zip(shape[::-1], outputs.shape[::-1], strict=False)
            ):
                raise ObjectiveError(
                    f"the {name} of BinaryCrossEntropy has the shape {shape}, which does not broadcast to "
                    f"{shape_of(outputs)} outputs"
                )

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        r"""With soft-plus :math:`\varphi`: :math:`\log(1 + e^{-x}) = \varphi(x) - x`, so an entry is
        :math:`w(1 - y + cy)\varphi(x) - wcyx`.
        """
        weight, positive, y = *_weights(targets.double(), **options), targets.double()
        factor = options.get("scale", 1.0) / divisor(shape, options.get("reduction", "mean"))
        return Form.of(
            y,
            factor,
            ScalarFunction.named("softplus"),
            weight=weight * ((1 - y) + positive * y),
            linear=weight * positive * y,
        )

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        r"""The slope :math:`w(1 - y + cy)\sigma - wcy` is affine in y and in σ, so largest at their ends, where it
        is 0, w or -wc; :math:`\sigma' \le 1/4`.
        """
        weight, positive = _weights(torch.ones((), dtype=torch.float64), **options)
        largest = float(weight.max()) * max(1.0, float(positive.max())) * (1 + 2.0**-50)
        return largest, largest / 4


def _weights(like: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    found = [options.get(name) for name in ("weight", "pos_weight")]
    weight, positive = (as_tensor(1.0 if numbers is None else numbers, like) for numbers in found)
    return weight, positive


def huber(
    outputs: Tensor, targets: Tensor, *, delta: float = 1.0, reduction: str = "mean", scale: float = 1.0
) -> Tensor:
    """The Huber losses of the differences."""
    total = F.huber_loss(outputs, targets.to(outputs.dtype), reduction="sum", delta=delta)
    return scale * total / divisor(outputs.shape, reduction)


class Huber(SeparableLoss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}\varphi_\delta(\hat y_{ij} - y_{ij})` with :math:`\varphi_\delta(r) =
    r^2/2` for :math:`|r| \le \delta`, and :math:`\delta|r| - \delta^2/2` beyond.

    Its gradient is Lipschitz; its second derivative, 1 within δ and 0 beyond, jumps at δ. Hessian-vector products
    exist almost everywhere.

    Args:
        targets: of the shape of the outputs; bound to the loss, or ``None``.
        delta: where the parabola becomes a line.
        reduction: see :class:`~surefoot.objectives.loss.Loss`.
        scale: a positive factor.

    Raises:
        ObjectiveError: if an option or the targets are not allowed.

    >>> float(Huber(delta=2.0)(torch.tensor([[1.0, 5.0]]), torch.zeros(1, 2)))
    8.5
    """

    operation = "surefoot.huber"
    function = staticmethod(huber)
    own_options = (("delta", 1.0),)

    def __init__(
        self, targets: Any = None, delta: float = 1.0, *, reduction: str = "mean", scale: float = 1.0
    ) -> None:
        if not 1e-100 < float(delta) < 1e100:
            raise ObjectiveError(f"the delta of Huber is a positive number of ordinary size, got {delta!r}")
        self.delta = float(delta)
        super().__init__(targets, reduction=reduction, scale=scale)

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        r""":math:`\varphi_\delta(r) = \delta^2\varphi_1(r/\delta)`."""
        y, delta = targets.double(), options.get("delta", 1.0)
        factor = options.get("scale", 1.0) / divisor(shape, options.get("reduction", "mean"))
        return Form.of(y, factor, _HUBER, weight=delta**2, sign=1 / delta, shift=y / delta)

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        r""":math:`|\varphi_\delta'| \le \delta`, with Lipschitz constant 1."""
        return options.get("delta", 1.0), 1.0

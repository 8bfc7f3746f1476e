"""Losses that are there for the sake of torch.nn: convex ones without a curvature bound, and affine ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.graph.nodes import Spec
from surefoot.objectives.constants import ObjectiveError
from surefoot.objectives.cross_entropy import (
    ClassWeights,
    check_classes,
    check_labels,
    check_range,
    class_weights,
    masses,
)
from surefoot.objectives.loss import as_tensor, divisor, refuse_empty, shape_of
from surefoot.objectives.separable import Form, SeparableLoss
from surefoot.scalar import ScalarFunction

_EXPONENTIAL = ScalarFunction.apply("exp", ScalarFunction.variable())


def absolute(outputs: Tensor, targets: Tensor, *, reduction: str = "mean", scale: float = 1.0) -> Tensor:
    """The absolute differences."""
    total = F.l1_loss(outputs, targets.to(outputs.dtype), reduction="sum")
    return scale * total / divisor(outputs.shape, reduction)


class Absolute(SeparableLoss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}|\hat y_{ij} - y_{ij}|`: convex, not smooth.

    Its smoothness is infinite wherever an output may meet its target; that of
    :class:`~surefoot.objectives.Huber` is not.
    """

    operation = "surefoot.absolute"
    function = staticmethod(absolute)
    smooth = False

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        """The absolute value of the difference."""
        return Form.of(targets, _factor(shape, options), ScalarFunction.named("abs"), shift=targets.double())

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        """A slope of 1, with a kink."""
        return 1.0, math.inf


def soft_margin(outputs: Tensor, targets: Tensor, *, reduction: str = "mean", scale: float = 1.0) -> Tensor:
    """The logistic losses of the products."""
    total = -F.logsigmoid(targets.to(outputs.dtype) * outputs).sum()
    return scale * total / divisor(outputs.shape, reduction)


class SoftMargin(SeparableLoss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}\log(1 + e^{-y_{ij}\hat y_{ij}})` with targets -1 or 1, or between."""

    operation = "surefoot.soft_margin"
    function = staticmethod(soft_margin)

    def check_values(self, targets: Tensor) -> None:
        """Between -1 and 1."""
        if not bool(((targets >= -1) & (targets <= 1)).all()):
            raise ObjectiveError("the targets of SoftMargin are -1 or 1, or numbers between")

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        """Soft-plus of minus the product."""
        return Form.of(targets, _factor(shape, options), ScalarFunction.named("softplus"), sign=-targets.double())

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        """Those of soft-plus, as the targets are at most 1 in absolute value."""
        return 1.0, 0.25


def poisson(
    outputs: Tensor, targets: Tensor, *, full: bool = False, reduction: str = "mean", scale: float = 1.0
) -> Tensor:
    """Minus the logarithms of the likelihoods of counts."""
    total = F.poisson_nll_loss(outputs, targets.to(outputs.dtype), log_input=True, full=full, reduction="sum")
    return scale * total / divisor(outputs.shape, reduction)


class Poisson(SeparableLoss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}(e^{\hat y_{ij}} - y_{ij}\hat y_{ij})`, outputs being log-rates.

    Convex, smooth on bounded sets only: certify it over a domain on which the outputs are bounded.

    Args:
        targets: counts ≥ 0; bound to the loss, or ``None``.
        full: whether to add Stirling's approximation of :math:`\log y!` for counts above 1, a constant.
        reduction: see :class:`~surefoot.objectives.loss.Loss`.
        scale: a positive factor.
    """

    operation = "surefoot.poisson"
    function = staticmethod(poisson)
    smooth = False
    nonnegative = False
    own_options = (("full", False),)

    def __init__(
        self, targets: Any = None, *, full: bool = False, reduction: str = "mean", scale: float = 1.0
    ) -> None:
        self.full = bool(full)
        super().__init__(targets, reduction=reduction, scale=scale)

    def check_values(self, targets: Tensor) -> None:
        """Not negative."""
        super().check_values(targets)
        if not bool((targets >= 0).all()):
            raise ObjectiveError("the targets of Poisson are counts, not negative")

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        """The exponential, and a line."""
        y = targets.double()
        stirling: Tensor | float = 0.0
        if options.get("full", False):
            stirling = torch.where(y > 1, y * y.log() - y + 0.5 * (2 * math.pi * y).log(), 0.0)
        return Form.of(y, _factor(shape, options), _EXPONENTIAL, linear=y, constant=stirling)

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        """Nothing is known: the exponential has no bound."""
        return math.inf, math.inf


def divergence(
    outputs: Tensor, targets: Tensor, *, log_target: bool = False, reduction: str = "mean", scale: float = 1.0
) -> Tensor:
    """The divergence of the distributions that the outputs are logarithms of from the targets."""
    total = F.kl_div(outputs, targets.to(outputs.dtype), reduction="sum", log_target=log_target)
    return scale * total / divisor(outputs.shape, reduction)


class Divergence(SeparableLoss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}y_{ij}(\log y_{ij} - \hat y_{ij})`, outputs being log-probabilities.

    Affine in the outputs: its smoothness is zero, that of the whole comes from the log-soft-max before it.

    Args:
        targets: numbers ≥ 0, or their logarithms; bound to the loss, or ``None``.
        log_target: whether targets are logarithms, too.
        reduction: see :class:`~surefoot.objectives.loss.Loss`.
        scale: a positive factor.
    """

    operation = "surefoot.divergence"
    function = staticmethod(divergence)
    nonnegative = False
    own_options = (("log_target", False),)

    def __init__(
        self, targets: Any = None, *, log_target: bool = False, reduction: str = "mean", scale: float = 1.0
    ) -> None:
        self.log_target = bool(log_target)
        super().__init__(targets, reduction=reduction, scale=scale)

    def check_values(self, targets: Tensor) -> None:
        """Not negative, unless they are logarithms."""
        super().check_values(targets)
        if not self.log_target and not bool((targets >= 0).all()):
            raise ObjectiveError("the targets of Divergence are probabilities, not negative, or log_target=True")

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        """A line."""
        y = targets.double()
        probability, logarithm = (
            (y.exp(), y) if options.get("log_target", False) else (y, y.clamp(min=1e-300).log())
        )
        return Form.of(y, _factor(shape, options), None, linear=probability, constant=probability * logarithm)

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        """The slope is the target, which is not known."""
        return math.inf, 0.0


def negative_log_likelihood(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: ClassWeights = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
) -> Tensor:
    """Minus the outputs of the right classes."""
    ignored = -100 if ignore_index is None else ignore_index
    weights = None if weight is None else as_tensor(weight, outputs)
    return scale * F.nll_loss(outputs, targets.long(), weight=weights, ignore_index=ignored, reduction=reduction)


class NegativeLogLikelihood(SeparableLoss):
    r""":math:`h(\hat y) = -\frac1n\sum_i\hat y_{i,y_i}`, outputs being logarithms of probabilities.

    Affine in the outputs: its smoothness is zero, that of the whole comes from the log-soft-max before it.

    Args:
        targets: class numbers; bound to the loss, or ``None``.
        weight: one per class, not negative; the mean divides by their sum.
        ignore_index: samples of this class number do not count; ``None`` if all count.
        reduction: ``"mean"`` or ``"sum"``.
        scale: a positive factor.
    """

    operation = "surefoot.negative_log_likelihood"
    function = staticmethod(negative_log_likelihood)
    reductions = ("mean", "sum")
    nonnegative = False
    own_options = (("weight", None), ("ignore_index", None))

    def __init__(
        self,
        targets: Any = None,
        *,
        weight: Any = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
        scale: float = 1.0,
    ) -> None:
        self.weight = class_weights(weight, "NegativeLogLikelihood")
        self.ignore_index = None if ignore_index is None else int(ignore_index)
        super().__init__(targets, reduction=reduction, scale=scale)

    def check_values(self, targets: Tensor) -> None:
        """Class numbers."""
        if targets.is_floating_point():
            raise ObjectiveError("the targets of NegativeLogLikelihood are class numbers, integers (y.long())")
        check_labels(self, targets, self.weight, self.ignore_index)

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Outputs are n × k, targets n class numbers."""
        assert targets is not None
        if len(outputs.shape) != 2 or targets.shape != outputs.shape[:1]:
            raise ObjectiveError(
                "NegativeLogLikelihood compares outputs (samples × classes) with class numbers (samples), got "
                f"{shape_of(outputs)} and {shape_of(targets)}"
            )
        refuse_empty("NegativeLogLikelihood", outputs)
        check_classes("NegativeLogLikelihood", outputs, self.weight)

    def target_spec(self, outputs: Spec) -> Spec:
        """Class numbers."""
        return Spec(outputs.shape[:1], torch.int64)

    def fit(self, outputs: Spec, targets: Tensor) -> None:
        """Class numbers are less than the number of classes."""
        super().fit(outputs, targets)
        check_range("NegativeLogLikelihood", outputs, targets, self.ignore_index)

    @classmethod
    def form(cls, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        """A line, with the masses of the cross-entropy."""
        return Form.of(targets, 1.0, None, linear=masses(targets, shape[1], **options))

    @classmethod
    def extremes(cls, **options: Any) -> tuple[float, float]:
        """The slope is a mass, which is not known."""
        return math.inf, 0.0


def _factor(shape: Sequence[int], options: dict[str, Any]) -> float:
    return float(options.get("scale", 1.0) / divisor(shape, options.get("reduction", "mean")))

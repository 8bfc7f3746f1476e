"""The losses of torch.nn that are sums over the entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.operations.losses.cross_entropy import ClassWeights, masses
from surefoot.operations.losses.form import Form
from surefoot.operations.losses.separable_losses import Separable, separable
from surefoot.operations.losses.sums import Numbers, as_tensor, keywords
from surefoot.scalar import ScalarFunction

_x = ScalarFunction.variable()
_HUBER = ScalarFunction.piecewise([-1.0, 1.0], [-0.5 - _x, 0.5 * _x**2.0, _x - 0.5])
_SOFTPLUS = ScalarFunction.named("softplus")


def huber(targets: Tensor, *, delta: float = 1.0) -> Form:
    r""":math:`\varphi_\delta(r) = \delta^2\varphi_1(r/\delta)`, of slope at most δ with Lipschitz constant 1."""
    return Form.of(targets, _HUBER, weight=delta**2, sign=1 / delta, shift=targets.double() / delta)


def soft_margin(targets: Tensor) -> Form:
    """Soft-plus of minus the product; its extremes, as targets are at most 1 in absolute value."""
    return Form.of(targets, _SOFTPLUS, sign=-targets.double())


def poisson(targets: Tensor, *, full: bool = False) -> Form:
    r"""The exponential and a line; with Stirling's approximation of :math:`\log y!`."""
    y = targets.double()
    stirling = torch.where(y > 1, y * y.log() - y + 0.5 * (2 * math.pi * y).log(), 0.0) if full else 0.0
    return Form.of(y, ScalarFunction.apply("exp", _x), linear=y, constant=stirling)


def divergence(targets: Tensor, *, log_target: bool = False) -> Form:
    """A line, whose slope is the target."""
    y = targets.double()
    probability, logarithm = (y.exp(), y) if log_target else (y, y.clamp(min=1e-300).log())
    return Form.of(y, None, linear=probability, constant=probability * logarithm)


def binary_cross_entropy(
    targets: Tensor, *, weight: Numbers | None = None, pos_weight: Numbers | None = None
) -> Form:
    r"""With soft-plus :math:`\varphi`: :math:`\log(1 + e^{-x}) = \varphi(x) - x`, so an entry is
    :math:`w(1 - y + cy)\varphi(x) - wcyx`.
    """
    y = targets.double()
    w, c = (as_tensor(1.0 if numbers is None else numbers, y) for numbers in (weight, pos_weight))
    return Form.of(y, _SOFTPLUS, weight=w * ((1 - y) + c * y), linear=w * c * y, rest=w * (1 - y))


def _binary_sum(outputs: Tensor, targets: Tensor, **options: Numbers | None) -> Tensor:
    weights: dict[str, Any] = {name: w if w is None else as_tensor(w, outputs) for name, w in options.items()}
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum", **weights)


def _binary_extremes(*, weight: Numbers | None = None, pos_weight: Numbers | None = None) -> tuple[float, float]:
    r"""The slope :math:`w(1 - y + cy)\sigma - wcy` is affine in y and in σ, so largest at their ends, where it
    is 0, w or -wc; :math:`\sigma' \le 1/4`.
    """
    one = torch.ones((), dtype=torch.float64)
    w, c = (float(as_tensor(1.0 if n is None else n, one).max()) for n in (weight, pos_weight))
    largest = w * max(1.0, c) * (1 + 2.0**-50)
    return largest, largest / 4


class Likelihood(Separable):
    """Minus the outputs of the right classes: a line with the masses of the cross-entropy, c and all."""

    def value(
        self,
        outputs: Tensor,
        targets: Tensor,
        *,
        weight: ClassWeights = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
        scale: float = 1.0,
    ) -> Tensor:
        """The loss as torch computes it."""
        ignored = -100 if ignore_index is None else ignore_index
        weights = None if weight is None else as_tensor(weight, outputs)
        return scale * F.nll_loss(outputs, targets.long(), weights, ignore_index=ignored, reduction=reduction)

    def at(self, targets: Tensor, shape: Sequence[int], **options: Any) -> Form:
        """The masses are the slopes."""
        return Form.of(targets, None, linear=masses(targets, shape[1], **options))

    def extremes(self, **own: Any) -> tuple[float, float]:
        """The slope is a mass, which is not known."""
        return math.inf, 0.0


separable(
    "surefoot.huber",
    huber,
    sum_of=partial(F.huber_loss, reduction="sum"),
    extremes=lambda delta=1.0: (delta, 1.0),
    nonnegative=True,
)
separable(
    "surefoot.absolute",
    ScalarFunction.named("abs"),
    sum_of=partial(F.l1_loss, reduction="sum"),
    extremes=lambda: (1.0, math.inf),
    nonnegative=True,
)
separable(
    "surefoot.soft_margin",
    soft_margin,
    sum_of=lambda outputs, targets: -F.logsigmoid(targets * outputs).sum(),
    extremes=lambda: (1.0, 0.25),
    nonnegative=True,
)
separable(
    "surefoot.poisson",
    poisson,
    sum_of=partial(F.poisson_nll_loss, log_input=True, reduction="sum"),
    reason="the exponential of 'poisson' has no bounded curvature: shrink the domain, so that outputs are bounded",
)
separable(
    "surefoot.divergence",
    divergence,
    sum_of=partial(F.kl_div, reduction="sum"),
    extremes=lambda log_target=False: (math.inf, 0.0),  # the slope is the target, which is not known
)
separable(
    "surefoot.binary_cross_entropy",
    binary_cross_entropy,
    sum_of=_binary_sum,
    extremes=_binary_extremes,
    nonnegative=True,
)
Likelihood().register("surefoot.negative_log_likelihood", keywords(Likelihood.value), nonnegative=False)

r"""Losses of outputs and targets of one shape.

Each is a mean over the samples of sums over the entries of a sample. (Losses of torch.nn are means over all
entries: ``reduction="entries"``.) All take the options ``reduction`` and ``scale`` of
:class:`~surefoot.objectives.Loss`, and raise :class:`ObjectiveError` if an option or the targets are not allowed.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from surefoot.chain import Chain
from surefoot.enclosure import row_norms
from surefoot.graph.nodes import Spec
from surefoot.magnitude import Magnitude
from surefoot.objectives.base import Averaging, Loss, frozen_numbers, shape_of
from surefoot.objectives.constants import Constants, ObjectiveError, square_loss, supervised
from surefoot.operations.losses.sums import Numbers


class Square(Loss):
    r""":math:`h(\hat y) = \frac{1}{2n}\sum_i\|\hat y_i - y_i\|^2`.

    >>> float(sf.Square()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    12.5
    """

    operation = "surefoot.square"

    def paper_constants(self, outputs: Spec, targets: Tensor | None, radius: float) -> Constants:
        """Appendix "Square loss", as a mean (ERRATA 12)."""
        if not self.is_plain:
            return super().paper_constants(outputs, targets, radius)
        labels = [Magnitude.infinity()] * outputs.shape[0]
        if targets is not None and targets.device.type != "meta":
            labels = list(row_norms(targets.double()))
        total = supervised([square_loss(radius, label) for label in labels])
        return Constants(total.lipschitz, total.smoothness, True, True, total.unsound)


class BinaryCrossEntropy(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}w_{ij}\big((1 - y_{ij})\hat y_{ij} + (1 + (c_{ij} - 1)y_{ij})
    \log(1 + e^{-\hat y_{ij}})\big)`, outputs being logits.

    Args:
        targets: numbers between 0 and 1 to bind to the loss, or ``None``.
        weight: w ≥ 0, broadcast to the outputs.
        pos_weight: c ≥ 0, the weight of positive targets, broadcast to the outputs.

    >>> round(float(sf.objectives.BinaryCrossEntropy()(torch.zeros(5, 2), torch.ones(5, 2))), 6)
    1.386294
    """

    operation = "surefoot.binary_cross_entropy"
    low, high, allowed = 0.0, 1.0, "numbers between 0 and 1"
    weight: Numbers | None
    pos_weight: Numbers | None

    def __init__(
        self, targets: Any = None, *, weight: Any = None, pos_weight: Any = None, **averaging: Unpack[Averaging]
    ) -> None:
        weights = {"weight": weight, "pos_weight": pos_weight}
        numbers = {name: frozen_numbers(n, f"the {name} of BinaryCrossEntropy") for name, n in weights.items()}
        super().__init__(targets, **averaging, **numbers)

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Refuse weights that do not broadcast to the outputs."""
        super().check(outputs, targets)
        for name, numbers in (("weight", self.weight), ("pos_weight", self.pos_weight)):
            shape = () if numbers is None else tuple(torch.tensor(numbers).shape)
            if len(shape) > len(outputs.shape) or any(
                side not in (1, size) for side, size in zip(shape[::-1], outputs.shape[::-1], strict=False)
            ):
                raise ObjectiveError(
                    f"the {name} of BinaryCrossEntropy has the shape {shape}, which does not broadcast to "
                    f"{shape_of(outputs)} outputs"
                )


class Huber(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}\varphi_\delta(\hat y_{ij} - y_{ij})` with :math:`\varphi_\delta(r) =
    r^2/2` for :math:`|r| \le \delta`, and :math:`\delta|r| - \delta^2/2` beyond.

    Its gradient is Lipschitz; its second derivative, 1 within δ and 0 beyond, jumps at δ. Hessian-vector products
    exist almost everywhere.

    Args:
        targets: targets to bind to the loss, or ``None``.
        delta: the distance at which the parabola becomes a line.

    >>> float(sf.objectives.Huber(delta=2.0)(torch.tensor([[1.0, 5.0]]), torch.zeros(1, 2)))
    8.5
    """

    operation = "surefoot.huber"
    delta: float

    def __init__(self, targets: Any = None, delta: float = 1.0, **averaging: Unpack[Averaging]) -> None:
        if not 1e-100 < float(delta) < 1e100:
            raise ObjectiveError(f"the delta of Huber is a positive number of ordinary size, got {delta!r}")
        super().__init__(targets, delta=float(delta), **averaging)


class Absolute(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}|\hat y_{ij} - y_{ij}|`: convex, not smooth.

    Its smoothness is infinite wherever an output may meet its target; use :class:`~surefoot.objectives.Huber` for
    a smooth loss.

    >>> float(sf.objectives.Absolute()(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]])))
    3.0
    """

    operation = "surefoot.absolute"


class SoftMargin(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}\log(1 + e^{-y_{ij}\hat y_{ij}})` with targets -1 or 1, or between.

    >>> round(float(sf.objectives.SoftMargin()(torch.zeros(1, 1), torch.ones(1, 1))), 4)  # log 2
    0.6931
    """

    operation = "surefoot.soft_margin"
    low, high, allowed = -1.0, 1.0, "-1 or 1, or numbers between"


class Poisson(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}(e^{\hat y_{ij}} - y_{ij}\hat y_{ij})`, outputs being log-rates.

    It is convex, and smooth only on bounded sets: certify it over a domain on which the outputs are bounded.

    Args:
        targets: counts ≥ 0 to bind to the loss, or ``None``.
        full: whether to add Stirling's approximation of :math:`\log y!` for counts above 1, a constant.

    >>> float(sf.objectives.Poisson()(torch.zeros(2, 1), torch.tensor([[3.0], [0.0]])))  # e^0 each
    1.0
    """

    operation = "surefoot.poisson"
    low, allowed = 0.0, "counts, not negative"
    full: bool

    def __init__(self, targets: Any = None, *, full: bool = False, **averaging: Unpack[Averaging]) -> None:
        super().__init__(targets, full=bool(full), **averaging)


class Divergence(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}y_{ij}(\log y_{ij} - \hat y_{ij})`, outputs being log-probabilities.

    It is affine in the outputs: its smoothness is zero, and that of the whole comes from the log-soft-max before
    it.

    Args:
        targets: numbers ≥ 0, or their logarithms, to bind to the loss, or ``None``.
        log_target: whether targets are logarithms too.

    >>> half = torch.full((1, 2), 0.5)
    >>> float(sf.objectives.Divergence()(half.log(), half))
    0.0
    """

    operation = "surefoot.divergence"
    allowed = "probabilities, not negative, or log_target=True"
    log_target: bool

    def __init__(self, targets: Any = None, *, log_target: bool = False, **averaging: Unpack[Averaging]) -> None:
        self.low = -math.inf if log_target else 0.0
        super().__init__(targets, log_target=bool(log_target), **averaging)


class Reconstruction(Square):
    r""":math:`h(\hat x) = \frac1n\sum_i\|\hat x_i - x_i\|^2`, the targets being the input x itself.

    It may be bound to x; if not, an optimizer gets x as targets: ``optimizer.step(x, x)``. For data between 0 and
    1 that are reconstructed as logits, use :class:`BinaryCrossEntropy` of x.

    Args:
        targets: x, or ``None``.
        reduction: see :class:`~surefoot.objectives.base.Loss`.
        scale: a factor of half the squared distance; 2 gives the paper's objective.

    Raises:
        ObjectiveError: if an option is not allowed, or the output does not have the shape of the input.

    >>> float(sf.objectives.Reconstruction()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    25.0
    """

    def __init__(self, targets: Any = None, *, reduction: str = "mean", scale: float = 2.0) -> None:
        super().__init__(targets, reduction=reduction, scale=scale)

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Refuse an output of another shape than the input."""
        if targets is not None and outputs.shape != targets.shape:
            raise ObjectiveError(
                f"a reconstruction has the shape of the input, which is {shape_of(targets)}: the model returns "
                f"{shape_of(outputs)}. Flatten the input, or let the decoder end in its shape (nn.Unflatten)"
            )
        super().check(outputs, targets)


def encode_decode(encoder: nn.Module, decoder: nn.Module, x: Any) -> Chain:
    r"""The composition :math:`\psi^d \circ \psi^e` as one chain, from two models that need not know each other.

    Raises:
        CaptureError: if one of the two cannot be read.
        ChainError: if the decoder does not read what the encoder returns.

    >>> chain = sf.objectives.encode_decode(nn.Linear(4, 2), nn.Linear(2, 4), torch.ones(3, 4))
    >>> len(chain), sorted(chain.parameters)
    (2, ['0.bias', '0.weight', '1.bias', '1.weight'])
    """
    first = Chain(encoder, x)
    return first >> Chain(decoder, first.value())

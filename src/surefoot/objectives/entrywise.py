r"""Losses of outputs and targets of one shape.

Each is a mean over the samples of sums over the entries of a sample. (Losses of torch.nn are means over all
entries: ``reduction="entries"``.) All take the options of :class:`~surefoot.objectives.Loss`.

*Constants.* All but :class:`Square` are :math:`h = c\sum_e\varphi_e(\hat y_e)` with convex :math:`\varphi_e`:
the Hessian is diagonal, so L is c times the largest :math:`\varphi_e''`, and :math:`\varphi_e'`, which
increases, is on :math:`|\hat y_e| \le \rho` between its values at the ends: :math:`\ell =
c\,\|(\max|\varphi_e'(\pm\rho)|)_e\|_2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.errors import ObjectiveError
from surefoot.objectives.loss import Loss, Numbers, Shaped, as_tensor, divisor, frozen_numbers, shape_of


class Square(Loss):
    r""":math:`h(\hat y) = \frac{1}{2n}\sum_i\|\hat y_i - y_i\|^2`.

    Its gradient is :math:`c(\hat y - y)`, c = 1/n: :math:`\ell = c(\rho + \|y\|)` and L = c, both attained.

    >>> float(sf.Square()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    12.5
    """

    operation = "surefoot.square"
    quadratic = True

    @staticmethod
    def function(outputs: Tensor, targets: Tensor, *, reduction: str = "mean", scale: float = 1.0) -> Tensor:
        distance = (outputs - targets.to(outputs.dtype)).square().sum()
        return 0.5 * scale * distance / divisor(outputs.shape, reduction)

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        label = math.inf if targets is None else float(torch.linalg.vector_norm(targets.double()))
        factor = self.scale / divisor(shape, self.reduction)
        return factor * (radius + label), factor


class Entrywise(Loss):
    r"""A loss :math:`c\sum_e\varphi_e(\hat y_e)`: a subclass has the sum and bounds of its derivatives."""

    @staticmethod
    def total(outputs: Tensor, targets: Tensor, **own: Any) -> Tensor:
        """The sum over the entries, without c."""
        raise NotImplementedError

    @classmethod
    def function(
        cls, outputs: Tensor, targets: Tensor, *, reduction: str = "mean", scale: float = 1.0, **own: Any
    ) -> Tensor:
        return scale * cls.total(outputs, targets.to(outputs.dtype), **own) / divisor(outputs.shape, reduction)

    def slopes(self, targets: Tensor | None, radius: float) -> tuple[Tensor | float, Tensor | float]:
        r"""Upper bounds of :math:`|\varphi_e'|` and :math:`\varphi_e''` on :math:`|\hat y_e| \le \rho`.

        They broadcast to the outputs; without targets they hold for all that are allowed.
        """
        raise NotImplementedError

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        slopes, bends = (
            torch.as_tensor(size, dtype=torch.float64).expand(tuple(shape))
            for size in self.slopes(None if targets is None else targets.double(), radius)
        )
        factor = self.scale / divisor(shape, self.reduction)
        return factor * float(torch.linalg.vector_norm(slopes)), factor * float(bends.max())


class BinaryCrossEntropy(Entrywise):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}w_{ij}\big((1 - y_{ij})\hat y_{ij} + (1 + (c_{ij} - 1)y_{ij})
    \log(1 + e^{-\hat y_{ij}})\big)`, outputs being logits, targets between 0 and 1.

    With σ the logistic function an entry has the slope :math:`w((1 - y + cy)\sigma(x) - cy)`, affine in y and in
    σ, so it is largest at their ends, and the second derivative :math:`w(1 - y + cy)\sigma'(x)`, :math:`\sigma'
    \le \sigma'(0) = \frac14`. The weights w ≥ 0 and c ≥ 0 (``pos_weight``) are broadcast to the outputs.

    >>> round(float(sf.objectives.BinaryCrossEntropy()(torch.zeros(5, 2), torch.ones(5, 2))), 6)
    1.386294
    """

    operation = "surefoot.binary_cross_entropy"
    low, high, allowed = 0.0, 1.0, "numbers between 0 and 1"
    defaults: ClassVar = {"weight": None, "pos_weight": None}
    weight: Numbers | None
    pos_weight: Numbers | None

    def __init__(
        self, targets: Any = None, *, weight: Any = None, pos_weight: Any = None, **averaging: Any
    ) -> None:
        weights = {"weight": weight, "pos_weight": pos_weight}
        numbers: dict[str, Any] = {
            name: frozen_numbers(n, f"the {name} of BinaryCrossEntropy") for name, n in weights.items()
        }
        super().__init__(targets, **averaging, **numbers)

    @staticmethod
    def total(outputs: Tensor, targets: Tensor, **own: Any) -> Tensor:
        weights = own.get("weight"), own.get("pos_weight")
        w, c = (None if n is None else as_tensor(n, outputs) for n in weights)
        return F.binary_cross_entropy_with_logits(outputs, targets, weight=w, pos_weight=c, reduction="sum")

    def slopes(self, targets: Tensor | None, radius: float) -> tuple[Tensor, Tensor]:
        like = torch.zeros((), dtype=torch.float64) if targets is None else targets
        w, c = (as_tensor(1.0 if n is None else n, like) for n in (self.weight, self.pos_weight))
        ends = torch.sigmoid(torch.tensor([-radius, radius], dtype=torch.float64)).tolist()
        extremes = (torch.zeros_like(like), torch.ones_like(like)) if targets is None else (targets,)
        masses = [w * (1 - y + c * y) for y in extremes]
        slopes = [(m * end - w * c * y).abs() for m, y in zip(masses, extremes, strict=True) for end in ends]
        largest = [torch.stack(torch.broadcast_tensors(*sizes)).amax(dim=0) for sizes in (slopes, masses)]
        return largest[0], largest[1] / 4

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        super().check(outputs, targets)
        for name in self.defaults:
            shape = torch.tensor(getattr(self, name) or 0.0).shape
            sides = zip(shape[::-1], outputs.shape[::-1], strict=False)
            if len(shape) > len(outputs.shape) or any(side not in (1, size) for side, size in sides):
                raise ObjectiveError(
                    f"the {name} of BinaryCrossEntropy has the shape {tuple(shape)}, which does not broadcast to "
                    f"{shape_of(outputs)} outputs"
                )


class Huber(Entrywise):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}\varphi_\delta(\hat y_{ij} - y_{ij})` with :math:`\varphi_\delta(r) =
    r^2/2` for :math:`|r| \le \delta`, and :math:`\delta|r| - \delta^2/2` beyond.

    Its second derivative, 1 within δ and 0 beyond, jumps at δ; :math:`|\varphi'| \le \min(\delta, |\hat y| +
    |y|)`.

    >>> float(sf.objectives.Huber(delta=2.0)(torch.tensor([[1.0, 5.0]]), torch.zeros(1, 2)))
    8.5
    """

    operation = "surefoot.huber"
    defaults: ClassVar = {"delta": 1.0}
    delta: float

    def __init__(self, targets: Any = None, delta: float = 1.0, **averaging: Any) -> None:
        if not 1e-100 < float(delta) < 1e100:
            raise ObjectiveError(f"the delta of Huber is a positive number of ordinary size, got {delta!r}")
        super().__init__(targets, delta=float(delta), **averaging)

    @staticmethod
    def total(outputs: Tensor, targets: Tensor, **own: Any) -> Tensor:
        return F.huber_loss(outputs, targets, reduction="sum", **own)

    def slopes(self, targets: Tensor | None, radius: float) -> tuple[Tensor | float, float]:
        return (self.delta if targets is None else (targets.abs() + radius).clamp(max=self.delta)), 1.0


class SoftMargin(Entrywise):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}\log(1 + e^{-y_{ij}\hat y_{ij}})` with targets -1 or 1, or between.

    Slopes are :math:`-y\sigma(-yx)`, second derivatives :math:`y^2\sigma'(yx) \le y^2/4`, σ the logistic function.
    """

    operation = "surefoot.soft_margin"
    low, high, allowed = -1.0, 1.0, "-1 or 1, or numbers between"

    @staticmethod
    def total(outputs: Tensor, targets: Tensor, **own: Any) -> Tensor:
        return -F.logsigmoid(targets * outputs).sum()

    def slopes(self, targets: Tensor | None, radius: float) -> tuple[Tensor, Tensor]:
        size = torch.ones((), dtype=torch.float64) if targets is None else targets.abs()
        return size * torch.sigmoid((size * radius).nan_to_num(nan=0.0)), size.square() / 4


class Poisson(Entrywise):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}(e^{\hat y_{ij}} - y_{ij}\hat y_{ij})`, outputs being log-rates.

    It is convex, and smooth only on bounded sets. ``full=True`` adds Stirling's approximation of :math:`\log y!`
    for counts above 1, a constant.
    """

    operation = "surefoot.poisson"
    nonnegative = smooth = False
    low, allowed = 0.0, "counts, not negative"
    defaults: ClassVar = {"full": False}

    @staticmethod
    def total(outputs: Tensor, targets: Tensor, **own: Any) -> Tensor:
        return F.poisson_nll_loss(outputs, targets, log_input=True, reduction="sum", **own)

    def slopes(self, targets: Tensor | None, radius: float) -> tuple[Tensor | float, float]:
        steep = math.exp(radius) if radius < 700 else math.inf
        return (
            math.inf if targets is None else torch.maximum(steep - targets, targets - math.exp(-radius))
        ), steep


class Reconstruction(Square):
    r""":math:`h(\hat x) = \frac1n\sum_i\|\hat x_i - x_i\|^2`, the targets being the input x itself.

    If it is not bound to x, an optimizer gets x as targets: ``optimizer.step(x, x)``. The scale is that of half
    the squared distance; 2 gives the paper's objective. For data between 0 and 1 that are reconstructed as
    logits, use :class:`BinaryCrossEntropy` of x.

    >>> float(sf.objectives.Reconstruction()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    25.0
    """

    def __init__(self, targets: Any = None, *, reduction: str = "mean", scale: float = 2.0) -> None:
        super().__init__(targets, reduction=reduction, scale=scale)

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        if targets is not None and tuple(outputs.shape) != tuple(targets.shape):
            raise ObjectiveError(
                f"a reconstruction has the shape of the input, which is {shape_of(targets)}: the model returns "
                f"{shape_of(outputs)}. Flatten the input, or let the decoder end in its shape (nn.Unflatten)"
            )
        super().check(outputs, targets)

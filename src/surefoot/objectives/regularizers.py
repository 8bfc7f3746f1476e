r"""Regularisers: convex functions of the parameters that are added to an objective, entry by entry.

.. math:: r(u) = \sum_t\rho_t\sum_i\phi(u_{t,i}) + \lambda_t\|u_t\|_1, \qquad \phi(0) = \phi'(0) = 0,\quad
    0 \le \phi'' \le 1,

with one weight per parameter block, or one for all. Integrating twice from 0 gives :math:`0 \le \phi(z) \le
\frac12z^2` and :math:`|\phi'(z)| \le |z|`. So on :math:`\|u_t\| \le b` the smooth part of block t is at most
:math:`\frac12\rho_tb^2`, its gradient at most :math:`\rho_tb` long and its Hessian, which is diagonal, at most
:math:`\rho_t`: :math:`L_r = \max_t\rho_t` (the paper has one :math:`\rho`). The part with kinks, if there is
one, is for proximal steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.errors import ObjectiveError
from surefoot.magnitude import Magnitude, maximum

Weight = float | Mapping[str, float]


class Regularizer:
    r"""A penalty :math:`\rho_t\sum_i\phi(u_{t,i})`, half the squares unless a subclass says otherwise.

    Args:
        weight: :math:`\rho`, or a mapping from block paths (the modules that own the parameters) to weights;
            blocks that are not named have none.
    """

    convex = True
    smooth = True  # no part with kinks

    def __init__(self, weight: Weight) -> None:
        self.weight = self._checked(weight)

    def _checked(self, weight: Weight) -> Weight:
        numbers = weight.values() if isinstance(weight, Mapping) else [weight]
        if any(not 0 <= float(number) < math.inf for number in numbers):
            raise ObjectiveError(f"a {type(self).__name__} has finite weights ≥ 0, got {weight!r}")
        return weight

    def terms(self, values: Tensor) -> Tensor:
        r""":math:`\phi` of every entry, computed within a relative :math:`16u`, differentiable."""
        return 0.5 * values.square()

    def slopes(self, values: Tensor) -> Tensor:
        r""":math:`\phi'` of every entry."""
        return values

    @property
    def smoothness(self) -> Magnitude:
        """The Lipschitz constant of the gradient of the smooth part: the largest weight."""
        weights = self.weight.values() if isinstance(self.weight, Mapping) else [self.weight]
        return maximum(Magnitude.zero(), *map(float, weights))

    def weight_of(self, parameter: str) -> float:
        """The weight of a parameter, by path: also the bound of the second derivatives of its penalty."""
        return _weight_of(self.weight, parameter)

    curvature_of = weight_of

    @property
    def smooth_part(self) -> Regularizer:
        return self

    def threshold_of(self, parameter: str) -> float:
        r""":math:`\lambda_t`, the weight of the absolute values of a parameter."""
        return 0.0

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The value, differentiable in the parameters."""
        if not parameters:
            raise ObjectiveError("a regulariser needs parameters")
        total = torch.zeros((), dtype=next(iter(parameters.values())).dtype)
        for path, value in parameters.items():
            total = total.to(value.device) + self.weight_of(path) * self.terms(value).sum()
            if weight := self.threshold_of(path):
                total = total + weight * value.abs().sum()
        return total

    def enclosed(self, parameters: Mapping[str, Tensor]) -> tuple[float, float]:
        r"""The value in double precision, and a bound on its error.

        It is a sum of at most 2p numbers that are not negative, each with a relative error of at most :math:`16u`
        before its weight, so the sum has a relative error of at most :math:`(2p + 64)u`, plus underflow.
        """
        value = float(self({name: tensor.detach().to(torch.float64) for name, tensor in parameters.items()}))
        count = sum(tensor.numel() for tensor in parameters.values())
        return value, value * (count + 64) * 2.0**-52 + count * 2.0**-1021

    def gradient(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of the smooth part, by path."""
        return {path: self.weight_of(path) * self.slopes(value.detach()) for path, value in parameters.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight!r})"


def _weight_of(weight: Weight, parameter: str) -> float:
    return float(weight.get(parameter.rpartition(".")[0], 0.0) if isinstance(weight, Mapping) else weight)


class Ridge(Regularizer):
    r""":math:`r(u) = \sum_t\frac{\rho_t}2\|u_t\|^2`.

    >>> float(sf.Ridge(0.5)({"layer.weight": torch.tensor([3.0, 4.0])}))
    6.25
    """


class PseudoHuber(Regularizer):
    r""":math:`\phi(z) = \delta^2(\sqrt{1 + (z/\delta)^2} - 1)`: a ridge for small entries, about δ|z| for large
    ones.

    :math:`\phi'(z) = z/\sqrt{1 + (z/\delta)^2}` and :math:`\phi''(z) = (1 + (z/\delta)^2)^{-3/2} \le 1`. It is
    computed as :math:`z^2/(1 + \sqrt{1 + (z/\delta)^2})`, which does not cancel: the root and the sum are of
    numbers not below 1, so seven operations leave a relative error below :math:`16u`.

    >>> float(sf.objectives.PseudoHuber(1.0, delta=0.5)({"layer.weight": torch.tensor([0.0, 100.0])})) < 0.5 * 100
    True
    """

    def __init__(self, weight: Weight, delta: float = 1.0) -> None:
        super().__init__(weight)
        if not 0 < delta < math.inf:
            raise ObjectiveError(f"δ is a positive number, got {delta!r}")
        self.delta = float(delta)

    def terms(self, values: Tensor) -> Tensor:
        return values.square() / (1 + (1 + (values / self.delta).square()).sqrt())

    def slopes(self, values: Tensor) -> Tensor:
        return values / (1 + (values / self.delta).square()).sqrt()

    def __repr__(self) -> str:
        return f"PseudoHuber({self.weight!r}, delta={self.delta!r})"


class ElasticNet(Regularizer):
    r""":math:`r(u) = \sum_t\lambda_t\|u_t\|_1 + \frac{\rho_t}2\|u_t\|^2`: absolute values make entries zero.

    Args:
        l1: :math:`\lambda`, for all blocks or by block path.
        l2: :math:`\rho`, for all blocks or by block path.

    >>> float(ElasticNet(1.0, 0.5)({"layer.weight": torch.tensor([3.0, -4.0])}))
    13.25
    """

    smooth = False

    def __init__(self, l1: Weight, l2: Weight = 0.0) -> None:
        super().__init__(l2)
        self.l1 = self._checked(l1)

    @property
    def smooth_part(self) -> Ridge:
        return Ridge(self.weight)

    def threshold_of(self, parameter: str) -> float:
        return _weight_of(self.l1, parameter)

    def __repr__(self) -> str:
        return f"ElasticNet({self.l1!r}, {self.weight!r})"

"""Regularisers: functions of the parameters that are added to an objective, block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from surefoot.magnitude import Magnitude, maximum
from surefoot.objectives.constants import ObjectiveError


class Ridge:
    r""":math:`r(u) = \sum_t\frac{\rho_t}2\|u_t\|^2`, with one weight per parameter block, or one for all.

    Its Hessian is :math:`\rho_t` times the identity on block t, so :math:`L_r = \max_t\rho_t` (the paper has one
    :math:`\rho`), and it is convex; its gradient is not bounded.

    Args:
        weight: :math:`\rho`, or a mapping from block paths (the modules that own the parameters) to weights;
            blocks that are not named have none.

    >>> import torch
    >>> float(Ridge(0.5)({"layer.weight": torch.tensor([3.0, 4.0])}))
    6.25
    """

    convex = True
    smooth = True

    def __init__(self, weight: float | Mapping[str, float]) -> None:
        weights = weight.values() if isinstance(weight, Mapping) else [weight]
        if any(not 0 <= float(w) < math.inf for w in weights):
            raise ObjectiveError(f"a ridge has finite weights ≥ 0, got {weight!r}")
        self.weight = weight

    @property
    def smoothness(self) -> Magnitude:
        """The Lipschitz constant of the gradient; that of a block is its weight.

        >>> float(Ridge({"0": 0.5, "2": 2.0}).smoothness)
        2.0
        """
        weights = self.weight.values() if isinstance(self.weight, Mapping) else [self.weight]
        return maximum(Magnitude.zero(), *map(float, weights))

    def weight_of(self, parameter: str) -> float:
        """The weight of a parameter, by path."""
        if isinstance(self.weight, Mapping):
            return float(self.weight.get(parameter.rpartition(".")[0], 0.0))
        return float(self.weight)

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The value, differentiable in the parameters.

        Raises:
            ObjectiveError: if there are no parameters.
        """
        terms = [0.5 * self.weight_of(path) * value.square().sum() for path, value in parameters.items()]
        if not terms:
            raise ObjectiveError("a regulariser needs parameters")
        return sum(terms[1:], terms[0])

    def gradient(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradient, by path."""
        return {path: self.weight_of(path) * value.detach() for path, value in parameters.items()}

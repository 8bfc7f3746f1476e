r"""What every oracle is asked: an objective of a chain, around a point.

:math:`F(u) = h(\psi(u)) + r(u)`, with a chain :math:`\psi`, a loss h of its output and a regulariser r that is a
sum over the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from surefoot.chain import Chain
from surefoot.chain.autodiff import Autodiff
from surefoot.errors import ChainError, SurefootError
from surefoot.objectives import Objective, ObjectiveError, Ridge


class OracleError(SurefootError, ValueError):
    """An oracle cannot be computed for this input."""


class Problem:
    """An objective around a point, with what all solvers share.

    Args:
        chain: the network and its batch.
        objective: a loss bound to its targets.
        params: the point, by path; the model's present parameters by default.
        regularizer: a function of the parameters, or ``None``.

    Attributes:
        parameters: the point, detached, by path; only what varies.
        point: the same with the values that were given for frozen parameters.
        autodiff: the oracle at the point; it counts its calls.

    Raises:
        OracleError: if something is not finite, is in half precision, or does not fit.
    """

    def __init__(
        self,
        chain: Chain,
        objective: Objective,
        params: Mapping[str, Tensor] | None = None,
        regularizer: Ridge | None = None,
    ) -> None:
        if not isinstance(objective, Objective):
            raise OracleError(f"the objective is a loss such as surefoot.CrossEntropy(y), got {objective!r}")
        if regularizer is not None and not isinstance(regularizer, Ridge):
            raise OracleError(f"the regulariser is a surefoot.objectives.Ridge or None, got {regularizer!r}")
        if len(chain.graph.outputs) != 1:
            raise OracleError(f"an objective reads one tensor, the model returns {len(chain.graph.outputs)}")
        self.chain, self.objective, self.regularizer = chain, objective, regularizer
        try:
            self.point = {path: value.detach() for path, value in chain._checked(params).items()}
        except ChainError as error:
            raise OracleError(str(error)) from error
        trainable = set(chain.parameters)
        self.parameters = {path: value for path, value in self.point.items() if path in trainable}
        for path, value in self.parameters.items():
            if value.dtype in (torch.float16, torch.bfloat16):
                raise OracleError(f"'{path}' is {value.dtype}: a linear solve needs single or double precision")
            if not all_finite(value):
                raise OracleError(f"'{path}' has entries that are not finite")
        for value in chain.inputs:
            if value.is_floating_point() and not all_finite(value):
                raise OracleError("the input has entries that are not finite")
        self.autodiff: Autodiff = chain.autodiff(None if params is None else params)
        self.output: Tensor = self.autodiff.value
        try:
            objective(self.output)
        except ObjectiveError as error:
            raise OracleError(str(error)) from error

    @cached_property
    def _loss(self) -> tuple[float, Tensor]:
        with torch.enable_grad():
            output = self.output.detach().requires_grad_()
            loss = self.objective(output)
            (slope,) = torch.autograd.grad(loss, output)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise OracleError(f"the objective is {value} at this point")
        return value, slope

    @property
    def loss(self) -> float:
        """h(ψ(u)), without the regulariser."""
        return self._loss[0]

    @property
    def slope(self) -> Tensor:
        """∇h(ψ(u)), of the shape of the output."""
        return self._loss[1]

    @property
    def value(self) -> float:
        """F(u)."""
        return self.loss + (0.0 if self.regularizer is None else float(self.regularizer(self.parameters)))

    def value_at(self, direction: Mapping[str, Tensor], part: float = 1.0) -> float:
        """F(u + tv) for a direction v and t = part; a forward pass, without derivatives."""
        moved = {path: (u + part * direction[path]).to(u) for path, u in self.parameters.items()}
        with torch.no_grad():
            loss = float(self.objective(self.chain.value({**self.point, **moved})))
        return loss if self.regularizer is None else loss + float(self.regularizer(moved))

    def weight(self, path: str) -> float:
        """The curvature of the regulariser in a parameter."""
        return 0.0 if self.regularizer is None else self.regularizer.weight_of(path)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """∇F(u), by path: one call of the oracle, counted."""
        found = self.autodiff.pullback(self.slope)
        return {path: slope + self.weight(path) * self.parameters[path] for path, slope in found.items()}

    def curve(self, direction: Tensor) -> Tensor:
        """∇²h(ψ(u)) applied to a change of the output."""
        with torch.enable_grad():
            output = self.output.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.objective(output), output, create_graph=True)
            (curved,) = torch.autograd.grad(slope, output, direction)
        return curved


def all_finite(value: Tensor) -> bool:
    """Whether no entry is infinite or NaN: a finite sum says so; an infinite one may come from large entries."""
    return bool(value.sum().isfinite()) or bool(torch.isfinite(value).all())


def check_kappa(kappa: float) -> float:
    """The weight of the proximal term.

    Raises:
        OracleError: if it is not a positive number.
    """
    if not (isinstance(kappa, int | float) and 0 < kappa < math.inf):
        raise OracleError(f"kappa is a positive number, got {kappa!r}")
    return float(kappa)


__all__ = ["OracleError", "Problem", "all_finite", "check_kappa"]

r"""Directions as one vector, and the metric :math:`M = \kappa I + \nabla^2 r` on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.oracles.problem import OracleError, Problem, all_finite


class ParameterSpace:
    """The parameters of a problem side by side in one vector.

    Args:
        problem: whose parameters.
        dtype: of the vectors; by default that of the parameters.

    Attributes:
        paths: the parameters, in the order of the vector.
        dtype: of the vectors.

    Raises:
        OracleError: if no parameter varies.
    """

    def __init__(self, problem: Problem, dtype: torch.dtype | None = None) -> None:
        if not problem.parameters:
            raise OracleError("no parameter of the model asks for gradients: call model.requires_grad_(True)")
        self.problem, self.paths = problem, tuple(problem.parameters)
        self._like = tuple(problem.parameters.values())
        self._sizes = [value.numel() for value in self._like]
        given = self._like[0].dtype
        for value in self._like[1:]:
            given = torch.promote_types(given, value.dtype)
        self.dtype = given if dtype is None else dtype

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector; a path that is missing is zero."""
        joined = torch.empty(sum(self._sizes), dtype=self.dtype, device=self._like[0].device)
        for path, part in zip(self.paths, joined.split(self._sizes), strict=True):
            if path in tensors:
                part.copy_(tensors[path].reshape(-1))
            else:
                part.zero_()
        return joined

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector as tensors of the shapes and types of the parameters."""
        parts = vector.split(self._sizes)
        return {
            path: part.view(like.shape).to(like.dtype)
            for path, part, like in zip(self.paths, parts, self._like, strict=True)
        }

    def metric(self, kappa: float) -> Tensor:
        """The diagonal of κI + ∇²r: one number if it is the same everywhere, else one per entry."""
        weights = [kappa + self.problem.weight(path) for path in self.paths]
        device = self._like[0].device
        numbers = torch.tensor(weights, dtype=self.dtype, device=device)
        if len(set(weights)) == 1:
            return numbers[0]
        return numbers.repeat_interleave(torch.tensor(self._sizes, device=device))

    def gradient(self) -> Tensor:
        """∇F(u): one call of the oracle the first time.

        Raises:
            OracleError: if it is not finite.
        """
        found = self.problem.gradient
        vector = self.join(found)
        if not all_finite(vector):
            path = next(path for path, value in found.items() if not all_finite(value))
            raise OracleError(
                f"the gradient with respect to '{path}' is not finite: look for divisions by zero and "
                "overflow there"
            )
        return vector


__all__ = ["ParameterSpace"]

r"""The biaffine stage of a fully-connected layer, :math:`\Omega = XW^\top + \mathbf 1w_0^\top`, in closed form.

With :math:`\tilde X = (X, \mathbf 1)` and parameters in the order :math:`\tilde W^\top`, one row after the other:
:math:`N = I \otimes W`, :math:`E = \tilde X \otimes I` up to the order of its columns, and the mixed second
derivative along :math:`\mu` takes a change V of the weights to :math:`\mu V`. So products with E and N are those
with the small factors, and :math:`EE^\top = \tilde X\tilde X^\top \otimes I`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.oracles.stages import Stages, run
from surefoot.oracles.vectors import Spectrum, layout, spectrum


class FullyConnectedStage:
    """One linear layer on the only state tensor, or on data."""

    def __init__(self, stage: Stages, values: Mapping[str, Any]) -> None:
        assert stage.linear is not None
        self.values = run(stage.first, values)
        arguments = stage.linear.arguments
        self._weight, bias = arguments["weight"].name, arguments["bias"]
        self._bias = None if bias is None or bias.name not in stage.parameters else bias.name
        self._varies = self._weight in stage.parameters
        self.layout = layout(self.values, stage.interface, stage.samples)
        self.interface = self.layout.matrix(self.layout.tensors(self.values))
        x, self._W = self.values[arguments["input"].name], self.values[self._weight].double()
        rows = x.reshape(-1, x.shape[-1]).double()
        ones = rows.new_ones(len(rows), 1)
        parts = [part for part, used in ((rows, self._varies), (ones, self._bias is not None)) if used]
        self._X = torch.cat(parts, dim=1) if parts else rows[:, :0]
        self._inputs = rows.shape[1] if stage.state else 0
        self._count, self._outputs = len(rows), len(self._W)
        self.parameters = self._X.shape[1] * self._outputs
        self._μ: Tensor | None = None

    def bend(self, slope: Tensor) -> None:
        """Fix μ, with it Γ."""
        if self._varies and self._inputs:
            self._μ = slope.reshape(self._count, self._outputs)

    def push(self, y: Tensor, v: Tensor) -> Tensor:
        """Ny + Ev."""
        moved = self._X @ v.reshape(-1, self._outputs)
        if self._inputs:
            moved = torch.addmm(moved, y.reshape(self._count, -1), self._W.T)
        return moved.flatten()

    def pull(self, s: Tensor) -> Tensor:
        """Nᵀs."""
        return (s.reshape(self._count, -1) @ self._W).flatten() if self._inputs else s[:0]

    def pull_parameters(self, s: Tensor) -> Tensor:
        """Eᵀs."""
        return (self._X.T @ s.reshape(self._count, -1)).flatten()

    def mixed(self, v: Tensor) -> Tensor:
        """Γv."""
        if self._μ is None:
            return v.new_zeros(self._count * self._inputs)
        return (self._μ @ v.reshape(-1, self._outputs)[: self._inputs].T).flatten()

    def mixed_transposed(self, y: Tensor) -> Tensor:
        """Γᵀy."""
        result = y.new_zeros(self._X.shape[1], self._outputs)
        if self._μ is not None:
            result[: self._inputs] = y.reshape(self._count, -1).T @ self._μ
        return result.flatten()

    def reduced(self, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """NᵀSN, NᵀSE + Γ and EᵀSE."""
        rows, p = self._count, self.parameters
        left = (self._X.T @ S.reshape(rows, -1)).reshape(p, -1).T.contiguous()  # SE, for S is symmetric
        both = (self._X.T @ left.reshape(rows, -1)).reshape(p, p)
        if not self._inputs:
            return S[:0, :0], left[:0], both
        cross = self._from_left(left)
        if self._μ is not None:
            shaped = cross.view(rows, self._inputs, self._X.shape[1], self._outputs)[:, :, : self._inputs]
            shaped.diagonal(dim1=1, dim2=2).add_(self._μ[:, :, None])
        return self.through_state(S)[1], cross, both

    def through_state(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """NᵀS and NᵀSN."""
        if not self._inputs:
            return S[:0], S[:0, :0]
        left = self._from_left(S)
        return left, self._from_left(left.T)

    def _from_left(self, matrix: Tensor) -> Tensor:
        """NᵀM."""
        split = matrix.reshape(self._count, self._outputs, -1)
        return (self._W.T @ split).reshape(self._count * self._inputs, -1)

    def gram(self, weights: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
        """EDEᵀ, EDΓᵀ and ΓDΓᵀ; the first is the same for each output."""
        each = weights.reshape(-1, self._outputs)[:, 0]  # one weight per parameter tensor
        outer = spectrum((self._X * each) @ self._X.T, copies=self._outputs)
        size, states = self._count * self._outputs, self._count * self._inputs
        if self._μ is None:
            return outer, self._X.new_zeros(size, states), self._X.new_zeros(states, states)
        # E takes V to row n of X̃V, column i; Γ takes it to row m of μVᵀ, column k
        scaled = self._X[:, : self._inputs] * each[: self._inputs]
        mixed = torch.einsum("nk,mi->nimk", scaled, self._μ).reshape(size, states)
        return outer, mixed, torch.kron(self._μ @ self._μ.T, torch.diag(each[: self._inputs]))

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Parameters, by leaf, as one vector."""
        parts = [parameters[self._weight].T] if self._varies else []
        parts += [parameters[self._bias][None]] if self._bias is not None else []
        return torch.cat([part.double().reshape(-1) for part in parts]) if parts else self._X.new_zeros(0)

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """The vector as parameters, by leaf."""
        rows = v.reshape(-1, self._outputs)
        found = {self._weight: rows[: self._W.shape[1]].T} if self._varies else {}
        return found | ({self._bias: rows[-1]} if self._bias is not None else {})

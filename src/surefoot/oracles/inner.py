r"""The biaffine stage of a computation at a point: :math:`N`, :math:`E` and :math:`\Gamma` (see ``stages``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.oracles.stages import Stages, run
from surefoot.oracles.vectors import (
    Layout,
    Spectrum,
    applied,
    applied_transposed,
    congruence,
    gradients,
    jacobian,
    layout,
    spectrum,
    times,
)

_CHUNK = 1 << 22  # numbers held at a time where a matrix with one column per parameter would be too large


class Inner(Protocol):
    """What the recursion needs of a biaffine stage; vectors and matrices are in double precision."""

    values: dict[str, Any]
    layout: Layout
    interface: Tensor
    parameters: int

    def bend(self, slope: Tensor) -> None:
        """Fix μ, with it Γ."""

    def push(self, y: Tensor, v: Tensor) -> Tensor:
        """Ny + Ev."""

    def pull(self, s: Tensor) -> Tensor:
        """Nᵀs."""

    def pull_parameters(self, s: Tensor) -> Tensor:
        """Eᵀs."""

    def mixed(self, v: Tensor) -> Tensor:
        """Γv."""

    def mixed_transposed(self, y: Tensor) -> Tensor:
        """Γᵀy."""

    def reduced(self, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """NᵀSN, NᵀSE + Γ and EᵀSE, for a symmetric S; new matrices, to be written to."""

    def through_state(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """NᵀS and NᵀSN, for a symmetric S; new matrices, to be written to."""

    def gram(self, weights: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
        """EDEᵀ by its spectrum, EDΓᵀ and ΓDΓᵀ, where D is diagonal with these weights."""

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Parameters, by leaf, as one vector."""

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """The vector as parameters, by leaf."""


def first_stage(stage: Stages, values: Mapping[str, Any], batch: int) -> Inner:
    """The biaffine stage at the point that the values are."""
    return _FullyConnected(stage, values) if stage.linear else _Biaffine(stage, values, batch)


class _Biaffine:
    """Any biaffine stage, by automatic differentiation."""

    def __init__(self, stage: Stages, values: Mapping[str, Any], batch: int) -> None:
        state = layout(values, stage.state, batch)
        self._parameters = layout(values, stage.parameters)
        with torch.enable_grad():
            self._u = [tensor.detach().requires_grad_() for tensor in self._parameters.tensors(values)]
            filled = self._parameters.filled(values, self._u)
            self._x: list[Tensor] = []
            if stage.state:
                self._x = [state.matrix(state.tensors(values)).detach().requires_grad_()]
                filled = state.filled(filled, state.split(self._x[0]))
            self.values = run(stage.first, filled)
            self.layout = layout(self.values, stage.interface, stage.samples)
            self._w = self.layout.matrix(self.layout.tensors(self.values))
        self.interface = self._w.detach()
        self.parameters = self._parameters.size
        self._size = state.size
        self._N = jacobian(self._w, self._x, stage.samples) if self._x else self._empty(self._w.numel(), 0)[None]
        self._kept: dict[str, Tensor] = {}
        self._slope: Tensor | None = None

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=torch.float64, device=self._w.device)

    @property
    def _E(self) -> Tensor:
        if "E" not in self._kept:
            self._kept["E"] = jacobian(self._w.reshape(1, -1), self._u)[0]
        return self._kept["E"]

    @property
    def _Γ(self) -> Tensor:
        if "Γ" not in self._kept:
            slope = self._empty(1, self._size) if self._slope is None else self._slope.reshape(1, -1)
            self._kept["Γ"] = jacobian(slope, self._u)[0]
        return self._kept["Γ"]

    def bend(self, slope: Tensor) -> None:
        if not self._x or not self._w.requires_grad:
            return
        with torch.enable_grad():
            along = slope.reshape(self._w.shape).to(self._w.dtype)
            (self._slope,) = torch.autograd.grad(self._w, self._x, along, create_graph=True, allow_unused=True)
        self._kept.pop("Γ", None)

    def push(self, y: Tensor, v: Tensor) -> Tensor:
        moved = applied(self._N, y) if self._x else 0.0
        return moved + (self._E @ v if "E" in self._kept else self._along(self._w, v[None], self._w.numel())[0])

    def pull(self, s: Tensor) -> Tensor:
        return applied_transposed(self._N, s)

    def pull_parameters(self, s: Tensor) -> Tensor:
        return s @ self._E if "E" in self._kept else self._against(s[None], None)[0]

    def mixed(self, v: Tensor) -> Tensor:
        return self._Γ @ v if "Γ" in self._kept else self._along(self._slope, v[None], self._size)[0]

    def mixed_transposed(self, y: Tensor) -> Tensor:
        return y @ self._Γ if "Γ" in self._kept else self._against(None, y[None])[0]

    def reduced(self, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        along = self._E.T @ S
        return congruence(S, self._N), times(along, self._N).T + self._Γ, along @ self._E

    def through_state(self, S: Tensor) -> tuple[Tensor, Tensor]:
        left = times(S, self._N).T
        return left, times(left, self._N)

    def gram(self, weights: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
        m, d = self._w.numel(), self._size
        total = self._empty(m + d, m + d)
        step = max(1, _CHUNK // max(1, self.parameters))
        for start in range(0, m + d, step):
            stop = min(start + step, m + d)
            units = torch.zeros(stop - start, m + d, dtype=torch.float64, device=total.device)
            units.diagonal(offset=start).fill_(1.0)
            rows = self._against(units[:, :m], units[:, m:]) * weights
            total[start:stop, :m] = self._along(self._w, rows, m)
            total[start:stop, m:] = self._along(self._slope, rows, d)
        return spectrum(total[:m, :m]), total[:m, m:], total[m:, m:]

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        pieces = [parameters[name].reshape(-1).double() for name, _ in self._parameters.pieces]
        return torch.cat(pieces) if pieces else self._empty(0, 1)[:, 0]

    def split(self, v: Tensor) -> dict[str, Tensor]:
        parts = self._parameters.split(v) if self._u else []
        return {name: part for (name, _), part in zip(self._parameters.pieces, parts, strict=True)}

    def _against(self, s: Tensor | None, y: Tensor | None) -> Tensor:
        """Eᵀs + Γᵀy for many s and y at once, without E or Γ."""
        total: Tensor | None = None
        for output, slopes in ((self._w, s), (self._slope, y)):
            if slopes is None or output is None or not output.requires_grad or not self._u:
                continue
            shaped = slopes.to(output.dtype).reshape(-1, *output.shape)
            found = [part.unsqueeze(-1).flatten(1).double() for part in gradients(output, self._u, shaped)]
            joined = torch.cat(found, dim=1)
            total = joined if total is None else total + joined
        count = len(s if s is not None else y)  # type: ignore[arg-type]
        return self._empty(count, self.parameters) if total is None else total

    def _along(self, output: Tensor | None, v: Tensor, size: int) -> Tensor:
        """Ev, or Γv, for many v at once: the pull-back is linear in its slope, and this is its derivative."""
        if output is None or not output.requires_grad or not self._u:
            return self._empty(len(v), size)
        with torch.enable_grad():
            symbol = torch.zeros_like(output).requires_grad_()
            pulled = torch.autograd.grad(output, self._u, symbol, create_graph=True, allow_unused=True)
        parts = v.split([u.numel() for u in self._u], dim=1)
        pairs = [(g, part) for g, part in zip(pulled, parts, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return self._empty(len(v), size)
        with torch.enable_grad():
            joined = torch.cat([g.reshape(-1) for g, _ in pairs])
        along = torch.cat([part for _, part in pairs], dim=1).to(joined.dtype)
        return gradients(joined, [symbol], along)[0].reshape(len(v), size).double()


class _FullyConnected:
    r"""One linear layer on the only state tensor or on data, in closed form.

    It computes :math:`\Omega = XW^\top + \mathbf 1w_0^\top`. With :math:`\tilde X = (X, \mathbf 1)` and parameters
    in the order :math:`\tilde W^\top`, one row after the other: :math:`N = I \otimes W`,
    :math:`E = \tilde X \otimes I` up to the order of its columns, and the mixed second derivative along
    :math:`\mu` takes a change V of the weights to :math:`\mu V`. So products with E and N are those with the small
    factors, and :math:`EE^\top = \tilde X\tilde X^\top \otimes I`.
    """

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
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).double()
        ones = rows.new_ones(len(rows), 1)
        parts = [part for part, used in ((rows, self._varies), (ones, self._bias is not None)) if used]
        self._X = torch.cat(parts, dim=1) if parts else rows[:, :0]
        self._inputs = rows.shape[1] if stage.state else 0
        self._count, self._outputs = len(rows), len(self._W)
        self.parameters = self._X.shape[1] * self._outputs
        self._μ: Tensor | None = None

    def bend(self, slope: Tensor) -> None:
        if self._varies and self._inputs:
            self._μ = slope.reshape(self._count, self._outputs)

    def push(self, y: Tensor, v: Tensor) -> Tensor:
        moved = self._X @ v.reshape(-1, self._outputs)
        if self._inputs:
            moved = torch.addmm(moved, y.reshape(self._count, -1), self._W.T)
        return moved.flatten()

    def pull(self, s: Tensor) -> Tensor:
        return (s.reshape(self._count, -1) @ self._W).flatten() if self._inputs else s[:0]

    def pull_parameters(self, s: Tensor) -> Tensor:
        return (self._X.T @ s.reshape(self._count, -1)).flatten()

    def mixed(self, v: Tensor) -> Tensor:
        if self._μ is None:
            return v.new_zeros(self._count * self._inputs)
        return (self._μ @ v.reshape(-1, self._outputs)[: self._inputs].T).flatten()

    def mixed_transposed(self, y: Tensor) -> Tensor:
        result = y.new_zeros(self._X.shape[1], self._outputs)
        if self._μ is not None:
            result[: self._inputs] = y.reshape(self._count, -1).T @ self._μ
        return result.flatten()

    def reduced(self, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        if not self._inputs:
            return S[:0], S[:0, :0]
        left = self._from_left(S)
        return left, self._from_left(left.T)

    def _from_left(self, matrix: Tensor) -> Tensor:
        """NᵀM."""
        split = matrix.reshape(self._count, self._outputs, -1)
        return (self._W.T @ split).reshape(self._count * self._inputs, -1)

    def gram(self, weights: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
        each = weights.reshape(-1, self._outputs)[:, 0]  # one weight per parameter tensor
        # EDEᵀ is the same for each output
        outer = spectrum((self._X * each) @ self._X.T, copies=self._outputs)
        size, states = self._count * self._outputs, self._count * self._inputs
        if self._μ is None:
            return outer, self._X.new_zeros(size, states), self._X.new_zeros(states, states)
        # E takes V to row n of X̃V, column i; Γ takes it to row m of μVᵀ, column k
        scaled = self._X[:, : self._inputs] * each[: self._inputs]
        mixed = torch.einsum("nk,mi->nimk", scaled, self._μ).reshape(size, states)
        return outer, mixed, torch.kron(self._μ @ self._μ.T, torch.diag(each[: self._inputs]))

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        parts = [parameters[self._weight].T] if self._varies else []
        parts += [parameters[self._bias][None]] if self._bias is not None else []
        return torch.cat([part.double().reshape(-1) for part in parts]) if parts else self._X.new_zeros(0)

    def split(self, v: Tensor) -> dict[str, Tensor]:
        rows = v.reshape(-1, self._outputs)
        found = {self._weight: rows[: self._W.shape[1]].T} if self._varies else {}
        return found | ({self._bias: rows[-1]} if self._bias is not None else {})

r"""The second stage of a computation at a point: :math:`G` and :math:`K` (see ``stages``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.oracles.stages import Stages, run
from surefoot.oracles.vectors import (
    Layout,
    applied,
    applied_transposed,
    block_diagonal,
    congruence,
    jacobian,
    layout,
)


class Outer(Protocol):
    """What the recursion needs of a second stage; vectors and matrices are in double precision."""

    values: dict[str, Any]

    def bend(self, costate: Tensor) -> None:
        """Fix λ, with it K; before, K is zero."""

    def push(self, w: Tensor) -> Tensor:
        """Gw."""

    def pull(self, c: Tensor) -> Tensor:
        """Gᵀc."""

    def curved(self, w: Tensor) -> Tensor:
        """Kw."""

    def congruence(self, C: Tensor) -> Tensor:
        """K + GᵀCG, for a symmetric C."""


def second_stage(stage: Stages, values: Mapping[str, Any], interface: Layout, point: Tensor, batch: int) -> Outer:
    """The second stage at a point of the interface."""
    if stage.entrywise:
        return _Entrywise(stage, values, interface, point)
    return _Any(stage, values, interface, point, batch)


class _Any:
    """Any second stage, by automatic differentiation, sample by sample where they stay apart."""

    def __init__(
        self, stage: Stages, values: Mapping[str, Any], interface: Layout, point: Tensor, batch: int
    ) -> None:
        self._samples = stage.samples
        with torch.enable_grad():
            self._w = point.detach().requires_grad_()
            self.values = run(stage.second, interface.filled(values, interface.split(self._w)))
            after = layout(self.values, stage.after, batch)
            output = after.matrix(after.tensors(self.values))
            self._out = output.reshape(stage.samples, output.numel() // stage.samples).to(point.device)
        self._G = jacobian(self._out, [self._w], stage.samples)
        self._K: Tensor | None = None

    def bend(self, costate: Tensor) -> None:
        if not self._out.requires_grad:
            return
        with torch.enable_grad():
            along = costate.reshape(self._out.shape).to(self._out.dtype)
            (slope,) = torch.autograd.grad(self._out, self._w, along, create_graph=True)
        found = jacobian(slope.reshape(self._samples, -1), [self._w], self._samples)
        self._K = 0.5 * (found + found.transpose(1, 2))

    def push(self, w: Tensor) -> Tensor:
        return applied(self._G, w)

    def pull(self, c: Tensor) -> Tensor:
        return applied_transposed(self._G, c)

    def curved(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w) if self._K is None else applied(self._K, w)

    def congruence(self, C: Tensor) -> Tensor:
        inner = congruence(C, self._G)
        return inner if self._K is None else inner + block_diagonal(self._K)


class _Entrywise:
    """One scalar function on every entry: G and K are diagonal."""

    def __init__(self, stage: Stages, values: Mapping[str, Any], interface: Layout, point: Tensor) -> None:
        self._G: Tensor | None = None
        self._K: Tensor | None = None
        self._second: Tensor | None = None
        if not stage.second:
            self.values = interface.filled(values, interface.split(point))
            return
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            self.values = run(stage.second, interface.filled(values, interface.split(leaf)))
            output = self.values[stage.after[0]]
            ones = torch.ones_like(output)
            (slope,) = torch.autograd.grad(output, leaf, ones, create_graph=True)
            if slope.requires_grad:
                (self._second,) = torch.autograd.grad(slope, leaf, torch.ones_like(slope), allow_unused=True)
        self._G = slope.detach().flatten().double()

    def bend(self, costate: Tensor) -> None:
        if self._second is not None:
            self._K = costate * self._second.flatten()

    def push(self, w: Tensor) -> Tensor:
        return w if self._G is None else self._G * w

    def pull(self, c: Tensor) -> Tensor:
        return self.push(c)

    def curved(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w) if self._K is None else self._K * w

    def congruence(self, C: Tensor) -> Tensor:
        if self._G is None:
            return C
        inner = (C * self._G).mul_(self._G[:, None])
        if self._K is not None:
            inner.diagonal().add_(self._K)
        return inner

r"""The automatic-differentiation oracle (Algorithms "Forward pass", "Backward pass", "Autodiff").

One forward pass computes :math:`\psi(u)` and stores what the derivatives need. After it, each call
:math:`\mu \mapsto \nabla\psi(u)\mu` (pull-back) or :math:`v \mapsto \nabla\psi(u)^\top v` (push-forward) is one
pass over the chain, for as many slopes as one likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.errors import ChainError
from surefoot.graph import Graph


class Autodiff:
    """The value of a chain at a point, and its derivative as a linear operator.

    Attributes:
        value: the output, detached; a tuple of tensors if the model returns several.
        calls: how many pull-backs and push-forwards were made so far.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Any], parameters: Mapping[str, Tensor]) -> None:
        self._leaves = {path: value.detach().requires_grad_() for path, value in parameters.items()}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            self._outputs = graph.run(self._leaves, inputs)
        self._linear: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        self.calls = 0
        detached = tuple(output.detach() for output in self._outputs)
        self.value: Any = detached[0] if len(detached) == 1 else detached

    def pullback(self, slope: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
        r"""The gradient-vector product :math:`\nabla\psi(u)\mu`, by parameter path.

        Args:
            slope: :math:`\mu`, of the shape of the value.
        """
        slopes = self._matched(slope)
        self.calls += 1
        gradients = torch.autograd.grad(
            self._outputs, list(self._leaves.values()), slopes, retain_graph=True, allow_unused=True
        )
        return {
            path: torch.zeros_like(leaf) if gradient is None else gradient
            for (path, leaf), gradient in zip(self._leaves.items(), gradients, strict=True)
        }

    def pushforward(self, direction: Mapping[str, Tensor]) -> Any:
        r"""The Jacobian-vector product :math:`\nabla\psi(u)^\top v`, of the shape of the value.

        The pull-back is linear in its slope, so its own derivative is the push-forward: no second forward pass.

        Args:
            direction: :math:`v`, by parameter path; a missing path means zero.
        """
        unknown = [path for path in direction if path not in self._leaves]
        if unknown:
            raise ChainError(f"the chain has no parameter {', '.join(map(repr, unknown))}")
        slopes, gradients = self._linear or self._linearize()
        self.calls += 1
        pairs = [
            (gradient, direction[path])
            for path, gradient in zip(self._leaves, gradients, strict=True)
            if path in direction and gradient.requires_grad
        ]
        if not pairs:
            tangents: tuple[Tensor | None, ...] = (None,) * len(slopes)
        else:
            tangents = torch.autograd.grad(
                [g for g, _ in pairs], slopes, [v for _, v in pairs], retain_graph=True, allow_unused=True
            )
        filled = tuple(
            torch.zeros_like(slope) if tangent is None else tangent
            for slope, tangent in zip(slopes, tangents, strict=True)
        )
        return filled[0] if len(filled) == 1 else filled

    def _linearize(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The pull-back at a symbolic slope, kept for all later push-forwards."""
        slopes = tuple(torch.zeros_like(output).requires_grad_() for output in self._outputs)
        with sdpa_kernel(SDPBackend.MATH):
            found = torch.autograd.grad(
                self._outputs, list(self._leaves.values()), slopes, create_graph=True, allow_unused=True
            )
        gradients = tuple(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(self._leaves.values(), found, strict=True)
        )
        self._linear = slopes, gradients
        return self._linear

    def _matched(self, slope: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        slopes = (slope,) if isinstance(slope, Tensor) else tuple(slope)
        expected = [tuple(output.shape) for output in self._outputs]
        if [tuple(s.shape) for s in slopes] != expected:
            raise ChainError(f"the value has shape {expected}, the slope {[tuple(s.shape) for s in slopes]}")
        return slopes

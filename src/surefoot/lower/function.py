r"""The model as a function :math:`f` of one vector :math:`u`, with its first two derivatives.

Everything is a reverse pass: :math:`Df(u)^\top w` is the gradient of :math:`\langle w, f\rangle`; it is linear in
:math:`w`, so its own derivative in :math:`w` is :math:`Df(u)v`; and the same one order higher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.graph import Graph
from surefoot.lower.space import Space, flat
from surefoot.operations.evaluation import evaluate_in_double, fold_in_double

Objective = Callable[[Any], Tensor]


class Function:
    """A captured graph in double precision as a map from a vector to the vector of all its outputs.

    Batch statistics are computed and never stored, as a graph passes no running statistics.

    Args:
        graph: the model.
        fixed: values of the leaves that do not vary, by name.
        space: how the others lie in the vector.
        objective: a map from the outputs (a tensor, or a tuple of several) to a number, or ``None``.
    """

    def __init__(
        self, graph: Graph, fixed: Mapping[str, Tensor], space: Space, objective: Objective | None = None
    ) -> None:
        self._graph, self._space, self._objective = graph, space, objective
        with torch.no_grad():
            self._fixed = fold_in_double(graph, fixed)

    def __call__(self, point: Tensor) -> Tensor:
        """The outputs at a point as one vector, differentiable."""
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            outputs = evaluate_in_double(self._graph, {**self._fixed, **self._space.split(point)})
        if self._objective is None:
            return flat([output for output in outputs if output.is_floating_point()])
        return self._objective(outputs[0] if len(outputs) == 1 else outputs).reshape(-1)

    def at(self, point: Tensor) -> Expansion:
        """The function near a point."""
        return Expansion(self, point)


class Expansion:
    """Value and derivatives of a function at a point.

    Attributes:
        value: the vector of outputs, detached.
    """

    def __init__(self, function: Function, point: Tensor) -> None:
        with torch.enable_grad():
            self._point = point.detach().requires_grad_()
            self._output = function(self._point)
        self.value = self._output.detach()

    def pull(self, w: Tensor) -> Tensor:
        r""":math:`Df(u)^\top w`."""
        return gradient(self._output, self._point, w)

    def push(self, v: Tensor) -> Tensor:
        r""":math:`Df(u)v`."""
        w = torch.zeros_like(self.value).requires_grad_()
        return gradient(self._slope(w), w, v)

    def bend(self, w: Tensor, v: Tensor) -> Tensor:
        r""":math:`D^2\langle w, f\rangle(u)\,v`."""
        return gradient(self._slope(w), self._point, v)

    def bend_twice(self, v: Tensor) -> Tensor:
        r""":math:`D^2f(u)[v, v]`."""
        w = torch.zeros_like(self.value).requires_grad_()
        return gradient(gradient(self._slope(w), self._point, v, again=True), w, v)

    def twist(self, w: Tensor, v: Tensor) -> Tensor:
        r"""The gradient of :math:`u \mapsto \langle w, D^2f(u)[v, v]\rangle`."""
        return gradient(gradient(self._slope(w), self._point, v, again=True), self._point, v)

    def _slope(self, w: Tensor) -> Tensor:
        return gradient(self._output, self._point, w, again=True)


def gradient(output: Tensor, argument: Tensor, weight: Tensor, *, again: bool = False) -> Tensor:
    """The gradient of ⟨weight, output⟩ in the argument; zero where nothing depends on it."""
    if not output.requires_grad:
        return torch.zeros_like(argument)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            (found,) = torch.autograd.grad(
                output, argument, weight, retain_graph=True, create_graph=again, allow_unused=True
            )
    except RuntimeError as error:
        # Some backward kernels have no derivative of their own: differences of gradients will have to show it.
        if "is not implemented" not in str(error):
            raise
        return torch.zeros_like(argument)
    return torch.zeros_like(argument) if found is None else found

r"""Steps to weights as they are stored, and what is proved of them.

The new weights :math:`u'` are numbers of the model's type: rounding takes :math:`u + v` to them. What is proved
must speak of :math:`u'`. So a promise is computed from the move :math:`v' = u' - u` that is made, in double
precision, from an inequality that holds for every move within a radius:

.. math:: F(u + v') \le F(u) + \langle\nabla F(u), v'\rangle + \tfrac12\sum_sD_s\|v'_s\|^2,

with the smoothness L for all :math:`D_s` or one curvature per layer
(:func:`surefoot.blockwise.block_inverse_smoothness`). The gradient in it is that of the exact function, so it is
evaluated in double precision whatever the model's type, with a bound on its error
(:func:`surefoot.calculus.adjoint.gradient.proved_gradient`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph import Graph, Source
from surefoot.objectives import Objective
from surefoot.operations.evaluation import evaluate_in_double
from surefoot.program.checks import as_inputs, differentiable_attention

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Proposal:
    """A step and its proof.

    Attributes:
        after: the weights after it, as they are stored; empty if there is no step.
        step: its size.
        smoothness: what the proof rests on; ``None`` if there is no proof.
        promised: by how much the objective falls at least; ``None`` likewise.
        radius: how far from the weights the smoothness holds.
        moved: the length of the move.
        note: what else is to be said.
    """

    after: Tensors
    step: float
    smoothness: float | None = None
    promised: float | None = None
    radius: float | None = None
    moved: float = 0.0
    note: str = ""


def stored(weights: Mapping[str, Tensor], move: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """The weights after a move, rounded to their types, and the move that was made of it, in double precision."""
    after = rounded(weights, move)
    return after, {name: after[name].double() - weights[name].detach().double() for name in move}


def rounded(weights: Mapping[str, Tensor], move: Mapping[str, Tensor]) -> Tensors:
    """The weights after a move, added in double precision and rounded to their types, one after the other.

    Numbers of one type are added in it, which is the same (Figueroa, When is double rounding innocuous?, 1995).
    """
    return {name: torch.add(weights[name].detach(), m).to(weights[name].dtype) for name, m in move.items()}


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of several tensors together, in double precision."""
    norms = (torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors.values())
    return math.hypot(*map(float, norms))


def flat_product(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The inner product of two lists of tensors, in double precision."""
    return sum(float(torch.sum(first[name].double() * second[name].double())) for name in first)


def square_of(move: Mapping[str, Tensor]) -> float:
    """The square of the norm of a move, rounded up: n squares and their sum are off by a relative (n + 8) u, and
    lose n 2⁻¹⁰²² to underflow.
    """
    squares = ((m.numel(), float(m.double().square().sum())) for m in move.values() if bool(m.any()))
    total = sum(square * (1 + (n + 64) * 2.0**-52) + n * 2.0**-1022 for n, square in squares)
    return total * (1 + (len(move) + 8) * 2.0**-52)


def promised(
    gradient: Mapping[str, Tensor],
    move: Mapping[str, Tensor],
    curvature: float | Mapping[str, float],
    errors: Mapping[str, float] | None = None,
) -> float:
    r"""By how much F falls at least: −⟨∇F, v'⟩ − ½Σ D_s‖v'_s‖², D_s by parameter or one for all.

    A gradient that is off by :math:`\epsilon_s` takes away :math:`\sum_s\epsilon_s\|v'_s\|`. The sums of n
    products are off by at most a relative :math:`\gamma_n \le 2nu` of the sum of absolute values, and what
    underflows in them by :math:`n\,2^{-1022}`. Without errors the gradient is exact; 0 if nothing can be said.
    """
    bends = curvature if isinstance(curvature, Mapping) else dict.fromkeys(move, curvature)
    total = 0.0
    for name, m in move.items():
        wide = m.double()
        up = 1 + (wide.numel() + 64) * 2.0**-52
        square = float(wide.square().sum()) * up
        if square:
            total -= 0.5 * bends[name] * square * up
        if name in gradient:
            products = wide * gradient[name].double()
            lost = float(products.abs().sum()) * (up - 1) * up + wide.numel() * 2.0**-1022
            error = 0.0 if errors is None else errors[name] * (math.sqrt(square) * up + 2.0**-500)
            total -= float(products.sum()) + lost + error
    return total if math.isfinite(total) else 0.0


def resolution(weights: Mapping[str, Tensor]) -> str:
    """Why a step that is shorter than the spacing of numbers is not taken."""
    kind = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    if kind == "float64":
        return "no step: descent cannot be told from round-off here"
    return f"no step: it is below the resolution of {kind}, use double precision"


class InDouble:
    """The objective at the present weights, its operations in double precision whatever the model's type.

    Args:
        model: the model.
        x: the batch.
        objective: bound to its targets.
        graph: of the model on this batch.
    """

    def __init__(self, model: nn.Module, x: Any, objective: Objective, graph: Graph) -> None:
        args, kwargs = as_inputs(x)
        inputs = dict(zip((leaf.name for leaf in graph.inputs), (*args, *kwargs.values()), strict=True))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        present = {**inputs, **{leaf.name: parameters[leaf.path] for leaf in graph.parameters}, **graph.held}
        self.objective = objective
        self._names = {path: graph.aliases.get(path, path) for path, _ in model.named_parameters()}
        self._leaves: Tensors = {}
        values: dict[str, Any] = {}
        for name, leaf in graph.leaves.items():
            value = present[name]
            values[name] = value.detach().double() if value.is_floating_point() else value
            if leaf.source is Source.PARAMETER:
                self._leaves[leaf.path] = values[name] = values[name].clone().requires_grad_()
        with differentiable_attention():
            (self.outputs,) = evaluate_in_double(graph, values)

    @cached_property
    def _slopes(self) -> tuple[float, Tensors]:
        with torch.enable_grad():
            loss = self.objective(self.outputs)
            found = torch.autograd.grad(loss, list(self._leaves.values()), retain_graph=True, allow_unused=True)
        slopes = zip(self._leaves.items(), found, strict=True)
        return float(loss.detach()), {n: torch.zeros_like(u) if g is None else g.detach() for (n, u), g in slopes}

    @property
    def value(self) -> float:
        """F(u)."""
        return self._slopes[0]

    @property
    def gradient(self) -> Tensors:
        """∇F(u), by parameter."""
        known = self._slopes[1]
        return {path: known[name] for path, name in self._names.items() if name in known}

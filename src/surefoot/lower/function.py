r"""The model as a function :math:`f` of one vector :math:`u`, with its first two derivatives, on a set of vectors.

Everything is a reverse pass: :math:`Df(u)^\top w` is the gradient of :math:`\langle w, f\rangle`; it is linear in
:math:`w`, so its derivative in :math:`w` along v is :math:`Df(u)v`; the second derivative works in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.domains import Region
from surefoot.graph import Graph
from surefoot.graph.checks import differentiable_attention
from surefoot.operations.evaluation import evaluate_in_double, fold_in_double

_Factor = Callable[[float, float], float]

# Points are kept this much inside the domain, so that rounding does not carry them out of it.
_INSIDE = 1 - 2.0**-40


@dataclass(frozen=True, eq=False)
class Space:
    r"""A product of balls :math:`\{u : \|u_g - c_g\|_2 \le r_g \text{ for every group } g\}`."""

    names: tuple[str, ...]  # the variable tensors, in their order in the vector
    shapes: tuple[torch.Size, ...]  # their shapes
    center: Tensor  # the vector :math:`c`
    # positions in ``names`` that share a radius, with that radius
    groups: tuple[tuple[tuple[int, ...], float], ...]

    @classmethod
    def of(cls, region: Region, centers: Mapping[str, Tensor]) -> Space:
        """The space of a region, with the centres of its variables by name."""
        values = [centers[name].to(torch.float64) for name in region.variables]
        flat = torch.cat([value.reshape(-1) for value in values])
        return cls(region.variables, tuple(value.shape for value in values), flat, region.groups)

    @cached_property
    def radius(self) -> float:
        """The largest radius: the scale of the domain."""
        return max(radius for _, radius in self.groups)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The variables by name, as views of a vector."""
        parts = zip(self.names, vector.split([shape.numel() for shape in self.shapes]), self.shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in parts}

    def project(self, vector: Tensor) -> Tensor:
        """The nearest point of the domain, slightly inside it."""
        return self.center + self._per_group(
            vector - self.center, lambda size, radius: min(1.0, _ratio(radius * _INSIDE, size))
        )

    def ascend(self, vector: Tensor, gradient: Tensor, step: float) -> Tensor:
        """The projection of a step along the gradient; its length in every group is ``step`` times the radius."""
        return self.project(vector + self._per_group(gradient, lambda size, radius: _ratio(step * radius, size)))

    def random(self, generator: torch.Generator, fraction: float = 1.0) -> Tensor:
        """A random point at a fraction of the radius from the centre in every group."""
        noise = torch.randn(self.center.shape, dtype=torch.float64, generator=generator).to(self.center.device)
        return self.project(
            self.center + self._per_group(noise, lambda size, radius: _ratio(fraction * radius, size))
        )

    def _per_group(self, vector: Tensor, factor: _Factor) -> Tensor:
        """The vector with the part in every group scaled by a function of its norm and the group's radius."""
        parts = list(vector.split([shape.numel() for shape in self.shapes]))
        for members, radius in self.groups:
            size = math.hypot(*(float(torch.linalg.vector_norm(parts[k])) for k in members))
            scale = factor(size, radius)
            for k in members:
                parts[k] = parts[k] * scale
        return torch.cat(parts)


def _ratio(norm: float, size: float) -> float:
    """The factor that gives a vector of norm ``size`` the norm ``norm``; zero stays zero."""
    return norm / size if size > 0 else 0.0


def unit(vector: Tensor) -> Tensor:
    """The vector divided by its norm; zero stays zero."""
    size = torch.linalg.vector_norm(vector)
    return vector / size if bool(size > 0) else vector


def flat(values: Sequence[Tensor]) -> Tensor:
    """Tensors side by side in one vector."""
    return torch.cat([value.reshape(-1) for value in values])


Objective = Callable[[Any], Tensor]


class Function:
    """A captured graph in double precision as a map from a vector to the vector of all its outputs.

    Batch statistics are computed and never stored, as a graph passes no running statistics. ``fixed`` are values
    of the leaves that do not vary, by name; the objective maps the outputs, a tensor or a tuple of several, to a
    number. ``spent`` counts the work in gradients: half a gradient for each pass, and twice as much for each pass
    through a derivative.
    """

    def __init__(
        self, graph: Graph, fixed: Mapping[str, Tensor], space: Space, objective: Objective | None = None
    ) -> None:
        self._graph, self._space, self._objective = graph, space, objective
        self.spent = 0.0
        with torch.no_grad():
            self._fixed = fold_in_double(graph, fixed)

    def __call__(self, point: Tensor) -> Tensor:
        """The outputs at a point as one vector, differentiable."""
        with differentiable_attention():
            outputs = evaluate_in_double(self._graph, {**self._fixed, **self._space.split(point)})
        if self._objective is None:
            return flat([output for output in outputs if output.is_floating_point()])
        return self._objective(outputs[0] if len(outputs) == 1 else outputs).reshape(-1)

    def at(self, point: Tensor) -> Expansion:
        """The function near a point."""
        return Expansion(self, point)


class Expansion:
    """Value and derivatives of a function at a point."""

    def __init__(self, function: Function, point: Tensor) -> None:
        self._function = function
        function.spent += 0.5
        with torch.enable_grad():
            self._point = point.detach().requires_grad_()
            self._output = function(self._point)
        self.value = self._output.detach()

    def pull(self, w: Tensor) -> Tensor:
        r""":math:`Df(u)^\top w`."""
        self._function.spent += 0.5
        return gradient(self._output, self._point, w)

    def push(self, v: Tensor) -> Tensor:
        r""":math:`Df(u)v`."""
        self._function.spent += 1.0
        w = torch.zeros_like(self.value).requires_grad_()
        return gradient(self._slope(w), w, v)

    def bend(self, w: Tensor, v: Tensor) -> Tensor:
        r""":math:`D^2\langle w, f\rangle(u)\,v`."""
        self._function.spent += 1.0
        return gradient(self._slope(w), self._point, v)

    def bend_twice(self, v: Tensor) -> Tensor:
        r""":math:`D^2f(u)[v, v]`."""
        self._function.spent += 3.0
        w = torch.zeros_like(self.value).requires_grad_()
        return gradient(gradient(self._slope(w), self._point, v, again=True), w, v)

    def twist(self, w: Tensor, v: Tensor) -> Tensor:
        r"""The gradient of :math:`u \mapsto \langle w, D^2f(u)[v, v]\rangle`."""
        self._function.spent += 3.0
        return gradient(gradient(self._slope(w), self._point, v, again=True), self._point, v)

    def _slope(self, w: Tensor) -> Tensor:
        self._function.spent += 0.5
        return gradient(self._output, self._point, w, again=True)


def gradient(output: Tensor, argument: Tensor, weight: Tensor, *, again: bool = False) -> Tensor:
    """The gradient of ⟨weight, output⟩ in the argument; zero where nothing depends on it."""
    if not output.requires_grad:
        return torch.zeros_like(argument)
    try:
        with differentiable_attention():
            (slope,) = torch.autograd.grad(
                output, argument, weight, retain_graph=True, create_graph=again, allow_unused=True
            )
    except RuntimeError as error:
        # Some backward kernels have no derivative; then differences of gradients show the curvature.
        if "is not implemented" not in str(error):
            raise
        return torch.zeros_like(argument)
    return torch.zeros_like(argument) if slope is None else slope

r"""The model as a function :math:`f` of one vector :math:`u`, with its derivatives, on a product of balls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.domains import Region
from surefoot.graph import Graph
from surefoot.operations.evaluation import evaluate_in_double, fold_in_double
from surefoot.program.checks import differentiable_attention

_INSIDE = 1 - 2.0**-30  # points are this much inside the domain, so that rounding does not carry them out of it
Objective = Callable[[Any], Tensor]


class Space:
    r"""A product of balls :math:`\{u : \|u_g - c_g\|_2 \le r_g \text{ for every group } g\}`.

    Args:
        region: the variables and the groups that share a radius.
        centers: the centres, by name.
    """

    def __init__(self, region: Region, centers: Mapping[str, Tensor]) -> None:
        values = [centers[name].to(torch.float64) for name in region.variables]
        self.names, self._shapes = region.variables, [value.shape for value in values]
        self._sizes = [value.numel() for value in values]
        self.center = torch.cat([value.reshape(-1) for value in values])
        group_of = {k: number for number, (members, _) in enumerate(region.groups) for k in members}
        labels = torch.tensor([group_of[k] for k in range(len(values))], device=self.center.device)
        self._group = labels.repeat_interleave(torch.tensor(self._sizes, device=labels.device))  # of each entry
        self._radii = self.center.new_tensor([radius for _, radius in region.groups])

    @property
    def is_point(self) -> bool:
        return not bool(self._radii.any())

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The variables by name, as views of a vector."""
        parts = zip(self.names, vector.split(self._sizes), self._shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in parts}

    def ascend(self, vector: Tensor, gradient: Tensor, step: float) -> Tensor:
        """The projection of a step along the gradient; its length in every group is ``step`` times the radius."""
        away = vector + self._of_length(gradient, step) - self.center
        return self.center + torch.where(self._lengths(away) > self._reach, self._of_length(away, _INSIDE), away)

    def random(self, generator: torch.Generator, fraction: float = 1.0) -> Tensor:
        """A random point at a fraction of the radius from the centre in every group."""
        noise = torch.randn(self.center.shape, dtype=torch.float64, generator=generator).to(self.center.device)
        return self.center + self._of_length(noise, fraction * _INSIDE)

    @property
    def _reach(self) -> Tensor:
        return _INSIDE * self._radii[self._group]

    def _lengths(self, vector: Tensor) -> Tensor:
        """For each entry the norm of the part of the vector in its group."""
        squares = torch.zeros_like(self._radii).index_add(0, self._group, vector * vector)
        return squares.sqrt()[self._group]

    def _of_length(self, vector: Tensor, fraction: float) -> Tensor:
        """The vector with parts of this fraction of the radius; parts that are zero stay so."""
        lengths = self._lengths(vector)
        return torch.where(lengths > 0, vector * (fraction * self._radii[self._group] / lengths), 0.0)


class Function:
    """A captured graph in double precision as a map from a vector to the vector of all its outputs.

    Args:
        graph: of the model; batch statistics are computed and never stored.
        fixed: values of the leaves that do not vary, by name.
        space: of the vectors.
        objective: maps the outputs, a tensor or a tuple of several, to a number.

    Attributes:
        spent: the work so far in gradients: half a gradient for each pass, twice as much for each derivative.
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
        if self._objective is not None:
            return self._objective(outputs[0] if len(outputs) == 1 else outputs).reshape(-1)
        return torch.cat([output.reshape(-1) for output in outputs if output.is_floating_point()])

    def at(self, point: Tensor) -> Derivatives:
        """The function near a point."""
        return Derivatives(self, point)


class Derivatives:
    """Those of a function at a point, all of them by reverse passes."""

    def __init__(self, function: Function, point: Tensor) -> None:
        self._function = function
        function.spent += 0.5
        with torch.enable_grad():
            self._point = point.detach().requires_grad_()
            self._output = function(self._point)
        self.value = self._output.detach()

    def along(self, w: Tensor | None, *directions: Tensor) -> Tensor:
        r""":math:`D^{k+1}\langle w, f\rangle[v_1, …, v_k, \cdot]`; without w, :math:`D^kf[v_1, …, v_k]`.

        The gradient of ⟨w, f⟩ is linear in w, so that its derivative in w along v is :math:`Df\,v`; and so on.
        """
        self._function.spent += 2.0 ** len(directions) - 0.5
        dual = torch.zeros_like(self.value).requires_grad_() if w is None else w
        slope = _gradient(self._output, self._point, dual, again=bool(directions))
        for left, v in zip(reversed(range(len(directions))), directions, strict=True):
            slope = _gradient(slope, self._point if left or w is not None else dual, v, again=left > 0)
        return slope


def _gradient(output: Tensor, argument: Tensor, weight: Tensor, *, again: bool) -> Tensor:
    """The gradient of ⟨weight, output⟩ in the argument; zero where nothing depends on it."""
    if not output.requires_grad:
        return torch.zeros_like(argument)
    options = {"retain_graph": True, "create_graph": again, "allow_unused": True}
    try:
        with differentiable_attention():
            (slope,) = torch.autograd.grad(output, argument, weight, **options)
    except RuntimeError as error:
        # Some backward kernels have no derivative; then differences of gradients show the curvature.
        if "is not implemented" not in str(error):
            raise
        return torch.zeros_like(argument)
    return torch.zeros_like(argument) if slope is None else slope

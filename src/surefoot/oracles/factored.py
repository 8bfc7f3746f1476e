"""The linear-quadratic problem of a chain in the form that dynamic programming uses: stage by stage, factored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.graph import Graph
from surefoot.graph.nodes import in_double
from surefoot.objectives import CrossEntropy, Square
from surefoot.oracles.factor import refuse_negative
from surefoot.oracles.inner import Inner, first_stage
from surefoot.oracles.outer import Outer, second_stage
from surefoot.oracles.problem import OracleError, Problem, require_real
from surefoot.oracles.riccati import Direct, Woodbury
from surefoot.oracles.stages import LARGEST, Stages, run, stages
from surefoot.oracles.vectors import block_diagonal, jacobian

Model = Literal["gradient", "gauss_newton", "newton"]
Form = Literal["auto", "direct", "woodbury"]
MODELS = ("gradient", "gauss_newton", "newton")


@dataclass(frozen=True)
class Layer:
    """One computation at the point: its number, its two stages, its regulariser, how it is eliminated."""

    number: int
    inner: Inner
    outer: Outer
    paths: Mapping[str, str]
    ridge: Tensor
    q: Tensor
    solver: Direct | Woodbury


class Factored:
    """The linear-quadratic problem in the form that the recursion uses; it does not depend on kappa.

    Attributes:
        layers: the computations in which something varies.
        C: the curvature of the loss in the last state.
        c: its slope there.
        start: the change of what the first of these computations reads: zero.
        gradient: of the objective, by layer.
        loose: paths of the parameters that no computation reads.
    """

    def __init__(self, problem: Problem, model: Model, form: Form = "auto") -> None:
        self.problem = problem
        chain = problem.chain
        require_real(chain)
        batch = problem.output.shape[0] if problem.output.dim() else 1
        bound: dict[str, Any] = chain.graph.bind(problem.point, [x.detach() for x in chain.inputs])
        bound = {name: in_double(value) if isinstance(value, Tensor) else value for name, value in bound.items()}
        state: dict[str, Any] = {}
        self.layers: list[Layer] = []
        last: tuple[str, ...] = ()
        entering = 0
        for number, computation in enumerate(chain.computations, start=1):
            stage = stages(computation, batch)
            _check_size(chain.graph, stage)
            values = {name: state[name] if name in state else bound[name] for name in stage.needed}
            last = stage.after
            read = (*stage.state, *stage.parameters)
            if not _entries(chain.graph, stage.interface) or not _entries(chain.graph, read):
                self.layers.clear()  # nothing varies yet, or a layer without entries passes nothing on
                values = run((*stage.first, *stage.second), values)
                state = {name: _detached(values[name]) for name in computation.after}
                continue
            inner = first_stage(stage, values, batch)
            outer = second_stage(stage, inner.values, inner.layout, inner.interface, batch)
            entering = _entries(chain.graph, stage.state) if not self.layers else entering
            self.layers.append(self._layer(number, stage, inner, outer, form))
            state = {name: _detached(outer.values[name]) for name in computation.after}
        self.loose = sorted(problem.parameters.keys() - {p for layer in self.layers for p in layer.paths.values()})
        output = state.get(chain.graph.outputs[0], problem.output)
        self.c, self.C = _loss(problem, output.double(), model, varies=bool(last))
        self.start = self.c.new_zeros(entering)
        self.gradient = self._costates(bend=model == "newton")

    def _costates(self, bend: bool) -> list[Tensor]:
        """The first backward pass: the gradient by layer; the costates give the second derivatives, if asked."""
        costate, found = self.c, []
        for layer in reversed(self.layers):
            slope = layer.outer.pull(costate)
            if bend:
                layer.outer.bend(costate)
                layer.inner.bend(slope)
            found.append(layer.inner.pull_parameters(slope) + layer.q)
            costate = layer.inner.pull(slope)
        self.problem.autodiff.calls += 1
        return found[::-1]

    def _layer(self, number: int, stage: Stages, inner: Inner, outer: Outer, form: Form) -> Layer:
        leaves, problem = self.problem.chain.graph.leaves, self.problem
        paths = {name: leaves[name].path for name in stage.parameters}
        point = {name: problem.parameters[path] for name, path in paths.items()}
        u = inner.flat(point)
        if problem.regularizer is None:
            ridge = torch.zeros_like(u)
        else:
            ridge = inner.flat(
                {name: torch.full_like(value, problem.weight(paths[name])) for name, value in point.items()}
            )
        small = inner.parameters > 2 * inner.interface.numel() if form == "auto" else form == "woodbury"
        solver = Woodbury(inner, ridge) if small and inner.parameters else Direct(inner)
        return Layer(number, inner, outer, paths, ridge, ridge * u, solver)


def _entries(graph: Graph, names: Iterable[str]) -> int:
    return sum(graph.numel(name) for name in names)


def _check_size(graph: Graph, stage: Stages) -> None:
    for names in (stage.interface, stage.after):
        size = _entries(graph, names)
        if size > LARGEST:
            raise OracleError(
                f"dynamic programming needs a matrix of {size} × {size} for {', '.join(names)}: take a smaller "
                "batch, or a method without matrices (newton(..., method='cg'))"
            )


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(_detached(item) for item in value)


def _loss(problem: Problem, at: Tensor, model: Model, varies: bool) -> tuple[Tensor, Tensor]:
    """Slope and curvature of the loss in the output; block-diagonal where it is a sum over rows for certain."""
    with torch.enable_grad():
        output = at.detach().requires_grad_()
        value = problem.objective(output)
        if not bool(value.isfinite()):
            raise OracleError(f"the objective is {value.item()} at this point")
        (first,) = torch.autograd.grad(value, output, create_graph=True)
    slope = first.detach().flatten()
    if not varies:
        return slope[:0], slope.new_zeros(0, 0)
    if model == "gradient":
        return slope, slope.new_zeros(len(slope), len(slope))
    rows = type(problem.objective) in (Square, CrossEntropy)
    samples = output.shape[0] if rows and output.dim() else 1
    curvature = block_diagonal(jacobian(first.reshape(samples, -1), [output], samples))
    if model == "gauss_newton" and not rows:
        values = torch.linalg.eigvalsh((curvature + curvature.T) / 2)
        refuse_negative(problem, float(values[0]), float(values.abs().max()))
    return slope, curvature

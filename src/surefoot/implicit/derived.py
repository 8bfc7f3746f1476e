r"""Constants of an inner problem from its operations.

Only the strong convexity :math:`\mu` has to be declared. With :math:`g = \nabla_\beta\zeta` as a graph of
operations and enclosures of its tensors :math:`\alpha_s` around :math:`\hat\alpha`, the calculus bounds over them

1. :math:`\|g(\alpha, \hat\beta)\|`, hence :math:`\|\beta(\alpha) - \hat\beta\| \le r = \sup\|g(\alpha,
   \hat\beta)\|/\mu` by strong convexity, row by row too, whatever :math:`\hat\beta` is. So the error of the
   solver is part of r;
2. for :math:`\beta` in that ball, :math:`\ell_s \ge \|\partial g/\partial\alpha_s\|`, :math:`\ell_\beta \ge
   \|\partial g/\partial\beta\|`, and :math:`L_{ss'}` on the second derivatives of g, those in :math:`\beta`
   included.

The calculus bounds the round-off of g at the centre, so the bound on :math:`\|\hat\beta - \beta(\hat\alpha)\|`
includes all errors of floating point.

*Strong convexity near the centre.* The Hessian :math:`\partial g/\partial\beta` at the centre has a smallest
eigenvalue :math:`\lambda`, and elsewhere differs by at most :math:`\sum_sL_{\beta s}\|\alpha_s - \hat\alpha_s\| +
L_{\beta\beta}r`; what is left of :math:`\lambda` may be more than the declared :math:`\mu`.

*The graph.* ``make_fx`` records what automatic differentiation does. Derivatives of activations are written out as
the scalar functions they are, so that each has its sharp constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.calculus.assemble import assemble as curvature_matrix
from surefoot.calculus.assemble import terms, weighted_curvature
from surefoot.calculus.forward import Pass, forward
from surefoot.calculus.prepare import prepared
from surefoot.domains import Region
from surefoot.enclosure import Enclosure, constant, largest
from surefoot.errors import SurefootError
from surefoot.graph.nodes import Leaf, Node, Ref, Source, Spec
from surefoot.graph.read import operations
from surefoot.graph.structure import Graph, assemble
from surefoot.graph.trace import quiet
from surefoot.implicit.constants import BETA
from surefoot.implicit.problem import Problem
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.captured import canonical

_aten: Any = torch.ops.aten


def gradient_graph(problem: Problem, specs: Sequence[Spec], device: torch.device) -> Graph:
    """The graph of the gradient: leaves are the tensors of the problem by name, and ``beta``, rows × size."""
    key = tuple(specs)
    if key not in problem.kept:
        problem.kept[key] = _traced(problem, specs, device)
    graph: Graph = problem.kept[key]
    return graph


def _traced(problem: Problem, specs: Sequence[Spec], device: torch.device) -> Graph:
    kinds = [torch.float64 if spec.dtype.is_floating_point else spec.dtype for spec in specs]
    tensors = [torch.zeros(s.shape, dtype=kind, device=device) for s, kind in zip(specs, kinds, strict=True)]
    beta = torch.zeros(problem.count(tensors), problem.size, dtype=torch.float64, device=device)

    def gradient(beta: Tensor, *others: Tensor) -> Tensor:
        return problem.gradient(beta, others)

    try:
        with quiet():
            module = make_fx(torch.func.functionalize(gradient, remove="mutations"), _DERIVATIVES)(beta, *tensors)
    except Exception as error:  # tracing raises many types; all mean the same to the user
        raise SurefootError(f"the gradient of ζ cannot be traced: {error}") from None
    names = (BETA, *map(in_graph, problem.names))
    leaves: dict[str, Leaf] = {}
    values: dict[fx.Node, Any] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for placeholder, name, value in zip(placeholders, names, (beta, *tensors), strict=True):
        leaves[name] = Leaf(name, name, Source.INPUT, Spec(tuple(value.shape), value.dtype))
        values[placeholder] = Ref(name)
    held: dict[str, Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        leaves[node.name] = Leaf(node.name, node.name, Source.CONSTANT, Spec(tuple(value.shape), value.dtype))
        held[node.name], values[node] = value, Ref(node.name)
    nodes = [_first_power(node) for node in operations(module, values, set(leaves))]
    (output,) = module.graph.find_nodes(op="output")
    result = fx.map_arg(output.args[0], lambda n: values[n])
    return prepared(assemble(leaves, canonical(nodes), (result.name,), held, {}))


def _first_power(node: Node) -> Node:
    """The identity in place of x¹, which is how the derivative of a square is traced."""
    first = node.target is _aten.pow.Tensor_Scalar and node.args[1] == 1
    return node.by(_aten.alias.default, args=node.args[:1]) if first else node


def _softplus_backward(slope: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """The derivative of soft-plus; torch's function jumps at a threshold, noticeably below its default of 20."""
    if threshold < 20:
        raise SurefootError(f"soft-plus jumps at its threshold of {threshold:g}: leave it at 20, or raise it.")
    return slope * torch.sigmoid(x * beta)


# the arguments are the gradient of the result and the tensors that autograd saved
_DERIVATIVES: dict[Any, Callable[..., Tensor]] = {
    _aten.softplus_backward.default: _softplus_backward,
    _aten.tanh_backward.default: lambda slope, y: slope * (1 - y * y),
    _aten.sigmoid_backward.default: lambda slope, y: slope * (y * (1 - y)),
    _aten.log_sigmoid_backward.default: lambda slope, x, buffer: slope * torch.sigmoid(-x),
}


@dataclass(frozen=True)
class Gradient:
    """The gradient of a problem over enclosures of its tensors."""

    graph: Graph  # the graph of the gradient
    leaves: Mapping[str, Enclosure]  # all leaves but β, by name in the graph
    region: Region  # the tensors that vary; β is the last

    @classmethod
    def of(
        cls, problem: Problem, enclosures: Sequence[Enclosure], varying: Sequence[bool], device: torch.device
    ) -> Gradient:
        """The gradient over enclosures of the tensors of the problem, in order; ``varying`` says which vary."""
        graph = gradient_graph(problem, [e.spec for e in enclosures if isinstance(e.spec, Spec)], device)
        names = [in_graph(name) for name in problem.names]
        variables = (*(name for name, varies in zip(names, varying, strict=True) if varies), BETA)
        leaves = {
            name: replace(e, lipschitz=_unit_vector(variables, name), is_constant=name not in variables)
            for name, e in zip(names, enclosures, strict=True)
        }
        leaves |= {name: constant(value, len(variables)) for name, value in graph.held.items()}
        return cls(graph, leaves, Region(variables, tuple(((k,), np.inf) for k in range(len(variables)))))

    def around(self, beta: Tensor, reach: Magnitude | None = None, keep: bool = False, **facts: Any) -> Pass:
        """A pass with β at a point, or within ``reach`` of it; ``facts`` are further fields of its enclosure."""
        at = constant(beta, len(self.region.variables))
        if reach is not None:
            size = {"bound": at.bound + reach, "peak": at.peak + reach, "spread": reach, **facts}
            at = replace(at, lipschitz=_unit_vector(self.region.variables, BETA), is_constant=False, **size)
        return forward(self.graph, {**self.leaves, BETA: at}, self.region, keep=keep)

    def result(self, run: Pass) -> Enclosure:
        """The gradient itself, from a pass."""
        return run.enclosures[self.graph.outputs[0]]


def in_graph(name: str) -> str:
    """The name that a tensor of the problem has in the graph."""
    return name.replace(".", "_")


def _unit_vector(variables: Sequence[str], name: str) -> Magnitude:
    """The Lipschitz constants of one variable."""
    return Magnitude.of(np.array([float(variable == name) for variable in variables]))


@dataclass(frozen=True)
class Derived:
    r"""Derived constants of the stacked minimisers of a batch."""

    strong_convexity: float  # over all values of the arguments; at least the declared one
    slopes: Mapping[str, Magnitude]  # :math:`\ell_s`, by name of the tensor; β is called ``"beta"``
    bends: Mapping[tuple[str, str], Magnitude]  # :math:`L_{ss'}`, by names in either order
    reach: Magnitude  # r
    rows: Magnitude  # r for every single minimiser
    bound: Magnitude  # a bound on the norm of the stacked minimisers


def derived(
    problem: Problem, enclosures: Sequence[Enclosure], mu: float, centre: Tensor | None, least: float = -math.inf
) -> Derived:
    """The constants of a problem over enclosures of its tensors.

    The enclosures are those of the tensors of the problem, in order. ``centre`` are minimisers at their centres,
    or close to them, rows × size, if the centres have values; ``least`` is a lower bound on the eigenvalues of the
    Hessians there.
    """
    values = [e.value for e in enclosures]
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    gradient = Gradient.of(problem, enclosures, [not e.is_constant or e.is_inexact for e in enclosures], device)
    variables = gradient.region.variables
    shape = gradient.graph.leaves[BETA].spec.shape
    beta = torch.zeros(shape, dtype=torch.float64, device=device) if centre is None else centre
    slope = gradient.result(gradient.around(beta))
    reach = slope.bound / mu
    rows = minimum(slope.row_norms(shape[0]) / mu, reach)
    reach = minimum(reach, rows.norm())
    run = gradient.around(beta, reach, rows=rows, peak=largest(beta) + minimum(reach, rows.max()))
    slopes = gradient.result(run).lipschitz
    matrix = curvature_matrix(terms(run, weighted_curvature(run)), len(variables))
    names = {in_graph(name): name for name in (*problem.names, BETA)}
    bends = {(names[a], names[b]): matrix[i, j] for i, a in enumerate(variables) for j, b in enumerate(variables)}
    sharper = mu
    if centre is not None:
        problem.refuse_overstated(centre, tuple(values), mu)
        spreads = {names[name]: run.enclosures[name].spread for name in variables}
        drift = sum((bends[BETA, name] * spread for name, spread in spreads.items()), Magnitude.zero())
        sharper = max(mu, (least - float(drift)) * (1 - 2.0**-50))
    by_name = {names[name]: slopes[k] for k, name in enumerate(variables)}
    return Derived(sharper, by_name, bends, reach, rows, run.enclosures[BETA].bound)

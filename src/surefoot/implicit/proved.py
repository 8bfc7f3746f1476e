r"""Minimisers and their first derivatives with proved errors.

:math:`g = \nabla_\beta\zeta` is traced to a graph of operations, which the calculus evaluates with its round-off.
With :math:`H = \partial_\beta g` and the declared :math:`\mu`, so :math:`H \succeq \mu I`:

* the computed :math:`\hat\beta` is within :math:`\epsilon = \|g(\alpha, \hat\beta)\|/\mu` of the minimiser,
  round-off of g included. All that follows is bounded over the ball of this radius, in which the minimiser lies;
* *pulled back*, a costate :math:`\lambda` becomes :math:`-(\partial_\alpha g)^\top H^{-1}\lambda`. Whatever q is,
  :math:`\|H^{-1}\lambda - q\| \le \|\lambda - Hq\|/\mu`. The costates of :math:`\langle q, g\rangle` in
  :math:`\beta` and :math:`\alpha` are :math:`Hq` and :math:`(\partial_\alpha g)^\top q`, and one pass back finds
  both with their errors (:mod:`surefoot.calculus.adjoint.costates`). The error of the result is that of the second
  and :math:`\ell_\alpha\|\lambda - Hq\|/\mu`.

The solver that finds q need not be trusted. Derivatives of activations are traced as the scalar functions that
they are, so that each has its sharp constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.calculus.adjoint.backward import backward
from surefoot.calculus.adjoint.costates import costates
from surefoot.calculus.forward import Pass, forward
from surefoot.calculus.prepare import prepared
from surefoot.domains import Region
from surefoot.enclosure import constant, norm
from surefoot.errors import SurefootError
from surefoot.graph.nodes import Leaf, Node, Ref, Source, Spec
from surefoot.graph.read import operations
from surefoot.graph.structure import Graph, assemble
from surefoot.graph.trace import quiet
from surefoot.implicit.constants import BETA
from surefoot.implicit.problem import Problem, Tensors
from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import times_power
from surefoot.operations.captured import canonical
from surefoot.scalar import Rounded

_UP = 1 + 2.0**-40
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Minimum:
    """The gradient of an inner problem at computed minimisers, over a ball that contains the exact ones."""

    beta: Tensor  # the computed minimisers, rows × size
    mu: float  # a lower bound on the strong convexity
    hessian: Tensor  # at the computed minimisers, in doubles
    result: Pass  # the forward pass through the gradient, with centre values
    error: Magnitude  # a bound on the distance between the computed and the exact minimisers, all rows together

    @classmethod
    def of(cls, problem: Problem, values: Tensors, beta: Tensor, mu: float) -> Minimum:
        """The gradient at computed minimisers; refused if one of its operations has no rule."""
        graph = _gradient_graph(problem, values, beta.device)
        at = dict(zip((*map(in_graph, problem.names), BETA), (*values, beta), strict=True))
        variables = tuple(name for name, value in at.items() if value.is_floating_point())
        region = Region(variables, tuple(((k,), math.inf) for k in range(len(variables))))
        leaves = {name: constant(value, len(variables)) for name, value in {**graph.held, **at}.items()}
        for k, name in enumerate(variables[:-1]):
            leaves[name] = replace(leaves[name], lipschitz=_unit(variables, k), is_constant=False)
        slope = forward(graph, leaves, region, keep=True).enclosures[graph.outputs[0]]
        error, centre = (norm(slope.value) + slope.error) / mu, leaves[BETA]
        leaves[BETA] = replace(
            centre,
            lipschitz=_unit(variables, len(variables) - 1),
            is_constant=False,
            bound=centre.bound + error,
            peak=centre.peak + error,
            spread=error,
            error=error,
        )
        hessian = problem.hessian(beta.double(), values)
        return cls(beta, mu, hessian, forward(graph, leaves, region, keep=True), error)

    def pulled(self, costate: Tensor) -> dict[str, Rounded] | None:
        """A costate of the minimisers pulled back, by name in the graph; ``None`` if nothing is proved."""
        right = costate.reshape(self.beta.shape).double()
        q = torch.linalg.solve(self.hessian, right)
        size = float(torch.linalg.vector_norm(q))
        power = math.frexp(size)[1] + 1 if 0 < size < math.inf else 0
        seed = times_power(q, -power)
        at = backward(self.result, seed)
        if at is None:
            return None
        at_nodes = costates(self.result, at)
        slopes = {}
        for name in self.result.region.variables:
            value, error = torch.zeros_like(self.result.enclosures[name].value), Magnitude.zero()
            if name in at_nodes:
                value, error = at_nodes[name].value, at_nodes[name].spread
            slopes[name] = value, error
        value, error = slopes.pop(BETA)
        left = norm(times_power(right, -power) - value) * _UP + error
        lengths = self.result.enclosures[self.result.outputs[0]].lipschitz
        pulled = {}
        for k, (name, (value, error)) in enumerate(slopes.items()):
            total = (error + lengths[k] * left / self.mu) * 2.0**power
            value = times_power(-value, power)
            pulled[name] = Rounded(value, torch.full_like(value, float(total)))
        return pulled


def in_graph(name: str) -> str:
    """The name that a tensor of the problem has in the graph."""
    return name.replace(".", "_")


def _unit(variables: tuple[str, ...], k: int) -> Magnitude:
    """The Lipschitz constants of one variable."""
    return Magnitude.of(np.eye(len(variables))[k])


def _gradient_graph(problem: Problem, values: Tensors, device: torch.device) -> Graph:
    """The graph of the gradient: leaves are the tensors of the problem by name, and ``beta``, rows × size."""
    key = tuple((value.shape, value.dtype) for value in values)
    if key not in problem.graphs:
        problem.graphs[key] = _traced(problem, values, device)
    graph: Graph = problem.graphs[key]
    return graph


def _traced(problem: Problem, values: Tensors, device: torch.device) -> Graph:
    tensors = [torch.zeros_like(v, dtype=torch.float64 if v.is_floating_point() else v.dtype) for v in values]
    beta = torch.zeros(problem.count(tensors), problem.size, dtype=torch.float64, device=device)

    def gradient(beta: Tensor, *others: Tensor) -> Tensor:
        return problem.gradient(beta, others)

    try:
        with quiet():
            module = make_fx(torch.func.functionalize(gradient, remove="mutations"), _DERIVATIVES)(beta, *tensors)
    except Exception as error:  # tracing raises many types; all mean the same to the user
        raise SurefootError(f"the gradient of ζ cannot be traced: {error}") from None
    leaves: dict[str, Leaf] = {}
    at: dict[fx.Node, Any] = {}
    names = (BETA, *map(in_graph, problem.names))
    placeholders = module.graph.find_nodes(op="placeholder")
    for placeholder, name, value in zip(placeholders, names, (beta, *tensors), strict=True):
        leaves[name] = Leaf(name, name, Source.INPUT, Spec(tuple(value.shape), value.dtype))
        at[placeholder] = Ref(name)
    constants: dict[str, Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        leaves[node.name] = Leaf(node.name, node.name, Source.CONSTANT, Spec(tuple(value.shape), value.dtype))
        constants[node.name], at[node] = value, Ref(node.name)
    nodes = [_first_power(node) for node in operations(module, at, set(leaves))]
    (output,) = module.graph.find_nodes(op="output")
    result = fx.map_arg(output.args[0], lambda n: at[n])
    return prepared(assemble(leaves, canonical(nodes), (result.name,), constants, {}))


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

r"""The gradient :math:`\nabla_\beta\zeta` as a graph of operations, for the calculus to read.

``make_fx`` records what automatic differentiation does. Derivatives of activations are written out as the scalar
functions they are, so that each has its sharp constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.calculus.prepare import prepared
from surefoot.errors import SurefootError
from surefoot.graph.nodes import Leaf, Node, Ref, Source, Spec
from surefoot.graph.read import operations
from surefoot.graph.structure import Graph, assemble
from surefoot.graph.trace import quiet
from surefoot.implicit.constants import BETA
from surefoot.implicit.problem import Problem
from surefoot.operations.captured import canonical

_aten: Any = torch.ops.aten


def gradient_graph(problem: Problem, specs: Sequence[Spec], device: torch.device) -> Graph:
    """The graph of the gradient: leaves are the tensors of the problem by name, and ``beta``, rows × size.

    Raises:
        SurefootError: if the gradient cannot be written as a graph.
    """
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
    names = (BETA, *(name.replace(".", "_") for name in problem.names))
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
    """The derivative of a square, x¹, as what it is."""
    if node.op != "aten.pow" or node.args[1] != 1:
        return node
    return replace(node, op="aten.alias", target=_aten.alias.default, args=node.args[:1])


# each is called with the gradient of the result and what autograd kept
_DERIVATIVES: dict[Any, Callable[..., Tensor]] = {
    _aten.softplus_backward.default: lambda slope, x, beta, threshold: slope * torch.sigmoid(x * beta),
    _aten.tanh_backward.default: lambda slope, y: slope * (1 - y * y),
    _aten.sigmoid_backward.default: lambda slope, y: slope * (y * (1 - y)),
    _aten.log_sigmoid_backward.default: lambda slope, x, buffer: slope * torch.sigmoid(-x),
}

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
from surefoot.graph.assemble import assemble
from surefoot.graph.nodes import Leaf, Node, Ref, Source, Spec
from surefoot.graph.read import operations
from surefoot.graph.structure import Graph
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
    found: Graph = problem.kept[key]
    return found


def _traced(problem: Problem, specs: Sequence[Spec], device: torch.device) -> Graph:
    tensors = [torch.zeros(s.shape, dtype=_wide(s.dtype), device=device) for s in specs]
    beta = torch.zeros(problem.count(tensors), problem.size, dtype=torch.float64, device=device)

    def gradient(beta: Tensor, *others: Tensor) -> Tensor:
        return problem.gradient(beta, others)

    try:
        with quiet():
            module = make_fx(torch.func.functionalize(gradient, remove="mutations"), _DERIVATIVES)(beta, *tensors)
    except Exception as error:  # tracing raises many types; all mean the same to the user
        raise SurefootError(f"the gradient of ζ cannot be traced: {error}") from None
    names = (BETA, *(f"{name}".replace(".", "_") for name in problem.names))
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _softplus_backward(slope: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return slope * torch.sigmoid(x * beta)


def _tanh_backward(slope: Tensor, y: Tensor) -> Tensor:
    return slope * (1 - y * y)


def _sigmoid_backward(slope: Tensor, y: Tensor) -> Tensor:
    return slope * (y * (1 - y))


def _log_sigmoid_backward(slope: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return slope * torch.sigmoid(-x)


_DERIVATIVES: dict[Any, Callable[..., Any]] = {
    _aten.softplus_backward.default: _softplus_backward,
    _aten.tanh_backward.default: _tanh_backward,
    _aten.sigmoid_backward.default: _sigmoid_backward,
    _aten.log_sigmoid_backward.default: _log_sigmoid_backward,
}

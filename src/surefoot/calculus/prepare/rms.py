r"""Root-mean-square normalisation as frameworks write it out, recognised.

:math:`x\,(\mathrm{mean}(x^2) + \epsilon)^{-1/2}` over the last dimension. Bounded piece by piece it would have
no finite constant at all; as one operation it has slope :math:`\epsilon^{-1/2}`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from surefoot.graph.structure import Graph, Node, Ref, Spec

_aten: Any = torch.ops.aten


def rms(graph: Graph) -> Graph:
    """Every such product replaced by one ``rms_norm`` node."""
    by_name = graph.by_name
    return replace(graph, nodes=tuple(_recognised(node, by_name) for node in graph.nodes))


def _recognised(node: Node, by_name: dict[str, Node]) -> Node:
    if node.op != "aten.mul" or len(node.inputs) != 2 or not isinstance(node.spec, Spec):
        return node
    for data, factor in (node.inputs, node.inputs[::-1]):
        eps = _inverse_rms_of(data, factor, by_name)
        if eps is not None:
            target = _aten.rms_norm.default
            args = (Ref(data), [node.spec.shape[-1]], None, eps)
            return replace(node, op=str(target.overloadpacket), target=target, args=args, kwargs={})
    return node


def _inverse_rms_of(data: str, factor: str, by_name: dict[str, Node]) -> float | None:
    """The eps, if ``factor`` is (mean(data²) + eps)^(-1/2) along the last dimension."""
    root = by_name.get(factor)
    if root is None or not (
        root.op == "aten.rsqrt" or (root.op == "aten.pow" and root.arguments["exponent"] == -0.5)
    ):
        return None
    shifted = by_name.get(root.inputs[0])
    if shifted is None or shifted.op != "aten.add" or len(shifted.inputs) != 1:
        return None
    eps = shifted.arguments["other"]
    mean = by_name.get(shifted.inputs[0])
    if (
        mean is None
        or mean.op != "aten.mean"
        or not isinstance(eps, int | float)
        or not mean.arguments.get("keepdim")
    ):
        return None
    square = by_name.get(mean.inputs[0])
    if square is None or square.inputs != (data,) or not isinstance(square.spec, Spec):
        return None
    if mean.arguments["dim"] not in ([-1], [len(square.spec.shape) - 1]):
        return None
    is_square = square.op == "aten.square" or (square.op == "aten.pow" and square.arguments["exponent"] == 2)
    is_square = is_square or (square.op == "aten.mul" and square.args[0] == square.args[1])
    return float(eps) if is_square else None

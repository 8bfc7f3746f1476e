"""Operations that are compositions of simpler ones, taken apart; and lengths divided out, put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Spec
from surefoot.operations.common import unless_along
from surefoot.operations.record import Expansion, declare, expansion
from surefoot.operations.sparsity import every_entry

_aten: Any = torch.ops.aten


def unit(x: Tensor, dim: int | list[int] | None, eps: float) -> Tensor:
    """The direction of x along some dimensions: x divided by its length, or by eps if that is larger.

    >>> unit(torch.tensor([3.0, 4.0]), 0, 1e-12)
    tensor([0.6000, 0.8000])
    """
    return x / torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps)


@expansion("aten.glu")
def gated_unit(graph: Graph, node: Node) -> Expansion:
    """The first half of the entries times the sigmoid of the second."""
    x, dim = node.arguments["self"], node.arguments["dim"]
    spec = node.spec
    assert isinstance(spec, Spec)
    half = spec.shape[dim]
    cut = [(Ref(x.name), dim, start, start + half) for start in (0, half)]
    first, second, gate = (f"{node.name}_{suffix}" for suffix in ("values", "logits", "gate"))
    return Expansion(
        (
            Node(first, "aten.slice", _aten.slice.Tensor, cut[0], {}, node.module, spec),
            Node(second, "aten.slice", _aten.slice.Tensor, cut[1], {}, node.module, spec),
            Node(gate, "aten.sigmoid", _aten.sigmoid.default, (Ref(second),), {}, node.module, spec),
            replace(node, op="aten.mul", target=_aten.mul.Tensor, args=(Ref(first), Ref(gate)), kwargs={}),
        )
    )


declare("aten.glu", rows=unless_along(), cost=lambda use: every_entry(2 * use.numel))


@expansion("aten.cosine_similarity")
def cosine(graph: Graph, node: Node) -> Expansion | None:
    """The inner product of two directions.

    A vector of length one spread along the dimension is left as it is, without bounds.
    """
    a = node.arguments
    specs = [graph.spec(a[key].name) for key in ("x1", "x2")]
    full = torch.broadcast_shapes(*(spec.shape for spec in specs if isinstance(spec, Spec)))
    dim = a["dim"] % len(full)
    units: list[Node] = []
    for label, key, spec in zip(("first", "second"), ("x1", "x2"), specs, strict=True):
        assert isinstance(spec, Spec)
        own = dim - len(full) + len(spec.shape)
        if own < 0 or spec.shape[own] != full[dim]:
            return None
        args = (a[key], [own], a["eps"])
        units.append(Node(f"{node.name}_{label}", "surefoot.unit", unit, args, {}, node.module, spec))
    letters = "".join(chr(ord("a") + k) for k in range(len(full)))
    terms = [letters[len(full) - len(spec.shape) :] for spec in specs if isinstance(spec, Spec)]
    equation = f"{','.join(terms)}->{letters.replace(letters[dim], '')}"
    product = (equation, [Ref(factor.name) for factor in units])
    last = replace(node, op="aten.einsum", target=_aten.einsum.default, args=product, kwargs={})
    return Expansion((*units, last))


@expansion("aten.div")
def divided_by_its_length(graph: Graph, node: Node) -> Expansion | None:
    """A division by the length of the numerator, bounded below by eps: what ``functional.normalize`` does.

    Piece by piece it would be a quotient of two tensors that know nothing of each other.
    """
    data, divisor = node.arguments["self"], node.arguments["other"]
    found = None
    if isinstance(data, Ref) and isinstance(divisor, Ref) and graph.spec(data.name) == node.spec:
        found = _length_of(data, divisor, graph.by_name)
    if found is None or node.arguments.get("rounding_mode") is not None:
        return None
    return Expansion((replace(node, op="surefoot.unit", target=unit, args=(data, *found), kwargs={}),))


@expansion("aten.sqrt", "aten.pow")
def length_by_hand(graph: Graph, node: Node) -> Expansion | None:
    """The root of a sum of squares is a length."""
    if node.op == "aten.pow" and node.arguments["exponent"] != 0.5:
        return None
    total = graph.by_name.get(node.inputs[0]) if node.inputs else None
    square = graph.by_name.get(total.inputs[0]) if total is not None and total.op == "aten.sum" else None
    if total is None or square is None or len(square.inputs) != 1 or not is_square(square):
        return None
    a = total.arguments
    args = (Ref(square.inputs[0]), 2, a.get("dim"), bool(a.get("keepdim")))
    target = _aten.linalg_vector_norm.default
    return Expansion((replace(node, op="aten.linalg_vector_norm", target=target, args=args, kwargs={}),))


def is_square(node: Node) -> bool:
    """Whether it is the square of its one argument."""
    if node.op == "aten.mul":
        return len(node.args) == 2 and node.args[0] == node.args[1]
    return node.op == "aten.square" or (node.op == "aten.pow" and node.arguments["exponent"] == 2)


def _length_of(data: Ref, divisor: Ref, by_name: dict[str, Node]) -> tuple[Any, float] | None:
    """Dimensions and eps, if the divisor is the length of the data along them, bounded below."""
    node = by_name.get(divisor.name)
    if node is not None and node.op in ("aten.expand_as", "aten.expand"):
        node = by_name.get(node.inputs[0])
    eps = 0.0
    if node is not None and node.op in ("aten.clamp_min", "aten.clamp"):
        if node.arguments.get("max") is not None or not isinstance(node.arguments["min"], int | float):
            return None
        eps, node = float(node.arguments["min"]), by_name.get(node.inputs[0])
    if node is None or node.op != "aten.linalg_vector_norm" or node.inputs != (data.name,):
        return None
    a = node.arguments
    whole = a["dim"] is None
    if a["ord"] != 2 or not (a["keepdim"] or whole) or eps < 0:
        return None
    return a["dim"], eps

r"""Operations that are compositions of simpler ones, taken apart; and lengths divided out, put together.

* ``glu``: the first half of the entries times the sigmoid of the second.
* ``cosine_similarity``: the inner product of two directions.
* ``x / x.norm().clamp_min(eps)``, what ``torch.nn.functional.normalize`` does: a direction. Piece by piece it
  would be a quotient of two tensors that know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Spec

_aten: Any = torch.ops.aten


def unit(x: Tensor, dim: int | list[int] | None, eps: float) -> Tensor:
    """The direction of x along some dimensions: x divided by its length, or by eps if that is larger.

    >>> unit(torch.tensor([3.0, 4.0]), 0, 1e-12)
    tensor([0.6000, 0.8000])
    """
    return x / torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps)


def pieces(graph: Graph) -> Graph:
    """The graph with these operations rewritten."""
    by_name = graph.by_name
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _REWRITE[node.op](graph, node, by_name) if node.op in _REWRITE else (node,)
    return replace(graph, nodes=tuple(nodes))


def _glu(graph: Graph, node: Node, by_name: dict[str, Node]) -> Iterator[Node]:
    x, dim = node.arguments["self"], node.arguments["dim"]
    spec = node.spec
    assert isinstance(spec, Spec)
    half = spec.shape[dim]
    cut = [(Ref(x.name), dim, start, start + half) for start in (0, half)]
    first, second, gate = (f"{node.name}_{suffix}" for suffix in ("values", "logits", "gate"))
    yield Node(first, "aten.slice", _aten.slice.Tensor, cut[0], {}, node.module, spec)
    yield Node(second, "aten.slice", _aten.slice.Tensor, cut[1], {}, node.module, spec)
    yield Node(gate, "aten.sigmoid", _aten.sigmoid.default, (Ref(second),), {}, node.module, spec)
    yield replace(node, op="aten.mul", target=_aten.mul.Tensor, args=(Ref(first), Ref(gate)), kwargs={})


def _cosine(graph: Graph, node: Node, by_name: dict[str, Node]) -> Iterator[Node]:
    a = node.arguments
    specs = [graph.spec(a[key].name) for key in ("x1", "x2")]
    full = torch.broadcast_shapes(*(spec.shape for spec in specs if isinstance(spec, Spec)))
    dim = a["dim"] % len(full)
    names = []
    for label, key, spec in zip(("first", "second"), ("x1", "x2"), specs, strict=True):
        assert isinstance(spec, Spec)
        own = dim - len(full) + len(spec.shape)
        if own < 0 or spec.shape[own] != full[dim]:
            yield node  # a vector of length one spread along the dimension: left as it is, without a rule
            return
        names.append(f"{node.name}_{label}")
        yield Node(names[-1], "surefoot.unit", unit, (a[key], [own], a["eps"]), {}, node.module, spec)
    letters = "".join(chr(ord("a") + k) for k in range(len(full)))
    terms = [letters[len(full) - len(spec.shape) :] for spec in specs if isinstance(spec, Spec)]
    equation = f"{','.join(terms)}->{letters.replace(letters[dim], '')}"
    target = _aten.einsum.default
    yield replace(node, op="aten.einsum", target=target, args=(equation, [Ref(n) for n in names]), kwargs={})


def _quotient(graph: Graph, node: Node, by_name: dict[str, Node]) -> Iterator[Node]:
    """A division by the length of the numerator, bounded below by eps."""
    data, divisor = node.arguments["self"], node.arguments["other"]
    found = None
    if isinstance(data, Ref) and isinstance(divisor, Ref) and graph.spec(data.name) == node.spec:
        found = _length_of(data, divisor, by_name)
    if found is None or node.arguments.get("rounding_mode") is not None:
        yield node
    else:
        yield replace(node, op="surefoot.unit", target=unit, args=(data, *found), kwargs={})


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


_Rewrite = Callable[[Graph, Node, dict[str, Node]], Iterator[Node]]
_REWRITE: dict[str, _Rewrite] = {
    "aten.glu": _glu,
    "aten.cosine_similarity": _cosine,
    "aten.div": _quotient,
}

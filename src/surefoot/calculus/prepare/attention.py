r"""Scaled dot-product attention as products and a soft-max.

.. math:: \mathrm{attention}(Q, K, V) = \mathrm{softmax}(s\,QK^\top + B)\,V

The weights are a soft-max over the positions the mask allows; finite parts of an additive mask are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Spec

_aten: Any = torch.ops.aten


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Soft-max along the last dimension over the allowed positions; the others get weight zero.

    The mask says which positions are allowed (boolean) or which are forbidden by -∞ (real).

    >>> masked_softmax(torch.zeros(2, 2), None, True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    allowed = None
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else ~torch.isneginf(mask)
    if causal:
        rows, columns = scores.shape[-2:]
        triangle = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        allowed = triangle if allowed is None else allowed & triangle
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1).masked_fill(~allowed, 0.0)


def finite_part(mask: Tensor) -> Tensor:
    """An additive mask without its infinite entries, which the soft-max treats."""
    return torch.where(torch.isneginf(mask), torch.zeros_like(mask), mask)


def attention(graph: Graph) -> Graph:
    """Every attention node replaced by its pieces."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "aten.scaled_dot_product_attention":
            nodes += _pieces(graph, node)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _pieces(graph: Graph, node: Node) -> Iterator[Node]:
    a = node.arguments
    query, key, value = (_spec(graph, a[name]) for name in ("query", "key", "value"))
    rows, columns = query.shape[-2], key.shape[-2]
    scale = a["scale"] if a["scale"] is not None else 1.0 / math.sqrt(query.shape[-1])

    def make(suffix: str, op: str, target: Any, args: tuple[Any, ...], shape: tuple[int, ...]) -> Node:
        name = f"{node.name}_{suffix}" if suffix else node.name
        return Node(name, op, target, args, {}, node.module, Spec(shape, query.dtype))

    keys, values = a["key"], a["value"]
    if a.get("enable_gqa"):  # a group of heads of the query shares one head of keys and values
        heads = query.shape[-3]
        for label, ref, spec in (("keys", keys, key), ("values", values, value)):
            shape, repeats = (*spec.shape[:-3], heads, *spec.shape[-2:]), heads // spec.shape[-3]
            yield make(
                label, "aten.repeat_interleave", _aten.repeat_interleave.self_int, (ref, repeats, -3), shape
            )
        keys, values = Ref(f"{node.name}_keys"), Ref(f"{node.name}_values")
        key, value = (replace(spec, shape=(*spec.shape[:-3], heads, *spec.shape[-2:])) for spec in (key, value))
    turned = make(
        "turned", "aten.transpose", _aten.transpose.int, (keys, -2, -1), (*key.shape[:-2], key.shape[-1], columns)
    )
    yield turned
    shape = (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), rows, columns)
    scores = make("products", "aten.matmul", _aten.matmul.default, (a["query"], Ref(turned.name)), shape)
    yield scores
    scores = make("scores", "aten.mul", _aten.mul.Tensor, (Ref(scores.name), scale), shape)
    yield scores
    mask = a["attn_mask"]
    if isinstance(mask, Ref):
        spec = _spec(graph, mask)
        shape = tuple(torch.broadcast_shapes(shape, spec.shape))
        if spec.dtype.is_floating_point:
            finite = make("bias", "surefoot.finite_part", finite_part, (mask,), spec.shape)
            yield finite
            scores = make("biased", "aten.add", _aten.add.Tensor, (Ref(scores.name), Ref(finite.name)), shape)
            yield scores
    masked = (Ref(scores.name), mask, bool(a["is_causal"]))
    weights = make("weights", "surefoot.masked_softmax", masked_softmax, masked, shape)
    yield weights
    shape = (*torch.broadcast_shapes(shape[:-2], value.shape[:-2]), rows, value.shape[-1])
    yield make("", "aten.matmul", _aten.matmul.default, (Ref(weights.name), values), shape)


def _spec(graph: Graph, ref: Ref) -> Spec:
    spec = graph.spec(ref.name)
    assert isinstance(spec, Spec)
    return spec

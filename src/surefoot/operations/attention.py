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

from surefoot.graph.structure import Graph, Node, Ref, Role, Spec
from surefoot.operations.call import Slot, Use
from surefoot.operations.record import Expansion, declare, expansion
from surefoot.operations.rows import aligned
from surefoot.operations.sparsity import Contraction, Sparsity, tensors

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


def _cost(use: Use) -> Sparsity:
    r"""Attention :math:`\operatorname{softmax}(QK^\top)V`: two matrix products with a soft-max in between.

    With stacks of :math:`\ell \times e` queries, :math:`s \times e` keys and :math:`s \times v` values, the
    products take :math:`\ell s (e + v)` multiplications; a mask does not reduce them. Output entry
    :math:`(i, k)` depends on query :math:`i`, all keys, and column :math:`k` of the values, so the derivative
    has :math:`\ell v (e + s e + s)` non-zero entries; it is applied with two products of each kind.
    """
    *stack, rows, width = use.shapes["query"]
    keys, outputs = use.shapes["key"][-2], use.shapes["value"][-1]
    stacks = math.prod(torch.broadcast_shapes(tuple(stack), use.shape[:-2]))
    scores, weighted = stacks * rows * keys * width, stacks * rows * keys * outputs
    entries = stacks * rows * keys
    jacobian = stacks * rows * outputs * (width + keys * width + keys)
    q, k, v = (frozenset(tensors(use, slot)) for slot in ("query", "key", "value"))
    return Sparsity(
        evaluation=scores + weighted + 2 * entries,
        jacobian=jacobian,
        application=min(2 * (scores + weighted + entries), jacobian),
        contractions=(Contraction(scores, (q, k)), Contraction(weighted, (q | k, v))),
    )


def _rows(use: Use) -> list[Slot]:
    return aligned(use) if len(use.shape) >= 3 else []


declare("aten.scaled_dot_product_attention", rows=_rows, cost=_cost, selects=("attn_mask",))


@expansion("aten.scaled_dot_product_attention")
def attention_in_pieces(graph: Graph, node: Node) -> Expansion:
    """Two matrix products with a masked soft-max in between."""
    return Expansion(tuple(_pieces(graph, node)))


def _pieces(graph: Graph, node: Node) -> Iterator[Node]:
    """The products, the scores, their soft-max and the weighted sum."""
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


@expansion("aten.softmax")
def masked_by_hand(graph: Graph, node: Node) -> Expansion | None:
    """``softmax(scores.masked_fill(mask, -inf))``, ``softmax(where(mask, scores, -inf))`` and ``softmax(scores +
    mask)`` with entries -∞ in a fixed mask are soft-maxes over the positions that the mask leaves.

    Read step by step, the scores themselves would be infinite.
    """
    inner = graph.by_name.get(node.inputs[0])
    if inner is None or node.arguments["dim"] not in (-1, len(node.specs[0].shape) - 1):
        return None
    a = inner.arguments
    if inner.op == "aten.masked_fill" and _same(graph, a["self"], node) and _is_minus_infinity(graph, a["value"]):
        allowed = _made(graph, node, "allowed", "aten.logical_not", _aten.logical_not.default, a["mask"])
        return Expansion((allowed, _masked(node, a["self"], Ref(allowed.name))))
    if inner.op == "aten.where" and _same(graph, a["self"], node) and _is_minus_infinity(graph, a["other"]):
        return Expansion((_masked(node, a["self"], a["condition"]),))
    if inner.op == "aten.add" and a["alpha"] in (None, 1):
        pair = _scores_and_mask(graph, a["self"], a["other"], node)
        if pair is None:
            return None
        scores, mask = pair
        finite = _made(graph, node, "bias", "surefoot.finite_part", finite_part, mask)
        biased = replace(inner, name=f"{node.name}_biased", args=(scores, Ref(finite.name)), kwargs={})
        return Expansion((finite, biased, _masked(node, Ref(biased.name), mask)))
    return None


def _masked(node: Node, scores: Ref, mask: Ref) -> Node:
    args = (scores, mask, False)
    return replace(node, op="surefoot.masked_softmax", target=masked_softmax, args=args, kwargs={})


def _made(graph: Graph, node: Node, suffix: str, op: str, target: Any, mask: Ref) -> Node:
    """A function of the mask, of the same shape and type."""
    return Node(f"{node.name}_{suffix}", op, target, (mask,), {}, node.module, graph.spec(mask.name))


def _same(graph: Graph, argument: Any, node: Node) -> bool:
    """Whether it is a tensor of the shape of the result, so that the mask is what is broadcast."""
    if not isinstance(argument, Ref) or not isinstance(node.spec, Spec):
        return False
    spec = graph.spec(argument.name)
    return isinstance(spec, Spec) and spec.shape == node.spec.shape


def _is_minus_infinity(graph: Graph, value: Any) -> bool:
    if isinstance(value, Ref):
        known = graph.constants.get(value.name) if graph.roles[value.name] == Role.CONSTANT else None
        if not isinstance(known, Tensor) or known.numel() != 1 or known.device.type == "meta":
            return False
        value = float(known)
    return isinstance(value, int | float) and float(value) == -math.inf


def _scores_and_mask(graph: Graph, first: Any, second: Any, node: Node) -> tuple[Ref, Ref] | None:
    """Which of two summands are scores and which a fixed mask that forbids something, if that is so."""
    for scores, mask in ((first, second), (second, first)):
        if not _same(graph, scores, node) or not isinstance(mask, Ref) or graph.roles[mask.name] != Role.CONSTANT:
            continue
        value = graph.constants.get(mask.name)
        if isinstance(value, Tensor) and value.device.type != "meta" and bool(torch.isneginf(value).any()):
            return scores, mask
    return None

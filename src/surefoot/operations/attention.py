r"""Scaled dot-product attention as products and a soft-max.

.. math:: \mathrm{attention}(Q, K, V) = \mathrm{softmax}(s\,QK^\top + B)\,V

The weights are a soft-max over the positions the mask allows; finite parts of an additive mask are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.nodes import Source
from surefoot.graph.structure import Graph, Node, Ref, Role, Spec
from surefoot.operations.call import Slot, Use
from surefoot.operations.common import aligned
from surefoot.operations.record import Expansion, declare, expansion
from surefoot.operations.sparsity import Contraction, Sparsity, tensors

_aten: Any = torch.ops.aten
_FORBIDS = -(2.0**100)  # what is added to forbid a position


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Soft-max along the last dimension over the allowed positions; the others get weight zero.

    The mask says which positions are allowed (boolean) or which are forbidden by -∞ (real).

    >>> masked_softmax(torch.zeros(2, 2), None, True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    forbidden = None
    if mask is not None:
        forbidden = ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
    if causal:
        triangle = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        forbidden = triangle if forbidden is None else forbidden | triangle
    if forbidden is None:
        return torch.softmax(scores, dim=-1)
    weights = torch.softmax(scores.masked_fill(forbidden, -torch.inf), dim=-1)
    return weights if mask is None else weights.masked_fill(forbidden, 0.0)  # a mask may forbid whole rows


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
            if _is_fixed(graph, mask.name):  # as truth values: -∞ is no number to compute derivatives with
                above = make("allowed", "aten.gt", _aten.gt.Scalar, (mask, -math.inf), spec.shape)
                yield replace(above, spec=Spec(spec.shape, torch.bool))
                mask = Ref(above.name)
    masked = (Ref(scores.name), mask, bool(a["is_causal"]))
    weights = make("weights", "surefoot.masked_softmax", masked_softmax, masked, shape)
    yield weights
    shape = (*torch.broadcast_shapes(shape[:-2], value.shape[:-2]), rows, value.shape[-1])
    yield make("", "aten.matmul", _aten.matmul.default, (Ref(weights.name), values), shape)


def _is_fixed(graph: Graph, name: str) -> bool:
    """Whether a tensor varies with no parameter and no real input."""
    node = graph.by_name.get(name)
    if node is not None:
        return all(_is_fixed(graph, argument) for argument in node.inputs)
    leaf = graph.leaves[name]
    return leaf.source is not Source.PARAMETER and not (leaf.source is Source.INPUT and leaf.spec.is_real)


def _spec(graph: Graph, ref: Ref) -> Spec:
    spec = graph.spec(ref.name)
    assert isinstance(spec, Spec)
    return spec


@expansion("aten.softmax")
def masked_by_hand(graph: Graph, node: Node) -> Expansion | None:
    r"""``softmax(scores.masked_fill(mask, -inf))``, ``softmax(where(mask, scores, -inf))`` and ``softmax(scores +
    mask)`` with entries -∞ in a fixed mask, or one in the other, are soft-maxes over the positions that the masks
    leave.

    Read step by step, the scores themselves would be infinite. A finite number below :math:`-2^{100}`, such as the
    least of a floating-point type, forbids as well: beside scores below :math:`2^{99}` it gets a weight of at most
    :math:`\exp(-2^{99})`, which with its derivatives is far below what any bound is rounded up by. Where such a
    mask leaves nothing of a row, all positions have the same weight: it is left as it is.
    """
    if node.arguments["dim"] not in (-1, len(node.specs[0].shape) - 1):
        return None
    made: list[Node] = []
    masks: list[_Mask] = []
    scores = _without_masks(graph, node, Ref(node.inputs[0]), made, masks)
    if not masks or not _leave_something(masks, node):
        return None
    allowed = masks[0].allowed
    for k, mask in enumerate(masks[1:]):
        args = (allowed, mask.allowed)
        spec = Spec(node.specs[0].shape, torch.bool)
        both = Node(
            f"{node.name}_both_{k}", "aten.logical_and", _aten.logical_and.default, args, {}, node.module, spec
        )
        made.append(both)
        allowed = Ref(both.name)
    masked = (scores, allowed, False)
    last = replace(node, op="surefoot.masked_softmax", target=masked_softmax, args=masked, kwargs={})
    return Expansion((*made, last))


@dataclass(frozen=True)
class _Mask:
    """What a mask allows: a tensor of truth values, and these if they are fixed; whether it forbids by -∞."""

    allowed: Ref
    value: Tensor | None
    is_infinite: bool


def _leave_something(masks: list[_Mask], node: Node) -> bool:
    """Whether masks forbid by -∞, or are fixed and leave something of every row."""
    if all(mask.is_infinite for mask in masks):
        return True
    together = torch.ones(node.specs[0].shape, dtype=torch.bool)
    for mask in masks:
        if mask.value is None or mask.value.device.type == "meta":
            return False
        together = together & mask.value.cpu()
    return bool(together.any(dim=-1).all())


def _without_masks(graph: Graph, node: Node, ref: Ref, made: list[Node], masks: list[_Mask]) -> Ref:
    """The scores that masks were applied to; what is made on the way and the masks are added to the lists."""
    inner, place = graph.by_name.get(ref.name), len(masks)
    if inner is None:
        return ref
    a, name = inner.arguments, f"{node.name}_{place}" if place else node.name

    def make(suffix: str, op: str, target: Any, *args: Any, like: Ref, dtype: torch.dtype | None = None) -> Ref:
        spec = _spec(graph, like)
        spec = spec if dtype is None else Spec(spec.shape, dtype)
        made.append(Node(f"{name}_{suffix}", op, target, args, {}, node.module, spec))
        return Ref(made[-1].name)

    if inner.op == "aten.masked_fill" and _same(graph, a["self"], node) and (least := _forbids(graph, a["value"])):
        allowed = make("allowed", "aten.logical_not", _aten.logical_not.default, a["mask"], like=a["mask"])
        value = _fixed(graph, a["mask"])
        masks.append(_Mask(allowed, None if value is None else ~value.bool(), least == -math.inf))
        return _without_masks(graph, node, a["self"], made, masks)
    if inner.op == "aten.where" and _same(graph, a["self"], node) and (least := _forbids(graph, a["other"])):
        value = _fixed(graph, a["condition"])
        masks.append(_Mask(a["condition"], None if value is None else value.bool(), least == -math.inf))
        return _without_masks(graph, node, a["self"], made, masks)
    if inner.op == "aten.add" and a["alpha"] in (None, 1):
        pair = _scores_and_mask(graph, a["self"], a["other"], node)
        if pair is None:
            return ref
        scores, mask = pair
        value = _fixed(graph, mask)
        assert value is not None
        infinite = bool((value[value <= _FORBIDS] == -math.inf).all())
        above = (mask, _FORBIDS)
        allowed = make("allowed", "aten.gt", _aten.gt.Scalar, *above, like=mask, dtype=torch.bool)
        bias = make("bias", "aten.where", _aten.where.ScalarOther, allowed, mask, 0.0, like=mask)
        masks.append(_Mask(allowed, value > _FORBIDS, infinite))
        scores = _without_masks(graph, node, scores, made, masks)
        made.append(replace(inner, name=f"{name}_biased", args=(scores, bias), kwargs={}))
        return Ref(made[-1].name)
    return ref


def _same(graph: Graph, argument: Any, node: Node) -> bool:
    """Whether it is a tensor of the shape of the result, so that the mask is what is broadcast."""
    if not isinstance(argument, Ref) or not isinstance(node.spec, Spec):
        return False
    spec = graph.spec(argument.name)
    return isinstance(spec, Spec) and spec.shape == node.spec.shape


def _fixed(graph: Graph, ref: Ref) -> Tensor | None:
    """The value of a tensor that nothing enters."""
    value = graph.constants.get(ref.name) if graph.roles[ref.name] == Role.CONSTANT else None
    return value if isinstance(value, Tensor) and value.device.type != "meta" else None


def _forbids(graph: Graph, value: Any) -> float:
    """A number that forbids a position, -∞ or next to it; zero for any other."""
    if isinstance(value, Ref):
        known = _fixed(graph, value)
        value = float(known) if known is not None and known.numel() == 1 else 0.0
    return float(value) if isinstance(value, int | float) and value <= _FORBIDS else 0.0


def _scores_and_mask(graph: Graph, first: Any, second: Any, node: Node) -> tuple[Ref, Ref] | None:
    """Which of two summands are scores and which a fixed mask that forbids something, if that is so."""
    for scores, mask in ((first, second), (second, first)):
        if not _same(graph, scores, node) or not isinstance(mask, Ref):
            continue
        value = _fixed(graph, mask)
        if value is not None and value.is_floating_point() and bool((value <= _FORBIDS).any()):
            return scores, mask
    return None

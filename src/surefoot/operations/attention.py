r"""Scaled dot-product attention as products and a soft-max.

.. math:: \mathrm{attention}(Q, K, V) = \mathrm{softmax}(s\,QK^\top + B)\,V

The weights are a soft-max over the positions the mask allows; finite parts of an additive mask are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.nodes import Source
from surefoot.graph.structure import Graph, Node, Ref, Role, Spec
from surefoot.operations.call import Slot, Use
from surefoot.operations.common import aligned, normalized_dims
from surefoot.operations.record import Expansion, Form, declare, expansion, record_of
from surefoot.operations.sparsity import Contraction, Sparsity, tensors
from surefoot.operations.written_out import steps, traced

_aten: Any = torch.ops.aten
_FORBIDS = -(2.0**100)  # what is added to forbid a position
# beside layout operations, those whose result is infinite if they read an entry that is, and no other is
_PICKS = ("aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d", "aten.masked_fill", "aten.where")


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


_library = torch.library.Library("surefoot", "FRAGMENT")  # as operations, of which a trace keeps the names
_library.define("masked_softmax(Tensor scores, Tensor? mask, bool causal) -> Tensor")
_library.define("finite_part(Tensor mask) -> Tensor")
_library.impl("masked_softmax", masked_softmax, "CompositeImplicitAutograd")
_library.impl("finite_part", finite_part, "CompositeImplicitAutograd")
_surefoot: Any = torch.ops.surefoot


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
def attention_in_pieces(graph: Graph, node: Node) -> Expansion | None:
    """Two matrix products with a masked soft-max in between."""
    mask = node.arguments["attn_mask"]
    fixed = isinstance(mask, Ref) and _is_fixed(graph, mask.name)
    return traced(graph, node, partial(_attention, mask_is_fixed=fixed))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mask_is_fixed: bool,
    **_: Any,
) -> Tensor:
    if enable_gqa:  # a group of heads of the query shares one head of keys and values
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is not None and attn_mask.is_floating_point():
        scores = scores + _surefoot.finite_part(attn_mask)
        if mask_is_fixed:  # as truth values: -∞ is no number to compute derivatives with
            attn_mask = attn_mask > -math.inf
    return _surefoot.masked_softmax(scores, attn_mask, is_causal) @ value


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
    allowed = _allowed_by_all(node.name, node.specs[0].shape, node.module, made, masks)
    masked = (scores, allowed, False)
    last = replace(node, op="surefoot.masked_softmax", target=masked_softmax, args=masked, kwargs={})
    return Expansion((*made, last))


@expansion("aten.masked_fill", "aten.where")
def masked_classes(graph: Graph, node: Node) -> Expansion | None:
    r"""Scores of a cross-entropy of class numbers, some of which are -∞: these are :math:`-2^{101}` instead, so
    that there is a centre, and change the loss by as little as above. They stay in rows whose own class has no
    score: there the loss is infinite.
    """
    losses = graph.consumers[node.name]
    if len(losses) != 1 or losses[0].op != "surefoot.cross_entropy" or losses[0].kwargs.get("label_smoothing"):
        return None
    targets = losses[0].args[1]
    if targets.name not in graph.leaves or _spec(graph, targets).is_real:
        return None
    made: list[Node] = []
    masks: list[_Mask] = []
    scores = _without_masks(graph, node, Ref(node.name), made, masks)
    if not masks or not all(mask.is_infinite for mask in masks):
        return None
    allowed = _allowed_by_all(node.name, node.specs[0].shape, node.module, made, masks)

    def filled(scores: Tensor, allowed: Tensor, targets: Tensor) -> Tensor:
        places = targets.long().clamp(0, scores.shape[1] - 1).unsqueeze(1)
        return _filled(scores, allowed, allowed.expand(scores.shape).gather(1, places))

    return _ending_in(graph, node, filled, made, [scores, allowed, targets])


@expansion("aten.logsumexp")
def masked_sums(graph: Graph, node: Node) -> Expansion | None:
    """In the same way, the logarithm of a sum of exponentials of scores, some of which are -∞. They stay where
    nothing else is added up.
    """
    inner = graph.by_name.get(node.inputs[0])
    made: list[Node] = []
    masks: list[_Mask] = []
    if inner is None or not isinstance(inner.spec, Spec):
        return None
    scores = _without_masks(graph, replace(inner, name=node.name), Ref(inner.name), made, masks)
    if not masks or not all(mask.is_infinite for mask in masks):
        return None
    dims, kept = normalized_dims(node.arguments["dim"], len(inner.spec.shape)), node.arguments["keepdim"]
    allowed = _allowed_by_all(node.name, inner.spec.shape, node.module, made, masks)

    def logarithm(scores: Tensor, allowed: Tensor) -> Tensor:
        counts = allowed.expand(scores.shape)
        for dim in dims:
            counts = counts.any(dim, keepdim=True)
        return _filled(scores, allowed, counts).logsumexp(dims, bool(kept))

    return _ending_in(graph, node, logarithm, made, [scores, allowed])


def _filled(scores: Tensor, allowed: Tensor, counts: Tensor) -> Tensor:
    """The scores with a very negative number where they are not allowed, and -∞ where that counts."""
    instead = counts.to(scores.dtype).masked_fill(counts, 2 * _FORBIDS).masked_fill(~counts, -math.inf)
    return torch.where(allowed, scores, instead)


@expansion("aten.log_softmax")
def masked_logarithms(graph: Graph, node: Node) -> Expansion | None:
    r"""The logarithm of a soft-max over what fixed masks leave, if those who read it pick entries that are left:
    the scores less the logarithm of the sum of the exponentials of these. What nobody reads need not be -∞.
    """
    made: list[Node] = []
    masks: list[_Mask] = []
    scores = _without_masks(graph, node, Ref(node.inputs[0]), made, masks)
    if not masks or node.name in graph.outputs:
        return None
    left = torch.zeros(node.specs[0].shape)
    for mask in masks:
        if mask.value is None or not mask.is_infinite:
            return None
        left = left.masked_fill(~mask.value.cpu(), -math.inf)
    dim = node.arguments["dim"]
    read = all(_picks(graph, reader, node.name, left) for reader in graph.consumers[node.name])
    if not read or not bool(left.isfinite().any(dim).all()):
        return None

    def logarithm(scores: Tensor, allowed: Tensor) -> Tensor:
        return scores - torch.where(allowed, scores, 2 * _FORBIDS).logsumexp(dim, keepdim=True)

    allowed = _allowed_by_all(node.name, node.specs[0].shape, node.module, made, masks)
    return _ending_in(graph, node, logarithm, made, [scores, allowed])


def _picks(graph: Graph, node: Node, name: str, left: Tensor) -> bool:
    """Whether an operation picks entries of a tensor and leaves those out that are -∞ here."""
    others = {other: _fixed(graph, Ref(other)) for other in node.inputs if other != name}
    picks = node.op in _PICKS or record_of(node).form_of(node) is Form.LAYOUT
    if not picks or any(value is None for value in others.values()):
        return False
    values = {other: value.cpu() for other, value in others.items() if value is not None}
    picked = node.run({**values, name: left})
    return isinstance(picked, Tensor) and bool(picked.isfinite().all())


def _ending_in(
    graph: Graph, node: Node, function: Callable[..., Tensor], made: list[Node], arguments: list[Ref]
) -> Expansion:
    """What was made, and a function of some tensors in place of the node."""
    known = {part.name: part.spec for part in made}
    specs = {ref.name: known.get(ref.name) or graph.spec(ref.name) for ref in arguments}
    nodes, (result,) = steps(function, specs, node.name, node.module, taken=graph.by_name)
    last = {result.name: node.name}
    return Expansion((*made, *(part.renamed(last, name=last.get(part.name, part.name)) for part in nodes)))


def _allowed_by_all(name: str, shape: tuple[int, ...], module: str, made: list[Node], masks: list[_Mask]) -> Ref:
    """Where all masks allow a position; what is made for it is added to the list."""
    allowed = masks[0].allowed
    for k, mask in enumerate(masks[1:]):
        args, spec = (allowed, mask.allowed), Spec(shape, torch.bool)
        made.append(
            Node(f"{name}_both_{k}", "aten.logical_and", _aten.logical_and.default, args, {}, module, spec)
        )
        allowed = Ref(made[-1].name)
    return allowed


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
    if inner.op == "aten.where" and _same(graph, a["other"], node) and (least := _forbids(graph, a["self"])):
        condition, value = a["condition"], _fixed(graph, a["condition"])
        allowed = make("allowed", "aten.logical_not", _aten.logical_not.default, condition, like=condition)
        masks.append(_Mask(allowed, None if value is None else ~value.bool(), least == -math.inf))
        return _without_masks(graph, node, a["other"], made, masks)
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

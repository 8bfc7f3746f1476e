r"""Soft-max of scores with a mask, written out by hand, recognised.

``softmax(scores.masked_fill(mask, -inf))``, ``softmax(where(mask, scores, -inf))`` and ``softmax(scores + mask)``
with entries -∞ in a fixed mask are soft-maxes over the positions that the mask leaves. Read step by step, the
scores themselves would be infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.prepare.attention import finite_part, masked_softmax
from surefoot.graph.structure import Graph, Node, Ref, Role, Spec

_aten: Any = torch.ops.aten


def masks(graph: Graph) -> Graph:
    """Every soft-max along the last dimension of scores that a fixed mask makes -∞, as a masked one."""
    by_name = graph.by_name
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _recognised(graph, node, by_name)
    return replace(graph, nodes=tuple(nodes))


def _recognised(graph: Graph, node: Node, by_name: dict[str, Node]) -> Iterator[Node]:
    inner = by_name.get(node.inputs[0]) if node.op == "aten.softmax" and node.inputs else None
    rank = len(node.specs[0].shape)
    if inner is None or node.arguments["dim"] not in (-1, rank - 1):
        yield node
        return
    a = inner.arguments
    if inner.op == "aten.masked_fill" and _same(graph, a["self"], node) and _is_minus_infinity(graph, a["value"]):
        allowed = _made(graph, node, "allowed", "aten.logical_not", _aten.logical_not.default, a["mask"])
        yield allowed
        yield _masked(node, a["self"], Ref(allowed.name))
    elif inner.op == "aten.where" and _same(graph, a["self"], node) and _is_minus_infinity(graph, a["other"]):
        yield _masked(node, a["self"], a["condition"])
    elif inner.op == "aten.add" and a["alpha"] in (None, 1):
        pair = _scores_and_mask(graph, a["self"], a["other"], node)
        if pair is None:
            yield node
            return
        scores, mask = pair
        finite = _made(graph, node, "bias", "surefoot.finite_part", finite_part, mask)
        yield finite
        biased = replace(inner, name=f"{node.name}_biased", args=(scores, Ref(finite.name)), kwargs={})
        yield biased
        yield _masked(node, Ref(biased.name), mask)
    else:
        yield node


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

r"""Where the samples of a batch stay apart: each is computed from itself and from parameters alone.

Tensors are then read as one block of numbers per sample, in the order of memory, and an operation maps block i of
its arguments to block i of its result. What is claimed of norms holds for each block, as the others may be zero.
So errors, sizes and costates are carried along per sample, and errors of second order are sums over samples of
products, :math:`\sum_ie_i\|\lambda_i\|`, instead of products of norms of all samples, :math:`\|e\|\|\lambda\|`.
A plain number among them bounds the norm of all samples together, and so that of each.

A parameter that is added to all samples alike, as a shift is, has the slope :math:`J = \sqrt N J_i`, so that
:math:`J_i \le J/\sqrt N`.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import numpy as np

from surefoot.graph import Graph, Node, Role, Spec
from surefoot.operations.call import Use
from surefoot.operations.record import record_of
from surefoot.valuation.entropy import ENTROPY, is_plain

Amount = Any  # a number, or an array of one per sample


def samples_of(graph: Graph, varying: tuple[Node, ...]) -> int:
    """How many samples stay apart in what varies, up to a logistic loss of class numbers that adds them up; 0 if
    they may not.
    """
    counts = {leaf.spec.shape[:1] for leaf in graph.inputs}
    if len(counts) != 1 or counts == {()} or not varying or varying[-1].op != ENTROPY:
        return 0
    [(count,)] = counts
    moving = {node.name for node in varying}
    if not count or not are_apart(graph, varying[:-1], moving, count):
        return 0
    loss = varying[-1]
    outputs, targets = (graph.spec(name) for name in loss.inputs)
    assert isinstance(outputs, Spec)
    assert isinstance(targets, Spec)
    plain = is_plain(loss, targets.dtype) and loss.name == graph.outputs[0] and loss.inputs[0] in moving
    return count if plain and outputs.shape[0] % count == 0 else 0


def are_apart(graph: Graph, nodes: tuple[Node, ...], moving: Set[str], count: int) -> bool:
    """Whether these operations compute each of so many samples from the same sample of what moves."""
    for node in nodes:
        if not all(spec.shape and spec.shape[0] % count == 0 for spec in node.specs):
            return False
        use = Use(node, graph.spec)
        read = {slot for slot, name in use.names.items() if name in moving}
        record = record_of(node)
        if not record.in_order and not read <= record.row_slots(use):
            return False
    return True


def shifts_of(graph: Graph) -> frozenset[str]:
    """The parameters that are added to all samples alike, and nothing else is done with them."""
    names = {
        leaf.name: leaf.spec.shape for leaf in graph.leaves.values() if Role.PARAMETERS in graph.roles[leaf.name]
    }
    for node in graph.nodes:
        use = Use(node, graph.spec)
        shifts, rank = record_of(node).shifts, len(node.specs[0].shape)
        for slot, name in use.names.items():
            shape = names.get(name)
            if shape is not None and (slot not in shifts or not (len(shape) < rank or shape[:1] == (1,))):
                del names[name]
    return frozenset(names)


def paired(first: Amount, second: Amount) -> float:
    """A bound on the sum over samples of products, by Cauchy and Schwarz where one of them is a number."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return float(first @ second)
    return together(first) * together(second)


def together(amount: Amount) -> float:
    """The norm of what is known per sample."""
    return math.sqrt(amount @ amount) * (1 + 2.0**-40) if isinstance(amount, np.ndarray) else amount


def some(amount: Amount) -> bool:
    """Whether something is not known to be zero."""
    return isinstance(amount, np.ndarray) or bool(amount)


def least(first: Amount, second: Amount) -> Amount:
    """The smaller one, per sample."""
    plain = isinstance(first, float) and isinstance(second, float)
    return min(first, second) if plain else np.minimum(first, second)

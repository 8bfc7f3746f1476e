"""Graphs that would not say the truth about the model, and why they are refused."""

from __future__ import annotations

import torch

from surefoot.errors import CaptureError
from surefoot.graph.checks import random_dropout
from surefoot.graph.structure import Graph, Node, Role, Spec

_RANDOM = ("rand", "randn", "rand_like", "randn_like", "bernoulli", "multinomial", "normal", "uniform")
_READS_INDICES = {
    "aten.embedding", "aten.embedding_bag", "aten.index", "aten.index_select", "aten.gather", "aten.where",
    "aten.masked_fill", "aten.scaled_dot_product_attention", "aten.take_along_dim", "aten.zeros_like",
    "aten.ones_like", "aten.full_like", "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.empty_like",
}  # fmt: skip


def refuse_unfaithful(graph: Graph) -> None:
    """Refuse what is random, cuts gradients, or treats integers as numbers.

    Raises:
        CaptureError: naming the operation and its module.
    """
    for node in graph.nodes:
        _refuse_random(node)
        if graph.roles[node.name] is Role.CONSTANT:
            continue
        _refuse_detached(node)
        _refuse_integers(graph, node)


def _refuse_random(node: Node) -> None:
    arguments = node.arguments
    short = node.op.removeprefix("aten.").rstrip("_")
    probability = arguments.get("p", arguments.get("dropout_p", 0.0))
    training = arguments.get("train", True)
    if ("dropout" in short or "dropout_p" in arguments) and training and probability:
        raise random_dropout(node.module, probability)
    if short in _RANDOM:
        raise CaptureError(
            f"the operation '{node.op}' draws random numbers",
            where=node.module,
            remedy="Pass the random numbers as an input: a certificate covers one function.",
        )


def _refuse_detached(node: Node) -> None:
    if node.op in ("aten.detach", "aten.detach_"):
        raise CaptureError(
            "a tensor that depends on the parameters or the input is detached",
            where=node.module,
            remedy="Its gradient would not be the derivative of the function: remove .detach().",
        )


def _refuse_integers(graph: Graph, node: Node) -> None:
    """Integers may choose (ids, masks, conditions); they may not be computed with."""
    if node.op in _READS_INDICES or not all(spec.dtype.is_floating_point for spec in node.specs):
        return
    for name in node.inputs:
        spec = graph.spec(name)
        if isinstance(spec, Spec) and Role.INPUT in graph.roles[name] and spec.dtype in _INTEGERS:
            raise CaptureError(
                f"'{node.op}' computes with integers of type {spec.dtype} that come from the input",
                where=node.module,
                remedy="Integer inputs can only be ids for an embedding or masks: pass numbers as float.",
            )


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

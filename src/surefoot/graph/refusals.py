"""Graphs that would not say the truth about the model, and why they are refused."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.errors import CaptureError
from surefoot.graph.checks import random_dropout
from surefoot.graph.nodes import Node, Ref, Role, Spec
from surefoot.graph.structure import Graph
from surefoot.torch_private import schema_of

_SELECTS = {
    "aten.embedding", "aten.embedding_bag", "aten.index", "aten.index_select", "aten.gather", "aten.where",
    "aten.masked_fill", "aten.scaled_dot_product_attention", "aten.take_along_dim", "aten.index_put",
    "aten.scatter", "aten.scatter_add", "aten.index_add", "aten.index_copy",
}  # fmt: skip
_MULTIPLIES = {
    "aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.mv", "aten.conv1d",
    "aten.conv2d", "aten.conv3d", "aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d",
    "aten.scaled_dot_product_attention",
}  # fmt: skip
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def refuse_unfaithful(graph: Graph) -> None:
    """Refuse what is random, depends on the data, treats integers as numbers, or ignores the input.

    Raises:
        CaptureError: naming the operation and its module.
    """
    for node in graph.nodes:
        _refuse_random(node)
        _refuse_unknown(node)
        _refuse_writing(node)
        _refuse_mixed_types(graph, node)
    _refuse_integers(graph)
    if not any(Role.INPUT in graph.roles[name] for name in graph.outputs):
        raise CaptureError(
            "the output does not depend on the input",
            where="",
            remedy="Return something that is computed from the input.",
        )


def refuse_wrong_ids(graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Refuse ids that an embedding does not have.

    Raises:
        CaptureError: naming the embedding.
    """
    given = {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes:
        indices = node.arguments.get("indices")
        if node.op != "aten.embedding" or not isinstance(indices, Ref) or indices.name not in given:
            continue
        ids, weight = given[indices.name], graph.spec(node.arguments["weight"].name)
        assert isinstance(weight, Spec)
        size = weight.shape[0]
        if ids.device.type == "meta":
            continue
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= size:
            raise CaptureError(
                f"an embedding of {size} entries is asked for ids from {smallest} to {largest}",
                where=node.module,
                remedy="Pass ids that are smaller than the number of entries.",
            )


def _refuse_random(node: Node) -> None:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return
    arguments = node.arguments
    training = arguments.get("train", arguments.get("training", True))
    probability = arguments.get("p", arguments.get("dropout_p", arguments.get("dropout")))
    if "dropout" in node.op or probability is not None:  # attention and recurrent layers drop entries as well
        if training and probability:
            raise random_dropout(node.module, probability)
        return
    if node.op == "aten.rrelu" and (not training or arguments["lower"] == arguments["upper"]):
        return
    raise CaptureError(
        f"the operation '{node.op}' draws random numbers",
        where=node.module,
        remedy="Call model.eval() if that stops it, or pass the random numbers as an input: a certificate covers "
        "one function.",
    )


def _refuse_unknown(node: Node) -> None:
    """Refuse results whose shape, or value as a number, is known only once the data are."""
    if not node.specs:
        raise CaptureError(
            "a number is taken out of a tensor (.item(), float(), int() or tolist())",
            where=node.module,
            remedy="Compute with the tensor itself: a number has no gradient.",
        )
    if any(size < 0 for spec in node.specs for size in spec.shape):
        raise CaptureError(
            f"the shape of what '{node.op}' returns depends on the data",
            where=node.module,
            remedy="Keep all entries and mask them, for example with torch.where.",
        )


def _refuse_writing(node: Node) -> None:
    """Refuse what would write into a tensor when it is run, and what is no operation on tensors at all."""
    schema = schema_of(node.target)
    if schema is not None and schema.is_mutable:
        raise CaptureError(
            f"the operation '{node.op}' writes into its argument",
            where=node.module,
            remedy="Make forward a pure function: return new tensors.",
        )
    if schema is None and node.target is not operator.getitem and not node.op.startswith("surefoot."):
        raise CaptureError(
            f"the operation '{node.op.lstrip('_')}' is no operation on tensors that can be followed",
            where=node.module,
            remedy="Do without torch.func (vmap, grad, jacrev) inside forward.",
        )


def _refuse_integers(graph: Graph) -> None:
    """Integers of the input may choose (ids, masks, conditions); they may not be computed with."""
    given = {leaf.name for leaf in graph.inputs if leaf.spec.dtype in _INTEGERS}
    for node in graph.nodes:
        read = given.intersection(node.inputs)
        if not read or node.op in _SELECTS:
            continue
        if any(spec.is_real for spec in node.specs):
            dtype = next(spec.dtype for name in read if isinstance(spec := graph.spec(name), Spec))
            raise CaptureError(
                f"'{node.op}' computes with integers ({dtype}) that come from the input",
                where=node.module,
                remedy="Integer inputs can only be ids for an embedding, or masks: pass numbers as x.float().",
            )
        if any(spec.dtype in _INTEGERS for spec in node.specs):
            given.add(node.name)


def _refuse_mixed_types(graph: Graph, node: Node) -> None:
    """Tracing does not notice that two element types cannot be multiplied; running does."""
    if node.op not in _MULTIPLIES:
        return
    specs = [graph.spec(name) for name in node.inputs]
    types = dict.fromkeys(spec.dtype for spec in specs if isinstance(spec, Spec) and spec.is_real)
    if len(types) > 1:
        raise CaptureError(
            f"'{node.op}' multiplies {' by '.join(map(str, types))}",
            where=node.module,
            remedy="Convert the model or the input, for example x = x.to(torch.float64) or model.double().",
        )


__all__ = ["refuse_unfaithful", "refuse_wrong_ids"]

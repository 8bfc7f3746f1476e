"""Graphs that would not say the truth about the model, and why they are refused."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import CaptureError
from surefoot.graph.checks import random_dropout
from surefoot.graph.nodes import Node, Ref, Role, Spec
from surefoot.graph.structure import Graph
from surefoot.torch_private import schema_of

ONE_FUNCTION = "a certificate covers one function."
NOT_RANDOM = f"Call model.eval() if that stops it, or pass the random numbers as an input: {ONE_FUNCTION}"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def refuse_unfaithful(graph: Graph) -> None:
    """Refuse what is random, depends on the data, treats integers as numbers, or ignores the input.

    Raises:
        CaptureError: naming the operation and its module.
    """
    given = {leaf.name for leaf in graph.inputs if leaf.spec.dtype in _INTEGERS}
    for node in graph.nodes:
        for what, remedy in (*_problems(node), *_mixed_types(graph, node), *_integers(graph, node, given)):
            raise CaptureError(what, where=node.module, remedy=remedy)
        if given.intersection(node.inputs) and any(spec.dtype in _INTEGERS for spec in node.specs):
            given.add(node.name)
    if not any(Role.INPUT in graph.roles[name] for name in graph.outputs):
        remedy = "Return something that is computed from the input."
        raise CaptureError("the output does not depend on the input", where="", remedy=remedy)


def refuse_wrong_ids(graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Refuse ids that an embedding does not have.

    Raises:
        CaptureError: naming the embedding.
    """
    given = {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes:
        indices = node.arguments.get("indices") if node.op == "aten.embedding" else None
        if not isinstance(indices, Ref) or indices.name not in given or given[indices.name].is_meta:
            continue
        ids, size = given[indices.name], graph.specs(node.arguments["weight"].name)[0].shape[0]
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= size:
            what = f"an embedding of {size} entries is asked for ids from {smallest} to {largest}"
            remedy = "Pass ids that are smaller than the number of entries."
            raise CaptureError(what, where=node.module, remedy=remedy)


def refuse_masked_rows(graph: Graph, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Refuse an input that masks all that a soft-max may look at: it divides zero by zero.

    A mask is computed from integers, truth values and constants. Where an operation reads one and a whole row
    comes out as minus infinity, the model is run: some return zeros for such a row, and that is a function.

    Raises:
        CaptureError: naming the module that reads the mask, if the model returns NaN.
    """
    given = {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    varies = {*graph.parameters, *graph.frozen, *(leaf for leaf in graph.inputs if leaf.spec.is_real)}
    masks = {leaf.name for leaf in graph.leaves.values() if leaf not in varies}
    for node in graph.nodes:
        if masks.issuperset(node.inputs):
            masks.add(node.name)
    suspects = masks & (given.keys() | graph.by_name.keys())
    suspects = {name for name in suspects if graph.specs(name)[0].dtype not in _INTEGERS}
    readers = [n for n in graph.nodes if n.name not in masks and suspects.intersection(n.inputs)]
    if not readers or any(value.is_meta for value in (*inputs, *graph.held.values(), *parameters.values())):
        return
    values = {**graph.constants, **given}
    with torch.no_grad():
        for node in graph.nodes:
            if node.name in masks and node.name not in values:
                values[node.name] = node.run(values)
        for node in readers:
            read = {name: values[name] for name in node.inputs if name in masks}
            if not any(value.dtype is torch.bool or bool(value.isinf().any()) for value in read.values()):
                continue
            result = _at_zero(graph, node, read)
            if isinstance(result, Tensor) and result.dim() and bool(result.isneginf().all(dim=-1).any()):
                if any(bool(output.isnan().any()) for output in graph.run(parameters, inputs)):
                    what = "a mask hides everything from a row of the attention, and the model returns NaN"
                    remedy = "Leave at least one entry visible in each row, or drop the samples that have none."
                    raise CaptureError(what, where=node.module, remedy=remedy)
                return


def _problems(node: Node) -> Iterator[tuple[str, str]]:
    """What is wrong with an operation, and what to do about it."""
    if not node.specs:
        what = "a number is taken out of a tensor (.item(), float(), int() or tolist())"
        yield what, "Compute with the tensor itself: a number has no gradient."
    if any(size < 0 for spec in node.specs for size in spec.shape):
        what = f"the shape of what '{node.op}' returns depends on the data"
        yield what, "Keep all entries and mask them, for example with torch.where."
    schema = schema_of(node.target)
    if schema is not None and schema.is_mutable:
        what = f"the operation '{node.op}' writes into its argument"
        yield what, "Make forward a pure function: return new tensors."
    if schema is None and node.target is not operator.getitem and not node.op.startswith("surefoot."):
        what = f"the operation '{node.op.lstrip('_')}' is no operation on tensors that can be followed"
        yield what, "Do without torch.func (vmap, grad, jacrev) inside forward."
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        arguments = node.arguments
        training = arguments.get("train", arguments.get("training", True))
        probability = arguments.get("p", arguments.get("dropout_p", arguments.get("dropout")))
        if "dropout" in node.op or probability is not None:  # attention and recurrent layers drop entries as well
            if training and probability:
                yield random_dropout(probability)
        elif node.op != "aten.rrelu" or (training and arguments["lower"] != arguments["upper"]):
            yield f"the operation '{node.op}' draws random numbers", NOT_RANDOM


def _integers(graph: Graph, node: Node, given: set[str]) -> Iterator[tuple[str, str]]:
    """Integers of the input may choose (ids, masks, conditions); they may not be computed with.

    They choose where no real number could stand in their place: an operation refuses 0.5 as an index.
    """
    read = given.intersection(node.inputs)
    picks = node.target is operator.getitem  # one of several results
    real = None if picks else next((spec.dtype for spec in node.specs if spec.is_real), None)
    if real and any(_runs(graph, node, {name: real}) for name in read):
        what = f"'{node.op}' computes with integers ({graph.specs(min(read))[0].dtype}) that come from the input"
        yield what, "Integer inputs can only be ids for an embedding, or masks: pass numbers as x.float()."


def _mixed_types(graph: Graph, node: Node) -> Iterator[tuple[str, str]]:
    """Tracing does not notice that two element types cannot be multiplied; running does."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):  # converts what it reads to one type
        return
    specs = {name: graph.specs(name)[0] for name in node.inputs}
    real = {name: spec.dtype for name, spec in specs.items() if spec.is_real}
    types = dict.fromkeys(real.values())
    if len(types) < 2 or _runs(graph, node, {}):
        return
    if _runs(graph, node, dict.fromkeys(real, next(iter(types)))):
        what = f"'{node.op}' multiplies {' by '.join(map(str, types))}"
        yield what, "Convert the model or the input, for example x = x.to(torch.float64) or model.double()."


def _runs(graph: Graph, node: Node, types: Mapping[str, torch.dtype]) -> bool:
    """Whether an operation accepts its arguments where these have other element types; tried on zeros."""
    try:
        _at_zero(graph, node, {name: _zeros(graph.specs(name)[0].shape, dtype) for name, dtype in types.items()})
    except Exception:  # kernels raise many types
        return False
    return True


def _at_zero(graph: Graph, node: Node, values: Mapping[str, Any]) -> Any:
    """The result of an operation where all tensors are zero but those that are given."""
    device = next((value.device for value in values.values()), None)
    others = {}
    for name in node.inputs:
        zeros = tuple(_zeros(spec.shape, spec.dtype, device) for spec in graph.specs(name))
        others[name] = zeros[0] if isinstance(graph.spec(name), Spec) else zeros
    with torch.no_grad():
        return node.run({**others, **values})


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Zeros that share one entry."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))

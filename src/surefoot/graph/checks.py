"""What the inputs of a captured model must be; what it must be itself is in :mod:`surefoot.program.checks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import CaptureError
from surefoot.graph.nodes import Node, Ref, Spec
from surefoot.graph.structure import Graph
from surefoot.program.checks import (  # noqa: F401 -- also by this name until all callers have the other one
    as_inputs,
    as_targets,
    check_inputs,
    check_model,
    differentiable_attention,
    is_loader,
    plainly,
    recordable,
    selected,
    unwrapped,
    with_gradients,
)  # fmt: skip

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def refuse_wrong_ids(graph: Graph, inputs: Sequence[Tensor]) -> None:
    """Refuse ids that an embedding does not have."""
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
    """
    given = {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    varies = {*graph.parameters, *graph.frozen, *(leaf for leaf in graph.inputs if leaf.spec.is_real)}
    masks = {leaf.name for leaf in graph.leaves.values() if leaf not in varies}
    for node in graph.nodes:
        if masks.issuperset(node.inputs):
            masks.add(node.name)
    suspects = masks & (given.keys() | graph.by_name.keys())
    suspects = {name for name in suspects if graph.specs(name)[0].dtype not in INTEGERS}
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
            result = at_zero(graph, node, read)
            if isinstance(result, Tensor) and result.dim() and bool(result.isneginf().all(dim=-1).any()):
                if any(bool(output.isnan().any()) for output in graph.run(parameters, inputs)):
                    what = "a mask hides everything from a row of the attention, and the model returns NaN"
                    remedy = "Leave at least one entry visible in each row, or drop the samples that have none."
                    raise CaptureError(what, where=node.module, remedy=remedy)
                return


def at_zero(graph: Graph, node: Node, values: Mapping[str, Any]) -> Any:
    """The result of an operation where all tensors are zero but those that are given."""
    device = next((value.device for value in values.values()), None)
    others = {}
    for name in node.inputs:
        several = tuple(zeros(spec.shape, spec.dtype, device) for spec in graph.specs(name))
        others[name] = several[0] if isinstance(graph.spec(name), Spec) else several
    with torch.no_grad():
        return node.run({**others, **values})


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Zeros that share one entry."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))

"""A network on each sample of a batch by itself, where that is the same function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.analysis import Analysis
from surefoot.graph.nodes import Node, Ref
from surefoot.graph.structure import Graph
from surefoot.operations.common import separate
from surefoot.operations.record import Form, record_of
from surefoot.theorems.linear import single_outputs

_MOST = 64  # samples; each needs one pass
_MOST_OUTPUTS = 128  # outputs of all samples; each needs one pass
_SIZES = ("shape", "size", "sizes")  # arguments of layout operations that are the shape of the result


@dataclass(frozen=True)
class Single:
    """The network on one sample, and each of its outputs as a function by itself; no outputs if there are many."""

    network: Analysis
    outputs: Sequence[Analysis]


def single_samples(analysis: Analysis, outputs: bool = True) -> tuple[Single, ...]:
    """The network on each sample; empty if samples interact, are many, or a single one is treated differently.

    Samples do not interact if row n of every tensor depends on row n of the input alone
    (:func:`~surefoot.operations.common.separate`). The graph of one sample has to be the same list of operations
    on the same parameters, buffers and numbers. Only the shapes that layout operations get as arguments may
    differ, by the number of samples: where they slice depends on the batch, a sample alone is another function.
    """
    x, graph = analysis.x, analysis.reading.graph
    if not isinstance(x, Tensor) or x.ndim < 2 or len(x) > _MOST:
        return ()
    if len(x) > 1 and not _do_not_interact(graph, len(x)):
        return ()
    networks = [Analysis.of(analysis.model, x[n : n + 1]) for n in range(len(x))] if len(x) > 1 else [analysis]
    if not all(_same(graph, one.reading.graph) for one in networks):
        return ()
    few = outputs and graph.numel(graph.outputs[0]) <= _MOST_OUTPUTS
    numbers = range(graph.numel(graph.outputs[0]) // len(x) if few else 0)
    return tuple(Single(one, list(map(single_outputs(one), numbers)) if few else ()) for one in networks)


def outputs_of_samples(analysis: Analysis) -> Callable[[int], Analysis]:
    """Each output of a batch, by its number, as a function by itself.

    It is a function of its sample alone if samples do not interact and a single one is treated in the same way.
    """
    one, x = first_alone(analysis), analysis.x
    if one is None:
        return single_outputs(analysis)
    (leaf,) = analysis.reading.graph.inputs
    each = one.reading.graph.numel(one.reading.graph.outputs[0])
    outputs, samples = list(map(single_outputs(one), range(each))), analysis.values[leaf.name]

    def output(number: int) -> Analysis:
        n, first = number // each, outputs[number % each]
        return replace(first, x=x[n : n + 1], values={**first.values, leaf.name: samples[n : n + 1]})

    return output


def first_alone(analysis: Analysis) -> Analysis | None:
    """The network on the first sample of several; ``None`` if samples interact or one is treated differently."""
    x, graph = analysis.x, analysis.reading.graph
    if not isinstance(x, Tensor) or x.ndim < 2 or not _do_not_interact(graph, len(x)):
        return None
    one = Analysis.of(analysis.model, x[:1])
    return one if _same(graph, one.reading.graph) else None


def _do_not_interact(graph: Graph, samples: int) -> bool:
    """Whether there are several samples of one input, each with its own row in every tensor."""
    several = samples > 1 and len(graph.inputs) == 1
    return several and separate(graph, graph.nodes, [graph.inputs[0].name], samples)


def _same(batch: Graph, one: Graph) -> bool:
    """Whether two graphs are the same, except that the first has several samples and the second has one."""
    if len(batch.nodes) != len(one.nodes) or batch.held.keys() != one.held.keys():
        return False
    if [leaf.path for leaf in batch.parameters] != [leaf.path for leaf in one.parameters]:
        return False
    if any(not torch.equal(value, one.held[name]) for name, value in batch.held.items()):
        return False
    samples = batch.inputs[0].spec.shape[0]
    return all(_alike(first, second, samples) for first, second in zip(batch.nodes, one.nodes, strict=True))


def _alike(first: Node, second: Node, samples: int) -> bool:
    """Whether two operations are the same up to the number of samples in the sizes of their results."""
    if (first.op, first.name, len(first.specs)) != (second.op, second.name, len(second.specs)):
        return False
    for several, one in zip(first.specs, second.specs, strict=True):
        if several.shape != one.shape and (several.shape[:1], one.shape) != ((samples,), (1, *several.shape[1:])):
            return False
    arguments, others = first.arguments, second.arguments
    moves = record_of(first).form_of(first) is Form.LAYOUT
    return arguments.keys() == others.keys() and all(
        _equal(value, others[name], samples if moves and name in _SIZES else None)
        for name, value in arguments.items()
    )


def _equal(a: Any, b: Any, samples: int | None) -> bool:
    """Whether two arguments are equal; in sizes, a number of samples and one are."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(s, t, samples) for s, t in zip(a, b, strict=True))
    if isinstance(a, Ref) or isinstance(b, Ref):
        return bool(a == b)
    return type(a) is type(b) and bool(a == b or (a, b) == (samples, 1))

"""From a model to a graph in the operations that have records; importing this registers every family."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from surefoot.graph import Graph, Node, capture_with
from surefoot.operations import (  # noqa: F401  registers the operations
    activations,
    arithmetic,
    attention,
    choices,
    conditions,
    convolution,
    formulas,
    inverses,
    layout,
    losses,
    matmul,
    maxima,
    normalisation,
    pooling,
    products,
    recurrent,
    scalar_functions,
    scaled,
    softmax,
    statistics,
    without_bounds,
    writing,
)
from surefoot.operations.record import record_of


def capture(model: nn.Module, x: Any) -> Graph:
    """Read a model as a graph of operations; see :func:`surefoot.graph.capture_with`.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> print(capture(model, torch.ones(2, 3)))
    Graph: 2 operations, 1 parameter block, returns relu
    linear  aten.linear  2×4  0
    relu    aten.relu    2×4  1
    """
    return capture_with(model, x, rewrite=canonical)


def canonical(nodes: Iterable[Node]) -> list[Node]:
    """The same computation in canonical operations.

    Of one with several results, such as a batch-normalisation that returns its statistics, the first is rewritten
    and the others are dropped.
    """
    several: dict[str, Node] = {}
    rewritten: list[Node] = []
    for node in nodes:
        rewrite = record_of(node).canonical
        if rewrite is not None and isinstance(node.spec, tuple):
            several[node.name] = node
        elif rewrite is not None:
            rewritten += rewrite(node)
        elif node.target is operator.getitem and node.args[0].name in several:
            whole = several[node.args[0].name]
            split = record_of(whole).canonical
            if node.args[1] == 0 and split is not None:
                rewritten += split(replace(whole, name=node.name, spec=node.spec))
        else:
            rewritten.append(node)
    return rewritten

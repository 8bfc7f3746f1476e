"""Rewriting a graph before the calculus reads it: the same function, in operations with sharp constants.

* ``casts``: changes of the floating-point type are the identity in real arithmetic.
* ``recurrent``: recurrent layers and cells, unrolled.
* ``attention``: scaled dot-product attention as products and a soft-max.
* ``masks``: soft-max of scores under a mask written out by hand, recognised.
* ``pieces``: gated units and cosine similarities taken apart, directions put together.
* ``rms``: root-mean-square normalisation written out by hand, recognised.
* ``fuse``: chains of scalar operations become one scalar function of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.calculus.prepare.attention import attention
from surefoot.calculus.prepare.casts import casts
from surefoot.calculus.prepare.fuse import fuse
from surefoot.calculus.prepare.masks import masks
from surefoot.calculus.prepare.pieces import pieces
from surefoot.calculus.prepare.recurrent import recurrent
from surefoot.calculus.prepare.rms import rms
from surefoot.graph.structure import Graph, Node


def prepared(graph: Graph) -> Graph:
    """The graph the calculus runs on; computed once per graph."""
    cached: Any = graph.__dict__.get("_prepared")
    if cached is None:
        cached = fuse(rms(pieces(masks(attention(recurrent(casts(graph)))))))
        cached = replace(cached, nodes=_needed(cached.nodes, cached.outputs))
        graph.__dict__["_prepared"] = cached
    return cached


def _needed(nodes: Sequence[Node], outputs: tuple[str, ...]) -> tuple[Node, ...]:
    """The nodes an output depends on."""
    wanted = set(outputs)
    kept = []
    for node in reversed(nodes):
        if node.name in wanted:
            kept.append(node)
            wanted.update(node.inputs)
    return tuple(reversed(kept))

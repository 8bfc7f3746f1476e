"""An operation along a segment, as its Taylor rule sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surefoot.graph.structure import Node
from surefoot.taylor.model import TaylorModel


@dataclass(frozen=True)
class Moving:
    """One operation and the Taylor models of its tensor arguments.

    Attributes:
        node: the operation.
        slots: its arguments along the segment, by slot.
        order: how many coefficients are wanted.
        norms: norms of operations in their data, kept from one segment to the next.
    """

    node: Node
    slots: dict[str, TaylorModel]
    order: int
    norms: Any = None

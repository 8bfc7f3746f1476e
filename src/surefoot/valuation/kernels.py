"""The formulas by which operations are computed in double precision, and kernels of torch that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph import Node
from surefoot.operations.record import record_of


def formula_of(node: Node) -> Callable[..., Any] | None:
    """The formula by which an operation is computed in double precision; ``None`` for torch's kernel.

    Raises:
        UnsupportedOperation: for anti-aliased interpolation to a width of one, which returns the first row in
            place of all.
    """
    if node.op.startswith("aten._upsample_") and node.op.endswith("_aa") and node.specs[0].shape[-1] == 1:
        raise UnsupportedOperation(
            f"'{node.op}' in {describe(node.module)}: torch computes anti-aliased interpolation to a width "
            "of one wrongly; use antialias=False, or average pooling"
        )
    return record_of(node).evaluate

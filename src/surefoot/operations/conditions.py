"""Comparisons of what varies: pieces of a scalar function of one tensor, jumps anywhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from surefoot.graph.structure import Graph, Node, Ref
from surefoot.operations.record import Expansion, declare, expansion
from surefoot.scalar import ScalarFunction

_CASTS = ("aten.to", "aten._to_copy", "aten.type_as")
CHOOSING = ("aten.where", "aten.masked_fill", "aten.mul", "aten.multiply", *_CASTS)
"""Operations that may read a condition."""
_PIECE = ScalarFunction | int | float


@dataclass(frozen=True)
class Condition:
    """Whether x is above a number; the number itself belongs to either side, as only jumps could tell."""

    edge: float  # the number
    above: bool  # whether it holds above it, or below

    def choose(self, yes: Any, no: Any) -> ScalarFunction | None:
        """One function where it holds, another where it does not."""
        if not isinstance(yes, _PIECE) or not isinstance(no, _PIECE):
            return None
        low, high = map(_pieces, (no, yes) if self.above else (yes, no))
        below = [pair for pair in low if pair[0] < self.edge]
        above = [(max(start, self.edge), piece) for start, piece in high]
        first = max(k for k, (start, _) in enumerate(above) if start == self.edge)
        starts, pieces = zip(*below, *above[first:], strict=True)
        return ScalarFunction.piecewise(starts[1:], pieces)


def _pieces(function: ScalarFunction | float) -> list[tuple[float, Any]]:
    """The pieces of a function of x, each with the place where it begins."""
    if isinstance(function, ScalarFunction):
        *steps, last = function.steps
        if last.op == "piecewise" and len(steps) == 1:
            return list(zip((-math.inf, *last.parameters), last.pieces, strict=True))
    return [(-math.inf, function)]


def _compared(above: bool) -> Any:
    def build(o: dict[str, Any]) -> Condition | None:
        first, second, up = o["self"], o["other"], above
        if isinstance(second, ScalarFunction):
            first, second, up = second, first, not above
        line = first.affine[-1] if isinstance(first, ScalarFunction) else None
        if line is None or not isinstance(second, int | float) or not line[0]:
            return None
        edge = (Fraction(second) - line[1]) / line[0]
        return Condition(float(edge), up is (line[0] > 0)) if Fraction(float(edge)) == edge else None

    return build


_ABOVE = ("aten.gt", "aten.ge", "aten.greater", "aten.greater_equal")
_BELOW = ("aten.lt", "aten.le", "aten.less", "aten.less_equal")
COMPARISONS = (*_ABOVE, *_BELOW)
declare(*_ABOVE, scalar=_compared(True), jumps=True)
declare(*_BELOW, scalar=_compared(False), jumps=True)
declare("aten.isnan", "aten.isinf", "aten.eq", "aten.ne", "aten.copysign", "aten.histc", "aten.mode",
        "aten.isclose", "aten.sign",
        "aten.sgn", "aten.signbit", "aten.heaviside", "aten.floor", "aten.ceil", "aten.round", "aten.trunc",
        "aten.fix", "aten.frac", "aten.fmod", "aten.remainder", "aten.floor_divide", "aten.argmax",
        "aten.argmin", "aten.argsort", "aten.bucketize", "aten.searchsorted", "aten.nonzero",
        "aten.fake_quantize_per_tensor_affine", "aten.fake_quantize_per_channel_affine", "aten.bernoulli",
        "aten.logical_and", "aten.logical_or", "aten.logical_not", "aten.renorm", "aten.bitwise_and",
        "aten.bitwise_or", "aten.bitwise_not", jumps=True)  # fmt: skip


def _where(o: dict[str, Any]) -> ScalarFunction | None:
    condition = o["condition"]
    return condition.choose(o["self"], o["other"]) if isinstance(condition, Condition) else None


def _filled(o: dict[str, Any]) -> ScalarFunction | None:
    condition = o["mask"]
    return condition.choose(o["value"], o["self"]) if isinstance(condition, Condition) else None


@expansion("aten.where")
def larger_or_smaller(graph: Graph, node: Node) -> Expansion | None:
    """The one of two tensors that compares as larger, or smaller."""
    condition = graph.by_name.get(getattr(node.arguments["condition"], "name", ""))
    pair = node.arguments["self"], node.arguments["other"]
    if condition is None or condition.op not in COMPARISONS or not all(isinstance(x, Ref) for x in pair):
        return None
    compared = condition.arguments["self"], condition.arguments["other"]
    if compared not in (pair, pair[::-1]):
        return None
    name = "maximum" if (condition.op in _ABOVE) is (compared == pair) else "minimum"
    target = getattr(torch.ops.aten, name).default
    return Expansion((replace(node, op=f"aten.{name}", target=target, args=pair, kwargs={}),))


def _times(o: dict[str, Any]) -> ScalarFunction | None:
    for factor, other in ((o["self"], o["other"]), (o["other"], o["self"])):
        if isinstance(factor, Condition):
            return factor.choose(other, 0.0)
    product: ScalarFunction = o["self"] * o["other"]
    return product


declare(*_CASTS, scalar=lambda o: o["self"] if isinstance(o["self"], Condition) else None)
declare("aten.where", scalar=_where)
declare("aten.mul", "aten.multiply", scalar=_times)
declare("aten.masked_fill", scalar=_filled)

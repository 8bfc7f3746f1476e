"""What a rule claims of one operation, and numbers that all rules use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.bounds.tensor_size import Size, consistent, unknown
from surefoot.magnitude import Magnitude, stack
from surefoot.norms import patch_overlap
from surefoot.program.ir import Node

ONE, HALF, ZERO, INFINITE = Magnitude.of(1.0), Magnitude.of(0.5), Magnitude.zero(), Magnitude.infinity()
UNIT = 2.0**-53
Pair = tuple[int, int]


@dataclass(frozen=True)
class Claim:
    """What a rule claims of one operation; positions are those of its arguments.

    Attributes:
        slopes: J, by position.
        bends: C, by pair of positions in order.
        size: the sizes of the result that follow from those of the arguments; its Lipschitz constants are empty.
        rounding: how far the result may be off as computed in double precision from exact arguments.
        orthogonal: whether arguments reach separate entries of the result.
        summands: how many products are added up in an entry.
    """

    slopes: Mapping[int, Magnitude]
    size: Size
    rounding: Magnitude = ZERO
    bends: Mapping[Pair, Magnitude] = field(default_factory=dict)
    orthogonal: bool = False
    summands: int = 1

    def combined(self, amounts: Sequence[Magnitude], shape: tuple[int, ...] = ()) -> Magnitude:
        """What amounts in the arguments come to in the result: slopes by the chain rule, or distances."""
        parts = [amounts[k] * slope for k, slope in self.slopes.items()]
        if not parts:
            return Magnitude.zero(shape)
        return stack(parts).norm(axis=0) if self.orthogonal else stack(parts).sum(axis=0)


def root(count: float) -> Magnitude:
    """The root of a whole number."""
    return Magnitude.of(count).sqrt()


def result(node: Node, **parts: Any) -> Size:
    """Sizes of a result, unbounded but for those that are given."""
    return consistent(replace(unknown(node.shape, ZERO), **parts))


def units(count: float, amount: Magnitude) -> Magnitude:
    """So many rounding errors of an amount, and as many of numbers that underflow."""
    return amount * (count * UNIT) + Magnitude.of(count) * 1e-300


def outward(number: float, sign: int) -> float:
    return number + sign * (abs(number) * 2.0**-48 + 1e-300) if math.isfinite(number) else sign * math.inf


def dims_of(node: Node, rank: int) -> tuple[int, ...]:
    return tuple(d % rank for d in node.options["dims"]) if rank else ()


def aligned(size: Size, shape: Sequence[int]) -> list[int | None]:
    """For each dimension of a shape, the one of a tensor that is repeated to it; None where it is repeated."""
    offset = len(shape) - len(size.shape)
    return [
        d - offset if d >= offset and size.shape[d - offset] == count else None for d, count in enumerate(shape)
    ]


def overlap_of(spatial: Sequence[int], kernel: Sequence[int], options: Mapping[str, Any]) -> int:
    return patch_overlap(
        tuple(spatial),
        tuple(kernel),
        options["stride"],
        options["padding"],
        options["dilation"],
    )

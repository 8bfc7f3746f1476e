"""Beyond the end of training, along the way from where it began: :class:`Way`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from surefoot.valuation.valuer import Evaluation

_HALF = 0.5  # how much further to look first
_NEAR = 1.5  # two parts that differ by less are not told apart


class Way:
    r"""The line from the parameters u₀ where training began through those u where it ends.

    Points :math:`u+t\,(u-u_0)`, t > 0, are beyond the end. Much of what single steps do is noise that cancels, so
    the whole way points better than any of them. A loss that is lowest at infinity, such as the cross-entropy of
    classes that the network tells apart, falls along it far beyond the end, where steps grow small with the
    gradient. Nothing relies on that: the point is evaluated, and t = 0 is what is left if it is not lower.

    Args:
        parameters: those that are trained, where training begins.

    Attributes:
        origin: their values there.
        part: how far beyond the end the last search went, t.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.origin = [parameter.detach().clone() for parameter in parameters]
        self.part = 0.0

    def go_on(
        self,
        parameters: Sequence[Tensor],
        here: Evaluation,
        look: Callable[[], float],
        evaluate: Callable[[], Evaluation | None],
        looks: int,
    ) -> Evaluation:
        """Move the parameters to the lowest point beyond, of as many as may be looked at, if it is proved lower.

        Args:
            parameters: where training ended, in the order of the first ones.
            here: the objective there.
            look: the objective at the present parameters, roughly; infinite where it is not finite.
            evaluate: the same, enclosed; ``None`` where it is not finite.
            looks: how many looks there may be.
        """
        ends = [parameter.detach().clone() for parameter in parameters]

        def place(part: float) -> None:
            with torch.no_grad():
                for parameter, end, first in zip(parameters, ends, self.origin, strict=True):
                    parameter.copy_(end + part * (end - first.to(end)) if part else end)

        lowest, lower, higher, part = here.value, 0.0, math.inf, self.part or _HALF
        for _ in range(looks):
            place(part)
            value = look()
            if value < lowest:
                lowest, lower = value, part
                part = 2 * part if higher == math.inf else math.sqrt(part * higher)
            else:
                higher = part
                part = math.sqrt(lower * part) if lower else part / 2
            if higher < _NEAR * lower:
                break
        place(lower)
        after = evaluate() if lower else None
        if after is None or not after.upper < here.lower:
            lower, after = 0.0, here
            place(lower)
        self.part = lower
        return after

r"""Lower bounds of the smoothness from differences of gradients, which see kinks.

Where :math:`Df` jumps, the second derivative at a point shows nothing, but for any two points
:math:`L \ge \|(Df(u) - Df(u'))^\top w\|_2 / \|u - u'\|_2` with :math:`\|w\|_2 = 1`. By the triangle inequality one
half of the segment has at least the ratio of the whole, so halving never loses: the ratio tends to the curvature
where there is one, and doubles with every halving at a kink.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.lower.function import Function

# Gradients in double precision are trusted to this relative error, which is taken off their difference.
_GRADIENT_ERROR = 1e-12
_HALVINGS = 24


def steepest_part(function: Function, first: Tensor, second: Tensor, w: Tensor) -> float:
    """The largest ratio met while halving the segment between two points.

    Args:
        function: differentiable almost everywhere.
        first: one end.
        second: the other end.
        w: a unit vector in the space of outputs.
    """
    a, b = first, second
    at_a, at_b = function.at(a).pull(w), function.at(b).pull(w)
    best = _ratio(a, b, at_a, at_b)
    for _ in range(_HALVINGS):
        middle = (a + b) / 2
        at_middle = function.at(middle).pull(w)
        left, right = _ratio(a, middle, at_a, at_middle), _ratio(middle, b, at_middle, at_b)
        if left >= right:
            b, at_b = middle, at_middle
        else:
            a, at_a = middle, at_middle
        best = max(best, left, right)
    return best


def _ratio(a: Tensor, b: Tensor, at_a: Tensor, at_b: Tensor) -> float:
    distance = float(torch.linalg.vector_norm(a - b))
    change = float(torch.linalg.vector_norm(at_a - at_b))
    error = _GRADIENT_ERROR * float(torch.linalg.vector_norm(at_a) + torch.linalg.vector_norm(at_b))
    return max(0.0, change - error) / distance if distance > 0 else 0.0


__all__ = ["steepest_part"]

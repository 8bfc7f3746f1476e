"""Scalar functions with kinks: where they are, and how curved the pieces between them are."""

from __future__ import annotations

import math
from functools import cache

import torch

from surefoot.scalar import ScalarFunction, supremum


@cache
def pieces(function: ScalarFunction) -> tuple[tuple[float, ...], float]:
    """The breaks of a piecewise function of x itself, and how curved its pieces are on the whole line; no breaks
    if the function has a Lipschitz derivative, or is not of this kind.
    """
    last = function.steps[-1]
    if last.op != "piecewise" or function.steps[last.operands[0]].op != "variable":
        return (), math.inf
    bend = max(float(supremum(piece, 2)) for piece in last.pieces)
    if not math.isfinite(bend) or math.isfinite(float(supremum(function, 2))):
        return (), math.inf
    return tuple(last.parameters), bend


@cache
def bends_by_pieces(function: ScalarFunction) -> bool:
    """Whether its curvature is bounded on the whole line, or on the pieces between its breaks."""
    return bool(pieces(function)[0]) or math.isfinite(float(supremum(function, 2)))


@cache
def steepness(function: ScalarFunction) -> tuple[float, float]:
    """The largest slope on the whole line, and the value at zero."""
    zero = torch.zeros(1, dtype=torch.float64)
    return float(supremum(function, 1)), float(function(zero))


@cache
def only_chooses(function: ScalarFunction) -> bool:
    """Whether every value is the argument, minus it, or a fixed number, as for rectifiers: nothing is rounded."""
    last = function.steps[-1]
    if last.op != "piecewise" or function.steps[last.operands[0]].op != "variable":
        return False
    lines = [piece.affine[-1] for piece in last.pieces]
    return all(line is not None and (line[0] == 0 or (abs(line[0]) == 1 and line[1] == 0)) for line in lines)

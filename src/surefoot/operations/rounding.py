r"""How far the computed value of a scalar function may be from the exact one.

A running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3): with
:math:`e_j` the error of the arguments of a step :math:`v = g(a_1, a_2)`,

.. math:: e \le \sum_j |\partial_j g|\,e_j + 8u\,|v| + 2^{-1022}

to first order, as elementary functions are computed with an error of at most 4 units in the last place, or
underflow. The second order is smaller by factors of :math:`u`; the result is doubled. It is infinite, or not a
number, where a derivative is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.scalar import ScalarFunction
from surefoot.scalar.primitives import PRIMITIVES

_UNIT = 2.0**-53
_LEAST = 2.0**-1022


def evaluation_error(function: ScalarFunction, x: Tensor) -> Tensor:
    """A bound on the error of ``function(x)`` in double precision, entry by entry, the entries of x being exact.

    >>> x = torch.tensor([1e-4], dtype=torch.float64)
    >>> cancelling = ScalarFunction.named("tanhshrink")
    >>> bool(evaluation_error(cancelling, x) > 1e-20), float(cancelling(x)) < 1e-12
    (True, True)
    """
    return 2.0 * _running(function, x)[2]


def _running(function: ScalarFunction, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, derivative in x and error."""
    values: list[Tensor] = []
    slopes: list[Tensor] = []
    errors: list[Tensor] = []
    for step in function.steps:
        arguments = [values[k] for k in step.operands]
        if step.op == "variable":
            value, slope, error = x, torch.ones_like(x), torch.zeros_like(x)
        elif step.op == "constant":
            value = torch.full_like(x, step.parameters[0])
            slope = error = torch.zeros_like(x)
        elif step.op == "piecewise":
            (argument,) = arguments
            value, partial, own = _running(step.pieces[0], argument)
            for point, piece in zip(step.parameters, step.pieces[1:], strict=True):
                above = argument > point
                parts = zip(_running(piece, argument), (value, partial, own), strict=True)
                value, partial, own = (torch.where(above, new, old) for new, old in parts)
            slope = partial * slopes[step.operands[0]]
            before = errors[step.operands[0]]
            error = torch.where(before > 0, partial.abs() * before, 0.0) + own
        else:
            with torch.enable_grad():
                leaves = [argument.detach().requires_grad_() for argument in arguments]
                value = PRIMITIVES[step.op].tensor(*leaves, *step.parameters)
                partials = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
            value = value.detach()
            slope, error = torch.zeros_like(x), 8 * _UNIT * value.abs() + _LEAST
            for k, partial in zip(step.operands, partials, strict=True):
                if partial is not None:
                    slope = slope + partial * slopes[k]
                    error = error + torch.where(errors[k] > 0, partial.abs() * errors[k], 0.0)
        values.append(value)
        slopes.append(slope)
        errors.append(error)
    return values[-1], slopes[-1], errors[-1]

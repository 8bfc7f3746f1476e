r"""Taylor series of scalar functions on tensors.

For a polynomial :math:`p(\eta) = p_0 + p_1\eta + … + p_k\eta^k` whose coefficients are tensors, and a scalar
function a applied entry by entry, the coefficients of :math:`a(p(\eta))` up to order k are found step by step
from those of the arguments of each step (:mod:`surefoot.scalar.recurrences`). A piecewise step has the
coefficients of the piece that its argument is in at :math:`\eta = 0`; at a break, of the piece before it.

They are floating-point numbers, not bounds; :func:`rounded_derivatives` returns them with bounds of their errors.
For the smooth activations the error is a few times what a change of x
by :math:`(1 + |x|)2^{-53}`, and of the other arguments by :math:`2^{-53}` of their size, may change; differences
that cancel (x - tanh x near 0, the derivatives of quotients x / (1 + x) far out) lose what cancels. Where a is not
differentiable (the square root at 0) they are infinite or not a number.

>>> from surefoot.scalar.function import ScalarFunction
>>> point = torch.zeros(2, dtype=torch.float64)
>>> [c.tolist() for c in derivatives(ScalarFunction.named("softplus"), point + 1e9, 2)]
[[1000000000.0, 1000000000.0], [1.0, 1.0], [0.0, 0.0]]
>>> taylor(ScalarFunction.named("square"), [point + 3.0, point + 1.0, None])[2]
tensor([1., 1.], dtype=torch.float64)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.scalar.function import ScalarFunction, Step
from surefoot.scalar.primitives import PRIMITIVES
from surefoot.scalar.recurrences import Coefficient, Coefficients
from surefoot.scalar.rounded import Rounded


def taylor(function: ScalarFunction, series: Sequence[Tensor | None]) -> list[Tensor | None]:
    r"""The Taylor coefficients of :math:`a(p(\eta))` at :math:`\eta = 0`, as many as there are of p.

    Those of p, tensors of one shape and dtype, may be None, which is zero, but for the first. So may those of the
    result, where they are zero whatever the numbers; they may share their memory with those of p.
    """
    x = series[0] if series else None
    if x is None:
        raise ValueError("expected a series whose first coefficient is a tensor; only later ones may be None")
    first, *rest = _evaluate(function, list(series))
    return [_full(first, x), *(None if c is None else _full(c, x) for c in rest)]


def derivatives(function: ScalarFunction, x: Tensor, order: int) -> list[Tensor]:
    r"""The Taylor coefficients :math:`a(x), a'(x), …, a^{(k)}(x)/k!` for k = ``order``, entry by entry.

    What :func:`taylor` returns for the polynomial :math:`x + \eta`, with fewer operations, and zeros instead of
    None.
    """
    series: Coefficients = [x, 1.0, *[None] * (order - 1)]
    return [_full(c, x) for c in _evaluate(function, series[: order + 1])]


def rounded_derivatives(function: ScalarFunction, x: Rounded, order: int) -> list[Rounded]:
    """The coefficients of :func:`derivatives` with proved bounds of their errors (:mod:`surefoot.scalar.rounded`).

    At a break the coefficients are those of the piece before it. Where an argument is not known well enough to say
    which piece it is in, the errors cover the pieces on both sides.
    """
    one = Rounded.exact(torch.ones_like(x.value))
    series: Coefficients = [x, one, *[None] * (order - 1)]
    zero = Rounded.exact(torch.zeros_like(x.value))
    coefficients = (c if isinstance(c, Rounded) else zero for c in _evaluate(function, series[: order + 1]))
    return [c.expand(x.value.shape) for c in coefficients]


def rounded_slope(function: ScalarFunction, x: Rounded) -> Rounded:
    """The first derivative with its error, which at a break covers those on both sides: torch's is one of them.

    Arguments count as off by the smallest number, so that it is not sure on which side of a break they are.
    """
    if any(step.op == "piecewise" for step in function.steps):
        x = Rounded(x.value, x.error + 2.0**-1074)
    return rounded_derivatives(function, x, 1)[1]


def _evaluate(function: ScalarFunction, p: Coefficients) -> Coefficients:
    """The coefficients of a function of a series; those of a constant are a number and None."""
    lift = Rounded.exact if isinstance(p[0], Rounded) else float
    values: list[Coefficients] = []
    for step in function.steps:
        arguments = [values[operand] for operand in step.operands]
        if step.op == "variable":
            values.append(p)
        elif step.op == "constant":
            values.append([lift(step.parameters[0]), *[None] * (len(p) - 1)])
        elif step.op == "piecewise":
            values.append(_piecewise(step, arguments[0]))
        else:
            values.append(_apply(step, arguments))
    return values[-1]


def _apply(step: Step, arguments: list[Coefficients]) -> Coefficients:
    """An elementary function: its value, then the recurrence, if there is anything but the values."""
    primitive = PRIMITIVES[step.op]
    heads = [argument[0] for argument in arguments]
    value = primitive.tensor(*(_lift(head) for head in heads), *step.parameters)
    if all(coefficient is None for argument in arguments for coefficient in argument[1:]):
        constant = not any(isinstance(head, Tensor | Rounded) for head in heads)
        return [float(value) if constant else value, *arguments[0][1:]]
    return primitive.series(value, *arguments, *step.parameters)


def _lift(value: Coefficient) -> Any:
    return value if isinstance(value, Tensor | Rounded) else torch.tensor(value, dtype=torch.float64)


def _piecewise(step: Step, argument: Coefficients) -> Coefficients:
    """The piece of every entry; a break belongs to the piece before it."""
    head = argument[0]
    if not isinstance(head, Tensor | Rounded):
        return _evaluate(step.pieces[bisect_left(step.parameters, head or 0.0)], argument)
    result = _evaluate(step.pieces[0], argument)
    for point, piece in zip(step.parameters, step.pieces[1:], strict=True):
        pairs = zip(_evaluate(piece, argument), result, strict=True)
        if isinstance(head, Rounded):
            above, unsure = head.value > point, ~((head.value - point).abs() > head.error * (1 + 2.0**-50))
            unsure = unsure & (head.error != 0)
            result = [_either(above, unsure, new, old) for new, old in pairs]
        else:
            above = head > point
            result = [_where(above, new, old, head) for new, old in pairs]
    return result


def _either(above: Tensor, unsure: Tensor, new: Coefficient, old: Coefficient) -> Coefficient:
    """``new`` above, else ``old``, with errors."""
    if new is old:
        return new
    first, second = (c if isinstance(c, Rounded) else Rounded.exact(c or 0.0) for c in (new, old))
    return first.choose(second, above, unsure)


def _where(above: Tensor, new: Coefficient, old: Coefficient, like: Tensor) -> Coefficient:
    """``new`` above, else ``old``."""
    if new is old:
        return new
    choices: list[Any] = [0.0 if choice is None else choice for choice in (new, old)]
    first, second = choices
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return torch.where(above, first, second)
    return first if first == second else torch.where(above, like.new_tensor(first), like.new_tensor(second))


def _full(coefficient: Coefficient, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of another one; numbers are expanded."""
    if isinstance(coefficient, Tensor):
        return coefficient
    return like.new_tensor(coefficient or 0.0).expand(like.shape)

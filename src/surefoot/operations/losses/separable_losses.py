r"""Losses that are sums over the entries of the outputs: all about them follows from their form.

The form is :math:`h(x) = c\sum_e(\mu_e\varphi(s_ex_e - t_e) - b_ex_e + k_e)` with a convex scalar function
:math:`\varphi` (:mod:`surefoot.operations.losses.form`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import norm
from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call, Moving, Slot
from surefoot.operations.common import root, top
from surefoot.operations.losses.factor import Factor, modest
from surefoot.operations.losses.form import Form, nearly
from surefoot.operations.losses.sums import (
    UNIT,
    compared,
    dense,
    divisor,
    keywords,
    near_loss,
    row_bounds,
    samples,
    times,
    weighted_sum,
)
from surefoot.operations.record import LossFacts, operation
from surefoot.scalar import Rounded, ScalarFunction, derivatives, rounded_derivatives, sup_on, supremum
from surefoot.scalar.bounds import HIGHEST_ORDER
from surefoot.taylor import FLOOR, TaylorModel, compose, passed_on, row_norms, shifted


class Separable:
    """A loss in this form: its bounds, its Taylor rule and the factor of its Hessian."""

    reason = "'{label}' has a kink where an output meets its target: use surefoot.objectives.Huber"
    value: Callable[..., Tensor]  # of outputs, targets and options
    at: Callable[..., Form]  # for targets, the shape of the outputs and options

    def extremes(self, **own: Any) -> tuple[float, float]:
        """Upper bounds of slope and curvature of an entry, whatever the targets, without c; by default unknown."""
        return math.inf, math.inf

    def register(self, name: str, options: Mapping[str, Any], nonnegative: bool) -> None:
        """Make it an operation, given its options with their usual values."""
        facts = LossFacts(
            self.value,
            convex=True,
            smooth=self._extremes((1,), **options)[1].is_finite,
            nonnegative=nonnegative,
            options=options,
        )
        readings = {
            "taylor": self.taylor,
            "pullback": self.pullback,
            "near": near_loss(self.pullback, self.second),
            "factor": self.factor,
            "error": self.error,
        }
        operation(name, loss=facts, rows=samples, **readings)(self.bounds)

    def bounds(self, call: Call) -> Bounds:
        r"""A sum over the entries, :math:`c\sum_e(\mu_e\varphi(s_ex_e - t_e) - b_ex_e + k_e)`
        (:mod:`surefoot.operations.losses.separable_losses`).

        The Hessian is diagonal, so that its norm is the largest of its entries, of a row as of all; an entry of
        the gradient is between its values at the ends of an interval, as :math:`\varphi` is convex. Where targets
        are not known, every entry has the largest slope and curvature there are.
        """
        outputs, targets, options = call["outputs"], call["targets"], dict(call.node.kwargs)
        count, x, y = outputs.shape[0], outputs.value, targets.value
        steepest, bend = self._extremes(outputs.shape, **options)
        if not isinstance(y, Tensor):
            return Bounds(
                jacobian={"outputs": steepest},
                curvature={("outputs", "outputs"): bend},
                reduction=outputs.numel,
                reason="" if bend.is_finite else self.reason.format(label=call.label),
            )
        form = self.at(y, outputs.shape, **options)
        low, high = (end.to(y.device).expand(outputs.shape) for end in outputs.interval())
        slope, change = minimum(norm(form.slopes(low, high)), steepest), Magnitude.infinity()
        least, most = form.bends(low, high, x)
        curvatures = minimum(top(most, count), bend)
        if isinstance(x, Tensor):
            here = form.curvatures(x)
            change = top(torch.maximum(most - here, here - least).nan_to_num(nan=torch.inf).clamp(min=0.0), count)
            at = form.slope(x)
            slope = minimum(slope, norm(at.value) + norm(at.error) + curvatures.max() * outputs.spread)
        size = Magnitude.of(form.size_at_zero(outputs.shape))
        reason = "" if curvatures.max().is_finite else self.reason.format(label=call.label)
        return row_bounds(call, slope, curvatures, change, offset=size, reason=reason)

    def pullback(self, call: Call, costate: Tensor) -> dict[Slot, Rounded]:
        """The gradient in the outputs."""
        outputs, targets = call["outputs"].value, call["targets"].value
        return {"outputs": self.at(targets, outputs.shape, **call.node.kwargs).slope(outputs) * costate}

    def second(self, call: Call, move: Tensor) -> tuple[Tensor, float]:
        """The diagonal of the Hessian times the squares of a move."""
        outputs, targets = call["outputs"].value, call["targets"].value
        bend = self.at(targets, outputs.shape, **call.node.kwargs).bend(outputs)
        error = (bend.error + bend.value.abs() * (4 * UNIT)).nan_to_num(nan=torch.inf)
        return (bend.value * move.square()).sum(), float(error.max()) if error.numel() else 0.0

    def error(self, call: Call, computed: Tensor) -> Magnitude:
        """How far the computed loss is from the exact one, measured by the sum of the form."""
        outputs, targets = call["outputs"].value, call["targets"].value
        total = self.at(targets, outputs.shape, **call.node.kwargs).proved(outputs)
        wrong = float((computed - total.value).abs() + total.error)
        return Magnitude.of(wrong) * (1 + 8 * UNIT) if wrong < math.inf else Magnitude.infinity()

    def _extremes(
        self, shape: Sequence[int], *, reduction: str = "mean", scale: float = 1.0, **own: Any
    ) -> tuple[Magnitude, Magnitude]:
        """The largest gradient and curvature, whatever the targets."""
        factor = Magnitude.of(scale) / divisor(shape, reduction) * (1 + 4 * UNIT)
        slope, bend = self.extremes(**own)
        return factor * slope * root(math.prod(shape)), factor * bend

    def taylor(self, moving: Moving) -> TaylorModel | None:
        r"""The loss along a segment: an entry :math:`\mu\varphi(\omega) - bx` is expanded like any scalar
        function, with suprema over what ω reaches.

        If :math:`\varphi''` jumps, two coefficients are known: :math:`\varphi'` is Lipschitz, and the remainder of
        Taylor's formula, with the exact slope of the outputs, needs no more. The rest of the outputs and
        :math:`E_2` count with the norm of the largest gradient of the row. On the way from the polynomial p to
        :math:`q = p + E_0 + \eta E_1` the gradient turns by the largest curvature within reach of q times the
        speed of the outputs, and bends by that times how fast they turn and half the largest third derivative
        times the square of the speed.

        *Round-off* is that of scalar functions (:mod:`surefoot.operations.scalar_taylor`): every coefficient is a
        sum of products, and off by some units times the sum of their absolute values besides the errors of the
        coefficients of φ.
        """
        pair = compared(moving)
        if pair is None:
            return None
        (outputs, targets), order = pair, moving.order
        shape = outputs.value.shape
        form = self.at(targets, shape, **moving.node.kwargs)
        factor, function = form.factor, form.function
        form = replace(form, factor=1.0).to(lambda numbers: numbers.expand(shape).reshape(shape[0], -1))
        if function is not None:
            order = min(order, 2 if any(step.pieces for step in function.steps) else HIGHEST_ORDER)
        outputs = outputs.truncated(order)
        x = [c.reshape(len(c), -1) for c in dense(outputs, order)]
        coefficients = [-form.linear * c for c in x]
        coefficients[0] = coefficients[0] + form.constant
        length, nothing = outputs.length, torch.zeros_like(x[0])
        first, second = outputs.errors[:, :1], outputs.errors[:, 1:2]
        least: list[Tensor | float] = [first + length * second + FLOOR, second + FLOOR, *[FLOOR] * (order - 2)]
        moves = [nothing if c is None else c for c in shifted(x, length, least)]
        sizes = [form.linear.abs() * size for size in (x[0].abs(), *moves[1:3])]
        sizes[0] = sizes[0] + form.constant.abs()
        rest, wrong, bends = nothing, [nothing] * len(sizes), [nothing, nothing]
        if function is not None:
            argument = [form.argument(x[0]), *(form.sign * c for c in x[1:])]
            exact = nearly(form.sign) * x[0] - nearly(form.shift)
            series = rounded_derivatives(function, Rounded(argument[0], exact.error), order)
            bent = [series[0].value, *compose([c.value for c in series], argument, 1, order - 1)]
            coefficients = [
                a if b is None else a + form.weight * b for a, b in zip(coefficients, bent, strict=True)
            ]
            farthest = moves[0] * (1 + 2.0**-26)
            low, high = form.reach(x[0] - farthest, x[0] + farthest)
            suprema = [sup_on(function, i, low, high) / math.factorial(i) for i in range(order + 1)]
            steps = [form.sign.abs() * move for move in moves]
            (left_out,) = compose([None, *suprema[1:]], [*steps, None], order, order)
            if left_out is not None:
                rest = times(form.weight, left_out.nan_to_num(nan=torch.inf, posinf=torch.inf))
            sizes = [
                a + times(form.weight, b) for a, b in zip(sizes, _errors(suprema[:order], steps), strict=True)
            ]
            wrong = [times(form.weight, error) for error in _errors([c.error for c in series[:order]], steps)]
            bends = [
                times(form.weight * form.sign.abs() ** i, i * suprema[i]) if i <= order else nothing
                for i in (2, 3)
            ]
        roundings = (sum(x[0].shape) + 64) * 2 * UNIT
        errors = [(size * roundings + error).sum(dim=1) for size, error in zip(sizes, wrong, strict=True)]
        errors += [nothing.sum(dim=1)] * (3 - len(errors))
        tail = torch.stack([rest.sum(dim=1), *errors], dim=1)
        if outputs.tail is not None:
            reach = outputs.move * (1 + 2.0**-26)
            slope = row_norms(form.slopes(x[0] - reach, x[0] + reach), rowwise=True) + FLOOR
            curvature, third = (bend.amax(dim=1, keepdim=True) for bend in bends)
            turn = curvature * outputs.speed
            bend = 0.0 if order == 2 else curvature * outputs.turn + outputs.speed.square() * third
            tail = tail + passed_on(outputs.tail, slope, turn, bend)
        rows = [c.sum(dim=1, keepdim=True) for c in coefficients]
        return weighted_sum(rows, tail, length, torch.full_like(rows[0], factor))

    def factor(self, outputs: Tensor, targets: Tensor, slope: Tensor | None, **options: Any) -> Factor:
        """R: the Hessian is diagonal, and so is R."""
        form = self.at(targets, outputs.shape, **options)
        roots = form.curvatures(outputs.double()).clamp(min=0.0).sqrt().to(outputs)
        roots = roots.reshape(outputs.shape[0], -1)
        if slope is None:
            return Factor(roots, outputs.shape)
        ratio = torch.where(slope == 0, 0.0, slope / roots)
        return Factor(roots, outputs.shape, ratio if modest(ratio) else None)


@dataclass(frozen=True, eq=False)
class Entrywise(Separable):
    """A loss given by its form; see :func:`separable` for the attributes."""

    form: Callable[..., Form]
    sum_of: Callable[..., Tensor] | None
    largest: Callable[..., tuple[float, float]] | None
    reason: str

    def value(
        self, outputs: Tensor, targets: Tensor, *, reduction: str = "mean", scale: float = 1.0, **own: Any
    ) -> Tensor:
        """The sum over the entries, by its own function or from the form."""
        if self.sum_of is None:
            total = self.form(targets, **own).total(outputs)
        else:
            total = self.sum_of(outputs, targets.to(outputs.dtype), **own)
        return scale * total / divisor(outputs.shape, reduction)

    def at(
        self, targets: Tensor, shape: Sequence[int], *, reduction: str = "mean", scale: float = 1.0, **own: Any
    ) -> Form:
        """The form, with c."""
        return replace(self.form(targets, **own), factor=float(scale / divisor(shape, reduction)))

    def extremes(self, **own: Any) -> tuple[float, float]:
        """Those that were given."""
        return super().extremes() if self.largest is None else self.largest(**own)


def separable(
    name: str,
    form: ScalarFunction | Callable[..., Form],
    *,
    sum_of: Callable[..., Tensor] | None = None,
    extremes: Callable[..., tuple[float, float]] | None = None,
    nonnegative: bool = False,
    reason: str = Separable.reason,
) -> str:
    r"""Register a convex loss that is a sum over the entries; what else any reading needs is derived.

    Args:
        name: of the operation.
        form: a convex function φ, for the loss :math:`\sum_e\varphi(\hat y_e - y_e)`; or what makes a
            :class:`Form` without c of the targets and of options, which are keyword-only.
        sum_of: computes the sum from outputs, targets and these options, where that is better than the form.
        extremes: upper bounds of slope and curvature of an entry for these options, whatever the targets; by
            default those of φ, or unknown.
        nonnegative: whether the loss is never below zero.
        reason: why the curvature may be infinite, and what to do about it.

    Returns:
        The name.

    Raises:
        SurefootError: if a point was found at which φ is not convex.
    """
    if isinstance(form, ScalarFunction):
        function = form
        with torch.device("cpu"):
            bends = derivatives(function, torch.linspace(-50, 50, 4001, dtype=torch.float64), 2)[2]
        if bool((bends < -1e-9 * bends.abs().nan_to_num().max()).any()):
            raise SurefootError(f"'{name}' is no convex function of the differences: it bends downwards")
        form = partial(_of_differences, function)
        extremes = extremes or (lambda: (supremum(function, 1), supremum(function, 2)))
    loss = Entrywise(form, sum_of, extremes, reason)
    with torch.device("cpu"):  # whatever the default is while losses are loaded
        loss.register(name, {**keywords(loss.form), "reduction": "mean", "scale": 1.0}, nonnegative)
    return name


def _of_differences(function: ScalarFunction, targets: Tensor) -> Form:
    return Form.of(targets, function, shift=targets.double())


def _errors(wrong: list[Tensor], moves: list[Tensor]) -> list[Tensor]:
    """What errors of the coefficients of φ come to in the value, the slope and, if known, the rest."""
    distance, speed, *turn = moves
    found = [wrong[0], times(speed, wrong[1])]
    if turn:
        later = sum((times(distance**i, error) for i, error in enumerate(wrong[3:], start=1)), wrong[2])
        found.append(times(turn[0], wrong[1]) + times(speed.square(), later))
    return found

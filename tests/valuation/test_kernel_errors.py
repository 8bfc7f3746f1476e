"""What is assumed of torch's kernels: values against ball arithmetic, pull-backs against differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import flint
import pytest
import torch
from torch import Tensor, nn

from operations.catalogue import CASES, built
from surefoot.calculus.leaves import captured
from surefoot.errors import UnsupportedOperation
from surefoot.graph.nodes import double_by_default, in_double, widened
from surefoot.operations.record import records
from surefoot.scalar import ScalarFunction, supremum
from surefoot.scalar.enclosure import _value_at
from surefoot.valuation.kernels import formula_of
from surefoot.valuation.kinks import only_chooses
from surefoot.valuation.rounding import _KERNEL
from surefoot.valuation.tape import PULL, Tape, tape_of
from valuation.elementwise import OPERATIONS, Scalar, numbers

_STENCIL = torch.tensor([-1 / 60, 3 / 20, -3 / 4, 0, 3 / 4, -3 / 20, 1 / 60], dtype=torch.float64)
_LEFT_OUT = {  # ties, and what is refused
    ("aten.max_pool2d", 3), ("aten._upsample_bilinear2d_aa", 1),
}  # fmt: skip


class _Behind(nn.Module):
    """A function of an input that a parameter enters."""

    def __init__(self, function: Scalar) -> None:
        super().__init__()
        self.shift, self.function = nn.Parameter(torch.zeros(1, dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + self.shift)


def _tape(function: Scalar) -> Tape:
    return tape_of(captured(_Behind(function), numbers())[0])


def test_every_element_wise_operation_is_tried() -> None:
    assert {name for name, record in records().items() if record.scalar is not None} == set(OPERATIONS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_element_wise_kernels_are_within_64_units(op: str) -> None:
    r"""And those that only choose round nothing."""
    for label, function in OPERATIONS[op].items():
        tape, x = _tape(function), numbers()
        node = tape.varying[-1]
        asked = tape.asked[node.name]
        if asked.op != "surefoot.scalar":  # affine, or of another form
            continue
        scalar: ScalarFunction = asked.args[1]
        with torch.no_grad():
            values = tape._compute(node, {**tape.graph.constants, **tape.graph.held, node.inputs[0]: x})
        worst = 0.0 if only_chooses(scalar) else _KERNEL
        steepest = float(supremum(scalar, 1))
        for at, computed in zip(x.tolist(), values.tolist(), strict=True):
            if not math.isfinite(computed):
                continue
            steepness = steepest if math.isfinite(steepest) else _slope(scalar, at)
            allowed = worst * (abs(computed) + steepness * abs(at)) + 2.0**-1000
            with flint.ctx.workprec(300):
                exact = _value_at(scalar, Fraction(at))
                if exact.is_finite():
                    assert abs(flint.arb(computed) - exact) <= flint.arb(allowed), (op, label, at, computed)


def _slope(scalar: ScalarFunction, at: float) -> float:
    x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(scalar(x).sum(), x)
    return abs(float(slope)) if bool(slope.isfinite()) else 0.0


def _pulled_back_wrongly(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> float:
    """How far pull-backs are from differences of high order, relative to themselves."""
    points = [argument.detach().clone().requires_grad_() for argument in arguments]
    value = function(*points)
    if not value.requires_grad or not value.numel():
        return 0.0
    costate = torch.randn(value.shape, dtype=torch.float64)
    slopes = torch.autograd.grad(value, points, costate, allow_unused=True, materialize_grads=True)
    worst = 0.0
    for k, point in enumerate(points):
        direction = torch.randn(point.shape, dtype=torch.float64)
        if not point.numel():
            continue
        direction /= direction.norm()
        along, distances = float((slopes[k] * direction).sum()), []
        for step in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
            with torch.no_grad():
                moved = [
                    (function(*points[:k], point + j * step * direction, *points[k + 1 :]) * costate).sum()
                    for j in range(-3, 4)
                ]
            distances.append(abs(float((torch.stack(moved) * _STENCIL).sum() / step) - along))
        worst = max(worst, min(distances) / max(float(slopes[k].norm()), 1e-4 * float(costate.norm())))
    return worst


@pytest.mark.parametrize("op", CASES)
def test_pull_backs_are_good_to_thirty_bits(op: str) -> None:
    for k in range(len(CASES[op])):
        if (op, k) in _LEFT_OUT:
            continue
        case = built(op, k)

        def function(*arguments: Tensor, case=case) -> Tensor:
            values = {name: in_double(value) for name, value in case.values.items()}
            values |= dict(zip(case.variables, arguments, strict=True))
            with double_by_default():
                for node in case.graph.nodes:
                    values[node.name] = widened(node, formula_of(node)).run(values)
            result = values[case.graph.outputs[0]]
            return result if isinstance(result, Tensor) else next(r for r in result if r.is_floating_point())

        assert _pulled_back_wrongly(function, [case.values[name].double() for name in case.variables]) <= PULL


@pytest.mark.parametrize("op", OPERATIONS)
def test_pull_backs_of_element_wise_kernels_are_good_to_thirty_bits(op: str) -> None:
    positive = op in ("aten.log", "aten.log1p", "aten.sqrt", "aten.rsqrt", "aten.pow")
    x = torch.randn(50, dtype=torch.float64) * 2
    x = x[((x * 2).round() - x * 2).abs() > 0.2]  # not at breaks
    x = x.abs() + 0.3 if positive else x[(x.abs() > 0.2) & ((x - 0.2).abs() > 0.1)]
    for label, function in OPERATIONS[op].items():
        tape = _tape(function)
        node = tape.varying[-1]
        fixed = {**tape.graph.constants, **tape.graph.held}
        wrong = _pulled_back_wrongly(lambda t: tape._compute(node, {**fixed, node.inputs[0]: t}), [x])  # noqa: B023
        assert wrong <= PULL, label


def test_an_operation_whose_kernel_is_wrong_is_refused() -> None:
    """Torch interpolates to a width of one wrongly; if that is mended, the refusal may go."""
    function = lambda x: torch.ops.aten._upsample_bilinear2d_aa.vec(x, [2, 1], False, None)  # noqa: E731
    unit = torch.zeros(1, 1, 4, 1, dtype=torch.float64)
    unit[0, 0, 3, 0] = 1
    assert float(function(unit)[0, 0, 1, 0]) == 0  # should be 3/7
    graph, _ = captured(_Behind(lambda x: function(x.reshape(1, 1, 4, 1))), torch.ones(4, dtype=torch.float64))
    with pytest.raises(UnsupportedOperation, match="antialias=False"):
        tape_of(graph)

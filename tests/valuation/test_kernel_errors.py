"""What is assumed of torch's kernels: values against ball arithmetic, pull-backs against differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import flint
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from operations.catalogue import CASES, built
from surefoot.calculus.leaves import captured
from surefoot.enclosure import constant
from surefoot.errors import UnsupportedOperation
from surefoot.graph.nodes import double_by_default, in_double, widened
from surefoot.operations.call import Call
from surefoot.operations.record import record_of, records, rules
from surefoot.scalar import ScalarFunction, supremum
from surefoot.scalar.enclosure import _value_at
from surefoot.valuation.entropy import _spread, entropy
from surefoot.valuation.kernels import formula_of
from surefoot.valuation.kinks import only_chooses
from surefoot.valuation.normalising import normalised, recipe_of
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
    known = {name for name, record in records().items() if record.scalar is not None and not record.jumps}
    # scalar functions where a condition on their argument chooses, or is a number itself
    chosen = {"aten.where", "aten.masked_fill", "aten.to", "aten._to_copy", "aten.type_as"}
    assert known - chosen - {"aten.special_erfcx"} == set(OPERATIONS) - {"aten.sign"}  # which tests/additions adds


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


_NORMS = {
    "layer": (lambda x: torch.layer_norm(x, [6]), (5, 6)),
    "tokens": (lambda x: torch.layer_norm(x, [3, 100]), (4, 3, 100)),
    "root": (lambda x: torch.rms_norm(x, [6]), (5, 6)),
    "group": (lambda x: torch.group_norm(x, 2), (3, 4, 5)),
    "batch": (lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False), (100, 3)),
    "images": (lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-3, False), (70, 3, 9, 9)),
    "instance": (lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False), (3, 2, 70)),
}


@pytest.mark.parametrize("name", _NORMS)
@pytest.mark.parametrize("mean", [0.0, 5.0, 1e4])
def test_normalisations_in_few_passes(name: str, mean: float) -> None:
    """Values within their error of those of the careful formula within its own, and pull-backs."""
    function, shape = _NORMS[name]
    x = torch.randn(shape, dtype=torch.float64) * 2 + mean
    graph, _ = captured(_Behind(function), x)
    node = tape_of(graph).varying[-1]
    recipe = recipe_of(node)
    assert recipe is not None
    fast = normalised(recipe, x)
    assert fast is not None
    value, facts, _ = fast
    call = Call(node, {node.inputs[0]: constant(x, 0)})
    record = record_of(node)
    assert record.error is not None
    careful = widened(node, record.evaluate).run({node.inputs[0]: x})
    proved = record.error(call, careful)
    assert proved is not None
    assert float((value - careful).norm()) <= facts.error + float(proved)
    steepness, bend = facts.slopes(0.0)
    bounds = rules()[node.op](call)
    assert float(bounds.jacobian["input"]) <= steepness * (1 + 1e-6)
    assert float(bounds.curvature["input", "input"]) <= bend * (1 + 1e-6)
    if mean < 1e3:  # differences of larger numbers tell less

        def again(t: Tensor) -> Tensor:
            found = normalised(recipe, t)
            assert found is not None
            return found[0]

        assert _pulled_back_wrongly(again, [x]) <= PULL


def test_a_normalisation_out_of_range_is_left_to_the_careful_formula() -> None:
    graph, _ = captured(_Behind(_NORMS["layer"][0]), torch.randn(5, 6, dtype=torch.float64))
    recipe = recipe_of(tape_of(graph).varying[-1])
    assert recipe is not None
    x = torch.randn(5, 6, dtype=torch.float64)
    for far in (x * 1e200, x + 1e12, x * torch.nan):
        assert normalised(recipe, far) is None


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_the_logistic_loss_and_its_pull_back(size: float) -> None:
    outputs, labels = torch.randn(7, 4, dtype=torch.float64) * size, torch.tensor([0, 1, 2, 3, 0, 1, 2])
    for options in ({}, {"reduction": "sum"}, {"scale": 3.0}):
        graph, _ = captured(nn.Linear(4, 4, bias=False).double(), outputs, sf.CrossEntropy(labels, **options))
        node = tape_of(graph).varying[-1]
        first, second = node.inputs
        loss = entropy(node, {first: outputs, second: labels})
        assert loss is not None
        careful = torch.nn.functional.cross_entropy(outputs, labels, reduction="sum") * options.get("scale", 1.0)
        careful = careful / (1 if options.get("reduction") else 7)
        assert abs(float(loss[0] - careful)) <= loss[1].error + 1e-13 * size

        def again(t: Tensor, node=node, second=second) -> Tensor:
            found = entropy(node, {node.inputs[0]: t, second: labels})
            assert found is not None
            return found[0]

        assert _pulled_back_wrongly(again, [outputs]) <= PULL


@pytest.mark.parametrize("size", [0.0, 0.1, 3.0, 40.0, 700.0])
@pytest.mark.parametrize("classes", [1, 2, 10])
@flint.ctx.workprec(200)
def test_a_logistic_loss_is_as_exact_and_as_sure_as_it_says(size: float, classes: int) -> None:
    """Against ball arithmetic: the value, the sum of all :math:`te^{-t}` and the largest s."""
    torch.manual_seed(0)
    labels = torch.arange(70) % classes
    for sure in (0.0, size):  # of the classes
        outputs = size * torch.randn(70, classes, dtype=torch.float64)
        outputs += 20 * sure * nn.functional.one_hot(labels, classes)
        graph, _ = captured(nn.Linear(classes, classes, bias=False).double(), outputs, sf.CrossEntropy(labels))
        node = tape_of(graph).varying[-1]
        loss = entropy(node, dict(zip(node.inputs, (outputs, labels), strict=True)))
        assert loss is not None
        spread, total, largest, others = flint.arb(0), flint.arb(0), flint.arb(0), classes - 1
        for row, label in zip(outputs.tolist(), labels.tolist(), strict=True):
            away = sorted(flint.arb(max(row)) - flint.arb(number) for number in row)
            shares = [(-t).exp() for t in away[1:]]
            s = sum(shares, flint.arb(0))
            largest = s if s > largest else largest
            spread += sum((t * share for t, share in zip(away[1:], shares, strict=True)), flint.arb(0))
            total += flint.arb(max(row)) - flint.arb(row[label]) + s.log1p()
        assert abs(flint.arb(float(loss[0])) - total / 70) <= flint.arb(loss[1].error)
        assert largest <= flint.arb(loss[1].doubt)
        share = (1 + loss[1].doubt) * float(total.mid()) / 70 * (1 + 1e-9) + 2.0**-1000
        assert spread / 70 <= flint.arb(_spread(share, others) * (1 + 1e-9))


@pytest.mark.parametrize("size", [0.1, 3.0, 40.0, 2000.0])
@flint.ctx.workprec(200)
def test_every_entry_of_the_gradient_of_a_logistic_loss_is_good_relative_to_itself(size: float) -> None:
    """Against ball arithmetic, but for entries that underflow; however sure of right or wrong classes it is."""
    torch.manual_seed(0)
    labels = torch.arange(12) % 4
    outputs = size * (torch.randn(12, 4, dtype=torch.float64) + nn.functional.one_hot(labels, 4))
    outputs[0] = 0.0  # where several are the largest
    graph, _ = captured(nn.Linear(4, 4, bias=False).double(), outputs, sf.CrossEntropy(labels))
    node = tape_of(graph).varying[-1]
    outputs.requires_grad_()
    loss = entropy(node, dict(zip(node.inputs, (outputs, labels), strict=True)))
    assert loss is not None
    (found,) = torch.autograd.grad(loss[0], outputs)
    for row, label, slopes in zip(outputs.tolist(), labels.tolist(), found.tolist(), strict=True):
        shares = [(flint.arb(number) - flint.arb(max(row))).exp() for number in row]
        others = sum((share for k, share in enumerate(shares) if k != label), flint.arb(0))
        for k, slope in enumerate(slopes):
            exact = (-others if k == label else shares[k]) / (shares[label] + others) / 12
            assert abs(flint.arb(slope) - exact) <= abs(exact) * 2.0**-40 + flint.arb(2.0**-1000)


@pytest.mark.parametrize("size", [0.1, 3.0, 40.0, 300.0])
def test_a_logistic_loss_is_at_most_as_curved_as_it_says(size: float) -> None:
    """Against the dense Hessian, at the point and at moves in the worst of many directions."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 2, 3, 0])

    def loss(outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels)

    for moved in (0.0, 0.1, 1.0, size, 1e4):  # a move by the size makes a row unsure
        outputs = torch.randn(5, 4, dtype=torch.float64) + size * nn.functional.one_hot(labels, 4)
        graph, _ = captured(nn.Linear(4, 4, bias=False).double(), outputs, sf.CrossEntropy(labels))
        node = tape_of(graph).varying[-1]
        found = entropy(node, dict(zip(node.inputs, (outputs, labels), strict=True)))
        assert found is not None
        top = (outputs.amax(dim=1, keepdim=True) == outputs).double()
        towards = [torch.randn(5, 4, dtype=torch.float64) for _ in range(8)]
        for step in (*towards, -top, *(row[:, None] * (1 - 2 * top) for row in torch.eye(5, dtype=torch.float64))):
            point = outputs + moved * step / step.norm()
            hessian = torch.autograd.functional.hessian(loss, point).reshape(20, 20)
            assert float(torch.linalg.matrix_norm(hessian, 2)) <= found[1].curvature(moved) * (1 + 1e-9)


def test_an_operation_whose_kernel_is_wrong_is_refused() -> None:
    """Torch interpolates to a width of one wrongly; if that is mended, the refusal may go."""
    function = lambda x: torch.ops.aten._upsample_bilinear2d_aa.vec(x, [2, 1], False, None)  # noqa: E731
    unit = torch.zeros(1, 1, 4, 1, dtype=torch.float64)
    unit[0, 0, 3, 0] = 1
    assert float(function(unit)[0, 0, 1, 0]) == 0  # should be 3/7
    graph, _ = captured(_Behind(lambda x: function(x.reshape(1, 1, 4, 1))), torch.ones(4, dtype=torch.float64))
    with pytest.raises(UnsupportedOperation, match="antialias=False"):
        tape_of(graph)
